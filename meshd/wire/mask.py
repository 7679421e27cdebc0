"""Which coordinates of a token cross the wire: at random by a seed both ends know, or the largest, positions sent.

DESIGN section 3, "The faithful mask". The generator and the column lists are normative (docs/masks.md, "Random
mask" and "Column lists").
"""

from __future__ import annotations

import torch

from meshd.errors import MismatchError
from meshd.splitmix import WORD, mix, outputs
from meshd.wire.bits import pack, packed_bytes, unpack

MOST_HIDDEN = 2**16

# Keys computed at a time. It bounds the memory; on a CPU they also stay in the cache, on other devices fewer launches
# are faster.
_CHUNK_CPU, _CHUNK_DEVICE = 2**18, 2**23


def random_columns(
    seed: int, boundary: int, tokens: int, hidden: int, keep: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The columns of each token that a random mask keeps: int64 (tokens, keep), ascending, on `device`.

    Exactly `keep` of `hidden` (at most 65536), every subset equally likely, independent between tokens, boundaries
    and seeds. A pure function of the integers given, the same on every device. seed: of the microbatch, modulo 2^64.
    Raises ValueError for numbers out of range.

    Every (token, column) has an output of SplitMix64 for its key; the `keep` smallest keys of a token win.
    """
    _check(hidden, keep)
    device = torch.device(device)
    start = mix(mix(seed % WORD) ^ boundary)
    rows = max(1, (_CHUNK_CPU if device.type == "cpu" else _CHUNK_DEVICE) // hidden)
    columns = torch.arange(hidden, device=device)
    column_bits = (1 << (hidden - 1).bit_length()) - 1
    kept = torch.empty(tokens, keep, dtype=torch.int64, device=device)
    for first in range(0, tokens, rows):
        count = min(rows, tokens - first)
        keys = outputs(start, first * hidden, count * hidden, device).view(count, hidden)
        # The column in the lowest bits: no two keys of a token are equal, so every device finds the same smallest.
        keys.bitwise_and_(~column_bits).bitwise_or_(columns)
        smallest = keys.topk(keep, dim=1, largest=False, sorted=False).values
        kept[first : first + count] = smallest.bitwise_and_(column_bits).sort(dim=1).values
    return kept


def top_columns(x: torch.Tensor, keep: int) -> torch.Tensor:
    """The `keep` columns of largest magnitude of each token: int64 (tokens, keep), ascending. x: (tokens, hidden)."""
    _check(x.shape[1], keep)
    return x.abs().topk(keep, dim=1, sorted=False).indices.sort(dim=1).values


def columns_bytes(tokens: int, hidden: int, keep: int) -> int:
    """Size of the packed columns of a tensor, exact."""
    low, marks = _layout(hidden, keep)
    return packed_bytes(tokens * keep, low) + packed_bytes(tokens * marks, 1)


def pack_columns(columns: torch.Tensor, hidden: int) -> torch.Tensor:
    """Columns as bytes: (columns_bytes(tokens, hidden, keep),) uint8. columns: int64 (tokens, keep), strictly
    ascending, under `hidden`.

    The cheaper of two forms, by (hidden, keep) alone. A bitmap: `hidden` marks per token. Or Elias and Fano's list:
    the low bits of every column as they are, and the ascending rest as marks, that of the i-th column at rest + i.
    """
    tokens, keep = columns.shape
    low, marks = _layout(hidden, keep)
    places = columns
    if low:
        places = (columns >> low) + torch.arange(keep, device=columns.device)
    bitmap = torch.zeros(tokens, marks, dtype=torch.bool, device=columns.device).scatter_(1, places, True)
    packed = pack(bitmap, 1)
    return torch.cat([pack(columns, low), packed]) if low else packed


def unpack_columns(packed: torch.Tensor, tokens: int, hidden: int, keep: int) -> torch.Tensor:
    """The inverse of `pack_columns`: int64 (tokens, keep), on the device of `packed`.

    Raises MismatchError for bytes that are not such columns: of another size, or not `keep` ascending columns under
    `hidden` for every token.
    """
    low, marks = _layout(hidden, keep)
    if len(packed) != columns_bytes(tokens, hidden, keep):
        raise MismatchError(
            f"{len(packed)} bytes of columns where {keep} of {hidden} for {tokens} tokens take "
            f"{columns_bytes(tokens, hidden, keep)}"
        )
    split = packed_bytes(tokens * keep, low)
    bitmap = unpack(packed[split:], 1, tokens * marks).view(tokens, marks)
    if bool((bitmap.sum(1) != keep).any()):
        raise MismatchError(f"columns: a token without exactly {keep} marks")
    columns = bitmap.nonzero()[:, 1].view(tokens, keep)
    if low:
        columns = columns - torch.arange(keep, device=packed.device)
        columns = (columns << low) | unpack(packed[:split], low, tokens * keep).view(tokens, keep)
        if bool((columns >= hidden).any()) or bool((columns[:, 1:] <= columns[:, :-1]).any()):
            raise MismatchError(f"columns of a token that do not ascend, or not under {hidden}")
    return columns


def _layout(hidden: int, keep: int) -> tuple[int, int]:
    """(low bits per column, marks per token) of packed columns; no low bits means a bitmap."""
    _check(hidden, keep)
    lists = [(low, ((hidden - 1) >> low) + keep) for low in range(1, (hidden - 1).bit_length())]
    return min([(0, hidden), *lists], key=lambda form: keep * form[0] + form[1])


def _check(hidden: int, keep: int) -> None:
    if not 1 <= keep <= hidden <= MOST_HIDDEN:
        raise ValueError(f"cannot keep {keep} of {hidden} columns (1 to all, of at most {MOST_HIDDEN})")
