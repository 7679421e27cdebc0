"""A second writer and reader of docs/bitstream.md, in plain integers, for tests; shares no code with meshd.

`python tests/unit/bitstream_reference.py` writes the vectors of tests/data/bitstream anew. They are normative: they
change only together with the document.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "data" / "bitstream"
CLASSES, SYMBOLS, ONE = 104, 64, 1 << 24
UNCODED = 255

Rows = list[list[int]]


def pack(values: list[int], bits: int) -> bytes:
    stream = sum((value % (1 << bits)) << (bits * place) for place, value in enumerate(values))
    return stream.to_bytes((len(values) * bits + 7) // 8, "little")


def unpack(packed: bytes, bits: int, count: int) -> list[int]:
    assert len(packed) == (count * bits + 7) // 8
    stream = int.from_bytes(packed, "little")
    assert stream < 1 << count * bits
    return [(stream >> bits * place) % (1 << bits) for place in range(count)]


def class_of(scale_index: int, step_index: int, gain: int) -> int:
    """gain: the byte that crosses."""
    found = (scale_index - step_index + 4) // 8 + 24 + gain - 255
    return UNCODED if found < 0 or gain == 0 else min(found, CLASSES - 1)


def classes_of(base: list[int], gains: list[int]) -> Rows:
    """base: classes of tokens whose gain is the reference."""
    return [[class_of(8 * (row - 24), 0, gain) for row in base] for gain in gains]


def low_bits(row: int) -> int:
    return max(0, (row - 24) // 8 - 1)


def push(words: list[int], state: int, count: int, start: int) -> int:
    """Put one symbol on the stack: its share, and the shares of all symbols before it."""
    if state >> 40 >= count:
        words.append(state % (1 << 32))
        state >>= 32
    return (state // count << 24) + state % count + start


def pop(words: list[int], state: int, counts: list[int]) -> tuple[int, int]:
    """Take one symbol from the stack: (symbol, state)."""
    place = state % ONE
    symbol = start = 0
    while start + counts[symbol] <= place:
        start += counts[symbol]
        symbol += 1
    state = (state >> 24) * counts[symbol] + place - start
    if state < 1 << 32 and words:
        state = state << 32 | words.pop()
    return symbol, state


def shards(tokens: int, columns: int) -> Iterator[range]:
    length = max(1, 65536 // columns) if columns else 1
    for start in range(0, tokens if columns else 0, length):
        yield range(start, min(start + length, tokens))


def places(shard: range, classes: Rows) -> list[tuple[int, int]]:
    """(token, coordinate) of what is coded, in the order of the stream."""
    found = [(classes[token][column], token, column) for token in shard for column in range(len(classes[0]))]
    return [(token, column) for row, token, column in sorted(found) if row != UNCODED]


def encode(levels: Rows, classes: Rows, counts: Rows) -> bytes:
    sizes, coded = b"", b""
    tails: dict[int, list[int]] = {}
    starts = [[sum(row[:symbol]) for symbol in range(SYMBOLS)] for row in counts]
    for shard in shards(len(levels), len(levels[0]) if levels else 0):
        symbols = []
        for token, column in places(shard, classes):
            row = classes[token][column]
            low = low_bits(row)
            level = max(-32 << low, min((32 << low) - 1, levels[token][column]))
            symbols.append((row, (level >> low) + 32))
            if low:
                tails.setdefault(low, []).append(level % (1 << low))
        words: list[int] = []
        state = 0
        for row, symbol in reversed(symbols):
            state = push(words, state, counts[row][symbol], starts[row][symbol])
        while state:
            words.append(state % (1 << 32))
            state >>= 32
        sizes += struct.pack("<I", len(words))
        coded += struct.pack(f"<{len(words)}I", *words)
    return sizes + coded + b"".join(pack(tails[low], low) for low in sorted(tails))


def decode(payload: bytes, classes: Rows, counts: Rows) -> Rows:
    levels = [[0] * len(rows) for rows in classes]
    parts = list(shards(len(classes), len(classes[0]) if classes else 0))
    sizes = struct.unpack(f"<{len(parts)}I", payload[: 4 * len(parts)])
    at = 4 * len(parts)
    for shard, size in zip(parts, sizes, strict=True):
        words = list(struct.unpack(f"<{size}I", payload[at : at + 4 * size]))
        at += 4 * size
        state = 0
        while words and state < 1 << 32:
            state = state << 32 | words.pop()
        for token, column in places(shard, classes):
            row = classes[token][column]
            symbol, state = pop(words, state, counts[row])
            levels[token][column] = symbol - 32 << low_bits(row)
        assert state == 0
        assert not words
    coded = [place for shard in parts for place in places(shard, classes)]
    for low in range(1, 9):
        mine = [(token, column) for token, column in coded if low_bits(classes[token][column]) == low]
        size = (len(mine) * low + 7) // 8
        for (token, column), value in zip(mine, unpack(payload[at : at + size], low, len(mine)), strict=True):
            levels[token][column] += value
        at += size
    assert at == len(payload)
    return levels


def example_tables() -> Rows:
    """Tables for the vectors: in class c, symbol 32 + h has a share of about 1 / ((c + 1)^2 + (64 h)^2)."""
    counts = []
    for row in range(CLASSES):
        square = (row + 1) ** 2
        weights = [ONE * square // (square + (64 * (symbol - 32)) ** 2) for symbol in range(SYMBOLS)]
        shares = [1 + weight * (ONE - SYMBOLS) // sum(weights) for weight in weights]
        shares[32] += ONE - sum(shares)
        counts.append(shares)
    return counts


def noise(classes: Rows, seed: int) -> Rows:
    """Levels by a linear congruential generator: a value of class c spreads over about 2^((c - 24) / 8); one that is
    not coded is 0."""
    levels: Rows = []
    for rows in classes:
        levels.append([])
        for row in rows:
            drawn = []
            for _ in range(2):
                seed = (seed * 6364136223846793005 + 1442695040888963407) % (1 << 64)
                drawn.append((seed >> 33) % (1 + (1 << max(0, row - 16) // 8)))
            levels[-1].append(0 if row == UNCODED else drawn[0] - drawn[1])
    return levels


def cases() -> dict[str, tuple[list[int], list[int], Rows]]:
    """Name to (base classes, gain bytes, levels)."""
    every = [(41 * place) % CLASSES for place in range(CLASSES)]
    many = [(7 * place) % 60 for place in range(300)]
    wander = [255 - (11 * token) % 40 for token in range(440)]
    falling = [255, 247, 200, 0, 251, 1, 254, 231, 255]
    return {
        "worked example": ([24, 8, 44], [255, 251, 241], [[1, -20, 5], [0, 2, -3], [-1, 0, 12]]),
        "every class, in no order": (every, [255] * 9, noise(classes_of(every, [255] * 9), seed=1)),
        "tokens of all gains": (every, falling, noise(classes_of(every, falling), seed=3)),
        "beyond the bounds": (
            [0, 40, 103],
            [255] * 4,
            [[40, 70, 9000], [-40, -70, -9000], [31, 63, 8191], [-32, -64, -8192]],
        ),
        "above the last class": ([24, 103, 160], [255, 190], [[3, -300, 8000], [0, 9, -99]]),
        "least symbols: no words": ([5, 24], [255] * 3, [[-32, -32]] * 3),
        "nothing coded": ([5, 24], [0, 200], [[0, 0]] * 2),
        "no tokens": ([24, 44], [], []),
        "no coordinates": ([], [255, 255], [[], []]),
        "three shards": (many, wander, noise(classes_of(many, wander), seed=2)),
    }


def write() -> None:
    counts = example_tables()
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "tables.u32").write_bytes(b"".join(struct.pack("<64I", *row) for row in counts))
    vectors = []
    for name, (base, gains, levels) in cases().items():
        payload = encode(levels, classes_of(base, gains), counts)
        vector = {"name": name, "base": base, "gains": gains, "bytes": len(payload)}
        if len(payload) <= 4096:
            vector |= {"levels": levels, "payload": payload.hex()}
        else:
            plain = b"".join(struct.pack(f"<{len(row)}i", *row) for row in levels)
            vector |= {"levels_sha256": _sha256(plain), "payload_sha256": _sha256(payload)}
        vectors.append(json.dumps(vector))
    (FOLDER / "vectors.json").write_text("[\n" + ",\n".join(vectors) + "\n]\n")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    write()
