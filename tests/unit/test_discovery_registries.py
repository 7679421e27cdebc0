"""The registries without a network: in memory and in a file."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from meshd.discovery.memory import MemoryRegistry, MemorySwarm
from meshd.discovery.static import StaticRegistry
from meshd.errors import ConfigError, ResourceError
from meshd.identity import peer_id_of
from meshd.proto import meshd_pb2 as pb

RUN = "ab" * 20
A, B, C = (peer_id_of(bytes([n]) * 32) for n in (1, 2, 3))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def record(peer_id: str, version: int = 1, expires: float = 1060.0, **fields: object) -> pb.Record:
    return pb.Record(
        run_id=RUN,
        peer_id=peer_id,
        role=pb.ROLE_STAGE,
        state=pb.PEER_STATE_WORKING,
        version=version,
        expires=expires,
        **fields,  # type: ignore[arg-type]
    )


async def test_memory_peers_see_each_other_after_a_refresh_until_the_end_or_withdrawal() -> None:
    clock = Clock()
    swarm = MemorySwarm(clock)
    a, b = MemoryRegistry(swarm, A), MemoryRegistry(swarm, B)
    mine = record(A, stage=2)
    await a.announce(mine)
    mine.stage = 7  # the registry holds what was announced, not the caller's object
    await b.announce(record(B, expires=1010.0))
    assert b.peers == ()
    assert [(r.peer_id, r.stage) for r in await b.refresh()] == [(A, 2)]
    assert [r.peer_id for r in await a.refresh()] == [B]
    clock.now = 1011.0
    assert a.peers == ()
    await a.withdraw()
    assert [r.peer_id for r in b.peers] == [A], "a view lasts until the next refresh"
    assert await b.refresh() == ()
    await a.announce(record(A, version=3))
    assert [r.peer_id for r in await b.refresh()] == [A]


async def test_memory_refuses_a_record_of_another() -> None:
    with pytest.raises(ValueError, match="announced by"):
        await MemoryRegistry(MemorySwarm(Clock()), A).announce(record(B))


def write(path: Path, text: str | bytes) -> None:
    """Replace the file, with another inode, so that a change shows whatever the clock's grain."""
    new = path.with_suffix(".new")
    new.write_bytes(text if isinstance(text, bytes) else text.encode())
    os.replace(new, path)


FILE = f"""
run_id = "{RUN}"
[[peer]]
id = "{A}"
address = "10.0.0.1:7000"
stage = 0
name = "attic"
[[peer]]
id = "{B}"
address = "10.0.0.2:7000"
role = "seed"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "registry.toml", FILE)
    return tmp_path / "registry.toml"


async def test_static_peers_come_from_the_file_without_oneself(path: Path) -> None:
    registry = await StaticRegistry.start(path, RUN, A, Clock())
    (seed,) = await registry.refresh()
    assert (seed.peer_id, seed.role, seed.stage, seed.address) == (B, pb.ROLE_SEED, -1, "10.0.0.2:7000")
    assert (seed.run_id, seed.state) == (RUN, pb.PEER_STATE_WORKING)
    other = await StaticRegistry.start(path, RUN, B, Clock())
    (stage,) = await other.refresh()
    assert (stage.peer_id, stage.role, stage.stage, stage.name) == (A, pb.ROLE_STAGE, 0, "attic")


async def test_static_file_is_read_again_when_it_changes(path: Path) -> None:
    registry = await StaticRegistry.start(path, RUN, A, Clock())
    write(path, FILE + f'[[peer]]\nid = "{C}"\naddress = "10.0.0.3:7000"\nstage = 1\n')
    assert {r.peer_id for r in await registry.refresh()} == {B, C}


async def test_static_file_that_breaks_keeps_the_last_good_peers_with_one_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = await StaticRegistry.start(path, RUN, A, Clock())
    write(path, FILE + "[[peer")
    with caplog.at_level(logging.WARNING):
        assert [r.peer_id for r in await registry.refresh()] == [B]
        await registry.refresh()
        assert len(caplog.records) == 1
        os.unlink(path)
        assert [r.peer_id for r in await registry.refresh()] == [B]
    assert len(caplog.records) == 2
    write(path, FILE.replace(B, C))
    assert [r.peer_id for r in await registry.refresh()] == [C]


async def test_static_records_end_when_nobody_looks_at_the_file(path: Path) -> None:
    clock = Clock()
    registry = await StaticRegistry.start(path, RUN, A, clock)
    (peer,) = await registry.refresh()
    clock.now = peer.expires
    assert registry.peers == ()


async def test_static_announce_checks_the_own_entry_and_writes_nothing(path: Path) -> None:
    registry = await StaticRegistry.start(path, RUN, A, Clock())
    before = os.stat(path)
    await registry.announce(record(A, address="10.0.0.1:7000", stage=0))
    with pytest.raises(ConfigError, match=r"peer\.stage = 0: .* runs with 1"):
        await registry.announce(record(A, address="10.0.0.1:7000", stage=1))
    with pytest.raises(
        ConfigError, match=r"peer\.address = '10\.0\.0\.1:7000': .* runs with '10\.0\.0\.9:1'"
    ):
        await registry.announce(record(A, address="10.0.0.9:1", stage=0))
    stranger = await StaticRegistry.start(path, RUN, C, Clock())
    with pytest.raises(ConfigError, match="this peer is not listed"):
        await stranger.announce(record(C))
    assert os.stat(path) == before


@pytest.mark.parametrize(
    ("text", "field", "problem"),
    [
        ("run_id = ", "file", "not TOML"),
        (FILE.replace("stage = 0", 'stage = "0"'), "peer.0.stage", "valid integer"),
        (FILE.replace("stage = 0", "stge = 0"), "peer.0.stge", "Extra inputs"),
        (FILE.replace('address = "10.0.0.1:7000"', ""), "peer.0.address", "required"),
        (FILE.replace("10.0.0.1:7000", "10.0.0.1"), "peer.0.address", "pattern"),
        (FILE.replace(A, A[:-1]), "peer.0.id", "not the peer id"),
        (FILE.replace(A, B), "peer", "is listed twice"),
        (FILE.replace(RUN, "cd" * 20), "run_id", f"this peer joins run {RUN}"),
        (f'run_id = "{RUN}"', "peer", "required"),
    ],
)
async def test_static_file_errors_name_the_field(path: Path, text: str, field: str, problem: str) -> None:
    write(path, text)
    with pytest.raises(ConfigError) as caught:
        await StaticRegistry.start(path, RUN, A, Clock())
    assert field in caught.value.field
    assert problem in str(caught.value)


async def test_static_file_missing(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"cannot read the registry file .*nowhere\.toml: No such file"):
        await StaticRegistry.start(tmp_path / "nowhere.toml", RUN, A, Clock())


async def test_static_file_not_text(path: Path) -> None:
    write(path, b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        await StaticRegistry.start(path, RUN, A, Clock())
