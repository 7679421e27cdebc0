"""Pairwise averaging: the sum is kept, steps taken meanwhile are kept, and a bad or lost partner moves nothing."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import torch
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from pipeline_helpers import make_run, no_prior, no_priors

from meshd.gossip import exchange as exchange_module
from meshd.gossip import modular
from meshd.gossip import service as service_module
from meshd.gossip.coordinates import Coverage, covered, subset_seed
from meshd.gossip.distances import NEAR, Distances, regard, restraint
from meshd.gossip.exchange import MOST_STEPS, share
from meshd.gossip.modular import SAMPLES
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
@pytest.mark.parametrize("step", [1, 3])
def test_values_are_read_and_moved_across_tensor_borders(start: int, count: int, step: int) -> None:
    mine = values(0)
    before = in_order(mine).clone()
    flat = FlatParameters(mine, BASE)
    assert flat.count == COUNT
    positions = torch.arange(start, start + count, step)
    read = flat.read(positions)
    assert read.dtype == torch.float32
    assert torch.equal(read, (before - in_order(BASE))[positions])
    flat.move(positions, torch.arange(len(positions)) + 0.5)
    expected = before.clone()
    expected[positions] += torch.arange(len(positions)) + 0.5
    torch.testing.assert_close(in_order(mine), expected)


def test_the_size_of_all_values_is_told_by_samples_of_each_tensor() -> None:
    """A tensor counts by its size, however few or many samples there are of it."""
    made = {"small": torch.nn.Parameter(torch.empty(2)), "large": torch.nn.Parameter(torch.empty(6))}
    flat = FlatParameters(made, {name: torch.zeros_like(one) for name, one in made.items()})
    samples = torch.tensor([[3.0, 3.0, 3.0], [1.0, -1.0, 1.0]]).double()  # "large" comes first
    assert flat.root_mean_square(samples) == pytest.approx(math.sqrt((6 * 9.0 + 2 * 1.0) / 8))


def test_which_tensor_a_position_is_in() -> None:
    """In the order of names: 7 of a.bias, 30 of b.weight, 12 of c.weight."""
    flat = FlatParameters(values(0), BASE)
    assert flat.starts.tolist() == [0, 7, 37, 49]
    assert flat.tensor_of(torch.tensor([0, 6, 7, 36, 37, 48])).tolist() == [0, 0, 1, 1, 2, 2]


def test_nothing_to_read_is_no_values() -> None:
    assert FlatParameters({}, {}).count == 0
    assert len(FlatParameters(values(0), BASE).read(torch.arange(0))) == 0


def test_the_base_may_be_in_another_format() -> None:
    base = {name: value.bfloat16() for name, value in BASE.items()}
    read = FlatParameters(values(0), base).read(torch.arange(COUNT))
    expected = in_order(values(0)) - in_order({name: value.float() for name, value in base.items()})
    assert torch.equal(read, expected)


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
        gossip = {"timeout_s": 5.0, **changes.get("gossip", {})}  # type: ignore[call-overload]
        run = make_run([2], gossip=gossip, stop={"steps": changes.get("steps", 10)})
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
        monkeypatch.setattr(module, "SEGMENT_BLOCKS", 16)
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
                    b.gossip_service.stepped(8)
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
            assert a.counted("gossip_sent_bytes") == 2 * COUNT + 4 * SAMPLES * len(SHAPES) + len(SHAPES)
            expected = (before[0] - before[1]).square().mean().sqrt().item()
            assert a.counted("gossip_distance") == pytest.approx(expected, rel=0.3)  # by samples
            assert a.counted("gossip_distance") == b.counted("gossip_distance")
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
                # b's confirmations take longer: so b has moved when a has not.
                late = source == "b:1" and getattr(passing, "done", pb.GossipDone()).checksum
                return [Delivery(passing, delay_s=0.5 if late else 0.0)]

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
            a.gossip_service.stepped(8)
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
            await asyncio.sleep(10.0)  # the other side has moved as well
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
            a.gossip_service.stepped(8)
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
    flat.move(torch.arange(COUNT), torch.ones(COUNT))
    assert torch.equal(in_order(mine), before)


# ---- compressed ---------------------------------------------------------------------------------------

COMPRESSED: dict[str, object] = {"gossip": {"bits": 3, "subset": 4}}
BLOCKS = -(-COUNT // 4)  # 13, of which the last may be covered beyond the end


def compressed(names: str) -> dict[str, dict[str, object]]:
    return dict.fromkeys(names, COMPRESSED)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """4 blocks a segment: four segments, the last one of one."""
    for module in (exchange_module, service_module):
        monkeypatch.setattr(module, "SEGMENT_BLOCKS", 4)
    return 4


def covered_by(opening: pb.GossipOpen) -> set[int]:
    seed = subset_seed(opening.run_id, opening.stage)
    found = covered(0, -(-COUNT // opening.subset), opening.subset, opening.offset, seed)
    return {at for at in found.tolist() if at < COUNT}


def moved(peer: Peer, before: torch.Tensor) -> set[int]:
    return set((peer.vector != before).nonzero().flatten().tolist())


@pytest.mark.usefixtures("small_blocks")
def test_a_compressed_exchange_moves_both_by_opposite_amounts_where_it_covers_them() -> None:
    async def main() -> None:
        async with peers("ab", **compressed("ab")) as (net, (a, b)):
            openings: list[pb.GossipOpen] = []
            payload = {"a:1": 0, "b:1": 0}

            def tap(source: str, target: str, passing: Message) -> list[Delivery]:
                if isinstance(passing, pb.GossipMessage):
                    if passing.WhichOneof("body") == "open":
                        openings.append(pb.GossipOpen.FromString(passing.open.SerializeToString()))
                    payload[source] += len(passing.chunk.data) + len(passing.sample.values)
                    payload[source] += len(passing.sample.steps)
                return [Delivery(passing)]

            net.tap = tap
            seen: set[int] = set()
            for number in range(1, 5):
                openings.clear()
                before = a.vector, b.vector
                assert await a.exchange("b")
                await asyncio.sleep(0.1)
                assert [(one.bits, one.subset) for one in openings] == [(3, 4)] * 2
                assert openings[0].offset == openings[1].offset
                assert openings[0].exchange == openings[1].exchange
                there, back = a.vector - before[0], b.vector - before[1]
                torch.testing.assert_close(there, -back, rtol=0, atol=2e-6)  # values are up to 8
                assert moved(a, before[0]) <= covered_by(openings[0])
                assert moved(b, before[1]) <= covered_by(openings[0])
                assert moved(a, before[0])
                seen |= covered_by(openings[0])
                assert a.counted("gossip_exchanges") == b.counted("gossip_exchanges") == number
                assert a.counted("gossip_distance") == b.counted("gossip_distance") > 0.0
                assert a.counted("gossip_failed") == b.counted("gossip_failed") == 0
            assert seen == set(range(COUNT))  # four offsets, none left behind
            # Residues of 12 or 13 values in four segments, a sample and the steps, four times; both count the steps.
            sample = 4 * SAMPLES * len(SHAPES)
            assert payload["b:1"] > 4 * sample
            assert a.counted("gossip_sent_bytes") == payload["a:1"]
            assert b.counted("gossip_sent_bytes") == payload["b:1"] + 4 * len(SHAPES)
            assert a.counted("gossip_received_bytes") == b.counted("gossip_sent_bytes")

    virtual(main)


def test_steps_taken_during_a_compressed_exchange_do_not_spoil_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run begins they are larger than all that replicas differ by: what crosses is of the samples' moment."""
    monkeypatch.setattr(modular, "ENOUGH", 8)
    monkeypatch.setattr(exchange_module, "SEGMENT_BLOCKS", 4)

    async def main() -> None:
        async with peers("ab", a=COMPRESSED, b=COMPRESSED) as (net, (a, b)):
            step = {"a:1": 100.0, "b:1": -300.0}

            def tap(source: str, target: str, passing: Message) -> list[Delivery]:
                if getattr(passing, "sample", pb.GossipSample()).values:
                    peer = a if source == "a:1" else b
                    with torch.no_grad():
                        for parameter in peer.parameters.values():
                            parameter.add_(step[source])
                return [Delivery(passing)]

            net.tap = tap
            before = a.vector - b.vector
            assert await a.exchange("b")
            await asyncio.sleep(0.1)
            assert b.counted("gossip_exchanges") == 1
            # What is there now is the steps and, where they exchanged, less of the difference.
            after = a.vector - b.vector - 400.0
            assert after.norm() < before.norm()
            assert (after - before).abs().max() < 10.0

    virtual(main)


