"""Pairwise averaging: the sum is kept, steps taken meanwhile are kept, and a bad or lost partner moves nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import torch
from google.protobuf.message import Message
from pipeline_helpers import make_run, no_prior, no_priors

from meshd.gossip import exchange as exchange_module
from meshd.gossip import service as service_module
from meshd.gossip.service import Gossip, choose_partner
from meshd.gossip.values import FlatParameters
from meshd.observe.metrics import Metrics
from meshd.optim.inner import StepReport
from meshd.optim.schedule import TokenCounter
from meshd.pipeline.keeping import Keeping
from meshd.pipeline.stage import Replica, Stage, Surroundings
from meshd.pipeline.worker import DeviceWorker
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock, run_virtual
from meshd.transport.base import Duplex
from meshd.transport.memory import Delivery, MemoryNetwork

SHAPES = {"b.weight": (6, 5), "a.bias": (7,), "c.weight": (3, 4)}
COUNT = 49


def values(seed: int, size: float = 1.0) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(size * torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }


BASE = {name: parameter.detach() for name, parameter in values(99, 3.0).items()}


# ---- the flat vector --------------------------------------------------------------------------------


def in_order(named: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([named[name].detach().flatten() for name in sorted(named)])


@pytest.mark.parametrize(("start", "count"), [(0, 49), (0, 7), (5, 4), (6, 32), (7, 30), (40, 9), (48, 1)])
def test_a_range_is_read_and_moved_across_tensor_borders(start: int, count: int) -> None:
    mine = values(0)
    before = in_order(mine).clone()
    flat = FlatParameters(mine, BASE)
    assert flat.count == COUNT
    read = flat.read(start, count)
    delta = (before - in_order(BASE))[start : start + count]
    assert read.dtype == torch.bfloat16
    assert torch.equal(read, delta.bfloat16())
    theirs = read + torch.ones_like(read)
    squares = flat.move(start, read, theirs)
    difference = theirs.float() - read.float()
    expected = before.clone()
    expected[start : start + count] += 0.5 * difference
    torch.testing.assert_close(in_order(mine), expected)
    assert squares == pytest.approx(difference.square().sum().item())


def test_nothing_to_read_is_no_values() -> None:
    assert FlatParameters({}, {}).count == 0
    assert len(FlatParameters({}, {}).read(0, 10)) == 0


def test_the_base_may_be_in_another_format() -> None:
    base = {name: value.bfloat16() for name, value in BASE.items()}
    read = FlatParameters(values(0), base).read(0, COUNT)
    expected = in_order(values(0)) - in_order({name: value.float() for name, value in base.items()})
    assert torch.equal(read, expected.bfloat16())


def test_of_two_replicas_only_one_opens() -> None:
    """So two never refuse each other because each is busy with its own exchange."""
    replicas = [Replica(name, name, f"{name}:1") for name in "abcd"]
    rng = random.Random(0)
    assert choose_partner("d", replicas, (), False, rng) is None
    assert {choose_partner("b", replicas, (), False, rng).peer_id for _ in range(50)} == {"c", "d"}  # type: ignore[union-attr]
    assert choose_partner("b", replicas, {"c", "d"}, False, rng) is None
    others = replicas[:3]
    assert {choose_partner("d", others, {"b"}, True, rng).peer_id for _ in range(50)} == {"a", "c"}  # type: ignore[union-attr]


# ---- whole peers ------------------------------------------------------------------------------------


class Peer:
    """One replica of a stage: parameters and gossip, no pipeline."""

    def __init__(
        self, net: MemoryNetwork, name: str, seed: int, others: list[str], **changes: object
    ) -> None:
        run = make_run([2], gossip={"timeout_s": 5.0}, stop={"steps": changes.get("steps", 10)})
        self.name, self.parameters = name, values(seed)
        if "without" in changes:
            del self.parameters[str(changes["without"])]
        self.clock = VirtualClock()
        self.worker = DeviceWorker(name)
        self.metrics = Metrics(self.clock)
        around = Surroundings(
            replicas=lambda stage: [Replica(other, other, f"{other}:1") for other in others if other != name],
            live_replicas=lambda: len(others),
            frozen=_no_snapshot,
            stepped=_ignore,
            priors=no_priors(),
            fetch_prior=no_prior,
        )
        self.stage = Stage(
            name,
            name,
            0,
            SimpleNamespace(run=run, version=3, keeping=Keeping()),  # type: ignore[arg-type]
            self.worker,
            net.transport(f"{name}:1"),
            TokenCounter(),
            around,
            self.clock,
            self.metrics,
            random.Random(name),
        )
        self.flat = FlatParameters(self.parameters, BASE)
        self.gossip_service = Gossip(self.stage, self.flat, int(changes.get("stage", 1)))  # type: ignore[call-overload]
        net.register(f"{name}:1", self)  # type: ignore[arg-type]

    async def gossip(self, duplex: Duplex[pb.GossipMessage]) -> None:
        await self.gossip_service.serve(duplex)

    async def exchange(self, other: str) -> bool:
        """Open one exchange. True: it was completed."""
        return await self.gossip_service.exchange_with(Replica(other, other, f"{other}:1"))

    @property
    def vector(self) -> torch.Tensor:
        return in_order(dict(self.parameters)).clone()

    def counted(self, name: str) -> float:
        return self.metrics.value(name)


async def _no_snapshot(watermark: int) -> None:
    return None


def _ignore(report: StepReport) -> None:
    return None


@asynccontextmanager
async def peers(names: str, **changes: dict[str, object]) -> AsyncIterator[tuple[MemoryNetwork, list[Peer]]]:
    """Replicas by one-letter names on one network; changes: by name."""
    async with MemoryNetwork(VirtualClock()) as net:
        made = [Peer(net, name, ord(name), list(names), **changes.get(name, {})) for name in names]
        for peer in made:
            await peer.worker.__aenter__()
        try:
            yield net, made
        finally:
            for peer in made:
                await peer.worker.__aexit__(None, None, None)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> int:
    """16 values a segment: four segments, the last one short."""
    for module in (exchange_module, service_module):
        monkeypatch.setattr(module, "SEGMENT_BYTES", 32)
    return 16


def virtual(main: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await main()

    run_virtual(run())


def test_a_replica_whose_partner_takes_no_steps_opens_in_the_end() -> None:
    """The one with the smaller id has no work, so that it never opens; what the other learns would stay with it."""

    async def main() -> None:
        async with peers("ab") as (_, (a, b)), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(peer.gossip_service.run()) for peer in (a, b)]
            due = 0
            while not b.counted("gossip_exchanges"):
                due += 1
                assert due < 10
                for _ in range(b.stage.runtime.run.spec.gossip.every):
                    b.gossip_service.stepped()
                await b.clock.sleep(5.0)
            assert due > 1  # it waits for the other first
            assert a.counted("gossip_exchanges") == 1
            for task in running:
                task.cancel()

    virtual(main)


@pytest.mark.usefixtures("small_segments")
def test_one_exchange_keeps_the_sum_and_leaves_only_rounding_between_the_two() -> None:
    async def main() -> None:
        async with peers("ab") as (_, (a, b)):
            before = a.vector, b.vector
            a.stage.counter.advance("origin", 70)
            b.stage.counter.advance("other", 5)
            assert await a.exchange("b")
            await asyncio.sleep(0)
            torch.testing.assert_close(a.vector + b.vector, before[0] + before[1], rtol=1e-6, atol=1e-6)
            # bf16 keeps 8 bits of each delta.
            deltas = [vector - in_order(BASE) for vector in before]
            rounding = (deltas[0].abs() + deltas[1].abs()) * 2**-8
            assert bool(((a.vector - b.vector).abs() <= rounding).all())
            assert a.counted("gossip_exchanges") == b.counted("gossip_exchanges") == 1
            assert a.counted("gossip_sent_bytes") == 2 * COUNT
            expected = (before[0] - before[1]).square().mean().sqrt().item()
            assert a.counted("gossip_distance") == pytest.approx(expected, rel=0.02)
            # The token counter comes along.
            assert a.stage.counter.total == b.stage.counter.total == 75

    virtual(main)


@pytest.mark.usefixtures("small_segments")
def test_a_step_taken_during_the_exchange_is_kept() -> None:
    """What was read is what is compared; what came since is added to on top, on both sides."""

    async def main() -> None:
        async with peers("ab") as (net, (a, b)):
            net.set_delay("a:1", "b:1", 1.0)
            total = a.vector + b.vector
            running = asyncio.ensure_future(a.exchange("b"))
            await asyncio.sleep(2.5)  # the values of the first segment are under way
            with torch.no_grad():
                for parameter in a.parameters.values():
                    parameter.add_(0.25)
            assert await running
            await asyncio.sleep(3)
            torch.testing.assert_close(a.vector + b.vector, total + 0.25, rtol=1e-5, atol=1e-5)
            first = (a.vector - b.vector)[:16]
            torch.testing.assert_close(first, torch.full((16,), 0.25), rtol=0, atol=0.08)

    virtual(main)


@pytest.mark.parametrize("who", ["a", "b"])
def test_a_partner_with_values_that_are_not_finite_is_refused_and_named(who: str) -> None:
    """C27. On both sides, whichever opened; nothing is moved, and nobody's process ends."""

    async def main() -> None:
        async with peers("ab") as (_, (a, b)):
            bad, good = (a, b) if who == "a" else (b, a)
            with torch.no_grad():
                bad.parameters["b.weight"][2, 2] = torch.nan
            before = good.vector
            assert not await a.exchange("b")
            await asyncio.sleep(1)
            assert torch.equal(good.vector, before)
            assert good.counted("gossip_failed") == bad.counted("gossip_failed") == 1
            # It is free for the next.
            with torch.no_grad():
                bad.parameters["b.weight"][2, 2] = 0.0
            assert await a.exchange("b")

    virtual(main)


