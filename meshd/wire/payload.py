"""Parts that the payloads of the masked family are put together from: gains, int8 values, and a reader."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from meshd.errors import MismatchError
from meshd.wire.codec import tensor_bytes, tensor_from

REFERENCE = struct.Struct("<f")
"""The gain that a frame's other gains are counted from."""

# Gains are an eighth of an octave apart: the steps that they scale need not be finer than that.
_OCTAVE = 8
_TINY = torch.finfo(torch.float32).tiny


def gain_to_127(x: Tensor) -> Tensor:
    """(N, 1): the gain that brings a token's values to 127 at most."""
    return x.abs().amax(1, keepdim=True) / 127


def to_int8(x: Tensor) -> Tensor:
    return x.round().clamp(-127, 127).to(torch.int8)


def power_of_two(x: Tensor) -> Tensor:
    """(N, 1): the power of two at or below each token's largest value; 1 for a token of next to nothing."""
    peak = x.abs().amax(1, keepdim=True)
    _, exponent = torch.frexp(peak)  # exact: a logarithm of the largest floats rounds up to infinity's
    return torch.where(peak >= _TINY, torch.ldexp(torch.ones_like(peak), exponent - 1), 1.0)


def gains(gain: Tensor, peak: Tensor) -> tuple[float, Tensor, Tensor]:
    """Gains as they cross: (reference, index, gain).

    gain, peak: (N, 1), their product is what crosses. index: uint8; `reference * 2^((index - 255) / 8)` is the gain,
    rounded up; 0 stands for a token of zeros. The gain returned is that which the other end will use, less peak.
    """
    whole = (gain * peak).clamp_max(torch.finfo(torch.float32).max)
    reference = float(whole.amax()) if len(whole) else 0.0
    octaves = (whole / max(reference, _TINY)).log2()
    index = (octaves * _OCTAVE).ceil().clamp(-255, 0) + 255
    used = reference * torch.exp2((index - 255) / _OCTAVE) / peak
    # A token that is to be zero there is divided by infinity here.
    used = torch.where(index > 0, used.clamp_min(_TINY), torch.inf)
    return reference, index.to(torch.uint8), used


def read_gains(raw: Cursor, tokens: int) -> tuple[float, Tensor, Tensor]:
    """(reference, index (N, 1) uint8, gain (N, 1)) of `gains`. Raises MismatchError for a reference that is none."""
    (reference,) = REFERENCE.unpack(raw.bytes(REFERENCE.size))
    if not (math.isfinite(reference) and reference >= 0):
        raise MismatchError(f"a gain of {reference}")
    index = raw.take(tokens)[:, None]
    gain = reference * torch.exp2((index.float() - 255) / _OCTAVE)
    return reference, index, torch.where(index > 0, gain, 0.0)


def joined(parts: Sequence[Tensor | bytes]) -> bytes:
    return b"".join(part if isinstance(part, bytes) else tensor_bytes(part) for part in parts)


class Cursor:
    """Reads a payload from front to back; raises MismatchError at its end."""

    def __init__(self, payload: bytes, name: str, device: torch.device) -> None:
        self._payload, self._name, self.device, self.at = payload, name, device, 0

    def bytes(self, count: int) -> bytes:
        piece = self._payload[self.at : self.at + count]
        if len(piece) < count:
            raise MismatchError(f"{self._name}: {len(self._payload)} bytes, where more were expected")
        self.at += count
        return piece

    def typed(self, dtype: torch.dtype, tokens: int, columns: int) -> Tensor:
        """(tokens, columns) float32."""
        piece = self.bytes(tokens * columns * dtype.itemsize)
        return tensor_from(piece, dtype, (tokens, columns)).to(self.device).float()

    def take(self, count: int) -> Tensor:
        """(count,) uint8."""
        return tensor_from(self.bytes(count), torch.uint8, (count,)).to(self.device)

    def end(self) -> None:
        if self.at != len(self._payload):
            raise MismatchError(f"{self._name}: {len(self._payload) - self.at} bytes too many")
