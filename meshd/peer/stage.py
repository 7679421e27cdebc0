"""A stage peer: claim a stage, get its state, compute, average, snapshot, until the run ends, or the peer leaves, or it
moves to another stage and begins anew there."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import ExitStack

import torch

from meshd.config.peer import PeerConfig
from meshd.data.dataset import Dataset
from meshd.data.stream import TokenStream, stream_seed
from meshd.errors import DataError, NetworkError, ResourceError
from meshd.gossip.listening import catch_up
from meshd.gossip.service import Gossip
from meshd.gossip.values import FlatParameters
from meshd.model.cut import hops
from meshd.observe.log import event
from meshd.optim.inner import StepReport
from meshd.optim.schedule import outgrown
from meshd.peer.capacity import Capacity
from meshd.peer.evaluation import Evaluation
from meshd.peer.join import Supply
from meshd.peer.loading import (
    choose_device,
    free_memory,
    give_back_memory,
    held_before,
    load_stage,
    put_away,
    stage_needs,
)
from meshd.peer.parts import Parts
from meshd.peer.placing import claim_stage, next_move
from meshd.peer.priors import StagePriors
from meshd.peer.snapshots import Snapshots, base_of
from meshd.peer.visits import Visits
from meshd.pipeline.injector import Injector
from meshd.pipeline.journal import Journal
from meshd.pipeline.runtime import StageRuntime
from meshd.pipeline.service import Pipeline
from meshd.pipeline.stage import Stage, Surroundings
from meshd.pipeline.upstream import Intake
from meshd.pipeline.worker import DeviceWorker
from meshd.placement import Move
from meshd.priors.boundary import BoundaryPrior
from meshd.priors.store import PriorStore
from meshd.proto import meshd_pb2 as pb
from meshd.state.donor import Donor
from meshd.state.live import LiveBundles

log = logging.getLogger(__name__)

_SIGN_OF_LIFE_S = 60.0


class StagePeer:
    """Everything of a stage peer but the daemon around it. `run` returns when the run has ended; `drain` before."""

    def __init__(self, config: PeerConfig, supply: Supply, parts: Parts, rng: random.Random) -> None:
        self._config, self._run, self._supply, self._parts, self._rng = config, supply.run, supply, parts, rng
        self._directory, self._clock, self._status = parts.directory, supply.clock, parts.status
        self._runtime: StageRuntime | None = None
        self._injector: Injector | None = None
        self._intake: Intake | None = None
        self._closing = ExitStack()  # what is closed after the last state was saved
        self._leaving = asyncio.Event()
        self._needs: list[int] = []  # bytes by stage; empty when the user has named the stage
        self._device = torch.device("cpu")
        self._doing = "getting ready"

    async def run(self) -> None:
        """Claim, sync, work. Raises MeshdError for what the user must know."""
        self._status.doing = lambda: self._doing
        if any(seed.state == pb.PEER_STATE_FINISHED for seed in await self._seeds()):
            event(log, "run_over", hint="this run has ended; `meshd export DIR LINK` brings its result")
            return
        self._device = choose_device(self._config.device)
        await self._claim()
        move: Move | None = None
        while True:
            await self._get_stage(move)
            self._parts.tracer.named(self._directory.me.name, self._directory.me.stage)
            async with DeviceWorker(tracer=self._parts.tracer) as worker:
                with ExitStack() as self._closing:
                    move = await self._work(worker)
            if move is None:
                return
            await self._put_down()
            self._take_up(move.target)

    async def _claim(self) -> None:
        """Take the stage that the user wants, or the one that this peer had, or the one that needs it most."""
        wanted, me = self._config.stage, self._directory.me
        me.pinned = wanted is not None
        if wanted is None:
            self._doing = "finding out which stages fit"
            self._needs = await stage_needs(self._supply)
            me.memory_bytes = self._memory()
            held = await asyncio.to_thread(held_before, self._supply.store, self._run.stages)
            wanted = held if held is not None and self._needs[held] <= me.memory_bytes else None
        elif wanted >= self._run.stages:
            raise DataError(
                f"stage = {wanted}: this run has stages 0 to {self._run.stages - 1}. Fix: one of these"
            )
        self._doing = "claiming a stage"
        await claim_stage(self._directory, wanted, self._needs)

    def _memory(self) -> int:
        return free_memory(self._device)[0]

    async def _get_stage(self, move: Move | None) -> None:
        """Load the stage that is held. Where it turns out that the one moved to does not fit, back to the other."""
        try:
            await self._load()
            return
        except ResourceError as error:
            if move is None:
                raise
            reason = str(error)
        me = self._directory.me
        event(log, "move_failed", level=logging.ERROR, stage=move.target, back_to=move.source, reason=reason)
        # So that nobody counts on its going there again.
        me.memory_bytes = min(me.memory_bytes, self._needs[move.target] - 1)
        self._take_up(move.source)
        await self._load()

    async def _load(self) -> None:
        me = self._directory.me
        me.state = pb.PEER_STATE_SYNCING
        await self._directory.announce()
        self._doing = f"getting the state of stage {me.stage}"
        self._runtime = await load_stage(self._supply, me.stage, self._device)
        # Whoever made the run is asked for the base weights of all stages.
        base = self._run.operator != me.peer_id
        served = [bool(self._directory.stage_peers(stage)) for stage in range(self._run.stages)]
        await asyncio.to_thread(put_away, self._supply.store, me.stage, served, base)

    @property
    def runtime(self) -> StageRuntime:
        """The stage's model and optimizer, once it is loaded."""
        assert self._runtime is not None
        return self._runtime

    async def _seeds(self) -> list[pb.Record]:
        await self._directory.refresh()
        return self._directory.seeds()

    # ---- work -------------------------------------------------------------------------------------------------------

    async def _work(self, worker: DeviceWorker) -> Move | None:
        """Serve the stage, save its state. Returns the move that this peer is to make now; None: it is done."""
        runtime, me, directory, store = self.runtime, self._directory.me, self._directory, self._supply.store
        number, handlers = me.stage, self._parts.handlers
        priors = await self._load_priors(runtime)
        around = Surroundings(
            replicas=directory.replicas,
            origin=directory.origin,
            live_replicas=directory.live_replicas,
            holds=directory.holds,
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
            self._parts.tracer,
        )
        snapshots = Snapshots(stage, number, store, directory)
        self._status.last_error = lambda: snapshots.problem
        pipeline = Pipeline(stage)
        base = await asyncio.to_thread(base_of, store, number)
        gossip = Gossip(
            stage, FlatParameters(runtime.model.trainable(), base, lambda: runtime.finished), number
        )
        self._doing = f"listening: following a working replica of stage {number} before it counts"
        await catch_up(gossip, stage, lambda: directory.ahead(number, runtime.version))
        anchored = StagePriors(stage, number, pipeline, self._supply)
        self._intake = Intake(pipeline)
        visits = Visits(f"{me.name} does not serve stage {number} any more")
        handlers.serve_link = visits.serving(self._intake.serve)
        handlers.serve_gossip = visits.serving(gossip.serve)
        handlers.serve_offer = anchored.relay.serve
        directory.on_change = pipeline.wake
        me.state, me.weight_version = pb.PEER_STATE_WORKING, runtime.version
        self._status.doing = lambda: self._says(pipeline)
        await directory.announce()
        try:
            async with asyncio.TaskGroup() as tasks:
                live = LiveBundles(f"live/{number}", lambda bundle: snapshots.save_live(), tasks, self._clock)
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
                    tasks.create_task(anchored.run()),
                    tasks.create_task(self._watch(worker)),
                    tasks.create_task(snapshots.run()),
                    tasks.create_task(self._source(pipeline, snapshots, number)),
                ]
                move = await self._until_end(snapshots)
                if not snapshots.finished.is_set():
                    await gossip.farewell()
                for service in services:
                    service.cancel()
        finally:
            handlers.serve_link = handlers.serve_gossip = handlers.serve_offer = None
            visits.end()
        try:
            await snapshots.save_live()
        except ResourceError as error:
            if move is None:
                raise
            event(log, "state_not_saved", level=logging.WARNING, stage=number, reason=str(error))
        return move

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
                return await priors.take(name, stage)  # hops but the last have their stage's number
        raise NetworkError(f"{peer[-8:]} is not known as a replica of stage {stage}")

    def _stepped(self, report: StepReport, gossip: Gossip) -> None:
        self._directory.me.weight_version = self.runtime.version
        if report.skipped:
            event(
                log, "step_skipped", level=logging.WARNING, reason="gradient not finite", tokens=report.tokens
            )
        else:
            gossip.stepped(report.tokens)

    def _says(self, pipeline: Pipeline) -> str:
        if pipeline.waiting_for:
            return f"waiting for {pipeline.waiting_for}"
        return self._doing

    async def _watch(self, worker: DeviceWorker) -> None:
        """Gauges that nobody pushes, and a sign of life for whoever watches the log."""
        before, since = worker.busy_s, self._clock.monotonic()
        told, warned = since, False
        metrics, data = self._parts.metrics, self._run.spec.data
        capacity = Capacity(data.microbatch * data.seq_len)
        while True:
            await self._clock.sleep(1.0)
            now = self._clock.monotonic()
            if not warned and (problem := outgrown(self._run.spec, self._directory.live_replicas())):
                event(log, "batch_outgrown", level=logging.WARNING, problem=problem)
                warned = True
            if now - told >= _SIGN_OF_LIFE_S:
                told = now
                self._tell()
            metrics.gauge("device_busy_share", (worker.busy_s - before) / max(1e-9, now - since))
            metrics.gauge("device_queue", worker.waiting)
            before, since = worker.busy_s, now
            capacity.look(now, metrics.value("microbatches_added"), worker.busy_s)
            metrics.gauge("capacity_tokens_per_s", capacity.tokens_per_s)
            self._directory.me.tokens_per_s = metrics.value("tokens_per_s")
            self._directory.me.capacity_tokens_per_s = capacity.tokens_per_s

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
        journal = self._closing.enter_context(Journal(self._parts.folder / "journal", self._clock.monotonic))
        ledger = journal.ledger
        stream.restore({**stream.state(), "next": ledger.next_item, "given_back": ledger.returned})
        self._injector = injector = Injector(pipeline, stream, journal)
        self._status.losses = lambda: injector.losses
        self._status.last_error = lambda: "; ".join(filter(None, (injector.problem, snapshots.problem)))
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

    async def _until_end(self, snapshots: Snapshots) -> Move | None:
        """Wait until the run has ended and a seed keeps its result, or until this peer has left in good order: for
        good, or to make the move that is returned."""
        async with asyncio.TaskGroup() as tasks:
            ended = tasks.create_task(self._run_ended(snapshots))
            leaving = tasks.create_task(self._leaving.wait())
            moving = tasks.create_task(self._called_elsewhere())
            await asyncio.wait({ended, leaving, moving}, return_when=asyncio.FIRST_COMPLETED)
            move = moving.result() if moving.done() else None
            for waiting in (ended, leaving, moving):
                waiting.cancel()
        if self._leaving.is_set() or move is not None:
            await self._drain()
        if self._leaving.is_set() or snapshots.finished.is_set():
            move, self._directory.me.moving_since = None, 0.0
        return move

    async def _called_elsewhere(self) -> Move:
        """The move to another stage that gains the swarm most, once it is this peer's to make. Never, when its user
        has named its stage."""

        def may() -> bool:
            me, total = self._directory.me, self._directory.counter.total
            return me.state == pb.PEER_STATE_WORKING and not me.pinned and total < self._run.spec.stop_tokens

        return await next_move(self._directory, self._needs, may, self._rng)

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

    async def _put_down(self) -> None:
        """Let go of all that holds the stage's memory: the next one needs it. What is on the disk is served on."""
        store, directory, status = self._supply.store, self._directory, self._status
        if self._injector is not None:
            losses = list(self._injector.losses)
            status.losses = lambda: losses
            await asyncio.to_thread(self._close_books)
        self._runtime = self._injector = self._intake = None
        status.doing, status.last_error = (lambda: self._doing), str
        directory.on_change = lambda: None
        self._parts.handlers.donor = Donor(store, self._run.run_id, clock=self._clock)
        give_back_memory(self._device)

    def _close_books(self) -> None:
        """Of an origin that goes: what it had to leave in flight will not come back."""
        with Journal(self._parts.folder / "journal", self._clock.monotonic) as journal:
            for name, count in vars(journal.ledger.balance()).items():
                self._parts.metrics.gauge(f"ledger_{name}", count)

    def _take_up(self, stage: int) -> None:
        """Hold another stage from now on, as one who has just come: under this number nobody has had anything of it."""
        me = self._directory.me
        me.incarnation = max(me.incarnation + 1, int(self._clock.time() * 1000))
        me.stage, me.claimed, me.moving_since = stage, self._clock.time(), 0.0
        me.weight_version, me.capacity_tokens_per_s = 0, 0.0