def test_a_break_anywhere_leaves_both_valid_and_the_mean_within_one_segment(small_segments: int) -> None:
    """At every message of the exchange (DESIGN section 6: bounded drift of the mean)."""

    async def break_at(message: int) -> tuple[bool, int]:
        """Returns whether the exchange was over before, and the number of values moved on one side alone."""
        async with peers("ab") as (net, (a, b)):
            before = a.vector, b.vector
            middle = (before[0] + before[1]) / 2
            seen = 0

            def tap(source: str, target: str, passing: Message) -> list[Delivery]:
                nonlocal seen
                seen += 1
                if seen == message:
                    net.cut("a:1", "b:1")
                # One way is slower: so one side has moved when the other has not.
                return [Delivery(passing, delay_s=0.5 if source == "b:1" else 0.0)]

            net.tap = tap
            done = await a.exchange("b")
            await asyncio.sleep(10)
            moved = []
            for peer, start in zip((a, b), before, strict=True):
                is_moved = ~torch.isclose(peer.vector, start, rtol=0, atol=1e-6)
                # Each value is where it was, or at the middle (to bf16's rounding).
                assert bool(((peer.vector - middle).abs() < 0.1)[is_moved].all())
                moved.append(is_moved)
            alone = int((moved[0] ^ moved[1]).sum())
            assert a.gossip_service._turn is b.gossip_service._turn is None
            return done and seen < message, alone

    async def main() -> None:
        drifts, message = [], 0
        over = False
        while not over:
            message += 1
            over, alone = await break_at(message)
            drifts.append(alone)
        assert message > 12  # four segments of a chunk and a Done each way, and the opening
        assert max(drifts) <= small_segments
        assert any(drifts)  # it was put to the test

    virtual(main)


