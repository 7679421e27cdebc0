"""Which replica of the next stage gets a microbatch. Pure: clock and randomness come in.

Replicas are ordered by virtual finish time (DESIGN section 6): what they still owe us, at the pace that they have
shown us. Nothing is read from declarations.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass

# Weight of the newest observation in a replica's pace.
_EWMA = 0.2
# A pace that was last seen so long ago says little of now: a replica that was slow for a while, and is not asked since,
# would never be asked again. It is tried once, and what it shows then counts alone.
_PACE_S = 30.0
# A replica that failed is left alone for this long, doubled at every failure in a row.
_FIRST_PENALTY_S = 1.0
_LONGEST_PENALTY_S = 60.0
# BUSY without a later Credit (it may have been lost with a stream): ask again after so long.
_BUSY_S = 2.0


@dataclass
class _Replica:
    in_flight: int = 0
    service_s: float | None = None  # from sending to result, divided by what was in flight
    seen_at: float = 0.0  # when that was measured last
    busy_until: float = 0.0
    failures: int = 0
    failed_until: float = 0.0

    def stale(self, now: float) -> bool:
        """Whether its pace is as good as unknown. Not while it is being tried."""
        return self.in_flight == 0 and now - self.seen_at > _PACE_S


class Router:
    """Pace, load and failures of the replicas that one peer sends to. Times are monotonic seconds."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._replicas: dict[str, _Replica] = {}

    def _of(self, peer: str) -> _Replica:
        return self._replicas.setdefault(peer, _Replica())

    def order(self, peers: Iterable[str], now: float) -> list[str]:
        """Those of `peers` that may be asked now, best first: earliest virtual finish, ties at random.

        A replica whose pace is not known yet counts as fast as the fastest known: it is tried early, and its pace
        becomes known. So does one whose pace was not seen for long.
        """
        usable = [
            (peer, self._of(peer))
            for peer in peers
            if self._of(peer).busy_until <= now and self._of(peer).failed_until <= now
        ]
        known = [replica.service_s for _, replica in usable if replica.service_s is not None]
        default = min(known, default=1.0)

        def finish(item: tuple[str, _Replica]) -> tuple[float, float]:
            replica = item[1]
            pace = replica.service_s
            if pace is None or replica.stale(now):
                pace = default
            return (replica.in_flight + 1) * pace, self._rng.random()

        return [peer for peer, _ in sorted(usable, key=finish)]

    def sent(self, peer: str) -> None:
        self._of(peer).in_flight += 1

    def returned(self, peer: str, elapsed_s: float, now: float) -> None:
        """A result came back `elapsed_s` after it was sent."""
        replica = self._of(peer)
        pace = elapsed_s / max(1, replica.in_flight)
        replica.in_flight = max(0, replica.in_flight - 1)
        if replica.service_s is None or now - replica.seen_at > elapsed_s + _PACE_S:
            replica.service_s = pace
        else:
            replica.service_s = (1 - _EWMA) * replica.service_s + _EWMA * pace
        replica.seen_at = now
        replica.failures = 0

    def abandoned(self, peer: str) -> None:
        """What was sent is not coming back from there."""
        replica = self._of(peer)
        replica.in_flight = max(0, replica.in_flight - 1)

    def failed(self, peer: str, now: float) -> None:
        """It could not be reached or broke off: set it aside for a growing time."""
        replica = self._of(peer)
        # Many microbatches are lost with one stream: that is one failure, not many.
        if replica.failed_until > now:
            return
        replica.failures += 1
        penalty = min(_LONGEST_PENALTY_S, _FIRST_PENALTY_S * 2.0 ** (replica.failures - 1))
        replica.failed_until = now + penalty * (0.75 + 0.5 * self._rng.random())

    def busy(self, peer: str, now: float) -> None:
        self._of(peer).busy_until = now + _BUSY_S

    def credit(self, peer: str) -> None:
        """It has room again."""
        self._of(peer).busy_until = 0.0

    def forget(self, known: Collection[str], now: float) -> None:
        """Peers other than `known` have gone: nothing of them is kept for longer than they are set aside."""
        for peer, replica in list(self._replicas.items()):
            if peer not in known and not replica.in_flight and replica.failed_until <= now:
                del self._replicas[peer]

    def in_flight(self, peer: str) -> int:
        return self._of(peer).in_flight
