"""One direction of a boundary prior, ready for a codec: its matrices on a device, and the integers that both ends
derive from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshd.wire import entropy, quantize

if TYPE_CHECKING:
    from meshd.priors.boundary import BoundaryPrior
    from meshd.wire.codec import Direction


# Coordinates of scales this far above the step are of the last class, this far below it are not coded.
_BEYOND = 16 * quantize.OCTAVE
UNLIFTED = -(2**15)
"""The lift of a token of which nothing is coded."""


@dataclass(frozen=True, eq=False)
class Side:
    """encode: (H, K) float32, coordinates of vectors are `x @ encode`. decode: (K, H) float32, the way back is
    `z @ decode`. scale_index: (K,) int16, falling: 64 * log2 of the coordinates' size after the token's gain; scale:
    the same as (K,) float32. tables: of the entropy coder."""

    encode: Tensor
    decode: Tensor
    scale_index: npt.NDArray[np.int16]
    scale: Tensor
    tables: entropy.Tables

    def step(self, budget: float, lift: Tensor) -> int:
        """Index of the finest step at which the modelled bits of all tokens stay within `budget`.

        lift: (N,) of the tokens. A choice of the sender: the frame names it, so it may come from floats.
        """
        lifts = lift[lift > UNLIFTED].cpu().numpy()
        coarse = int(self.scale_index[0]) + _BEYOND
        if not len(lifts):
            return coarse
        fine = int(self.scale_index[-1]) + entropy.CLASS_WIDTH * int(lifts.min()) - _BEYOND
        while coarse - fine > 1:  # coarse is within the budget, fine is not
            middle = (coarse + fine) // 2
            within = self._modelled(middle, lifts) <= budget
            fine, coarse = (fine, middle) if within else (middle, coarse)
        return coarse

    def _modelled(self, step: int, lifts: npt.NDArray[np.int32]) -> float:
        """Bits of tokens of these lifts at a step."""
        base = entropy.class_of(self.scale_index, step)
        # How many values there are of each class is the convolution of how many coordinates and tokens there are.
        values = np.convolve(np.bincount(base - base.min()), np.bincount(lifts - lifts.min()))
        classes = np.arange(len(values)) + int(base.min()) + int(lifts.min())
        coded = classes >= 0
        bits = self.tables.mean_bits[np.minimum(classes[coded], entropy.CLASSES - 1)]
        return float((values[coded] * bits).sum())

    def classes(self, step: int, lift: Tensor) -> Tensor:
        """(N, K) uint8: the class of every value, for the leading K coordinates that any token codes at this step.

        lift: (N,) int32, classes that a token's values lie above those of a token of the frame's reference gain.
        Integers only, on the device of `lift`.
        """
        base = entropy.class_of(self.scale_index, step)
        # Scales fall, so the coded ones are the first.
        coded = int((base + int(lift.max()) >= 0).sum()) if len(lift) else 0
        found = torch.from_numpy(base[:coded]).to(lift.device) + lift[:, None]
        # In a byte -1 is UNCODED.
        return found.clamp_(-1, entropy.CLASSES - 1).to(torch.uint8)

    def levels(self, unit: Tensor, classes: Tensor) -> tuple[Tensor, float]:
        """(N, K) int32 levels of values in steps (N, K), and the bits that they take."""
        constants = _constants(self, unit.device)
        row = classes.int()
        levels = quantize.levels(unit, _looked_up(constants.rounding, row))
        low = _looked_up(constants.low, row)
        bound = (entropy.SYMBOLS // 2) << low
        torch.minimum(levels, bound - 1, out=levels)
        torch.maximum(levels, bound.neg_(), out=levels)
        del bound
        symbols = (levels >> low).add_(row, alpha=entropy.SYMBOLS).add_(entropy.SYMBOLS // 2)
        return levels, float(_looked_up(constants.cost, symbols).sum())

    def widths(self, budget: int) -> list[tuple[int, Tensor]]:
        """Coordinates by the bits that Lloyd-Max gives them, ascending; those without are left out. Integers only."""
        return _widths(self, budget)


# A peer sends over and receives from one or two boundaries, with a few priors each at a time.
@lru_cache(maxsize=16)
def side_of(prior: BoundaryPrior, direction: Direction, device: torch.device) -> Side:
    """The side of a prior on a device."""
    basis = prior.basis(direction)
    encode, decode = (
        matrix.to(device, torch.float32).T.contiguous() for matrix in (basis.encode, basis.decode)
    )
    scale_index = basis.scale_index.cpu().numpy()
    return Side(encode, decode, scale_index, basis.scale.to(device), basis.tables)


class _Constants(NamedTuple):
    """By class as a byte, (256,), UNCODED among them; cost: by class and symbol, flat."""

    low: Tensor
    rounding: Tensor
    cost: Tensor


@lru_cache(maxsize=64)
def _constants(side: Side, device: torch.device) -> _Constants:
    unused = 256 - entropy.CLASSES
    low = np.pad(entropy.LOW_BITS.astype(np.int32), (0, unused))
    # The dead zone of what is not coded ends beyond all values.
    rounding = np.pad(entropy.ROUNDING, (0, unused), constant_values=-1e30)
    cost = np.pad(side.tables.cost, ((0, unused), (0, 0))).reshape(-1)
    return _Constants(*(torch.from_numpy(each).to(device) for each in (low, rounding, cost)))


def _looked_up(table: Tensor, index: Tensor) -> Tensor:
    """table[index]; int32 will do for an index here, at half of the memory."""
    return table.index_select(0, index.view(-1)).view(index.shape)


@lru_cache(maxsize=64)
def _widths(side: Side, budget: int) -> list[tuple[int, Tensor]]:
    bits = quantize.allot(side.scale_index, budget)
    found = [(width, np.flatnonzero(bits == width)) for width in range(1, quantize.MOST_BITS + 1)]
    device = side.encode.device
    return [(width, torch.from_numpy(columns).to(device)) for width, columns in found if len(columns)]