@pytest.mark.usefixtures("small_segments")
def test_after_a_partner_died_the_next_one_can_be_had() -> None:
    async def main() -> None:
        async with peers("abc") as (net, (a, b, _)):
            count = 0

            def tap(source: str, target: str, passing: Message) -> list[Delivery]:
                nonlocal count
                count += 1
                if count == 9:
                    net.kill("b:1")
                return [Delivery(passing)]

            net.tap = tap
            assert not await a.exchange("b")
            assert a.counted("gossip_failed") == 1
            assert await a.exchange("c")
            assert bool(torch.isfinite(b.vector).all())

    virtual(main)


@pytest.mark.parametrize("phase", ["open", "chunk"])
def test_a_partner_that_falls_silent_is_given_up_in_time(phase: str) -> None:
    async def main() -> None:
        async with peers("a") as (net, (a,)):

            class Silent:
                async def gossip(self, duplex: Duplex[pb.GossipMessage]) -> None:
                    async for message in duplex:
                        if phase == "chunk" and message.WhichOneof("body") == "open":
                            await duplex.send(message)

            net.register("b:1", Silent())  # type: ignore[arg-type]
            before = a.vector
            assert not await a.exchange("b")
            assert asyncio.get_running_loop().time() < 10
            assert a.counted("gossip_failed") == 1
            assert torch.equal(a.vector, before)

    virtual(main)


