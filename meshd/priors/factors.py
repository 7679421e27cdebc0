"""Bases and shares of energy in a few bits each, as weight priors carry them (docs/priors.md).

Entries of a gradient's singular vectors are far from alike: a few dimensions hold most of them. Signs that both ends
draw and a Hartley transform (Bracewell, "Discrete Hartley transform", 1983; orthonormal, its own inverse) spread every
column evenly, so that one quantizer for a unit Gaussian fits all of it, without a scale. With 3 bits the cosine of a
gradient's mean to what comes back of it is 0.97, where it is 0.6 to 0.9 without.
"""

from __future__ import annotations

import math

import torch

from meshd.splitmix import outputs, top_bits
from meshd.wire.bits import pack, packed_bytes, unpack
from meshd.wire.quantize import dequantize, lloyd_max, quantize

BITS = 3
# Eighths of an octave: a share is 2^(-(n - 1) / 8), n from 1; 0 stands for 0.
_OCTAVE, _MOST = 8, 255


def basis_bytes(rows: int, rank: int) -> int:
    """Size of a packed basis."""
    return packed_bytes(rows * rank, BITS)


def packed_basis(basis: torch.Tensor) -> torch.Tensor:
    """(basis_bytes,) uint8 on the CPU. basis: (n, r), of columns of norm 1."""
    spread = _hartley(basis.detach().cpu().float() * _signs(len(basis))[:, None])
    return pack(quantize(spread * math.sqrt(len(basis)), lloyd_max(BITS)), BITS)


def unpacked_basis(packed: torch.Tensor, rows: int, rank: int) -> torch.Tensor:
    """(rows, rank) float32, of columns of a norm near 1, about orthogonal. Raises MismatchError for another number of
    bytes, or padding that is not zero."""
    index = unpack(packed, BITS, rows * rank).view(rows, rank)
    return _hartley(dequantize(index, lloyd_max(BITS)) / math.sqrt(rows)) * _signs(rows)[:, None]


def packed_shares(shares: torch.Tensor) -> torch.Tensor:
    """uint8, of the shape of `shares`, which are 0 to 1."""
    number = (1 - _OCTAVE * shares.detach().cpu().double().log2()).round()
    return torch.where(number <= _MOST, number.clamp_min(1), 0).to(torch.uint8)


def unpacked_shares(packed: torch.Tensor) -> torch.Tensor:
    """float32, within 4.5 % of what was packed; below 2^-31.75 it is 0."""
    return torch.where(packed > 0, torch.exp2((1 - packed.float()) / _OCTAVE), 0.0)


def _hartley(x: torch.Tensor) -> torch.Tensor:
    """Of every column of x (n, r): sum over k of x[k] (cos + sin)(2 pi j k / n) / sqrt(n)."""
    transformed: torch.Tensor = torch.fft.fft(x, dim=0, norm="ortho")
    return transformed.real - transformed.imag


def _signs(count: int) -> torch.Tensor:
    """(count,) float32, 1 or -1: by the count alone."""
    return 1.0 - 2.0 * top_bits(outputs(count, 0, count), 1).float()
