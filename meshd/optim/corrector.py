"""Correctors: what a stage makes of its masked gradients with the anchors' priors (DESIGN section 5).

A corrector is a rule, float32 arithmetic on one gradient, inside `Guarded`, which keeps what all of them promise. They
see the mean gradient over tokens, before Adam's moments; clipping comes after.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from meshd.errors import ConfigError
from meshd.naming import Number, number, split
from meshd.priors.weight import BETA, WeightPrior

if TYPE_CHECKING:
    from meshd.model.families import Family


@dataclass(frozen=True)
class Gain:
    """What a corrector did to one gradient.

    norm_in, norm_out: Frobenius norms. cosine: of the gradient as it came to what left; clean: of the gradient as it
    came to the prior's mean; 0 where one of the two is zero. effective_rank: of the gain spectrum (filter: the gains
    d; wiener: those of the pairs u_i v_i^T; inject: what is added; signed: the mean; bias: the bias), 0 where nothing
    was applied. finite: False: something was not finite, or its norm was not, and the gradient was left as it came.
    """

    norm_in: float
    norm_out: float
    cosine: float
    clean: float
    effective_rank: float
    finite: bool


class Corrector(Protocol):
    def __call__(
        self, name: str, gradient: torch.Tensor, prior: WeightPrior, fade: float
    ) -> tuple[torch.Tensor, Gain]:
        """The corrected gradient, of the dtype, shape and device of `gradient`, and what was done to it.

        name: of the weight, in the whole model. gradient: (m, n) bf16 or fp32, mean over tokens, on the prior's device.
        It is never modified; where there is nothing to do, it is itself what comes back. fade: how much of the
        correction the prior's age leaves (`fade`), 1 fresh, 0 none. A finite gradient stays finite.
        """
        ...


class Seen(NamedTuple):
    """A finite gradient (m, n) float32, its core U^T G V (r, r) in the prior's basis, and its Frobenius norm."""

    gradient: torch.Tensor
    core: torch.Tensor
    norm: float


