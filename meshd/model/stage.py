"""One stage of a cut model: only its own layers, under the whole model's parameter names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from meshd.errors import MismatchError
from meshd.model.cut import Hop, Tied, hops
from meshd.model.families import family_of
from meshd.model.tensors import TensorFiles

# Rotary tables of these kinds depend on the longest sequence seen so far; they are made anew for every call, so that
# recomputation and other sequence lengths in between give the same numbers.
_STATEFUL_ROPE = ("dynamic", "longrope")


class StageModel(nn.Module):
    """The layers of one stage, and with them embedding, final norm and head where the stage serves such hops.

    Parameters start on the meta device, without memory; `load` gives them values. Submodules are nested as in the
    whole transformers model, so `named_parameters()` gives the whole model's names. With tied embeddings the head has
    no parameter of its own: it uses the embedding's weight (in a ring both live on stage 0; frozen, the last stage
    holds a copy under the embedding's name, left out of `trainable`).

    Keeps nothing between calls: a hop may be recomputed, after other microbatches, with the same result, if the
    caller restores the random state that dropout used.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        cut: Sequence[int],
        tied: Tied,
        stage: int,
        dtype: torch.dtype = torch.float32,
        only: Sequence[Hop] | None = None,
    ) -> None:
        """`only`: build these hops instead of all that the cut gives the stage (to time a part by itself).

        Raises ConfigError for an unsupported family or a bad cut.
        """
        super().__init__()
        self.family = family = family_of(config)
        # A copy: the attention implementation is part of a config, and the caller's must not change.
        self.config = type(config).from_dict(config.to_dict(), attn_implementation="sdpa")
        self.stage, self.tied, self.dtype = stage, tied, dtype
        everything = hops(config.num_hidden_layers, cut, tied)
        self.hops: list[Hop] = list(only) if only else [hop for hop in everything if hop.stage == stage]
        self._by_index = {hop.index: hop for hop in self.hops}
        layers = [index for hop in self.hops for index in range(hop.first, hop.last)]
        with torch.device("meta"):
            self._build(layers)
        self.to(dtype)
        if tied == "freeze":
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(name != family.embedding_name)
        # Outside the meta device and after the cast: the frequencies are computed, never loaded, and stay fp32.
        self._rotary = family.make_rotary(self.config) if layers else None

    def _build(self, layers: Sequence[int]) -> None:
        """Make the submodules, nested and named as in the whole model."""
        config, family = self.config, self.family
        embed = any(hop.embed for hop in self.hops)
        head = any(hop.head for hop in self.hops)
        body = nn.Module()
        if embed or (head and self.tied != "none"):
            setattr(body, family.embed, family.make_embedding(config))
        if embed and family.positions is not None:
            setattr(body, family.positions, nn.Embedding(config.max_position_embeddings, config.hidden_size))
        named = {str(index): family.make_layer(config, index) for index in layers}
        setattr(body, family.layers, nn.ModuleDict(named))
        if head:
            setattr(body, family.norm, family.make_norm(config))
        setattr(self, family.body, body)
        if head and self.tied == "none":
            linear = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            setattr(self, family.head_name.removesuffix(".weight"), linear)

    # ---- parameters --------------------------------------------------------------------------------------------------

    def parameter_names(self) -> list[str]:
        """Whole-model names of this stage's parameters, in the model's order."""
        return [name for name, _ in self.named_parameters()]

    def named(self) -> dict[str, nn.Parameter]:
        """This stage's parameters by whole-model name, frozen ones included."""
        return dict(self.named_parameters())

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that training moves: without frozen embeddings and their copies."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def load(
        self, source: Path | Mapping[str, Tensor], device: torch.device | str = "cpu", *, share: bool = False
    ) -> None:
        """Give every parameter its value from a safetensors file, a model directory or a mapping.

        Values are copied and cast to the stage's dtype, one tensor at a time; nothing is shared with the source.
        share: tensors of a mapping that have dtype and device already are used as they are, for a model that is only
        read (memory-mapped weights then cost no memory of their own).
        Names that belong to other stages are left unread. Parameters become new objects: load before making an
        optimizer. Raises MismatchError, before anything has changed, when a tensor is missing or has another shape;
        DataError when a file cannot be read.
        """
        if isinstance(source, Path):
            with TensorFiles(source, self.family.old_names) as files:
                self._load(files, {name: files.shape(name) for name in files}, device, share=False)
        else:
            found = {name: source[name].shape for name in self.parameter_names() if name in source}
            self._load(source, found, device, share)

    def _load(
        self,
        source: Mapping[str, Tensor],
        shapes: Mapping[str, torch.Size],
        device: torch.device | str,
        share: bool,
    ) -> None:
        check_shapes(
            {name: parameter.shape for name, parameter in self.named().items()}, shapes, f"stage {self.stage}"
        )
        for name, old in self.named().items():
            value = source[name].detach().to(device=device, dtype=self.dtype, copy=not share)
            owner, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=old.requires_grad))
        if self._rotary is not None:
            self._rotary.to(device)

    # ---- computation -------------------------------------------------------------------------------------------------

    def forward(self, hop: int, x: Tensor, document_starts: Tensor | None = None) -> Tensor:
        """Run one hop.

        x: token ids (B, T) int64 at the embedding hop, hidden (B, T, H) elsewhere. document_starts: (B, T) bool,
        where packed documents begin; positions restart there and attention does not cross (the first token of a row
        begins a document whether marked or not). None: rows are one document each. Returns hidden (B, T, H), or
        logits (B, T, V) at the head hop. Raises KeyError for a hop that another stage serves.
        """
        at = self._by_index[hop]
        positions, segments = _documents(x, document_starts)
        hidden = self._embed(x, positions) if at.embed else x
        if at.first < at.last:
            hidden = self._run_layers(at, hidden, positions, segments)
        return self._head(hidden) if at.head else hidden

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        body, family = getattr(self, self.family.body), self.family
        hidden: Tensor = getattr(body, family.embed)(ids)
        if family.positions is not None:
            hidden = hidden + getattr(body, family.positions)(positions)
        if family.embed_dropout is not None:
            hidden = F.dropout(hidden, getattr(self.config, family.embed_dropout), self.training)
        return hidden

    def _run_layers(self, hop: Hop, hidden: Tensor, positions: Tensor, segments: Tensor | None) -> Tensor:
        call: dict[str, object] = {"position_ids": positions}
        if self._rotary is not None:
            stateful = self.config.rope_parameters["rope_type"] in _STATEFUL_ROPE
            rotary = self.family.make_rotary(self.config) if stateful else self._rotary
            assert rotary is not None
            call["position_embeddings"] = rotary(hidden, positions)
        masks: dict[int | None, Tensor | None] = {}
        layers = getattr(getattr(self, self.family.body), self.family.layers)
        for index in range(hop.first, hop.last):
            window = self.family.window(self.config, index)
            if window not in masks:
                masks[window] = _attention_mask(hidden, window, segments)
            hidden = layers[str(index)](hidden, attention_mask=masks[window], **call)
        return hidden

    def _head(self, hidden: Tensor) -> Tensor:
        body, family = getattr(self, self.family.body), self.family
        normed = getattr(body, family.norm)(hidden)
        if self.tied == "none":
            weight = self.get_parameter(family.head_name)
        else:
            weight = getattr(body, family.embed).weight
        return F.linear(normed, weight)


