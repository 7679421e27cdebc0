"""Snapshots of one stage: each replica's part at a token watermark, averaged by the stage's leader (DESIGN section 7).

The average is what is evaluated, exported and, at the end of the run, taken over by every replica: one thing under one
name, so that the loss that the swarm reports is the loss of the checkpoint that people take away.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from meshd.config.runspec import ResolvedRun
from meshd.errors import DataError, MeshdError, MismatchError, NetworkError, ResourceError
from meshd.model.families import load_config
from meshd.model.stage import StageModel
from meshd.observe.log import event
from meshd.peer.directory import Directory
from meshd.pipeline.exhaustion import with_memory
from meshd.pipeline.stage import Stage
from meshd.pipeline.worker import BACKGROUND
from meshd.proto import meshd_pb2 as pb
from meshd.state.bundle import BundleStore
from meshd.state.fetch import fetch_bundle
from meshd.state.manifest import snapshots_among
from meshd.state.stage_state import read_params, write_average, write_stage
from meshd.state.tensors import check_finite, spec_of
from meshd.transport.base import NotHere, Transport

log = logging.getLogger(__name__)

# How long a leader waits for the other replicas' parts. They see the watermark within seconds of each other; the
# rest is transfer, which has its own progress time-out.
_PART_PATIENCE_S = 30.0
_POLL_S = 0.5
_KEEP_FROZEN_S = 20.0
# Between tries to keep the final snapshot on a disk that is full: someone has to free it.
_RETRY_S = 5.0


def next_watermark(done: int, every: int, stop: int) -> int:
    """The first watermark after `done` tokens: a multiple of `every`, or the end of the run. Pure."""
    return min((done // every + 1) * every, stop)


def base_of(store: BundleStore, stage: int) -> dict[str, torch.Tensor]:
    """The stage's base weights, memory-mapped."""
    return read_params(store, f"base/{stage}")


def model_of(
    stage: Stage, number: int, store: BundleStore, weights: Mapping[str, torch.Tensor]
) -> StageModel:
    """A stage model with these weights, in evaluation mode. What they lack (frozen copies) is the base's."""
    resolved = stage.runtime.run.resolved
    config = load_config(store.path("run/tokenizer", "config.json").parent)
    model = StageModel(config, resolved.cut, resolved.tied, number, stage.runtime.model.dtype)
    model.load(ChainMap(dict(weights), base_of(store, number)), stage.runtime.device, share=True)
    return model.eval()


async def watermarks_at(
    donors: Sequence[str], stage: int, transport: Transport, run: ResolvedRun
) -> set[int]:
    """Watermarks of the stage's snapshots that these addresses have; those that do not answer, or refuse, have none."""
    found = set[int]()
    for address in donors:
        try:
            reply = await transport.list_bundles(address, pb.ListRequest(run_id=run.run_id))
        except MeshdError:
            continue  # it is leaving, or gone, or serves another run by now: its streams say so elsewhere
        offered = snapshots_among(reply.bundles, run.spec.stop_tokens)
        found.update(watermark for number, watermark in offered if number == stage)
    return found


