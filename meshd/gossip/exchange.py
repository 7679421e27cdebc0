"""One pairwise exchange between two replicas of a stage, the same code on both sides (docs/gossip.md, normative).

Segment by segment: both send their values, both say Done when they have the other's, both move by opposite amounts, so
that the replicas' sum stays as it is. Memory is bounded by one segment each way; a break leaves at most one segment
moved on one side alone, so the mean of the replicas drifts by a bounded amount (DESIGN section 6).

Averaging pairs at random times is the gossip of Boyd et al., "Randomized gossip algorithms", 2006, with local steps
between exchanges (Stich, "Local SGD converges fast and communicates little", 2019; of part of the coordinates and
quantized: Basu et al., "Qsparse-local-SGD", 2019). What differs from CHOCO-SGD (Koloskova et al., 2019) and from error
feedback is in meshd/gossip/modular.py: no copies of others, no memory of what was left out.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from meshd.errors import MeshdError, MismatchError, ungrouped
from meshd.gossip import modular
from meshd.gossip.coordinates import MOST_SUBSET, covered, sampled, subset_seed
from meshd.gossip.distances import FAR, regard
from meshd.gossip.forms import BF16, Deltas, Residues, finite, raw_bytes
from meshd.gossip.memory import READ_AHEAD, SEGMENT_BLOCKS
from meshd.gossip.outer import OuterStep
from meshd.gossip.values import FlatParameters
from meshd.pipeline.worker import GOSSIP, DeviceWorker
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import CHUNK_BYTES, Duplex, LinkLost

CARRY = 0.5
"""Momentum goes on through exchanges with partners that count for so much or more (`regard`)."""
MOST_STEPS = (1 << 63) - 1
"""In a replica's weights: as many as a manifest can count."""

# A replica that did nothing, or is far behind, still counts, and one that says it did much not for all.
_LEAST_SHARE = 0.4
# So many steps behind a partner, a replica's work counts half.
_HALF_LIFE_STEPS = 20.0

T = TypeVar("T")


class ExchangeRefused(MeshdError):
    """The partner is busy: it may take part later."""


class TooFar(MismatchError):
    """The partner's values are far outside what this replica knows of its partners."""

    def __init__(self, message: str, distance: float) -> None:
        super().__init__(message)
        self.distance = distance


@dataclass(frozen=True)
class ExchangeReport:
    """What an exchange did.

    offset: which values it covered. distance: root mean square difference of the two replicas' values before it, as far
    as the samples, and what was found, tell. lag: steps that the partner is behind this replica; below 0: ahead.
    """

    bytes_sent: int
    bytes_received: int
    offset: int
    distance: float
    lag: int


def check_open(mine: pb.GossipOpen, theirs: pb.GossipOpen) -> None:
    """Two replicas can only exchange when everything about their values is equal. Raises MismatchError, also for
    numbers that cannot be."""
    for name in (
        *("run_id", "protocol", "stage", "count", "segment_blocks", "exchange"),
        *("subset", "bits"),
    ):
        expected, found = getattr(mine, name), getattr(theirs, name)
        if expected != found:
            raise MismatchError(f"gossip {name}: {str(found)[:80]!r} where {expected!r} was expected")
    if theirs.weight_version > MOST_STEPS:
        raise MismatchError(
            f"gossip weight_version: {theirs.weight_version}; at most {MOST_STEPS} can be counted"
        )
    if theirs.bits != BF16 and theirs.bits not in modular.ROUNDING:
        raise MismatchError(
            f"gossip bits: {theirs.bits}; one of {sorted([*modular.ROUNDING, BF16])} is needed"
        )
    if not 1 <= theirs.subset <= MOST_SUBSET or theirs.offset >= theirs.subset:
        raise MismatchError(
            f"gossip subset: offset {theirs.offset} of {theirs.subset}; a subset is 1 to {MOST_SUBSET}, and an offset "
            "below it"
        )
    if not (math.isfinite(theirs.usual) and theirs.usual >= 0.0):
        raise MismatchError(f"gossip usual: {theirs.usual}; a distance is finite and not negative")


def agreed_offset(mine: pb.GossipOpen, theirs: pb.GossipOpen, opener: bool) -> int:
    """The offset that an exchange covers: the opener's of an even exchange, and when it listens; of another the
    answering side's. Pure.

    Of two replicas usually the same one opens. Were the choice always its own, coordinates that others exchange often
    would be left behind in the one that never opens. A listener alone takes something from the exchange.
    """
    opening, answer = (mine, theirs) if opener else (theirs, mine)
    return answer.offset if mine.exchange % 2 and not opening.listening else opening.offset


def share(mine: pb.GossipOpen, theirs: pb.GossipOpen) -> float:
    """How far this side moves toward the other's values, 0 to 1; the two sides' shares add up to 1. Pure.

    The more a partner has worked since its last exchange, and the less it is behind, the more its values count.
    """
    if theirs.listening or mine.listening:
        return 1.0 if mine.listening else 0.0
    weights = []
    for one, other in ((mine, theirs), (theirs, mine)):
        behind = max(0, other.weight_version - one.weight_version)
        weights.append(one.work * 2.0 ** -min(1000.0, behind / _HALF_LIFE_STEPS))
    both = sum(weights)
    part = weights[1] / both if both else 0.5
    return min(1.0 - _LEAST_SHARE, max(_LEAST_SHARE, part))


