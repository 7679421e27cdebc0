"""A swarm whose network is cut in parts: each that has all stages trains on alone; healed, they are one again (C01)."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from swarm import Swarm, swarm, tiny_spec

from meshd.discovery.memory import MemoryRegistry, MemorySwarm
from meshd.observe.log import fields_of
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import run_virtual

# One way, seconds: minutes of virtual time are few microbatches.
DELAY = 1.0


def knows(s: Swarm, name: str) -> set[str]:
    directory = s.peers[name].status.directory
    assert directory is not None
    return {record.peer_id for record in directory.peers}


def said(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, object]]:
    return [fields_of(record) for record in caplog.records if record.getMessage() == event]


def part(s: Swarm, *groups: Sequence[str]) -> None:
    """Cut these groups from each other, registry and all: what is announced stays in its own part, for good. So it is
    as with DHTs that do not merge by themselves."""
    now = s.clock.time()
    for group in groups:
        shared = MemorySwarm(s.clock)
        for record in s.registry.book.live(now, without=""):
            shared.book.add(record, now)
        for name in group:
            directory = s.peers[name].status.directory
            assert directory is not None
            directory.registry = MemoryRegistry(shared, name)
    for index, group in enumerate(groups):
        for other in groups[index + 1 :]:
            s.cut(list(group), list(other))


def apart(s: Swarm, one: str, other: str) -> float:
    """Root mean square difference of two replicas' weights."""
    mine, theirs = s.parameters(one), s.parameters(other)
    squares = sum(float(((values - theirs[name]) ** 2).sum()) for name, values in mine.items())
    return math.sqrt(squares / sum(values.numel() for values in mine.values()))


def test_halves_train_on_alone_and_are_one_swarm_again_after_healing(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = tiny_spec(
        tiny_model,
        adapt_text,
        stop={"steps": 100_000},
        snapshot={"evaluate": False},
        pipeline={"in_flight": 1},
    )
    left, right, alone = ["seed", "a0", "a1"], ["b0", "b1"], ["c0"]
    everyone = {*left, *right, *alone}

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(DELAY, "a0", "a1", "b0", "b1", "c0")
            await s.gathered(["a0", "b0", "c0"], ["a1", "b1"])
            exchanges = 0.0

            def exchanged() -> bool:
                nonlocal exchanges
                before, exchanges = exchanges, s.counted("gossip_exchanges", "a1", "b1")
                return exchanges > before

            # As close as they get: when the second of the two has moved.
            await s.until(lambda: exchanged() and exchanges >= 4 and exchanges % 2 == 0)
            together = apart(s, "a1", "b1")
            part(s, left, right, alone)
            await s.until(lambda: all(knows(s, n) == {*g} - {n} for g in (left, right, alone) for n in g))
            await s.clock.sleep(5.0)
            before = {name: s.version(name) for name in ("a0", "a1", "b0", "b1")}
            stopped = s.account("c0").committed
            await s.until(lambda: all(s.version(name) >= version + 4 for name, version in before.items()))
            assert s.account("c0").committed == stopped
            status = await s.peers["c0"].status.answer(pb.StatusRequest())
            assert status.self.doing == "waiting for a replica of stage 1"
            health = s.peers["c0"].watchdog.health()
            assert health.ok
            assert s.peers["c0"].status.waits() == (
                "nobody serves stage 1: the swarm pauses until somebody does"
            )
            done = sum(s.account(name).tokens for name in ("a0", "b0", "c0"))
            assert max(s.tokens("a0"), s.tokens("b0")) < done, "no half knows what the other does"
            reply = await s.peers["a0"].status.answer(pb.StatusRequest(swarm=True))
            lost = {peer.name: peer for peer in reply.peers if peer.doing.startswith("lost: ")}
            assert set(lost) == {*right, *alone}
            assert min(peer.age_s for peer in lost.values()) > 30.0

            assert apart(s, "a1", "b1") > 2 * together, "they had gone apart"
            s.network.heal()
            await s.until(lambda: all(knows(s, name) == everyone - {name} for name in everyone), 90.0)
            await s.until(lambda: exchanged() and apart(s, "a1", "b1") <= 1.5 * together)
            await s.until(lambda: s.account("c0").committed > stopped)
            origins = ("a0", "b0", "c0")
            total = sum(s.account(name).tokens for name in origins)
            await s.until(lambda: all(s.tokens(name) >= total for name in everyone))
            assert all(s.account(name).holds for name in origins)
            reply = await s.peers["a0"].status.answer(pb.StatusRequest(swarm=True))
            assert not any(peer.doing.startswith("lost: ") for peer in reply.peers)

    with caplog.at_level(logging.INFO):
        run_virtual(main())
    lines = [
        *(["b0, b1, c0"] * len(left)),
        *(["a0, a1, c0, seed"] * len(right)),
        *(["a0, a1, b0, b1, seed"] * len(alone)),
    ]
    assert sorted(str(line["peers"]) for line in said(caplog, "peers_lost")) == sorted(lines)
    assert sorted(str(line["peers"]) for line in said(caplog, "peers_back")) == sorted(lines)
