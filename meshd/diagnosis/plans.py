"""Which codecs are put at which boundaries, and what people write to say so."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshd.config.runspec import WireSpec
from meshd.errors import ConfigError
from meshd.wire import codec_named

_FIX = "write FORWARD/BACKWARD, or one such pair for each boundary with `;` between them"
# Of the bytes of both directions: errors of activations harm more than those of gradients (DESIGN section 3).
_FORWARD_SHARE = 0.75
# About what a header takes, codec and prior named.
_HEADER_BYTES = 100
_RATIOS = (16, 32)
_FINENESS = 10_000


class Pair(NamedTuple):
    """Names of the codecs of one boundary."""

    forward: str
    backward: str

    def __str__(self) -> str:
        return self.forward if self.forward == self.backward else f"{self.forward}/{self.backward}"

    @property
    def needs_prior(self) -> bool:
        return any(codec_named(name).needs_prior for name in self)


@dataclass(frozen=True)
class Plan:
    """Codecs for all boundaries of a model. name: for people; pairs: by boundary."""

    name: str
    pairs: tuple[Pair, ...]

    @property
    def needs_prior(self) -> bool:
        return any(pair.needs_prior for pair in self.pairs)


def parse_plan(text: str, boundaries: int, field: str = "--codec") -> Plan:
    """The plan that `text` means: `FORWARD/BACKWARD` or `BOTH`, for all boundaries, or for each of them, with `;`
    between. Raises ConfigError with `field`."""
    pairs = []
    for part in text.split(";"):
        names = [name.strip() for name in part.split("/")]
        if len(names) > 2 or not all(names):
            raise ConfigError(field, text, f"{part.strip()!r} is no pair of codecs", _FIX)
        for name in names:
            codec_named(name, field)
        pairs.append(Pair(names[0], names[-1]))
    if len(pairs) not in (1, boundaries):
        raise ConfigError(field, text, f"{len(pairs)} pairs for {boundaries} boundaries", _FIX)
    return Plan(text.strip(), tuple(pairs * boundaries if len(pairs) == 1 else pairs))


def spec_plan(wire: WireSpec, boundaries: int) -> Plan:
    """The run spec's own codecs. Raises ConfigError naming the field of one that is not known."""
    pairs = []
    for number in range(boundaries):
        table = "wire" if number not in wire.boundary else f"wire.boundary.{number}"
        codecs = wire.boundary.get(number, wire)
        codec_named(codecs.forward, f"{table}.forward")
        codec_named(codecs.backward, f"{table}.backward")
        pairs.append(Pair(codecs.forward, codecs.backward))
    name = f"run spec ({pairs[0]})" if len(set(pairs)) == 1 else "run spec"
    return Plan(name, tuple(pairs))


def reference_plans(rows: int, columns: int, hidden: int, token_id_bytes: int, boundaries: int) -> list[Plan]:
    """Codecs to compare with: without a choice of bits, and then the masked family at equal bytes, everything counted.

    rows, columns: sequences and tokens of a microbatch. A codec that cannot be had in so few bytes is left out.
    """
    plans = [Plan(name, (Pair(name, name),) * boundaries) for name in ("dense", "int8", "int4")]
    shape = (rows, columns, hidden)
    tokens = rows * columns
    for ratio in _RATIOS:
        room = tokens * (4 * hidden / ratio - token_id_bytes) - 2 * _HEADER_BYTES
        shares = (_FORWARD_SHARE * room, (1 - _FORWARD_SHARE) * room)
        for family, choose in _FAMILIES.items():
            forward, backward = (choose(share, shape) for share in shares)
            if forward and backward:
                plans.append(Plan(f"{family} {ratio}x", (Pair(forward, backward),) * boundaries))
    return plans


def _coded(room: float, shape: Sequence[int]) -> str | None:
    """Entropy-coded: its rate is held at its bits, and `wire_bytes` only bounds it."""
    share = int(_FINENESS * 8 * room / math.prod(shape)) / _FINENESS
    return f"spectral:bits={share:g}" if share > 0 else None


def _largest(key: str, codec: str, most: int) -> Callable[[float, Sequence[int]], str | None]:
    """A fixed-rate codec with the largest value of `key`, up to `most`, that fits."""

    def choose(room: float, shape: Sequence[int]) -> str | None:
        low, high = 0, most * _FINENESS
        while low < high:
            middle = (low + high + 1) // 2
            name = f"{codec}:{key}={middle / _FINENESS:g}"
            fits = codec_named(name).wire_bytes(shape) <= room
            low, high = (middle, high) if fits else (low, middle - 1)
        return f"{codec}:{key}={low / _FINENESS:g}" if low else None

    return choose


_FAMILIES: dict[str, Callable[[float, Sequence[int]], str | None]] = {
    "spectral": _coded,
    "lloyd": _largest("bits", "lloyd", 16),
    "leading": _largest("keep", "leading", 1),
    "topk": _largest("keep", "topk", 1),
    "random": _largest("keep", "random", 1),
}