def read_part(store: BundleStore, name: str, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Another replica's part, which must be like this peer's own, and finite. Raises MismatchError or DataError."""
    part = read_params(store, name, {tensor: spec_of(values) for tensor, values in own.items()})
    for tensor, values in part.items():
        check_finite(tensor, values)
    return part


@dataclass
class _Frozen:
    watermark: int
    model: StageModel
    used: float


class Snapshots:
    """Takes snapshots when watermarks are passed, and lends the frozen models to evaluation.

    `finished` is set once the final snapshot is here and this peer's parameters are those of it. `readers`: how many
    others are fetching bundles from this peer.
    """

    def __init__(self, stage: Stage, number: int, store: BundleStore, directory: Directory) -> None:
        self._stage, self._number, self._store, self._directory = stage, number, store, directory
        self._spec = stage.runtime.run.spec
        self._frozen: _Frozen | None = None
        self._loading = asyncio.Lock()
        self._done = max((w for w in self.watermarks() if w > 0), default=0)
        self.finished = asyncio.Event()
        self.readers: Callable[[], int] = lambda: 0
        self.problem = ""
        """Why the last snapshot could not be kept; empty when it could."""

    def watermarks(self) -> list[int]:
        """Watermarks of the averaged snapshots on this disk, ascending."""
        here = snapshots_among(self._store.names(), self._spec.stop_tokens)
        return sorted(watermark for stage, watermark in here if stage == self._number)

    async def run(self) -> None:
        """Watch the token counter until the run's end."""
        every, stop = self._spec.snapshot.every_tokens, self._spec.stop_tokens
        if self._done >= stop:  # restarted after the end
            await self._finish(stop)
        # Watermarks that others have passed before this peer came are theirs: it was elsewhere then.
        self._done = max(self._done, min(self._stage.counter.total, stop - 1) // every * every)
        while not self.finished.is_set():
            await self._stage.clock.sleep(_POLL_S)
            total = self._stage.counter.total
            self._let_go()
            if total < next_watermark(self._done, every, stop):
                continue
            # Several may have passed while this peer was busy: only the last one is worth a snapshot.
            watermark = stop if total >= stop else total // every * every
            await self._take(watermark)
            self._done = watermark
            if watermark == stop:
                await self._finish(stop)

    async def _take(self, watermark: int) -> None:
        """This replica's part, and the average when this peer leads. Training goes on whatever happens here."""
        facts = {"tokens": watermark, "weight_version": self._stage.runtime.version}
        part = f"part/{self._number}/{watermark}"
        model, store = self._stage.runtime.model, self._store
        try:
            await self._stage.worker.run(
                lambda: write_stage(store, part, model.trainable(), None, facts), BACKGROUND
            )
            if not self.readers():
                # A newcomer that is reading the last one would have to begin anew at every snapshot.
                await self.save_live()
            if self._directory.leads():
                await self._average(watermark)
            await asyncio.to_thread(self._store.prune, f"part/{self._number}", 2)
            await asyncio.to_thread(self._store.prune, f"snapshot/{self._number}", self._spec.snapshot.keep)
            self.problem = ""
        except (ResourceError, DataError) as error:
            self._failed(watermark, error)

    def _failed(self, watermark: int, error: MeshdError) -> None:
        self.problem = f"no snapshot at {watermark} tokens: {error}"
        self._stage.metrics.count("snapshots_failed")
        event(log, "snapshot_failed", level=logging.ERROR, tokens=watermark, reason=str(error))

    async def save_live(self) -> None:
        """Parameters and optimizer as they are now, as bundle `live/STAGE`: for newcomers, and for a restart."""
        runtime, store, number = self._stage.runtime, self._store, self._number
        tokens = self._stage.counter.total

        def write() -> int:
            facts = {"tokens": tokens, "weight_version": runtime.version}
            write_stage(store, f"live/{number}", runtime.model.trainable(), runtime.optimizer.state(), facts)
            return runtime.keeping.stepped

        runtime.keeping.keep(await self._stage.worker.run(write, BACKGROUND))

    async def _average(self, watermark: int) -> None:
        """As the leader: bring the others' parts here and write the stage's average of them."""
        name = f"part/{self._number}/{watermark}"
        own = await asyncio.to_thread(read_params, self._store, name)
        sources, contributors = [own], [self._stage.peer_id]
        scratch = self._store.scratch("averaging")
        try:
            for replica in self._directory.stage_peers(self._number):
                try:
                    theirs = await self._part_of(replica, name, scratch, own)
                except (NetworkError, MismatchError, DataError) as error:
                    # One that did not come, or does not fit, or holds no numbers (C27): the others' average counts.
                    reason, peer = str(error), replica.name
                    event(
                        log,
                        "part_missing",
                        level=logging.WARNING,
                        peer=peer,
                        tokens=watermark,
                        reason=reason,
                    )
                    continue
                sources.append(theirs)
                contributors.append(replica.peer_id)
            facts = {
                "tokens": watermark,
                "contributors": contributors,
                "weight_version": self._stage.runtime.version,
            }
            snapshot = f"snapshot/{self._number}/{watermark}"
            weights = [1.0] * len(sources)
            await asyncio.to_thread(
                with_memory, lambda: write_average(self._store, snapshot, sources, weights, facts)
            )
        finally:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
        event(log, "snapshot", tokens=watermark, replicas=len(sources))

    async def _part_of(
        self, replica: pb.Record, name: str, scratch: Path, own: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """A replica's part. Raises NetworkError, or what `read_part` raises."""
        # Every replica's part has the same name: one store for each.
        theirs = await asyncio.to_thread(BundleStore, scratch / replica.peer_id)
        await fetch_bundle(
            name,
            [replica.address],
            self._stage.transport,
            theirs,
            self._stage.runtime.run.run_id,
            clock=self._stage.clock,
            rng=self._stage.rng,
            patience_s=_PART_PATIENCE_S,
        )
        return await asyncio.to_thread(read_part, theirs, name, own)

    async def _finish(self, stop: int) -> None:
        """Get the final average, from whoever made it, and take it over: the replicas now agree exactly."""
        name = f"snapshot/{self._number}/{stop}"
        while name not in await asyncio.to_thread(self._store.names):
            try:
                if self._directory.leads():
                    # The leader of a moment ago may have gone before it was done, or its disk is full.
                    await self._take(stop)
                else:
                    await self._fetch(name, self._directory.donors(self._number))
            except NetworkError as error:
                event(log, "waiting_for_snapshot", level=logging.WARNING, tokens=stop, reason=str(error))
            except ResourceError as error:
                self._failed(stop, error)
            if self.problem:
                await self._stage.clock.sleep(_RETRY_S)
        final = await asyncio.to_thread(read_params, self._store, name)
        await self._adopt(final, stop)
        try:
            await self.save_live()
        except ResourceError as error:
            self._failed(stop, error)
        self.finished.set()

    async def _adopt(self, final: Mapping[str, torch.Tensor], stop: int) -> None:
        """Take over the run's result; again, when memory has run out over it: a peer without it must not go."""
        while True:
            try:
                await self._stage.worker.run(lambda: self._stage.runtime.finish(final), BACKGROUND)
                self.problem = ""
                return
            except ResourceError as error:
                self._failed(stop, error)
                await self._stage.clock.sleep(_RETRY_S)

    async def _fetch(self, name: str, donors: list[str]) -> None:
        await fetch_bundle(
            name,
            donors,
            self._stage.transport,
            self._store,
            self._stage.runtime.run.run_id,
            clock=self._stage.clock,
            rng=self._stage.rng,
            patience_s=_PART_PATIENCE_S,
        )

    # ---- frozen models for evaluation -------------------------------------------------------------------------------

    async def frozen(self, watermark: int) -> StageModel | None:
        """The stage as it was at a watermark (0: the base model), or None when this peer does not have it."""
        async with self._loading:
            if self._frozen is None or self._frozen.watermark != watermark:
                try:
                    model = await asyncio.to_thread(with_memory, lambda: self._load(watermark))
                except (NotHere, DataError, ResourceError) as error:
                    level = logging.ERROR if isinstance(error, ResourceError) else logging.DEBUG
                    event(log, "no_frozen_model", level=level, tokens=watermark, reason=str(error))
                    return None
                self._frozen = _Frozen(watermark, model, 0.0)
            self._frozen.used = self._stage.clock.monotonic()
            return self._frozen.model

    def _load(self, watermark: int) -> StageModel:
        name = f"snapshot/{self._number}/{watermark}"
        weights = read_params(self._store, name) if watermark else {}
        return model_of(self._stage, self._number, self._store, weights)

    def _let_go(self) -> None:
        """Free the frozen model once evaluation has moved on: it is as large as the stage."""
        if self._frozen is not None and self._stage.clock.monotonic() - self._frozen.used > _KEEP_FROZEN_S:
            self._frozen = None
