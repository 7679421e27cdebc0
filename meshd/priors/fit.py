"""Fitting a codec prior to boundary statistics (DESIGN section 3, spectral basis and token predictor)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from meshd.errors import DataError
from meshd.priors.boundary import SCALE_LIMIT, Basis, BoundaryPrior, Packed
from meshd.priors.stats import BoundaryStats
from meshd.wire.entropy import CLASSES, Tables, class_of

MOST_BITS = (4.0, 2.0)
"""Forward, backward: the most bits per value of hidden that priors are cut for."""

# Shares of the mean energy of what they are added to: features, the gradient's metric, residuals.
_RIDGE = 0.1
_FLAT = 0.1
_FLOOR = 1e-6
# Residuals with less energy than this share of the hidden state's are rounding: nothing to scale the floor by.
_NOTHING = 1e-12
_SETTLE = 6


def fit(
    stats: BoundaryStats,
    boundary: int,
    *,
    measured: int = 0,
    least_tokens: int | None = None,
    most_bits: tuple[float, float] = MOST_BITS,
) -> BoundaryPrior:
    """The prior of a boundary. Seconds of work on the statistics' device: call it off the event loop.

    measured: the run's global tokens. least_tokens: None: hidden, for with fewer the directions that were not seen
    would be lost; any number gives finite priors. most_bits: coordinates that a codec of so many bits per value would
    not code in a usual token are left out. Raises DataError saying how many tokens are missing.
    """
    least = max(1, stats.hidden if least_tokens is None else least_tokens)
    if stats.tokens < least:
        raise DataError(
            f"boundary {boundary}: {stats.tokens} tokens were measured ({stats.outliers} outliers and {stats.skipped} "
            f"that are not finite left out), a prior takes {least}: {least - stats.tokens} are missing"
        )
    assert stats.outlier_norm is not None  # some token was counted
    hidden = stats.hidden
    predictor = _predictor(stats)
    samples = stats.samples()
    known = torch.cat([stats.features.features(samples.ids), torch.ones_like(samples.h[:, :1])], 1)
    encode, decode, energy = _forward(stats, predictor)
    forward = _basis(samples.h - known @ predictor.float(), encode, decode, energy, most_bits[0])
    energy, vectors = _ordered(stats.unit_gradient / max(1, stats.graded) * hidden)
    graded = samples.g[samples.g.any(1)]
    # Only their directions are known of gradients, and what a codec scales each token by undoes the rest.
    unit = torch.nn.functional.normalize(graded, dim=1) * hidden**0.5
    backward = _basis(unit, vectors.T, None, energy, most_bits[1])
    return BoundaryPrior(
        boundary,
        stats.tokens,
        measured,
        stats.joint[-1, :hidden] / stats.tokens,
        predictor,
        stats.outlier_norm,
        stats.outlier_sum / max(1, stats.outliers),
        forward,
        backward,
    ).sealed()


def _predictor(stats: BoundaryStats) -> torch.Tensor:
    """(rank + 1, hidden) float64: h from [features, 1] by ridge regression. The bias is not held back.

    Rounded as it crosses, so that residuals are measured of what is subtracted.
    """
    joint = stats.joint / stats.tokens
    known, cross = joint[stats.hidden :, stats.hidden :], joint[stats.hidden :, : stats.hidden]
    mean, bias = known[-1, :-1], cross[-1]
    spread = known[:-1, :-1] - torch.outer(mean, mean)
    # Fewer tokens say less about each feature.
    ridge = (_RIDGE + stats.features.rank / stats.tokens) * max(float(spread.diagonal().mean()), _NOTHING)
    spread.diagonal().add_(ridge)
    weights = torch.linalg.solve(spread, cross[:-1] - torch.outer(mean, bias))
    predictor = torch.cat([weights, (bias - mean @ weights)[None]])
    return predictor.bfloat16().double()


def _forward(
    stats: BoundaryStats, predictor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """encode (hidden, hidden), decode (hidden, hidden) and the energy of each coordinate, falling; float64.

    S = (C_g / mean(diag C_g) + 0.1)^(1/2), S C S = Q diag(energy) Q^T for the residual's covariance C; encode = Q^T S.
    """
    hidden, joint = stats.hidden, stats.joint / stats.tokens
    h, cross, known = joint[:hidden, :hidden], joint[hidden:, :hidden], joint[hidden:, hidden:]
    explained = cross.T @ predictor
    residual = h - explained - explained.T + predictor.T @ known @ predictor
    eye = torch.eye(hidden, dtype=torch.float64, device=joint.device)
    metric = _FLAT * eye
    # Of token-normalised gradients: a few tokens with large ones would else decide alone (docs/codecs.md).
    weight = float(stats.unit_gradient.diagonal().mean())
    metric += stats.unit_gradient / weight if weight > 0 else eye
    values, vectors = torch.linalg.eigh(metric)
    root, inverse = ((vectors * values.pow(power)) @ vectors.T for power in (0.5, -0.5))
    # Directions that were not seen are not impossible.
    floor = max(_FLOOR * float(residual.diagonal().mean()), _NOTHING * float(h.diagonal().mean()))
    energy, rotation = _ordered(root @ residual @ root + floor * metric)
    return rotation.T @ root, inverse @ rotation, energy


def _ordered(moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues, falling and positive, and eigenvectors (columns) of a second moment."""
    values, vectors = torch.linalg.eigh((moment + moment.T) / 2)
    values, vectors = values.flip(0), vectors.flip(1)
    return values.clamp_min(max(1e-12 * float(values[0]), 1e-18)), vectors


