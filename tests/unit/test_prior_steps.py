"""A stage's inner step with anchors' priors: corrected by what is fresh, as without any by what is not."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch
from pipeline_helpers import PACE, ROWS, TOKENS, make_batch, make_run, make_runtimes, train

from meshd.anchor import users
from meshd.anchor.library import Correction, Held, merge
from meshd.anchor.users import Weights
from meshd.errors import MismatchError
from meshd.observe.metrics import Metrics
from meshd.pipeline.runtime import Pace, Returned, StageRuntime
from meshd.priors.weight import WeightPrior, WeightStats
from meshd.priors.weight_file import to_bytes
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import EPOCH, VirtualClock, run_virtual

ANCHORS = {"corrector": "inject:lambda=0.5", "max_staleness_steps": 4, "max_staleness_s": 100.0, "rank": 4}


def runtimes(**anchors: Any) -> list[StageRuntime]:
    """Two stages that step at every microbatch."""
    run = make_run([2], optim={"inner_batch": ROWS, "clip": 0.0}, anchors={**ANCHORS, **anchors})
    return make_runtimes(run)


def priors_of(runtime: StageRuntime, seed: int = 0) -> dict[str, WeightPrior]:
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in runtime.corrected_weights().items():
        stats = WeightStats(shape)
        common = torch.randn(shape, generator=generator)
        for _ in range(3):
            stats.add(common + 0.1 * torch.randn(shape, generator=generator))
        out[name] = stats.prior(4, generator)
    return out


def correction(runtime: StageRuntime, version: int = 0, time: float = EPOCH) -> Correction:
    held = Held("anchor", version, time, 100, priors_of(runtime))
    return merge((held,), runtime.run.spec.anchors, version, torch.device("cpu"))


def at(time: float = EPOCH) -> Pace:
    return replace(PACE, time=time)


def stepped(
    by_hop: list[StageRuntime], steps: int = 1, pace: Pace | None = None
) -> tuple[torch.Tensor, list[Returned]]:
    """Parameters of stage 0 after some steps, and what its passes returned."""
    returned = [train(by_hop, make_batch(seed), pace=pace or at())[1][-1] for seed in range(steps)]
    return torch.cat([p.detach().flatten() for p in by_hop[0].model.trainable().values()]), returned


def test_a_fresh_prior_corrects_matrices_of_layers_and_nothing_else() -> None:
    plain, with_prior = runtimes(), runtimes()
    names = with_prior[0].corrected_weights().keys()
    assert names
    assert all(".h." in name and name.endswith(".weight") and "ln" not in name for name in names)
    with_prior[0].correction = correction(with_prior[0])
    stepped(plain)
    _, (returned,) = stepped(with_prior)
    assert returned.corrected is not None
    assert returned.corrected.weights == len(names)
    assert 0.7 < returned.corrected.cosine < 0.99
    assert 1 < returned.corrected.effective_rank <= 4
    before, after = plain[0].model.trainable(), with_prior[0].model.trainable()
    for name, parameter in after.items():
        assert bool((parameter != before[name]).any()) == (name in names), name


@pytest.mark.parametrize(
    ("version", "time", "corrected"),
    [
        (-4, EPOCH, True),
        (-5, EPOCH, False),  # steps
        (0, EPOCH - 100, True),
        (0, EPOCH - 100.5, False),  # seconds
    ],
)
def test_a_step_past_either_bound_is_the_one_without_a_prior(
    version: int, time: float, corrected: bool
) -> None:
    plain, with_prior = runtimes(), runtimes()
    for runtime in (plain[0], with_prior[0]):
        runtime.version = 5
    with_prior[0].correction = correction(with_prior[0], 5 + version, time)
    expected, _ = stepped(plain)
    got, (returned,) = stepped(with_prior)
    assert (returned.corrected is not None) is corrected
    assert bool((got != expected).any()) is corrected


def test_no_step_in_a_run_uses_a_prior_past_its_bound() -> None:
    by_hop = runtimes()
    by_hop[0].correction = correction(by_hop[0])
    _, returned = stepped(by_hop, 8)
    assert [each.corrected is not None for each in returned] == [True] * 5 + [False] * 3
    assert [each.corrected.age_steps for each in returned if each.corrected] == [0, 1, 2, 3, 4]


def test_without_the_time_a_prior_counts_as_too_old() -> None:
    by_hop = runtimes()
    by_hop[0].correction = correction(by_hop[0])
    _, (returned,) = stepped(by_hop, pace=PACE)
    assert returned.corrected is None


def test_a_run_without_a_corrector_ignores_priors() -> None:
    plain, with_prior = runtimes(corrector="none"), runtimes(corrector="none")
    assert with_prior[0].corrected_weights() == {}
    with_prior[0].correction = correction(runtimes()[0])
    assert stepped(plain)[0].equal(stepped(with_prior)[0])


# ---- what is brought, merged and swapped in ------------------------------------------------------------------------


def notice(data: bytes, author: str = "a", **changes: Any) -> pb.Notice:
    values = {"version": 1, "weight_version": 0, "time": EPOCH, "tokens": ROWS * TOKENS}
    name = hashlib.sha256(data).digest()
    return pb.Notice(author=author, name=name, **{**values, **changes})


class Scene:
    def __init__(self, **anchors: Any) -> None:
        self.by_hop = runtimes(**anchors)
        self.runtime = self.by_hop[0]
        self.clock = VirtualClock()
        self.metrics = Metrics(self.clock)
        self.weights = Weights(0, self.runtime, self.clock, self.metrics)

    def file(self, seed: int = 0) -> bytes:
        return to_bytes(0, priors_of(self.runtime, seed))

    @property
    def authors(self) -> list[str]:
        return [] if self.runtime.correction is None else [held.author for held in self.runtime.correction.of]


def played(play: Callable[[Scene], Coroutine[Any, Any, None]], **anchors: Any) -> None:
    async def main() -> None:
        scene = Scene(**anchors)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(scene.weights.run())
            await play(scene)
            running.cancel()

    run_virtual(main())


def test_priors_come_and_go_and_the_next_step_has_those_there_are() -> None:
    async def play(s: Scene) -> None:
        one, two = s.file(), s.file(1)
        await s.weights.take(notice(one), one)
        await asyncio.sleep(0.1)
        assert s.authors == ["a"]
        await asyncio.sleep(20)
        await s.weights.take(notice(two, "b", time=EPOCH + 20), two)
        await asyncio.sleep(0.1)
        assert s.authors == ["a", "b"]
        assert s.metrics.value("priors_used") == 2
        _, (returned,) = stepped(s.by_hop, pace=at(s.clock.time()))
        assert returned.corrected is not None
        # The older one is left out before it reaches its bound; the younger when it does.
        await asyncio.sleep(75)
        assert s.authors == ["b"]
        assert s.metrics.value("prior_age_s") > 70
        await asyncio.sleep(30)
        assert s.authors == []

    played(play)


def test_a_step_between_two_looks_does_not_use_one_of_two_that_has_grown_too_old() -> None:
    async def play(s: Scene) -> None:
        one, two = s.file(), s.file(1)
        s.runtime.version = 4
        await s.weights.take(notice(one), one)
        await s.weights.take(notice(two, "b", weight_version=4), two)
        await asyncio.sleep(0.1)
        assert s.authors == ["a", "b"]
        _, returned = stepped(s.by_hop, 2, at(s.clock.time()))
        assert [each.corrected is not None for each in returned] == [True, False]
        await asyncio.sleep(1.5)
        assert s.authors == ["b"]

    played(play)


def test_a_follower_takes_the_place_of_the_one_before_and_its_end_is_not_that_of_the_new_one() -> None:
    async def play(s: Scene) -> None:
        one = s.file()
        await s.weights.take(notice(one), one)
        await asyncio.sleep(0.1)
        s.runtime.version = 3
        await s.weights.take(notice(one, version=2, weight_version=3), one)
        s.weights.gone(notice(one))
        await asyncio.sleep(0.1)
        assert s.runtime.correction is not None
        assert s.runtime.correction.version == 3
        s.weights.gone(notice(one, version=2))
        await asyncio.sleep(0.1)
        assert s.authors == []

    played(play)


def test_a_merge_that_takes_long_keeps_no_step_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step goes by what there was: with a merge under way in another thread, priors are those from before."""
    import threading

    going, release, real = threading.Event(), threading.Event(), users.merge

    def slow(*arguments: Any) -> Correction:
        going.set()
        release.wait(20)
        return real(*arguments)

    async def main() -> None:
        s = Scene()
        one = s.file()
        monkeypatch.setattr(users, "merge", slow)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(s.weights.run())
            await s.weights.take(notice(one, time=s.clock.time()), one)
            await asyncio.to_thread(going.wait, 20)
            _, returned = stepped(s.by_hop, 3, at(s.clock.time()))
            assert [each.corrected for each in returned] == [None] * 3
            release.set()
            await asyncio.sleep(0.5)
            assert s.authors == ["a"]
            running.cancel()

    class RealTime(VirtualClock):
        def monotonic(self) -> float:
            return 0.0

    monkeypatch.setattr(f"{__name__}.VirtualClock", RealTime)
    asyncio.run(main())


def test_what_cannot_be_merged_is_told_and_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*arguments: Any) -> Correction:
        raise torch.linalg.LinAlgError("did not converge")

    async def play(s: Scene) -> None:
        one = s.file()
        with monkeypatch.context() as patched:
            patched.setattr(users, "merge", failing)
            await s.weights.take(notice(one), one)
            await asyncio.sleep(5)
        assert s.authors == []
        await s.weights.take(notice(one, version=2), one)
        await asyncio.sleep(0.1)
        assert s.authors == ["a"]

    played(play)
    assert [record.getMessage() for record in caplog.records] == ["priors_not_merged"]


def test_a_file_that_does_not_fit_the_stage_is_refused() -> None:
    async def play(s: Scene) -> None:
        other = to_bytes(1, priors_of(s.by_hop[1]))
        with pytest.raises(MismatchError):
            await s.weights.take(notice(other), other)
        assert s.authors == []

    played(play)
