"""The grammar of names that carry numbers: `NAME` or `NAME:key=value,key=value`, as codecs and correctors have them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from meshd.errors import ConfigError

# A codec's name comes with every frame, from strangers too.
MAX_NAME = 160


@dataclass(frozen=True)
class Number:
    """What a key's number may be: from `low` (over it, where `over`) to `high`. whole: without a fraction."""

    low: float
    high: float
    over: bool = False
    whole: bool = False

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        start = f"over {self.low:g}, at most" if self.over else f"from {self.low:g} to"
        return f"{kind} {start} {self.high:g}"

    def holds(self, value: float) -> bool:
        if not self.low <= value <= self.high:  # also false for nan
            return False
        return not (self.over and value == self.low) and not (self.whole and value % 1)


def split(text: str, field: str, names: Collection[str], kind: str) -> tuple[str, dict[str, str]]:
    """The name and its keys' values. names: those that there are, of this kind ("codec").

    Raises ConfigError with `field` for a text that is too long, another name, or a key that is not one key=value.
    """
    if len(text) > MAX_NAME:
        raise ConfigError(
            field, text[:MAX_NAME], f"longer than {MAX_NAME} characters", "leave defaults out of it"
        )
    name, colon, rest = text.partition(":")
    if name not in names:
        raise ConfigError(field, text, f"no such {kind}", f"one of {', '.join(sorted(names))}")
    options: dict[str, str] = {}
    for item in rest.split(",") if colon else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key in options:
            raise ConfigError(field, text, f"{item!r} is not one key=value", "NAME:key=value,key=value")
        options[key] = value
    return name, options


def number(key: str, value: str, allowed: Number, text: str, field: str) -> float:
    """The value of a key of `text`. Raises ConfigError with `field` where it is no number that is allowed."""
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not allowed.holds(found):
        raise ConfigError(field, text, f"{key}={value}", f"{key} is {allowed}")
    return found
