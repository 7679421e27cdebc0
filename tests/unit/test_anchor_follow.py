"""An anchor's copy of a stage follows the stage's replicas, moves none of them, and costs few bytes."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
from google.protobuf.message import Message
from gossip_peers import BASE, COUNT, SHAPES, Peer, in_order, peers, replica_of, virtual

from meshd.anchor.follow import Follower, Links, Listening, next_listening
from meshd.config.runspec import GossipSpec, ResolvedRun
from meshd.gossip.forms import BF16
from meshd.gossip.memory import LISTENERS
from meshd.gossip.modular import SAMPLES
from meshd.gossip.values import FlatParameters
from meshd.observe.metrics import Metrics
from meshd.optim.schedule import TokenCounter
from meshd.pipeline.stage import Replica
from meshd.pipeline.worker import DeviceWorker
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock
from meshd.transport.memory import Delivery, MemoryNetwork

HANDSHAKE = 4 * SAMPLES * len(SHAPES) + len(SHAPES)


class Copy:
    """An anchor's copy of stage 1, from the base."""

    def __init__(self, net: MemoryNetwork, worker: DeviceWorker, run: ResolvedRun) -> None:
        self.parameters = {name: torch.nn.Parameter(value.clone()) for name, value in BASE.items()}
        clock = VirtualClock()
        self.counter, self.metrics = TokenCounter(), Metrics(clock)
        self.counter.advance("origin", 1000 * run.spec.batch_tokens)
        links = Links(
            run,
            "anchor",
            net.transport("anchor:1"),
            worker,
            self.counter,
            clock,
            self.metrics,
            random.Random(1),
        )
        self.follower = Follower(links, 1, FlatParameters(self.parameters, BASE))

    async def follow(self, *names: str) -> bool:
        return await self.follower.follow(lambda: [replica_of(name) for name in names])

    @property
    def vector(self) -> torch.Tensor:
        return in_order(dict(self.parameters)).clone()

    def distance(self, peer: Peer) -> float:
        return float((self.vector - peer.vector).square().mean().sqrt())

    @property
    def bytes(self) -> float:
        return self.metrics.value("anchor_follow_bytes")


@asynccontextmanager
async def swarm(names: str, **gossip: object) -> AsyncIterator[tuple[MemoryNetwork, list[Peer], Copy]]:
    changes = {name: {"gossip": gossip} for name in names}
    async with peers(names, **changes) as (net, made), DeviceWorker("anchor") as worker:  # type: ignore[arg-type]
        for peer in made:
            peer.stage.runtime.keeping.stepped = 5
        yield net, made, Copy(net, worker, made[0].stage.runtime.run)


def test_the_first_time_all_values_are_taken_over_and_nobody_moves() -> None:
    async def main() -> None:
        async with swarm("a", bits=3, subset=4) as (_, (a,), copy):
            before = a.vector
            a.stage.runtime.version = 9
            assert await copy.follow("a")
            assert torch.equal(a.vector, before)
            most = (before - in_order(BASE)).abs().max().item()
            assert bool(((copy.vector - before).abs() <= most * 2**-8).all())
            assert copy.follower.version == 9
            # Each value once, one way.
            assert copy.bytes == 2 * COUNT + 2 * HANDSHAKE
            assert a.counted("gossip_exchanges") == 0

    virtual(main)


def test_what_an_anchor_has_does_not_count_as_kept() -> None:
    """A newcomer that listens has claimed the stage; an anchor gives nothing back."""

    async def main() -> None:
        async with swarm("a", bits=16, subset=1) as (_, (a,), copy):
            for _ in range(3):
                assert await copy.follow("a")
            assert a.stage.runtime.keeping.kept == 0

    virtual(main)


