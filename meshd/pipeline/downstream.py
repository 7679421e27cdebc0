"""The upstream end of a link: one stream to one replica of the next hop, shared by all microbatches sent to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from meshd.errors import MeshdError, MismatchError
from meshd.pipeline.dropped import Busy, Dropped, Refused
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import Duplex, LinkLost, Transport
from meshd.transport.chunks import Assembler, split
from meshd.transport.sender import Priority, PrioritySender
from meshd.wire import Frame, check_header

Key = tuple[str, int, int]

# Answers come at once; a replica that is silent for so long is as good as gone, whatever its sockets say.
_ANSWER_S = 15.0


def key_of(id: pb.MicrobatchId) -> Key:
    return id.origin, id.sequence, id.attempt


@dataclass(frozen=True)
class Passed:
    """What came back of a microbatch. loss: mean over label tokens; gradient: None at the hop that embeds."""

    loss: float
    gradient: Frame | None


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


@dataclass
class _Pending:
    answer: asyncio.Future[pb.Answer]
    result: asyncio.Future[Result]
    shape: Sequence[int]
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
    ) -> None:
        self._open, self._address, self._on_credit, self._on_counts = open, address, on_credit, on_counts
        self._pending: dict[Key, _Pending] = {}
        self._ready: asyncio.Future[PrioritySender[pb.LinkMessage]] = (
            asyncio.get_running_loop().create_future()
        )
        self._lost: LinkLost | None = None

    @property
    def lost(self) -> LinkLost | None:
        """Why the stream ended; None while it lives."""
        return self._lost

    async def run(self, transport: Transport) -> None:
        """Hold the stream open until it breaks. Never raises but for cancellation and bugs: the loss reaches those
        who wait in `carry`."""
        lost = LinkLost(f"the link to {self._address} was closed")
        try:
            async with transport.link(self._address) as duplex:
                await duplex.send(pb.LinkMessage(open=self._open))
                await self._exchange(duplex)
        except* (LinkLost, MismatchError) as group:
            first = group.exceptions[0]
            lost = LinkLost(str(first))
        finally:
            self._fail(lost)

    async def _exchange(self, duplex: Duplex[pb.LinkMessage]) -> None:
        sender = PrioritySender(duplex)
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(sender.run())
            self._ready.set_result(sender)
            async for message in duplex:
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

    async def progress(self, committed: list[pb.Count]) -> None:
        """Tell the replica how far the run is. Does nothing while the link is not open."""
        if self._ready.done() and self._lost is None:
            await self._ready.result().send(
                pb.LinkMessage(progress=pb.Progress(committed=committed)), Priority.FORWARD
            )

    async def carry(self, offer: pb.Offer, cargo: Cargo) -> Result:
        """Offer a microbatch, send its payload, wait for what comes back.

        Empties `cargo` once all is sent. Raises Busy or Refused when it is not taken, Dropped when it is given up
        later, LinkLost when the stream breaks. Cancelling tells the replica to forget it.
        """
        if self._lost is not None:
            raise self._lost
        sender = await asyncio.shield(self._ready)
        loop = asyncio.get_running_loop()
        key = key_of(offer.id)
        # A gradient has the shape of the tensor that it is the gradient of.
        pending = _Pending(loop.create_future(), loop.create_future(), list(offer.hidden.shape))
        self._pending[key] = pending
        try:
            await sender.send(pb.LinkMessage(offer=offer), Priority.FORWARD)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    answer = await pending.answer
            except TimeoutError:
                raise LinkLost(f"{self._address} did not answer an offer in {_ANSWER_S:.0f} s") from None
            if answer.verdict == pb.Answer.VERDICT_BUSY:
                raise Busy(answer.reason)
            if answer.verdict != pb.Answer.VERDICT_ACCEPTED:
                raise Refused(answer.reason)
            assert cargo.frame is not None
            for chunk in split(offer.id, offer.hop, cargo.frame.payload):
                await sender.send(pb.LinkMessage(chunk=chunk), Priority.FORWARD)
            cargo.frame = None
            return await pending.result
        except asyncio.CancelledError:
            # Behind its own offer, never before it.
            sender.post(pb.LinkMessage(cancel=pb.Cancel(id=offer.id, hop=offer.hop)), Priority.FORWARD)
            raise
        finally:
            del self._pending[key]

    async def _take(self, message: pb.LinkMessage) -> None:
        kind = message.WhichOneof("body")
        if kind == "credit":
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
            self._settle(pending, Dropped(pb.Drop.REASON_CORRUPT, str(error), partial=True))

    def _deliver(self, pending: _Pending, kind: str, body: object) -> None:
        match kind, body:
            case "answer", pb.Answer():
                if not pending.answer.done():
                    pending.answer.set_result(body)
            case "gradient", pb.Gradient():
                check_header(body.gradient, pending.shape)
                self._on_counts(body.committed)
                pending.gradient = body
                size = body.gradient.payload_bytes
                pending.assembler = Assembler(size, max_bytes=size, what=f"gradient from {self._address}")
            case "chunk", pb.Chunk():
                if pending.assembler is None or pending.gradient is None:
                    raise MismatchError("a chunk came before its gradient's header")
                pending.assembler.add(body)
                if pending.assembler.complete:
                    header = pending.gradient.gradient
                    frame = Frame(header, bytes(pending.assembler.finish(header.checksum)))
                    self._settle(pending, Passed(pending.gradient.loss, frame))
            case "eval_result", pb.EvalResult():
                self._settle(pending, Evaluated(body.loss_sum, body.label_tokens))
            case "drop", pb.Drop():
                self._settle(pending, Dropped(body.reason, body.text, body.partial))

    @staticmethod
    def _settle(pending: _Pending, outcome: Result | MeshdError) -> None:
        if pending.result.done():
            return
        if isinstance(outcome, MeshdError):
            pending.result.set_exception(outcome)
            pending.result.exception()
        else:
            pending.result.set_result(outcome)
