"""An anchor's work: follow the stages, run clean passes, publish priors, wait for the swarm to have moved on, and again
(DESIGN section 4). Nobody waits for it; it is as fast as its device and its link are."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from meshd.anchor.follow import Follower
from meshd.anchor.passes import BoundaryMoments, CleanPasses
from meshd.anchor.worth import ENOUGH
from meshd.clock import Clock
from meshd.config.runspec import RunSpec
from meshd.data.microbatch import Microbatch
from meshd.errors import DataError, MeshdError
from meshd.model.cut import Hop
from meshd.observe.log import event
from meshd.observe.metrics import Metrics
from meshd.optim.schedule import TokenCounter
from meshd.pipeline.stage import Replica
from meshd.pipeline.worker import DeviceWorker
from meshd.priors import weight_file
from meshd.proto import meshd_pb2 as pb

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_RETRY_S = 3.0
# The first refresh measures until boundaries have enough tokens, but no more than so many times what that takes when
# every token counts: those that are left out (outliers) might be all of them.
_SPARE = 1.5
# Senders that have heard of no prior for `max_staleness_s` fit their own: a share of that after the last one, the next
# is published though it is no better.
_OLD = 0.5


class Publishing(Protocol):
    """What brings priors to those who use them (`meshd.anchor.spreading.Publisher`)."""

    async def publish(
        self,
        kind: pb.PriorKind,
        number: int,
        data: bytes,
        *,
        weight_version: int,
        measured: int,
        time: float,
        tokens: int,
    ) -> None: ...


@dataclass(frozen=True)
class Moment:
    """tokens: global label tokens. at: monotonic seconds."""

    tokens: int
    at: float


def due(began: Moment, now: Moment, spec: RunSpec) -> str:
    """Why the next refresh is due, in words; empty: it is not. Pure. began: of the last one."""
    steps = (now.tokens - began.tokens) // spec.batch_tokens
    if steps >= spec.anchors.refresh_steps:
        return f"{steps} steps since the last"
    # Where steps take long, priors would be dropped for their age before there are new ones.
    waited = now.at - began.at
    if steps >= 1 and 2 * waited >= spec.anchors.max_staleness_s:
        return f"{waited:.0f} s since the last, half of what priors may age"
    return ""


def apart(spec: RunSpec) -> tuple[int, float]:
    """Half of what `due` keeps between an author's priors, in global tokens and in seconds: no more than one of both is
    expected of an honest one, whose refreshes vary, and whose priors are delayed."""
    return spec.anchors.refresh_steps * spec.batch_tokens // 2, spec.anchors.max_staleness_s / 4


@dataclass(frozen=True)
class Swarm:
    """What a refresher asks about the others. replicas: working ones of a stage. next_batch: of the anchor's own shard;
    blocking. hops: of the run."""

    replicas: Callable[[int], Sequence[Replica]]
    counter: TokenCounter
    next_batch: Callable[[], Microbatch]
    hops: Sequence[Hop]


class Refresher:
    """Runs one refresh after the other. `doing` says in words what it does, `waiting` what it waits for."""

    def __init__(
        self,
        spec: RunSpec,
        swarm: Swarm,
        followers: Sequence[Follower],
        passes: CleanPasses,
        worker: DeviceWorker,
        publisher: Publishing,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        """followers: by stage."""
        self._spec, self._swarm, self._followers, self._passes = spec, swarm, followers, passes
        self._worker, self._publisher, self._clock, self._metrics = worker, publisher, clock, metrics
        self.doing, self.waiting = "getting ready", ""
        self.refreshed = 0
        self._sent_at: dict[int, float] = {}  # when the prior of a boundary was published last

    async def catch_up(self) -> None:
        """Return when the copy of every stage has been whole once; those that nobody serves are waited for."""
        while lacking := [follower for follower in self._followers if follower.version is None]:
            for follower in lacking:
                self.doing = f"following stage {follower.stage} for the first time"
                await follower.follow(partial(self._swarm.replicas, follower.stage))
            still = [str(follower.stage) for follower in self._followers if follower.version is None]
            if still:
                self.doing = f"waiting for a working replica of stage {', '.join(still)}"
                await self._clock.sleep(_RETRY_S)

    async def run(self) -> None:
        """Until cancelled; after `catch_up`. Raises ResourceError when memory runs out in a pass."""
        while True:
            began = self._now()
            await self._refresh()
            self.doing = self.waiting = (
                f"waiting for {self._spec.anchors.refresh_steps} more steps of the swarm"
            )
            while not due(began, self._now(), self._spec):
                await self._clock.sleep(_LOOK_S)
            self.waiting = ""

    def _now(self) -> Moment:
        return Moment(self._swarm.counter.total, self._clock.monotonic())

    async def _refresh(self) -> None:
        # The copy of a first refresh has just been made.
        for follower in self._followers if self.refreshed else ():
            self.doing = f"following stage {follower.stage}"
            # Where nobody can be followed now, what is here is still good for a clean pass, and dated as it is.
            await follower.follow(partial(self._swarm.replicas, follower.stage))
        began, time = self._clock.monotonic(), self._clock.time()
        measured = self._swarm.counter.total
        tokens = await self._measure()
        self._metrics.gauge("anchor_pass_s", self._clock.monotonic() - began)
        await self._publish(measured, time, tokens)
        self._metrics.count("anchor_refreshes")
        self.refreshed += 1
        versions = [follower.version for follower in self._followers]
        event(log, "refreshed", number=self.refreshed, weight_versions=versions, tokens=tokens)

    async def _measure(self) -> int:
        """Run clean passes. Returns the label tokens that their gradients are of, as they count in a merge: those of
        the passes of a usual refresh at most."""
        passes, worker = self._passes, self._worker
        data = self._spec.data
        most = int(_SPARE * passes.lacking / (data.microbatch * data.seq_len)) + 1 if passes.lacking else 0
        tokens = done = skipped = 0
        while done < self._spec.anchors.passes or (passes.lacking and done < most):
            done += 1
            self.doing = f"running clean passes: {done} of {max(done, self._spec.anchors.passes)}"
            batch = await worker.run(self._swarm.next_batch)
            skipped += await worker.run(partial(passes.run, batch))
            self._metrics.count("anchor_passes")
            tokens += batch.label_tokens
        if skipped:
            event(log, "gradient_skipped", level=logging.WARNING, reason="not finite", weights=skipped)
        return min(tokens, self._spec.anchors.passes * data.microbatch * data.seq_len)

    async def _publish(self, measured: int, time: float, tokens: int) -> None:
        """Make priors and hand them over. One that cannot be made or kept is said, and left out."""
        most_s = self._spec.anchors.max_staleness_s
        sending = {hop.index: hop.stage for hop in self._swarm.hops}
        for number, moments in enumerate(self._passes.boundaries):
            self.doing = f"making the prior of boundary {number}"
            stale = self._clock.monotonic() - self._sent_at.get(number, -math.inf) >= _OLD * most_s
            boundary = partial(_boundary_file, moments, number, measured, stale)
            if await self._hand(
                pb.PRIOR_KIND_BOUNDARY, number, sending[number], boundary, measured, time, tokens
            ):
                self._sent_at[number], moments.sent = self._clock.monotonic(), moments.fresh
        for stage in self._passes.corrected:
            self.doing = f"making the weight priors of stage {stage}"
            weights = partial(self._weight_file, stage)
            await self._hand(pb.PRIOR_KIND_WEIGHTS, stage, stage, weights, measured, time, tokens)

    def _weight_file(self, stage: int) -> bytes:
        """Raises DataError while a weight of the stage was not measured."""
        priors = self._passes.weight_priors(stage)
        if not priors:
            raise DataError(f"stage {stage} has a weight without a finite clean gradient")
        return weight_file.to_bytes(stage, priors)

    async def _hand(
        self,
        kind: pb.PriorKind,
        number: int,
        stage: int,
        make: Callable[[], bytes | None],
        measured: int,
        time: float,
        tokens: int,
    ) -> bool:
        """stage: whose weights it was measured at. make: None: there is nothing new. True: it was published."""
        version = self._followers[stage].version
        assert version is not None
        try:
            data = await self._worker.run(make)
            if data is None:
                return False
            await self._publisher.publish(
                kind, number, data, weight_version=version, measured=measured, time=time, tokens=tokens
            )
        except (MeshdError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            event(
                log,
                "prior_not_published",
                level=logging.WARNING,
                kind=pb.PriorKind.Name(kind),
                number=number,
                reason=str(error),
            )
            return False
        return True


def _boundary_file(moments: BoundaryMoments, number: int, measured: int, stale: bool) -> bytes | None:
    """None: the one that was published last is as good, and not `stale`. Raises DataError for too few tokens."""
    prior, better = moments.prior(number, measured)
    if better < ENOUGH and not stale:
        return None
    moments.fresh = prior
    return prior.to_bytes()
