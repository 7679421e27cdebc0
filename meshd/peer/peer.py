"""One peer, whatever carries its messages: learn the run, play a role, be known to the others meanwhile."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

from meshd.clock import Clock
from meshd.config.peer import PeerConfig
from meshd.config.runspec import ResolvedRun
from meshd.discovery.dht import DhtRegistry
from meshd.discovery.registry import Registry
from meshd.discovery.static import StaticRegistry
from meshd.identity import Identity
from meshd.observe.log import event
from meshd.observe.metrics import Metrics
from meshd.observe.trace import Tracer
from meshd.optim.schedule import TokenCounter
from meshd.peer.anchor import AnchorPeer
from meshd.peer.directory import Directory, Self
from meshd.peer.handlers import DaemonHandlers
from meshd.peer.join import Supply, fetch_run
from meshd.peer.parts import Parts
from meshd.peer.resolve import BUNDLES, save_run
from meshd.peer.seed import SeedPeer
from meshd.peer.stage import StagePeer
from meshd.peer.status import StatusBoard
from meshd.peer.watchdog import Watchdog
from meshd.pipeline import heap
from meshd.proto import meshd_pb2 as pb
from meshd.state.bundle import BundleStore
from meshd.transport.base import Transport

log = logging.getLogger(__name__)


class Peer:
    """`handlers` are to be served at `me.address` before `run` is called. identity: signs what an anchor publishes."""

    def __init__(
        self, config: PeerConfig, me: Self, clock: Clock, rng: random.Random, identity: Identity | None = None
    ) -> None:
        # Here, and not where the stage is loaded: most of a daemon's threads start in between.
        heap.set_up()
        self._config, self.me, self._clock, self._rng, self._identity = config, me, clock, rng, identity
        self.metrics, self._tracer = Metrics(clock), Tracer()
        self.status = StatusBoard(me, clock, self.metrics)
        self.handlers = DaemonHandlers(me, clock, self.status)
        self.watchdog = Watchdog(me, self.metrics, clock, lambda: self.status.doing(), self.status.waits)
        self.status.health = self.watchdog.health
        self.role: SeedPeer | StagePeer | AnchorPeer | None = None
        self._playing: asyncio.Task[None] | None = None
        self._left = False

    def leave(self) -> None:
        """Leave in good order: what is held is finished or handed back. What has not begun to work is given up."""
        self._left = True
        if self._playing is not None and (self.role is None or not self.role.leave()):
            self._playing.cancel()

    async def run(
        self, run: ResolvedRun | None, folder: Path, registry: Registry, transport: Transport
    ) -> None:
        """Until the run has ended or the peer has left. run: None: the swarm is asked; folder: for its files."""
        directory = Directory(self.me, registry, TokenCounter(), self._clock)
        self.status.directory, self.status.transport = directory, transport
        directory.transport = transport
        parts = Parts(folder, directory, transport, self.handlers, self.status, self.metrics, self._tracer)
        async with self._traced(), asyncio.TaskGroup() as tasks:
            renewing = tasks.create_task(directory.run())
            watching = tasks.create_task(self.watchdog.run())
            self._playing = tasks.create_task(self._play(run, parts))
            if self._left:
                self._playing.cancel()
            await asyncio.wait({self._playing})
            renewing.cancel()
            watching.cancel()
        await registry.withdraw()

    def _traced(self) -> AbstractAsyncContextManager[None]:
        if not self._config.trace:
            return nullcontext()
        return self._tracer.writing(Path(self._config.trace).expanduser(), self.me.peer_id)

    async def _play(self, run: ResolvedRun | None, parts: Parts) -> None:
        directory = parts.directory
        self.me.state = pb.PEER_STATE_JOINING
        if run is None:
            self.status.doing = lambda: "asking peers for the run spec"
            run = await fetch_run(self.me.run_id, directory, parts.transport, self._clock)
            await asyncio.to_thread(save_run, parts.folder, run)
        self.status.run = self.handlers.run = run
        if isinstance(directory.registry, DhtRegistry):
            directory.registry.set_stages(run.stages)
        store = await asyncio.to_thread(BundleStore, parts.folder / BUNDLES)
        await asyncio.to_thread(store.drop_damaged)
        supply = Supply(run, store, directory, parts.transport, self._clock, self._rng)
        event(log, "run_known", name=run.spec.name, run_id=run.run_id, stages=run.stages)
        if self._config.role == "seed":
            self.role = SeedPeer(run, supply, parts.handlers, parts.status)
        elif self._config.role == "anchor":
            assert self._identity is not None
            self.role = AnchorPeer(self._config, supply, parts, self._identity, self._rng)
        else:
            self.role = StagePeer(self._stage_config(directory.registry), supply, parts, self._rng)
        await self.role.run()

    def _stage_config(self, registry: Registry) -> PeerConfig:
        """The config; what it leaves open, the registry's file may say."""
        if self._config.stage is None and isinstance(registry, StaticRegistry):
            return self._config.model_copy(update={"stage": registry.listed_stage})
        return self._config
