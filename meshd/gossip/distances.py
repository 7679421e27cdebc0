"""What a replica knows of its partners' distances: the swarm's statistics, by which one that is far outside shows.

Clipping toward the own value as in He, Karimireddy and Jaggi, "Byzantine-robust decentralized learning via
ClippedGossip", 2022, with two differences: the radius comes from the distances themselves, and beyond it a partner's
pull does not stay as it is but falls, so that one who keeps far away pulls least.
"""

from __future__ import annotations

import math
import statistics

# Up to so many times the usual distance a partner counts in full; beyond it, its pull falls with this power of the
# distance; beyond FAR times it is refused.
NEAR, FALL, FAR = 1.5, 6.0, 100.0
# Who has learned this share of what a replica has, or more, is abreast of it. Usual distances of which one is this
# share of the other, or more, are alike.
_ABREAST, _ALIKE = 0.6, 0.5
_MOST_PARTNERS = 64
# Of fewer partners a median says nothing: one of two may be the bad one.
_ENOUGH = 3


def restraint(usual: float, distance: float) -> float:
    """Factor on a replica's move, 0 to 1, by how usual it is to be that far from a partner. Pure."""
    return 1.0 if distance <= NEAR * usual else (NEAR * usual / distance) ** FALL


def regard(
    usual: float, learned: float, partners_usual: float, partners_learned: float, distance: float
) -> float:
    """Factor on a replica's move toward a partner, 0 to 1. Pure.

    usual: distance to others that each is used to; 0: it knows too few, and twice what it has learned takes its place:
    what two learn from different data is up to half as much again apart as from the base. learned: distance to the
    base. All are root mean squares.

    Of two that are abreast of each other and used to about the same it is the same, so that their moves cancel: no
    partner can stretch what a replica is used to. One that has learned much less moves as it likes and moves the other
    little: it has worked little, or holds on to what it had. So does one that is far from all, because it was alone.
    """
    mine, theirs = (
        one or math.inf for one in (usual or 2.0 * learned, partners_usual or 2.0 * partners_learned)
    )
    abreast = min(learned, partners_learned) >= _ABREAST * max(learned, partners_learned)
    if abreast and min(mine, theirs) >= _ALIKE * max(mine, theirs):
        return restraint(min(mine, theirs), distance)
    behind = min(1.0, partners_learned / (_ABREAST * learned)) if learned else 1.0
    return restraint(mine, distance) * math.pow(behind, FALL)


class Distances:
    """The distance measured last with each partner (root mean square difference of values).

    The median over partners, not over exchanges: one that opens many exchanges has one voice. Those refused for their
    distance count too, so that the halves of a swarm that were parted for long accept each other in the end, while one
    bad partner among honest ones never moves the median.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def measured(self, partner: str, distance: float) -> None:
        """partner: peer id. Of too many the one that was measured least recently is forgotten."""
        self._last.pop(partner, None)
        self._last[partner] = distance
        if len(self._last) > _MOST_PARTNERS:
            del self._last[next(iter(self._last))]

    @property
    def usual(self) -> float:
        """The median; 0 while too few partners are known."""
        return statistics.median(self._last.values()) if len(self._last) >= _ENOUGH else 0.0
