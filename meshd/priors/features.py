"""Features of tokens, from which a prior predicts the hidden state at a boundary (DESIGN section 3, token predictor).

Both sides know the token ids, and half of the energy of the residual stream is linear in the token's own embedding. The
embedding's leading directions are shipped once for the whole run, so that a prior carries only a small matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from meshd.errors import DataError, MismatchError
from meshd.state.tensors import TensorSpec, check_specs, read_specs, read_tensors, spec_of, write_tensors

FEATURES = "features.safetensors"
"""File name in the bundle `run/features`."""
RANK = 256
"""Features of a token, unless the embedding is narrower. They cost a run vocabulary * RANK bytes once (12.6 MB for a
vocabulary of 49,152), and every prior 2 * RANK * hidden (0.3 MB of 1.4 MB at hidden 576)."""
MOST_RANK = 1024

_CHUNK_ROWS = 8192


@dataclass(frozen=True, eq=False)
class TokenFeatures:
    """values: (vocabulary, R) int8; scale: (R,) float32. A token's feature is value * scale: over the vocabulary each
    has variance 1 and mean 0, up to rounding."""

    values: torch.Tensor
    scale: torch.Tensor

    @property
    def vocabulary(self) -> int:
        return self.values.shape[0]

    @property
    def rank(self) -> int:
        return self.values.shape[1]

    def features(self, ids: torch.Tensor) -> torch.Tensor:
        """Features (..., R) float32 of token ids (...), all below `vocabulary`, on this object's device."""
        return self.values[ids.to(self.values.device)].to(torch.float32) * self.scale

    def on(self, device: torch.device) -> TokenFeatures:
        """The same on another device."""
        return TokenFeatures(self.values.to(device), self.scale.to(device))

    @classmethod
    def from_embedding(cls, weight: torch.Tensor, rank: int = RANK) -> TokenFeatures:
        """The embedding's leading principal directions: of rank `rank` or what the embedding has.

        weight: (vocabulary, hidden), floating. Its mean is left out: a predictor has a bias. Holds one copy of the
        projections, never a float32 copy of the embedding. Raises DataError when it is not finite.
        """
        vocabulary, hidden = weight.shape
        rank = min(rank, hidden, vocabulary, MOST_RANK)
        total = torch.zeros(hidden, dtype=torch.float64)
        moment = torch.zeros((hidden, hidden), dtype=torch.float64)
        for rows in torch.split(weight, _CHUNK_ROWS):
            rows = rows.float()
            total += rows.sum(0, dtype=torch.float64)
            moment += rows.T @ rows
        if not bool(torch.isfinite(moment).all()):
            raise DataError(
                "the model's token embedding has values that are not finite. Fetch the model again"
            )
        mean = total / vocabulary
        _, vectors = torch.linalg.eigh(moment / vocabulary - torch.outer(mean, mean))
        directions = vectors.flip(1)[:, :rank].float()  # eigh's order is ascending
        projected = torch.cat(
            [(rows.float() - mean.float()) @ directions for rows in torch.split(weight, _CHUNK_ROWS)]
        )
        # A direction without spread (an embedding of low rank) stays zero instead of becoming amplified rounding.
        spread = projected.std(0, correction=0)
        unit = projected / spread.clamp_min(1e-6 * float(spread.max())).clamp_min(1e-30)
        scale = unit.abs().amax(0).clamp_min(1e-30) / 127
        return cls((unit / scale).round().to(torch.int8), scale)

    def save(self, path: Path) -> None:
        """Write as a safetensors file. Blocking; raises OSError as the disk does."""
        tensors = {"values": self.values, "scale": self.scale}
        write_tensors(path, {name: spec_of(tensor) for name, tensor in tensors.items()}, tensors.items())

    @classmethod
    def load(cls, path: Path, vocabulary: int) -> TokenFeatures:
        """Read what `save` wrote, mapped. Blocking. Raises DataError for another kind of file, MismatchError for one
        that does not fit the model."""
        found = read_specs(path)
        rank = found["scale"].size_bytes // 4 if "scale" in found else 0
        if not 1 <= rank <= MOST_RANK:
            raise MismatchError(f"{path} holds {rank} features a token where 1 to {MOST_RANK} are expected")
        specs = {
            "values": TensorSpec((vocabulary, rank), torch.int8),
            "scale": TensorSpec((rank,), torch.float32),
        }
        check_specs(found, specs, str(path))
        tensors = read_tensors(path)
        scale = tensors["scale"]
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise MismatchError(f"{path} holds scales that are not finite and positive")
        return cls(tensors["values"], scale)
