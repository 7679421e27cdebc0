"""All stages of a cut model in one process and one autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from meshd.data.microbatch import Microbatch
from meshd.model.cut import Tied
from meshd.model.loss import token_loss
from meshd.model.stage import StageModel

Cross = Callable[[Tensor, int], Tensor]
"""Takes the hidden state (B, T, H) on this side of a boundary, and its number; what the far side sees of it."""

# Values that are lifted to float64 at a time.
_CHUNK_VALUES = 1 << 22


class StagedModel:
    """The stages in the order in which a microbatch visits them; without dropout, so that passes can be compared."""

    def __init__(self, stages: Sequence[StageModel]) -> None:
        self.stages = list(stages)
        for stage in self.stages:
            stage.eval()
        hops = [(hop.index, stage) for stage in self.stages for hop in stage.hops]
        self.route = sorted(hops, key=lambda pair: pair[0])
        """(Hop, the stage that serves it), in order."""

    @classmethod
    def load(cls, model_dir: Path, config: PreTrainedConfig, cut: Sequence[int], tied: Tied) -> StagedModel:
        """Read a model directory. Raises ConfigError, DataError or MismatchError as StageModel does."""
        stages = [StageModel(config, cut, tied, stage) for stage in range(len(cut) + 1)]
        for stage in stages:
            stage.load(model_dir)
        return cls(stages)

    @property
    def boundaries(self) -> int:
        """Places where a hidden state crosses: one more with a ring."""
        return len(self.route) - 1

    @property
    def hidden(self) -> int:
        return int(self.stages[0].config.hidden_size)

    @property
    def vocabulary(self) -> int:
        return int(self.stages[0].config.vocab_size)

    @property
    def embedding(self) -> Tensor:
        """(vocabulary, hidden)."""
        return self.stages[0].get_parameter(self.stages[0].family.embedding_name).detach()

    def loss(self, batch: Microbatch, cross: Cross) -> Tensor:
        """Mean loss over the label tokens, nats, with `cross` at every boundary."""
        x = batch.inputs
        for hop, stage in self.route:
            x = stage(hop, x, batch.document_starts)
            if hop < self.boundaries:
                x = cross(x, hop)
        return token_loss(x, batch.labels, batch.label_mask) / batch.label_tokens

    def take_gradients(self) -> list[list[Tensor]]:
        """By stage, the gradient of every parameter that is trained, in the model's order; the parameters lose them."""
        taken = []
        for stage in self.stages:
            found = []
            for parameter in stage.trainable().values():
                found.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
                parameter.grad = None
            taken.append(found)
        return taken


def cosine(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Of two gradients in parts of equal shapes, in float64: there may be many millions of values. 0 when one is 0."""
    dot, norm_a, norm_b = _dot(a, b), _dot(a, a), _dot(b, b)
    return dot / (norm_a * norm_b) ** 0.5 if norm_a > 0 and norm_b > 0 else 0.0


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    total = 0.0
    for pair in zip(a, b, strict=True):
        chunks = (torch.split(x.flatten(), _CHUNK_VALUES) for x in pair)
        total += sum(float(x.double() @ y.double()) for x, y in zip(*chunks, strict=True))
    return total
