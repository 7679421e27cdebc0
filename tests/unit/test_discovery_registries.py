"""The registries without a network: in memory and in a file."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest
from manual_clock import ManualClock

from meshd import PROTOCOL_VERSION
from meshd.discovery.memory import MemoryRegistry, MemorySwarm
from meshd.discovery.static import StaticRegistry
from meshd.errors import ConfigError, MeshdError, ResourceError
from meshd.identity import peer_id_of
from meshd.observe.log import fields_of
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock, run_virtual
from meshd.transport.base import LinkLost

RUN = "ab" * 20
A, B, C = (peer_id_of(bytes([n]) * 32) for n in (1, 2, 3))


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
    clock = ManualClock()
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
        await MemoryRegistry(MemorySwarm(ManualClock()), A).announce(record(B))


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


class Listed:
    """The dialling side to listed peers: what stands in `said` is answered, by address. Others hang."""

    def __init__(self, **said: pb.Record | MeshdError) -> None:
        self.said: dict[str, pb.Record | MeshdError] = {
            f"10.0.0.{n[1:]}:7000": what for n, what in said.items()
        }
        self.asked: list[tuple[str, pb.HelloRequest]] = []

    async def hello(self, address: str, request: pb.HelloRequest) -> pb.HelloReply:
        self.asked.append((address, request))
        what = self.said.get(address)
        if what is None:
            await asyncio.Event().wait()
        if isinstance(what, MeshdError):
            raise what
        return pb.HelloReply(record=what)


GONE = LinkLost("nobody listens there")


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why listed peers were said to be silent."""
    lines = [r for r in caplog.records if r.getMessage() == "listed_peer_silent"]
    return [fields_of(line)["reason"] for line in lines]


def seed_record(**fields: object) -> pb.Record:
    said = record(B, protocol=PROTOCOL_VERSION, incarnation=7, **fields)
    said.role, said.state = pb.ROLE_SEED, pb.PEER_STATE_FINISHED
    said.stage, said.address = -1, "127.0.0.1:9"
    return said


async def test_static_gives_addresses_and_the_peers_say_what_they_are(path: Path) -> None:
    counts = [pb.Count(origin=A, tokens=640)]
    listed = Listed(n2=seed_record(weight_version=5, committed=counts))
    registry = await StaticRegistry.start(path, RUN, A, listed, ManualClock())
    assert [r.state for r in registry.peers] == [pb.PEER_STATE_UNSPECIFIED], "nobody was asked yet"
    await registry.announce(record(A, address="10.0.0.1:7000", stage=0, name="attic", incarnation=3))
    (seed,) = await registry.refresh()
    assert (seed.peer_id, seed.role, seed.stage, seed.state) == (B, pb.ROLE_SEED, -1, pb.PEER_STATE_FINISHED)
    assert (seed.protocol, seed.incarnation, seed.weight_version) == (PROTOCOL_VERSION, 7, 5)
    assert list(seed.committed) == counts
    assert seed.address == "10.0.0.2:7000", "where the file says, not where it believes it is"
    await registry.refresh()
    (address, first), (_, second) = listed.asked
    assert (address, first.run_id, first.peer_id, first.name) == ("10.0.0.2:7000", RUN, A, "attic")
    assert (first.incarnation, first.protocol) == (3, PROTOCOL_VERSION)
    assert (first.wall_clock, second.wall_clock) == (1000.0, 0.0), "skew is spoken of when they meet"