def test_after_long_alone_a_replica_exchanges_all_values_finely_once() -> None:
    async def main() -> None:
        async with peers("abcd", **compressed("abcd")) as (net, (a, _, _, d)):
            openings: list[tuple[int, int]] = []

            def tap(source: str, target: str, passing: Message) -> list[Delivery]:
                if source == "a:1" and getattr(passing, "open", pb.GossipOpen()).bits:
                    openings.append((passing.open.subset, passing.open.bits))
                return [Delivery(passing)]

            net.tap = tap
            for partner in "bcd":
                assert await a.exchange(partner)
            assert a.gossip_service._distances.usual > 0.0
            a.stage.runtime.version += 100
            assert await a.exchange("b")  # 100 steps are not long
            a.stage.runtime.version += 101
            apart = (a.vector - d.vector).norm()
            assert await a.exchange("d")
            assert a.gossip_service._distances.usual == 0.0  # it knows only d
            await asyncio.sleep(0.1)
            assert (a.vector - d.vector).norm() < 0.05 * apart
            assert await a.exchange("b")
            assert openings == [(4, 3)] * 4 + [(1, 16)] + [(4, 3)]

    virtual(main)


@pytest.mark.parametrize("late", ["a", "b"])
def test_a_break_anywhere_in_a_compressed_exchange_moves_one_segment_alone_at_most(
    small_blocks: int, late: str
) -> None:
    """late: whose confirmations take longer, so that this side has moved when the other has not."""

    async def break_at(message: int) -> tuple[bool, int]:
        async with peers("ab", **compressed("ab")) as (net, (a, b)):
            before = a.vector, b.vector
            seen = 0

            def tap(source: str, target: str, passing: Message) -> list[Delivery]:
                nonlocal seen
                seen += 1
                if seen == message:
                    net.cut("a:1", "b:1")
                slow = source == f"{late}:1" and getattr(passing, "done", pb.GossipDone()).checksum
                return [Delivery(passing, delay_s=0.5 if slow else 0.0)]

            net.tap = tap
            done = await a.exchange("b")
            await asyncio.sleep(10)
            both = moved(a, before[0]) & moved(b, before[1])
            alone = moved(a, before[0]) ^ moved(b, before[1])
            torch.testing.assert_close(
                (a.vector - before[0])[sorted(both)], (before[1] - b.vector)[sorted(both)], rtol=0, atol=2e-6
            )
            assert a.gossip_service._turn is b.gossip_service._turn is None
            net.tap = None
            net.heal()
            assert await a.exchange("b")  # free for the next
            return done and seen < message, len(alone)

    async def main() -> None:
        alone, message = [], 0
        over = False
        while not over:
            message += 1
            over, one = await break_at(message)
            alone.append(one)
        assert message > 18  # an opening, a sample, and four segments of a chunk and a Done, each way
        assert max(alone) <= small_blocks
        assert any(alone)

    virtual(main)