class Exchange:
    """Runs after both sides' GossipOpen. `timeout_s`: without a message for so long the partner has gone."""

    def __init__(
        self,
        duplex: Duplex[pb.GossipMessage],
        messages: AsyncIterator[pb.GossipMessage],
        flat: FlatParameters,
        outer: OuterStep,
        worker: DeviceWorker,
        timeout_s: float,
    ) -> None:
        self._duplex, self._messages, self._flat, self._worker = duplex, messages, flat, worker
        self._outer = outer
        self._timeout_s = timeout_s
        self._sent = self._received = 0  # bytes of payloads
        self._samples = 0  # bytes of samples and steps, each way

    async def run(
        self,
        mine: pb.GossipOpen,
        theirs: pb.GossipOpen,
        opener: bool,
        carry: bool = False,
    ) -> ExchangeReport:
        """mine, theirs: as they were sent. carry: the outer step goes on with the momentum it has, unless
        the partner counts for little.

        Raises LinkLost, MismatchError or TooFar; what was moved until then stays moved, on both sides.
        """
        seed, offset = subset_seed(mine.run_id, mine.stage), agreed_offset(mine, theirs, opener)
        part = partial(self._part, mine.subset, offset, seed)
        count = -(-self._flat.count // (mine.subset * SEGMENT_BLOCKS))
        # Residues are right by steps of the same moment, and an exchange may last longer than an inner step: what they
        # say is read at once, with the samples. In bf16 segments say what is there when their turn comes.
        at_once = count if mine.bits != BF16 else READ_AHEAD
        at = sampled(self._flat.starts, mine.subset, offset, seed, mine.exchange)

        async def ahead(first: int) -> dict[int, torch.Tensor]:
            """Positions of segments `first` and on, by segment: as many bytes as their values and more."""
            numbers = range(first, min(count, first + at_once))
            return await asyncio.to_thread(lambda: {number: part(number) for number in numbers})

        segments = await ahead(0)
        sample, base, values = await self._worker.run(
            lambda: (*self._samples_of(at), self._read(segments)), GOSSIP
        )
        segments.clear()
        samples = await self._compare(mine, sample, base, opener)
        distance, amount = samples.distance, share(mine, theirs)
        _regarded(mine, theirs, samples, distance)  # before anything larger crosses
        form = Deltas() if mine.bits == BF16 else Residues(mine, self._flat, samples.codes)
        ways = _Ways(not mine.listening, mine.listening or not theirs.listening)
        for segment in range(count):
            if segment not in values:
                values = await self._worker.run(partial(self._read, await ahead(segment)), GOSSIP)
            positions = await asyncio.to_thread(part, segment)
            difference = await self._segment(segment, form, positions, values.pop(segment), ways)
            if difference is None:
                continue
            # Samples may be honest where values are not.
            distance = max(distance, form.distance(difference))
            regarded = _regarded(mine, theirs, samples, distance)
            if amount:
                move = partial(
                    self._move, positions, difference, amount * regarded, carry and regarded >= CARRY
                )
                await self._worker.run(move, GOSSIP)
        return ExchangeReport(
            self._sent + self._samples,
            self._received + self._samples,
            offset,
            distance,
            mine.weight_version - theirs.weight_version,
        )

    def _part(self, subset: int, offset: int, seed: int, segment: int) -> torch.Tensor:
        """Positions that a segment covers."""
        first = segment * SEGMENT_BLOCKS
        end = min(first + SEGMENT_BLOCKS, -(-self._flat.count // subset))
        positions = covered(first, end, subset, offset, seed)
        return positions[positions < self._flat.count]

    def _samples_of(self, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This side's samples and the base's: (tensors, SAMPLES)."""
        sample, base = (read(at.view(-1)).view(at.shape) for read in (self._flat.read, self._flat.base))
        return sample, base

    def _read(self, segments: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """This side's values by segment, of positions by segment."""
        return {number: self._flat.read(positions) for number, positions in segments.items()}

    async def _compare(
        self, mine: pb.GossipOpen, ours: torch.Tensor, base: torch.Tensor, opener: bool
    ) -> _Samples:
        """Trade samples. ours, base: (tensors, SAMPLES)."""
        message = pb.GossipSample(values=raw_bytes(ours).tobytes())
        self._samples = ours.nbytes + len(ours)
        codes = torch.empty(0, dtype=torch.uint8)
        if opener:
            others, _ = await self._sample(ours)
            if mine.bits != BF16:
                codes = modular.step_codes(ours, others, mine.bits, mine.exchange)
                message.steps = codes.numpy().tobytes()
            await self._give(pb.GossipMessage(sample=message))
        else:
            await self._give(pb.GossipMessage(sample=message))
            others, steps = await self._sample(ours)
            if mine.bits != BF16:
                codes = _checked_codes(steps, modular.step_codes(ours, others, mine.bits, mine.exchange))
        values, partners = ours.double(), others.double()
        size = self._flat.root_mean_square
        return _Samples(size(values - partners), size(values), size(partners), size(base.double()), codes)

    async def _sample(self, ours: torch.Tensor) -> tuple[torch.Tensor, bytes]:
        """The partner's values at the positions of `ours`, and its steps."""
        sample = (await self.next("sample")).sample
        if len(sample.values) != ours.nbytes:
            raise MismatchError(f"a sample of {len(sample.values)} bytes where {ours.nbytes} are needed")
        return finite(torch.frombuffer(bytearray(sample.values), dtype=torch.float32)).view(
            ours.shape
        ), sample.steps

    def _move(self, positions: torch.Tensor, difference: torch.Tensor, amount: float, carry: bool) -> None:
        self._flat.move(positions, difference.mul_(amount))
        self._outer.averaged(positions, carry)

    async def _segment(
        self,
        segment: int,
        form: Deltas | Residues,
        positions: torch.Tensor,
        values: torch.Tensor,
        ways: _Ways,
    ) -> torch.Tensor | None:
        """Trade one segment. Returns the partner's values minus this side's; None: it only listens."""
        if not bool(torch.isfinite(values).all()):
            raise MismatchError("this replica's own values are not finite: it can average with nobody")
        mine = await asyncio.to_thread(form.encode, segment * SEGMENT_BLOCKS, positions, values)
        with ungrouped():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send(mine if ways.out else b""))
                receiving = tasks.create_task(self._receive(len(mine) if ways.back else 0))
        theirs = receiving.result()
        difference = None
        if ways.back:
            difference = await asyncio.to_thread(form.difference, positions, mine, theirs)
        await self._give(pb.GossipMessage(done=pb.GossipDone(segment=segment, checksum=zlib.crc32(theirs))))
        done = await self.next("done")
        if done.done.segment != segment or done.done.checksum != zlib.crc32(mine if ways.out else b""):
            raise MismatchError(f"the partner confirmed something else than segment {segment} as it was sent")
        return difference

    async def _send(self, payload: bytes) -> None:
        start = self._sent
        self._sent += len(payload)
        for at in range(0, len(payload), CHUNK_BYTES):
            chunk = pb.GossipChunk(offset=start + at, data=payload[at : at + CHUNK_BYTES])
            await self._give(pb.GossipMessage(chunk=chunk))

    async def _receive(self, size: int) -> bytes:
        start = self._received
        self._received += size
        buffer = bytearray()
        while len(buffer) < size:
            chunk = (await self.next("chunk")).chunk
            at = start + len(buffer)
            # Whole chunks only: one that sent a byte at a time would keep this replica busy for as long as it liked.
            expected = min(CHUNK_BYTES, size - len(buffer))
            if chunk.offset != at or len(chunk.data) != expected:
                raise MismatchError(
                    f"a chunk of {len(chunk.data)} bytes at {chunk.offset} where {expected} bytes at {at} come next"
                )
            buffer += chunk.data
        return bytes(buffer)

    async def _give(self, message: pb.GossipMessage) -> None:
        await self._within(self._duplex.send(message), "take")

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


class _Ways(NamedTuple):
    """Which values cross: this side's `out`, the partner's `back`. A listener's are of no use to the other side."""

    out: bool
    back: bool


@dataclass(frozen=True)
class _Samples:
    """What samples show.

    distance: root mean square difference of the two sides' values. mine, theirs: of these to the base. base: root mean
    square of the base itself. codes: of each tensor's step; none where values cross as they are.
    """

    distance: float
    mine: float
    theirs: float
    base: float
    codes: torch.Tensor


def _regarded(mine: pb.GossipOpen, theirs: pb.GossipOpen, samples: _Samples, distance: float) -> float:
    """How much the partner counts at this distance, 0 to 1. Raises TooFar."""
    if mine.listening or theirs.listening:
        return 1.0
    # Who has learned nothing knows only its base, from which no adaptation goes as far as that is large.
    furthest = FAR * (mine.usual or samples.mine) or samples.base
    if distance > furthest > 0.0:
        raise TooFar(
            f"values {distance:.3g} away (root mean square): with replicas further than {furthest:.3g} nothing is "
            "averaged",
            distance,
        )
    return regard(mine.usual, samples.mine, theirs.usual, samples.theirs, distance)


def _checked_codes(found: bytes, expected: torch.Tensor) -> torch.Tensor:
    """The opener's steps, which must be what the samples call for, but for rounding: no partner may stretch them."""
    codes = (
        torch.frombuffer(bytearray(found), dtype=torch.uint8) if found else torch.empty(0, dtype=torch.uint8)
    )
    if codes.shape != expected.shape or bool(((codes.int() - expected.int()).abs() > 1).any()):
        raise MismatchError("the partner's steps are not those that the samples call for")
    return codes
