"""Which weight priors a step is corrected with, and how much: never with one past its bounds."""

from __future__ import annotations

import pytest
import torch
from pipeline_helpers import make_run

from meshd.anchor.library import Held, chosen, fresh, merge
from meshd.config.runspec import AnchorSpec
from meshd.errors import ConfigError
from meshd.peer.resolve import check_spec
from meshd.priors.weight import WeightPrior, WeightStats, merged
from meshd.proto import meshd_pb2 as pb

SPEC = AnchorSpec(max_staleness_steps=40, max_staleness_s=1000.0, half_life_steps=20.0)
CPU = torch.device("cpu")


def prior(seed: int) -> WeightPrior:
    generator = torch.Generator().manual_seed(seed)
    stats = WeightStats((8, 12))
    for _ in range(3):
        stats.add(torch.randn(8, 12, generator=generator))
    return stats.prior(4, generator)


def held(author: str = "a", version: int = 0, time: float = 0.0, tokens: int = 100, seed: int = 0) -> Held:
    return Held(author, version, time, tokens, {"w": prior(seed)})


@pytest.mark.parametrize(
    ("steps", "seconds", "good"), [(40, 1000.0, True), (41, 0.0, False), (0, 1000.1, False), (-5, -5.0, True)]
)
def test_a_prior_is_fresh_up_to_both_bounds(steps: int, seconds: float, good: bool) -> None:
    assert fresh(held(version=100, time=5000.0), SPEC, 100 + steps, 5000.0 + seconds) is good


def test_what_an_author_says_of_the_future_does_not_make_its_prior_last() -> None:
    notice = pb.Notice(author="a", weight_version=900, time=1009.0, tokens=5)
    it = Held.of(notice, {}, version=10, now=1000.0)
    assert (it.version, it.time) == (10, 1000.0)
    old = Held.of(pb.Notice(author="a", weight_version=3, time=9.0, tokens=5), {}, version=10, now=1000.0)
    assert (old.version, old.time) == (3, 9.0)


def test_one_that_is_soon_too_old_is_left_out_while_others_last() -> None:
    young, old = held("young", version=50), held("old", version=12)
    assert chosen([young, old], SPEC, 49, 0.0) == (old, young)
    assert chosen([young, old], SPEC, 51, 0.0) == (young,)
    assert chosen([old], SPEC, 52, 0.0) == (old,)
    assert chosen([old], SPEC, 53, 0.0) == ()
    assert chosen([young, held("old", version=50, time=-980.0)], SPEC, 50, 0.0) == (young,)
    assert chosen([], SPEC, 0, 0.0) == ()


def test_a_correction_fades_with_its_mean_age_and_ends_with_the_oldest() -> None:
    correction = merge((held("a", 10), held("b", 30, tokens=200, seed=1)), SPEC, 30, CPU)
    # Shares 100 * 2^-1 and 200.
    assert correction.version == pytest.approx(26)
    assert correction.fade(SPEC, 26, 0.0) == pytest.approx(1.0)
    assert correction.fade(SPEC, 46, 0.0) == pytest.approx(0.5)
    assert correction.fade(SPEC, 50, 0.0) > 0.0
    assert correction.fade(SPEC, 51, 0.0) == 0.0
    assert correction.fade(SPEC, 30, 1000.5) == 0.0


def test_a_merged_prior_is_weighted_by_tokens_and_age() -> None:
    young, old = held("a", 30), held("b", 10, tokens=200, seed=1)
    got = merge((young, old), SPEC, 30, CPU).priors["w"]
    expected = merged([(young.priors["w"], 100.0), (old.priors["w"], 100.0)])
    torch.testing.assert_close(got.mean(), expected.mean())
    assert merge((young,), SPEC, 30, CPU).priors["w"].mean().equal(young.priors["w"].mean())


def test_ages_that_would_leave_nothing_of_any_weight_do_no_harm() -> None:
    spec = AnchorSpec(max_staleness_steps=10**6, half_life_steps=1.0)
    correction = merge((held("a", 0), held("b", 5, seed=1)), spec, 10**6, CPU)
    assert bool(torch.isfinite(correction.priors["w"].mean()).all())


def test_a_run_with_a_corrector_that_there_is_not_is_refused_at_its_start() -> None:
    spec = make_run([2], anchors={"corrector": "nonsense"}).spec
    with pytest.raises(ConfigError, match=r"anchors\.corrector"):
        check_spec(spec)
