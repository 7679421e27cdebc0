"""The identity file: made once, private, never overwritten; signatures and peer ids."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest
from hivemind.p2p import PeerID

from meshd.errors import ResourceError
from meshd.identity import Identity, peer_id_of, public_key_of, verify


def test_created_once_then_loaded(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state" / "identity"
    first, created = Identity.load_or_create(path)
    again, created_again = Identity.load_or_create(path)
    assert (created, created_again) == (True, False)
    assert first.peer_id == again.peer_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["identity"]


def test_peer_id_is_the_one_that_hivemind_reads_from_the_public_key(tmp_path: Path) -> None:
    identity, _ = Identity.load_or_create(tmp_path / "identity")
    assert identity.peer_id.startswith("12D3KooW")
    multihash = PeerID.from_base58(identity.peer_id).to_bytes()
    assert multihash == b"\x00\x24\x08\x01\x12\x20" + identity.public_key
    assert peer_id_of(identity.public_key) == identity.peer_id
    assert public_key_of(identity.peer_id) == identity.public_key


def test_peer_id_of_a_known_key() -> None:
    """From the libp2p specification's test vectors (peer-ids, Ed25519): the key of which the id is the hash."""
    key = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
    assert (
        PeerID.from_base58(peer_id_of(key)).to_bytes().hex()
        == "0024080112201ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    )


@pytest.mark.parametrize(
    "wrong", ["", "12D3KooW", "QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWnPbdG", "0OIl", "1" * 52]
)
def test_other_texts_are_no_peer_ids(wrong: str) -> None:
    with pytest.raises(ValueError):
        public_key_of(wrong)


def test_signatures(tmp_path: Path) -> None:
    identity, _ = Identity.load_or_create(tmp_path / "a")
    other, _ = Identity.load_or_create(tmp_path / "b")
    signature = identity.sign(b"data")
    assert verify(identity.public_key, signature, b"data")
    assert not verify(identity.public_key, signature, b"datA")
    assert not verify(other.public_key, signature, b"data")
    assert not verify(b"short", signature, b"data")
    assert not verify(identity.public_key, b"short", b"data")


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x08\x01\x12\x40" + bytes(64), b"\x08\x00\x12\x40" + bytes(64)]
)
def test_a_file_that_is_no_identity_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity"
    path.write_bytes(content)
    with pytest.raises(ResourceError, match=r"is not a meshd identity.*Fix: name another file"):
        Identity.load_or_create(path)
    assert path.read_bytes() == content


def test_no_permission_is_said_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "link", denied)  # root may write anywhere, so the system's refusal is put in
    path = tmp_path / "identity"
    with pytest.raises(
        ResourceError, match=f"cannot write the identity file {path}: Permission denied. Fix: .*{tmp_path}"
    ):
        Identity.load_or_create(path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_its_place_is_said(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cannot read the identity file"):
        Identity.load_or_create(tmp_path)


def test_c16_a_new_identity_beside_existing_state_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "meshd.identity"):
        Identity.load_or_create(tmp_path / "fresh" / "identity")
        assert caplog.records == []
        (tmp_path / "used").mkdir()
        (tmp_path / "used" / "snapshots").mkdir()
        Identity.load_or_create(tmp_path / "used" / "identity")
        assert len(caplog.records) == 1
        assert "beside existing state (snapshots)" in caplog.text
        Identity.load_or_create(tmp_path / "used" / "identity")
    assert len(caplog.records) == 1