def _basis(
    x: torch.Tensor,
    encode: torch.Tensor,
    decode: torch.Tensor | None,
    energy: torch.Tensor,
    most_bits: float,
) -> Basis:
    """The coordinates that can be coded, scaled as they are after the per-token gain.

    x: (N, hidden) float32 samples of what is encoded; encode, decode: (hidden, hidden), energy: (hidden,) falling,
    float64. decode: None: the transpose.
    """
    packed = Packed.of(encode)
    z = x @ packed.matrix().T  # scales are those of what the codec computes
    scale = _rescaled(z, energy.sqrt().float())
    order = scale.argsort(descending=True, stable=True)
    default = Tables.default()
    index = _indices(scale[order])
    step = _step(index, most_bits * len(index), default)
    order = order[: max(1, int((class_of(index, step) >= 0).sum()))]
    # Again, with the gains that come of the coordinates that are left: gains and scales settle on each other.
    scale = scale[order]
    for _ in range(_SETTLE):
        scale = _rescaled(z[:, order], scale)
    again = scale.argsort(descending=True, stable=True)
    order, scale = order[again], scale[again]
    index, unit = _indices(scale), z[:, order] / scale
    unit /= _gain(unit)
    tables = Tables.fit(unit.cpu().numpy(), index, _step(index, most_bits / 2 * len(energy), default))
    kept = Packed(packed.values[order], packed.rows[order], packed.columns)
    back = None if decode is None else Packed.of(decode[:, order])
    return Basis(kept, back, torch.from_numpy(index), tables)


def _indices(scale: torch.Tensor) -> npt.NDArray[np.int16]:
    """(K,) int16: scales (K,) as they cross."""
    index = (64 * scale.double().log2()).round().clamp(-SCALE_LIMIT, SCALE_LIMIT)
    return index.to("cpu", torch.int16).numpy()


def _gain(unit: torch.Tensor) -> torch.Tensor:
    """(N, 1): what the codec divides tokens by, given their coordinates over scale (N, K)."""
    return unit.pow(2).mean(1, keepdim=True).sqrt().clamp_min(1e-12)


def _rescaled(z: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(K,): rms of z (N, K) over tokens, each divided by its gain; `scale` where nothing was sampled or is zero."""
    if not len(z):
        return scale
    found = (z / _gain(z / scale)).pow(2).mean(0).sqrt()
    return torch.where(found > 0, found.clamp_min(1e-9 * found.max()), scale)


def _step(index: npt.NDArray[np.int16], bits: float, tables: Tables) -> int:
    """The finest step index at which coordinates of these scale indices take at most `bits` together."""
    low, high = int(index.min()) - 64 * 16, int(index.max()) + 64 * 4
    while low < high:
        middle = (low + high) // 2
        classes = np.minimum(class_of(index, middle), CLASSES - 1)
        if tables.mean_bits[classes[classes >= 0]].sum(dtype=np.float64) > bits:
            low = middle + 1
        else:
            high = middle
    return low
