"""When the source of microbatches sends one more, and when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from pipeline_helpers import ROWS, TOKENS, make_batch, make_run

from meshd.data.microbatch import Microbatch
from meshd.observe.metrics import Metrics
from meshd.observe.trace import Tracer
from meshd.optim.schedule import TokenCounter
from meshd.pipeline import injector as injector_module
from meshd.pipeline.downstream import Passed
from meshd.pipeline.dropped import Dropped
from meshd.pipeline.injector import Injector
from meshd.pipeline.journal import Journal
from meshd.pipeline.keeping import Keeping
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock, run_virtual

EACH = ROWS * TOKENS


class Stream:
    def __init__(self) -> None:
        self.drawn = 0
        self.given_back: list[int] = []

    def next(self) -> tuple[int, Microbatch]:
        self.drawn += 1
        return self.drawn - 1, make_batch(self.drawn)

    def give_back(self, item: int) -> None:
        self.given_back.append(item)


class Pipeline:
    """A swarm that takes a second for a microbatch, and drops the first `dropping`."""

    def __init__(self, stop_tokens: int, dropping: int = 0) -> None:
        clock = VirtualClock()
        run = make_run([2], stop={"steps": None, "tokens": stop_tokens}, pipeline={"in_flight": 4})
        self.stage = SimpleNamespace(
            runtime=SimpleNamespace(run=run, keeping=Keeping()),
            hops=[0, 1],
            counter=TokenCounter(),
            peer_id="me",
            incarnation=1,
            clock=clock,
            metrics=Metrics(clock),
            tracer=Tracer(),
        )
        self.dropping = dropping

    async def through(self, hop: int, id: pb.MicrobatchId, work: object) -> Passed:
        await self.stage.clock.sleep(1.0)
        if id.sequence < self.dropping:
            raise Dropped(pb.Drop.REASON_NO_ROUTE, "none known")
        return Passed(2.0, None, 1, 0)


def injected(pipeline: Pipeline, path: Path, meanwhile: Callable[[Injector], None], after_s: float) -> int:
    """Run an injector to its end; `meanwhile` happens after some virtual time. Returns what it injected."""

    async def main() -> int:
        with Journal(path) as journal:
            injector = Injector(pipeline, Stream(), journal)  # type: ignore[arg-type]
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(injector.run())
                await asyncio.sleep(after_s)
                meanwhile(injector)
            assert journal.ledger.balance().in_flight == 0
            return journal.ledger.balance().injected

    return run_virtual(main())


def nothing(_: Injector) -> None: ...


@pytest.mark.parametrize(("stop", "microbatches"), [(1, 1), (EACH, 1), (EACH + 1, 2), (7 * EACH, 7)])
def test_what_is_in_flight_counts_toward_the_end_of_the_run(
    tmp_path: Path, stop: int, microbatches: int
) -> None:
    assert injected(Pipeline(stop), tmp_path / "journal", nothing, 0.0) == microbatches


@pytest.mark.parametrize("how", ["stopped", "others finished"])
def test_nothing_goes_out_after_a_pause_in_which_the_run_ended(tmp_path: Path, how: str) -> None:
    """After drops the source pauses, up to half a minute: others go on meanwhile."""
    pipeline = Pipeline(100 * EACH, dropping=4)

    def end(injector: Injector) -> None:
        if how == "stopped":
            injector.stop()
        else:
            pipeline.stage.counter.advance("other", 100 * EACH)

    # The first four are dropped after 1 s; their pause has begun then.
    assert injected(pipeline, tmp_path / "journal", end, 1.2) == 4


def test_what_is_not_kept_for_long_takes_no_more_memory_and_is_counted_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer alone on its stage, whose disk is full, keeps nothing. Later nothing may count as kept too early."""
    monkeypatch.setattr(injector_module, "_MOST_UNKEPT", 4)
    pipeline = Pipeline(1)
    keeping = pipeline.stage.runtime.keeping
    with Journal(tmp_path / "journal") as journal:
        injector = Injector(pipeline, Stream(), journal)  # type: ignore[arg-type]
        for addition in [2, 1, *range(3, 21)]:
            journal.commit(journal.inject(addition), 1)
            injector._note_unkept(addition)
            assert len(injector._unkept) <= 4
        keeping.keep(5)
        assert journal.ledger.unkept >= 15
        keeping.keep(20)
        assert journal.ledger.unkept == 0
        assert not injector._unkept


def test_a_start_gives_its_microbatches_and_evaluations_other_names_than_the_one_before(
    tmp_path: Path,
) -> None:
    """Their numbers may be the same; what peers remember of the former ones is refused."""
    names = []
    for incarnation in (1_800_000_000_000, 1_800_000_000_001):
        pipeline = Pipeline(1)
        pipeline.stage.incarnation = incarnation
        with Journal(tmp_path / f"journal{incarnation}") as journal:
            injector = Injector(pipeline, Stream(), journal)  # type: ignore[arg-type]
            names.append(injector._id(7).SerializeToString())
    assert names[0] != names[1]
