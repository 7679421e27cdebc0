"""One exchange of two: the sum is kept, steps taken meanwhile are kept, and a break moves one segment alone at most."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import pytest
import torch
from google.protobuf.message import Message
from gossip_peers import (
    BASE,
    COUNT,
    SHAPES,
    Peer,
    compressed,
    in_order,
    peers,
    replica_of,
    segments_of,
    values,
    virtual,
)

from meshd.gossip import exchange as exchange_module
from meshd.gossip import modular
from meshd.gossip.coordinates import covered, subset_seed
from meshd.gossip.modular import SAMPLES
from meshd.gossip.values import FlatParameters
from meshd.proto import meshd_pb2 as pb
from meshd.transport.memory import Delivery, MemoryNetwork


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> int:
    """16 values a segment: four segments, the last one short."""
    return segments_of(monkeypatch, 16)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Compressed, 4 blocks a segment: four segments, the last one of one."""
    return segments_of(monkeypatch, 4)


# ---- the flat vector --------------------------------------------------------------------------------


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


def test_the_runs_result_is_not_moved_any_more() -> None:
    mine = values(0)
    flat = FlatParameters(mine, BASE, lambda: True)
    before = in_order(mine).clone()
    flat.move(torch.arange(COUNT), torch.ones(COUNT))
    assert torch.equal(in_order(mine), before)


# ---- undisturbed -------------------------------------------------------------------------------------


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


def test_a_followed_replicas_device_is_waited_for_once_in_several_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each wait may be for a whole microbatch: a newcomer would be at it for minutes."""
    segments_of(monkeypatch, 8)
    monkeypatch.setattr(exchange_module, "READ_AHEAD", 3)

    async def main() -> None:
        async with peers("ab") as (_, (a, b)):
            waits = 0
            run = b.worker.run

            def counted(job: Callable[[], object], priority: int) -> Awaitable[object]:
                nonlocal waits
                waits += 1
                return run(job, priority)

            monkeypatch.setattr(b.worker, "run", counted)
            await a.gossip_service.follow(replica_of("b"), lambda: None)
            assert waits == 3, "seven segments, three at a time"
            assert (a.vector - b.vector).abs().max() < 0.1, "all were taken over, in bf16"

    virtual(main)


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
        async with peers("ab", **compressed("ab")) as (net, (a, b)):
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


# ---- breaks, repeated and reordered messages ---------------------------------------------------------


async def exchange_broken(net: MemoryNetwork, a: Peer, b: Peer, message: int, late: str) -> bool:
    """a opens an exchange with b, and their link is cut at this message. late: whose confirmations take longer, so that
    this side has moved when the other has not. Returns whether the exchange was over before."""
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
    assert a.gossip_service._turn is b.gossip_service._turn is None
    return done and seen < message


async def break_everywhere(break_at: Callable[[int], Awaitable[tuple[bool, int]]]) -> list[int]:
    """break_at: of the number of a message; tells whether the exchange was over before, and how many values were moved
    on one side alone. Returns the latter of every message."""
    found: list[int] = []
    over = False
    while not over:
        over, alone = await break_at(len(found) + 1)
        found.append(alone)
    return found


def test_a_break_anywhere_leaves_both_valid_and_the_mean_within_one_segment(small_segments: int) -> None:
    """At every message of the exchange (DESIGN section 6: bounded drift of the mean)."""

    async def break_at(message: int) -> tuple[bool, int]:
        async with peers("ab") as (net, (a, b)):
            before = a.vector, b.vector
            middle = (before[0] + before[1]) / 2
            over = await exchange_broken(net, a, b, message, late="b")
            changed = []
            for peer, start in zip((a, b), before, strict=True):
                is_moved = ~torch.isclose(peer.vector, start, rtol=0, atol=1e-6)
                # Each value is where it was, or at the middle (to bf16's rounding).
                assert bool(((peer.vector - middle).abs() < 0.1)[is_moved].all())
                changed.append(is_moved)
            alone = int((changed[0] ^ changed[1]).sum())
            return over, alone

    async def main() -> None:
        drifts = await break_everywhere(break_at)
        assert len(drifts) > 12  # four segments of a chunk and a Done each way, and the opening
        assert max(drifts) <= small_segments
        assert any(drifts)  # it was put to the test

    virtual(main)


@pytest.mark.parametrize("late", ["a", "b"])
def test_a_break_anywhere_in_a_compressed_exchange_moves_one_segment_alone_at_most(
    small_blocks: int, late: str
) -> None:
    async def break_at(message: int) -> tuple[bool, int]:
        async with peers("ab", **compressed("ab")) as (net, (a, b)):
            before = a.vector, b.vector
            over = await exchange_broken(net, a, b, message, late)
            both = moved(a, before[0]) & moved(b, before[1])
            alone = moved(a, before[0]) ^ moved(b, before[1])
            torch.testing.assert_close(
                (a.vector - before[0])[sorted(both)], (before[1] - b.vector)[sorted(both)], rtol=0, atol=2e-6
            )
            net.tap = None
            net.heal()
            assert await a.exchange("b")  # free for the next
            return over, len(alone)

    async def main() -> None:
        alone = await break_everywhere(break_at)
        assert len(alone) > 18  # an opening, a sample, and four segments of a chunk and a Done, each way
        assert max(alone) <= small_blocks
        assert any(alone)

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
