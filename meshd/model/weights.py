"""What a stage holds: its tensors' names and shapes, its base file, and the memory that it needs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from meshd.config.runspec import GossipSpec
from meshd.errors import ResourceError
from meshd.gossip.memory import gossip_bytes
from meshd.model.cut import Tied
from meshd.model.stage import StageModel, check_shapes
from meshd.model.tensors import TensorFiles

# Sequence length at which activations are counted: a prime, so that an attention matrix (T, T) is recognized.
_PROBE_TOKENS = 61
# AdamW keeps two moments, in fp32.
_MOMENT_BYTES = 8


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one stage needs to train, beyond the process itself (C18)."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    gossip: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.gossip

    def __str__(self) -> str:
        parts = ("weights", "gradients", "optimizer", "activations", "gossip")
        listed = ", ".join(f"{part} {getattr(self, part) / 1e9:.2f}" for part in parts)
        return f"{self.total / 1e9:.2f} GB ({listed})"


def stage_shapes(
    config: PreTrainedConfig, cut: Sequence[int], tied: Tied, stage: int
) -> dict[str, torch.Size]:
    """Shapes of a stage's tensors by whole-model name, frozen copies included. Allocates nothing."""
    return {name: parameter.shape for name, parameter in StageModel(config, cut, tied, stage).named().items()}


def stage_tensor_names(config: PreTrainedConfig, cut: Sequence[int], tied: Tied, stage: int) -> list[str]:
    """Names of a stage's tensors, in the model's order; with a frozen tie the last stage's include the embedding's."""
    return list(stage_shapes(config, cut, tied, stage))


def stage_bytes(
    config: PreTrainedConfig,
    cut: Sequence[int],
    tied: Tied,
    stage: int,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Bytes of a stage's weights in `dtype`."""
    return sum(shape.numel() for shape in stage_shapes(config, cut, tied, stage).values()) * dtype.itemsize


def write_base(
    source: Path | Sequence[Path],
    config: PreTrainedConfig,
    cut: Sequence[int],
    tied: Tied,
    stage: int,
    dest_file: Path,
) -> None:
    """Slice one stage's tensors out of a model's safetensors into one file, under whole-model names.

    source: the model's directory, or those of its files that hold the stage (`resolve_stage`). The rest is not read;
    values keep the dtype that they are stored in. Written atomically. Raises MismatchError when the tensors do not
    fit the config, DataError when files cannot be read, ResourceError when the file cannot be written.
    """
    model = StageModel(config, cut, tied, stage)
    expected = {name: parameter.shape for name, parameter in model.named().items()}
    with TensorFiles(source, model.family.old_names) as files:
        found = {name: files.shape(name) for name in files}
        check_shapes(expected, found, f"the model's config (stage {stage})")
        write_tensors({name: files[name].contiguous() for name in expected}, dest_file)


def write_tensors(tensors: dict[str, Tensor], dest_file: Path) -> None:
    """Write a safetensors file in one step: it appears whole or not at all. Raises ResourceError."""
    try:
        dest_file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{dest_file.name}.", dir=dest_file.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
            temporary.chmod(0o644)  # mkstemp and safetensors write for the owner only
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(dest_file)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ResourceError(
            f"cannot write {dest_file}: {error.strerror or error}. Free space, or choose another directory"
        ) from error


def memory_estimate(
    config: PreTrainedConfig,
    cut: Sequence[int],
    tied: Tied,
    stage: int,
    microbatch: int,
    seq_len: int,
    dtype: torch.dtype = torch.float32,
    gossip: GossipSpec | None = None,
) -> MemoryEstimate:
    """Bytes that training a stage takes: weights, gradients, AdamW's moments, activations of one microbatch, and what
    gossip holds (None: there is none). What exchanges read is on the CPU; it is counted all the same on a GPU.

    The activations are those of one hop's backward pass after recomputation, the largest hop's; they are counted from
    what autograd saves on the meta device, so nothing is computed or allocated. Attention counts as its fused kernels
    do it, without the (T, T) matrices. At the head hop logits and their gradient are included.
    """
    model = StageModel(config, cut, tied, stage, dtype).train()
    trainable = sum(parameter.numel() for parameter in model.trainable().values())
    held = sum(parameter.numel() for parameter in model.parameters())
    per_token = max(_saved_bytes(model, hop.index) for hop in model.hops) / _PROBE_TOKENS
    return MemoryEstimate(
        weights=held * dtype.itemsize,
        gradients=trainable * dtype.itemsize,
        optimizer=trainable * _MOMENT_BYTES,
        activations=int(per_token * microbatch * seq_len),
        gossip=gossip_bytes(trainable, gossip) if gossip else 0,
    )


def _saved_bytes(model: StageModel, hop: int) -> int:
    """Bytes that autograd keeps for one row of _PROBE_TOKENS tokens through a hop, input, output and its gradient."""
    at = next(candidate for candidate in model.hops if candidate.index == hop)
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        square = tensor.ndim >= 3 and tensor.shape[-2:] == (_PROBE_TOKENS, _PROBE_TOKENS)
        if storage._cdata not in parameters and not square:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    if at.embed:
        x = torch.zeros((1, _PROBE_TOKENS), dtype=torch.int64, device="meta")
    else:
        shape = (1, _PROBE_TOKENS, model.config.hidden_size)
        x = torch.zeros(shape, dtype=model.dtype, device="meta", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(hop, x)
    logits_and_gradient: int = 2 * out.numel() * out.element_size()
    return sum(saved.values()) + logits_and_gradient
