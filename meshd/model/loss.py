"""The training loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Logits are lifted to fp32 at most so many at a time (64 MiB): a full fp32 copy of (B, T, V) would outweigh a layer's
# activations several times over.
_CHUNK_VALUES = 1 << 24


def token_loss(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Summed cross entropy of the label tokens, in nats, fp32, differentiable in the logits (once).

    logits: (B, T, V) float. labels: (B, T) int64, ids of the next tokens; values where the mask is false are not
    looked at. mask: (B, T) bool. Returns a scalar; 0 when the mask is empty. Divide by `mask.sum()` for the mean.
    """
    flat = mask.reshape(-1)
    safe = torch.where(flat, labels.reshape(-1), 0)
    rows = logits.reshape(-1, logits.shape[-1])
    loss: Tensor = _SummedCrossEntropy.apply(rows, safe, flat)  # type: ignore[no-untyped-call]
    return loss


class _SummedCrossEntropy(torch.autograd.Function):
    """Keeps the logits and each token's log-sum-exp only; the gradient is made chunk by chunk in their dtype."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        lse = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        for part in _chunks(logits):
            values = logits[part].float()
            lse[part] = values.logsumexp(dim=-1)
            picked = values.gather(1, labels[part, None])[:, 0]
            total += torch.where(mask[part], lse[part] - picked, 0.0).sum()
        ctx.save_for_backward(logits, labels, mask, lse)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        logits, labels, mask, lse = ctx.saved_tensors
        out = torch.empty_like(logits)
        for part in _chunks(logits):
            weight = torch.where(mask[part], grad.float(), 0.0)[:, None]
            values = logits[part].float().sub_(lse[part, None]).exp_().mul_(weight)
            out[part] = values.scatter_add_(1, labels[part, None], -weight)
        return out, None, None


def _chunks(logits: Tensor) -> list[slice]:
    rows = max(1, _CHUNK_VALUES // logits.shape[-1])
    return [slice(first, first + rows) for first in range(0, len(logits), rows)]