class Rule(Protocol):
    def __call__(
        self, name: str, seen: Seen, prior: WeightPrior, fade: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The corrected gradient (m, n) float32, and the gain spectrum: >= 0, empty where nothing was applied.

        The prior's u, s and v are finite; fade is over 0. The gradient is not modified.
        """
        ...


@dataclass(frozen=True)
class Guarded:
    """A rule as a Corrector: without effect on a stale prior, on what is not finite, and on the gradient's dtype."""

    rule: Rule

    def __call__(
        self, name: str, gradient: torch.Tensor, prior: WeightPrior, fade: float
    ) -> tuple[torch.Tensor, Gain]:
        if gradient.shape != prior.shape or not 0.0 <= fade <= 1.0:
            raise ValueError(
                f"{name}: gradient {list(gradient.shape)}, prior {list(prior.shape)}, fade {fade}"
            )
        g = gradient.detach().float()
        core = (prior.u.T @ g) @ prior.v
        # Each reading waits for the device, so they are read together. Whatever is not finite in u, s or v shows in the
        # product of the core's diagonal and s.
        norm, along, size = torch.stack([_size(g), core.diagonal() @ prior.s, _size(prior.s)]).tolist()
        clean = _cosine(along, norm, size)
        if not (math.isfinite(norm) and math.isfinite(along)):
            return gradient, Gain(norm, norm, 0.0, clean, 0.0, False)
        if fade == 0.0:
            return gradient, Gain(norm, norm, float(norm > 0), clean, 0.0, True)
        result, spectrum = self.rule(name, Seen(g, core, norm), prior, fade)
        result = result.to(gradient.dtype)
        after = result.float()
        norm_out, dot, rank = torch.stack(
            [_size(after), (g * after).sum(), effective_rank(spectrum).to(g.device)]
        ).tolist()
        if not math.isfinite(norm_out):
            return gradient, Gain(norm, norm, float(norm > 0), clean, 0.0, False)
        return result, Gain(norm, norm_out, _cosine(dot, norm, norm_out), clean, rank, True)


@dataclass(frozen=True)
class Filter:
    """The paper's: alpha G + (1 - alpha) U [(U^T G V) * (d d^T)] V^T, d_i = s_i / (s_i + tau).

    The clean gradient gives geometry only. It does not fade. relative: tau is that share of s_1, for tau itself is tied
    to the gradient's scale.
    """

    alpha: float = 0.3
    tau: float = 1e-3
    relative: float | None = None

    def __call__(
        self, name: str, seen: Seen, prior: WeightPrior, fade: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        s = prior.s
        tau = self.tau if self.relative is None else self.relative * s[0]
        d = torch.where(s == 0, 0.0, s / (s + tau))  # all zero: a relative tau is, too
        core = (1 - self.alpha) * seen.core * torch.outer(d, d)
        return torch.addmm(seen.gradient, prior.u @ core, prior.v.T, beta=self.alpha), d


@dataclass(frozen=True)
class Inject:
    """G + strength * fade * gate * |G| M / |M|: some of the clean gradient itself, bias and all.

    gate = agreement / reference, within 0 and 1: a mean of gradients that do not agree is noise. filter: what G goes
    through first, fading like the rest.
    """

    strength: float = 0.15
    reference: float = 0.1
    filter: Filter | None = None

    def __call__(
        self, name: str, seen: Seen, prior: WeightPrior, fade: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        base = seen.gradient
        if self.filter is not None:
            base = torch.lerp(base, self.filter(name, seen, prior, fade)[0], fade)
        gate = max(0.0, min(1.0, prior.agreement / self.reference))
        # Never more than strength * |G|, whatever a prior says of the norm that it was cut from.
        size = _size(prior.s).clamp_min(prior.mean_norm)
        scale = torch.where(size == 0, 0.0, self.strength * fade * gate * seen.norm / size)
        return torch.addmm(base, prior.u * (prior.s * scale), prior.v.T), prior.s * scale


@dataclass
class _Observed:
    """Running means, as sums with their weight, of one weight's observed gradients in one prior's basis: shares of
    energy (r, r) float32. The prior is not kept alive for it."""

    prior: weakref.ref[WeightPrior]
    shares: torch.Tensor
    weight: float = 0.0


@dataclass(frozen=True, eq=False)
class Wiener:
    """(1 - fade) G + fade W(G): what observed gradients have more of than clean ones is noise, and is taken out.

    W multiplies entry (i, j) of U^T G V by P_ij / max(P_ij, Y_ij), and what lies outside of the basis by the same of
    `rest`. P: the prior's shares of energy; Y: the running mean of the observed gradients' (beta .95), the present one
    included, which starts anew with each prior, for its basis is another.

    keep_norm: the result is scaled to |G|. W only takes out, and how much changes from weight to weight and with every
    prior. Adam does not see a scale that stays, but does see one that jumps, and clipping goes by the norm of all
    weights together, which would let those that W leaves alone have more of the step.
    """

    keep_norm: bool = True
    _observed: dict[str, _Observed] = field(default_factory=dict, repr=False)

    def __call__(
        self, name: str, seen: Seen, prior: WeightPrior, fade: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        g = seen.gradient
        if seen.norm == 0.0 or prior.norm == 0.0:  # shares of nothing
            return g, prior.s[:0]
        shares = self._shares(name, seen, prior)
        inside = prior.power / torch.maximum(prior.power, shares).clamp_min(torch.finfo(torch.float32).tiny)
        rest = prior.rest / max(prior.rest, 1.0 - float(shares.sum()), torch.finfo(torch.float32).tiny)
        result = torch.addmm(g, prior.u @ ((inside - rest) * seen.core), prior.v.T, beta=rest)
        result = torch.lerp(g, result, fade)
        if self.keep_norm:
            size = _size(result)
            result = result * torch.where(size == 0, 1.0, seen.norm / size)
        return result, inside.diagonal()

    def _shares(self, name: str, seen: Seen, prior: WeightPrior) -> torch.Tensor:
        """Y (r, r), after the present gradient."""
        observed = self._observed.get(name)
        if observed is None or observed.prior() is not prior:
            observed = _Observed(weakref.ref(prior), torch.zeros_like(prior.power))
            self._observed[name] = observed
        observed.shares.mul_(BETA).add_((seen.core / seen.norm).square(), alpha=1 - BETA)
        observed.weight = BETA * observed.weight + (1 - BETA)
        return observed.shares / observed.weight


@dataclass(frozen=True)
class Signed:
    """(1 - a) G + a |G| sign(M), entry by entry, a = fade (1 - alpha): sizes from here, directions from the anchors."""

    alpha: float = 0.3

    def __call__(
        self, name: str, seen: Seen, prior: WeightPrior, fade: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        g = seen.gradient
        return torch.lerp(g, g.abs() * prior.mean().sign(), fade * (1 - self.alpha)), prior.s


@dataclass(frozen=True)
class Bias:
    """G + fade B, B the mean difference of clean and masked gradients: the only one that removes bias as such."""

    def __call__(
        self, name: str, seen: Seen, prior: WeightPrior, fade: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if prior.bias is None:
            return seen.gradient, prior.s[:0]
        u, s, v = prior.bias
        return torch.addmm(seen.gradient, u * (s * fade), v.T), s


def effective_rank(spectrum: torch.Tensor) -> torch.Tensor:
    """exp(entropy) of a spectrum (r,) >= 0 divided by its sum (Roy and Vetterli 2007): 0-d, between 1 and r; 0 for one
    that is empty or zero."""
    total = spectrum.sum()
    entropy: torch.Tensor = torch.special.entr(spectrum / total).sum()
    return torch.where(total > 0, entropy.exp(), 0.0)


def fade(age_steps: float, age_s: float, max_steps: float, max_s: float, half_life_steps: float) -> float:
    """How much of a correction the prior's age leaves: 0 past either bound, else 2^(-age_steps / half_life_steps).

    A negative age, of a clock or a step that is behind the anchor's, counts as 0. half_life_steps: over 0.
    """
    if age_steps > max_steps or age_s > max_s:
        return 0.0
    return float(2.0 ** (-max(0.0, age_steps) / half_life_steps))


def decoder_matrix(name: str, shape: Sequence[int], family: Family) -> bool:
    """Whether a weight of the whole model is corrected: a matrix of a decoder layer. Norms, biases, embeddings and the
    head are left alone."""
    prefix = f"{family.body}.{family.layers}."
    index, _, rest = name.removeprefix(prefix).partition(".")
    return name.startswith(prefix) and index.isdigit() and rest.endswith(".weight") and len(shape) == 2


_SHARE = Number(0.0, 1.0)
_SWITCH = Number(0.0, 1.0, whole=True)
_FILTER = {"alpha": _SHARE, "tau": Number(0.0, 1e6, over=True), "relative": Number(0.0, 1e6, over=True)}
_INJECT = {"lambda": Number(0.0, 100.0), "reference": Number(0.0, 1.0, over=True), "filter": _SWITCH}
_KEYS: dict[str, dict[str, Number]] = {
    "none": {},
    "filter": _FILTER,
    "inject": {**_INJECT, **_FILTER},
    "wiener": {"keep_norm": _SWITCH},
    "signed": {"alpha": _SHARE},
    "bias": {},
}


def corrector_named(text: str, where: str = "corrector") -> Corrector | None:
    """A new corrector, `none` or NAME:key=value,...; None for `none`.

    Names and their keys: `filter`: alpha, and tau or relative; `inject`: lambda, reference, filter=1 and then those of
    filter; `wiener`: keep_norm; `signed`: alpha; `bias`. Raises ConfigError; `where` says in which field it was given.
    """
    name, options = split(text, where, _KEYS, "corrector")
    allowed = _KEYS[name]
    for key in options:
        if key not in allowed:
            keys = f"one of {', '.join(allowed)}" if allowed else "it has none"
            raise ConfigError(where, text, f"{name} has no key {key!r}", keys)
    values = {key: number(key, value, allowed[key], text, where) for key, value in options.items()}
    if "tau" in values and "relative" in values:
        raise ConfigError(where, text, "tau and relative are two ways to say one thing", "leave one out")
    if name == "none":
        return None
    return Guarded(_rule(name, values, text, where))


def _rule(name: str, values: dict[str, float], text: str, where: str) -> Rule:
    if name == "filter":
        return Filter(**values)
    if name == "wiener":
        return Wiener(keep_norm=bool(values.get("keep_norm", 1)))
    if name == "signed":
        return Signed(**values)
    if name == "bias":
        return Bias()
    filtering = {key: value for key, value in values.items() if key in _FILTER}
    if filtering and not values.get("filter"):
        raise ConfigError(
            where, text, f"{', '.join(filtering)} without filter=1", "add filter=1, or leave it out"
        )
    inner = Filter(**filtering) if values.get("filter") else None
    default = Inject()
    return Inject(values.get("lambda", default.strength), values.get("reference", default.reference), inner)


def _size(x: torch.Tensor) -> torch.Tensor:
    """Frobenius norm, 0-d."""
    norm: torch.Tensor = torch.linalg.vector_norm(x)
    return norm


def _cosine(dot: float, one: float, other: float) -> float:
    """From a product and two norms; 0 where there is none."""
    size = one * other
    if not (size > 0 and math.isfinite(size) and math.isfinite(dot)):
        return 0.0
    return max(-1.0, min(1.0, dot / size))
