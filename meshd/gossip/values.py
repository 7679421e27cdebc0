"""Parameters as one flat vector of differences to the base model.

The base is what all replicas certainly share, and adaptation stays close to it, so that bf16's 8 bits of mantissa, and
a sample's fp32, are spent on what was learned, not on what all know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch


class FlatParameters:
    """A stage's trainable parameters in the order of their names, with the base they are measured from.

    What touches values is used in the device's thread only. base: tensors by the same names, on any device, of any
    float dtype (a memory-mapped file costs no private memory).
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        base: Mapping[str, torch.Tensor],
        final: Callable[[], bool] = lambda: False,
    ) -> None:
        """final: once it says so, the parameters are the run's result and are not moved any more."""
        self.final = final
        self._names = sorted(parameters)
        self._parameters, self._base = parameters, base
        sizes = torch.tensor([0, *(parameters[name].numel() for name in self._names)])
        self.starts = sizes.cumsum(0)
        """Where each tensor begins, and where the last one ends: int64 (tensors + 1,)."""

    @property
    def count(self) -> int:
        """Number of values."""
        return int(self.starts[-1])

    @property
    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Flat views, in the order of names."""
        return [(name, self._parameters[name].detach().view(-1)) for name in self._names]

    @torch.no_grad()
    def read(self, positions: torch.Tensor) -> torch.Tensor:
        """Differences to the base at these ascending positions: (count,) fp32 on the CPU. positions: int64 (count,)."""
        found = [parameter[local.to(parameter.device)] for _, parameter, local in self.pieces(positions)]
        return _joined(found) - self.base(positions)

    def base(self, positions: torch.Tensor) -> torch.Tensor:
        """The base's values at these ascending positions: as of `read`."""
        flat = [(self._base[name].view(-1), local) for name, _, local in self.pieces(positions)]
        return _joined([base[local.to(base.device)] for base, local in flat])

    @torch.no_grad()
    def move(self, positions: torch.Tensor, amounts: torch.Tensor) -> None:
        """Add amounts, (count,) on the CPU, at these ascending positions. Steps taken since they were read are kept."""
        if self.final():
            return
        at = 0
        for _, parameter, local in self.pieces(positions):
            amount = amounts[at : at + len(local)].to(parameter.device, parameter.dtype)
            parameter.index_add_(0, local.to(parameter.device), amount)
            at += len(local)

    def root_mean_square(self, samples: torch.Tensor) -> float:
        """Of all values, by samples of each tensor: float64 (tensors, samples)."""
        sizes = self.starts.diff()
        return math.sqrt((samples.square().mean(1) * sizes).sum().item() / max(1, self.count))

    def tensor_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Which tensor, in the order of names, each position is in: int64 (count,)."""
        return torch.bucketize(positions, self.starts[1:], right=True)

    def pieces(self, positions: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """For each tensor that holds some of the ascending positions: its name, its flat view, the positions in it."""
        bounds = torch.searchsorted(positions, self.starts).tolist()
        for (name, parameter), start, first, end in zip(
            self.parameters, self.starts.tolist(), bounds, bounds[1:], strict=False
        ):
            if end > first:
                yield name, parameter, positions[first:end] - start


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([piece.float().cpu() for piece in pieces]) if pieces else torch.empty(0)
