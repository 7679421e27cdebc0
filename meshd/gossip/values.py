"""Parameters as one flat vector of differences to the base model.

Replicas exchange bf16 of (parameter - base). The base is what both certainly share, and adaptation stays close to
it, so that bf16's 8 bits of mantissa are spent on what was learned, not on what both know.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping

import torch

# How values are written, as named in GossipOpen.
BF16_DELTA = "bf16-delta"
VALUE_BYTES = 2


class FlatParameters:
    """A stage's trainable parameters in the order of their names, with the base they are measured from.

    Used in the device's thread only. base: tensors by the same names, on any device, of any float dtype (a
    memory-mapped file costs no private memory).
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        base: Mapping[str, torch.Tensor],
        final: Callable[[], bool] = lambda: False,
    ) -> None:
        """final: once it says so, the parameters are the run's result and are not moved any more."""
        self._final = final
        self._names = sorted(parameters)
        self._parameters, self._base = parameters, base
        self._starts = [0]
        for name in self._names:
            self._starts.append(self._starts[-1] + parameters[name].numel())

    @property
    def count(self) -> int:
        """Number of values."""
        return self._starts[-1]

    @torch.no_grad()
    def read(self, start: int, count: int) -> torch.Tensor:
        """(count,) bf16 on the CPU: differences of the values from `start` on."""
        pieces = [
            (parameter[at:end].float() - base[at:end].to(parameter.device).float()).bfloat16().cpu()
            for parameter, base, at, end in self._pieces(start, count)
        ]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.bfloat16)

    @torch.no_grad()
    def move(self, start: int, mine: torch.Tensor, theirs: torch.Tensor, share: float = 0.5) -> float:
        """Move toward the partner: parameter += share * (theirs - mine), with what both sides sent (bf16).

        At a share of 0.5 both sides move by opposite amounts, so that the sum over replicas is kept exactly but for
        rounding of the parameters themselves; what bf16 left out stays where it is (DESIGN section 6). At 1, against
        the other side's 0, this side takes over the partner's values. Steps taken since `mine` was read are kept.
        Returns the sum of squared differences.
        """
        if self._final():
            return 0.0
        squares = 0.0
        at = 0
        for parameter, _, first, end in self._pieces(start, len(mine)):
            count = end - first
            difference = theirs[at : at + count].float() - mine[at : at + count].float()
            if share:
                parameter[first:end].add_(difference.to(parameter.device, parameter.dtype), alpha=share)
            squares += difference.square().sum().item()
            at += count
        return squares

    def _pieces(self, start: int, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
        """Flat views of the parameters (and base) that hold values start .. start + count, with the range in each."""
        index = bisect_right(self._starts, start) - 1
        end = min(start + count, self.count)
        while start < end:
            name, first = self._names[index], self._starts[index]
            last = min(end, self._starts[index + 1])
            if last > start:
                parameter = self._parameters[name].detach().view(-1)
                yield parameter, self._base[name].view(-1), start - first, last - first
            start, index = last, index + 1
