"""When an anchor refreshes its priors, and what it does then."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from pipeline_helpers import make_run

from meshd.anchor.refresh import Moment, Refresher, Swarm, due
from meshd.errors import DataError, ResourceError
from meshd.model.cut import hops
from meshd.observe.metrics import Metrics
from meshd.optim.schedule import TokenCounter
from meshd.pipeline.worker import DeviceWorker
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock, run_virtual

SPEC = make_run([2], optim={"inner_batch": 4}).spec
BATCH = SPEC.batch_tokens


@pytest.mark.parametrize(
    ("tokens", "seconds", "expected"),
    [
        (20 * BATCH - 1, 10.0, ""),
        (20 * BATCH, 10.0, "20 steps since the last"),
        (0, 10_000.0, ""),  # nobody trains: there is nothing new to measure
        (BATCH, 1799.0, ""),
        (BATCH, 1800.0, "1800 s since the last, half of what priors may age"),
    ],
)
def test_when_the_next_refresh_is_due(tokens: int, seconds: float, expected: str) -> None:
    assert due(Moment(5, 3.0), Moment(5 + tokens, 3.0 + seconds), SPEC) == expected


@dataclass
class Following:
    """A follower; version: after it was followed."""

    stage: int
    gives: list[bool] = field(default_factory=list)
    version: int | None = None
    calls: int = 0

    async def follow(self, replicas: Any) -> bool:
        self.calls += 1
        if self.gives and not self.gives.pop(0):
            return False
        self.version = (self.version or 0) + 20
        return True


class Batch:
    label_tokens = 10


class Priors:
    def __init__(self, kind: str, number: int) -> None:
        self.made = f"{kind} {number}".encode()
        self.wrong, self.better = "", math.inf
        self.fresh: Priors | None = None
        self.sent: Priors | None = None

    def prior(self, boundary: int, measured: int) -> tuple[Priors, float]:
        if self.wrong:
            raise DataError(self.wrong)
        return self, self.better

    def to_bytes(self) -> bytes:
        return self.made


class Passing:
    """Counts passes; boundaries lack `lacking` tokens at first, of which a pass gives 24, 2 rows of 12."""

    def __init__(self, lacking: int = 0) -> None:
        self.lacking, self.runs = lacking, 0
        self.boundaries = [Priors("boundary", 0)]
        self.corrected = [0, 1]

    def run(self, batch: Any) -> int:
        self.runs += 1
        self.lacking = max(0, self.lacking - 24)
        return 0

    def weight_priors(self, stage: int) -> dict[str, Any]:
        return {}


@dataclass
class Published:
    got: list[tuple[Any, ...]] = field(default_factory=list)
    full: bool = False

    async def publish(self, kind: pb.PriorKind, number: int, data: bytes, **facts: float) -> None:
        if self.full:
            raise ResourceError("disk full")
        self.got.append((kind, number, data, facts))


class LateClock(VirtualClock):
    """Wall time that passes run while the device works."""

    later_s = 0.0

    def time(self) -> float:
        return super().time() + self.later_s


class Anchor:
    def __init__(
        self, worker: DeviceWorker, lacking: int = 0, followers: list[Following] | None = None
    ) -> None:
        clock = LateClock()
        self.counter, self.metrics, self.published = TokenCounter(), Metrics(clock), Published()
        self.passes = Passing(lacking)
        self.followers = followers or [Following(0), Following(1)]
        swarm = Swarm(lambda stage: [], self.counter, Batch, hops(4, [2], "none"))  # type: ignore[arg-type,return-value]
        self.refresher = Refresher(
            SPEC,
            swarm,
            self.followers,
            self.passes,
            worker,
            self.published,
            clock,
            self.metrics,  # type: ignore[arg-type]
        )
        self.refresher._weight_file = lambda stage: f"weights {stage}".encode()  # type: ignore[method-assign]
        self.clock = clock


def test_a_refresh_follows_measures_publishes_and_waits_for_the_swarm() -> None:
    async def main() -> None:
        async with DeviceWorker() as worker, asyncio.TaskGroup() as tasks:
            anchor = Anchor(worker)
            anchor.counter.advance("origin", 7 * BATCH)
            await anchor.refresher.catch_up()
            began, run = anchor.clock.time(), anchor.passes.run

            def slow(batch: Any) -> int:
                anchor.clock.later_s += 10.0
                return run(batch)

            anchor.passes.run = slow  # type: ignore[method-assign]
            running = tasks.create_task(anchor.refresher.run())
            await anchor.clock.sleep(100.0)
            assert anchor.passes.runs == SPEC.anchors.passes
            facts = {"weight_version": 20, "measured": 7 * BATCH, "time": began, "tokens": 80}
            assert anchor.published.got == [
                (pb.PRIOR_KIND_BOUNDARY, 0, b"boundary 0", facts),
                (pb.PRIOR_KIND_WEIGHTS, 0, b"weights 0", facts),
                (pb.PRIOR_KIND_WEIGHTS, 1, b"weights 1", facts),
            ]
            assert anchor.refresher.waiting == "waiting for 20 more steps of the swarm"
            anchor.counter.advance("origin", 27 * BATCH)
            await anchor.clock.sleep(1.0)
            assert anchor.passes.runs == 2 * SPEC.anchors.passes
            assert anchor.published.got[-1][3]["weight_version"] == 40
            assert anchor.metrics.value("anchor_refreshes") == 2
            running.cancel()

    run_virtual(main())


def test_the_first_refresh_measures_until_boundaries_have_enough() -> None:
    async def main() -> None:
        async with DeviceWorker() as worker, asyncio.TaskGroup() as tasks:
            anchor = Anchor(worker, lacking=24 * 30)
            await anchor.refresher.catch_up()
            running = tasks.create_task(anchor.refresher.run())
            await anchor.clock.sleep(1.0)
            assert anchor.passes.runs == 30
            never = Anchor(worker, lacking=24 * 30)
            never.passes.run = lambda batch: setattr(never.passes, "runs", never.passes.runs + 1) or 0  # type: ignore[method-assign]
            await never.refresher.catch_up()
            other = tasks.create_task(never.refresher.run())
            await anchor.clock.sleep(1.0)
            assert never.passes.runs == 46
            for task in (running, other):
                task.cancel()

    run_virtual(main())


def test_stages_that_nobody_serves_are_waited_for_once_and_later_done_without() -> None:
    async def main() -> None:
        async with DeviceWorker() as worker, asyncio.TaskGroup() as tasks:
            late = Following(1, [False, False, True, False])
            anchor = Anchor(worker, followers=[Following(0), late])
            caught = tasks.create_task(anchor.refresher.catch_up())
            await anchor.clock.sleep(0.1)
            assert anchor.refresher.doing == "waiting for a working replica of stage 1"
            await caught
            assert (anchor.followers[0].calls, late.calls) == (1, 3)
            running = tasks.create_task(anchor.refresher.run())
            await anchor.clock.sleep(1.0)
            assert (anchor.followers[0].calls, late.calls) == (1, 3), "it has just followed"
            anchor.published.got.clear()
            anchor.counter.advance("origin", 20 * BATCH)
            await anchor.clock.sleep(1.0)
            assert late.calls == 4
            versions = {number: facts["weight_version"] for _, number, _, facts in anchor.published.got[1:]}
            assert versions == {0: 40, 1: 20}, "dated as it is"
            running.cancel()

    run_virtual(main())


def test_a_prior_that_cannot_be_made_or_kept_does_not_end_the_anchor() -> None:
    async def main() -> None:
        async with DeviceWorker() as worker, asyncio.TaskGroup() as tasks:
            anchor = Anchor(worker)
            anchor.passes.boundaries[0].wrong = "too few tokens"
            await anchor.refresher.catch_up()
            running = tasks.create_task(anchor.refresher.run())
            await anchor.clock.sleep(1.0)
            assert [kind for kind, *_ in anchor.published.got] == [pb.PRIOR_KIND_WEIGHTS] * 2
            anchor.published.full = True
            anchor.passes.boundaries[0].wrong = ""
            anchor.counter.advance("origin", 20 * BATCH)
            await anchor.clock.sleep(1.0)
            assert anchor.metrics.value("anchor_refreshes") == 2
            assert anchor.passes.boundaries[0].sent is None
            running.cancel()

    run_virtual(main())


def test_a_boundary_prior_that_is_no_better_is_sent_again_only_before_the_last_one_ends() -> None:
    async def main() -> None:
        async with DeviceWorker() as worker, asyncio.TaskGroup() as tasks:
            anchor = Anchor(worker)
            await anchor.refresher.catch_up()
            running = tasks.create_task(anchor.refresher.run())
            sent = []
            for turn, (wait_s, better) in enumerate(
                [(1.0, 1.0), (1.0, 1.05), (1.0, 1.2), (1.0, 1.0), (1800.0, 1.0), (1.0, 1.0)]
            ):
                anchor.passes.boundaries[0].better = better
                anchor.published.got.clear()
                anchor.counter.advance("origin", (turn + 1) * 20 * BATCH)
                await anchor.clock.sleep(wait_s)
                kinds = [kind for kind, *_ in anchor.published.got]
                assert pb.PRIOR_KIND_WEIGHTS in kinds
                sent.append(pb.PRIOR_KIND_BOUNDARY in kinds)
            running.cancel()
            return sent

    assert run_virtual(main()) == [True, False, True, False, False, True]
