"""What would be lost with a peer: gradients that it has added, and that are nowhere else yet (DESIGN section 2.5,
`lost_after_commit`). Pure.

A peer numbers its additions over one incarnation, and says up to which number they are kept: exchanged with another
replica, or in a state on a disk. Whoever has sent it microbatches remembers the numbers that came back with their
gradients; those that were not kept when the peer went are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass
class Keeping:
    """A peer's own books. added: gradients, all hops together; stepped: those of them in its weights; kept: those that
    would outlive it. listeners: called when that has grown."""

    added: int = 0
    stepped: int = 0
    kept: int = 0
    listeners: list[Callable[[], None]] = field(default_factory=list)

    def keep(self, upto: int) -> None:
        """Additions up to this number are elsewhere now, or on the disk."""
        if upto > self.kept:
            self.kept = upto
            for listener in self.listeners:
                listener()


# Bounds of what is remembered: of additions of one peer that never says what it keeps; of peers that went, and of their
# additions together. What is beyond them counts as kept, and as lost.
_MOST_UNKEPT = 1 << 16
_MOST_GONE = 256
_MOST_GONE_UNKEPT = 1 << 16


@dataclass
class _Debt:
    incarnation: int
    unkept: dict[int, None] = field(default_factory=dict)  # in the order they came back
    gone: bool = False


class Debts:
    """What neighbours owe: additions of theirs that a microbatch counts on and that they alone have."""

    def __init__(self) -> None:
        self._debts: dict[str, _Debt] = {}
        self._lost = 0

    @property
    def lost(self) -> int:
        """Additions that died with peers. Falls when a peer that was taken for dead comes back as it was."""
        return self._lost + sum(len(debt.unkept) for debt in self._debts.values() if debt.gone)

    def returned(self, peer: str, incarnation: int, addition: int) -> None:
        """A gradient came back: the peer's addition of that number."""
        unkept = self._of(peer, incarnation).unkept
        unkept[addition] = None
        if len(unkept) > _MOST_UNKEPT:
            del unkept[next(iter(unkept))]

    def kept(self, peer: str, incarnation: int, upto: int) -> None:
        """The peer says that its additions up to a number are kept."""
        debt = self._of(peer, incarnation)
        debt.unkept = {number: None for number in debt.unkept if number > upto}

    def gone(self, alive: Iterable[str]) -> None:
        """All peers but these are gone."""
        alive = set(alive)
        for peer, debt in self._debts.items():
            debt.gone |= peer not in alive
        gone = [peer for peer, debt in self._debts.items() if debt.gone]
        owed = sum(len(self._debts[peer].unkept) for peer in gone)
        # Those known longest go first; they will not come back as they were.
        for count, peer in zip(range(len(gone), 0, -1), gone, strict=True):
            if count <= _MOST_GONE and owed <= _MOST_GONE_UNKEPT:
                break
            lost = len(self._debts.pop(peer).unkept)
            self._lost += lost
            owed -= lost

    def _of(self, peer: str, incarnation: int) -> _Debt:
        debt = self._debts.get(peer)
        if debt is None or debt.incarnation != incarnation:
            # Started again: it went on from what was kept.
            self._lost += 0 if debt is None else len(debt.unkept)
            debt = self._debts[peer] = _Debt(incarnation)
        debt.gone = False
        return debt