def sample(message: pb.GossipMessage, values: bytes | None = None, steps: bytes | None = None) -> None:
    """Spoil a sample."""
    if message.WhichOneof("body") == "sample":
        message.sample.values = message.sample.values if values is None else values
        if message.sample.steps and steps is not None:
            message.sample.steps = steps


def spoilt(what: str, message: pb.GossipMessage) -> None:
    """Change a message in place, if it is one that this spoils."""
    kind = message.WhichOneof("body")
    values = message.sample.values
    if what == "sample short":
        sample(message, values[:-4])
    elif what == "sample long":
        sample(message, values + bytes(4))
    elif what == "sample empty":
        sample(message, b"")
    elif what in ("nan", "inf"):
        number = torch.tensor([float(what)]).numpy().tobytes()
        sample(message, number + values[4:])
    elif what == "no steps":
        sample(message, steps=b"")
    elif what == "too many steps":
        sample(message, steps=message.sample.steps + b"\0")
    elif what == "stretched":
        # One code off may be rounding; two are 41 %.
        sample(
            message, steps=bytes([message.sample.steps[0] + 2]) + message.sample.steps[1:] if values else None
        )
    elif what == "shrunk":
        sample(
            message,
            steps=message.sample.steps[:-1] + bytes([message.sample.steps[-1] - 2]) if values else None,
        )
    elif what == "short residues" and kind == "chunk":
        message.chunk.data = message.chunk.data[:-1]
    elif what.startswith("open ") and kind == "open":
        _, field, number = what.split()
        setattr(message.open, field, float(number) if field == "usual" else int(number))


