"""What both ends expect of a tensor before it crosses: its prediction, and which of its tokens are no usual ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshd.errors import MismatchError
from meshd.wire.codec import CodecContext
from meshd.wire.spec import Predictor

if TYPE_CHECKING:
    from meshd.priors.boundary import BoundaryPrior

# One token in so many may be marked an outlier, which costs eight times as much as others or more.
_TOKENS_PER_OUTLIER = 32


def prior_of(context: CodecContext) -> BoundaryPrior:
    """Raises MismatchError when there is none."""
    if context.prior is None:
        raise MismatchError(f"boundary {context.boundary} has no prior yet")
    return context.prior


def most_outliers(tokens: int) -> int:
    """How many of so many tokens may be marked."""
    return max(1, tokens // _TOKENS_PER_OUTLIER)


def outliers(x: Tensor, context: CodecContext) -> Tensor:
    """(N,) bool, of x (N, hidden): those to be marked. On the way back those of the way there."""
    if context.direction == "backward":
        if context.outliers is None:
            return torch.zeros(len(x), dtype=torch.bool, device=x.device)
        return context.outliers.to(x.device)
    norm = x.square().sum(1).sqrt()
    far = norm > prior_of(context).outlier_norm
    if int(far.sum()) > most_outliers(len(x)):
        farthest = norm.topk(most_outliers(len(x))).indices
        far = torch.zeros_like(far).index_fill_(0, farthest, True)
    return far


def value(context: CodecContext, predictor: Predictor, outlier: Tensor) -> Tensor:
    """(N, hidden), or a 0 that broadcasts to it. outlier: (N,) bool, the marks."""
    prior, device = prior_of(context).on(outlier.device), outlier.device
    if context.direction == "backward" or predictor == "none":
        return torch.zeros((), device=device)
    usual = prior.mean if predictor == "mean" else _from_tokens(prior, context)
    return torch.where(outlier[:, None], prior.outlier_mean, usual)


def _from_tokens(prior: BoundaryPrior, context: CodecContext) -> Tensor:
    """(N, hidden): what the prior predicts from the token ids."""
    if context.features is None:
        raise MismatchError("the run's token features are not here")
    features = context.features.features(context.ids.reshape(-1))
    predictor = prior.on(features.device).predictor.float()
    return features @ predictor[:-1] + predictor[-1]
