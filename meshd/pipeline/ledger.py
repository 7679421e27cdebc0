"""The microbatch ledger: what was promised, and the proof that it was kept (DESIGN section 2.5). Pure.

At the origin: injected = committed + dropped + in flight. At every peer: a gradient is added at most once per
(microbatch, attempt) in one incarnation; the set lives and dies with the process.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from meshd.errors import MeshdError


class LedgerError(MeshdError):
    """A microbatch was accounted for twice, or never injected: a bug in meshd, never a peer's doing."""


@dataclass(frozen=True)
class Balance:
    """Counts since the origin's first incarnation. `partial`: dropped, but some stage had added its gradient.
    `lost_after_commit`: committed, but the origin died before its own part of the gradient was kept anywhere."""

    injected: int
    committed: int
    dropped: int
    partial: int
    in_flight: int
    tokens: int
    lost_after_commit: int

    @property
    def holds(self) -> bool:
        return self.injected == self.committed + self.dropped + self.in_flight


ZERO = Balance(0, 0, 0, 0, 0, 0, 0)


class OriginLedger:
    """What became of the microbatches this peer injected, over all its incarnations.

    It also knows where the data stands: `next_item`, the first item never injected, and `returned`, the items of
    dropped microbatches that have not gone out again.
    """

    def __init__(self, start: Balance = ZERO, next_sequence: int = 0, next_item: int = 0) -> None:
        self._injected, self._committed, self._dropped = start.injected, start.committed, start.dropped
        self._partial, self._tokens = start.partial, start.tokens
        self._lost = start.lost_after_commit
        self.unkept = 0  # committed in this incarnation, with the origin's own part not kept yet
        self.next_sequence = next_sequence
        self.next_item = next_item
        self.returned: list[int] = []
        self.open_items: dict[int, int] = {}

    def inject(self, item: int) -> int:
        """A microbatch of data item `item` goes out. Returns its sequence number."""
        sequence = self.next_sequence
        self.next_sequence += 1
        self._injected += 1
        self.open_items[sequence] = item
        if item in self.returned:
            self.returned.remove(item)
        self.next_item = max(self.next_item, item + 1)
        return sequence

    def reopen(self, sequence: int, item: int) -> None:
        """One that went out before, under a number that was given then, and is out still."""
        if sequence in self.open_items or sequence >= self.next_sequence:
            raise LedgerError(f"microbatch {sequence} cannot be out")
        self._injected += 1
        self.open_items[sequence] = item

    def commit(self, sequence: int, tokens: int) -> None:
        """Its gradient has come back; `tokens` label tokens are committed."""
        self._close(sequence)
        self._committed += 1
        self.unkept += 1
        self._tokens += tokens

    def keep(self, count: int) -> None:
        """The origin's own part of `count` committed microbatches would outlive it now."""
        if count > self.unkept:
            raise LedgerError(f"{count} microbatches kept where {self.unkept} were committed and not kept")
        self.unkept -= count

    def lose(self) -> None:
        """The incarnation has ended: what was not kept is lost."""
        self._lost += self.unkept
        self.unkept = 0

    def drop(self, sequence: int, partial: bool) -> int:
        """It will not come back. Returns its data item, which goes out again."""
        item = self._close(sequence)
        self._dropped += 1
        self._partial += partial
        self.returned.append(item)
        return item

    def _close(self, sequence: int) -> int:
        try:
            return self.open_items.pop(sequence)
        except KeyError:
            raise LedgerError(f"microbatch {sequence} is not in flight") from None

    def balance(self) -> Balance:
        return Balance(
            self._injected,
            self._committed,
            self._dropped,
            self._partial,
            len(self.open_items),
            self._tokens,
            self._lost,
        )


class SeenAttempts:
    """Which (origin, sequence, attempt, hop) this incarnation has taken. Remembers the last `capacity` of them: a
    duplicate comes within seconds of the original or not at all."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[tuple[str, int, int, int], None] = OrderedDict()

    def first_time(self, key: tuple[str, int, int, int]) -> bool:
        """True exactly once per key."""
        if key in self._seen:
            return False
        self._seen[key] = None
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
        return True

    def forget(self, key: tuple[str, int, int, int]) -> None:
        """The attempt was refused, not taken: it may come again."""
        self._seen.pop(key, None)
