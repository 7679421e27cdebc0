"""A peer's uplink, shaped: everything that it sends over gRPC passes here, below the priorities (docs/lab.md).

Shaping happens on the sending side alone. A message is held until its last byte would have left and its delay is over;
then gRPC gets it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Generic, TypeVar

from google.protobuf.message import Message

from meshd.clock import Clock
from meshd.transport.limits import BUFFER_BYTES
from meshd.transport.queue import ByteQueue, Failure
from meshd.transport.sender import Priority
from meshd.transport.shaper import Arrivals, Bucket, LinkShape, Ticket, wire_bytes

M = TypeVar("M", bound=Message)

# In flight on one stream, at most, on a link with delay and without a rate.
_UNLIMITED_BYTES = 32 << 20

# Shorter naps cost more than they are worth; the bucket makes up for them.
_NAP_S = 0.0005

# Bodies of LinkMessage and GossipMessage that carry much. All others are small, and somebody waits for them.
_HEAVY = frozenset({"offer", "chunk", "gradient", "eval_result", "sample"})


class Uplink:
    """What all connections of one peer share."""

    def __init__(self, shape: LinkShape, clock: Clock, rng: random.Random) -> None:
        self.shape, self.clock = shape, clock
        self._rng = rng
        self._bucket = Bucket(shape.rate_bps, clock.monotonic()) if shape.rate_bps else None
        self._changed: dict[int, asyncio.Event] = {}  # by ticket number, of those that wait

    @classmethod
    def of(cls, shape: LinkShape, clock: Clock, rng: random.Random) -> Uplink | None:
        """None when nothing is shaped."""
        return None if shape.off else cls(shape, clock, rng)

    @property
    def in_flight_bytes(self) -> int:
        """What one stream can have on its way."""
        shape = self.shape
        if not shape.longest_delay_s:
            return 0
        if not shape.rate_bps:
            return _UNLIMITED_BYTES
        return int(shape.rate_bps / 8 * shape.longest_delay_s)

    def arrivals(self) -> Arrivals:
        """Of a new stream."""
        return Arrivals(self.shape, self._rng)

    async def admit(self, size: int, priority: Priority) -> float:
        """Wait until `size` bytes have left; when they had (monotonic). Cancelling it gives up the place."""
        if self._bucket is None:
            return self.clock.monotonic()
        ticket = self._bucket.ask(wire_bytes(size), priority, self.clock.monotonic())
        self._changed[ticket.number] = asyncio.Event()
        try:
            await self._turn(self._bucket, ticket)
        finally:
            del self._changed[ticket.number]
            self._bucket.withdraw(ticket, self.clock.monotonic())
            self._tell(self._bucket)
            if (best := self._bucket.best) is not None:
                self._changed[best.number].set()
        assert ticket.left_at is not None
        return ticket.left_at

    async def carry(self, message: Message | None, priority: Priority) -> None:
        """Wait until a message that belongs to no stream has arrived; None: one that says nothing."""
        left_at = await self.admit(0 if message is None else message.ByteSize(), priority)
        wait = self.arrivals().of(left_at) - self.clock.monotonic()
        if wait > 0:
            await self.clock.sleep(wait)

    async def _turn(self, bucket: Bucket, ticket: Ticket) -> None:
        """Whose turn it is watches the clock, for all; the others sleep until something changes."""
        changed = self._changed[ticket.number]
        self._tell(bucket)
        while ticket.left_at is None:
            if bucket.best is ticket:
                wait = bucket.through_at(ticket) - self.clock.monotonic()
                await self.clock.sleep(max(_NAP_S, wait))
            else:
                await changed.wait()
                changed.clear()
            self._tell(bucket)

    def _tell(self, bucket: Bucket) -> None:
        """Wake whose bytes have left, whoever noticed."""
        for ticket in bucket.advance(self.clock.monotonic()):
            if ticket.number in self._changed:
                self._changed[ticket.number].set()


class ShapedQueue(Generic[M]):
    """What one stream sends, in the place of a `ByteQueue` before gRPC. `put` returns when the message has left, `get`
    when it has arrived; in between it is in flight, with others."""

    def __init__(self, uplink: Uplink, priority: Callable[[M], Priority]) -> None:
        self._uplink, self._priority = uplink, priority
        self._arrivals = uplink.arrivals()
        self._flying: ByteQueue[tuple[float, M]] = ByteQueue(BUFFER_BYTES + uplink.in_flight_bytes)
        self._order = asyncio.Lock()  # fair: messages keep the order of the calls
        self._ended_at: float | None = None
        self._waiting: asyncio.Timeout | None = None

    async def put(self, message: M, size: int) -> None:
        """As ByteQueue's: raises the failure once the queue has ended, also while the message waits for the link."""
        async with self._order:
            left_at = 0.0
            if self._ended_at is None:
                try:
                    async with asyncio.timeout(None) as self._waiting:
                        left_at = await self._uplink.admit(size, self._priority(message))
                except TimeoutError:
                    pass  # ended: below it is said how
                finally:
                    self._waiting = None
            await self._flying.put((self._arrivals.of(left_at), message), size)

    async def get(self) -> M | None:
        """The oldest message, once it has arrived; None at the end, which travels like a message."""
        clock = self._uplink.clock
        while True:
            head = await self._flying.head()
            arrives = (self._ended_at or 0.0) if head is None else head[0]
            wait = arrives - clock.monotonic()
            if wait <= 0:
                self._flying.pop()
                return None if head is None else head[1]
            await clock.sleep(wait)

    def close(self, failure: Failure) -> None:
        self._end()
        self._flying.close(failure)

    def fail(self, failure: Failure, *, discard: bool = False) -> None:
        self._end()
        self._flying.fail(failure, discard=discard)

    def _end(self) -> None:
        if self._ended_at is None:
            self._ended_at = self._arrivals.of(self._uplink.clock.monotonic())
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())
            self._waiting = None


def outgoing(uplink: Uplink | None, heavy: Priority) -> ByteQueue[M] | ShapedQueue[M]:
    """What stands between the writers of a Pipeline or Gossip stream and gRPC; heavy: the priority of its payloads."""
    if uplink is None:
        return ByteQueue(BUFFER_BYTES)

    def priority(message: M) -> Priority:
        return heavy if message.WhichOneof("body") in _HEAVY else Priority.CONTROL

    return ShapedQueue(uplink, priority)