@pytest.mark.parametrize("names", ["abc", "abcd"])
def test_more_replicas_converge_geometrically_to_their_mean(names: str) -> None:
    async def main() -> None:
        async with peers(names) as (_, made):
            mean = sum(peer.vector for peer in made) / len(made)
            spread = [sum((peer.vector - mean).square().sum() for peer in made).item()]
            for _ in range(6):
                for opener in made:
                    for partner in made:
                        if opener.name < partner.name:
                            assert await opener.exchange(partner.name)
                            await asyncio.sleep(0.1)  # the other side has moved as well
                spread.append(sum((peer.vector - mean).square().sum() for peer in made).item())
            assert spread[1] < 0.2 * spread[0]
            # bf16 of the deltas is the floor.
            assert spread[-1] < 1e-4 * spread[0]
            torch.testing.assert_close(
                sum(peer.vector for peer in made) / len(made), mean, rtol=1e-5, atol=1e-5
            )

    virtual(main)


def test_a_busy_partner_refuses_and_is_asked_again_until_it_is_free() -> None:
    async def main() -> None:
        async with peers("ab") as (_, (a, b)), asyncio.TaskGroup() as tasks:
            b.gossip_service._turn = object()
            assert not await a.exchange("b")
            assert (a.counted("gossip_busy"), a.counted("gossip_failed")) == (1, 0)
            running = tasks.create_task(a.gossip_service.run())
            a.gossip_service.stepped()
            await asyncio.sleep(0.25)
            assert a.counted("gossip_exchanges") == 0
            b.gossip_service._turn = None
            await asyncio.sleep(2)
            assert a.counted("gossip_exchanges") == 1
            # One exchange for one step.
            await asyncio.sleep(60)
            assert a.counted("gossip_exchanges") == 1
            running.cancel()

    virtual(main)


@pytest.mark.parametrize("leaving", [False, True])
def test_two_that_open_with_each_other_at_the_same_moment_exchange_once(leaving: bool) -> None:
    """Over a slow link neither has the other's opening before it has sent its own, however often it tries."""

    async def main() -> None:
        async with peers("ab") as (net, (a, b)):
            net.set_delay("a:1", "b:1", 2.0)
            before = a.vector + b.vector
            if leaving:
                for peer in (a, b):
                    peer.stage.runtime.keeping.stepped += 1
                await asyncio.gather(a.gossip_service.farewell(), b.gossip_service.farewell())
            else:
                assert await asyncio.gather(a.exchange("b"), b.exchange("a")) == [True, False]
            for peer in (a, b):
                assert (peer.counted("gossip_exchanges"), peer.counted("gossip_failed")) == (1, 0)
                assert peer.gossip_service._turn is None
            torch.testing.assert_close(a.vector + b.vector, before, rtol=1e-6, atol=1e-6)
            assert await b.exchange("a")

    virtual(main)