# A sample for which only the opener's steps can be wrong has no steps from the other side.
EITHER = ["sample short", "sample long", "sample empty", "nan", "inf", "short residues"]
BY_OPENER = ["no steps", "too many steps", "stretched", "shrunk"]
OPENINGS = [
    *("open bits 5", "open bits 0", "open bits 1", "open subset 0", "open subset 4097", "open offset 4"),
    f"open weight_version {MOST_STEPS + 1}",
    *("open usual nan", "open usual inf", "open usual -1"),
]


def refused_and_free(what: str, liar: str) -> None:
    """What `liar` sends is spoilt on its way: the other refuses it, nothing moves, and the next exchange is done."""

    async def main() -> None:
        async with peers("ab", **compressed("ab")) as (net, (a, b)):
            good = b if liar == "a" else a
            touched = 0

            def tap(source: str, target: str, passing: Message) -> list[Delivery]:
                nonlocal touched
                if source == f"{liar}:1" and isinstance(passing, pb.GossipMessage):
                    whole = passing.SerializeToString()
                    spoilt(what, passing)
                    touched += whole != passing.SerializeToString()
                return [Delivery(passing)]

            net.tap = tap
            before = a.vector, b.vector
            assert not await a.exchange("b")
            await asyncio.sleep(10)
            assert touched
            assert good.counted("gossip_failed") == 1
            assert a.counted("gossip_failed") == 1
            assert torch.equal(a.vector, before[0])
            assert torch.equal(b.vector, before[1])
            assert a.gossip_service._turn is b.gossip_service._turn is None
            net.tap = None
            assert await a.exchange("b")
            await asyncio.sleep(0.1)
            assert not torch.equal(b.vector, before[1])

    virtual(main)


@pytest.mark.parametrize("liar", ["a", "b"])
@pytest.mark.parametrize("what", [*EITHER, *OPENINGS])
def test_a_wrong_sample_or_opening_is_refused_and_moves_nothing(what: str, liar: str) -> None:
    refused_and_free(what, liar)


@pytest.mark.parametrize(("subset", "bits"), [(4, 8), (1, 3), (1, 8), (3, 3)])
def test_an_opener_that_wants_more_than_the_run_exchanges_is_refused(subset: int, bits: int) -> None:
    """Residues take memory for all their values at once."""

    async def main() -> None:
        async with peers("ab", **compressed("ab")) as (_, (a, b)):
            greedy = a.gossip_service  # of the same run, which it does not keep to
            greedy._spec = greedy._spec.model_copy(update={"bits": bits, "subset": subset})
            greedy._coverage = Coverage(subset, 0)
            before = b.vector
            assert not await a.exchange("b")
            assert b.counted("gossip_failed") == 1
            assert torch.equal(b.vector, before)
            # All values in bf16, a segment at a time, anybody may ask for.
            assert await greedy.exchange_with(Replica("b", "b", "b:1"), whole=True)
            await asyncio.sleep(0.1)
            assert not torch.equal(b.vector, before)

    virtual(main)


@pytest.mark.parametrize("what", BY_OPENER)
def test_an_opener_whose_steps_are_not_those_of_the_samples_is_refused(what: str) -> None:
    refused_and_free(what, "a")


@pytest.mark.parametrize("what", ["open subset 5", "open bits 4", "open offset 9", "open exchange 7"])
def test_an_answer_that_does_not_repeat_the_openers_choice_is_refused(what: str) -> None:
    refused_and_free(what, "b")


