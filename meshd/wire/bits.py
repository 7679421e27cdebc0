"""Whole numbers of a few bits each, packed without gaps: the one bit stream of the wire (docs/bitstream.md).

Bit j of value i is bit `i * bits + j` of the stream, and bit n of the stream is bit n % 8, least significant first,
of byte n // 8. Unused bits of the last byte are zero, so equal values are equal bytes.

Eight values fill `bits` bytes exactly. So packing is at most `bits + 7` shifts, each over an eighth of the values,
whatever the device; the values are transposed first, for every eighth to lie in one piece. No step needs more memory
than the values as int32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from meshd.errors import MismatchError

MOST_BITS = 31


def packed_bytes(count: int, bits: int) -> int:
    """Size of `count` packed values: ceil(count * bits / 8)."""
    return (count * bits + 7) // 8


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The lowest `bits` bits (1 to 31) of every value, in two's complement: (packed_bytes(numel, bits),) uint8.

    values: bool or integers of any shape, in row-major order, on any device. A nonnegative value below 2**bits comes
    back from `unpack` as it was.
    """
    _check_bits(bits)
    count = values.numel()
    flat = values.reshape(-1)
    if count % 8:
        flat = torch.nn.functional.pad(flat, (0, -count % 8))
    places = flat.view(-1, 8).t().to(torch.int32, memory_format=torch.contiguous_format)
    packed = torch.zeros((bits, places.shape[1]), dtype=torch.uint8, device=values.device)
    for place in range(8):
        value = places[place] & ((1 << bits) - 1)
        for byte, shift in _overlaps(place, bits):
            # Bits shifted out of the 32 belong to no byte of this group; uint8 keeps the lowest eight.
            packed[byte] |= (value << shift if shift >= 0 else value >> -shift).to(torch.uint8)
    return packed.t().reshape(-1)[: packed_bytes(count, bits)]


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The inverse of `pack`: (count,) int32 on the device of `packed` ((bytes,) uint8).

    Raises MismatchError when the number of bytes is not that of `count` values, before anything is allocated, or
    when unused bits are set.
    """
    _check_bits(bits)
    want = packed_bytes(count, bits)
    if len(packed) != want:
        raise MismatchError(f"{len(packed)} bytes where {count} values of {bits} bits take {want}")
    used = count * bits % 8
    if used and int(packed[-1]) >> used:
        raise MismatchError(f"bits set after the last of {count} values of {bits} bits, where zeros belong")
    if want % bits:
        packed = torch.nn.functional.pad(packed, (0, -want % bits))
    octets = packed.view(-1, bits).t().contiguous()
    values = torch.zeros((8, octets.shape[1]), dtype=torch.int32, device=packed.device)
    for place in range(8):
        value = values[place]
        for byte, shift in _overlaps(place, bits):
            octet = octets[byte].to(torch.int32)
            value |= octet >> shift if shift >= 0 else octet << -shift
        value &= (1 << bits) - 1
    return values.t().reshape(-1)[:count]


def _overlaps(place: int, bits: int) -> Iterator[tuple[int, int]]:
    """(byte, shift) for every byte of a group that holds bits of its value `place`: the byte has `value << shift`."""
    first = place * bits
    for byte in range(first // 8, (first + bits - 1) // 8 + 1):
        yield byte, first - 8 * byte


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= MOST_BITS:
        raise ValueError(f"{bits} bits per value, where 1 to {MOST_BITS} can be packed")
