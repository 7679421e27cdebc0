"""What is measured of a boundary: second moments that add up exactly, and some tokens as samples (DESIGN section 3)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from meshd.errors import MismatchError
from meshd.priors.features import TokenFeatures

OUTLIER_RATIO = 8.0
"""A token is an outlier when its hidden state's norm is over so many medians."""
SAMPLES = 4096

_CHUNK_ROWS = 4096
_EMPTY = -1.0


class Samples(NamedTuple):
    """Tokens: hidden states and gradients (N, hidden) float32, ids (N,) int64."""

    h: torch.Tensor
    g: torch.Tensor
    ids: torch.Tensor


class BoundaryStats:
    """Statistics of one boundary over any number of tokens, in fixed memory; those of several peers merge exactly.

    For tokens that are no outliers, in float64: `joint`, the sum of x x^T for x = [h, features, 1], of shape (D, D)
    with D = hidden + rank + 1; `gradient`, the sum of g g^T, and `unit_gradient`, that of g g^T / |g|^2, (hidden,
    hidden) each. `tokens` counts them, `graded` those whose gradient is not zero. Of outliers, `outliers` and
    `outlier_sum` (hidden,). `skipped` counts tokens left out because a value was not finite.

    Everything is on the device of `features`. Not thread-safe.
    """

    def __init__(
        self,
        features: TokenFeatures,
        hidden: int,
        *,
        seed: int,
        samples: int = SAMPLES,
        outlier_norm: float | None = None,
    ) -> None:
        """seed: of the choice of samples; statistics that are to be merged take different ones. samples: how many
        tokens are kept, chosen uniformly. outlier_norm: None: OUTLIER_RATIO medians of the first tokens that come."""
        device = features.values.device
        width = hidden + features.rank + 1
        self.features, self.hidden, self.outlier_norm = features, hidden, outlier_norm
        self.tokens = self.graded = self.outliers = self.skipped = 0
        self.joint = torch.zeros((width, width), dtype=torch.float64, device=device)
        self.gradient = torch.zeros((hidden, hidden), dtype=torch.float64, device=device)
        self.unit_gradient = torch.zeros_like(self.gradient)
        self.outlier_sum = torch.zeros(hidden, dtype=torch.float64, device=device)
        self._reservoir = _Reservoir(hidden, samples, device)
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def device(self) -> torch.device:
        return self.joint.device

    def add(self, h: torch.Tensor, g: torch.Tensor, ids: torch.Tensor) -> None:
        """Count tokens in. h, g: (..., hidden) hidden states and the loss's gradients with respect to them, floating;
        ids: (...) token ids. The scale of g does not matter as long as it stays the same."""
        h, g = (x.detach().to(self.device).reshape(-1, self.hidden) for x in (h, g))
        ids = ids.to(self.device).reshape(-1)
        if not len(h) == len(g) == len(ids):
            raise ValueError(f"{len(h)} hidden states, {len(g)} gradients, {len(ids)} ids")
        usable = torch.isfinite(h).all(1) & torch.isfinite(g).all(1)
        if not bool(usable.all()):
            self.skipped += int((~usable).sum())
            h, g, ids = h[usable], g[usable], ids[usable]
        if not len(h):
            return
        norm = torch.linalg.vector_norm(h, dim=1, dtype=torch.float32)
        if self.outlier_norm is None:
            self.outlier_norm = OUTLIER_RATIO * max(float(norm.median()), torch.finfo(torch.float32).tiny)
        outlier = norm > self.outlier_norm
        self.outliers += int(outlier.sum())
        self.outlier_sum += h[outlier].sum(0, dtype=torch.float64)
        h, g, ids = h[~outlier], g[~outlier], ids[~outlier]
        for start in range(0, len(h), _CHUNK_ROWS):
            chunk = slice(start, start + _CHUNK_ROWS)
            self._add_moments(h[chunk].double(), g[chunk].double(), ids[chunk])
        keys = torch.rand(len(h), dtype=torch.float64, generator=self._generator)
        self._reservoir.add(keys.to(self.device), Samples(h, g, ids))

    def _add_moments(self, h: torch.Tensor, g: torch.Tensor, ids: torch.Tensor) -> None:
        x = torch.cat([h, self.features.features(ids).double(), torch.ones_like(h[:, :1])], 1)
        # Addmm adds into the accumulator: no second (D, D) matrix.
        self.joint.addmm_(x.T, x)
        self.gradient.addmm_(g.T, g)
        norm = torch.linalg.vector_norm(g, dim=1, keepdim=True)
        unit = torch.where(norm > 0, g / norm, 0.0)
        self.unit_gradient.addmm_(unit.T, unit)
        self.tokens += len(h)
        self.graded += int((norm > 0).sum())

    def merge(self, other: BoundaryStats) -> None:
        """Count in what another has counted: up to rounding as if this one had seen all of it.

        Each token was judged by the outlier norm that stood where it was counted: give both the same for an exact
        equal. Samples stay a uniform choice. Raises MismatchError for statistics of another width.
        """
        if (other.hidden, other.features.rank) != (self.hidden, self.features.rank):
            raise MismatchError(
                f"statistics of hidden {other.hidden} and {other.features.rank} token features do not merge into those "
                f"of {self.hidden} and {self.features.rank}"
            )
        if self.outlier_norm is None:
            self.outlier_norm = other.outlier_norm
        for name in ("joint", "gradient", "unit_gradient", "outlier_sum"):
            getattr(self, name).add_(getattr(other, name).to(self.device))
        for name in ("tokens", "graded", "outliers", "skipped"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        keys, theirs = other._reservoir.filled()
        self._reservoir.add(keys.to(self.device), Samples(*(part.to(self.device) for part in theirs)))

    def samples(self) -> Samples:
        """Up to `samples` of the tokens that are no outliers, chosen uniformly, in no particular order."""
        _, (h, g, ids) = self._reservoir.filled()
        return Samples(h.float(), g.float(), ids)


class _Reservoir:
    """A uniform choice of the tokens that came by: every token draws a key, those with the largest keys stay.

    So two reservoirs merge into a uniform choice of both. Tokens are kept in the dtype of the first ones.
    """

    def __init__(self, hidden: int, capacity: int, device: torch.device) -> None:
        self._hidden, self._device = hidden, device
        self._keys = torch.full((capacity,), _EMPTY, dtype=torch.float64, device=device)
        self._kept: Samples | None = None

    def add(self, keys: torch.Tensor, tokens: Samples) -> None:
        if not len(keys):
            return
        if self._kept is None:
            shape = (len(self._keys), self._hidden)
            h, g = (torch.zeros(shape, dtype=x.dtype, device=self._device) for x in (tokens.h, tokens.g))
            ids = torch.zeros(len(self._keys), dtype=torch.int64, device=self._device)
            self._kept = Samples(h, g, ids)
        count = min(len(keys), len(self._keys))
        best = keys.topk(count)
        worst = self._keys.topk(count, largest=False)
        # The best newcomer against the worst place, and so on: what wins is a prefix.
        wins = best.values > worst.values
        source, place = best.indices[wins], worst.indices[wins]
        self._keys[place] = keys[source]
        for kept, new in zip(self._kept, tokens, strict=True):
            kept[place] = new[source].to(kept.dtype)

    def filled(self) -> tuple[torch.Tensor, Samples]:
        """Keys and tokens of the places that are taken."""
        taken = self._keys > _EMPTY
        if self._kept is None:
            nothing = torch.zeros((0, self._hidden), device=self._device)
            return self._keys[:0], Samples(
                nothing, nothing, torch.zeros(0, dtype=torch.int64, device=self._device)
            )
        return self._keys[taken], Samples(*(part[taken] for part in self._kept))