def test_a_partner_that_answers_although_it_has_opened_itself_gets_one_exchange() -> None:
    """b lets go of its own opening for a's; a, which refuses when it is honest, goes on with both."""

    async def main() -> None:
        async with peers("ab") as (net, (a, b)):
            net.set_delay("a:1", "b:1", 2.0)

            async def dishonest() -> None:
                await asyncio.sleep(1.0)
                own, a.gossip_service._turn = a.gossip_service._turn, None
                await asyncio.sleep(2.0)
                a.gossip_service._turn = own

            opened = await asyncio.gather(a.exchange("b"), b.exchange("a"), dishonest())
            assert opened[1] is False
            await asyncio.sleep(30.0)
            assert b.gossip_service._turn is None
            assert b.counted("gossip_exchanges") == 1

    virtual(main)


@pytest.mark.parametrize(
    "change", [{"steps": 11}, {"stage": 0}, {"without": "a.bias"}], ids=["run", "stage", "size"]
)
def test_a_replica_of_another_run_stage_or_size_is_refused(change: dict[str, object]) -> None:
    """For good: it is not taken for busy and asked again."""

    async def main() -> None:
        async with peers("ab", b=change) as (_, (a, b)):
            before = a.vector, b.vector
            assert not await a.exchange("b")
            assert (a.counted("gossip_busy"), a.counted("gossip_failed")) == (0, 1)
            # Left alone for a while, whatever happens.
            running = asyncio.create_task(a.gossip_service.run())
            a.gossip_service.stepped()
            await asyncio.sleep(20)
            running.cancel()
            assert a.counted("gossip_failed") == 1
            assert b.counted("gossip_failed") == 1
            assert torch.equal(a.vector, before[0])
            assert torch.equal(b.vector, before[1])

    virtual(main)


def test_a_partner_that_has_no_stage_yet_or_is_not_there_is_one_failure() -> None:
    async def main() -> None:
        async with peers("a") as (_, (a,)):
            assert not await a.exchange("nobody")
            assert a.counted("gossip_failed") == 1

    virtual(main)


@pytest.mark.parametrize(
    "lie",
    [
        pb.GossipMessage(chunk=pb.GossipChunk(offset=4, data=b"12")),
        pb.GossipMessage(chunk=pb.GossipChunk(offset=0, data=b"")),
        pb.GossipMessage(chunk=pb.GossipChunk(offset=0, data=bytes(2))),
        pb.GossipMessage(chunk=pb.GossipChunk(offset=0, data=bytes(200))),
        pb.GossipMessage(done=pb.GossipDone(segment=0, checksum=1)),
        pb.GossipMessage(),
    ],
    ids=["gap", "empty", "a crumb", "too much", "done before the values", "nothing"],
)
def test_a_partner_that_breaks_the_protocol_moves_nothing(lie: pb.GossipMessage) -> None:
    async def main() -> None:
        async with peers("a") as (net, (a,)):

            class Liar:
                async def gossip(self, duplex: Duplex[pb.GossipMessage]) -> None:
                    messages = aiter(duplex)
                    await duplex.send(await anext(messages))
                    await duplex.send(lie)
                    async for _ in messages:
                        pass

            net.register("b:1", Liar())  # type: ignore[arg-type]
            before = a.vector
            assert not await a.exchange("b")
            assert torch.equal(a.vector, before)
            assert a.counted("gossip_failed") == 1

    virtual(main)


def test_a_wrong_confirmation_moves_nothing() -> None:
    async def main() -> None:
        async with peers("a") as (net, (a,)):

            class Liar:
                async def gossip(self, duplex: Duplex[pb.GossipMessage]) -> None:
                    async for message in duplex:
                        if message.WhichOneof("body") == "done":
                            message.done.checksum ^= 1
                        await duplex.send(message)

            net.register("b:1", Liar())  # type: ignore[arg-type]
            before = a.vector
            assert not await a.exchange("b")
            assert torch.equal(a.vector, before)

    virtual(main)


def test_the_runs_result_is_not_moved_any_more() -> None:
    mine = values(0)
    flat = FlatParameters(mine, BASE, lambda: True)
    before = in_order(mine).clone()
    read = flat.read(0, COUNT)
    assert flat.move(0, read, read + 1) == 0.0
    assert torch.equal(in_order(mine), before)
