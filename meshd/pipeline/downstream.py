"""The upstream end of a link: one stream to one replica of the next hop, shared by all microbatches sent to it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from meshd.errors import MeshdError, MismatchError, ungrouped
from meshd.observe.trace import Tracer
from meshd.pipeline.dropped import Busy, Corrupt, Dropped, NoPrior, Refused
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import Duplex, LinkLost, Transport
from meshd.transport.chunks import Assembler, split
from meshd.transport.sender import Priority, PrioritySender
from meshd.wire import Frame, check_header, checksum_start
from meshd.wire.named import PRIOR_BYTES

Key = tuple[str, int, int]
T = TypeVar("T")

# Answers come at once; a replica that is silent for so long is as good as gone, whatever its sockets say.
_ANSWER_S = 15.0
# Results take as long as everything behind the replica does. One that is out for so long will not come: a peer behind
# it forgot it, and it must not keep its place in flight for ever (C14).
_RESULT_S = 900.0
# What a replica says in its own words is kept for people to read, up to so many characters.
_TEXT = 300
# Progress is left out while so much waits on the link: the next one says more.
_PROGRESS_BYTES = 1 << 20


def key_of(id: pb.MicrobatchId) -> Key:
    return id.origin, id.sequence, id.attempt


@dataclass(frozen=True)
class Passed:
    """What came back of a microbatch. loss: mean over label tokens; gradient: None at the hop that embeds. addition:
    its number at the peer that gave it back (`meshd.pipeline.keeping`), in that peer's incarnation."""

    loss: float
    gradient: Frame | None
    addition: int
    incarnation: int


@dataclass(frozen=True)
class Evaluated:
    loss_sum: float
    label_tokens: int


Result = Passed | Evaluated


@dataclass
class Cargo:
    """A frame on its way out. None once it was sent whole: it can be computed again from the stored input, so no
    memory is spent on it while the microbatch is away."""

    frame: Frame | None


class _TooLate(LinkLost):
    """The stream lives, but not for this microbatch."""


class _Unclear(Refused):
    """An answer of no kind that is known here: it may mean that a place was given."""


@dataclass
class _Pending:
    offer: pb.Offer
    answer: asyncio.Future[pb.Answer]
    result: asyncio.Future[Result]
    gradient: pb.Gradient | None = None
    assembler: Assembler | None = field(default=None, repr=False)


