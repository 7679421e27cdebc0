"""When bytes may go and when they arrive: the pure part on numbers, the uplink and its queues on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import pytest

from meshd.clock import SystemClock
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock, run_virtual
from meshd.transport.base import LinkLost
from meshd.transport.sender import Priority, PrioritySender
from meshd.transport.shaper import BURST_S, FAIR_SHARE, Arrivals, Bucket, LinkShape, wire_bytes
from meshd.transport.uplink import ShapedQueue, Uplink, outgoing

MBIT = 1_000_000
RATE = 8 * MBIT  # a megabyte a second
BURST = int(RATE / 8 * BURST_S)


def drained(rate: float = RATE, now: float = 100.0) -> Bucket:
    """A bucket without credit."""
    bucket = Bucket(rate, now)
    ticket = bucket.ask(int(rate / 8 * BURST_S), Priority.CONTROL, now)
    assert bucket.advance(now) == [ticket]
    return bucket


def test_an_idle_link_lets_a_burst_through_and_not_a_byte_more() -> None:
    bucket = Bucket(RATE, 100.0)
    burst = bucket.ask(BURST, Priority.STATE, 5000.0)
    assert bucket.advance(5000.0) == [burst]
    assert burst.left_at == 5000.0
    late = bucket.ask(1000, Priority.STATE, 5000.0)
    assert late.left_at is None
    assert bucket.through_at(late) == pytest.approx(5000.001)
    assert bucket.advance(5000.0009) == []
    assert bucket.advance(5000.001) == [late]
    assert late.left_at == pytest.approx(5000.001)


@pytest.mark.parametrize("step_s", [0.0003, 0.01, 0.7, 60.0])
def test_when_something_has_left_does_not_depend_on_who_looks_when(step_s: float) -> None:
    bucket = drained()
    tickets = [bucket.ask(100_000, Priority.FORWARD, 100.0) for _ in range(8)]
    now = 100.0
    while tickets[-1].left_at is None:
        now += step_s
        bucket.advance(now)
    assert [ticket.left_at for ticket in tickets] == pytest.approx([100.1 + n / 10 for n in range(8)])


def test_what_waits_goes_by_priority_then_by_age() -> None:
    bucket = drained()
    order = [Priority.STATE, Priority.FORWARD, Priority.GOSSIP, Priority.BACKWARD, Priority.FORWARD]
    tickets = {bucket.ask(10_000, p, 100.0).number: (p, n) for n, p in enumerate(order)}
    done = [tickets[ticket.number] for ticket in bucket.advance(101.0)]
    # The longest wait, that of the state, is rewarded a piece at a time: too little to come first.
    assert done == sorted(tickets.values())


def test_an_urgent_message_overtakes_within_a_large_one() -> None:
    bucket = drained()
    state = bucket.ask(1_000_000, Priority.STATE, 100.0)
    bucket.advance(100.5)
    gradient = bucket.ask(50_000, Priority.BACKWARD, 100.5)
    bucket.advance(110.0)
    assert gradient.left_at is not None
    assert 100.55 <= gradient.left_at < 100.56
    assert state.left_at == pytest.approx(101.05), "what it had before is not lost"


def test_a_full_link_starves_nobody_for_ever() -> None:
    bucket = drained()
    state = bucket.ask(100_000, Priority.STATE, 100.0)
    now, forward = 100.0, 0
    while state.left_at is None:
        assert now < 200.0
        if bucket.best is state:
            bucket.ask(10_000, Priority.FORWARD, now)
        now += 0.001
        forward += sum(ticket.priority is Priority.FORWARD for ticket in bucket.advance(now))
    assert forward * 10_000 == pytest.approx(100_000 * (FAIR_SHARE - 1), rel=0.1)


def test_what_is_withdrawn_takes_nothing_from_those_behind_it() -> None:
    bucket = drained()
    first, second = (bucket.ask(100_000, Priority.FORWARD, 100.0) for _ in range(2))
    bucket.withdraw(first, 100.02)
    bucket.advance(101.0)
    assert first.left_at is None
    assert second.left_at == pytest.approx(100.12, abs=0.002)
    bucket.withdraw(second, 101.0)  # too late, and no harm


def test_messages_weigh_what_they_weigh_on_ethernet() -> None:
    assert wire_bytes(0) == 5 + 9 - 9 + 9 + 66
    # A mebibyte: 65 frames, 725 packets.
    assert wire_bytes(1 << 20) == (1 << 20) + 5 + 65 * 9 + 725 * 66


def test_jitter_keeps_the_order_and_its_bounds() -> None:
    arrivals = Arrivals(LinkShape(delay_s=0.05, jitter_s=0.03), random.Random(1))
    found = [arrivals.of(n / 1000) - n / 1000 for n in range(1000)]
    assert min(found) >= 0.05
    assert max(found) <= 0.08
    assert max(found) - min(found) > 0.02
    times = [n / 1000 + late for n, late in enumerate(found)]
    assert all(one <= other for one, other in pairwise(times))


def test_nothing_is_shaped_without_need() -> None:
    assert Uplink.of(LinkShape(), SystemClock(), random.Random(0)) is None
    assert not isinstance(outgoing(None, Priority.FORWARD), ShapedQueue)


# ---- on virtual time -------------------------------------------------------------------------------------------------


def uplink(delay_s: float = 0.0, jitter_s: float = 0.0, rate_bps: float = 0.0) -> Uplink:
    return Uplink(LinkShape(delay_s, jitter_s, rate_bps), VirtualClock(), random.Random(1))


def chunk(number: int, size: int) -> pb.LinkMessage:
    return pb.LinkMessage(chunk=pb.Chunk(offset=number, data=bytes(size)))


def queue(link: Uplink, heavy: Priority = Priority.FORWARD) -> ShapedQueue[pb.LinkMessage]:
    made = outgoing(link, heavy)
    assert isinstance(made, ShapedQueue)
    return made


def lost() -> LinkLost:
    return LinkLost("lost peer:1: over")


def now() -> float:
    return asyncio.get_running_loop().time()


async def received(stream: ShapedQueue[pb.LinkMessage]) -> list[tuple[int, float]]:
    """Offset and arrival of every message until the end, and when that came."""
    found = []
    while (message := await stream.get()) is not None:
        found.append((message.chunk.offset, now()))
    return [*found, (-1, now())]


async def send(stream: ShapedQueue[pb.LinkMessage], numbers: range, size: int) -> None:
    for number in numbers:
        message = chunk(number, size)
        await stream.put(message, message.ByteSize())


def test_delay_is_paid_once_and_not_by_every_message() -> None:
    async def main() -> None:
        stream = queue(uplink(delay_s=0.2, rate_bps=RATE))
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(received(stream))
            await send(stream, range(100), 50_000)
            stream.close(lost)
        found = reading.result()
        assert [number for number, _ in found] == [*range(100), -1]
        weight = 100 * wire_bytes(chunk(99, 50_000).ByteSize())
        assert found[0][1] == pytest.approx(0.2, abs=0.01)
        assert found[99][1] == pytest.approx(0.2 + (weight - BURST) / (RATE / 8), abs=0.01)
        assert found[100][1] == found[99][1], "the end comes right behind"

    run_virtual(main())


def test_the_end_of_a_stream_travels_too() -> None:
    async def main() -> None:
        stream = queue(uplink(delay_s=0.2))
        await asyncio.sleep(1)
        stream.close(lost)
        assert await stream.get() is None
        assert now() == pytest.approx(1.2)

    run_virtual(main())


def test_all_streams_and_calls_share_one_rate() -> None:
    async def main() -> None:
        link = uplink(rate_bps=RATE)
        streams = [queue(link) for _ in range(3)]
        async with asyncio.TaskGroup() as group:
            reading = [group.create_task(received(stream)) for stream in streams]
            writing = [group.create_task(send(stream, range(10), 100_000)) for stream in streams]
            calls = [group.create_task(link.carry(chunk(0, 100_000), Priority.PRIORS)) for _ in range(10)]
            await asyncio.wait([*writing, *calls])
            for stream in streams:
                stream.close(lost)
        weight = 40 * wire_bytes(chunk(9, 100_000).ByteSize())
        assert now() == pytest.approx((weight - BURST) / (RATE / 8), rel=0.01)
        for stream in reading:
            assert [number for number, _ in stream.result()] == [*range(10), -1]
        # Equals take turns.
        assert max(stream.result()[-2][1] for stream in reading) - min(
            stream.result()[-2][1] for stream in reading
        ) == pytest.approx(0.2, rel=0.15)

    run_virtual(main())


def test_an_answer_waits_for_one_message_of_its_stream_and_for_none_of_others() -> None:
    """The shaper is below the priorities: nothing queues up behind them."""

    class Stream:
        remote = "peer:1"

        def __init__(self, shaped: ShapedQueue[pb.LinkMessage]) -> None:
            self.shaped = shaped

        async def send(self, message: pb.LinkMessage) -> None:
            await self.shaped.put(message, message.ByteSize())

        def __aiter__(self) -> Iterator[pb.LinkMessage]:
            raise NotImplementedError

        async def close(self) -> None: ...

    async def main() -> None:
        link = uplink(delay_s=0.1, rate_bps=RATE)
        shaped, state = queue(link), queue(link, Priority.STATE)
        sender = PrioritySender[pb.LinkMessage](Stream(shaped))  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(sender.run()), group.create_task(send(state, range(20), 1_000_000))]
            for number in range(4):
                await sender.send(chunk(number, 1_000_000), Priority.FORWARD)
            await asyncio.sleep(1.5)
            sender.post(pb.LinkMessage(answer=pb.Answer(reason="here")))
            kinds = []
            while (message := await shaped.get()) is not None:
                kinds.append(message.WhichOneof("body"))
                if kinds[-1] == "answer":
                    break
            assert kinds == ["chunk", "chunk", "answer"]
            # Two megabytes with their headers, and of the second's time a sixteenth that was the state's.
            assert now() == pytest.approx(
                1.05 * (1 + FAIR_SHARE / (FAIR_SHARE - 1)) + 0.1 - BURST_S, rel=0.02
            )
            for task in tasks:
                task.cancel()

    run_virtual(main())


def test_a_broken_stream_frees_who_waits_for_the_link_at_once() -> None:
    async def main() -> None:
        link = uplink(rate_bps=RATE)
        broken, sound = queue(link), queue(link)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(_caught(send(broken, range(1), 60_000_000)))
            behind = group.create_task(_caught(send(broken, range(1, 2), 1000)))
            other = group.create_task(send(sound, range(1), 1_000_000))
            await asyncio.sleep(1)
            broken.fail(lost, discard=True)
            broken.fail(lost, discard=True)
            await other
        assert (first.result(), behind.result()) == ("lost peer:1: over",) * 2
        assert now() == pytest.approx(1 + wire_bytes(1_000_000) / (RATE / 8), rel=0.05)
        with pytest.raises(LinkLost, match="over"):
            await send(broken, range(1), 10)
        with pytest.raises(LinkLost, match="over"):
            await broken.get()

    async def _caught(sending) -> str:  # type: ignore[no-untyped-def]
        with pytest.raises(LinkLost) as caught:
            await sending
        return str(caught.value)

    run_virtual(main())


def test_a_late_loop_forgets_nobody() -> None:
    """What got through while nobody looked is told so, whoever looks next, and though nothing is left to wait for."""

    class Late(VirtualClock):
        skew = 0.0

        def monotonic(self) -> float:
            return super().monotonic() + self.skew

    async def main() -> None:
        clock = Late()
        link = Uplink(LinkShape(rate_bps=RATE), clock, random.Random(1))
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            for size, priority in ((1_000_000, Priority.FORWARD), (10_000, Priority.STATE)):
                group.create_task(link.admit(size, priority))
            await asyncio.sleep(0.5)
            clock.skew = 100.0
            await link.admit(10, Priority.CONTROL)

    run_virtual(main())


@pytest.mark.parametrize("seed", range(10))
def test_whatever_comes_and_goes_everybody_is_served_and_the_rate_is_kept(seed: int) -> None:
    rng = random.Random(seed)
    left: list[tuple[float, int]] = []

    async def main() -> None:
        link = uplink(rate_bps=RATE)

        async def one() -> None:
            await asyncio.sleep(rng.random() * 5)
            size = rng.choice([0, 100, 10_000, 300_000])
            work = link.admit(size, rng.choice(list(Priority)))
            if rng.random() < 0.2:
                with suppress(TimeoutError):
                    await asyncio.wait_for(work, rng.random())
            else:
                left.append((await work, wire_bytes(size)))

        async with asyncio.timeout(200), asyncio.TaskGroup() as group:
            for _ in range(300):
                group.create_task(one())

    run_virtual(main())
    total = 0
    for at, size in sorted(left):
        total += size
        assert total <= BURST + RATE / 8 * at + 1
    assert total > 0.8 * RATE / 8 * at, "the link was busy all the time, if partly for those who gave up"


def test_a_wait_that_is_cancelled_leaves_the_stream_whole() -> None:
    async def main() -> None:
        stream = queue(uplink(rate_bps=RATE))
        async with asyncio.TaskGroup() as group:
            group.create_task(send(stream, range(1), 1_000_000))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(send(stream, range(1, 2), 1_000_000), 0.5)
            reading = group.create_task(received(stream))
            await send(stream, range(2, 3), 1_000_000)
            stream.close(lost)
        assert [number for number, _ in reading.result()] == [0, 2, -1]

    run_virtual(main())


def test_what_is_in_flight_is_bounded_where_the_peer_does_not_read() -> None:
    """C09."""

    async def main() -> None:
        stream = queue(uplink(delay_s=1.0, rate_bps=RATE))
        sent = []

        async def write() -> None:
            for number in range(100):
                await send(stream, range(number, number + 1), 100_000)
                sent.append(number)

        async with asyncio.TaskGroup() as group:
            group.create_task(write())
            await asyncio.sleep(50)
            assert len(sent) == 20, "a mebibyte, and a second of the link"
            reading = group.create_task(received(stream))
            await asyncio.sleep(50)
            stream.close(lost)
        assert [number for number, _ in reading.result()] == [*range(100), -1]

    run_virtual(main())
