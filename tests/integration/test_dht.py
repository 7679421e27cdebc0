"""The DHT registry on real p2pd processes over loopback: on asyncio's loop, and the spine of it on uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import psutil
import pytest
import uvloop

from meshd.discovery.addresses import PeerAddress
from meshd.discovery.dht import DhtRegistry
from meshd.discovery.entrance import Timing
from meshd.discovery.p2pd import Endpoint
from meshd.discovery.p2pd_process import P2pdProcess
from meshd.discovery.validator import dht_key
from meshd.errors import ConfigError, NetworkError, ResourceError
from meshd.identity import Identity, peer_id_of
from meshd.proto import meshd_pb2 as pb

from hivemind.dht.node import DHTNode  # isort: skip

RUN = "ab" * 20
FAST = Timing(call_s=8.0, dial_s=4.0, retry_s=0.05, retry_max_s=0.2, remix_s=0.5)
NOBODY = peer_id_of(bytes(32))


class Peer:
    """A registry with its identity, and the task that supervises it."""

    def __init__(self, identity: Identity, registry: DhtRegistry) -> None:
        self.identity, self.registry = identity, registry

    def record(self, stage: int = 0, version: int = 1, **fields: object) -> pb.Record:
        return pb.Record(
            run_id=RUN,
            peer_id=self.identity.peer_id,
            role=pb.ROLE_STAGE,
            stage=stage,
            state=pb.PEER_STATE_WORKING,
            incarnation=1,
            version=version,
            expires=time.time() + 60 + version,
            maddrs=[str(address) for address in self.registry.maddrs()],
            **fields,  # type: ignore[arg-type]
        )

    async def sees(self) -> set[str]:
        return {record.peer_id for record in await self.registry.refresh()}


Starter = Callable[..., Awaitable[Peer]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Starter]:
    async with swarm(tmp_path) as starter:
        yield starter


@contextlib.asynccontextmanager
async def swarm(tmp_path: Path) -> AsyncIterator[Starter]:
    """Starts peers, each supervised; at the end closes them and checks that no process or socket is left (C30)."""
    sockets: list[Path] = []
    count = 0
    async with contextlib.AsyncExitStack() as stack:
        group = await stack.enter_async_context(asyncio.TaskGroup())

        async def starter(bootstrap: Sequence[PeerAddress] = (), stages: int = 2, **options: object) -> Peer:
            nonlocal count
            count += 1
            identity, _ = Identity.load_or_create(tmp_path / f"peer{count}" / "identity")
            registry = await DhtRegistry.start(
                identity,
                RUN,
                endpoint=options.pop("endpoint", Endpoint("127.0.0.1")),  # type: ignore[arg-type]
                bootstrap=bootstrap,
                stages=stages,
                rng=random.Random(count),
                timing=FAST,
            )
            stack.push_async_callback(registry.close)
            sockets.append(_control_socket(registry))
            group.create_task(registry.run())
            return Peer(identity, registry)

        yield starter
    assert _p2pds() == []
    assert [path for path in sockets if path.exists()] == []


def _p2pds() -> list[int]:
    return [child.pid for child in psutil.Process().children() if child.name() == "p2pd"]


def _control_socket(registry: DhtRegistry) -> Path:
    words = psutil.Process(registry.p2pd_pid).cmdline()
    (listen,) = (word for word in words if word.startswith("-listen=/unix/"))
    path = Path(listen.removeprefix("-listen=/unix"))
    assert path.exists()
    return path


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    """Poll, since the other side is another process: nothing here can signal its change."""
    try:
        async with asyncio.timeout(30):
            while True:
                result = condition()
                if result if isinstance(result, bool) else await result:
                    return
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"not within 30 s: {what}")


async def test_peers_find_each_other_across_stages_and_one_leaves(start: Starter) -> None:
    seed = await start()
    first, second = await start(seed.registry.maddrs()), await start(seed.registry.maddrs())
    assert first.registry.joined
    assert first.registry.problem == ""
    await seed.registry.announce(seed.record(stage=-1))
    await first.registry.announce(first.record(stage=0))
    await second.registry.announce(second.record(stage=1, address="127.0.0.1:7"))
    assert await seed.sees() == {first.identity.peer_id, second.identity.peer_id}
    assert await first.sees() == {seed.identity.peer_id, second.identity.peer_id}
    got = {record.peer_id: record for record in first.registry.peers}
    assert (got[second.identity.peer_id].stage, got[second.identity.peer_id].address) == (1, "127.0.0.1:7")
    # A peer that changes its stage is seen under the new one alone, though the old key still holds its record.
    await second.registry.announce(second.record(stage=0, version=2))
    assert [r.stage for r in await seed.registry.refresh() if r.peer_id == second.identity.peer_id] == [0]
    await second.registry.withdraw()
    assert await seed.sees() == {first.identity.peer_id}


async def test_the_libp2p_peer_id_is_the_identity_and_a_joiner_without_stages_sees_seed_and_stage_0(
    start: Starter,
) -> None:
    seed = await start()
    assert {address.peer_id for address in seed.registry.maddrs()} == {seed.identity.peer_id}
    assert [str(a) for a in seed.registry.maddrs()] == [
        f"/ip4/127.0.0.1/tcp/{seed.registry.port}/p2p/{seed.identity.peer_id}"
    ]
    await seed.registry.announce(seed.record(stage=-1))
    joiner = await start(seed.registry.maddrs(), stages=0)
    assert await joiner.sees() == {seed.identity.peer_id}


async def _kill_and_rejoin(start: Starter, caplog: pytest.LogCaptureFixture) -> None:
    seed = await start()
    peer = await start(seed.registry.maddrs())
    await seed.registry.announce(seed.record(stage=0))
    await peer.registry.announce(peer.record(stage=1))
    await peer.sees()
    port, pid = peer.registry.port, peer.registry.p2pd_pid
    assert pid is not None
    with caplog.at_level(logging.INFO):
        os.kill(pid, signal.SIGKILL)
        await until(lambda: peer.registry.p2pd_pid != pid, "p2pd's end is noticed")
        assert {r.peer_id for r in peer.registry.peers} == {seed.identity.peer_id}, "known peers stay in use"
        await until(lambda: "started again" in caplog.text, "it is started again")
    assert peer.registry.joined
    assert peer.registry.port == port, "the addresses in links and records stay right"
    assert await peer.sees() == {seed.identity.peer_id}
    late = await start(peer.registry.maddrs())
    assert await late.sees() == {seed.identity.peer_id, peer.identity.peer_id}
    lines = [
        r.getMessage() for r in caplog.records if r.levelno >= logging.INFO and r.name != "meshd.identity"
    ]
    assert len(lines) == 1, lines
    assert f"process {pid} has died" in lines[0]


async def test_c13_a_killed_p2pd_is_started_again_rejoins_and_announces_again(
    start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    await _kill_and_rejoin(start, caplog)


def test_c13_and_c30_on_uvloop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with swarm(tmp_path) as start:
            await _kill_and_rejoin(start, caplog)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


async def test_c13_a_p2pd_that_dies_again_and_again_is_started_with_pauses(
    start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    peer = await start()
    ended: set[int | None] = {None}
    for version in range(3):
        pid = peer.registry.p2pd_pid
        assert pid is not None
        ended.add(pid)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: peer.registry.p2pd_pid not in ended, "it is started again")
        await peer.registry.announce(peer.record(version=version))
    assert peer.registry.problem == ""
    await until(lambda: caplog.text.count("started again as process") == 3, "each loss is said")
    assert caplog.text.count("lost again") == 2, "the first one was started again at once"


async def test_c13_while_p2pd_cannot_start_peers_stay_known_and_the_reason_is_said_once(
    start: Starter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = await start()
    peer = await start(seed.registry.maddrs())
    await seed.registry.announce(seed.record())
    assert await peer.sees() == {seed.identity.peer_id}
    right, tries = P2pdProcess.start, 0

    async def broken(*_: object) -> P2pdProcess:
        nonlocal tries
        tries += 1
        raise OSError("no such binary")

    monkeypatch.setattr(P2pdProcess, "start", broken)
    assert peer.registry.p2pd_pid is not None
    os.kill(peer.registry.p2pd_pid, signal.SIGKILL)
    await until(lambda: tries >= 4, "it is tried again and again")
    assert caplog.text.count("does not start") == 1
    assert "no such binary" in peer.registry.problem
    assert {r.peer_id for r in await peer.registry.refresh()} == {seed.identity.peer_id}
    with pytest.raises(NetworkError, match="no such binary"):
        await peer.registry.announce(peer.record(version=2))
    # What the seed says of itself over gRPC keeps it known past the end of its record.
    said = seed.record(version=3)
    said.expires = time.time() + 300
    peer.registry.heard(said)
    assert [r.expires for r in peer.registry.peers] == [said.expires]
    foreign = seed.record(version=4)
    foreign.run_id = "cd" * 20
    peer.registry.heard(foreign)
    assert [r.version for r in peer.registry.peers] == [3], "a peer of another run is not taken in"
    monkeypatch.setattr(P2pdProcess, "start", right)
    await until(lambda: peer.registry.p2pd_pid is not None, "it runs again")
    await until(lambda: peer.registry.joined, "and has joined")
    assert peer.registry.problem == ""


@pytest.mark.slow  # hivemind waits 15 s for a daemon that is gone
async def test_c13_p2pd_that_dies_while_the_node_starts_is_one_more_try(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hivemind raises what its sockets raise: none of it may end the daemon."""
    peer = await start()
    right, kills = DHTNode.create, iter([True, True, False])

    async def create(**options: object) -> DHTNode:
        if next(kills, False):
            started = [pid for pid in _p2pds() if pid != first]
            os.kill(started[-1], signal.SIGKILL)
            await until(lambda: not psutil.pid_exists(started[-1]) or _zombie(started[-1]), "p2pd is dead")
        return await right(**options)

    monkeypatch.setattr(DHTNode, "create", create)
    first = peer.registry.p2pd_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: peer.registry.p2pd_pid not in (first, None), "it is up at last")
    await peer.registry.announce(peer.record())


