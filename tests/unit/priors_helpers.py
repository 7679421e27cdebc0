"""A made-up boundary with what real ones have: correlated coordinates, a few of them huge, a part that follows from the
token, outlier tokens, gradients along other directions."""

from __future__ import annotations

import torch

from meshd.priors.boundary import BoundaryPrior
from meshd.priors.features import TokenFeatures
from meshd.priors.fit import fit
from meshd.priors.stats import BoundaryStats

HIDDEN, RANK, VOCABULARY = 24, 6, 60


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


FEATURES = TokenFeatures.from_embedding(torch.randn(VOCABULARY, HIDDEN, generator=_generator(1)), RANK)
_MIX = torch.randn(HIDDEN, HIDDEN, generator=_generator(2)) * 0.8 ** torch.arange(HIDDEN)[:, None]
_MIX[:, 3] *= 40
_KNOWN = torch.randn(RANK, HIDDEN, generator=_generator(3))
_SLOPE = torch.randn(HIDDEN, HIDDEN, generator=_generator(4)) * 0.7 ** torch.arange(HIDDEN)[:, None]
_MEAN = torch.randn(HIDDEN, generator=_generator(5)) * 3
OUTLIER = 1e4 * torch.randn(HIDDEN, generator=_generator(6))


def boundary_tokens(
    count: int, seed: int, outliers: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """h, g (count, HIDDEN) and ids (count,); the first `outliers` tokens are outliers."""
    generator = _generator(seed)
    ids = torch.randint(0, VOCABULARY, (count,), generator=generator)
    h = _MEAN + FEATURES.features(ids) @ _KNOWN + torch.randn(count, HIDDEN, generator=generator) @ _MIX
    h[:outliers] = OUTLIER + h[:outliers]
    strength = torch.rand(count, 1, generator=generator).exp() * 1e-5
    g = strength * (torch.randn(count, HIDDEN, generator=generator) @ _SLOPE)
    return h.to(dtype), g.to(dtype), ids


def boundary_stats(count: int = 2000, seed: int = 0, outliers: int = 5) -> BoundaryStats:
    stats = BoundaryStats(FEATURES, HIDDEN, seed=seed)
    stats.add(*boundary_tokens(count, seed, outliers))
    return stats


def made_prior(boundary: int = 1, measured: int = 0, seed: int = 0) -> BoundaryPrior:
    """A small valid prior; another seed gives another."""
    return fit(boundary_stats(200, seed), boundary, measured=measured)
