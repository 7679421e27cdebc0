"""What a peer sends over one boundary: with which codec and prior, at which rate, and what it measures on the way to
fit the next prior (DESIGN section 3). Synchronous; it runs in the device's thread."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

import torch

from meshd.config.runspec import WireSpec
from meshd.observe.log import event
from meshd.priors.boundary import BoundaryPrior
from meshd.priors.features import TokenFeatures
from meshd.priors.stats import BoundaryStats
from meshd.wire import CodecContext, Draft, RateLoop, codec_named
from meshd.wire.codec import Codec, Direction

log = logging.getLogger(__name__)

# One in so many frames is decoded by its sender, which then knows its error.
_CHECK_EVERY = 16
# Checks whose mean is an error; the first so many of a prior are what later ones are compared with.
_CHECKS = 8
# A prior is worn once its error is so many times what it was when it was new.
_WORN = 1.25
# Another's prior that is new is no good when its error is so many times that of the one before, or, where there was
# none, that of sending nothing.
_WORSE = 1.5
# Tokens under a prior for each one that was measured for it, at least: a measured token costs many times the bytes of
# others, and text whose error wanders would be measured all the time.
_LEAST_USE = 64


def needs_priors(wire: WireSpec) -> bool:
    """Whether any boundary of a run has a codec that needs a prior."""
    return any(_needs_prior(codecs.forward, codecs.backward) for codecs in (wire, *wire.boundary.values()))


def _needs_prior(*names: str) -> bool:
    return any(codec_named(name).needs_prior for name in names)


@dataclass
class Wear:
    """Tells when a prior has become less apt than it was: the sender's own error says so, not the prior's age. Pure."""

    _first: list[float] = field(default_factory=list)
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=_CHECKS))

    def worn(self, error: float) -> bool:
        """Count one frame's error in."""
        if len(self._first) < _CHECKS:
            self._first.append(error)
            return False
        self._last.append(error)
        return len(self._last) == _CHECKS and sum(self._last) > _WORN * sum(self._first)

    @property
    def tried(self) -> float | None:
        """Mean error of the first checks, once there are enough."""
        return sum(self._first) / _CHECKS if len(self._first) == _CHECKS else None


class Crossing:
    """One boundary, at one of its ends.

    Where a codec of the boundary needs a prior and there is none yet, or the receiver lacks it, both directions use
    the safe codec. While they do, the upper end measures what crosses; from that a prior is fitted (by the caller),
    and set here.
    """

    def __init__(self, boundary: int, wire: WireSpec, features: TokenFeatures | None, hidden: int) -> None:
        """features: on the device; None only in runs without priors."""
        codecs = wire.boundary.get(boundary, wire)
        self.boundary, self.features = boundary, features
        self.adapts = _needs_prior(codecs.forward, codecs.backward)
        self.error: float | None = None
        self._hidden, self._wanted = hidden, max(hidden, wire.prior_tokens)
        self._codecs: dict[Direction, Codec] = {
            "forward": codec_named(codecs.forward),
            "backward": codec_named(codecs.backward),
        }
        self._safe = codec_named(wire.safe)
        self._rates: dict[Direction, RateLoop] = {"forward": RateLoop(), "backward": RateLoop()}
        self._exact_adjoint = wire.exact_adjoint
        self._prior: BoundaryPrior | None = None
        self._stats: BoundaryStats | None = None
        self._measuring = self.adapts and features is not None
        self._frames = self._used = 0
        self._wear = Wear()
        self._usual: float | None = None  # error of the last prior that was tried
        self._on_trial = False
        self.worse = b""
        """Name of the last of others' priors that was given up because it was worse than what there was before."""

    @property
    def prior(self) -> BoundaryPrior | None:
        """What hidden states are encoded with; None: there is none, or it is worn."""
        return self._prior

    @property
    def on_trial(self) -> bool:
        """Whether frames are encoded with another's prior of which it is not known yet if it is any good."""
        return self._on_trial and self._prior is not None and self._used > 0

    def use(self, prior: BoundaryPrior, trial: bool = False) -> None:
        """Encode with `prior` from the next frame on. trial: another peer made it, and it may be no good."""
        if not self._on_trial:
            self._usual = self._wear.tried or self._usual
        self._used, self._wear, self._on_trial = 0, Wear(), trial
        self._measuring, self._stats = False, None
        self._prior = prior

    def measure(self) -> None:
        """Begin to measure for the next prior; until there is one, the safe codec is used."""
        self._measuring = self.adapts and self.features is not None
        self._prior = None

    def draft(self, tensor: torch.Tensor, context: CodecContext) -> Draft:
        """Device half of encoding. The context's prior decides: without one, the safe codec where a codec needs one."""
        codec = self._codec(context)
        return Draft(codec, codec.quantize(tensor, context, self._rates[context.direction]))

    def _codec(self, context: CodecContext) -> Codec:
        unprepared = self.adapts and context.prior is None
        return self._safe if unprepared else self._codecs[context.direction]

    def adjoint(self, gradient: torch.Tensor, context: CodecContext) -> torch.Tensor:
        """Gradient with respect to what was encoded with `context`, of one with respect to what was decoded."""
        return self._codec(context).adjoint(gradient, context) if self._exact_adjoint else gradient

    def check(self, draft: Draft, tensor: torch.Tensor, context: CodecContext) -> None:
        """At the upper end, for every frame: now and then measure its error, and give up a prior that is worn."""
        prior = context.prior
        if prior is None or prior is not self._prior:
            return
        self._frames += 1
        self._used += tensor[..., 0].numel()
        if self._frames % _CHECK_EVERY:
            return
        x = tensor.float()
        decoded = draft.codec.dequantize(draft.quantized, context, tensor.device).float()
        # By token: a few with huge norms would otherwise be all that is seen.
        error = (decoded - x).square().sum(-1) / x.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
        self.error = float(error.mean())
        worn = self._wear.worn(self.error)
        if self._on_trial and (tried := self._wear.tried) is not None:
            self._on_trial = False
            if tried >= (1.0 if self._usual is None else _WORSE * self._usual):
                event(log, "prior_worse", boundary=self.boundary, now=round(tried, 4), before=self._usual)
                self.worse, self._wear = prior.name, Wear()
                self.measure()
                return
        if worn and self._used >= _LEAST_USE * prior.tokens:
            event(log, "prior_worn", boundary=self.boundary, now=round(self.error, 4), tokens=self._used)
            self.measure()

    def learn(self, hidden: torch.Tensor, gradient: torch.Tensor, ids: torch.Tensor) -> BoundaryStats | None:
        """At the upper end, for what crossed with the safe codec: count it in. Returns, once, all that was measured
        when it is enough for a prior; the caller goes on with `use`, or with `measure` when no prior came of it."""
        if not self._measuring:
            return None
        if self._stats is None:
            assert self.features is not None
            self._stats = BoundaryStats(self.features, self._hidden, seed=self.boundary)
        self._stats.add(hidden, gradient, ids)
        if self._stats.tokens < self._wanted:
            return None
        stats, self._stats = self._stats, None
        self._measuring = False
        return stats
