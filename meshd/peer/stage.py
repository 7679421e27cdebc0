"""A stage peer: claim a stage, get its state, compute, average, snapshot, until the run ends or the peer leaves."""

from __future__ import annotations

import asyncio
import logging
import random

from meshd.config.peer import PeerConfig
from meshd.data.dataset import Dataset
from meshd.data.stream import TokenStream, stream_seed
from meshd.errors import DataError, NetworkError
from meshd.gossip.service import Gossip
from meshd.gossip.values import FlatParameters
from meshd.model.cut import hops
from meshd.observe.log import event
from meshd.optim.inner import StepReport
from meshd.optim.schedule import outgrown
from meshd.peer.directory import Directory
from meshd.peer.evaluation import Evaluation
from meshd.peer.join import Supply
from meshd.peer.loading import choose_device, load_stage
from meshd.peer.parts import Parts
from meshd.peer.snapshots import Snapshots, base_of
from meshd.pipeline.injector import Injector
from meshd.pipeline.journal import Journal
from meshd.pipeline.runtime import StageRuntime
from meshd.pipeline.service import Pipeline
from meshd.pipeline.stage import Stage, Surroundings
from meshd.pipeline.upstream import Intake
from meshd.pipeline.worker import DeviceWorker
from meshd.placement import choose_stage, settle
from meshd.priors.boundary import BoundaryPrior
from meshd.priors.store import PriorStore
from meshd.proto import meshd_pb2 as pb
from meshd.state.donor import Donor
from meshd.state.live import LiveBundles

log = logging.getLogger(__name__)

# Between a claim and the second look at the swarm: long enough for claims made at the same time to be seen.
_SETTLE_S = 2.0
_SETTLE_ROUNDS = 8
_SIGN_OF_LIFE_S = 60.0


async def claim_stage(directory: Directory, stages: int, wanted: int | None) -> None:
    """Take a stage: the wanted one, or the one that needs a replica most; settled with others who come just now."""
    me, clock = directory.me, directory.clock
    me.state = pb.PEER_STATE_JOINING
    if wanted is not None:
        me.stage, me.claimed = wanted, clock.time()
        await directory.announce()
        return
    choice = choose_stage(await directory.refresh(), stages, me.peer_id, clock.time())
    me.stage, me.claimed = choice.stage, clock.time()
    event(log, "stage_claimed", stage=choice.stage, reason=choice.reason)
    for _ in range(_SETTLE_ROUNDS):
        await directory.announce()
        await clock.sleep(_SETTLE_S)
        mine = pb.Record(
            peer_id=me.peer_id,
            role=me.role,
            stage=me.stage,
            state=me.state,
            claimed=me.claimed,
            expires=clock.time() + _SETTLE_S,
        )
        settled = settle([*await directory.refresh(), mine], stages, me.peer_id, clock.time())
        if settled.keep:
            return
        me.stage, me.claimed = settled.stage, clock.time()
        event(log, "stage_changed", stage=settled.stage, reason=settled.reason)


