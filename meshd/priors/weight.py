"""What anchors know of the clean gradient of one weight, and how they measure it (DESIGN sections 4 and 5)."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from meshd.errors import DataError, MismatchError

BETA = 0.95
"""Share of a running mean that stays when a gradient comes (DESIGN section 5)."""
RECENT = 4

# Halko, Martinsson, Tropp 2011, "Finding structure with randomness": random directions beyond the rank that is wanted,
# and power iterations, which a spectrum that falls as slowly as a gradient's needs.
_OVERSAMPLE = 8
_POWER_ITERATIONS = 2


class Triplets(NamedTuple):
    """A matrix (m, n) as U diag(s) V^T: u (m, r) and v (n, r) with orthonormal columns, s (r,) falling and >= 0."""

    u: torch.Tensor
    s: torch.Tensor
    v: torch.Tensor

    def matrix(self) -> torch.Tensor:
        """(m, n), in full."""
        return (self.u * self.s) @ self.v.T

    def norm(self) -> float:
        """Frobenius norm of the matrix, right for factors that are not orthonormal too, as a liar's may be."""
        u, v = self.u.double() * self.s.double(), self.v.double()
        return math.sqrt(max(0.0, float(((u.T @ u) * (v.T @ v)).sum())))


@dataclass(frozen=True, eq=False)
class WeightPrior:
    """What anchors know of the clean gradient of one weight (m, n). Tensors are float32.

    u (m, r), s (r,), v (n, r): leading singular triplets of M, the running mean of clean gradients. power (r, r): mean
    share of a clean gradient's energy in entry (i, j) of U^T G V, and `rest`, the mean share outside of them: together
    1, up to rounding. (DESIGN has the eigenvectors of rows and columns here: square matrices of the weight's two sides.
    This is r x r, in a basis that crosses anyway.) norm: root mean square Frobenius norm of single clean gradients.
    mean_norm: that of M in full rank; s may be cut. agreement: mean cosine of successive clean gradients, 0 where fewer
    than two were seen. bias: of the running mean of clean minus masked gradients of the same batches; None: not
    measured. Where all clean gradients were zero, norm is 0, power 0 and rest 1.
    """

    u: torch.Tensor
    s: torch.Tensor
    v: torch.Tensor
    power: torch.Tensor
    rest: float
    norm: float
    mean_norm: float
    agreement: float
    bias: Triplets | None = None

    @property
    def shape(self) -> torch.Size:
        """(m, n), of the weight."""
        return torch.Size((len(self.u), len(self.v)))

    @property
    def triplets(self) -> Triplets:
        return Triplets(self.u, self.s, self.v)

    def mean(self) -> torch.Tensor:
        """M (m, n) as far as its triplets hold it, made anew."""
        return self.triplets.matrix()