def test_later_it_takes_over_a_part_at_a_time_in_few_bits() -> None:
    async def main() -> None:
        async with swarm("a", bits=3, subset=4) as (net, (a,), copy):
            openings = []

            def tap(source: str, target: str, message: Message) -> list[Delivery]:
                if isinstance(message, pb.GossipMessage) and message.open.listening:
                    openings.append(message.open)
                return [Delivery(message)]

            net.tap = tap
            assert await copy.follow("a")
            first = copy.bytes
            with torch.no_grad():
                for parameter in a.parameters.values():
                    parameter.add_(
                        0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4))
                    )
            before, apart = a.vector, copy.distance(a)
            for number in range(8):
                assert await copy.follow("a")
                # A quarter of the values, one way.
                assert copy.bytes - first <= (number + 1) * (2 * HANDSHAKE + COUNT / 4 * 3 / 8 + 3)
            assert torch.equal(a.vector, before)
            assert copy.distance(a) < 0.5 * apart
            parts = openings[1:]
            assert {(opening.bits, opening.subset) for opening in parts} == {(3, 4)}
            assert [sorted(o.offset for o in some) for some in (parts[:4], parts[4:])] == [[0, 1, 2, 3]] * 2

    virtual(main)


def test_a_busy_replica_is_waited_for_and_one_that_fails_is_left_for_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with swarm("ab", bits=3, subset=4) as (net, (_, b), copy):
            net.kill("a:1")
            b.gossip_service._listeners = LISTENERS

            async def free() -> None:
                await asyncio.sleep(5.0)
                b.gossip_service._listeners -= 1

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(free())
                assert await copy.follow("a", "b")
            assert 5.0 <= asyncio.get_running_loop().time() < 10.0
            assert copy.metrics.value("gossip_failed") == 1
            for _ in range(3):
                assert not await copy.follow("a")
            assert not await copy.follow()

    with caplog.at_level(logging.WARNING):
        virtual(main)
    assert [record.getMessage() for record in caplog.records].count("not_followed") == 2, (
        "once, and once again"
    )


def test_a_replica_that_claims_impossible_steps_is_not_followed() -> None:
    """What is measured would be dated by them, and refused by everybody."""

    async def main() -> None:
        async with swarm("a") as (_, (a,), copy):
            a.stage.runtime.version = 10**6
            copy.counter._tokens["origin"] = 0
            assert not await copy.follow("a")
            assert copy.follower.version is None

    virtual(main)


def test_values_that_are_not_finite_are_not_taken_over() -> None:
    """C27."""

    async def main() -> None:
        async with swarm("a", bits=3, subset=4) as (_, (a,), copy):
            for parameter in a.parameters.values():
                parameter.data.fill_(float("nan"))
            assert not await copy.follow("a")
            assert bool(torch.isfinite(copy.vector).all())

    virtual(main)


RUN = GossipSpec(bits=3, subset=13)
USUAL = {"followed": True, "fitted": True, "steps": 20, "refresh_steps": 20, "subset": 1}


@pytest.mark.parametrize(
    ("spec", "changes", "expected"),
    [
        (RUN, {}, (False, 3, 13)),
        (RUN, {"steps": 80}, (False, 3, 13)),
        (RUN, {"steps": 81}, (True, BF16, 1)),
        (RUN, {"fitted": False}, (True, BF16, 1)),
        (RUN, {"followed": False}, (True, BF16, 1)),
        (RUN, {"subset": 32}, (False, 3, 32)),  # fewer bytes are allowed
        (GossipSpec(), {}, (True, BF16, 1)),
        (GossipSpec(subset=5), {}, (False, BF16, 5)),
        (GossipSpec(bits=8), {}, (False, 8, 1)),
    ],
)
def test_what_is_taken_over_next(
    spec: GossipSpec, changes: dict[str, int], expected: tuple[bool, int, int]
) -> None:
    choice: Listening = next_listening(spec, **{**USUAL, **changes})  # type: ignore[arg-type]
    assert (choice.whole, choice.bits, choice.subset) == expected
    assert choice.reason


def test_without_replicas_nothing_is_followed() -> None:
    async def main() -> None:
        async with swarm("a") as (_, _, copy):
            none: list[Replica] = []
            assert not await copy.follower.follow(lambda: none)

    virtual(main)
