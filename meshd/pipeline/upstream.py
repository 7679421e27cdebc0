"""The downstream end of links: what upstream neighbours offer is checked, taken or refused at once, and answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from meshd import PROTOCOL_VERSION
from meshd.data.microbatch import Microbatch
from meshd.errors import MeshdError, MismatchError, ResourceError, ungrouped
from meshd.observe.log import event
from meshd.pipeline.crossing import needs_priors
from meshd.pipeline.downstream import Key, Passed, key_of
from meshd.pipeline.dropped import Dropped
from meshd.pipeline.ledger import SeenAttempts
from meshd.pipeline.runtime import Work
from meshd.pipeline.service import Pipeline
from meshd.priors.boundary import BoundaryPrior
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import Duplex, LinkLost
from meshd.transport.chunks import Assembler, split
from meshd.transport.sender import Priority, PrioritySender
from meshd.wire import Frame, check_header, checksum_start
from meshd.wire.named import PRIOR_BYTES

log = logging.getLogger(__name__)

# A bound on bookkeeping, far above what the byte budget of real microbatches allows.
MAX_HELD = 1024
# Answers that wait on one link. A neighbour asks about each microbatch once and has far fewer of them out; one that
# asks on without reading loses its place, before its answers fill this peer's memory.
_MAX_UNREAD = 4096
_MAX_ORIGIN = 128
# Each may hold some MiB of answers and gradients.
_MAX_LINKS = 256
# Priors kept for a link: its present one, and that of frames that were written before the change.
_KEPT_PRIORS = 2
# What is kept is left out while so much waits on the link.
_KEPT_BYTES = 1 << 20
# A prior that could not be fetched is not asked for again so soon.
_FETCH_AGAIN_S = 10.0


@dataclass
class _Held:
    """A microbatch that this peer has taken."""

    offer: pb.Offer
    batch: Microbatch
    prior: BoundaryPrior | None
    assembler: Assembler
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class Intake:
    """Serves `Pipeline.Link`. One for the whole peer: the byte budget is shared by all upstream neighbours."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._run = pipeline.stage.runtime.run
        self._budget = self._run.spec.pipeline.store_mb * 2**20
        self.takes_priors = needs_priors(self._run.spec.wire)
        self._held_bytes = 0
        self._held = 0
        self._seen = SeenAttempts()
        self._links: set[_Link] = set()
        self.draining = False
        pipeline.stage.runtime.keeping.listeners.append(self._tell_kept)
        # Queues empty without anything being taken or released.
        pipeline.looks.append(self._measure)

    @property
    def held(self) -> int:
        """Microbatches taken and not yet returned."""
        return self._held

    async def serve(self, duplex: Duplex[pb.LinkMessage]) -> None:
        """Serve one upstream neighbour until its stream ends. Raises MismatchError when it does not belong here."""
        messages = aiter(duplex)
        first = await anext(messages, None)
        if first is None or first.WhichOneof("body") != "open":
            raise MismatchError("a link must begin with LinkOpen")
        self._check_open(first.open)
        if len(self._links) >= _MAX_LINKS:
            raise ResourceError(f"{len(self._links)} links are open to this peer")
        link = _Link(self, duplex, first.open)
        self._links.add(link)
        try:
            with ungrouped():
                await link.run(messages)
        except LinkLost as lost:
            # At the run's end all go.
            level = (
                logging.DEBUG if self.draining or self.pipeline.stage.runtime.finished else logging.WARNING
            )
            stage = self.pipeline.stage.hops[first.open.hop - 1].stage
            event(log, "upstream_lost", level=level, peer=link.name, stage=stage, reason=str(lost))
        except MismatchError as error:
            event(log, "upstream_refused", level=logging.WARNING, peer=link.name, reason=str(error))
            raise
        finally:
            self._links.discard(link)

    def _tell_kept(self) -> None:
        for link in self._links:
            link.tell_kept()

    def _check_open(self, open: pb.LinkOpen) -> None:
        if open.protocol != PROTOCOL_VERSION:
            raise MismatchError(
                f"protocol {open.protocol} where this peer speaks {PROTOCOL_VERSION}: update meshd"
            )
        if open.run_id != self._run.run_id:
            raise MismatchError(f"run {open.run_id[:64]!r} where this peer serves {self._run.run_id}")
        if not self.pipeline.knows(open.hop) or self.pipeline.stage.hops[open.hop].embed:
            raise MismatchError(f"hop {open.hop} is not served here")

    # ---- what is held ---------------------------------------------------------------------------------------------

    def verdict(self, offer: pb.Offer) -> tuple[pb.Answer.Verdict, str, Microbatch | None]:
        """Take an offer or not. An accepted one is booked at once."""
        try:
            batch = self._checked(offer)
        except MismatchError as error:
            self.pipeline.stage.metrics.count("offers_refused")
            return pb.Answer.VERDICT_DROP, str(error), None
        if self.draining and offer.id.origin != self.pipeline.stage.peer_id:
            # Its own come back to a ring's origin over their last hop, and it waits for them.
            return pb.Answer.VERDICT_BUSY, "leaving", None
        if offer.hidden.prior and self.pipeline.stage.around.priors.get(offer.hidden.prior) is None:
            self.pipeline.stage.metrics.count("offers_no_prior")
            return pb.Answer.VERDICT_NO_PRIOR, f"prior {offer.hidden.prior.hex()[:16]} is not here", None
        size = offer.hidden.payload_bytes
        # What waits to go on counts, too: behind a slow link as much piles up as was taken in.
        held = self._held_bytes + self.pipeline.passing_bytes()
        if self._held >= MAX_HELD or (self._held and held + size > self._budget):
            self.pipeline.stage.metrics.count("offers_busy")
            return pb.Answer.VERDICT_BUSY, f"{self._held} microbatches held", None
        if not self._seen.first_time((*key_of(offer.id), offer.hop)):
            self.pipeline.stage.metrics.count("offers_repeated")
            return pb.Answer.VERDICT_DROP, "seen before", None
        self._held += 1
        self._held_bytes += size
        self._measure()
        return pb.Answer.VERDICT_ACCEPTED, "", batch

    def release(self, size: int) -> None:
        """A microbatch has left: tell the neighbours that there is room."""
        self._held -= 1
        self._held_bytes -= size
        self._measure()
        if not self.draining:
            for link in self._links:
                link.credit()

    def _measure(self) -> None:
        metrics = self.pipeline.stage.metrics
        metrics.gauge("store_bytes", self._held_bytes)
        metrics.gauge("upstream_queued_bytes", sum(link.queued_bytes for link in self._links))

    def _checked(self, offer: pb.Offer) -> Microbatch:
        """Everything about an offer that can be known before its payload comes. Raises MismatchError."""
        if not self.pipeline.knows(offer.hop) or self.pipeline.stage.hops[offer.hop].embed:
            raise MismatchError(f"hop {offer.hop} is not served here")
        hop = self.pipeline.stage.hops[offer.hop]
        if hop.head and hop.stage == 0 and offer.id.origin != self.pipeline.stage.peer_id:
            raise MismatchError("a ring closes at its origin, which is another peer")
        spec, resolved = self._run.spec, self._run.resolved
        rows, columns = spec.data.microbatch, spec.data.seq_len
        batch = Microbatch.from_proto(offer.batch, vocabulary=resolved.vocabulary, rows=rows, columns=columns)
        check_header(offer.hidden, (rows, columns, resolved.hidden))
        self.check_prior(offer.hidden.prior, offer.hop)
        return batch

    def check_prior(self, name: bytes, hop: int) -> None:
        """Raises MismatchError for a prior that frames of a hop cannot name. One that is not here may be wrong yet."""
        if not name:
            return
        if not self.takes_priors or len(name) != PRIOR_BYTES:
            raise MismatchError(f"prior {name.hex()[:16]}: the codecs of this run take none of that name")
        prior = self.pipeline.stage.around.priors.get(name)
        if prior is not None and prior.boundary != hop - 1:
            raise MismatchError(f"a prior of boundary {prior.boundary} where one of {hop - 1} was expected")


