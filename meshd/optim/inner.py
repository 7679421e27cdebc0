"""The inner optimizer of one stage: accumulate by tokens, skip what is not finite, clip, AdamW.

Gradients are accumulated as sums over label tokens and divided by their number at the step, so that a step is the
mean over its tokens, whatever the microbatches' sizes (DESIGN section 2.6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from meshd.config.runspec import OptimSpec
from meshd.errors import MismatchError

# What AdamW keeps of a parameter, all or nothing.
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


Correct = Callable[[str, torch.Tensor], torch.Tensor]
"""Takes a parameter's name and its mean gradient; returns, in the same shape, the gradient that AdamW sees."""


@dataclass(frozen=True)
class StepReport:
    """What an inner step did. norm: of the mean gradient, corrected, before clipping. skipped: nothing was changed,
    because the gradient was not finite."""

    tokens: int
    norm: float
    lr: float
    skipped: bool


class InnerOptimizer:
    """AdamW over a stage's trainable parameters, by their whole-model names."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], spec: OptimSpec) -> None:
        self._spec = spec
        self._parameters = dict(parameters)
        # Weight decay pulls matrices toward zero; on norms' gains and biases it only does harm.
        matrices = [p for p in self._parameters.values() if p.dim() >= 2]
        vectors = [p for p in self._parameters.values() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": spec.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=spec.lr,
            betas=spec.betas,
            eps=spec.eps,
            fused=True,
        )
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Label tokens accumulated since the last step."""
        return self._tokens

    def added(self, tokens: int) -> None:
        """A backward pass has added the sum over `tokens` label tokens to the parameters' gradients."""
        self._tokens += tokens

    def discard(self) -> int:
        """Throw the accumulated gradient away. Returns the tokens lost."""
        lost, self._tokens = self._tokens, 0
        self._adamw.zero_grad(set_to_none=False)
        return lost

    def step(self, lr: float, correct: Correct | None = None) -> StepReport:
        """One step on the mean of what was added; the accumulator is empty after. correct: what the clean gradients
        say of it comes first, then clipping (DESIGN section 5).

        Whatever AdamW raises (memory that ran out) leaves the accumulator spoilt: `discard` it.
        """
        tokens = self._tokens
        found = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        gradients = list(found.values())
        if tokens == 0 or not gradients:
            return StepReport(0, 0.0, lr, skipped=True)
        torch._foreach_mul_(gradients, 1.0 / tokens)
        if correct is not None:
            for name, gradient in found.items():
                gradient.copy_(correct(name, gradient))
        norm = torch.nn.utils.get_total_norm(gradients).item()
        if norm != norm or norm == float("inf"):
            self.discard()
            return StepReport(tokens, norm, lr, skipped=True)
        if self._spec.clip and norm > self._spec.clip:
            torch._foreach_mul_(gradients, self._spec.clip / norm)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        try:
            self._adamw.step()
        except BaseException:
            self._drop_halves()
            raise
        # Zeroed, not freed: the memory is needed again within the second, and fragments less.
        self._adamw.zero_grad(set_to_none=False)
        self._tokens = 0
        return StepReport(tokens, norm, lr, skipped=False)

    def _drop_halves(self) -> None:
        """AdamW makes a parameter's moments at its first step, one after the other. Should memory end between them, it
        would miss the second at every later step."""
        for parameter, moments in list(self._adamw.state.items()):
            if any(key not in moments for key in _MOMENTS):
                del self._adamw.state[parameter]

    def state(self) -> dict[str, torch.Tensor]:
        """AdamW's moments as `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`; empty before the first step."""
        out = {}
        for name, parameter in self._parameters.items():
            for key, value in self._adamw.state.get(parameter, {}).items():
                out[f"{key}/{name}"] = value
        return out

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over moments from `state()` of a peer with the same stage; parameters that it leaves out have none.

        Raises MismatchError naming the tensor, before anything is changed (C07, C27).
        """
        found: dict[str, dict[str, torch.Tensor]] = {}
        for key_name, value in state.items():
            key, _, name = key_name.partition("/")
            parameter = self._parameters.get(name)
            if parameter is None or key not in _MOMENTS:
                raise MismatchError(f"optimizer state {key_name!r} belongs to no parameter of this stage")
            expected = torch.Size() if key == "step" else parameter.shape
            if value.shape != expected:
                raise MismatchError(
                    f"optimizer state {key_name!r} has shape {list(value.shape)}, expected {list(expected)}"
                )
            if not bool(torch.isfinite(value).all()):
                raise MismatchError(f"optimizer state {key_name!r} holds values that are not finite")
            # The fused optimizer counts steps beside its parameters.
            found.setdefault(name, {})[key] = value.to(parameter.device, torch.float32, copy=True)
        for name, moments in found.items():
            missing = [key for key in _MOMENTS if key not in moments]
            if missing:
                raise MismatchError(f"optimizer state of {name!r} lacks {', '.join(missing)}")
        for name, moments in found.items():
            self._adamw.state[self._parameters[name]].update(moments)