def _zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_all_bootstrap_peers_dead_and_all_records_old_the_others_are_the_way_back(
    start: Starter,
) -> None:
    """C12: peers met in the meantime are dialled when no bootstrap address answers any more."""
    seed = await start()
    one, other = await start(seed.registry.maddrs()), await start(seed.registry.maddrs())
    for peer in (one, other):
        record = peer.record()
        record.expires = time.time() + 3
        await peer.registry.announce(record)
    assert other.identity.peer_id in await one.sees()
    await seed.registry.close()
    pid = one.registry.p2pd_pid
    assert pid is not None
    await until(lambda: one.registry.peers == (), "the records have ended")
    os.kill(pid, signal.SIGKILL)
    await until(lambda: one.registry.p2pd_pid not in (pid, None), "p2pd is started again")
    await until(lambda: one.registry.joined, "it has joined by the other")


async def test_a_p2pd_that_hangs_is_replaced(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("_PULSE_S", "_CONTROL_S", "_STOP_S"):
        monkeypatch.setattr(f"meshd.discovery.p2pd.{bound}", 0.5)
    peer = await start()
    pid = peer.registry.p2pd_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: peer.registry.p2pd_pid not in (pid, None), "the hanging p2pd is replaced")
    assert not psutil.pid_exists(pid)


