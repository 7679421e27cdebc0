"""SplitMix64 by counter: words that any two peers compute alike, on any device, without sending them.

Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014; output function by Stafford.
"""

from __future__ import annotations

import torch

WORD = 2**64
_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def mix(word: int) -> int:
    """The output function on one word of 64 bits."""
    for shift, factor in _ROUNDS:
        word = (word ^ (word >> shift)) * factor % WORD
    return word


def outputs(start: int, first: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Outputs `first` to `first + count - 1` of the generator started at `start`: words as int64 (count,)."""
    return _mixed(torch.arange(count, device=device), (start + (first + 1) * _GAMMA) % WORD)


def outputs_at(start: int, numbers: torch.Tensor) -> torch.Tensor:
    """Outputs of these numbers (int64, 0 and up, any shape), as `outputs` gives them one after the other."""
    return _mixed(numbers.clone(), (start + _GAMMA) % WORD)


def _mixed(numbers: torch.Tensor, state: int) -> torch.Tensor:
    words = numbers.mul_(_signed(_GAMMA)).add_(_signed(state))
    for shift, factor in _ROUNDS:
        # int64 shifts copy the sign; the mask makes the shift logical. Products wrap, as they should.
        words.bitwise_xor_((words >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            words.mul_(_signed(factor))
    return words


def top_bits(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The uppermost `bits` bits (1 to 63) of words as int64: (count,) int64, from 0 to 2**bits - 1."""
    return (words >> (64 - bits)).bitwise_and_((1 << bits) - 1)


def _signed(word: int) -> int:
    """The int64 with the bits of a 64-bit word."""
    return word - WORD if word >= WORD // 2 else word