def _documents(x: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Position ids (1 or B, T) within documents, and the number of each token's document (B, T) or None."""
    steps = torch.arange(x.shape[1], device=x.device)
    if starts is None:
        return steps[None], None
    starts = starts.clone()
    starts[:, 0] = True
    begins = torch.where(starts, steps, 0).cummax(dim=1).values
    return steps - begins, starts.cumsum(dim=1)


def _attention_mask(hidden: Tensor, window: int | None, segments: Tensor | None) -> Tensor | None:
    """Who may attend to whom, (1 or B, 1, T, T) bool; None when that is plain causality, which has the faster path."""
    length = hidden.shape[1]
    if window is not None and window >= length:
        window = None
    if window is None and segments is None:
        return None
    steps = torch.arange(length, device=hidden.device)
    mask = steps[:, None] >= steps
    if window is not None:
        mask = mask & (steps > steps[:, None] - window)
    mask = mask[None, None]
    if segments is not None:
        mask = mask & (segments[:, None, :, None] == segments[:, None, None, :])
    return mask


def check_shapes(
    expected: Mapping[str, torch.Size], found: Mapping[str, torch.Size], what: str, shown: int = 5
) -> None:
    """Refuse tensors that are not there or have another shape (C07). Raises MismatchError naming the first `shown`."""
    problems = [
        f"{name}: expected {tuple(shape)}, found {tuple(found[name]) if name in found else 'nothing'}"
        for name, shape in expected.items()
        if name not in found or found[name] != shape
    ]
    if problems:
        more = f" (and {len(problems) - shown} more)" if len(problems) > shown else ""
        raise MismatchError(
            f"the weights do not fit {what}: {'; '.join(problems[:shown])}{more}. "
            "They come from another model, or the cut differs"
        )


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors as stored."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