async def test_dead_bootstrap_is_named_and_tried_until_it_lives(
    start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    """C12: one dead address beside a live one does not matter; a dead one alone is waited for."""
    seed = await start()
    port, pid = seed.registry.port, seed.registry.p2pd_pid
    dead = PeerAddress("ip4", "127.0.0.1", 9, NOBODY)
    both = await start([dead, *seed.registry.maddrs()])
    assert both.registry.joined
    assert f"{dead}: connection refused" in both.registry.problem
    assert str(seed.registry.maddrs()[0]) not in both.registry.problem
    await seed.registry.close()
    assert pid is not None
    assert not psutil.pid_exists(pid)
    alone = await start(seed.registry.maddrs())
    assert not alone.registry.joined
    assert f"{seed.registry.maddrs()[0]}: connection refused" in alone.registry.problem
    await alone.registry.announce(alone.record())
    assert caplog.text.count("cannot reach bootstrap address /ip4/127.0.0.1/tcp/9/") == 1, (
        "said once, not at each try"
    )
    again = await DhtRegistry.start(seed.identity, RUN, endpoint=Endpoint("127.0.0.1", port), timing=FAST)
    try:
        async with asyncio.timeout(30):
            await alone.registry.wait_joined()
        await until(lambda: alone.registry.problem == "", "the problem is over")
        await alone.registry.announce(alone.record(version=2))
        assert [r.peer_id for r in await again.refresh()] == [alone.identity.peer_id]
    finally:
        await again.close()


async def test_a_wrong_peer_id_at_a_live_address_is_said(start: Starter) -> None:
    seed = await start()
    peer = await start([PeerAddress("ip4", "127.0.0.1", seed.registry.port, NOBODY)])
    assert not peer.registry.joined
    assert "peer id mismatch" in peer.registry.problem


@pytest.mark.parametrize("heard", [False, True])
async def test_c01_two_dhts_merge_when_grpc_knows_a_peer_that_the_dht_does_not_show(
    start: Starter, caplog: pytest.LogCaptureFixture, heard: bool
) -> None:
    """heard: it has said so itself, asked over gRPC, as those are that were lost."""
    left = [await start()]
    left.append(await start(left[0].registry.maddrs()))
    right = [await start()]
    right.append(await start(right[0].registry.maddrs()))
    for stage, peer in enumerate((*left, *right)):
        await peer.registry.announce(peer.record(stage=stage % 2))
    assert await left[1].sees() == {left[0].identity.peer_id}
    maddrs = ["junk", "/p2p-circuit", *map(str, right[1].registry.maddrs())]
    if heard:
        said = right[1].record(stage=1)
        said.maddrs[:] = maddrs
        left[1].registry.heard(said)
    else:
        left[1].registry.known_peer(maddrs)
    await until(lambda: "the DHT had split" in caplog.text, "the split is found")
    everyone = {peer.identity.peer_id for peer in (*left, *right)}

    async def merged() -> bool:
        for index, peer in enumerate((*left, *right)):
            # Each renewal is newer and lives longer than the one before, as a daemon's are.
            record = peer.record(stage=index % 2, version=time.time_ns())
            record.expires = time.time() + 120
            await peer.registry.announce(record)
        return all([await peer.sees() == everyone - {peer.identity.peer_id} for peer in (*left, *right)])

    await until(merged, "all see all after their next renewals")
    assert caplog.text.count("the DHT had split") == 1
    assert right[1].identity.peer_id in caplog.text


async def test_a_peer_in_view_is_no_split(start: Starter, caplog: pytest.LogCaptureFixture) -> None:
    seed = await start()
    peer = await start(seed.registry.maddrs())
    await seed.registry.announce(seed.record())
    peer.registry.known_peer(map(str, seed.registry.maddrs()))  # before this peer has read the DHT
    await until(lambda: len(peer.registry.peers) == 1, "the DHT is read before anybody is dialled")
    assert "split" not in caplog.text


@pytest.mark.parametrize("state", ["killed", "stopped"])
async def test_c30_close_is_bounded_and_leaves_nothing(start: Starter, state: str) -> None:
    """The fixture checks for what is left; withdrawing from a dead DHT does not raise either."""
    seed = await start()
    peer = await start(seed.registry.maddrs())
    await peer.registry.announce(peer.record())
    pid = peer.registry.p2pd_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL if state == "killed" else signal.SIGSTOP)
    async with asyncio.timeout(15):
        await peer.registry.close()
        await peer.registry.close()
    assert not psutil.pid_exists(pid)
    async with asyncio.timeout(15):
        await peer.registry.withdraw()
    with pytest.raises(NetworkError):
        await peer.registry.announce(peer.record(version=2))