class StagePeer:
    """Everything of a stage peer but the daemon around it. `run` returns when the run has ended; `drain` before."""

    def __init__(self, config: PeerConfig, supply: Supply, parts: Parts, rng: random.Random) -> None:
        self._config, self._run, self._supply, self._parts, self._rng = config, supply.run, supply, parts, rng
        self._directory, self._clock, self._status = parts.directory, supply.clock, parts.status
        self._runtime: StageRuntime | None = None
        self._injector: Injector | None = None
        self._intake: Intake | None = None
        self._leaving = asyncio.Event()
        self._doing = "claiming a stage"

    async def run(self) -> None:
        """Claim, sync, work. Raises MeshdError for what the user must know."""
        status, me = self._status, self._directory.me
        status.doing = lambda: self._doing
        if any(seed.state == pb.PEER_STATE_FINISHED for seed in await self._seeds()):
            event(log, "run_over", hint="this run has ended; `meshd export DIR LINK` brings its result")
            return
        wanted = self._config.stage
        if wanted is None:
            wanted = await asyncio.to_thread(self._held_before)
        elif wanted >= self._run.stages:
            raise DataError(
                f"stage = {wanted}: this run has stages 0 to {self._run.stages - 1}. Fix: one of these"
            )
        await claim_stage(self._directory, self._run.stages, wanted)
        me.state = pb.PEER_STATE_SYNCING
        await self._directory.announce()
        device = choose_device(self._config.device)
        self._doing = f"getting the state of stage {me.stage}"
        self._runtime = await load_stage(self._supply, me.stage, device)
        async with DeviceWorker() as worker:
            await self._work(self._runtime, worker)

    @property
    def runtime(self) -> StageRuntime:
        """The stage's model and optimizer, once it is loaded."""
        assert self._runtime is not None
        return self._runtime

    async def _seeds(self) -> list[pb.Record]:
        await self._directory.refresh()
        return self._directory.seeds()

    def _held_before(self) -> int | None:
        """The stage whose state this peer has from its last time in this run: going on with it costs no download."""
        held = [n for n in range(self._run.stages) if f"live/{n}" in self._supply.store.names()]
        return held[0] if len(held) == 1 else None

    # ---- work -------------------------------------------------------------------------------------------------------

    async def _work(self, runtime: StageRuntime, worker: DeviceWorker) -> None:
        me, directory, store = self._directory.me, self._directory, self._supply.store
        number, handlers = me.stage, self._parts.handlers
        priors = await self._load_priors(runtime)
        around = Surroundings(
            replicas=directory.replicas,
            live_replicas=directory.live_replicas,
            frozen=lambda watermark: snapshots.frozen(watermark),
            stepped=lambda report: self._stepped(report, gossip),
            priors=priors,
            fetch_prior=lambda stage, peer, name: self._fetch_prior(priors, stage, peer, name),
        )
        stage = Stage(
            me.peer_id,
            me.name,
            me.incarnation,
            runtime,
            worker,
            self._parts.transport,
            self._directory.counter,
            around,
            self._clock,
            self._parts.metrics,
            self._rng,
        )
        snapshots = Snapshots(stage, number, store, directory)
        self._status.last_error = lambda: snapshots.problem
        pipeline = Pipeline(stage)
        base = await asyncio.to_thread(base_of, store, number)
        gossip = Gossip(
            stage, FlatParameters(runtime.model.trainable(), base, lambda: runtime.finished), number
        )
        self._intake = Intake(pipeline)
        handlers.serve_link, handlers.serve_gossip = self._intake.serve, gossip.serve
        directory.on_change = pipeline.wake
        me.state, me.weight_version = pb.PEER_STATE_WORKING, runtime.version
        self._status.doing = lambda: self._says(pipeline)
        await directory.announce()
        try:
            async with asyncio.TaskGroup() as tasks:
                live = LiveBundles(lambda bundle: snapshots.save_live(), tasks, self._clock)
                handlers.donor = donor = Donor(
                    store,
                    self._run.run_id,
                    clock=self._clock,
                    live=live,
                    others=lambda bundle: directory.donors(number),
                )
                snapshots.readers = lambda: donor.busy
                services = [
                    tasks.create_task(pipeline.run()),
                    tasks.create_task(gossip.run()),
                    tasks.create_task(self._watch(worker)),
                    tasks.create_task(snapshots.run()),
                    tasks.create_task(self._source(pipeline, snapshots, number)),
                ]
                await self._until_end(snapshots)
                for service in services:
                    service.cancel()
        finally:
            handlers.serve_link = handlers.serve_gossip = None
        await snapshots.save_live()

    async def _load_priors(self, runtime: StageRuntime) -> PriorStore:
        resolved = self._run.resolved
        rank = 0 if runtime.features is None else runtime.features.rank
        boundaries = len(hops(resolved.layers, resolved.cut, resolved.tied)) - 1
        priors = PriorStore(self._supply.store, resolved.hidden, rank, boundaries)
        await priors.load()
        return priors

    async def _fetch_prior(self, priors: PriorStore, stage: int, peer: str, name: bytes) -> BoundaryPrior:
        """Raises MeshdError when the peer does not have it, or what it gives is none of that name."""
        for replica in self._directory.replicas(stage):
            if replica.peer_id == peer:
                await self._supply.prior(name, replica.address, priors.rank)
                return await priors.take(name)
        raise NetworkError(f"{peer[-8:]} is not known as a replica of stage {stage}")

    def _stepped(self, report: StepReport, gossip: Gossip) -> None:
        self._directory.me.weight_version = self.runtime.version
        if report.skipped:
            event(
                log, "step_skipped", level=logging.WARNING, reason="gradient not finite", tokens=report.tokens
            )
        else:
            gossip.stepped()

    def _says(self, pipeline: Pipeline) -> str:
        if pipeline.waiting_for:
            return f"waiting for {pipeline.waiting_for}"
        return self._doing

    async def _watch(self, worker: DeviceWorker) -> None:
        """Gauges that nobody pushes, and a sign of life for whoever watches the log."""
        before, since = worker.busy_s, self._clock.monotonic()
        told, warned = since, False
        while True:
            await self._clock.sleep(1.0)
            now = self._clock.monotonic()
            if not warned and (problem := outgrown(self._run.spec, self._directory.live_replicas())):
                event(log, "batch_outgrown", level=logging.WARNING, problem=problem)
                warned = True
            if now - told >= _SIGN_OF_LIFE_S:
                told = now
                self._tell()
            self._parts.metrics.gauge("device_busy_share", (worker.busy_s - before) / max(1e-9, now - since))
            self._parts.metrics.gauge("device_queue", worker.waiting)
            before, since = worker.busy_s, now
            self._directory.me.tokens_per_s = self._parts.metrics.value("tokens_per_s")

    def _tell(self) -> None:
        me, total = self._directory.me, self._directory.counter.total
        event(
            log,
            "alive",
            stage=me.stage,
            doing=self._status.doing(),
            tokens_per_s=round(me.tokens_per_s, 1),
            steps=me.weight_version,
            run=f"{total / self._run.spec.stop_tokens:.1%}",
        )

    async def _source(self, pipeline: Pipeline, snapshots: Snapshots, number: int) -> None:
        """On stage 0: evaluate the base model, inject until the end, evaluate snapshots as they come."""
        self._doing = f"serving stage {number}"
        if number != 0:
            return
        data = Dataset.open(await self._supply.data())
        spec = self._run.spec
        stream = TokenStream(
            data, spec.data.microbatch, stream_seed(self._run.run_id, self._directory.me.peer_id)
        )
        with Journal(self._parts.folder / "journal") as journal:
            ledger = journal.ledger
            stream.restore({**stream.state(), "next": ledger.next_item, "given_back": ledger.returned})
            self._injector = injector = Injector(pipeline, stream, journal)
            self._status.losses = lambda: injector.losses
            evaluation = Evaluation(
                injector, snapshots, data, self._run, self._directory, self._status, self._parts.folder
            )
            await evaluation.base()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(evaluation.run())
                self._doing = "injecting microbatches"
                await injector.run()
                balance = ledger.balance()
                event(log, "drained", holds=balance.holds, **vars(balance))

    # ---- the end ----------------------------------------------------------------------------------------------------

    def leave(self) -> bool:
        """Hand back what this peer holds, save its state, return from `run`. False: it holds nothing yet."""
        self._leaving.set()
        return self._intake is not None

    async def _until_end(self, snapshots: Snapshots) -> None:
        """Wait until the run has ended and a seed keeps its result, or until this peer has left in good order."""
        async with asyncio.TaskGroup() as tasks:
            ended = tasks.create_task(self._run_ended(snapshots))
            leaving = tasks.create_task(self._leaving.wait())
            await asyncio.wait({ended, leaving}, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            leaving.cancel()
        if self._leaving.is_set():
            await self._drain()

    async def _run_ended(self, snapshots: Snapshots) -> None:
        await snapshots.finished.wait()
        self._doing = "the run has ended; keeping its final snapshot until a seed has it"
        while not any(seed.state == pb.PEER_STATE_FINISHED for seed in self._directory.seeds()):
            await self._clock.sleep(1.0)

    async def _drain(self) -> None:
        """Take nothing new; finish what is held, or hand it back when time is up."""
        self._doing = "leaving: finishing what it holds"
        self._directory.me.state = pb.PEER_STATE_DRAINING
        if self._injector is not None:
            self._injector.stop()
        assert self._intake is not None
        self._intake.draining = True
        await self._directory.announce()
        deadline = self._clock.monotonic() + self._config.drain_s
        while self._clock.monotonic() < deadline:
            in_flight = self._injector.in_flight if self._injector is not None else 0
            if not in_flight and not self._intake.held:
                return
            await self._clock.sleep(0.1)
        event(
            log,
            "drain_cut_short",
            level=logging.WARNING,
            held=self._intake.held,
            after_s=self._config.drain_s,
        )