@pytest.mark.parametrize("who", ["a", "b"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_of_its_own_that_are_not_finite_end_a_compressed_exchange(who: str, value: float) -> None:
    """C27: of every coordinate, in the sample or not. Residues could not show it."""

    async def main() -> None:
        async with peers("ab", **compressed("ab")) as (_, (a, b)):
            bad, good = (a, b) if who == "a" else (b, a)
            kept = {name: parameter.detach().clone() for name, parameter in bad.parameters.items()}
            with torch.no_grad():
                for parameter in bad.parameters.values():
                    parameter.fill_(value)
            before = good.vector
            assert not await a.exchange("b")
            await asyncio.sleep(10)
            assert torch.equal(good.vector, before)
            assert good.counted("gossip_failed") == bad.counted("gossip_failed") == 1
            with torch.no_grad():
                for name, parameter in bad.parameters.items():
                    parameter.copy_(kept[name])
            assert await a.exchange("b")

    virtual(main)


@pytest.mark.parametrize("change", ["twice", "swapped"])
@pytest.mark.parametrize("source", ["a", "b"])
@pytest.mark.usefixtures("small_blocks")
def test_repeated_and_reordered_messages_move_nothing_twice(source: str, change: str) -> None:
    """Whichever message it is: a segment is moved once on each side, or on one alone, or not at all."""

    async def changed_at(number: int) -> bool:
        """Returns whether there is no such message any more."""
        async with peers("ab", **compressed("ab")) as (net, (a, b)):
            async with peers("ab", **compressed("ab")) as (_, (c, d)):  # the same, undisturbed
                assert await c.exchange("b")
                await asyncio.sleep(1)
                expected = c.vector, d.vector
            before = a.vector, b.vector
            seen, held = 0, None

            def tap(sender: str, target: str, passing: Message) -> list[Delivery]:
                nonlocal seen, held
                if sender != f"{source}:1" or not isinstance(passing, pb.GossipMessage):
                    return [Delivery(passing)]
                seen += 1
                if change == "twice":
                    return [Delivery(passing)] * (2 if seen == number else 1)
                if seen == number:
                    held = passing
                    return []
                if held is not None:
                    first, held = held, None
                    return [Delivery(passing), Delivery(first)]
                return [Delivery(passing)]

            net.tap = tap
            await a.exchange("b")
            await asyncio.sleep(20)
            for peer, start, end in zip((a, b), before, expected, strict=True):
                as_it_was, as_it_should = peer.vector == start, torch.isclose(peer.vector, end, atol=1e-5)
                assert bool((as_it_was | as_it_should).all())
            alone = moved(a, before[0]) ^ moved(b, before[1])
            assert len(alone) <= 4
            assert a.gossip_service._turn is b.gossip_service._turn is None
            net.tap = None
            assert await a.exchange("b")
            return seen < number

    async def main() -> None:
        number = 1
        while not await changed_at(number):
            number += 1
        assert number > 6

    virtual(main)


# ---- shares, restraint, distances ---------------------------------------------------------------------

OPENS = st.builds(
    pb.GossipOpen,
    work=st.integers(0, 2**64 - 1),
    weight_version=st.integers(0, MOST_STEPS),
)


@given(OPENS, OPENS)
def test_the_two_shares_add_up_to_one_within_their_bounds(one: pb.GossipOpen, other: pb.GossipOpen) -> None:
    first, second = share(one, other), share(other, one)
    assert first + second == pytest.approx(1.0, abs=1e-12)
    assert 0.4 - 1e-12 <= min(first, second) <= max(first, second) <= 0.6 + 1e-12


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        ((0, 0), (0, 0), 0.5),
        ((100, 5), (100, 5), 0.5),
        ((100, 5), (150, 5), 0.6),
        ((150, 5), (100, 5), 0.4),
        ((100, 5), (10**12, 5), 0.6),
        ((10**12, 5), (100, 5), 0.4),
        # 20 steps behind count half, and so on.
        ((150, 50), (200, 30), 0.4),
        ((200, 30), (150, 50), 0.6),
        ((100, 90), (200, 70), 0.5),
        ((100, 10**9), (10**12, 0), 0.4),
        ((0, 5), (100, 5), 0.6),
    ],
)
def test_who_has_worked_more_counts_more_and_who_is_behind_less(
    mine: tuple[int, int], theirs: tuple[int, int], expected: float
) -> None:
    one, other = (pb.GossipOpen(work=work, weight_version=version) for work, version in (mine, theirs))
    assert share(one, other) == pytest.approx(expected)


@given(OPENS, OPENS)
def test_a_listener_moves_all_the_way_and_its_partner_not_at_all(
    one: pb.GossipOpen, other: pb.GossipOpen
) -> None:
    one.listening = True
    assert (share(one, other), share(other, one)) == (1.0, 0.0)


@given(st.floats(1e-30, 1e30), st.floats(0.0, 1e38))
def test_who_keeps_further_away_pulls_less(usual: float, distance: float) -> None:
    factor = restraint(usual, distance)
    assert 0.0 <= factor <= 1.0
    assert factor * distance <= NEAR * usual * (1 + 1e-9)
    assert restraint(usual, 2 * distance) <= factor