async def test_close_while_p2pd_is_being_restarted_leaves_nothing(start: Starter) -> None:
    peer = await start()
    pid = peer.registry.p2pd_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: peer.registry.p2pd_pid is None, "the death is noticed")
    await peer.registry.close()
    assert peer.registry.p2pd_pid is None


async def test_a_forged_record_is_not_stored_and_does_not_displace_the_real_one(start: Starter) -> None:
    seed = await start()
    liar = await start(seed.registry.maddrs())
    await seed.registry.announce(seed.record(stage=0))
    envelope = pb.RecordEnvelope(
        record=seed.record(stage=0, version=9).SerializeToString(),
        public_key=seed.identity.public_key,
        signature=liar.identity.sign(b"anything"),
    ).SerializeToString()
    node = liar.registry._running()
    assert not await node.store(dht_key(RUN, 0), envelope, time.time() + 9999, subkey=seed.identity.peer_id)
    assert not await node.store(dht_key(RUN, 0), b"a plain value", time.time() + 9999)
    assert await liar.sees() == {seed.identity.peer_id}


async def test_c03_a_loopback_address_is_refused_before_anything_starts(tmp_path: Path) -> None:
    identity, _ = Identity.load_or_create(tmp_path / "identity")
    with pytest.raises(
        ConfigError, match=r"listen = '127\.0\.0\.1': the swarm is on the internet \(9\.9\.9\.9\)"
    ):
        await DhtRegistry.start(
            identity,
            RUN,
            endpoint=Endpoint("127.0.0.1"),
            bootstrap=[PeerAddress("ip4", "9.9.9.9", 1, NOBODY)],
        )
    assert _p2pds() == []


async def test_c12_a_port_in_use_is_named(tmp_path: Path) -> None:
    identity, _ = Identity.load_or_create(tmp_path / "identity")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ResourceError, match=rf"port {port} \(dht_port\): Address already in use\. Fix: dht_port"
        ):
            await DhtRegistry.start(identity, RUN, endpoint=Endpoint("127.0.0.1", port))
    assert _p2pds() == []


async def test_c12_a_p2pd_that_refuses_to_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    identity, _ = Identity.load_or_create(tmp_path / "identity")
    (tmp_path / "identity").unlink()
    (tmp_path / "identity").mkdir()  # p2pd cannot read its key
    with pytest.raises(ResourceError, match="p2pd"):
        await DhtRegistry.start(identity, RUN, endpoint=Endpoint("127.0.0.1"))
    assert _p2pds() == []


async def test_announce_is_what_others_dial(start: Starter) -> None:
    peer = await start(endpoint=Endpoint("127.0.0.1", announce="localhost"))
    (address,) = peer.registry.maddrs()
    assert (address.protocol, address.host, address.port) == ("dns", "localhost", peer.registry.port)
    assert (await start([address])).registry.joined
