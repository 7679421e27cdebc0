"""The fast circuit of one peer: microbatches come in over links, pass through the stage, go on to the next hop, and
come back (DESIGN section 2)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from meshd.errors import MeshdError, MismatchError
from meshd.observe.log import event
from meshd.pipeline import worker
from meshd.pipeline.downstream import Evaluated, Passed
from meshd.pipeline.dropped import Dropped
from meshd.pipeline.exhaustion import OutOfMemory
from meshd.pipeline.onward import Onward
from meshd.pipeline.runtime import NonFinite, Pace, Returned, StaleMicrobatch, Work
from meshd.pipeline.stage import Stage
from meshd.priors.boundary import BoundaryPrior
from meshd.proto import meshd_pb2 as pb
from meshd.wire import Draft, Frame, Readied, read

log = logging.getLogger(__name__)


class Pipeline:
    """Carries microbatches from this peer's hops onward. `run` must be running while `through` is used."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._onward = Onward(stage)

    async def run(self) -> None:
        """Own the links until cancelled."""
        await self._onward.run()

    @property
    def waiting_for(self) -> str:
        """For people: what microbatches wait for; empty: nothing."""
        return self._onward.waiting_for

    def passing_bytes(self) -> int:
        """Of what this peer has made of others' microbatches and has not sent on yet."""
        return self._onward.waiting_bytes(passing=True)

    @property
    def looks(self) -> list[Callable[[], None]]:
        """Called every second while `run` is running."""
        return self._onward.looks

    def wake(self) -> None:
        """Routes may have changed: let those who wait look again."""
        self._onward.wake()

    async def adopt(self, prior: BoundaryPrior) -> None:
        """Send with an anchor's codec prior, which is held by the caller, once the neighbours have it."""
        await self._onward.author.adopt(prior)

    def learn(self, counts: Iterable[pb.Count]) -> None:
        """Merge what a peer says of the global token counter."""
        self.stage.counter.merge(counts)

    def knows(self, hop: int) -> bool:
        """Whether this peer serves the hop."""
        return 0 <= hop < len(self.stage.hops) and hop in {h.index for h in self.stage.runtime.model.hops}

    # ---- a microbatch, from one of this peer's hops to the end and back ---------------------------------------------

    async def through(self, hop: int, id: pb.MicrobatchId, work: Work) -> Passed:
        """Train on a microbatch from `hop` on. Returns its loss and the gradient for the hop before.

        Raises Dropped when it is not coming back.
        """
        runtime, run, phase = self.stage.runtime, self.stage.worker.run, self.stage.tracer.phase
        pace = self._pace()
        if self.stage.hops[hop].head:

            async def head() -> tuple[float, Returned]:
                hidden = await self._hidden(hop, id, work)
                computing = phase("device", "head", id, hop)
                return await run(lambda: runtime.head(hop, work, hidden, pace), worker.FORWARD, computing)

            loss, returned = await self._computed(head(), partial=False)
        else:

            def frame(safe: bool) -> Awaitable[Frame]:
                return self._encoded(
                    hop, id, work, lambda hidden: runtime.forward(hop, work, hidden, safe), worker.FORWARD
                )

            passed, sender = await self._onward.carry(hop + 1, id, work, frame)
            assert isinstance(passed, Passed)
            gradient = passed.gradient
            assert gradient is not None
            loss, pace = passed.loss, self._pace()

            async def backward() -> Returned:
                hidden = await self._hidden(hop, id, work)
                decoding = phase("coder", "decode gradient", id, hop, bytes=len(gradient.payload))
                readied = await asyncio.to_thread(
                    decoding.around, read, gradient, runtime.returning(hop, work)
                )
                computing = phase("device", "backward", id, hop)
                return await run(
                    lambda: runtime.backward(hop, work, hidden, readied, pace), worker.BACKWARD, computing
                )

            try:
                returned = await self._computed(backward(), partial=True)
            except Dropped as dropped:
                if dropped.reason == pb.Drop.REASON_CORRUPT:
                    # What it sent does not decode, or is not finite: the next microbatch had better go elsewhere.
                    self._onward.failed(sender)
                raise
        self._returned(hop, returned, work.batch.label_tokens)
        if returned.gradient is None:
            return Passed(loss, None, returned.addition, self.stage.incarnation)
        encoding = phase("coder", "encode gradient", id, hop)
        back = await asyncio.to_thread(encoding.around, returned.gradient.frame)
        self.stage.metrics.count("gradient_sent_bytes", len(back.payload))
        return Passed(loss, back, returned.addition, self.stage.incarnation)

    async def _hidden(self, hop: int, id: pb.MicrobatchId, work: Work) -> Readied | None:
        """The hop's input after the CPU half of decoding: entropy decoders must not keep the device waiting. From the
        frame at each use, for what is stored meanwhile should be as small as what crossed."""
        if work.frame is None:
            return None
        decoding = self.stage.tracer.phase("coder", "decode", id, hop, bytes=len(work.frame.payload))
        return await asyncio.to_thread(
            decoding.around, read, work.frame, self.stage.runtime.incoming(hop, work)
        )

    async def _encoded(
        self,
        hop: int,
        id: pb.MicrobatchId,
        work: Work,
        compute: Callable[[Readied | None], Draft],
        priority: int,
    ) -> Frame:
        """What a hop sends on: its input decoded, the device's part by `compute`, the frame written. Raises Dropped."""

        async def made() -> Frame:
            hidden = await self._hidden(hop, id, work)
            computing = self.stage.tracer.phase("device", "forward", id, hop)
            draft = await self.stage.worker.run(lambda: compute(hidden), priority, computing)
            encoding = self.stage.tracer.phase("coder", "encode", id, hop)
            return await asyncio.to_thread(encoding.around, draft.frame)

        return await self._computed(made(), partial=False)

    async def evaluate(self, hop: int, id: pb.MicrobatchId, work: Work, watermark: int) -> Evaluated:
        """Loss of a microbatch from `hop` on with the frozen snapshot of `watermark`. Raises Dropped."""
        model = await self.stage.around.frozen(watermark)
        if model is None:
            raise Dropped(
                pb.Drop.REASON_NO_SNAPSHOT, f"no snapshot {watermark} of stage {self.stage.hops[hop].stage}"
            )
        runtime, run = self.stage.runtime, self.stage.worker.run
        if self.stage.hops[hop].head:

            async def score() -> tuple[float, int]:
                hidden = await self._hidden(hop, id, work)
                computing = self.stage.tracer.phase("device", "head", id, hop)
                return await run(
                    lambda: runtime.score(hop, work, hidden, model), worker.BACKGROUND, computing
                )

            evaluated = Evaluated(*await self._computed(score(), partial=False))
            self.stage.metrics.count("evaluations_scored")
            return evaluated

        def frame(safe: bool) -> Awaitable[Frame]:
            return self._encoded(
                hop,
                id,
                work,
                lambda hidden: runtime.forward_frozen(hop, work, hidden, model),
                worker.BACKGROUND,
            )

        result, _ = await self._onward.carry(hop + 1, id, work, frame, evaluate=watermark + 1)
        assert isinstance(result, Evaluated)
        return result

    def _pace(self) -> Pace:
        return Pace(self.stage.counter.total, self.stage.around.live_replicas(), self.stage.clock.time())

    def _returned(self, hop: int, returned: Returned, label_tokens: int) -> None:
        metrics, runtime = self.stage.metrics, self.stage.runtime
        if hop == runtime.counting_hop:
            metrics.count("microbatches_added")
            metrics.rate("tokens_per_s", label_tokens)
        if (crossing := runtime.crossings.get(hop)) is not None and crossing.error is not None:
            metrics.gauge("codec_error", crossing.error)
        if returned.measured is not None:
            self._onward.measured(hop, returned.measured)
        if returned.step is not None:
            metrics.count("steps_skipped_nonfinite" if returned.step.skipped else "steps")
            metrics.gauge("gradient_norm", returned.step.norm)
            metrics.gauge("learning_rate", returned.step.lr)
            if returned.corrected is not None:
                metrics.count("steps_corrected")
                metrics.gauge("corrector_effective_rank", returned.corrected.effective_rank)
                metrics.gauge("corrector_cosine", returned.corrected.cosine)
            self.stage.around.stepped(returned.step)

    async def _computed(self, job: Awaitable[worker.T], partial: bool) -> worker.T:
        """Result of a job on the device, its failures as Dropped. partial: a later hop has added already."""
        try:
            return await job
        except StaleMicrobatch as error:
            raise self._dropped(pb.Drop.REASON_STALE, error, partial) from error
        except NonFinite as error:
            raise self._dropped(pb.Drop.REASON_NONFINITE, error, partial) from error
        except MismatchError as error:
            raise self._dropped(pb.Drop.REASON_CORRUPT, error, partial) from error
        except OutOfMemory as error:
            event(log, "out_of_memory", level=logging.ERROR, reason=str(error))
            raise self._dropped(pb.Drop.REASON_FAILED, error, partial) from error

    def _dropped(self, reason: pb.Drop.Reason, error: MeshdError, partial: bool) -> Dropped:
        dropped = Dropped(reason, str(error), partial)
        self.stage.metrics.count(f"dropped_{pb.Drop.Reason.Name(reason).removeprefix('REASON_').lower()}")
        return dropped
