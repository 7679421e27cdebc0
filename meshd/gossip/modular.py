"""Differences between two replicas in two to eight bits a value, without a reference and without state. Pure.

Both sides round x / step, with the same dither for both, and send the result modulo `levels`. Two replicas differ by
little, so that each knows from its own value which of the numbers with that remainder the other's is. This is the
modular quantization of Lu and De Sa, "Moniqua: Modulo Quantized Communication in Decentralized SGD", 2020; it differs
in that the dither is shared: where the replicas agree, they round alike and nothing moves, and the error of a
difference d is that of a coin between its two neighbours, |d| (step - |d|), without bias. So the noise goes away with
the disagreement itself, and what quantization leaves out of a move stays where it is (DESIGN section 6); no error
feedback is kept. Both sides find the same whole numbers of steps, up to the sign, whatever their floats round to: their
moves cancel exactly.

The step is chosen per tensor from a sample of values that both sides send in full (`steps`). A difference too large
for the levels is taken for a smaller one: no partner can move a value by more than half the levels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from meshd.errors import MismatchError
from meshd.splitmix import WORD, mix, outputs, top_bits
from meshd.wire.bits import pack, packed_bytes, unpack


class Rounding(NamedTuple):
    """step: in root mean square differences. gain: the share of what was found that is moved. wide: that of a wide
    exchange."""

    step: float
    gain: float
    wide: float


# By bits of a value. Narrower steps lose more to differences beyond the levels, wider ones to rounding, and part of
# what is found is noise: about least squares, for differences between a normal and a Laplace distribution. What is left
# of the energy of normal ones is 0.47 with 2 bits, 0.17 with 3, 0.07 with 4, 0.001 with 8.
ROUNDING = {
    2: Rounding(2.1, 0.57, 0.15),
    3: Rounding(1.1, 0.82, 0.28),
    4: Rounding(0.65, 0.92, 0.48),
    8: Rounding(0.08, 1.0, 0.98),
}
# One exchange in so many, by its number, is wide: its steps are so many times as long. The few values that differ by
# more than the levels reach are read wrongly again and again, while the steps shrink with what the others differ by:
# wide exchanges, on average, bring them back.
_WIDE_ONE_IN, _WIDE = 8, 4.0
# Of the differences of replicas that are as far apart as their samples say, 5 in 8 or more are within an eighth of the
# levels of none, with outliers among them half; of numbers that are anything, only a share of all levels, by so much
# less.
_PLAUSIBLE = 0.1
ENOUGH = 256
"""Of fewer differences statistics say little."""

SAMPLES = 16
"""Values of one tensor that both sides send in full, for a step to be chosen."""

# A step on the wire is one byte: 2 ** (code / 4 - 48), from 3.6e-15 to 4.7e4.
_PER_OCTAVE, _LOWEST = 4, -48
_DITHER_BITS = 24


def is_wide(exchange: int) -> bool:
    """By an exchange's number, whether its steps are long."""
    return mix((exchange + 2) % WORD) % _WIDE_ONE_IN == 0


def gain(bits: int, exchange: int) -> float:
    """The share of what an exchange finds that is moved."""
    return ROUNDING[bits].wide if is_wide(exchange) else ROUNDING[bits].gain


def noise(bits: int, exchange: int) -> float:
    """By what factor rounding makes differences look larger, in root mean square: about, or more for long steps."""
    return math.sqrt(1.0 + _step(bits, exchange) ** 2 / 6.0)


def _step(bits: int, exchange: int) -> float:
    """In root mean square differences."""
    return ROUNDING[bits].step * (_WIDE if is_wide(exchange) else 1.0)


def step_codes(mine: torch.Tensor, theirs: torch.Tensor, bits: int, exchange: int) -> torch.Tensor:
    """Step of every tensor as its code on the wire: uint8 (tensors,). mine, theirs: samples, (tensors, SAMPLES)."""
    distance = (mine.double() - theirs.double()).square().mean(1).sqrt()
    exponents = torch.log2((distance * _step(bits, exchange)).clamp(min=2.0**_LOWEST))
    return ((exponents - _LOWEST) * _PER_OCTAVE).round().clamp(0, 255).to(torch.uint8)


def steps_of(codes: torch.Tensor) -> torch.Tensor:
    """The steps that codes mean: float64, of the same shape."""
    return torch.exp2(codes.double() / _PER_OCTAVE + _LOWEST)


def dither(exchange: int, first: int, count: int) -> torch.Tensor:
    """Dither of values `first` to `first + count - 1` of an exchange, the same on both sides: float64 in [0, 1)."""
    words = outputs(mix(exchange % WORD), first, count)
    return top_bits(words, _DITHER_BITS).double().div_(1 << _DITHER_BITS)


def residues(values: torch.Tensor, steps: torch.Tensor, dithers: torch.Tensor, bits: int) -> torch.Tensor:
    """floor(value / step + dither) modulo 2**bits: int32 (count,). values, steps, dithers: (count,)."""
    # In float64: a value is up to millions of steps, and what counts is the fraction.
    return (values.double() / steps).add_(dithers).floor_().remainder_(1 << bits).int()


def differences(mine: torch.Tensor, theirs: torch.Tensor, bits: int) -> torch.Tensor:
    """Steps from this side's values to the other's by the residues of both: int32 (count,), under half the levels
    either way. Half the levels might be up or down: taken for none."""
    half = 1 << (bits - 1)
    found = (theirs - mine + half).remainder_(1 << bits).sub_(half)
    return found.masked_fill_(found == -half, 0)


def plausible(mine: torch.Tensor, theirs: torch.Tensor, bits: int) -> bool:
    """The residues of both sides differ as little as samples have promised. False: the partner's are something else
    than its values."""
    reach = (1 << bits) // 8
    near = (theirs - mine + reach).remainder_(1 << bits) <= 2 * reach
    by_chance = (2 * reach + 1) / (1 << bits)
    return len(mine) < ENOUGH or near.float().mean().item() >= by_chance + _PLAUSIBLE


def packed(values: torch.Tensor, bits: int) -> bytes:
    """Residues as they cross the wire."""
    return pack(values, bits).numpy().tobytes()


def unpacked(data: bytes | bytearray, bits: int, count: int) -> torch.Tensor:
    """Raises MismatchError for another number of bytes than that of `count` residues."""
    if len(data) != packed_bytes(count, bits):
        raise MismatchError(f"{len(data)} bytes where {count} residues of {bits} bits come next")
    if not count:  # of a last block, or of a small stage, the covered one may lie beyond the end
        return torch.empty(0, dtype=torch.int32)
    return unpack(torch.frombuffer(bytearray(data), dtype=torch.uint8), bits, count)
