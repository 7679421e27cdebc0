"""Entropy-coded values of a tensor: one step for all of it, chosen to meet a budget, and the class of every value."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from meshd.wire import entropy, quantize
from meshd.wire.codec import Quantized
from meshd.wire.rate import RateLoop
from meshd.wire.side import UNLIFTED, Side

STEP = struct.Struct("<h")
"""The index of the step, of a frame's reference gain."""
MOST_OF_BUDGET = 2
"""A payload may take this many times its budget; what would take more is quantized more coarsely."""

_MOST_STEP = 2**15 - 1


@dataclass(frozen=True)
class EntropyCoded(Quantized):
    """levels: (N, K) int32, of the unmarked tokens' coordinates that are coded; classes: theirs, (N, K) uint8; tables:
    the prior's."""

    levels: entropy.Levels
    classes: entropy.Classes
    tables: entropy.Tables


def lifts(index: Tensor) -> Tensor:
    """(N,) int32: by how many classes the values of tokens lie above those of a token of the reference gain.

    index: (N,) uint8, gains as they cross: a class is as wide as the steps between them.
    """
    return torch.where(index > 0, index.int() - 255, UNLIFTED)


def quantized(
    z: Tensor, lift: Tensor, side: Side, budget: int, spent: int, rate: RateLoop | None
) -> tuple[int, Tensor, Tensor]:
    """Step index, levels (N, K) and classes (N, K); tells `rate` what they will take.

    z: (N, coordinates), in reference gains; lift: (N,). budget: bits of the whole tensor; spent: those that are gone
    already, of which at most half of the budget is saved here.
    """
    offset = 0 if rate is None else rate.offset
    step = side.step(max(budget - spent, budget // 2), lift) + offset
    while True:
        step = min(max(step, -_MOST_STEP), _MOST_STEP)
        classes = side.classes(step, lift)
        levels, cost = side.levels(z[:, : classes.shape[1]] / size(step), classes)
        if cost <= MOST_OF_BUDGET * budget:
            break
        step += quantize.OCTAVE // 2
    if rate is not None:
        rate.spent(cost + spent, budget, offset)
    return step, levels, classes


def size(step: int) -> float:
    """Of a step of this index, in reference gains."""
    return float(2 ** (step / quantize.OCTAVE))


def values(coded: EntropyCoded, step: int, device: torch.device) -> Tensor:
    """(N, K) float32: z, in reference gains."""
    return torch.from_numpy(coded.levels).to(device) * size(step)
