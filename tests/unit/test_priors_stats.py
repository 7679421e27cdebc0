"""Boundary statistics: streaming moments that merge exactly, outliers apart, and a uniform choice of samples."""

from __future__ import annotations

import pytest
import torch

from meshd.errors import MismatchError
from meshd.priors.features import TokenFeatures
from meshd.priors.stats import BoundaryStats

HIDDEN, RANK, VOCABULARY = 12, 4, 50
FEATURES = TokenFeatures.from_embedding(
    torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1)), RANK
)


def tokens(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(count, HIDDEN, generator=generator) * torch.arange(1, HIDDEN + 1)
    g = 1e-4 * torch.randn(count, HIDDEN, generator=generator)
    return h, g, torch.randint(0, VOCABULARY, (count,), generator=generator)


def stats(seed: int = 0, samples: int = 64, outlier_norm: float | None = 1e3) -> BoundaryStats:
    return BoundaryStats(FEATURES, HIDDEN, seed=seed, samples=samples, outlier_norm=outlier_norm)


def moments(of: BoundaryStats) -> list[torch.Tensor]:
    return [of.joint, of.gradient, of.unit_gradient, of.outlier_sum]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_are_those_of_all_tokens(dtype: torch.dtype) -> None:
    h, g, ids = tokens(300, 0)
    h, g = h.to(dtype), g.to(dtype)
    found = stats()
    for rows in range(0, 300, 100):
        part = slice(rows, rows + 100)
        found.add(h[part].view(4, 25, HIDDEN), g[part].view(4, 25, HIDDEN), ids[part].view(4, 25))
    x = torch.cat([h.double(), FEATURES.features(ids).double(), torch.ones(300, 1)], 1)
    g = g.double()
    unit = g / g.norm(dim=1, keepdim=True)
    torch.testing.assert_close(found.joint, x.T @ x)
    torch.testing.assert_close(found.gradient, g.T @ g)
    torch.testing.assert_close(found.unit_gradient, unit.T @ unit)
    assert (found.tokens, found.graded, found.outliers, found.skipped) == (300, 300, 0, 0)


@pytest.mark.parametrize("split", [0, 1, 120, 250])
def test_merged_statistics_are_those_of_both(split: int) -> None:
    h, g, ids = tokens(250, 0)
    h[::60] *= 1e4  # outliers
    whole, a, b = stats(), stats(1), stats(2)
    whole.add(h, g, ids)
    a.add(h[:split], g[:split], ids[:split])
    b.add(h[split:], g[split:], ids[split:])
    a.merge(b)
    for one, other in zip(moments(a), moments(whole), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14 * float(other.abs().max()))
    counts = ("tokens", "graded", "outliers", "skipped")
    assert (
        [getattr(a, name) for name in counts] == [getattr(whole, name) for name in counts] == [245, 245, 5, 0]
    )
    assert len(a.samples().h) == 64


def test_outliers_stand_apart() -> None:
    """The norm is learnt from the first tokens: eight of their medians."""
    found = stats(outlier_norm=None)
    h, g, ids = tokens(101, 0)
    h = h / h.norm(dim=1, keepdim=True) * torch.linspace(1.0, 3.0, 101)[:, None]
    h[7] *= 50.0
    found.add(h, g, ids)
    median = float(h.norm(dim=1).median())
    assert found.outlier_norm == pytest.approx(8 * median)
    assert (found.tokens, found.outliers) == (100, 1)
    torch.testing.assert_close(found.outlier_sum, h[7].double())
    assert float(found.samples().h.norm(dim=1).max()) < 8 * median
    found.add(h[:1] * 100, g[:1], ids[:1])
    assert (found.tokens, found.outliers) == (100, 2)


def test_values_that_are_not_finite_poison_nothing() -> None:
    h, g, ids = tokens(20, 0)
    clean = stats()
    clean.add(h[2:], g[2:], ids[2:])
    h[0, 3], g[1, 5] = torch.nan, torch.inf
    found = stats()
    found.add(h, g, ids)
    assert (found.tokens, found.skipped) == (18, 2)
    torch.testing.assert_close(found.joint, clean.joint)
    torch.testing.assert_close(found.gradient, clean.gradient)
    found.add(h[:2], g[:2], ids[:2])
    assert (found.tokens, found.skipped) == (18, 4)


def test_tokens_without_a_gradient_are_not_graded() -> None:
    h, g, ids = tokens(20, 0)
    g[5:] = 0
    found = stats()
    found.add(h, g, ids)
    assert (found.tokens, found.graded) == (20, 5)
    assert float(found.unit_gradient.trace()) == pytest.approx(5)


def test_samples_are_a_uniform_choice_also_after_a_merge() -> None:
    """Of 40 tokens in parts of 10, 25 and 5, eight are kept: each of them in a fifth of 600 trials."""
    kept = torch.zeros(40)
    h = torch.arange(40.0)[:, None].expand(40, HIDDEN)
    ids = torch.arange(40)
    for trial in range(600):
        a, b = stats(2 * trial, samples=8), stats(2 * trial + 1, samples=8)
        a.add(h[:10], h[:10], ids[:10])
        a.add(h[10:35], h[10:35], ids[10:35])
        b.add(h[35:], h[35:], ids[35:])
        a.merge(b)
        samples = a.samples()
        assert len(set(samples.ids.tolist())) == 8
        assert torch.equal(samples.h[:, 0], samples.ids.float())
        kept[samples.ids] += 1
    assert kept.sum() == 8 * 600
    # Mean 120, deviation 9.8.
    assert float((kept - 120).abs().max()) < 45
    assert abs(float(kept[35:].mean()) - 120) < 20


def test_the_same_seed_chooses_the_same_samples() -> None:
    chosen = []
    for seed in (1, 1, 2):
        found = stats(seed, samples=5)
        found.add(*tokens(100, 0))
        chosen.append(sorted(found.samples().ids.tolist()))
    assert chosen[0] == chosen[1] != chosen[2]


def test_nothing_seen_yet() -> None:
    found = stats(outlier_norm=None)
    found.add(*tokens(0, 0))
    assert found.outlier_norm is None
    assert found.samples().h.shape == (0, HIDDEN)
    other = stats(outlier_norm=7.0)
    found.merge(other)
    assert found.outlier_norm == 7.0


def test_statistics_of_another_width_do_not_merge() -> None:
    with pytest.raises(MismatchError, match="hidden 13 and 4 token features"):
        stats().merge(BoundaryStats(FEATURES, 13, seed=0))
