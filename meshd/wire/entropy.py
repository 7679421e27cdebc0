"""Entropy-coded levels: scale classes, integer tables, and the rANS stream of docs/bitstream.md.

Both ends must compute the same integers, so nothing here that shapes the stream is a float: classes come from integer
scale indices, and tables are integers that the prior carries. Floats only estimate costs, and fit new tables at the
prior's author.

The coder is constriction's (https://bamler-lab.github.io/constriction); the stream is defined without it. It holds
the GIL while it works, so the stream's shards also keep every call under some two milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import constriction
import numpy as np
import numpy.typing as npt

from meshd.errors import MismatchError
from meshd.wire import bits

PRECISION = 24
SYMBOLS = 64
CLASSES = 104
UNIT_CLASS = 24
"""The class whose scale is one step; eight classes to an octave."""
CLASS_WIDTH = 8
"""Of the indices of scales and steps, in each class."""

_EVERY_CLASS = np.arange(CLASSES, dtype=np.uint8)
_SHARD_SYMBOLS = 65536
_HALF = SYMBOLS // 2
LOW_BITS: npt.NDArray[np.uint8] = np.maximum(0, (np.arange(CLASSES) - UNIT_CLASS) // 8 - 1).astype(np.uint8)
"""(CLASSES,): how many low bits of a level bypass the coder."""
UNCODED = 255
"""In place of a class: the value is not coded, and its level is 0."""
_LOW: npt.NDArray[np.uint8] = np.pad(LOW_BITS, (0, 256 - CLASSES))

# What a bit is worth in squared error, of a step squared: of two levels that are about as near, the cheaper one.
_BIT_WORTH = 0.1


def _laplacian(rounding: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """(CLASSES, SYMBOLS): chance of each symbol of a Laplacian coordinate of unit variance; rounding: (CLASSES,)."""
    rows = np.arange(CLASSES)[:, None]
    # The least level of every symbol but the first, in steps.
    least = np.arange(1 - _HALF, _HALF)[None, :] << LOW_BITS[:, None].astype(np.int64)
    # Level L >= 1 begins at |x| = L - rounding; what lies below a level L <= 0 begins at |x| = 1 - L - rounding.
    from_zero = np.where(least > 0, least, 1 - least) - rounding[:, None]
    beyond = 0.5 * np.exp(-np.sqrt(2) * from_zero * 2.0 ** ((UNIT_CLASS - rows) / 8))
    below = np.where(least > 0, 1 - beyond, beyond)
    return np.diff(below, axis=1, prepend=0.0, append=1.0)


def _rounding() -> npt.NDArray[np.float32]:
    """Where a level costs d bits more than the one below it, the values that take it begin half of d times the worth
    of a bit above the middle between both. d is that of levels 0 and 1 of a Laplacian; with low bits it is nearly 0."""
    shares = _laplacian(np.full(CLASSES, 0.4))
    more = np.log2(shares[:, _HALF] / shares[:, _HALF + 1]) / 2.0**LOW_BITS
    rounding: npt.NDArray[np.float32] = (0.5 - _BIT_WORTH / 2 * more.clip(0)).clip(-0.5).astype(np.float32)
    return rounding


ROUNDING = _rounding()
"""(CLASSES,): levels are sign(x) * floor(|x| / step + rounding) in each class; a choice of the sender."""

# `Tables.fit`: half width of the pool, the samples a row should rest on, and the most it needs.
_POOL_CLASSES = 4
_FEW_SAMPLES = 20_000
_MANY_SAMPLES = 1 << 18
# Weight of the Laplacian in a fitted row, in samples: nothing where there are many, and no symbol is starved.
_PRIOR_SAMPLES = 64

Levels = npt.NDArray[np.int32]
Classes = npt.NDArray[np.uint8]


def class_of(scale_index: npt.NDArray[np.integer], step_index: int) -> npt.NDArray[np.int32]:
    """The class of every coordinate of a token with a lift of 0, of the shape of `scale_index`; unlimited both ways.

    Indices are round(64 * log2(value)), so the scale of class c is about 2**((c - UNIT_CLASS) / 8) steps.
    """
    distance = scale_index.astype(np.int32) - np.int32(step_index)
    classes: npt.NDArray[np.int32] = ((distance + 4) >> 3) + UNIT_CLASS
    return classes


def level_bounds(classes: Classes) -> tuple[Levels, Levels]:
    """The least and the greatest level that a value of each class can take, of the shape of `classes`; 0 and 0 where
    it is not coded."""
    low, coded = _LOW[classes].astype(np.int32), classes != UNCODED
    return np.where(coded, -_HALF << low, 0), np.where(coded, (_HALF << low) - 1, 0)


@dataclass(frozen=True, eq=False)
class Tables:
    """How often each symbol comes in each class, in 2**-24ths.

    counts: (CLASSES, SYMBOLS) uint32, every entry at least 1, every row summing to 2**PRECISION. Raises MismatchError
    naming what is wrong, for they come from other peers.
    """

    counts: npt.NDArray[np.uint32]

    def __post_init__(self) -> None:
        counts = self.counts
        if counts.shape != (CLASSES, SYMBOLS) or counts.dtype != np.uint32:
            raise MismatchError(
                f"entropy tables: {(CLASSES, SYMBOLS)} uint32 expected, got {counts.shape} {counts.dtype}"
            )
        if not counts.all():
            row, symbol = np.argwhere(counts == 0)[0]
            raise MismatchError(f"entropy tables: row {row} gives symbol {symbol} no share; 1 is the least")
        sums = counts.sum(axis=1, dtype=np.uint64)
        if (sums != 1 << PRECISION).any():
            row = int((sums != 1 << PRECISION).argmax())
            raise MismatchError(f"entropy tables: row {row} sums to {sums[row]}, not {1 << PRECISION}")
        counts = counts.copy()
        counts.setflags(write=False)
        object.__setattr__(self, "counts", counts)

    @classmethod
    def default(cls) -> Tables:
        """Tables for unit Laplacian coordinates."""
        return cls(_whole(_laplacian(ROUNDING)))

    @classmethod
    def fit(
        cls,
        unit: npt.NDArray[np.floating],
        scale_index: npt.NDArray[np.integer],
        step_index: int,
    ) -> Tables:
        """Tables for coordinates distributed like these samples, at `step_index` and at steps about it.

        unit: (N, K) samples, each divided by its coordinate's scale and its token's gain; scale_index: (K,). The row
        of class c counts the levels of `unit` at that class's ratio of scale to step, over the coordinates whose class
        lies within 4 of c (their shapes are alike), or over the nearest ones while those have few samples. Not
        deterministic across machines: the author ships the result.
        """
        shares = _laplacian(ROUNDING)
        if unit.size:
            distance = scale_index.astype(np.int64) - step_index
            own = ((distance + 4) >> 3) + UNIT_CLASS
            for row in range(CLASSES):
                samples = _pool(unit, own, row)
                seen = np.bincount(_symbols_of(samples, row), minlength=SYMBOLS)
                total = samples.size + _PRIOR_SAMPLES
                shares[row] = (seen + _PRIOR_SAMPLES * shares[row]) / total
        return cls(_whole(shares))

    @classmethod
    def from_array(cls, array: npt.NDArray[np.uint32]) -> Tables:
        """Tables as `to_array` gave them. Raises MismatchError naming what is wrong."""
        return cls(array)

    def to_array(self) -> npt.NDArray[np.uint32]:
        """(CLASSES, SYMBOLS) uint32, read-only."""
        return self.counts

    @cached_property
    def cost(self) -> npt.NDArray[np.float32]:
        """(CLASSES, SYMBOLS): bits that a value takes, low bits included. For estimates."""
        return (PRECISION - np.log2(self.counts) + LOW_BITS[:, None]).astype(np.float32)

    @cached_property
    def mean_bits(self) -> npt.NDArray[np.float32]:
        """(CLASSES,): bits per value of a class whose symbols come as its table says."""
        shares = self.counts / (1 << PRECISION)
        mean: npt.NDArray[np.float32] = (shares * self.cost).sum(axis=1).astype(np.float32)
        return mean

    @cached_property
    def models(self) -> list[constriction.stream.model.Categorical]:
        """The rows as the coder wants them.

        It rounds cumulative floats down and adds one per symbol, so the counts less one, which float64 holds and sums
        exactly, give back the counts (checked by the test vectors).
        """
        rows = (self.counts - 1).astype(np.float64)
        return [constriction.stream.model.Categorical(row, lazy=False, perfect=False) for row in rows]


def most_bytes(classes: Classes) -> int:
    """The most that `encode` returns for levels of these classes (N, K), whatever they are: 3 bytes for each, besides
    low bits and the sizes of shards."""
    layout = _Layout.of(classes)
    return layout.low_bytes + sum(4 + 4 * _most_words(coded) for coded in layout.coded)


def overhead(tokens: int, hidden: int) -> int:
    """The most bytes that `encode` adds to the information content, for up to `hidden` coordinates: a size and the
    coder's state for each shard, and the padding of low bits."""
    shards = -(-tokens // max(1, _SHARD_SYMBOLS // hidden))
    return 12 * shards + len(set(LOW_BITS.tolist())) + 4


def encode(levels: npt.NDArray[np.integer], classes: Classes, tables: Tables) -> bytes:
    """The payload of docs/bitstream.md.

    levels: (N, K), moved into the bounds of their classes first; classes: (N, K) uint8, UNCODED where nothing is to
    cross. tables: of the prior.
    """
    if levels.shape != classes.shape:
        raise ValueError(f"levels of shape {levels.shape} for classes of shape {classes.shape}")
    layout = _Layout.of(classes)
    words: list[bytes] = []
    tails: dict[int, list[Levels]] = {width: [] for width in layout.widths}
    for (start, stop), counts in zip(layout.shards, layout.counts, strict=True):
        order, runs = _ordered(classes[start:stop], counts)
        values = levels[start:stop].reshape(-1)[order].astype(np.int32, copy=False)
        # At once for all runs: there may be a hundred short ones in a shard.
        least, most = (np.repeat(bound, counts) for bound in level_bounds(_EVERY_CLASS))
        np.clip(values, least, most, out=values)
        for row, first, last in runs:
            low = int(LOW_BITS[row])
            if low:
                run = values[first:last]
                tails[low].append(run.copy())  # packing takes the lowest bits
                run >>= low
        values += _HALF
        words.append(_encode_shard(values, runs, tables))
    sizes = np.array([len(shard) // 4 for shard in words], dtype="<u4")
    packed = (bits.pack_array(np.concatenate(pieces), width) for width, pieces in tails.items())
    return b"".join([sizes.tobytes(), *words, *packed])


def decode(payload: bytes | memoryview, classes: Classes, tables: Tables) -> Levels:
    """The inverse of `encode`: (N, K) int32, each within its class's `level_bounds`.

    Raises MismatchError for bytes that `encode` never makes of such levels, as far as sizes, the coder's end state
    and padding tell; other damage decodes to other levels, and a checksum must catch it. Sizes are compared before
    anything is allocated; only `classes`, which the caller has checked, decide how much.
    """
    layout = _Layout.of(classes)
    shards, tail = _split(memoryview(payload), layout)
    low = _unpack_low(tail, layout)
    taken = dict.fromkeys(low, 0)
    levels = np.zeros(classes.shape, dtype=np.int32)
    for (start, stop), words, counts in zip(layout.shards, shards, layout.counts, strict=True):
        order, runs = _ordered(classes[start:stop], counts)
        values = _decode_shard(words, len(order), runs, tables)
        values -= _HALF
        for row, first, last in runs:
            width = int(LOW_BITS[row])
            if width:
                run, at = values[first:last], taken[width]
                run <<= width
                run |= low[width][at : at + len(run)]
                taken[width] = at + len(run)
        levels[start:stop].reshape(-1)[order] = values
    return levels


_Run: TypeAlias = tuple[int, int, int]
"""A class, and the first place and the end of its values."""


@dataclass(frozen=True)
class _Layout:
    """Where everything lies. shards: the first token and the end of each; counts: (shards, CLASSES), its values by
    class; coded: how many values each codes; widths: how many low bits, ascending, to the number of values with so
    many."""

    shards: list[tuple[int, int]]
    counts: npt.NDArray[np.int64]
    coded: list[int]
    widths: dict[int, int]

    @classmethod
    def of(cls, classes: Classes) -> _Layout:
        if classes.ndim != 2 or classes.dtype != np.uint8:
            raise ValueError(
                f"classes in two dimensions of uint8 expected, got {classes.shape} {classes.dtype}"
            )
        tokens, columns = classes.shape
        length = max(1, _SHARD_SYMBOLS // max(1, columns))
        starts = range(0, tokens if columns else 0, length)
        shards = [(start, min(start + length, tokens)) for start in starts]
        counts = np.zeros((len(shards), 256), dtype=np.int64)
        for shard, (start, stop) in enumerate(shards):
            counts[shard] = np.bincount(classes[start:stop].reshape(-1), minlength=256)
        if counts[:, CLASSES:UNCODED].any():
            raise ValueError(f"classes below {CLASSES} expected, or {UNCODED}")
        counts = counts[:, :CLASSES]
        by_width = np.bincount(LOW_BITS, counts.sum(axis=0)).astype(np.int64).tolist()
        widths = {width: count for width, count in enumerate(by_width) if width and count}
        return cls(shards, counts, counts.sum(axis=1).tolist(), widths)

    @property
    def low_bytes(self) -> int:
        return sum(bits.packed_bytes(count, width) for width, count in self.widths.items())


def _ordered(classes: Classes, counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.intp], list[_Run]]:
    """The places of a shard's coded values, flat, in the order of the stream, and the classes they come in."""
    flat = classes.reshape(-1)
    # Sorting bytes is a radix sort; what is not coded sorts last.
    order = flat.argsort(kind="stable")[: counts.sum()]
    ends = counts.cumsum().tolist()
    return order, [(row, ends[row] - counts[row], ends[row]) for row in counts.nonzero()[0].tolist()]


def _most_words(coded: int) -> int:
    """No symbol makes the coder's state longer than by PRECISION bits (its share is at least 2**-PRECISION)."""
    return -(-coded * PRECISION // 32)


def _encode_shard(symbols: Levels, runs: list[_Run], tables: Tables) -> bytes:
    """Words of the symbols of one shard. The coder is a stack: what is read first goes in last."""
    coder = constriction.stream.stack.AnsCoder()
    for row, first, last in reversed(runs):
        coder.encode_reverse(symbols[first:last], tables.models[row])
    words: npt.NDArray[np.uint32] = coder.get_compressed()
    return words.astype("<u4", copy=False).tobytes()


def _decode_shard(words: npt.NDArray[np.uint32], count: int, runs: list[_Run], tables: Tables) -> Levels:
    """Symbols of one shard."""
    if len(words) and not words[-1]:
        raise MismatchError("entropy-coded levels: a shard ends in a word of zeros")
    coder = constriction.stream.stack.AnsCoder(words)
    symbols = np.empty(count, dtype=np.int32)
    for row, first, last in runs:
        symbols[first:last] = coder.decode(tables.models[row], last - first)
    if not coder.is_empty():
        raise MismatchError("entropy-coded levels: a shard holds more than its symbols")
    return symbols


def _unpack_low(tail: memoryview, layout: _Layout) -> dict[int, npt.NDArray[np.uint16]]:
    """The low bits of all levels, by how many there are, in the order of the stream."""
    low: dict[int, npt.NDArray[np.uint16]] = {}
    for width, count in layout.widths.items():
        size = bits.packed_bytes(count, width)
        low[width] = bits.unpack_array(tail[:size], width, count)
        tail = tail[size:]
    return low


def _split(payload: memoryview, layout: _Layout) -> tuple[list[npt.NDArray[np.uint32]], memoryview]:
    """The words of every shard, and the packed low bits. Raises MismatchError when the sizes do not fit."""
    head = 4 * len(layout.shards)
    if len(payload) < head + layout.low_bytes:
        raise MismatchError(
            f"entropy-coded levels: {len(payload)} bytes where sizes and low bits alone "
            f"take {head + layout.low_bytes}"
        )
    sizes = np.frombuffer(payload[:head], dtype="<u4").astype(np.int64)
    for coded, size in zip(layout.coded, sizes.tolist(), strict=True):
        most = _most_words(coded)
        if size > most:
            raise MismatchError(f"entropy-coded levels: a shard of {size} words where {most} are the most")
    want = head + 4 * int(sizes.sum()) + layout.low_bytes
    if len(payload) != want:
        raise MismatchError(f"entropy-coded levels: {len(payload)} bytes where the shards say {want}")
    tail = want - layout.low_bytes
    words = np.frombuffer(payload[head:tail], dtype="<u4").astype(np.uint32)
    return np.split(words, np.cumsum(sizes)[:-1]) if layout.shards else [], payload[tail:]


def _whole(shares: npt.NDArray[np.float64]) -> npt.NDArray[np.uint32]:
    """Shares of rows that sum to 1, as counts: at least 1 each, 2**PRECISION a row."""
    counts = 1 + np.floor(shares * ((1 << PRECISION) - SYMBOLS)).astype(np.int64)
    counts[np.arange(len(counts)), counts.argmax(axis=1)] += (1 << PRECISION) - counts.sum(axis=1)
    return counts.astype(np.uint32)


def _pool(unit: npt.NDArray[np.floating], own: npt.NDArray[np.int64], row: int) -> npt.NDArray[np.floating]:
    """Samples for class `row`: those of the coordinates within _POOL_CLASSES, or of the nearest ones while those
    are few; evenly spaced tokens of them where they are many."""
    distance = np.abs(own - row)
    nearest = np.argsort(distance, kind="stable")
    alike = int((distance <= _POOL_CLASSES).sum())
    enough = -(-_FEW_SAMPLES // len(unit))
    chosen = nearest[: max(alike, enough)]
    stride = max(1, chosen.size * len(unit) // _MANY_SAMPLES)
    return unit[::stride][:, chosen]


def _symbols_of(samples: npt.NDArray[np.floating], row: int) -> npt.NDArray[np.int32]:
    """Flat symbols of unit samples at the ratio of scale to step of class `row`."""
    scaled = samples.reshape(-1).astype(np.float32) * np.float32(2.0 ** ((row - UNIT_CLASS) / 8))
    levels = (np.sign(scaled) * np.floor(np.abs(scaled) + ROUNDING[row]).clip(0)).astype(np.int32)
    symbols: npt.NDArray[np.int32] = (levels >> int(LOW_BITS[row])).clip(-_HALF, _HALF - 1) + _HALF
    return symbols
