"""Weight statistics and priors: means without bias from the first gradient on, exact merges, and what a liar can do."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch

from meshd.errors import DataError, MismatchError
from meshd.priors.weight import RECENT, Triplets, WeightPrior, WeightStats, leading, merged

Array = npt.NDArray[np.float64]

BETA = 0.95
SHAPES = [(10, 16), (16, 10), (12, 12)]
CLOSE = {"rtol": 2e-5, "atol": 1e-6}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradients(count: int, shape: tuple[int, int], seed: int = 0) -> list[torch.Tensor]:
    """With a mean of rank 3 in common, of different sizes."""
    generator = seeded(seed)
    common = torch.randn(shape[0], 3, generator=seeded(99)) @ torch.randn(3, shape[1], generator=seeded(98))
    return [(common + torch.randn(shape, generator=generator)) * (1 + i % 3) for i in range(count)]


def counted(clean: list[torch.Tensor], masked: list[torch.Tensor] | None = None) -> WeightStats:
    stats = WeightStats(clean[0].shape)
    for i, gradient in enumerate(clean):
        stats.add(gradient, masked[i] if masked else None)
    return stats


def array(x: torch.Tensor) -> Array:
    return x.double().numpy()


def weighted(values: list[Array] | list[float]) -> tuple[Array, float]:
    """Sum by beta^age (1 - beta), newest last, and the weights' sum."""
    weights = [(1 - BETA) * BETA**age for age in range(len(values))][::-1]
    return sum(np.asarray(v) * w for v, w in zip(values, weights, strict=True)), sum(weights)  # type: ignore[return-value]


def mean_of(values: list[Array] | list[float]) -> Array:
    total, weight = weighted(values)
    return total / weight


def cosine(a: Array, b: Array) -> float:
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))


def cut(matrix: Array, rank: int) -> Array:
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vt[:rank]


def assert_bases(triplets: Triplets) -> None:
    eye = torch.eye(len(triplets.s))
    for side in (triplets.u, triplets.v):
        torch.testing.assert_close(side.T @ side, eye, rtol=0, atol=1e-5)
    assert bool((triplets.s >= 0).all())
    assert bool((triplets.s.diff() <= 0).all())
    assert {x.dtype for x in triplets} == {torch.float32}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2, 7, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_are_the_closed_form(shape: tuple[int, int], count: int, dtype: torch.dtype) -> None:
    """Bias-corrected: the mean of one gradient is that gradient, not a twentieth of it."""
    clean = [g.to(dtype) for g in gradients(count, shape)]
    masked = [(0.5 * g).to(dtype) for g in gradients(count, shape, seed=1)]
    stats = counted(clean, masked)
    prior = stats.prior(min(shape), seeded())
    exact = [array(g) for g in clean]
    mean = mean_of(exact)
    np.testing.assert_allclose(array(prior.mean()), mean, rtol=0, atol=1e-5 * np.abs(mean).max())
    assert prior.mean_norm == pytest.approx(np.linalg.norm(mean), rel=1e-5)
    assert prior.norm == pytest.approx(mean_of([float((g**2).sum()) for g in exact]) ** 0.5, rel=1e-5)
    cosines = [cosine(a, b) for a, b in pairwise(exact)]
    # The gradient before is remembered in bf16.
    assert prior.agreement == pytest.approx(float(mean_of(cosines)) if cosines else 0.0, abs=1e-3)
    bias = mean_of([a - array(b) for a, b in zip(exact, masked, strict=True)])
    assert prior.bias is not None
    np.testing.assert_allclose(array(prior.bias.matrix()), bias, rtol=0, atol=1e-5 * np.abs(bias).max())
    for triplets in (prior.triplets, prior.bias):
        assert_bases(triplets)
    assert (stats.count, stats.skipped) == (count, 0)
    assert prior.shape == shape


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 3, 10])
def test_power_is_the_mean_share_of_energy_in_the_basis(shape: tuple[int, int], rank: int) -> None:
    clean = gradients(9, shape)
    prior = counted(clean).prior(rank, seeded())
    u, v = array(prior.u), array(prior.v)
    shares = [(u.T @ array(g) @ v) ** 2 / (array(g) ** 2).sum() for g in clean[-RECENT:]]
    np.testing.assert_allclose(array(prior.power), np.mean(shares, axis=0), rtol=0, atol=2e-3)
    assert float(prior.power.sum()) + prior.rest == pytest.approx(1.0, abs=1e-6)
    if rank == 10 and shape != (12, 12):
        assert prior.rest < 0.45
    assert prior.u.shape == (shape[0], rank)
    assert prior.v.shape == (shape[1], rank)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prior_of_less_than_full_rank_is_the_best_of_its_rank(shape: tuple[int, int]) -> None:
    clean = gradients(5, shape)
    prior = counted(clean).prior(3, seeded())
    mean = mean_of([array(g) for g in clean])
    np.testing.assert_allclose(array(prior.mean()), cut(mean, 3), rtol=0, atol=1e-5 * np.abs(mean).max())
    assert prior.mean_norm == pytest.approx(np.linalg.norm(mean), rel=1e-5)  # not that of what is left