@pytest.mark.parametrize(
    ("usual", "distance", "expected"),
    [(0.5, 0.0, 1.0), (0.5, 0.75, 1.0), (0.5, 1.5, 1 / 64), (0.5, 3.0, 1 / 4096), (math.inf, 1e9, 1.0)],
)
def test_up_to_the_usual_distance_a_partner_counts_in_full(
    usual: float, distance: float, expected: float
) -> None:
    assert restraint(usual, distance) == pytest.approx(expected)


SIZES = st.one_of(st.just(0.0), st.floats(1e-9, 1e9))


@given(SIZES, SIZES, SIZES, SIZES, SIZES)
def test_two_that_are_abreast_regard_each_other_alike(
    usual: float, learned: float, others_usual: float, others_learned: float, distance: float
) -> None:
    mine = regard(usual, learned, others_usual, others_learned, distance)
    theirs = regard(others_usual, others_learned, usual, learned, distance)
    assert 0.0 <= mine <= 1.0
    abreast = min(learned, others_learned) >= 0.6 * max(learned, others_learned)
    used = usual or 2 * learned, others_usual or 2 * others_learned
    if abreast and min(used) >= 0.5 * max(used):
        assert mine == theirs


@pytest.mark.parametrize(
    ("mine", "theirs", "distance", "expected"),
    [
        # (usual, learned): abreast, the smaller `usual` counts, or what was learned by one that knows too few.
        ((1.0, 10.0), (2.0, 9.0), 1.5, 1.0),
        ((1.0, 10.0), (2.0, 9.0), 3.0, 1 / 64),
        ((2.0, 10.0), (1.0, 9.0), 3.0, 1 / 64),
        ((0.0, 0.5), (2.0, 0.5), 3.0, 1 / 64),
        ((2.0, 0.5), (0.0, 0.5), 3.0, 1 / 64),
        # All at the base, as a run begins.
        ((0.0, 0.0), (0.0, 0.0), 3.0, 1.0),
        # The partner has learned less: at 0.6 of what this one has it counts, at 0.3 a 64th, at nothing not at all.
        ((9.0, 10.0), (9.0, 6.0), 5.0, 1.0),
        ((9.0, 10.0), (9.0, 3.0), 5.0, 1 / 64),
        ((9.0, 10.0), (9.0, 0.0), 5.0, 0.0),
        # The partner has learned more: this one goes by what it is used to itself.
        ((9.0, 3.0), (1.0, 10.0), 5.0, 1.0),
        ((0.0, 0.0), (1.0, 10.0), 5.0, 1.0),
        ((1.0, 3.0), (9.0, 10.0), 3.0, 1 / 64),
        # This one is far from all, or they from it: each by what it is used to.
        ((30.0, 100.0), (1.0, 100.0), 30.0, 1.0),
        ((1.0, 100.0), (30.0, 100.0), 3.0, 1 / 64),
    ],
)
def test_how_much_a_partner_counts(
    mine: tuple[float, float], theirs: tuple[float, float], distance: float, expected: float
) -> None:
    assert regard(*mine, *theirs, distance) == pytest.approx(expected)


def test_the_usual_distance_is_the_median_over_partners_with_one_voice_each() -> None:
    known = Distances()
    for peer, distance in (("a", 1.0), ("b", 3.0)):
        assert known.usual == 0.0
        known.measured(peer, distance)
    assert known.usual == 0.0  # one of two may be the bad one
    known.measured("c", 2.0)
    assert known.usual == 2.0
    for _ in range(50):
        known.measured("bad", 1e9)
    assert known.usual == 2.5
    known.measured("bad", 2.2)  # the last measured counts
    assert known.usual == pytest.approx(2.1)


def test_those_refused_for_their_distance_count_until_they_are_usual() -> None:
    """Two halves of a swarm that were parted: of a replica's partners more are far than near in the end."""
    known = Distances()
    for peer in "abc":
        known.measured(peer, 1.0)
    for number in range(3):
        assert known.usual == 1.0
        known.measured(f"other {number}", 1000.0)
    known.measured("other 3", 1000.0)
    assert known.usual == 1000.0


def test_partners_are_remembered_up_to_a_number_and_the_oldest_goes_first() -> None:
    known = Distances()
    known.measured("first", 1e6)
    for number in range(1000):
        known.measured("kept", 1e6)
        known.measured(str(number), 1.0)
    assert len(known._last) <= 64
    assert "first" not in known._last
    assert known._last["kept"] == 1e6
    assert known.usual == 1.0
