"""Signed records: what is believed, what is refused and why."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer

from meshd.discovery.records import (
    MAX_AHEAD_S,
    MAX_ENVELOPE_BYTES,
    Opener,
    RecordBook,
    open_envelope,
    seal,
    withdrawn,
)
from meshd.discovery.validator import RecordValidator, dht_key
from meshd.identity import Identity
from meshd.proto import meshd_pb2 as pb

RUN, OTHER_RUN = "ab" * 20, "cd" * 20
NOW = 1_000_000.0


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "identity")[0]


@pytest.fixture
def stranger(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "stranger" / "identity")[0]


def record_of(identity: Identity, **fields: object) -> pb.Record:
    values: dict[str, object] = {
        "run_id": RUN,
        "peer_id": identity.peer_id,
        "role": pb.ROLE_STAGE,
        "stage": 1,
        "state": pb.PEER_STATE_WORKING,
        "address": "10.0.0.1:7000",
        "incarnation": 5,
        "version": 3,
        "expires": NOW + 60,
        **fields,
    }
    return pb.Record(**values)  # type: ignore[arg-type]


def forged(identity: Identity, content: pb.Record, /, **replace: bytes) -> bytes:
    """An envelope signed by `identity`, whatever it says, with parts replaced."""
    body = content.SerializeToString()
    parts = {
        "record": body,
        "public_key": identity.public_key,
        "signature": identity.sign(b"meshd-record-v1:" + body),
        **replace,
    }
    return pb.RecordEnvelope(**parts).SerializeToString()


def test_a_sealed_record_is_opened(identity: Identity) -> None:
    record = record_of(identity, maddrs=["/ip4/10.0.0.1/tcp/1"], committed=[pb.Count(origin="x", tokens=4)])
    assert open_envelope(seal(record, identity), RUN, NOW) == record


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"run_id": OTHER_RUN}, "belongs to run 'cdcd"),
        ({"expires": NOW}, "expired 0.0 s ago"),
        ({"expires": NOW + MAX_AHEAD_S + 60}, "expires 660 s ahead"),
        ({"expires": math.inf}, "not finite"),
        ({"expires": math.nan}, "not finite"),
        ({"tokens_per_s": -1.0}, "tokens_per_s = -1.0"),
        ({"tokens_per_s": math.nan}, "not finite"),
        ({"claimed": -math.inf}, "not finite"),
        ({"moving_since": math.nan}, "not finite"),
        ({"capacity_tokens_per_s": math.inf}, "not finite"),
        ({"capacity_tokens_per_s": -1.0}, "capacity_tokens_per_s = -1.0"),
        ({"stage": -2}, "stage -2"),
        ({"role": pb.ROLE_UNSPECIFIED}, "unknown role 0"),
        ({"role": 77}, "unknown role 77"),
        ({"state": 77}, "unknown state 77"),
        ({"name": "x" * 65}, "name of 65 characters"),
        ({"maddrs": ["/ip4/1.2.3.4/tcp/1"] * 9}, "9 libp2p addresses"),
        ({"address": "x" * 257}, "address longer than 256"),
        ({"maddrs": ["x" * 257]}, "address longer than 256"),
        ({"committed": [pb.Count(origin="x", tokens=1)] * 257}, "counts of 257 origins"),
    ],
)
def test_well_signed_records_out_of_bounds_are_refused(
    identity: Identity, fields: dict[str, object], reason: str
) -> None:
    refusal = open_envelope(forged(identity, record_of(identity, **fields)), RUN, NOW)
    assert isinstance(refusal, str)
    assert reason in refusal


def test_forgeries_are_refused(identity: Identity, stranger: Identity) -> None:
    record = record_of(identity)
    tampered = record_of(identity, stage=0).SerializeToString()
    cases: dict[str, bytes] = {
        "signature does not fit": forged(identity, record, record=tampered),
        "peer id does not belong to the public key": forged(stranger, record),
        "public key is not 32 bytes": forged(identity, record, public_key=b"x"),
        "not a record envelope": b"\xff\xff\xff",
        f"more than {MAX_ENVELOPE_BYTES}": b"x" * (MAX_ENVELOPE_BYTES + 1),
    }
    for reason, data in cases.items():
        refusal = open_envelope(data, RUN, NOW)
        assert isinstance(refusal, str), reason
        assert reason in refusal
    bare = forged(identity, record, signature=identity.sign(record.SerializeToString()))
    assert open_envelope(bare, RUN, NOW) == "signature does not fit", "a signature made for another purpose"


def test_a_remembered_signature_does_not_vouch_for_other_bytes(identity: Identity) -> None:
    opener = Opener(RUN)
    good = seal(record_of(identity), identity)
    assert isinstance(opener.open(good, NOW), pb.Record)
    assert isinstance(opener.open(good, NOW), pb.Record)
    bad = forged(identity, record_of(identity), signature=bytes(64))
    assert opener.open(bad, NOW) == "signature does not fit"
    assert opener.open(bad, NOW) == "signature does not fit"
    assert "expired" in str(opener.open(good, NOW + 61)), "remembered, and still judged by time"


def test_sealing_refuses_what_others_would_refuse(identity: Identity, stranger: Identity) -> None:
    with pytest.raises(ValueError, match="cannot be signed by"):
        seal(record_of(identity), stranger)
    with pytest.raises(ValueError, match="name of 65"):
        seal(record_of(identity, name="x" * 65), identity)
    with pytest.raises(ValueError, match=f"larger than {MAX_ENVELOPE_BYTES}"):
        seal(record_of(identity, committed=[pb.Count(origin="x" * 60, tokens=1)] * 200), identity)


def test_the_book_keeps_the_newest_of_each_peer(identity: Identity, stranger: Identity) -> None:
    book = RecordBook()

    def add(**fields: object) -> str | None:
        return book.add(record_of(identity, **fields), NOW)

    assert add(incarnation=5, version=3) is None
    assert "older than version 3 of incarnation 5" in str(add(incarnation=5, version=2))
    assert "older" in str(add(incarnation=4, version=99))
    assert add(incarnation=5, version=4, stage=0) is None
    assert add(incarnation=6, version=0, stage=2) is None
    assert book.add(record_of(stranger), NOW) is None
    assert [r.stage for r in book.live(NOW, without=stranger.peer_id)] == [2]
    assert len(book.live(NOW, without="")) == 2
    assert book.live(NOW + 60, without="") == ()


def test_a_record_is_not_replayed_after_the_newer_one_expired(identity: Identity) -> None:
    book = RecordBook()
    book.add(record_of(identity, version=9, expires=NOW + 1), NOW)
    later = NOW + 30
    assert book.live(later, without="") == ()
    assert "older" in str(book.add(record_of(identity, version=8, expires=NOW + 60), later))


def test_the_book_forgets_and_is_bounded(
    identity: Identity, stranger: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshd.discovery.records.MAX_PEERS", 1)
    book = RecordBook()
    assert book.add(record_of(identity), NOW) is None
    assert book.add(record_of(stranger), NOW) == "1 peers are known already"
    much_later = NOW + 61 + MAX_AHEAD_S
    assert book.add(record_of(stranger, expires=much_later + 60), much_later) is None


def test_a_withdrawn_record_replaces_what_it_takes_back(identity: Identity) -> None:
    record = record_of(identity)
    gone = withdrawn(record)
    assert gone.expires > record.expires, "the DHT keeps what lives longer"
    opened = open_envelope(seal(gone, identity), RUN, NOW)
    assert isinstance(opened, pb.Record)
    book = RecordBook()
    book.add(record, NOW)
    assert book.add(opened, NOW) is None
    assert book.live(NOW, without="") == ()
    assert "older" in str(book.add(record, NOW)), "an old copy in the DHT does not bring it back"


Validate = Callable[..., bool]


@pytest.fixture
def validate(identity: Identity) -> Validate:
    class Frozen:
        def time(self) -> float:
            return NOW

        def monotonic(self) -> float:
            return NOW

        async def sleep(self, seconds: float) -> None: ...

    validator = RecordValidator(RUN, Frozen())

    def check(
        value: object,
        stage: int = 1,
        subkey: object = identity.peer_id,
        expires: float = NOW + 60,
        run: str = RUN,
    ) -> bool:
        return validator.validate(
            DHTRecord(
                DHTID.generate(source=dht_key(run, stage)).to_bytes(),
                MSGPackSerializer.dumps(subkey),
                value if isinstance(value, bytearray) else MSGPackSerializer.dumps(value),
                expires,
            )
        )

    return check


def test_a_dht_node_stores_only_signed_records_under_their_own_key(
    identity: Identity, validate: Validate
) -> None:
    envelope = seal(record_of(identity), identity)
    assert validate(envelope)
    assert not validate(envelope, stage=0), "another stage's key"
    assert not validate(envelope, run=OTHER_RUN), "another run's key"
    assert not validate(envelope, subkey=identity.peer_id[:-1] + "x"), "another peer's subkey"
    assert not validate(envelope, subkey=None), "a plain value in place of the dictionary"
    assert not validate(envelope, expires=NOW + 1e9), "kept longer than it says"
    for junk in (
        b"",
        b"junk",
        "text",
        7,
        None,
        [envelope],
        bytearray(),
        bytearray(b"\xc5"),
        bytearray(b"\xc1\xff"),
    ):
        assert not validate(junk)


def test_a_dht_node_does_not_refuse_a_dictionary_for_one_record_that_has_just_expired(
    identity: Identity, validate: Validate
) -> None:
    assert validate(seal(record_of(identity, expires=NOW - 1), identity), expires=NOW - 1)
    assert not validate(seal(record_of(identity, expires=NOW + 9999), identity), expires=NOW + 9999)


@pytest.mark.parametrize("size", [10, 255, 256, 5000])
def test_values_of_every_size_are_unpacked(identity: Identity, validate: Validate, size: int) -> None:
    counts = [pb.Count(origin="o" * 50, tokens=1)] * (size // 60)
    assert validate(seal(record_of(identity, committed=counts), identity))
