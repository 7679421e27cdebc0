"""The source of microbatches: a stage-0 replica draws data and sends it through the pipeline until the run's end."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from bisect import insort
from collections import deque
from collections.abc import Sequence

from meshd.data.microbatch import Microbatch
from meshd.data.stream import TokenStream
from meshd.errors import ungrouped
from meshd.observe.log import event
from meshd.pipeline.dropped import Dropped
from meshd.pipeline.journal import Journal
from meshd.pipeline.runtime import Work
from meshd.pipeline.service import Pipeline
from meshd.proto import meshd_pb2 as pb

log = logging.getLogger(__name__)

# Evaluations have sequence numbers of their own, so that they never meet a training microbatch's.
_EVALUATION = 1 << 63
_LOSSES = 1000
_MOST_UNKEPT = 4096
# After a microbatch was dropped the injector pauses, longer at every drop in a row: a swarm without a whole pipeline
# is not hammered.
_LONGEST_PAUSE_S = 30.0


def microbatch_seed(run_seed: int, origin: str, sequence: int) -> int:
    """Seed of a microbatch's dropout and masks: 63 bits, the same for every attempt and on every peer."""
    digest = hashlib.sha256(f"{run_seed}/{origin}/{sequence}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Injector:
    """Keeps a number of microbatches in flight. Every one is journalled before it goes out."""

    def __init__(self, pipeline: Pipeline, stream: TokenStream, journal: Journal) -> None:
        self._pipeline, self._stage, self._stream, self._journal = pipeline, pipeline.stage, stream, journal
        self._spec = self._stage.runtime.run.spec
        self._limit = self._spec.pipeline.in_flight or 2 * len(self._stage.hops)
        self._in_flight = 0
        self._in_flight_tokens = 0
        self._batch_left = self._spec.batch_tokens
        self._room = asyncio.Event()
        self._room.set()
        self._pause_s = 0.0
        self._evaluations = _EVALUATION
        # Numbers come again after a start: of evaluations always, of microbatches where the journal lacks some. Peers
        # that remember the former ones would refuse them.
        self._first_attempt = self._stage.incarnation % (1 << 32)
        self.stopping = False
        self.losses: deque[pb.LossPoint] = deque(maxlen=_LOSSES)
        self._stage.counter.advance(self._stage.peer_id, journal.ledger.balance().tokens)
        self._unkept: list[tuple[int, int]] = []  # (highest of so many additions, how many), ascending
        self._stage.runtime.keeping.listeners.append(self._kept)

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def problem(self) -> str:
        """What is wrong with the journal; empty: nothing."""
        return self._journal.problem

    @property
    def done(self) -> bool:
        """The swarm has committed what the run asked for."""
        return self._stage.counter.total >= self._spec.stop_tokens

    async def run(self) -> None:
        """Inject until the run has its tokens or `stop` is called, then drain."""
        async with asyncio.TaskGroup() as tasks:
            while not self.stopping and not (self.done and self._in_flight == 0):
                if not self._may_inject():
                    self._room.clear()
                    with self._stage.tracer.phase("waiting", "wait for room in flight"):
                        try:
                            # Other origins commit too: look again even if nothing of ours comes back.
                            async with asyncio.timeout(1.0):
                                await self._room.wait()
                        except TimeoutError:
                            pass
                    continue
                if self._pause_s:
                    await self._stage.clock.sleep(self._pause_s)
                    if self.stopping or not self._may_inject():
                        continue  # others went on meanwhile, and may have ended the run
                item, batch = self._stream.next()
                self._in_flight += 1
                self._in_flight_tokens += batch.label_tokens
                self._batch_left -= batch.label_tokens
                tasks.create_task(self._carry(self._journal.inject(item), batch))

    def stop(self) -> None:
        """Inject no more; what is in flight comes back."""
        self.stopping = True
        self._room.set()

    def _may_inject(self) -> bool:
        """Whether one more may go out. It may not once what is committed and what this origin has in flight come to the
        run's tokens: the run then ends at most one microbatch over, plus what other origins have in flight. That is
        unknown here; asking for it would put a round trip before every microbatch to save the last few."""
        if self._in_flight >= self._limit:
            return False
        if self._spec.pipeline.lockstep and self._batch_left <= 0:
            if self._in_flight:
                return False
            # What a batch went over counts toward the next, as in StepGate.
            self._batch_left += self._spec.batch_tokens
        return self._stage.counter.total + self._in_flight_tokens < self._spec.stop_tokens

    async def _carry(self, sequence: int, batch: Microbatch) -> None:
        stage = self._stage
        tokens = batch.label_tokens
        seed = microbatch_seed(self._spec.seed, stage.peer_id, sequence)
        work = Work(batch, batch.to_proto(stage.runtime.run.resolved.vocabulary, seed), None)
        try:
            passed = await self._pipeline.through(0, self._id(sequence), work)
        except Dropped as dropped:
            self._stream.give_back(self._journal.drop(sequence, dropped.partial))
            self._batch_left += tokens
            self._pause_s = min(_LONGEST_PAUSE_S, max(0.5, 2 * self._pause_s))
            event(log, "microbatch_dropped", level=logging.WARNING, sequence=sequence, reason=str(dropped))
        else:
            self._journal.commit(sequence, tokens)
            self._note_unkept(passed.addition)
            stage.counter.advance(stage.peer_id, self._journal.ledger.balance().tokens)
            self._pause_s = 0.0
            self.losses.append(
                pb.LossPoint(
                    tokens=stage.counter.total, loss=passed.loss, time=stage.clock.time(), label_tokens=tokens
                )
            )
        finally:
            self._in_flight -= 1
            self._in_flight_tokens -= tokens
            self._room.set()
            for name, count in vars(self._journal.ledger.balance()).items():
                stage.metrics.gauge(f"ledger_{name}", count)
            stage.metrics.gauge("journal_behind", float(bool(self._journal.problem)))

    def _id(self, sequence: int) -> pb.MicrobatchId:
        return pb.MicrobatchId(origin=self._stage.peer_id, sequence=sequence, attempt=self._first_attempt)

    def _note_unkept(self, addition: int) -> None:
        insort(self._unkept, (addition, 1))
        if len(self._unkept) > _MOST_UNKEPT:
            # Nothing has been kept for long (a full disk, no other replica). Two count as kept once the later one is.
            pairs = zip(self._unkept[::2], self._unkept[1::2], strict=False)
            odd = self._unkept[-1:] if len(self._unkept) % 2 else []
            self._unkept = [(later, n + m) for (_, n), (later, m) in pairs] + odd

    def _kept(self) -> None:
        """This peer's own part of some committed microbatches would outlive it now."""
        upto = self._stage.runtime.keeping.kept
        kept = sum(count for addition, count in self._unkept if addition <= upto)
        if kept:
            self._journal.keep(kept)
        self._unkept = [(addition, count) for addition, count in self._unkept if addition > upto]

    async def evaluate(self, batches: Sequence[Microbatch], watermark: int) -> pb.LossPoint:
        """Held-out loss of the frozen snapshot of `watermark`, through the pipeline. Raises Dropped."""
        stage = self._stage
        # Few at a time: training goes on beside it.
        places = asyncio.Semaphore(len(stage.hops))
        losses: list[tuple[float, int]] = []

        async def one(batch: Microbatch) -> None:
            async with places:
                self._evaluations += 1
                id = self._id(self._evaluations)
                work = Work(batch, batch.to_proto(stage.runtime.run.resolved.vocabulary, 0), None)
                result = await self._pipeline.evaluate(0, id, work, watermark)
                losses.append((result.loss_sum, result.label_tokens))

        with ungrouped():
            async with asyncio.TaskGroup() as tasks:
                for batch in batches:
                    tasks.create_task(one(batch))
        total = sum(tokens for _, tokens in losses)
        loss = sum(value for value, _ in losses) / total
        return pb.LossPoint(tokens=watermark, loss=loss, time=stage.clock.time(), label_tokens=total)
