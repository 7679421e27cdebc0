"""Whether a new codec prior is worth its bytes: what has changed little is not sent again (DESIGN section 4)."""

from __future__ import annotations

import torch

from meshd.priors.boundary import BoundaryPrior
from meshd.priors.features import TokenFeatures
from meshd.priors.stats import Samples
from meshd.wire import CodecContext, RateLoop
from meshd.wire.codec import Codec, Direction

ENOUGH = 1.1
"""Times the error with the new prior that the error with the last one must be. Senders give one up at 1.25 times its
own first error."""

# Times that samples are encoded until the rate has settled at its budget: errors at unequal rates say little.
_SETTLE = 4

Codecs = tuple[Codec, Codec]
"""Forward, backward."""


def coding_error(
    prior: BoundaryPrior, codecs: Codecs, samples: Samples, features: TokenFeatures
) -> tuple[float, float]:
    """Mean over tokens of |decoded - x|^2 / |x|^2, forward and backward; 0 where a codec needs no prior. On the device
    of `features`."""
    tensors: tuple[tuple[Direction, torch.Tensor], ...] = (("forward", samples.h), ("backward", samples.g))
    found = [
        _error(prior, codec, tensor, samples.ids, direction, features) if codec.needs_prior else 0.0
        for codec, (direction, tensor) in zip(codecs, tensors, strict=True)
    ]
    return found[0], found[1]


def _error(
    prior: BoundaryPrior,
    codec: Codec,
    x: torch.Tensor,
    ids: torch.Tensor,
    direction: Direction,
    features: TokenFeatures,
) -> float:
    some = x.any(1)  # a token without a gradient has no relative error
    x, ids = x[some][None], ids[some][None]
    if not x.numel():
        return 0.0
    context, rate = CodecContext(prior.boundary, direction, ids, 0, prior, features), RateLoop()
    for _ in range(_SETTLE):
        quantized = codec.quantize(x, context, rate)
    decoded = codec.dequantize(quantized, context, x.device).float()
    return float(((decoded - x).square().sum(-1) / x.square().sum(-1)).mean())


def gain(
    old: BoundaryPrior, new: BoundaryPrior, codecs: Codecs, samples: Samples, features: TokenFeatures
) -> float:
    """Error with the old prior over that with the new one, of the direction that gains more."""
    before, after = (coding_error(prior, codecs, samples, features) for prior in (old, new))
    return max(b / a if a > 0 else 1.0 for b, a in zip(before, after, strict=True))
