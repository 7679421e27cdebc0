"""An anchor peer: holds a copy of the whole model, follows the stages, measures them on clean passes, and publishes
priors, until the run has its tokens or the peer leaves."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from meshd.anchor.follow import Follower, Links
from meshd.anchor.passes import RECENT, CleanPasses, stats_bytes
from meshd.anchor.refresh import Refresher, Swarm
from meshd.anchor.spreading import Publisher
from meshd.config.peer import PeerConfig
from meshd.config.runspec import ResolvedRun
from meshd.data.dataset import Dataset
from meshd.data.microbatch import Microbatch
from meshd.data.stream import TokenStream, stream_seed
from meshd.diagnosis.staged import StagedModel
from meshd.errors import DataError, ResourceError
from meshd.gossip.values import FlatParameters
from meshd.identity import Identity
from meshd.model.cut import hops
from meshd.model.families import load_config
from meshd.model.stage import StageModel
from meshd.observe.log import event
from meshd.peer.join import Supply
from meshd.peer.loading import choose_device, free_memory, stage_memory
from meshd.peer.parts import Parts
from meshd.peer.snapshots import base_of
from meshd.pipeline.crossing import needs_priors
from meshd.pipeline.exhaustion import with_memory
from meshd.pipeline.worker import DeviceWorker
from meshd.priors.features import RANK
from meshd.proto import meshd_pb2 as pb
from meshd.state.donor import Donor
from meshd.state.stage_state import WEIGHTS
from meshd.wire import codec_named

log = logging.getLogger(__name__)

_LOOK_S = 1.0


def anchor_memory(run: ResolvedRun, config: PreTrainedConfig, offload: bool) -> tuple[int, int]:
    """About how many bytes an anchor takes on its device, and beside it on the CPU. Seconds of work."""
    resolved = run.resolved
    parts = [stage_memory(run, config, stage) for stage in range(run.stages)]
    boundaries = 0
    if needs_priors(run.spec.wire):
        # Two generations of each, and what a prior is fitted to.
        count = 2 * (len(hops(resolved.layers, resolved.cut, resolved.tied)) - 1) + 1
        boundaries = count * stats_bytes(resolved.hidden, RANK)
    kept = [part.weights + part.gradients for part in parts]
    # Of a weight: the running mean in fp32, recent gradients in bf16; what is not corrected is counted too.
    statistics = sum(part.gradients // 4 * (4 + 2 * RECENT) for part in parts)
    if offload:
        largest = max(k + part.activations for k, part in zip(kept, parts, strict=True))
        return largest + boundaries, sum(kept) + statistics
    return sum(kept) + statistics + boundaries + sum(part.activations for part in parts), 0


def check_anchor_memory(
    run: ResolvedRun, config: PreTrainedConfig, device: torch.device, offload: bool
) -> None:
    """Refuse a model that cannot fit, before anything is loaded (C18). Raises ResourceError."""
    there, here = anchor_memory(run, config, offload)
    cpu = torch.device("cpu")
    needs = [(device, there), (cpu, here)] if device.type != "cpu" else [(cpu, there + here)]
    for where, needed in needs:
        free, under = free_memory(where)
        if needed > free:
            way = "" if offload or where == cpu else "--offload (stages visit the device one at a time), "
            raise ResourceError(
                f"an anchor of this run needs about {needed / 2**30:.1f} GiB, {where} has {free / 2**30:.1f} GiB "
                f"free{under}. Fix: {way}another machine, or free memory"
            )


class AnchorPeer:
    """Everything of an anchor but the daemon around it."""

    def __init__(
        self, config: PeerConfig, supply: Supply, parts: Parts, identity: Identity, rng: random.Random
    ) -> None:
        self._config, self._run, self._supply, self._parts, self._rng = config, supply.run, supply, parts, rng
        self._identity, self._clock = identity, supply.clock
        self._directory = parts.directory
        self._leaving = asyncio.Event()
        self._doing = "getting ready"

    async def run(self) -> None:
        """Until the run has its tokens, or `leave`. Raises MeshdError for what the user must know."""
        me, directory, spec = self._directory.me, self._directory, self._run.spec
        self._parts.status.doing = lambda: self._doing
        await directory.refresh()
        if self._over():
            event(log, "run_over", hint="this run has ended; `meshd export DIR LINK` brings its result")
            return
        if not needs_priors(spec.wire) and spec.anchors.corrector == "none":
            raise DataError(
                "this run's codecs take no priors and it has no corrector: an anchor has nothing to do in it. "
                "Fix: --role stage"
            )
        device = choose_device(self._config.device)
        me.state = pb.PEER_STATE_SYNCING
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(self._work(device))
            ending = [tasks.create_task(self._leaving.wait()), tasks.create_task(self._ended())]
            await asyncio.wait({working, *ending}, return_when=asyncio.FIRST_COMPLETED)
            for task in (working, *ending):
                task.cancel()
        me.state = pb.PEER_STATE_DRAINING

    def leave(self) -> bool:
        """Make `run` return. True: it will."""
        self._leaving.set()
        return True

    def _over(self) -> bool:
        return any(seed.state == pb.PEER_STATE_FINISHED for seed in self._directory.seeds())

    async def _ended(self) -> None:
        # Who was away when the last tokens were counted may never hear of them.
        while self._directory.counter.total < self._run.spec.stop_tokens and not self._over():
            await self._clock.sleep(_LOOK_S)
        event(log, "run_ended", hint="no more priors are needed")

    async def _work(self, device: torch.device) -> None:
        parts, spec, store = self._parts, self._run.spec, self._supply.store
        async with DeviceWorker() as worker:
            model = await self._load(device)
            links = Links(
                self._run,
                self._directory.me.peer_id,
                parts.transport,
                worker,
                self._directory.counter,
                self._clock,
                parts.metrics,
                self._rng,
            )
            followers = []
            for number, stage in enumerate(model.stages):
                base = await asyncio.to_thread(base_of, store, number)
                followers.append(Follower(links, number, FlatParameters(stage.trainable(), base)))
            passes = await worker.run(await self._passes(model, device))
            publisher = Publisher(
                self._identity,
                self._run,
                store,
                parts.transport,
                self._directory.replicas,
                self._clock,
                parts.metrics,
                self._rng,
            )
            resolved = self._run.resolved
            swarm = Swarm(
                self._directory.replicas,
                self._directory.counter,
                await self._shard(),
                hops(resolved.layers, resolved.cut, resolved.tied),
            )
            refresher = Refresher(
                spec, swarm, followers, passes, worker, publisher, self._clock, parts.metrics
            )
            parts.status.doing = lambda: refresher.doing
            parts.status.waiting = lambda: refresher.waiting
            parts.handlers.donor = Donor(store, self._run.run_id, clock=self._clock)
            await refresher.catch_up()
            self._directory.me.state = pb.PEER_STATE_WORKING
            await self._directory.announce()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(publisher.run())
                tasks.create_task(self._watch(worker, followers))
                tasks.create_task(refresher.run())

    async def _load(self, device: torch.device) -> StagedModel:
        """The base model, whole. Raises ResourceError, before anything is loaded, when it does not fit in memory."""
        run, supply, resolved = self._run, self._supply, self._run.resolved
        self._doing = "getting the base model"
        config = load_config(await supply.tokenizer())
        offload = self._config.offload
        await asyncio.to_thread(check_anchor_memory, run, config, device, offload)
        at = torch.device("cpu") if offload else device
        stages: list[StageModel] = []
        for number in range(run.stages):
            await supply.base(number)
            stage = StageModel(config, resolved.cut, resolved.tied, number)
            path = supply.store.path(f"base/{number}", WEIGHTS)
            await asyncio.to_thread(_filled, stage, path, at)
            stages.append(stage)
        event(log, "model_ready", stages=run.stages, device=str(device), offload=offload)
        return StagedModel(stages)

    async def _passes(self, model: StagedModel, device: torch.device) -> Callable[[], CleanPasses]:
        """What makes them, for the device's thread. Fetches what they need."""
        run, anchors = self._run, self._run.spec.anchors
        self._doing = "getting the features of tokens"
        wire = run.spec.wire
        features = await self._supply.features() if needs_priors(wire) else None
        pairs = [wire.boundary.get(number, wire) for number in range(model.boundaries)]
        return lambda: CleanPasses(
            model,
            features,
            device,
            rank=0 if anchors.corrector == "none" else anchors.rank,
            passes=anchors.passes,
            boundary_tokens=wire.prior_tokens,
            codecs=[(codec_named(pair.forward), codec_named(pair.backward)) for pair in pairs],
            seed=stream_seed(run.run_id, self._directory.me.peer_id) % 2**31,
            offload=self._config.offload,
        )

    async def _shard(self) -> Callable[[], Microbatch]:
        """Draws from this anchor's own order of the training text. It begins where the run's tokens are: an anchor that
        was started again does not see the same text again."""
        self._doing = "getting the training text"
        data = Dataset.open(await self._supply.data())
        spec = self._run.spec.data
        seed = stream_seed(self._run.run_id, self._directory.me.peer_id)
        stream = TokenStream(data, spec.microbatch, seed)
        done = self._directory.counter.total // (spec.microbatch * spec.seq_len)
        stream.restore({**stream.state(), "next": done})
        return lambda: stream.next()[1]

    async def _watch(self, worker: DeviceWorker, followers: Sequence[Follower]) -> None:
        """Gauges that nobody pushes, and what this peer announces."""
        before, since = worker.busy_s, self._clock.monotonic()
        while True:
            await self._clock.sleep(_LOOK_S)
            now = self._clock.monotonic()
            busy = (worker.busy_s - before) / max(1e-9, now - since)
            self._parts.metrics.gauge("device_busy_share", busy)
            before, since = worker.busy_s, now
            self._directory.me.weight_version = min(follower.version or 0 for follower in followers)


def _filled(stage: StageModel, weights: Path, device: torch.device) -> None:
    with_memory(lambda: stage.load(weights, device))
