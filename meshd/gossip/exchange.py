"""One pairwise exchange between two replicas of a stage, the same code on both sides.

Segment by segment: both send their values, both say Done when they have the other's, both move. Memory is bounded by
one segment each way; a break leaves at most one segment moved on one side alone, so the mean of the replicas drifts
by a bounded amount (DESIGN section 6).
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import TypeVar

import torch

from meshd.errors import MeshdError, MismatchError, ungrouped
from meshd.gossip.values import VALUE_BYTES, FlatParameters
from meshd.pipeline.worker import GOSSIP, DeviceWorker
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import CHUNK_BYTES, Duplex, LinkLost

SEGMENT_BYTES = 4 << 20
MOST_STEPS = (1 << 63) - 1
"""In a replica's weights: as many as a manifest can count."""

T = TypeVar("T")


class ExchangeRefused(MeshdError):
    """The partner is busy: it may take part later."""


@dataclass(frozen=True)
class ExchangeReport:
    """What an exchange did. distance: root mean square difference of the two replicas' values before it."""

    bytes_sent: int
    bytes_received: int
    distance: float


def check_open(mine: pb.GossipOpen, theirs: pb.GossipOpen) -> None:
    """Two replicas can only exchange when everything about their values is equal. Raises MismatchError, also for a
    number of steps that cannot be."""
    for name in ("run_id", "protocol", "stage", "values", "segment_bytes", "payload_bytes", "exchange"):
        expected, found = getattr(mine, name), getattr(theirs, name)
        if expected != found:
            raise MismatchError(f"gossip {name}: {str(found)[:80]!r} where {expected!r} was expected")
    if theirs.weight_version > MOST_STEPS:
        raise MismatchError(
            f"gossip weight_version: {theirs.weight_version}; at most {MOST_STEPS} can be counted"
        )


class Exchange:
    """Runs after both sides' GossipOpen. `timeout_s`: without a message for so long the partner has gone."""

    def __init__(
        self,
        duplex: Duplex[pb.GossipMessage],
        messages: AsyncIterator[pb.GossipMessage],
        flat: FlatParameters,
        worker: DeviceWorker,
        timeout_s: float,
    ) -> None:
        self._duplex, self._messages, self._flat, self._worker = duplex, messages, flat, worker
        self._timeout_s = timeout_s

    async def run(self, share: float = 0.5) -> ExchangeReport:
        """share: how far this side moves toward the partner's values; 0: it lets a listener take over its own.

        Raises LinkLost or MismatchError; what was moved until then stays moved, on both sides.
        """
        values = SEGMENT_BYTES // VALUE_BYTES
        segments = math.ceil(self._flat.count / values)
        squares = 0.0
        for segment in range(segments):
            squares += await self._segment(
                segment, segment * values, min(values, self._flat.count - segment * values), share
            )
        total = self._flat.count * VALUE_BYTES
        return ExchangeReport(total, total, math.sqrt(squares / max(1, self._flat.count)))

    async def _segment(self, segment: int, start: int, count: int, share: float) -> float:
        mine = await self._worker.run(lambda: self._flat.read(start, count), GOSSIP)
        with ungrouped():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send(segment, start, mine))
                receiving = tasks.create_task(self._receive(start, count))
        theirs, checksum = receiving.result()
        confirmed = pb.GossipMessage(done=pb.GossipDone(segment=segment, checksum=checksum))
        await self._within(self._duplex.send(confirmed), "take")
        done = await self.next("done")
        if done.done.segment != segment or done.done.checksum != zlib.crc32(_bytes(mine)):
            raise MismatchError(f"the partner confirmed something else than segment {segment} as it was sent")
        return await self._worker.run(lambda: self._flat.move(start, mine, theirs, share), GOSSIP)

    async def _send(self, segment: int, start: int, mine: torch.Tensor) -> None:
        payload = _bytes(mine)
        for at in range(0, len(payload), CHUNK_BYTES):
            chunk = pb.GossipChunk(
                offset=start * VALUE_BYTES + at, data=bytes(payload[at : at + CHUNK_BYTES])
            )
            await self._within(self._duplex.send(pb.GossipMessage(chunk=chunk)), "take")

    async def _receive(self, start: int, count: int) -> tuple[torch.Tensor, int]:
        buffer = bytearray()
        size = count * VALUE_BYTES
        while len(buffer) < size:
            chunk = (await self.next("chunk")).chunk
            at = start * VALUE_BYTES + len(buffer)
            # Whole chunks only: one that sent a byte at a time would keep this replica busy for as long as it liked.
            expected = min(CHUNK_BYTES, size - len(buffer))
            if chunk.offset != at or len(chunk.data) != expected:
                raise MismatchError(
                    f"a chunk of {len(chunk.data)} bytes at {chunk.offset} where {expected} bytes at {at} come next"
                )
            buffer += chunk.data
        theirs = torch.frombuffer(buffer, dtype=torch.bfloat16)
        if not bool(torch.isfinite(theirs).all()):
            # C27: one NaN would reach every replica within a few exchanges.
            raise MismatchError("the partner sent values that are not finite")
        return theirs, zlib.crc32(buffer)

    async def next(self, kind: str) -> pb.GossipMessage:
        """The partner's next message, which must be of this kind.

        Raises ExchangeRefused when the partner is busy, MismatchError when it never will or sent something else,
        LinkLost when it has gone.
        """
        message = await self._within(anext(self._messages, None), "send")
        if message is None:
            raise LinkLost(f"{self._duplex.remote} ended the exchange half way")
        if message.WhichOneof("body") == "refusal":
            reason = message.refusal.reason[:200]
            raise ExchangeRefused(reason) if message.refusal.busy else MismatchError(reason)
        if message.WhichOneof("body") != kind:
            raise MismatchError(f"{message.WhichOneof('body')} where {kind} comes next")
        return message

    async def _within(self, step: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await step
        except TimeoutError:
            raise LinkLost(
                f"{self._duplex.remote} did not {what} anything for {self._timeout_s:.0f} s"
            ) from None


def _bytes(values: torch.Tensor) -> memoryview:
    return memoryview(values.view(torch.uint8).numpy().data)
