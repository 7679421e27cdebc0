"""One direction of a boundary prior, ready for a codec: its matrices on a device, and the integers that both ends
derive from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshd.wire import entropy, quantize

if TYPE_CHECKING:
    from meshd.priors.boundary import BoundaryPrior
    from meshd.wire.codec import Direction


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

    def step(self, budget: int) -> int:
        """Index of the finest step at which the modelled bits per token stay within `budget`.

        A choice of the sender: the frame names it, so it may come from floats.
        """
        return _step(self, budget)

    def classes(self, step: int) -> entropy.Classes:
        """(coded,) classes of the leading coordinates that are coded at a step. Integers only."""
        found = entropy.class_of(self.scale_index, step)
        coded = int((found >= 0).sum())  # scales fall, so these are the first
        return found[:coded].astype(np.uint8)

    def cost(self, levels: Tensor, classes: entropy.Classes) -> float:
        """Bits that levels (N, coded) take."""
        device = levels.device
        low = torch.from_numpy(entropy.LOW_BITS[classes].astype(np.int32)).to(device)
        rows = torch.from_numpy(classes.astype(np.int32) * entropy.SYMBOLS).to(device)
        symbols = (levels >> low) + (rows + entropy.SYMBOLS // 2)
        return float(_cost(self, device).index_select(0, symbols.reshape(-1)).sum())

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


@lru_cache(maxsize=64)
def _cost(side: Side, device: torch.device) -> Tensor:
    return torch.from_numpy(side.tables.cost.reshape(-1)).to(device)


@lru_cache(maxsize=64)
def _widths(side: Side, budget: int) -> list[tuple[int, Tensor]]:
    bits = quantize.allot(side.scale_index, budget)
    found = [(width, np.flatnonzero(bits == width)) for width in range(1, quantize.MOST_BITS + 1)]
    device = side.encode.device
    return [(width, torch.from_numpy(columns).to(device)) for width, columns in found if len(columns)]


@lru_cache(maxsize=64)
def _step(side: Side, budget: int) -> int:
    fine = int(side.scale_index.min(initial=0)) - entropy.CLASSES * 8
    coarse = int(side.scale_index.max(initial=0)) + entropy.CLASSES * 8
    while coarse - fine > 1:  # coarse is within the budget, fine is not
        middle = (coarse + fine) // 2
        within = float(side.tables.mean_bits[side.classes(middle)].sum()) <= budget
        fine, coarse = (fine, middle) if within else (middle, coarse)
    return coarse
