"""Values to small integers and back: Lloyd-Max tables, bits by energy, a uniform quantizer with a dead zone.

DESIGN section 3, "Bits by energy". What both ends must agree on, how many bits each coordinate gets, is computed from
integers only (docs/masks.md, "Bit allotment").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

MOST_BITS = 10
# Scales and steps cross as integers, 64 to an octave: round(64 * log2(value)).
OCTAVE = 64

# What the next bit is worth: round(64 * log2(D(b) - D(b + 1))), D(b) the Lloyd-Max distortion of a unit Gaussian at b
# bits and D(0) = 1. Normative and therefore written out: two machines may round a logarithm differently.
GAINS = (-42, -130, -230, -340, -458, -580, -705, -832, -959, -1087)

# Levels end where float32 still counts by ones.
_LARGEST_LEVEL = 2**24

# Stands for infinity: the density is zero there in double precision, and products with it stay finite.
_FAR = 40.0

_Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LloydMax:
    """The quantizer of a unit Gaussian that errs least in the mean square.

    thresholds: (2^bits - 1,), centroids: (2^bits,), float64 on the CPU, ascending; index i stands for values over
    thresholds[i - 1] up to thresholds[i]. distortion: mean squared error on a unit Gaussian.
    """

    bits: int
    thresholds: torch.Tensor
    centroids: torch.Tensor
    distortion: float


@lru_cache(maxsize=MOST_BITS)
def lloyd_max(bits: int) -> LloydMax:
    """The Lloyd-Max quantizer with 2^bits values, bits from 1 to 10. Raises ValueError for others.

    Newton's method on Max's conditions (J. Max, "Quantizing for minimum distortion", 1960): a threshold lies midway
    between its centroids, a centroid is the mean of its cell. The density is log-concave, so the solution is unique.
    It is symmetric: only the positive half is solved for.
    """
    if not 1 <= bits <= MOST_BITS:
        raise ValueError(f"Lloyd-Max tables have 1 to {MOST_BITS} bits, not {bits}")
    half = 2 ** (bits - 1)
    # Many cells have the density of a Gaussian of variance 3 (Panter and Dite, 1951); a good start for few cells too.
    wide = NormalDist(sigma=math.sqrt(3))
    centroids = np.array([wide.inv_cdf(0.5 + (i + 0.5) / (2 * half)) for i in range(half)])
    step = np.ones(half)
    while np.abs(step).max() > 1e-9:  # Newton doubles the digits: what is left after such a step is rounding.
        mass, mean, by_lower, by_upper = _cells(centroids)
        step = _solve_tridiagonal(-by_lower, 1 - by_lower - by_upper, -by_upper, mean - centroids)
        centroids = centroids + step
    mass, mean, _, _ = _cells(centroids)
    between = (centroids[1:] + centroids[:-1]) / 2
    return LloydMax(
        bits,
        thresholds=torch.from_numpy(np.concatenate([-between[::-1], [0.0], between])),
        centroids=torch.from_numpy(np.concatenate([-centroids[::-1], centroids])),
        distortion=float(1 - 2 * (mass * mean**2).sum()),
    )


def _cells(centroids: _Floats) -> tuple[_Floats, _Floats, _Floats, _Floats]:
    """Mass and mean of a unit Gaussian in each cell around positive centroids, and half the derivatives of the mean
    by the cell's lower and upper edge: its derivatives by the neighbour's and, summed, by the cell's own centroid."""
    edges = np.concatenate([[0.0], (centroids[1:] + centroids[:-1]) / 2, [_FAR]])
    density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
    # From the tail, where differences keep their digits.
    beyond = np.array([math.erfc(edge / math.sqrt(2)) / 2 for edge in edges])
    mass = beyond[:-1] - beyond[1:]
    mean = (density[:-1] - density[1:]) / mass
    by_lower = density[:-1] * (mean - edges[:-1]) / mass / 2
    by_upper = density[1:] * (edges[1:] - mean) / mass / 2
    by_lower[0] = 0.0  # The lowest edge is 0, whatever the centroids.
    return mass, mean, by_lower, by_upper


def _solve_tridiagonal(lower: _Floats, diagonal: _Floats, upper: _Floats, right: _Floats) -> _Floats:
    """Solution x of lower[i] x[i-1] + diagonal[i] x[i] + upper[i] x[i+1] = right[i]; diagonally dominant, so that no
    pivoting is needed."""
    count = len(right)
    ratio, solution = np.empty(count), np.empty(count)
    previous_ratio = previous = 0.0
    for i in range(count):
        pivot = diagonal[i] - lower[i] * previous_ratio
        previous_ratio = ratio[i] = upper[i] / pivot
        previous = solution[i] = (right[i] - lower[i] * previous) / pivot
    for i in range(count - 2, -1, -1):
        solution[i] -= ratio[i] * solution[i + 1]
    return solution


@lru_cache(maxsize=4 * MOST_BITS)
def _on(table: LloydMax, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds and centroids in float32 on a device: copied there once, not per call."""
    return table.thresholds.to(device, torch.float32), table.centroids.to(device, torch.float32)


def quantize(unit: torch.Tensor, table: LloydMax) -> torch.Tensor:
    """Index of each value's cell: int32, same shape. unit: values of about unit variance, any floating-point dtype."""
    thresholds, _ = _on(table, unit.device)
    return torch.bucketize(unit.float().contiguous(), thresholds, out_int32=True)


def dequantize(index: torch.Tensor, table: LloydMax) -> torch.Tensor:
    """Centroid of each cell: float32, same shape. index: integers under 2^bits."""
    _, centroids = _on(table, index.device)
    return centroids[index]


def allot(
    scale_index: NDArray[np.integer] | torch.Tensor, total_bits: int, most: int = MOST_BITS
) -> NDArray[np.uint8]:
    """Bits for each coordinate by reverse water-filling: one at a time to where it takes most of the error away.

    scale_index: (K,) integers, round(64 * log2(scale)). total_bits: to hand out, per token. most: for one coordinate,
    at most 10. Returns (K,), which sums to min(total_bits, most * K). A bit beyond b is worth
    2 * scale_index + GAINS[b]; of equals the lower coordinate is served first. Integers only, so both ends get the
    same. Raises ValueError for a budget or a limit out of range.
    """
    if total_bits < 0 or not 0 <= most <= MOST_BITS:
        raise ValueError(f"cannot allot {total_bits} bits, at most {most} each (of {MOST_BITS})")
    scales = np.asarray(scale_index.cpu() if isinstance(scale_index, torch.Tensor) else scale_index, np.int64)
    # GAINS falls from bit to bit by more than nothing: a coordinate's bits stand in their order in the sorted list,
    # and its first entries are what the greedy choice hands out.
    worth = 2 * scales[:, None] + np.array(GAINS[:most], np.int64)
    chosen = np.argsort(-worth.ravel(), kind="stable")[:total_bits]
    return np.bincount(chosen // max(most, 1), minlength=len(scales)).astype(np.uint8)


def levels(x: torch.Tensor, rounding: torch.Tensor | float) -> torch.Tensor:
    """Uniform quantizer with a dead zone: int32 sign(x) * floor(|x| + rounding), same shape.

    x: in steps; what is under 1 - rounding gives 0. rounding: at most 0.5, a number or a tensor of x's shape; 0.5
    rounds to nearest, less widens the dead zone where an entropy coder saves more than the error costs. Levels end at
    +-2^24.
    """
    magnitude = x.float().abs().add_(rounding).floor_().clamp_(0, _LARGEST_LEVEL)
    return magnitude.copysign_(x).to(torch.int32)