class _Link:
    """One upstream neighbour and what it has sent here."""

    def __init__(self, intake: Intake, duplex: Duplex[pb.LinkMessage], open: pb.LinkOpen) -> None:
        self.name = open.name[:64] or open.peer_id[-8:]
        self._lane = f"uplink to {self.name}"
        self._peer_id, self._hop = open.peer_id, open.hop
        self._intake, self._pipeline, self._duplex = intake, intake.pipeline, duplex
        self._sender = PrioritySender(duplex)
        self._held: dict[Key, _Held] = {}
        self._sent_away = False
        self._priors: list[bytes] = []  # held, oldest first
        self._wanted = b""
        self._fetch: asyncio.Task[None] | None = None
        self._fetch_after = 0.0

    async def run(self, messages: AsyncIterator[pb.LinkMessage]) -> None:
        """Until the stream ends; then whatever the neighbour still waited for is forgotten."""
        try:
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(self._sender.run())
                async for message in messages:
                    self._take(message, tasks)
                for held in self._held.values():
                    held.cancel()
                writing.cancel()
                if self._fetch is not None:
                    self._fetch.cancel()
        finally:
            for name in self._priors:
                self._pipeline.stage.around.priors.release(name)
            for key in list(self._held):
                self._forget(key)

    @property
    def queued_bytes(self) -> int:
        """What waits to be handed to the stream."""
        return self._sender.queued_bytes

    def tell_kept(self) -> None:
        """Say what would outlive this peer. Left out while much waits on the link: the next one says more."""
        stage = self._pipeline.stage
        if self._sender.queued_bytes < _KEPT_BYTES:
            kept = pb.Kept(incarnation=stage.incarnation, upto=stage.runtime.keeping.kept)
            self._sender.post(pb.LinkMessage(kept=kept))

    def credit(self) -> None:
        """Tell a neighbour that was sent away that there is room."""
        if self._sent_away:
            self._sent_away = False
            self._sender.post(pb.LinkMessage(credit=pb.Credit(places=1)))

    def _post(self, message: pb.LinkMessage) -> None:
        """Queue an answer. Raises MismatchError, which ends the link, when the neighbour does not read them."""
        if self._sender.posted >= _MAX_UNREAD:
            raise MismatchError(f"{self._sender.posted} answers wait unread")
        self._sender.post(message)

    def _take(self, message: pb.LinkMessage, tasks: asyncio.TaskGroup) -> None:
        """Raises MismatchError, which ends the link, for what no peer of this protocol sends."""
        match message.WhichOneof("body"):
            case "offer":
                self._offered(message.offer, tasks)
            case "chunk":
                self._chunk(message.chunk, tasks)
            case "cancel":
                held = self._held.get(key_of(message.cancel.id))
                if held is not None:
                    held.cancel()
                    self._forget(key_of(message.cancel.id))
            case "progress":
                self._pipeline.learn(message.progress.committed)
            case "prior":
                self._intake.check_prior(message.prior.prior, self._hop)
                self._want(message.prior.prior, tasks)
            case other:
                raise MismatchError(f"{other} does not belong on the way down of a link")

    def _offered(self, offer: pb.Offer, tasks: asyncio.TaskGroup) -> None:
        key = key_of(offer.id)
        if len(offer.id.origin) > _MAX_ORIGIN:
            raise MismatchError(f"an origin of {len(offer.id.origin)} characters")
        if key in self._held:
            raise MismatchError("a microbatch offered again while it is held")
        self._pipeline.learn(offer.committed)
        verdict, reason, batch = self._intake.verdict(offer)
        if batch is not None:
            size = offer.hidden.payload_bytes
            what, start = f"hidden state from {self.name}", checksum_start(offer.hidden)
            assembler = Assembler(size, max_bytes=size, what=what, checksum=start)
            prior = self._pipeline.stage.around.priors.get(offer.hidden.prior)
            self._held[key] = _Held(offer, batch, prior, assembler)
        self._sent_away |= verdict in (pb.Answer.VERDICT_BUSY, pb.Answer.VERDICT_NO_PRIOR)
        if verdict == pb.Answer.VERDICT_NO_PRIOR:
            self._want(offer.hidden.prior, tasks)
        answer = pb.Answer(id=offer.id, hop=offer.hop, verdict=verdict, reason=reason)
        self._post(pb.LinkMessage(answer=answer))

    # ---- the neighbour's priors -------------------------------------------------------------------------------

    def _want(self, name: bytes, tasks: asyncio.TaskGroup) -> None:
        """Have a prior of the neighbour's here: one fetch at a time, of what it named last."""
        priors, now = self._pipeline.stage.around.priors, self._pipeline.stage.clock.monotonic()
        if priors.get(name) is not None:
            self._keep(name)
        elif self._fetch is None and now >= self._fetch_after:
            self._wanted = b""  # here, for the task may begin after more has been named
            self._fetch = tasks.create_task(self._bring(name))
        else:
            self._wanted = name

    async def _bring(self, name: bytes) -> None:
        stage = self._pipeline.stage
        while name:
            try:
                await stage.around.fetch_prior(stage.hops[self._hop - 1].stage, self._peer_id, name)
                self._intake.check_prior(name, self._hop)
                stage.metrics.count("priors_fetched")
                self._keep(name)
            except MeshdError as error:
                event(log, "prior_not_fetched", level=logging.WARNING, peer=self.name, reason=str(error))
                self._fetch_after = stage.clock.monotonic() + _FETCH_AGAIN_S
                break
            wanted, self._wanted = self._wanted, b""
            name = wanted if wanted != name else b""
        self._fetch = None

    def _keep(self, name: bytes) -> None:
        """Hold on to a prior that is here, and say so."""
        priors = self._pipeline.stage.around.priors
        if name not in self._priors:
            self._priors.append(priors.hold(name).name)
            if len(self._priors) > _KEPT_PRIORS:
                priors.release(self._priors.pop(0))
        self._post(pb.LinkMessage(prior=pb.PriorNotice(boundary=self._hop - 1, prior=name)))
        self.credit()

    # ---- payloads -----------------------------------------------------------------------------------------------

    def _chunk(self, chunk: pb.Chunk, tasks: asyncio.TaskGroup) -> None:
        key = key_of(chunk.id)
        held = self._held.get(key)
        if held is None:
            return  # cancelled or given up meanwhile
        try:
            held.assembler.add(chunk)
            if held.assembler.complete:
                hidden = held.offer.hidden
                frame = Frame(hidden, bytes(held.assembler.finish(hidden.checksum)))
                held.task = tasks.create_task(self._process(key, held, frame))
        except MismatchError as error:
            # Its place is given to others now, so nothing of it may go on: not work that began before this chunk.
            held.cancel()
            self._pipeline.stage.metrics.count("dropped_corrupt")
            self._drop(held.offer, Dropped(pb.Drop.REASON_CORRUPT, str(error), partial=held.task is not None))
            self._forget(key)

    async def _process(self, key: Key, held: _Held, frame: Frame) -> None:
        """All that happens to one microbatch here and behind, and its answer."""
        offer = held.offer
        work = Work(held.batch, offer.batch, frame, held.prior)
        try:
            if offer.evaluate:
                result = await self._pipeline.evaluate(offer.hop, offer.id, work, offer.evaluate - 1)
                answer = pb.EvalResult(
                    id=offer.id, hop=offer.hop, loss_sum=result.loss_sum, label_tokens=result.label_tokens
                )
                await self._sender.send(pb.LinkMessage(eval_result=answer), Priority.BACKWARD)
            else:
                passed = await self._pipeline.through(offer.hop, offer.id, work)
                await self._give_back(offer, passed)
        except Dropped as dropped:
            self._drop(offer, dropped)
        finally:
            self._forget(key)

    async def _give_back(self, offer: pb.Offer, passed: Passed) -> None:
        assert passed.gradient is not None
        header = pb.Gradient(
            id=offer.id,
            hop=offer.hop,
            gradient=passed.gradient.header,
            loss=passed.loss,
            committed=self._pipeline.stage.counter.to_proto(),
            incarnation=passed.incarnation,
            addition=passed.addition,
        )
        await self._sender.send(pb.LinkMessage(gradient=header), Priority.BACKWARD)
        payload, tracer = passed.gradient.payload, self._pipeline.stage.tracer
        handed = tracer.sending(self._lane, offer.id, offer.hop, len(payload), "backward")
        for chunk in split(offer.id, offer.hop, payload):
            await self._sender.send(pb.LinkMessage(chunk=chunk), Priority.BACKWARD, handed)

    def _drop(self, offer: pb.Offer, dropped: Dropped) -> None:
        drop = pb.Drop(
            id=offer.id,
            hop=offer.hop,
            reason=dropped.reason,
            text=dropped.text[:1000],
            partial=dropped.partial,
        )
        self._post(pb.LinkMessage(drop=drop))

    def _forget(self, key: Key) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._intake.release(held.offer.hidden.payload_bytes)
