"""Holding an entropy-coded rate at its budget, from one message to the next."""

from __future__ import annotations

import math

# Index units per octave of the step (meshd.wire.entropy).
_OCTAVE = 64
# Share of the debt that the next message makes good, and share of a message's error that changes the base.
_PAY, _LEARN = 1 / 8, 1 / 4
# Messages worth of bytes that may be owed or saved up: beyond it the past is forgotten.
_MOST_OWED = 4.0
_MOST_OFFSET = 6 * _OCTAVE


class RateLoop:
    """Integral control of the quantizer's step: `offset` is added to the step that the prior's model asks for.

    Bits that were spent over or under the budget are a debt, in messages; the step makes it good over the next ones,
    so that the mean over messages meets the budget though single messages do not. One per sender, boundary and
    direction; pure.
    """

    def __init__(self) -> None:
        self._base = 0.0
        self._owed = 0.0

    @property
    def offset(self) -> int:
        """Of the step's index, in 1/64 octaves: positive is coarser."""
        wanted = self._base + _OCTAVE * _PAY * self._owed
        return round(min(max(wanted, -_MOST_OFFSET), _MOST_OFFSET))

    def spent(self, bits: float, budget: float, offset: int) -> None:
        """Tell what a message took and should have taken, in bits, and the offset it was written with."""
        if budget <= 0 or bits <= 0:
            return
        ratio = bits / budget
        self._owed = min(max(self._owed + ratio - 1, -_MOST_OWED), _MOST_OWED)
        # About an octave of step per octave of rate, at the rates that matter here.
        aimed = offset + _OCTAVE * math.log2(min(max(ratio, 0.25), 4.0))
        self._base += _LEARN * (aimed - self._base)
