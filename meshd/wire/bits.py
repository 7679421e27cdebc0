"""Whole numbers of a few bits each, packed without gaps: the one bit stream of the wire (docs/bitstream.md).

Bit j of value i is bit `i * bits + j` of the stream, and bit n of the stream is bit n % 8, least significant first,
of byte n // 8. Unused bits of the last byte are zero, so equal values are equal bytes.

Eight values fill `bits` bytes exactly. So packing is at most `bits + 7` shifts, each over an eighth of the values,
whatever the device; the values are transposed first, for every eighth to lie in one piece. No step needs more memory
than the values as int32.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
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
    _check_packed(len(packed), int(packed[-1]) if len(packed) else 0, bits, count)
    if len(packed) % bits:
        packed = torch.nn.functional.pad(packed, (0, -len(packed) % bits))
    octets = packed.view(-1, bits).t().contiguous()
    values = torch.zeros((8, octets.shape[1]), dtype=torch.int32, device=packed.device)
    for place in range(8):
        value = values[place]
        for byte, shift in _overlaps(place, bits):
            octet = octets[byte].to(torch.int32)
            value |= octet >> shift if shift >= 0 else octet << -shift
        value &= (1 << bits) - 1
    return values.t().reshape(-1)[:count]


def pack_array(values: npt.NDArray[np.integer], bits: int) -> bytes:
    """`pack` of at most 16 bits, for arrays on the CPU: faster there, for 16 bytes a value on the way."""
    octets = values.astype("<u2").view(np.uint8).reshape(-1, 2)
    single = np.unpackbits(octets, axis=1, count=bits, bitorder="little")
    return np.packbits(single.reshape(-1), bitorder="little").tobytes()


def unpack_array(packed: bytes | memoryview, bits: int, count: int) -> npt.NDArray[np.uint16]:
    """The inverse of `pack_array`: (count,). Raises as `unpack`."""
    octets = np.frombuffer(packed, dtype=np.uint8)
    _check_packed(len(octets), int(octets[-1]) if len(octets) else 0, bits, count)
    single = np.unpackbits(octets, count=count * bits, bitorder="little").reshape(count, bits)
    values = np.zeros((count, 2), dtype=np.uint8)
    found = np.packbits(single, axis=1, bitorder="little")
    values[:, : found.shape[1]] = found
    return values.view("<u2").reshape(-1).astype(np.uint16, copy=False)


def _check_packed(size: int, last: int, bits: int, count: int) -> None:
    """Raises MismatchError for a number of bytes that is not that of `count` values, and for unused bits that are set
    in the last byte."""
    want = packed_bytes(count, bits)
    if size != want:
        raise MismatchError(f"{size} bytes where {count} values of {bits} bits take {want}")
    used = count * bits % 8
    if used and last >> used:
        raise MismatchError(f"bits set after the last of {count} values of {bits} bits, where zeros belong")


def _overlaps(place: int, bits: int) -> Iterator[tuple[int, int]]:
    """(byte, shift) for every byte of a group that holds bits of its value `place`: the byte has `value << shift`."""
    first = place * bits
    for byte in range(first // 8, (first + bits - 1) // 8 + 1):
        yield byte, first - 8 * byte


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= MOST_BITS:
        raise ValueError(f"{bits} bits per value, where 1 to {MOST_BITS} can be packed")