def test_static_peer_that_does_not_answer_does_not_work(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(path, FILE + f'[[peer]]\nid = "{C}"\naddress = "10.0.0.3:7000"\nstage = 1\n')

    async def main() -> None:
        listed, clock = Listed(n3=record(C, stage=1, protocol=PROTOCOL_VERSION)), VirtualClock()
        registry = await StaticRegistry.start(path, RUN, A, listed, clock)
        looks = [asyncio.create_task(registry.refresh()) for _ in range(2)]
        await asyncio.wait(looks)
        assert clock.monotonic() == pytest.approx(3.0), "both looks wait for the hanging peer once"
        up, hangs = registry.peers
        assert (up.peer_id, up.stage, up.state) == (C, 1, pb.PEER_STATE_WORKING)
        assert (hangs.peer_id, hangs.state, hangs.protocol) == (B, pb.PEER_STATE_UNSPECIFIED, 0)
        assert (hangs.role, hangs.address) == (pb.ROLE_SEED, "10.0.0.2:7000")

        listed.said |= {"10.0.0.2:7000": seed_record(), "10.0.0.3:7000": GONE}
        states = {r.peer_id: r.state for r in await registry.refresh()}
        assert states == {B: pb.PEER_STATE_FINISHED, C: pb.PEER_STATE_WORKING}, "one question lost"
        await clock.sleep(up.expires - clock.time())
        assert [r.peer_id for r in registry.peers if r.state] == [B]
        await registry.refresh()

    with caplog.at_level(logging.INFO):
        run_virtual(main())
    silent = reasons(caplog)
    assert len(silent) == 2
    assert "no answer within 3 s" in silent[0]
    assert "nobody listens there" in silent[1]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"peer_id": C}, "answers there"),
        ({"run_id": "cd" * 20}, "is of run"),
        ({"name": "x" * 100}, "name of 100 characters"),
    ],
)
async def test_static_takes_no_answer_of_another(
    path: Path, fields: dict[str, str], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = seed_record()
    other.MergeFrom(pb.Record(**fields))  # type: ignore[arg-type]
    registry = await StaticRegistry.start(path, RUN, A, Listed(n2=other), ManualClock())
    with caplog.at_level(logging.INFO):
        assert [r.state for r in await registry.refresh()] == [pb.PEER_STATE_UNSPECIFIED]
        await registry.refresh()
    (reason,) = reasons(caplog)
    assert problem in reason


async def test_static_stage_of_the_file_is_the_peers_own(path: Path) -> None:
    stage = await StaticRegistry.start(path, RUN, A, Listed(), ManualClock())
    await stage.announce(record(A, address="10.0.0.1:7000", stage=-1))  # before it has claimed
    assert stage.listed_stage == 0
    seed = await StaticRegistry.start(path, RUN, B, Listed(), ManualClock())
    assert seed.listed_stage is None
    write(path, FILE.replace("stage = 0\n", ""))
    free = await StaticRegistry.start(path, RUN, A, Listed(), ManualClock())
    assert free.listed_stage is None
    await free.announce(record(A, address="10.0.0.1:7000", stage=1))


async def test_static_file_need_not_name_the_run(path: Path) -> None:
    write(path, FILE.replace(f'run_id = "{RUN}"', ""))
    registry = await StaticRegistry.start(path, RUN, A, Listed(n2=seed_record()), ManualClock())
    assert [r.run_id for r in await registry.refresh()] == [RUN]


async def test_static_file_is_read_again_when_it_changes(path: Path) -> None:
    registry = await StaticRegistry.start(path, RUN, A, Listed(n2=GONE, n3=GONE), ManualClock())
    write(path, FILE + f'[[peer]]\nid = "{C}"\naddress = "10.0.0.3:7000"\nstage = 1\n')
    assert {r.peer_id for r in await registry.refresh()} == {B, C}


async def test_static_file_that_breaks_keeps_the_last_good_peers_with_one_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = await StaticRegistry.start(path, RUN, A, Listed(n2=GONE, n3=GONE), ManualClock())
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


async def test_static_announce_checks_the_own_entry_and_writes_nothing(path: Path) -> None:
    registry = await StaticRegistry.start(path, RUN, A, Listed(), ManualClock())
    before = os.stat(path)
    await registry.announce(record(A, address="10.0.0.1:7000", stage=0))
    with pytest.raises(ConfigError, match=r"peer\.stage = 0: .* runs with 1"):
        await registry.announce(record(A, address="10.0.0.1:7000", stage=1))
    with pytest.raises(
        ConfigError, match=r"peer\.address = '10\.0\.0\.1:7000': .* runs with '10\.0\.0\.9:1'"
    ):
        await registry.announce(record(A, address="10.0.0.9:1", stage=0))
    stranger = await StaticRegistry.start(path, RUN, C, Listed(), ManualClock())
    with pytest.raises(ConfigError, match="this peer is not listed"):
        await stranger.announce(record(C))
    assert os.stat(path) == before


async def test_static_edit_that_takes_a_working_peer_out_is_one_warning_and_no_end(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = await StaticRegistry.start(path, RUN, A, Listed(n2=seed_record()), ManualClock())
    mine = record(A, address="10.0.0.1:7000", stage=0)
    await registry.announce(mine)

    async def edited(text: str) -> list[str]:
        caplog.clear()
        write(path, text)
        for _ in range(3):
            assert [r.peer_id for r in await registry.refresh()] == [B]
            await registry.announce(mine)
        return [fields_of(r)["reason"] for r in caplog.records if r.getMessage() == "no_longer_listed"]

    without = FILE[: FILE.index("[[peer]]")] + FILE[FILE.rindex("[[peer]]") :]
    with caplog.at_level(logging.WARNING):
        (reason,) = await edited(without)
        assert "this peer is not listed" in reason
        (reason,) = await edited(FILE.replace("stage = 0", "stage = 1"))
        assert "runs with 0" in reason
        assert await edited(FILE) == []
        assert len(await edited(without)) == 1, "it was right in between"


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
        await StaticRegistry.start(path, RUN, A, Listed(), ManualClock())
    assert field in caught.value.field
    assert problem in str(caught.value)


async def test_static_file_missing(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"cannot read the registry file .*nowhere\.toml: No such file"):
        await StaticRegistry.start(tmp_path / "nowhere.toml", RUN, A, Listed(), ManualClock())


async def test_static_file_not_text(path: Path) -> None:
    write(path, b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        await StaticRegistry.start(path, RUN, A, Listed(), ManualClock())
