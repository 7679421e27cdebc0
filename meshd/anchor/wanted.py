"""Which file is fetched next, and from whom. Pure: time comes in as an argument.

Whoever offers a file may be one who never delivers, under as many names as it likes. So what has come from a peer
counts: some fetchers serve only offers of those that have delivered, and whoever failed is asked last.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from meshd.anchor.notices import Entry

MOST_WANTED, MOST_DONORS = 64, 8
"""Notices whose files wait to be fetched; peers that one may be fetched from."""
FLOOR_S, FLOOR_BYTES_S = 10.0, 125_000
"""What a whole file may take: so long, and its size at so many bytes a second."""
_FAILED_S = 600.0  # for so long, one that has failed comes after all others
_MOST_REMEMBERED = 256

_PROVEN, _UNKNOWN, _FAILED = 0, 1, 2


def allowed_s(size_bytes: int) -> float:
    """How long the fetch of a file may take: one who sends a trickle would keep others waiting for ever."""
    return FLOOR_S + size_bytes / FLOOR_BYTES_S


@dataclass(frozen=True)
class Donor:
    peer_id: str
    address: str


@dataclass
class Wanted:
    """A notice whose file is to be fetched. tries: of its donors that have failed."""

    entry: Entry
    donors: list[Donor] = field(default_factory=list)
    tries: int = 0


@dataclass(frozen=True)
class Task:
    """One fetch. While it is under way neither its donor nor its file is part of another."""

    wanted: Wanted
    donor: Donor


class Queue:
    """Notices whose files are wanted. Two notices of one file are kept apart: one of them may be a liar's."""

    def __init__(self) -> None:
        self._wanted: dict[bytes, Wanted] = {}  # by what was signed, in order of arrival
        self._under_way: list[Task] = []
        self._delivered: OrderedDict[str, None] = OrderedDict()
        self._failed: OrderedDict[str, float] = OrderedDict()  # when

    @property
    def entries(self) -> list[Entry]:
        return [wanted.entry for wanted in self._wanted.values()]

    def wants(self, name: bytes) -> bool:
        """Whether a file of this name is waited for or being fetched."""
        return any(wanted.entry.notice.name == name for wanted in self._wanted.values())

    def offered(self, entry: Entry, donor: Donor, now: float) -> None:
        """A donor has a file. Where there are too many, those go that nobody who has delivered offers, and whose donors
        have failed; what does not get in will be offered again."""
        wanted = self._wanted.get(entry.signed.notice)
        if wanted is None:
            wanted = Wanted(entry)
            if len(self._wanted) >= MOST_WANTED and not self._made_room(self._standing(donor, now), now):
                return
            self._wanted[entry.signed.notice] = wanted
        if donor in wanted.donors:
            return
        if len(wanted.donors) >= MOST_DONORS:
            worst = max(wanted.donors, key=lambda other: self._standing(other, now))
            if self._standing(worst, now) <= self._standing(donor, now):
                return
            wanted.donors.remove(worst)
        wanted.donors.append(donor)

    def _made_room(self, standing: int, now: float) -> bool:
        busy = [task.wanted for task in self._under_way]
        idle = [(key, wanted) for key, wanted in self._wanted.items() if wanted not in busy]
        if not idle:
            return False
        key, worst = max(idle, key=lambda item: (self._best(item[1], now), item[1].tries))
        if (self._best(worst, now), worst.tries) <= (standing, 0):
            return False
        del self._wanted[key]
        return True

    def begin(self, now: float, proven: bool) -> Task | None:
        """What to fetch next, or None. proven: only from those that have delivered. `end` must follow."""
        donors = {task.donor.peer_id for task in self._under_way}
        names = {task.wanted.entry.notice.name for task in self._under_way}
        most = _PROVEN if proven else _FAILED
        tasks = [
            (self._standing(donor, now), wanted.tries, Task(wanted, donor))
            for wanted in self._wanted.values()
            if wanted.entry.notice.name not in names
            for donor in wanted.donors
            if donor.peer_id not in donors and self._standing(donor, now) <= most
        ]
        if not tasks:
            return None
        # Of equals the first: who came first.
        task = min(tasks, key=lambda item: item[:2])[2]
        task.wanted.donors.remove(task.donor)
        self._under_way.append(task)
        return task

    def end(self, task: Task, delivered: bool, now: float) -> bool:
        """delivered: the file was what its notice said. Otherwise its next donor is asked. Returns whether no more is
        done for the notice."""
        self._under_way.remove(task)
        peer = task.donor.peer_id
        if delivered:
            self._failed.pop(peer, None)
            self._delivered[peer] = None
            self._delivered.move_to_end(peer)
            if len(self._delivered) > _MOST_REMEMBERED:
                self._delivered.popitem(last=False)
        else:
            self._delivered.pop(peer, None)
            self._failed[peer] = now
            self._failed.move_to_end(peer)
            if len(self._failed) > _MOST_REMEMBERED:
                self._failed.popitem(last=False)
            task.wanted.tries += 1
            if task.wanted.donors:
                return False
        self.drop(task.wanted)
        return True

    def cancel(self, task: Task) -> None:
        """The end of a fetch that says nothing of its donor."""
        self._under_way.remove(task)
        self.drop(task.wanted)

    def drop(self, wanted: Wanted) -> None:
        self._wanted.pop(wanted.entry.signed.notice, None)

    def _standing(self, donor: Donor, now: float) -> int:
        if donor.peer_id in self._delivered:
            return _PROVEN
        failed = self._failed.get(donor.peer_id)
        return _UNKNOWN if failed is None or now - failed >= _FAILED_S else _FAILED

    def _best(self, wanted: Wanted, now: float) -> int:
        return min((self._standing(donor, now) for donor in wanted.donors), default=_FAILED)
