"""A seed: bootstrap address, keeper of run spec, base weights, data and of the newest complete snapshots. It computes
nothing and needs no GPU."""

from __future__ import annotations

import asyncio
import logging

from meshd.config.runspec import ResolvedRun
from meshd.errors import NetworkError, ResourceError
from meshd.observe.log import event
from meshd.peer.directory import Directory
from meshd.peer.handlers import DaemonHandlers
from meshd.peer.join import Supply
from meshd.peer.snapshots import watermarks_at
from meshd.peer.status import StatusBoard
from meshd.proto import meshd_pb2 as pb
from meshd.state.donor import Donor
from meshd.state.manifest import snapshots_among

log = logging.getLogger(__name__)

_POLL_S = 2.0
# A look that takes longer brings something, or hangs.
_LOOKS_S = 60.0


class SeedPeer:
    """Keeps what others need. `run` returns when `leave` was called."""

    def __init__(
        self, run: ResolvedRun, supply: Supply, handlers: DaemonHandlers, status: StatusBoard
    ) -> None:
        self._run, self._supply, self._handlers, self._status = run, supply, handlers, status
        self._directory: Directory = supply.directory
        self._leaving = asyncio.Event()
        self._doing = "getting the base model"
        self._looked: float | None = None
        self._problem = ""  # why the newest snapshot cannot be kept, as last logged

    async def run(self) -> None:
        me = self._directory.me
        self._status.doing = lambda: self._doing
        self._status.waiting = self._waits
        self._status.last_error = lambda: self._problem
        self._handlers.donor = Donor(
            self._supply.store,
            self._run.run_id,
            clock=self._supply.clock,
            others=lambda bundle: self._directory.everyone(),
        )
        me.state = pb.PEER_STATE_SYNCING
        await self._directory.announce()
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(self._keep())
            await self._leaving.wait()
            keeping.cancel()

    def leave(self) -> bool:
        """Make `run` return. True: it will."""
        self._leaving.set()
        return True

    async def _keep(self) -> None:
        supply, me = self._supply, self._directory.me
        await supply.tokenizer()
        await supply.data()
        await supply.features()
        for stage in range(self._run.stages):
            await supply.base(stage)
        me.state = pb.PEER_STATE_WORKING
        await self._directory.announce()
        while True:
            self._doing = "keeping the run's state for others"
            await self._collect()
            self._looked = supply.clock.monotonic()
            await supply.clock.sleep(_POLL_S)

    async def _collect(self) -> None:
        """Bring new snapshots here; once the last one is whole and evaluated, say that the run has finished."""
        spec, me = self._run.spec, self._directory.me
        stop = spec.stop_tokens
        for watermark in await self._offered():
            if not await self._bring(watermark):
                return
            event(log, "snapshot_kept", tokens=watermark, stages=self._run.stages)
            self._status.metrics.count("snapshots_kept")
            for stage in range(self._run.stages):
                await asyncio.to_thread(self._supply.store.prune, f"snapshot/{stage}", spec.snapshot.keep)
        ended = any(peer.state == pb.PEER_STATE_FINISHED for peer in self._directory.stage_peers(0))
        if ended and stop in await asyncio.to_thread(self.complete) and me.state != pb.PEER_STATE_FINISHED:
            await self._status.answer(
                pb.StatusRequest(swarm=True)
            )  # the last losses, before their peers leave
            me.state = pb.PEER_STATE_FINISHED
            self._doing = "the run has ended; serving its result"
            await self._directory.announce()
            event(log, "run_finished", tokens=self._directory.counter.total)

    def _waits(self) -> str:
        """Why nothing new is kept: a good reason while this peer looks after it."""
        now = self._supply.clock.monotonic()
        if self._looked is None or now - self._looked > _LOOKS_S:
            return ""
        return "no newer snapshot of all stages is there yet"

    async def _offered(self) -> list[int]:
        """Watermarks that stage 0 has a snapshot of and this seed has not."""
        here = await asyncio.to_thread(self.complete)
        donors = [peer.address for peer in self._directory.stage_peers(0)]
        found = await watermarks_at(donors, 0, self._supply.transport, self._run)
        newest = max(here, default=-1)
        return sorted(watermark for watermark in found if watermark > newest)[-1:]

    async def _bring(self, watermark: int) -> bool:
        for stage in range(self._run.stages):
            donors = [peer.address for peer in self._directory.stage_peers(stage)]
            try:
                await self._supply.snapshot(stage, watermark, donors)
            except NetworkError as error:
                event(
                    log,
                    "snapshot_incomplete",
                    level=logging.DEBUG,
                    stage=stage,
                    tokens=watermark,
                    reason=str(error),
                )
                self._problem = ""  # the disk takes it; it has to come
                return False
            except ResourceError as error:
                self._failed(watermark, str(error))
                return False
        self._problem = ""
        return True

    def _failed(self, watermark: int, reason: str) -> None:
        """A full disk, mostly: said once, and tried again at every look."""
        if not self._problem:
            event(log, "snapshot_failed", level=logging.ERROR, tokens=watermark, reason=reason)
        self._problem = f"no snapshot at {watermark} tokens: {reason}"

    def complete(self) -> list[int]:
        """Watermarks of which every stage's snapshot is here, ascending."""
        return complete_watermarks(self._supply.store.names(), self._run.stages, self._run.spec.stop_tokens)


def complete_watermarks(bundles: list[str], stages: int, stop: int) -> list[int]:
    """Of bundle names, the watermarks up to `stop` for which all stages have a snapshot, ascending. Pure."""
    of_stage: list[set[int]] = [set() for _ in range(stages)]
    for stage, watermark in snapshots_among(bundles, stop):
        if stage < stages:
            of_stage[stage].add(watermark)
    return sorted(set.intersection(*of_stage))
