"""Held-out loss of every complete snapshot, through the pipeline, by the leader of stage 0."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from pathlib import Path

from meshd.config.runspec import ResolvedRun
from meshd.data.dataset import Dataset
from meshd.errors import ResourceError
from meshd.observe.log import event
from meshd.peer.directory import Directory
from meshd.peer.snapshots import Snapshots
from meshd.peer.status import StatusBoard
from meshd.pipeline.dropped import Dropped
from meshd.pipeline.injector import Injector
from meshd.proto import meshd_pb2 as pb
from meshd.state.disk import disk_faults, write_synced

log = logging.getLogger(__name__)

_POLL_S = 1.0
# A snapshot that some stage does not have (its leader died while averaging) will not come: training goes on without.
_TRIES = 3
# Between tries at the base model, which nothing else spaces out: a replica that drops at once has time to recover.
_PAUSE_S = 5.0


class Evaluation:
    """Evaluates what this peer has snapshots of, while it leads; results are kept in the run's folder."""

    def __init__(
        self,
        injector: Injector,
        snapshots: Snapshots,
        data: Dataset,
        run: ResolvedRun,
        directory: Directory,
        status: StatusBoard,
        folder: Path,
    ) -> None:
        self._injector, self._snapshots, self._data = injector, snapshots, data
        self._spec, self._directory, self._status = run.spec, directory, status
        self._path = folder / "evaluations.json"
        self._tries: dict[int, int] = {}
        # A peer that comes back to this stage has them already.
        known = {point.tokens for point in status.evaluations}
        status.evaluations.extend(point for point in _kept(self._path) if point.tokens not in known)

    async def base(self) -> None:
        """The base model, before training: what every later loss is compared with. Training starts without it when
        it does not come about."""
        while self._spec.snapshot.evaluate and self._directory.leads() and not self._known(0):
            await self._evaluate(0)
            if self._known(0):
                return
            if self._given_up(0):
                event(log, "no_base_loss", level=logging.WARNING, tries=_TRIES)
                return
            await self._directory.clock.sleep(_PAUSE_S)

    async def run(self) -> None:
        """Evaluate until the final snapshot is done; then say that the run has finished."""
        stop = self._spec.stop_tokens
        while True:
            await self._directory.clock.sleep(_POLL_S)
            if not self._directory.leads():
                continue
            for watermark in await asyncio.to_thread(self._snapshots.watermarks):
                if self._spec.snapshot.evaluate and not self._given_up(watermark):
                    await self._evaluate(watermark)
            if self._snapshots.finished.is_set() and (
                not self._spec.snapshot.evaluate or self._given_up(stop)
            ):
                self._directory.me.state = pb.PEER_STATE_FINISHED
                await self._directory.announce()
                event(log, "run_finished", tokens=self._directory.counter.total)
                return

    def _known(self, watermark: int) -> bool:
        return any(point.tokens == watermark for point in self._status.evaluations)

    def _given_up(self, watermark: int) -> bool:
        return self._known(watermark) or self._tries.get(watermark, 0) >= _TRIES

    async def _evaluate(self, watermark: int) -> None:
        data, held_out = self._spec.data, self._spec.data.held_out_sequences
        batches = await asyncio.to_thread(
            lambda: list(self._data.held_out_batches(data.microbatch, held_out))
        )
        try:
            point = await self._injector.evaluate(batches, watermark)
            if not math.isfinite(point.loss):
                raise Dropped(pb.Drop.REASON_NONFINITE, f"a held-out loss of {point.loss}")
        except Dropped as dropped:
            # While a stage has no replica yet there is nothing to train on either: the base model can wait for it.
            if watermark or dropped.reason != pb.Drop.REASON_NO_ROUTE:
                self._tries[watermark] = self._tries.get(watermark, 0) + 1
            event(log, "evaluation_failed", level=logging.WARNING, tokens=watermark, reason=str(dropped))
            return
        self._status.evaluations.append(point)
        event(log, "held_out_loss", tokens=watermark, loss=point.loss, label_tokens=point.label_tokens)
        rows = [[p.tokens, p.loss, p.time, p.label_tokens] for p in self._status.evaluations]
        try:
            await asyncio.to_thread(_keep, self._path, rows)
        except ResourceError as error:
            event(log, "evaluation_not_kept", level=logging.WARNING, reason=str(error))


def _kept(path: Path) -> list[pb.LossPoint]:
    """The results of earlier starts. A damaged file costs them, not the peer."""
    try:
        rows = json.loads(path.read_text())
        return [pb.LossPoint(tokens=t, loss=loss, time=when, label_tokens=n) for t, loss, when, n in rows]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        event(log, "evaluations_lost", level=logging.WARNING, path=path, reason=str(error))
        return []


def _keep(path: Path, rows: list[list[float]]) -> None:
    """Replace the file at one blow. Raises ResourceError."""
    draft = path.with_suffix(".new")
    with disk_faults(path):
        write_synced(draft, json.dumps(rows).encode())
        os.replace(draft, path)
