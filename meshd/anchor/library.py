"""The weight priors that a stage has, by anchor, and the one that is made of them (DESIGN sections 4 and 5). Pure:
steps and time come in as arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from meshd.config.runspec import AnchorSpec
from meshd.optim.corrector import Corrector, Gain, fade
from meshd.priors.weight import WeightPrior, merged
from meshd.proto import meshd_pb2 as pb

# Before a prior among others reaches a bound it is left out of the merged one: a step must find one within bounds.
_EARLY_STEPS, _EARLY_S = 2, 30.0
_EARLY_SHARE = 0.1


@dataclass(frozen=True, eq=False)
class Held:
    """One anchor's priors of the stage's weights. version, time: of the weights that they were measured at, in inner
    steps, and when, in seconds since the epoch; neither is later than when they came. tokens: measured on."""

    author: str
    version: int
    time: float
    tokens: int
    priors: Mapping[str, WeightPrior]

    @classmethod
    def of(cls, notice: pb.Notice, priors: Mapping[str, WeightPrior], version: int, now: float) -> Held:
        """version, now: of this peer. What an author says of the future would keep its priors in use for longer."""
        return cls(
            notice.author,
            min(notice.weight_version, version),
            min(notice.time, now),
            notice.tokens,
            priors,
        )


@dataclass(frozen=True, eq=False)
class Correction:
    """What an inner step corrects with; immutable, swapped whole.

    priors: by weight, on the stage's device. of: what it was merged from. version, time: their means, by weight.
    """

    priors: Mapping[str, WeightPrior]
    of: tuple[Held, ...]
    version: float
    time: float

    def fade(self, spec: AnchorSpec, version: int, now: float) -> float:
        """How much of it counts at this step and time; 0 once any of what it is of is past a bound."""
        if not all(fresh(held, spec, version, now) for held in self.of):
            return 0.0
        age = max(0.0, version - self.version)
        return fade(age, 0.0, spec.max_staleness_steps, spec.max_staleness_s, spec.half_life_steps)


@dataclass(frozen=True)
class Corrected:
    """What a step's correction did. weights: how many were corrected; the means are over them."""

    weights: int
    effective_rank: float
    cosine: float
    age_steps: float
    age_s: float


class Corrections:
    """The means of a step's gains, on their way: `correct` is for `InnerOptimizer.step`."""

    def __init__(self, corrector: Corrector, correction: Correction, strength: float) -> None:
        """strength: `Correction.fade`."""
        self._corrector, self._correction, self._strength = corrector, correction, strength
        self._gains: list[Gain] = []

    def correct(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        prior = self._correction.priors.get(name)
        if prior is None:
            return gradient
        out, gain = self._corrector(name, gradient, prior, self._strength)
        self._gains.append(gain)
        return out

    def report(self, version: int, now: float) -> Corrected:
        """version, now: of the step."""
        gains = [gain for gain in self._gains if gain.finite]
        count = max(1, len(gains))
        return Corrected(
            len(gains),
            math.fsum(gain.effective_rank for gain in gains) / count,
            math.fsum(gain.cosine for gain in gains) / count,
            max(0.0, version - self._correction.version),
            max(0.0, now - self._correction.time),
        )


def fresh(held: Held, spec: AnchorSpec, version: int, now: float) -> bool:
    """Whether priors are within both bounds of staleness."""
    return version - held.version <= spec.max_staleness_steps and now - held.time <= spec.max_staleness_s


def chosen(library: Sequence[Held], spec: AnchorSpec, version: int, now: float) -> tuple[Held, ...]:
    """Which to merge, by author: those within their bounds, and soon still; when there are no such, those that are
    within them now."""
    steps = min(_EARLY_STEPS, int(_EARLY_SHARE * spec.max_staleness_steps))
    seconds = min(_EARLY_S, _EARLY_SHARE * spec.max_staleness_s)
    lasting = [held for held in library if fresh(held, spec, version + steps, now + seconds)]
    found = lasting or [held for held in library if fresh(held, spec, version, now)]
    return tuple(sorted(found, key=lambda held: held.author))


def merge(of: tuple[Held, ...], spec: AnchorSpec, version: int, device: torch.device) -> Correction:
    """One correction of several anchors' priors, weighted by tokens x 2^(-age / half_life). Not empty.

    The weights' ratios stay as ages grow, so that it is made once for each that comes or goes. Some 10 ms a weight: in
    a thread, beside the device's.
    """
    # Of the youngest 1: over a long half of a run the powers would all be 0.
    ages = [max(0, version - held.version) for held in of]
    shares = [
        held.tokens * 2.0 ** (-(age - min(ages)) / spec.half_life_steps)
        for held, age in zip(of, ages, strict=True)
    ]
    total = math.fsum(shares)
    priors = {
        name: _on(
            merged([(held.priors[name], share) for held, share in zip(of, shares, strict=True)]), device
        )
        for name in of[0].priors
    }
    return Correction(
        priors,
        of,
        math.fsum(held.version * share for held, share in zip(of, shares, strict=True)) / total,
        math.fsum(held.time * share for held, share in zip(of, shares, strict=True)) / total,
    )


def _on(prior: WeightPrior, device: torch.device) -> WeightPrior:
    return WeightPrior(
        prior.u.to(device),
        prior.s.to(device),
        prior.v.to(device),
        prior.power.to(device),
        prior.rest,
        prior.norm,
        prior.mean_norm,
        prior.agreement,
    )
