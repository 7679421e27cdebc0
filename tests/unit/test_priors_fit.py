"""Fitting a codec prior: what its numbers must be, and that poor statistics give a finite prior or a clear refusal."""

from __future__ import annotations

import pytest
import torch
from priors_helpers import FEATURES, HIDDEN, OUTLIER, RANK, boundary_stats, boundary_tokens

from meshd.errors import DataError
from meshd.priors.boundary import BoundaryPrior
from meshd.priors.fit import fit
from meshd.priors.stats import BoundaryStats


def residuals(prior: BoundaryPrior, h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    known = torch.cat([FEATURES.features(ids), torch.ones(len(ids), 1)], 1)
    return h - known @ prior.predictor.float()


def check_finite(prior: BoundaryPrior) -> None:
    for tensor in (prior.mean, prior.predictor, prior.outlier_mean):
        assert bool(torch.isfinite(tensor).all())
    for basis in (prior.forward, prior.backward):
        assert bool(torch.isfinite(basis.encode).all() & torch.isfinite(basis.decode).all())
        assert bool(torch.isfinite(basis.scale).all())
        assert bool((basis.scale > 0).all())
    assert prior.outlier_norm > 0


def test_the_predictor_leaves_what_the_token_does_not_tell() -> None:
    prior = fit(boundary_stats(), 1)
    h, _, ids = boundary_tokens(1000, 7)
    left = residuals(prior, h, ids)
    assert left.mean(0).abs().max() < 0.2 * h.std(0).max()
    # Without the huge coordinate, half of the energy follows from the token.
    rest = torch.arange(HIDDEN) != 3
    assert left[:, rest].pow(2).sum() < 0.75 * (h - prior.mean)[:, rest].pow(2).sum()


def test_coordinates_are_uncorrelated_and_in_order_of_the_scale_that_they_have() -> None:
    """On tokens that the prior was not fitted on, after the gain that the codec takes."""
    prior = fit(boundary_stats(4000), 1, most_bits=(10.0, 10.0))
    h, g, ids = boundary_tokens(4000, 7)
    for basis, x in ((prior.forward, residuals(prior, h, ids)), (prior.backward, g)):
        assert len(basis.scale_index) == HIDDEN
        z = x @ basis.encode.T
        gain = (z / basis.scale).pow(2).mean(1, keepdim=True).sqrt()
        z = z / gain
        scale = z.pow(2).mean(0).sqrt()
        torch.testing.assert_close(basis.scale / scale, torch.ones(HIDDEN), atol=0.1, rtol=0)
        # The last ones are as small as what rounding `encode` lets through of the first.
        correlation = torch.corrcoef(z[:, :12].T) - torch.eye(12)
        assert float(correlation.abs().max()) < 0.15
        assert bool((basis.scale_index[1:] <= basis.scale_index[:-1]).all())


def test_decoding_undoes_encoding_when_nothing_is_cut() -> None:
    """To the precision of a prior, in each channel by its own measure, though one is forty times the others."""
    prior = fit(boundary_stats(), 1, most_bits=(10.0, 10.0))
    h, g, ids = boundary_tokens(1000, 7)
    for basis, x in ((prior.forward, residuals(prior, h, ids)), (prior.backward, g)):
        error = x @ basis.encode.T @ basis.decode.T - x
        assert bool((error.pow(2).mean(0) < 0.04**2 * x.pow(2).mean(0)).all())
    rows = prior.backward.encode
    torch.testing.assert_close(rows @ rows.T, torch.eye(HIDDEN), atol=0.02, rtol=0)


def test_errors_are_put_where_the_gradient_is_small() -> None:
    """A unit error in each coordinate costs the same, in the metric of the gradient: decode^T M decode is flat."""
    stats = boundary_stats()
    prior = fit(stats, 1, most_bits=(10.0, 10.0))
    metric = (stats.unit_gradient / stats.unit_gradient.diagonal().mean()).float() + 0.1 * torch.eye(HIDDEN)
    cost = prior.forward.decode.T @ metric @ prior.forward.decode
    torch.testing.assert_close(cost.diagonal(), torch.ones(HIDDEN), atol=0.1, rtol=0)
    assert float((cost - cost.diagonal().diag()).abs().mean()) < 0.02


def test_coordinates_that_never_cross_are_cut() -> None:
    many, few = fit(boundary_stats(), 1, most_bits=(6.0, 6.0)), fit(boundary_stats(), 1, most_bits=(0.3, 0.3))
    for side in ("forward", "backward"):
        small = getattr(few, side)
        assert 1 <= len(small.scale_index) < len(getattr(many, side).scale_index)
        assert small.encode.shape == (len(small.scale_index), HIDDEN)
        assert small.decode.shape == (HIDDEN, len(small.scale_index))
    assert len(few.to_bytes()) < len(many.to_bytes())


def test_outliers_have_their_own_mean() -> None:
    prior = fit(boundary_stats(outliers=20), 1)
    assert prior.tokens == 1980
    torch.testing.assert_close(prior.outlier_mean, OUTLIER, atol=float(OUTLIER.abs().max()) * 0.02, rtol=0)
    assert prior.mean.norm() < 1e-2 * OUTLIER.norm()


def test_too_few_tokens_are_refused_with_their_number() -> None:
    stats = boundary_stats(HIDDEN - 4 + 2, outliers=2)
    with pytest.raises(
        DataError, match=f"boundary 3: {HIDDEN - 4} tokens .*2 outliers.* takes {HIDDEN}: 4 are missing"
    ):
        fit(stats, 3)
    with pytest.raises(DataError, match="takes 1: 1 are missing"):
        fit(BoundaryStats(FEATURES, HIDDEN, seed=0), 3, least_tokens=0)


@pytest.mark.parametrize("count", [1, 2, 5, HIDDEN, HIDDEN + 1])
def test_few_tokens_give_a_finite_prior_where_they_are_allowed(count: int) -> None:
    check_finite(fit(boundary_stats(count, outliers=0), 1, least_tokens=1))


@pytest.mark.parametrize("h_zero", [False, True])
@pytest.mark.parametrize("g_zero", [False, True])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_degenerate_tensors_give_a_finite_prior(
    h_zero: bool, g_zero: bool, constant: bool, dtype: torch.dtype
) -> None:
    h, g, ids = boundary_tokens(100, 0, dtype=dtype)
    if constant:
        h, g = h[:1].expand_as(h), g[:1].expand_as(g)
    stats = BoundaryStats(FEATURES, HIDDEN, seed=0)
    stats.add(h * (not h_zero), g * (not g_zero), ids)
    assert stats.tokens == 100
    prior = fit(stats, 1)
    check_finite(prior)
    assert prior.rank == RANK


@pytest.mark.parametrize("factor", [1e-12, 1e12])
def test_the_gradients_scale_does_not_matter(factor: float) -> None:
    h, g, ids = boundary_tokens(500, 0)
    priors = []
    for scaled in (g, g * factor):
        stats = BoundaryStats(FEATURES, HIDDEN, seed=0)
        stats.add(h, scaled, ids)
        priors.append(fit(stats, 1))
    one, other = priors
    torch.testing.assert_close(one.forward.scale_index.int(), other.forward.scale_index.int(), atol=1, rtol=0)
    torch.testing.assert_close(
        one.backward.scale_index.int(), other.backward.scale_index.int(), atol=1, rtol=0
    )


def test_the_same_statistics_give_the_same_prior() -> None:
    assert fit(boundary_stats(), 1, measured=5).name == fit(boundary_stats(), 1, measured=5).name
    assert fit(boundary_stats(), 1, measured=5).name != fit(boundary_stats(), 1, measured=6).name