@pytest.mark.parametrize("shape", [(60, 100), (100, 60), (80, 80)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_randomised_svd_finds_the_leading_triplets(shape: tuple[int, int], scale: float) -> None:
    rank = 6
    left, right = (np.linalg.qr(np.random.default_rng(i).normal(size=(n, n)))[0] for i, n in enumerate(shape))
    spectrum = 0.8 ** np.arange(min(shape))
    matrix = (left[:, : len(spectrum)] * spectrum) @ right[:, : len(spectrum)].T * scale
    before = torch.get_rng_state()
    found = leading(torch.from_numpy(matrix).float(), rank, seeded(1))
    assert torch.equal(torch.get_rng_state(), before)
    assert_bases(found)
    np.testing.assert_allclose(array(found.s) / scale, spectrum[:rank], rtol=1e-4)
    difference = array(found.matrix()) / scale - cut(matrix / scale, rank)
    assert np.linalg.norm(difference) < 0.01 * np.linalg.norm(spectrum)
    again = leading(torch.from_numpy(matrix).float(), rank, seeded(1))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_a_slow_spectrum_takes_power_iterations() -> None:
    matrix = torch.randn(200, 200, generator=seeded(2))
    found = leading(matrix, 8, seeded(3))
    exact = torch.linalg.svdvals(matrix)[:8]
    assert float(found.s.norm() / exact.norm()) > 0.93  # with one iteration less 0.91, with none 0.7


def test_what_is_not_finite_is_refused_and_counted() -> None:
    shape = (4, 6)
    clean, masked = gradients(3, shape), gradients(3, shape, seed=1)
    stats, expected = WeightStats(shape), WeightStats(shape)
    bad = clean[1].clone()
    bad[2, 3] = float("inf")
    worse = bad.clone()
    worse[0, 0] = float("nan")
    for gradient, other in (
        (clean[0], masked[0]),
        (bad, masked[1]),
        (clean[1], worse),
        (clean[2], masked[2]),
    ):
        stats.add(gradient, other)
    for i in (0, 2):
        expected.add(clean[i], masked[i])
    assert (stats.count, stats.skipped) == (2, 2)
    for one, other in zip(facts(stats), facts(expected), strict=True):
        assert np.array_equal(one, other)


def facts(stats: WeightStats) -> list[Array]:
    """All that a prior says but for the choice of signs, in full rank."""
    prior = stats.prior(min(stats.shape), seeded())
    scalars = np.array([prior.rest, prior.norm, prior.mean_norm, prior.agreement])
    bias = [] if prior.bias is None else [array(prior.bias.matrix())]
    return [array(prior.mean()), array(prior.power), scalars, *bias]


def test_a_gradient_of_another_shape_is_no_gradient_of_the_weight() -> None:
    stats = WeightStats((4, 6))
    with pytest.raises(ValueError, match=r"\[6, 4\] of a weight of \[4, 6\]"):
        stats.add(torch.zeros(6, 4))
    with pytest.raises(ValueError, match=r"\[6, 4\]"):
        stats.add(torch.zeros(4, 6), torch.zeros(6, 4))
    assert stats.count == 0


def test_without_a_gradient_there_is_no_prior() -> None:
    stats = WeightStats((4, 6))
    stats.add(torch.full((4, 6), float("nan")))
    with pytest.raises(DataError, match=r"\[4, 6\].*1 that are not finite"):
        stats.prior(2, seeded())


def test_of_gradients_that_are_zero_nothing_is_known() -> None:
    stats = counted([torch.zeros(4, 6)] * 2)
    prior = stats.prior(2, seeded())
    assert (prior.norm, prior.mean_norm, prior.agreement, prior.rest) == (0.0, 0.0, 0.0, 1.0)
    assert not bool(prior.power.any())
    assert not bool(prior.mean().any())


def test_a_zero_gradient_is_no_direction_to_agree_with() -> None:
    one, two = gradients(2, (4, 6))
    prior = counted([one, torch.zeros(4, 6), two]).prior(4, seeded())
    assert prior.agreement == pytest.approx(cosine(array(one), array(two)), abs=1e-3)
    np.testing.assert_allclose(
        array(prior.mean()),
        (BETA**2 * array(one) + array(two)) / (1 + BETA + BETA**2),
        atol=1e-5,
    )


def test_opposite_gradients_disagree() -> None:
    (one,) = gradients(1, (4, 6))
    assert counted([one, -one, one]).prior(2, seeded()).agreement == pytest.approx(-1.0, abs=1e-3)


@pytest.mark.parametrize(("ours", "theirs"), [(2, 2), (1, 3), (5, 9), (40, 1), (1, 0), (0, 2)])
def test_merged_statistics_are_those_of_both(ours: int, theirs: int) -> None:
    shape = (6, 9)
    a, b = gradients(ours, shape, seed=1), gradients(theirs, shape, seed=2)
    one, other = WeightStats(shape), WeightStats(shape)
    for stats, clean in ((one, a), (other, b)):
        for gradient in clean:
            stats.add(gradient, gradient / 4)
    before = facts(other) if theirs else []
    one.merge(other)
    sums = [weighted([array(g) for g in clean]) for clean in (a, b) if clean]
    weight = sum(w for _, w in sums)
    mean = sum(total for total, _ in sums) / weight
    prior = one.prior(6, seeded())
    np.testing.assert_allclose(array(prior.mean()), mean, rtol=0, atol=1e-5)
    assert prior.bias is not None
    np.testing.assert_allclose(array(prior.bias.matrix()), 0.75 * mean, rtol=0, atol=1e-5)
    energy = sum(weighted([float((array(g) ** 2).sum()) for g in clean])[0] for clean in (a, b) if clean)
    assert prior.norm == pytest.approx((float(energy) / weight) ** 0.5, rel=1e-6)
    cosines = [weighted([cosine(array(x), array(y)) for x, y in pairwise(c)]) for c in (a, b) if len(c) > 1]
    expected = float(sum(c for c, _ in cosines)) / sum(w for _, w in cosines) if cosines else 0.0
    assert prior.agreement == pytest.approx(expected, abs=1e-3)
    # The newest of both in turns: as many of each, where each has as many.
    newest = min(theirs, max(RECENT // 2, RECENT - ours))
    seen = b[len(b) - newest :] + a[len(a) - min(ours, RECENT - newest) :]
    u, v = array(prior.u), array(prior.v)
    shares = [(u.T @ array(g) @ v) ** 2 / (array(g) ** 2).sum() for g in seen]
    np.testing.assert_allclose(array(prior.power), np.mean(shares, axis=0), rtol=0, atol=2e-3)
    assert one.count == ours + theirs
    if theirs:  # the other goes on by itself
        one.add(b[0], b[0] / 4)
        assert all(np.array_equal(x, y) for x, y in zip(facts(other), before, strict=True))


def test_anchors_in_step_are_as_one_that_saw_their_averages() -> None:
    shape = (6, 9)
    a, b = gradients(8, shape, seed=1), gradients(8, shape, seed=2)
    one, together = counted(a), counted([(x + y) / 2 for x, y in zip(a, b, strict=True)])
    one.merge(counted(b))
    torch.testing.assert_close(
        one.prior(6, seeded()).mean(), together.prior(6, seeded()).mean(), rtol=0, atol=1e-5
    )


def test_after_a_merge_a_gradient_is_compared_to_the_last_one_of_its_own_anchor() -> None:
    one, other = gradients(2, (4, 6))
    stats = counted([one])
    stats.merge(counted([other]))
    stats.add(one)
    assert stats.prior(2, seeded()).agreement == pytest.approx(1.0, abs=1e-3)


def test_a_bias_is_the_mean_of_the_gradients_that_it_was_measured_on() -> None:
    clean = gradients(4, (4, 6))
    stats = WeightStats((4, 6))
    for i, gradient in enumerate(clean):
        stats.add(gradient, gradient / 2 if i % 2 else None)
    bias = stats.prior(4, seeded()).bias
    assert bias is not None
    expected = mean_of([array(g) / 2 for g in clean[1::2]])
    np.testing.assert_allclose(array(bias.matrix()), expected, rtol=0, atol=1e-5)


def test_a_bias_that_only_one_anchor_measured_is_that_one() -> None:
    clean = gradients(3, (4, 6))
    with_bias = counted(clean, [g / 2 for g in clean])
    for one, other in ((counted(clean), with_bias), (with_bias, counted(clean))):
        one.merge(other)
        bias = one.prior(4, seeded()).bias
        assert bias is not None
        np.testing.assert_allclose(
            array(bias.matrix()), mean_of([array(g) / 2 for g in clean]), rtol=0, atol=1e-5
        )


def test_statistics_of_another_weight_do_not_merge() -> None:
    with pytest.raises(MismatchError, match=r"\[6, 4\].*\[4, 6\]"):
        WeightStats((4, 6)).merge(WeightStats((6, 4)))


def priors(shape: tuple[int, int], rank: int, count: int = 3) -> list[WeightPrior]:
    """Of anchors with gradients of the same mean and different noise, all of one norm."""
    found = []
    for seed in range(count):
        clean = gradients(3, shape, seed=10 + seed)
        prior = counted(clean, [g / 2 for g in clean]).prior(rank, seeded())
        assert prior.bias is not None
        unit = prior.triplets.norm()
        bias = prior.bias._replace(s=prior.bias.s / prior.bias.norm())
        found.append(replace(prior, s=prior.s / unit, mean_norm=prior.mean_norm / unit, bias=bias))
    # Nothing is clipped: the size of each is the same.
    largest = max(p.mean_norm for p in found)
    return [replace(p, mean_norm=largest, norm=2.0) for p in found]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 2, 10])
def test_merged_priors_are_the_svd_of_the_weighted_mean(shape: tuple[int, int], rank: int) -> None:
    weights = [3.0, 1.0, 0.5]
    given = priors(shape, rank)
    result = merged(list(zip(given, weights, strict=True)))
    mean = sum(w * array(p.mean()) for p, w in zip(given, weights, strict=True)) / sum(weights)
    s = np.linalg.svd(mean, compute_uv=False)
    assert len(result.s) == min(3 * rank, *shape)
    np.testing.assert_allclose(array(result.s), s[: len(result.s)], rtol=0, atol=1e-5)
    np.testing.assert_allclose(array(result.mean()), mean, rtol=0, atol=1e-5)
    assert_bases(result.triplets)
    assert result.bias is not None
    bias = sum(w * array(p.bias.matrix()) for p, w in zip(given, weights, strict=True) if p.bias) / 4.5
    np.testing.assert_allclose(array(result.bias.matrix()), bias, rtol=0, atol=1e-5)
    agreement = sum(w * p.agreement for p, w in zip(given, weights, strict=True)) / sum(weights)
    assert result.agreement == pytest.approx(agreement)
    assert result.norm == pytest.approx(2.0)
    assert float(result.power.sum()) + result.rest == pytest.approx(1.0, abs=1e-5)
    if 3 * rank <= min(shape):  # every basis is within the new one, and so is all the power
        rest = sum(w * p.rest for p, w in zip(given, weights, strict=True)) / sum(weights)
        assert result.rest == pytest.approx(rest, abs=1e-5)
    tail = sum((w / 4.5) ** 2 * (p.mean_norm**2 - 1) for p, w in zip(given, weights, strict=True))
    assert result.mean_norm == pytest.approx((np.linalg.norm(mean) ** 2 + tail) ** 0.5, rel=1e-4)


def test_power_of_anchors_that_agree_is_the_mean_of_theirs() -> None:
    one, other, _ = priors((10, 16), 3)
    other = replace(other, u=one.u, s=one.s, v=one.v)
    result = merged([(one, 1.0), (other, 3.0)])
    np.testing.assert_allclose(array(result.s[3:]), 0.0, atol=1e-6)
    expected = (array(one.power) + 3 * array(other.power)) / 4
    np.testing.assert_allclose(array(result.power)[:3, :3], expected, rtol=0, atol=1e-5)


def test_the_order_of_anchors_does_not_matter() -> None:
    given = list(zip(priors((10, 16), 2), [3.0, 1.0, 0.5], strict=True))
    one, other = merged(given), merged(given[::-1])
    torch.testing.assert_close(one.mean(), other.mean(), **CLOSE)
    assert one.mean_norm == pytest.approx(other.mean_norm)


def test_one_prior_alone_stays_itself() -> None:
    one, other, _ = priors((10, 16), 2)
    assert merged([(one, 0.25)]) is one
    assert merged([(one, 0.25), (other, 0.0)]) is one  # one that is too old says nothing


@pytest.mark.parametrize("rank", [2, 10])
@pytest.mark.parametrize("declared", [True, False])
def test_a_liar_of_three_moves_the_mean_by_its_clipped_share(rank: int, declared: bool) -> None:
    """Whether or not it declares the norm that it sends, and with columns far from orthonormal."""
    given = priors((10, 16), rank)
    liar = replace(given[2], s=given[2].s.flip(0).contiguous() * 1e6, norm=1e6, u=given[0].u.flip(0) * 10)
    bias = given[2].bias
    assert bias is not None
    liar = replace(liar, bias=bias._replace(s=bias.s * 1e6), mean_norm=1e6 if declared else 1e-6)
    honest, both = merged([(p, 1.0) for p in given[:2]]), merged([(p, 1.0) for p in [*given[:2], liar]])
    moved = both.mean() - honest.mean() * (2 / 3)
    limit = max(p.mean_norm for p in given)
    assert float(moved.norm()) <= limit / 3 + 1e-4
    assert float(moved.norm()) > 0.0
    assert both.bias is not None
    assert honest.bias is not None
    assert float((both.bias.matrix() - honest.bias.matrix() * (2 / 3)).norm()) <= 1 / 3 + 1e-4
    assert both.norm == pytest.approx(2.0)
    assert both.mean_norm <= limit + 1e-4


def test_a_mean_that_was_never_sent_does_not_hide_the_others() -> None:
    """A huge declared norm with a small mean would, undivided, make correctors that divide by it do nothing."""
    given = priors((10, 16), 2)
    liar = replace(given[2], mean_norm=1e9)
    assert merged([(given[0], 1.0), (given[1], 1.0), (liar, 1.0)]).mean_norm <= given[0].mean_norm + 1e-4


def test_of_two_the_smaller_is_the_measure() -> None:
    one, other, _ = priors((10, 16), 2)
    result = merged([(one, 1.0), (replace(other, s=other.s * 1e6, mean_norm=other.mean_norm * 1e6), 1.0)])
    torch.testing.assert_close(result.mean(), (one.mean() + other.mean()) / 2, rtol=0, atol=1e-5)


def test_a_bias_is_merged_of_those_that_measured_it() -> None:
    one, other, third = priors((10, 16), 2)
    result = merged([(one, 1.0), (replace(other, bias=None), 5.0), (third, 1.0)])
    assert result.bias is not None
    assert one.bias is not None
    assert third.bias is not None
    expected = (one.bias.matrix() + third.bias.matrix()) / 2
    torch.testing.assert_close(result.bias.matrix(), expected, rtol=0, atol=1e-5)
    assert merged([(replace(p, bias=None), 1.0) for p in (one, other)]).bias is None


def test_priors_that_cannot_be_merged_are_refused() -> None:
    one, *_ = priors((10, 16), 2)
    (square, *_) = priors((12, 12), 2)
    for given in ([], [(one, 0.0)], [(one, 1.0), (square, 1.0)]):
        with pytest.raises(ValueError, match="priors with a weight"):
            merged(given)


def test_all_zero_priors_merge_to_zero() -> None:
    zero = counted([torch.zeros(4, 6)]).prior(2, seeded())
    result = merged([(zero, 1.0), (zero, 1.0)])
    assert result.mean_norm == 0.0
    assert result.norm == 0.0
    assert bool(torch.isfinite(result.mean()).all())
