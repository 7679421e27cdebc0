"""How much of the values an exchange may cover for a peer's exchanges to keep within a rate. Pure."""

from __future__ import annotations

from meshd.gossip.coordinates import MOST_SUBSET

# Weight of the newest measurement in a running mean.
_NEWEST = 0.2
# Of what the link gives while an exchange lasts, exchanges may take this share on average: the rest is the pipeline's.
_LINK_SHARE = 0.5
# Of fewer bytes the time tells how far away a partner is, not how much the link carries.
_TELLING = 1 << 18


def affordable_subset(values: int, bits: int, interval_s: float, bps: float) -> int:
    """Of how many values one is exchanged, for exchanges every `interval_s` seconds to send no more than `bps` bits a
    second: the smallest power of two, at most MOST_SUBSET. Powers of two: so that partners with about the same budget
    choose the same.
    """
    subset = 1
    while subset < MOST_SUBSET and values * bits > subset * bps * interval_s:
        subset *= 2
    return subset


class Budget:
    """Of one peer: `bps` bits a second at most, and no more than its link gives."""

    def __init__(self, bps: int) -> None:
        self._bps = bps
        self._last_step: float | None = None
        self._step_s = self._link_bps = 0.0  # running means; 0: not measured yet

    def stepped(self, now: float) -> None:
        """An inner step has been taken at this time, in seconds."""
        if self._last_step is not None:
            self._step_s = _mean(self._step_s, now - self._last_step)
        self._last_step = now

    def sent(self, count: int, seconds: float) -> None:
        """An exchange has sent so many bytes in so long."""
        if seconds > 0.0 and count >= _TELLING:
            self._link_bps = _mean(self._link_bps, 8 * count / seconds)

    def subset(self, current: int, values: int, bits: int, every: int) -> int:
        """What exchanges every so many steps may cover: one value of so many. Too much is cut at once; a little room is
        not taken, for a change begins the coverage of the values anew."""
        if not self._bps or not self._step_s:
            return current
        bps = min(self._bps, _LINK_SHARE * self._link_bps) if self._link_bps else self._bps
        wanted = affordable_subset(values, bits, every * self._step_s, bps)
        return wanted if wanted > current or wanted * 4 <= current else current


def _mean(before: float, measured: float) -> float:
    return before + _NEWEST * (measured - before) if before else measured
