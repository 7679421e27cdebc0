"""What a layer, the embedding and the head cost on this machine, and the cut that follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from meshd.model.cut import Hop, Tied, balance
from meshd.model.families import family_of
from meshd.model.loss import token_loss
from meshd.model.stage import StageModel

# Timed passes, besides one to warm up; the fastest counts. Other work on the machine only ever adds time.
_REPEATS = 3


@dataclass(frozen=True)
class LayerCosts:
    """Seconds per microbatch. `forward[i]` and `backward[i]` are layer i's; `embed` and `head` are both passes."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    embed: float
    head: float

    @property
    def layers(self) -> tuple[float, ...]:
        """Seconds of each layer with recomputation: two forward passes and a backward pass."""
        return tuple(2 * f + b for f, b in zip(self.forward, self.backward, strict=True))

    def cut(self, stages: int, tied: Tied) -> list[int]:
        """The balanced cut. In a ring the head is stage 0's; otherwise the last stage has it and need not recompute."""
        if tied == "ring" and stages > 1:
            return balance(self.layers, stages, first_extra=self.embed + self.head)
        once = sum(self.forward) + sum(self.backward)
        scale = once / sum(self.layers)
        return balance(self.layers, stages, self.embed, self.head, last_scale=scale)


def measure_costs(
    config: PreTrainedConfig,
    seq_len: int,
    microbatch: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LayerCosts:
    """Time forward and backward of one layer of each kind (window), the embedding and the head, with random weights.

    Needs memory for one layer, embedding and head at a time. Takes a few seconds on a CPU for a small model: run it
    off the event loop.
    """
    family = family_of(config)
    shape = (microbatch, seq_len)
    ids = torch.randint(0, config.vocab_size, shape, device=device)
    hidden = torch.randn((*shape, config.hidden_size), device=device, dtype=dtype, requires_grad=True)
    mask = torch.ones(shape, dtype=torch.bool, device=device)

    def part(hop: Hop) -> StageModel:
        return _random_stage(config, hop, device, dtype)

    windows = [family.window(config, index) for index in range(config.num_hidden_layers)]
    timed: dict[int | None, tuple[float, float]] = {}
    for index, window in enumerate(windows):
        if window not in timed:
            timed[window] = _time(part(Hop(0, 0, index, index + 1, embed=False, head=False)), hidden)
    embedding = part(Hop(0, 0, 0, 0, embed=True, head=False))
    embed = sum(_time(embedding, ids))
    del embedding
    to_logits = part(Hop(0, 0, 0, 0, embed=False, head=True))
    head = sum(_time(lambda hop, x: token_loss(to_logits(hop, x), ids, mask), hidden))
    return LayerCosts(
        forward=tuple(timed[window][0] for window in windows),
        backward=tuple(timed[window][1] for window in windows),
        embed=embed,
        head=head,
    )


def _random_stage(
    config: PreTrainedConfig, hop: Hop, device: torch.device | str, dtype: torch.dtype
) -> StageModel:
    """A model of one hop with small random weights."""
    stage = StageModel(config, [], "none", 0, dtype, only=[hop])
    stage.load({name: torch.randn(value.shape) * 0.02 for name, value in stage.named().items()}, device)
    return stage.train()


def _time(run: Callable[[int, Tensor], Tensor], x: Tensor) -> tuple[float, float]:
    """Seconds of a forward and of a backward pass of hop 0, each the fastest of several."""
    best = (float("inf"), float("inf"))
    for _ in range(_REPEATS + 1):
        start = perf_counter()
        out = run(0, x)
        _finish(x)
        middle = perf_counter()
        out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
        _finish(x)
        best = (min(best[0], middle - start), min(best[1], perf_counter() - middle))
    return best


def _finish(x: Tensor) -> None:
    """Wait for work queued on an accelerator."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