class Downstream:
    """Opened and run by `run`; used by `carry` from many tasks.

    After the stream broke every `carry` in it raises LinkLost; the object is spent.
    """

    def __init__(
        self,
        open: pb.LinkOpen,
        address: str,
        on_credit: Callable[[], None],
        on_counts: Callable[[Iterable[pb.Count]], None],
        on_kept: Callable[[pb.Kept], None],
        tracer: Tracer | None = None,
        name: str = "",
    ) -> None:
        """on_credit: also called when the far side says that it has a prior. name: the far side's, for people."""
        self._open, self._address, self._on_credit, self._on_counts = open, address, on_credit, on_counts
        self._on_kept = on_kept
        self._tracer, self._lane = tracer or Tracer(), f"uplink to {name}"
        self._announced = b""
        self.answered = False  # whether the far side has said anything
        self.knows = b""  # the prior that the far side last said it has
        self._pending: dict[Key, _Pending] = {}
        self._ready: asyncio.Future[PrioritySender[pb.LinkMessage]] = (
            asyncio.get_running_loop().create_future()
        )
        self._lost: LinkLost | None = None

    @property
    def lost(self) -> LinkLost | None:
        """Why the stream ended; None while it lives."""
        return self._lost

    @property
    def queued_bytes(self) -> int:
        """What waits to be handed to the stream."""
        open = self._ready.done() and self._lost is None
        return self._ready.result().queued_bytes if open else 0

    async def run(self, transport: Transport) -> None:
        """Hold the stream open until it breaks. Never raises but for cancellation and bugs: the loss reaches those
        who wait in `carry`."""
        lost = LinkLost(f"the link to {self._address} was closed")
        try:
            with ungrouped():
                async with transport.link(self._address) as duplex:
                    await duplex.send(pb.LinkMessage(open=self._open))
                    await self._exchange(duplex)
        except MeshdError as error:  # whatever the replica refuses with
            lost = LinkLost(str(error))
        finally:
            self._fail(lost)

    async def _exchange(self, duplex: Duplex[pb.LinkMessage]) -> None:
        sender = PrioritySender(duplex)
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(sender.run())
            self._ready.set_result(sender)
            if self._announced:
                self._notice(sender)
            async for message in duplex:
                self.answered = True
                await self._take(message)
            writing.cancel()

    def _fail(self, lost: LinkLost) -> None:
        self._lost = lost
        if not self._ready.done():
            self._ready.set_exception(lost)
            self._ready.exception()  # nobody may be waiting for it
        for pending in self._pending.values():
            for future in (pending.answer, pending.result):
                if not future.done():
                    future.set_exception(lost)
                    future.exception()

    def announce(self, prior: bytes) -> None:
        """Have the replica fetch a prior before frames name it. `knows` becomes its name once it has."""
        if prior == self._announced:
            return
        self._announced = prior
        if self._ready.done() and self._lost is None:
            self._notice(self._ready.result())

    def _notice(self, sender: PrioritySender[pb.LinkMessage]) -> None:
        notice = pb.PriorNotice(boundary=self._open.hop - 1, prior=self._announced)
        sender.post(pb.LinkMessage(prior=notice))

    def progress(self, committed: list[pb.Count]) -> None:
        """Tell the replica how far the run is. Does nothing while the link is not open, or is behind."""
        if self._ready.done() and self._lost is None:
            sender = self._ready.result()
            if sender.queued_bytes < _PROGRESS_BYTES:
                sender.post(pb.LinkMessage(progress=pb.Progress(committed=committed)))

    async def carry(self, offer: pb.Offer, cargo: Cargo) -> Result:
        """Offer a microbatch, send its payload, wait for what comes back.

        Empties `cargo` once all is sent. Raises Busy, NoPrior or Refused when it is not taken, Dropped when it is
        given up later, LinkLost when the stream breaks. Cancelling tells the replica to forget it.
        """
        if self._lost is not None:
            raise self._lost
        sender = await asyncio.shield(self._ready)
        loop = asyncio.get_running_loop()
        key = key_of(offer.id)
        pending = _Pending(offer, loop.create_future(), loop.create_future())
        self._pending[key] = pending
        try:
            with self._tracer.phase("waiting", "offer", offer.id, offer.hop):
                await sender.send(pb.LinkMessage(offer=offer), Priority.FORWARD)
                answer = await self._within(_ANSWER_S, pending.answer, "answer an offer")
            if answer.verdict == pb.Answer.VERDICT_BUSY:
                raise Busy(answer.reason[:_TEXT])
            if answer.verdict == pb.Answer.VERDICT_NO_PRIOR and offer.hidden.prior:
                raise NoPrior(answer.reason[:_TEXT])
            if answer.verdict in (pb.Answer.VERDICT_DROP, pb.Answer.VERDICT_NO_PRIOR):
                raise Refused(answer.reason[:_TEXT])
            if answer.verdict != pb.Answer.VERDICT_ACCEPTED:
                raise _Unclear(f"verdict {answer.verdict}")
            assert cargo.frame is not None
            payload, lane = cargo.frame.payload, self._lane
            handed = self._tracer.sending(lane, offer.id, offer.hop, len(payload), "forward")
            for chunk in split(offer.id, offer.hop, payload):
                await sender.send(pb.LinkMessage(chunk=chunk), Priority.FORWARD, handed)
            del payload
            cargo.frame = None
            with self._tracer.phase("away", "away", offer.id, offer.hop):
                return await self._within(_RESULT_S, pending.result, "return a microbatch")
        except (asyncio.CancelledError, _TooLate, _Unclear):
            # Behind its own offer, never before it. Should the replica accept after all, it must not keep the place.
            sender.post(pb.LinkMessage(cancel=pb.Cancel(id=offer.id, hop=offer.hop)), Priority.FORWARD)
            raise
        finally:
            del self._pending[key]

    async def _within(self, seconds: float, future: asyncio.Future[T], what: str) -> T:
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            raise _TooLate(f"{self._address} did not {what} in {seconds:.0f} s") from None

    async def _take(self, message: pb.LinkMessage) -> None:
        kind = message.WhichOneof("body")
        if kind == "credit":
            self._on_credit()
            return
        if kind == "kept":
            self._on_kept(message.kept)
            return
        if kind == "prior":
            self.knows = message.prior.prior[:PRIOR_BYTES]
            self._on_credit()
            return
        if kind not in ("answer", "chunk", "gradient", "eval_result", "drop"):
            raise MismatchError(f"{self._address} sent {kind} down the way back of a link")
        body = getattr(message, kind)
        pending = self._pending.get(key_of(body.id))
        if pending is None:
            return  # cancelled meanwhile
        try:
            self._deliver(pending, kind, body)
        except MismatchError as error:
            # One microbatch's bytes are bad: it is lost, the stream is not.
            self._settle(pending, Corrupt(str(error)))

    def _deliver(self, pending: _Pending, kind: str, body: object) -> None:
        """Raises MismatchError for what does not answer the offer: nothing a replica says is taken on trust."""
        offer = pending.offer
        match kind, body:
            case "answer", pb.Answer():
                if not pending.answer.done():
                    pending.answer.set_result(body)
            case "gradient", pb.Gradient():
                if offer.evaluate:
                    raise MismatchError("a gradient where an evaluation's result was asked for")
                if pending.gradient is not None:
                    raise MismatchError("a second gradient for one microbatch")
                if not math.isfinite(body.loss):
                    raise MismatchError(f"a loss of {body.loss}")
                # A gradient has the shape of the tensor that it is the gradient of.
                check_header(body.gradient, offer.hidden.shape)
                self._on_counts(body.committed)
                pending.gradient = body
                size = body.gradient.payload_bytes
                what, start = f"gradient from {self._address}", checksum_start(body.gradient)
                pending.assembler = Assembler(size, max_bytes=size, what=what, checksum=start)
            case "chunk", pb.Chunk():
                if pending.assembler is None or pending.gradient is None:
                    raise MismatchError("a chunk came before its gradient's header")
                pending.assembler.add(body)
                if pending.assembler.complete:
                    header = pending.gradient.gradient
                    frame = Frame(header, bytes(pending.assembler.finish(header.checksum)))
                    whole = pending.gradient
                    self._settle(pending, Passed(whole.loss, frame, whole.addition, whole.incarnation))
            case "eval_result", pb.EvalResult():
                if not offer.evaluate:
                    raise MismatchError("an evaluation's result where a gradient was asked for")
                if not math.isfinite(body.loss_sum) or body.label_tokens != offer.batch.label_tokens:
                    raise MismatchError(f"a loss of {body.loss_sum} over {body.label_tokens} label tokens")
                self._settle(pending, Evaluated(body.loss_sum, body.label_tokens))
            case "drop", pb.Drop():
                # Reasons that this version does not know are final, like one left out.
                known = body.reason in pb.Drop.Reason.values()
                reason = body.reason if known else pb.Drop.REASON_UNSPECIFIED
                self._settle(pending, Dropped(reason, body.text[:_TEXT], body.partial))

    @staticmethod
    def _settle(pending: _Pending, outcome: Result | MeshdError) -> None:
        if pending.result.done():
            return
        if isinstance(outcome, MeshdError):
            pending.result.set_exception(outcome)
            pending.result.exception()
        else:
            pending.result.set_result(outcome)