class WeightStats:
    """Statistics of the clean gradients of one weight, on the anchor; those of several anchors merge.

    Running means are kept as sums S <- beta S + (1 - beta) G with their weight w <- beta w + (1 - beta), and S / w is
    the mean: unbiased from the first gradient on, and sums and weights of several anchors simply add.

    Power is measured in a basis that is known only when a prior is made, so the last `recent` clean gradients are kept
    and projected then. They are what the cosine of successive ones takes, too. Memory per entry of the weight: 4 bytes
    of running mean, 2 per recent gradient, and 4 more once masked gradients come; 12 or 16 with 4 recent ones.

    `count` gradients were counted, `skipped` refused because a value was not finite. Not thread-safe.
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        device: torch.device | None = None,
        beta: float = BETA,
        recent: int = RECENT,
    ) -> None:
        """shape: (m, n), of the weight. device: None: the CPU. recent: over how many gradients power is a mean."""
        self.shape = torch.Size(shape)
        self.count = self.skipped = 0
        self._beta = beta
        self._sum = torch.zeros(self.shape, device=device)
        self._weight = self._energy = 0.0
        self._cosine = self._cosine_weight = 0.0
        self._bias: torch.Tensor | None = None
        self._bias_weight = 0.0
        # Divided by their norms; oldest first. Rounding to bf16 moves a share of energy by about a millionth.
        self._recent: deque[torch.Tensor] = deque(maxlen=recent)

    def add(self, clean: torch.Tensor, masked: torch.Tensor | None = None) -> None:
        """Count a clean gradient in. clean: (m, n) floating, mean over tokens; masked: that of the same batch at the
        same weights through the codecs, in the same unit."""
        for gradient in (clean, masked):
            if gradient is not None and gradient.shape != self.shape:
                raise ValueError(
                    f"a gradient of shape {list(gradient.shape)} of a weight of {list(self.shape)}"
                )
        clean = clean.detach().to(self._sum.device, torch.float32)
        difference = None if masked is None else clean - masked.detach().to(clean.device, torch.float32)
        if not all(bool(torch.isfinite(x).all()) for x in (clean, difference) if x is not None):
            self.skipped += 1
            return
        new = 1 - self._beta
        norm = _norm(clean)
        self._sum.mul_(self._beta).add_(clean, alpha=new)
        self._weight = self._beta * self._weight + new
        self._energy = self._beta * self._energy + new * norm**2
        if difference is not None:
            if self._bias is None:
                self._bias = torch.zeros_like(self._sum)
            self._bias.mul_(self._beta).add_(difference, alpha=new)
            self._bias_weight = self._beta * self._bias_weight + new
        if norm > 0:
            self._remember(clean / norm)
        self.count += 1

    def _remember(self, unit: torch.Tensor) -> None:
        """unit: (m, n), of norm 1. A gradient that is zero has no direction to compare or to share energy among."""
        if self._recent:
            new = 1 - self._beta
            cosine = float((self._recent[-1].float() * unit).sum(dtype=torch.float64))
            self._cosine = self._beta * self._cosine + new * cosine
            self._cosine_weight = self._beta * self._cosine_weight + new
        self._recent.append(unit.to(torch.bfloat16))

    def merge(self, other: WeightStats) -> None:
        """Count in what another anchor has counted at the same time.

        Means are exactly the weighted ones of both. Of recent gradients the newest of each stay, taken in turns, as
        many as this one keeps. Raises MismatchError for statistics of a weight of another shape.
        """
        if other.shape != self.shape:
            raise MismatchError(
                f"statistics of a weight of {list(other.shape)} do not merge into those of {list(self.shape)}"
            )
        device = self._sum.device
        self._sum.add_(other._sum.to(device))
        if other._bias is not None:
            theirs = other._bias.to(device)
            self._bias = theirs.clone() if self._bias is None else self._bias.add_(theirs)
        for name in ("count", "skipped", "_weight", "_energy", "_cosine", "_cosine_weight", "_bias_weight"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        # Newest last, and ours the very last: the next gradient is compared to the one before it on this anchor.
        ranked = [
            (-age, ours, unit)
            for ours, units in ((False, other._recent), (True, self._recent))
            for age, unit in enumerate(reversed(units))
        ]
        ranked.sort(key=lambda item: item[:2])
        self._recent = deque((unit.to(device) for _, _, unit in ranked), maxlen=self._recent.maxlen)

    def prior(self, rank: int, generator: torch.Generator) -> WeightPrior:
        """The prior of the gradients seen so far, of rank min(rank, m, n), on the statistics' device.

        generator: for the randomised SVD; unused where the thin one is as cheap. Raises DataError before any gradient.
        """
        if not self.count:
            raise DataError(
                f"a weight of {list(self.shape)}: no clean gradient was measured ({self.skipped} that are not finite "
                "left out), a prior takes 1"
            )
        mean = self._sum / self._weight
        u, s, v = leading(mean, rank, generator)
        power = torch.zeros((len(s), len(s)), dtype=torch.float64, device=mean.device)
        for unit in self._recent:
            power += (u.T @ unit.float() @ v).double().square() / len(self._recent)
        return WeightPrior(
            u,
            s,
            v,
            power.float(),
            max(0.0, 1.0 - float(power.sum())),
            math.sqrt(self._energy / self._weight),
            _norm(mean),
            _cosine(self._cosine, self._cosine_weight),
            None if self._bias is None else leading(self._bias / self._bias_weight, rank, generator),
        )


def leading(matrix: torch.Tensor, rank: int, generator: torch.Generator) -> Triplets:
    """The `rank` largest singular triplets of a finite matrix (m, n) float32, or all min(m, n) where that is fewer.

    By the randomised SVD where it is cheaper (Halko, Martinsson, Tropp 2011). torch.svd_lowrank is the same, but draws
    from the global generator.
    """
    if rank < 1:
        raise ValueError(f"{rank} singular triplets")
    # Powers of very large and very small gradients would leave float32.
    scale = float(matrix.abs().max())
    matrix = matrix / scale if scale > 0 else matrix
    left = None
    if rank + _OVERSAMPLE < min(matrix.shape):
        draw = torch.randn(
            matrix.shape[1], rank + _OVERSAMPLE, generator=generator, device=generator.device
        ).to(matrix.device)
        left = torch.linalg.qr(matrix @ draw).Q
        for _ in range(_POWER_ITERATIONS):
            right = torch.linalg.qr(matrix.T @ left).Q
            left = torch.linalg.qr(matrix @ right).Q
        matrix = left.T @ matrix
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    u = u if left is None else left @ u
    return Triplets(u[:, :rank].contiguous(), s[:rank] * scale, vt[:rank].T.contiguous())


def merged(priors: Sequence[tuple[WeightPrior, float]]) -> WeightPrior:
    """One prior of those of several anchors, each with its weight: tokens x 2^(-age / half_life) (DESIGN section 4).

    Weights are >= 0, one at least is more; priors are finite, of one shape, on one device. A mean (or bias, or norm)
    larger than the median is scaled down to it, so that a liar of several moves the result by no more than its share of
    what the others say; of two, the smaller counts as the median. Nothing is cut: the rank is the sum of all, up to
    min(m, n). Power is carried over to the new basis as if what entries hold had random signs.
    """
    given = [(prior, weight) for prior, weight in priors if weight > 0]
    if not given or len({prior.shape for prior, _ in given}) > 1:
        raise ValueError(f"{len(given)} priors with a weight, of {[list(p.shape) for p, _ in given]}")
    if len(given) == 1:
        return given[0][0]
    total = math.fsum(weight for _, weight in given)
    shares = [weight / total for _, weight in given]
    only = [prior for prior, _ in given]
    held = [prior.triplets.norm() for prior in only]
    # What is declared and what is sent are both bounded.
    sizes = [max(prior.mean_norm, norm) for prior, norm in zip(only, held, strict=True)]
    factors = [share * clip for share, clip in zip(shares, _clips(sizes), strict=True)]
    mean = summed([(prior.triplets, factor) for prior, factor in zip(only, factors, strict=True)])
    # What lies outside of the triplets of each, taken as unrelated.
    outside = math.fsum(
        f**2 * (size**2 - norm**2) for f, size, norm in zip(factors, sizes, held, strict=True)
    )
    power = torch.zeros((len(mean.s), len(mean.s)), dtype=torch.float64, device=mean.s.device)
    for prior, share in zip(only, shares, strict=True):
        left, right = ((new.T @ old).square() for new, old in ((mean.u, prior.u), (mean.v, prior.v)))
        power += share * (left @ prior.power @ right.T).double()
    norms = [prior.norm for prior in only]
    energy = math.fsum(s * (n * c) ** 2 for s, n, c in zip(shares, norms, _clips(norms), strict=True))
    return WeightPrior(
        *mean,
        power.float(),
        max(0.0, 1.0 - float(power.sum())),
        math.sqrt(energy),
        math.hypot(mean.norm(), math.sqrt(max(0.0, outside))),
        math.fsum(prior.agreement * share for prior, share in zip(only, shares, strict=True)),
        _merged_bias([(p.bias, share) for p, share in zip(only, shares, strict=True) if p.bias is not None]),
    )


def _merged_bias(parts: Sequence[tuple[Triplets, float]]) -> Triplets | None:
    """Of the anchors that measured one, by their shares among themselves."""
    if not parts:
        return None
    total = math.fsum(share for _, share in parts)
    clips = _clips([bias.norm() for bias, _ in parts])
    return summed([(bias, share / total * clip) for (bias, share), clip in zip(parts, clips, strict=True)])


def _clips(norms: Sequence[float]) -> list[float]:
    """By how much each is scaled down so that none is over the median; of an even number, the lower one."""
    median = statistics.median_low(norms)
    return [median / norm if norm > median else 1.0 for norm in norms]


def summed(parts: Sequence[tuple[Triplets, float]]) -> Triplets:
    """Of the sum of matrices times factors, whose sides need not be orthonormal: QR of the stacked sides, SVD of the
    small core."""
    left, left_core = torch.linalg.qr(torch.cat([item.u * (item.s * factor) for item, factor in parts], 1))
    right, right_core = torch.linalg.qr(torch.cat([item.v for item, _ in parts], 1))
    u, s, vt = torch.linalg.svd(left_core @ right_core.T, full_matrices=False)
    return Triplets(left @ u, s, right @ vt.T)


def _norm(matrix: torch.Tensor) -> float:
    """Frobenius norm. In float64: the squares of what is finite are finite."""
    return float(torch.linalg.vector_norm(matrix, dtype=torch.float64))


def _cosine(total: float, weight: float) -> float:
    return max(-1.0, min(1.0, total / weight)) if weight > 0 else 0.0
