"""Peers that vanished without taking leave: dead, or behind a cut in the network. They are remembered and asked again,
so that two halves of a swarm that heal find each other, whatever the registry does (C01). Pure: the time comes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshd.proto import meshd_pb2 as pb

# Asked again after so long, twice as long each time, up to so long.
_FIRST_S, _LONGEST_S = 5.0, 30.0
# A peer that was away for longer has to come by itself, as a newcomer does.
_REMEMBERED_S = 3600.0
_MOST = 256
# So many are asked at once.
_MOST_ASKED = 8


@dataclass
class _Missing:
    record: pb.Record
    since: float
    pause_s: float = _FIRST_S
    again: float = 0.0


@dataclass(frozen=True)
class Changes:
    """What a look at the swarm has shown, as names: found: new. left: took back their records. lost, back: all those
    of one loss or return together, told once no more followed at the next look; back_after_s: since the first of these
    was lost."""

    found: Sequence[str] = ()
    left: Sequence[str] = ()
    lost: Sequence[str] = ()
    back: Sequence[str] = ()
    back_after_s: float = 0.0


class Roster:
    """Who was there at the last look, and who of those is missing since."""

    def __init__(self) -> None:
        self._there: dict[str, pb.Record] = {}
        self._missing: dict[str, _Missing] = {}
        self._lost: dict[str, str] = {}  # not told yet
        self._back: dict[str, str] = {}
        self._back_since = 0.0

    def look(self, peers: Sequence[pb.Record], time: float, now: float) -> Changes:
        """Take in the records there are. time: seconds since the epoch, as in records; now: monotonic seconds."""
        there = {peer.peer_id: peer for peer in peers}
        gone = [record for peer_id, record in self._there.items() if peer_id not in there]
        # A record that goes before its end was taken back.
        left = [record for record in gone if record.expires > time]
        lost = [record for record in gone if record.expires <= time]
        came = [record for peer_id, record in there.items() if peer_id not in self._there]
        back = [record for record in came if record.peer_id in self._missing]
        found = [_name(record) for record in came if record.peer_id not in self._missing]
        self._there = there
        for record in lost:
            self._missing[record.peer_id] = _Missing(record, now, again=now + _FIRST_S)
            self._lost[record.peer_id] = _name(record)
        for record in back:
            since = self._missing.pop(record.peer_id).since
            self._back_since = min(since, self._back_since) if self._back else since
            if self._lost.pop(record.peer_id, None) is None:
                self._back[record.peer_id] = _name(record)
        self._forget(now)
        told_lost = () if lost else self._told(self._lost)
        told_back = () if back else self._told(self._back)
        return Changes(found, [_name(r) for r in left], told_lost, told_back, now - self._back_since)

    def due(self, now: float) -> list[pb.Record]:
        """Those missing that are to be asked now, each less often the longer it is missing."""
        due = [missing for missing in self._missing.values() if missing.again <= now]
        # Those that have waited longest, or many that are missing would be kept from their turn by the first for ever.
        due = sorted(due, key=lambda missing: missing.again)[:_MOST_ASKED]
        for missing in due:
            missing.pause_s = min(_LONGEST_S, 2 * missing.pause_s)
            missing.again = now + missing.pause_s
        return [missing.record for missing in due]

    def missing(self, now: float) -> list[tuple[pb.Record, float]]:
        """The last record of each that is missing, and for how long it is."""
        return [(missing.record, now - missing.since) for missing in self._missing.values()]

    def _forget(self, now: float) -> None:
        # In the order in which they were lost.
        for peer_id, missing in list(self._missing.items()):
            if now - missing.since > _REMEMBERED_S or len(self._missing) > _MOST:
                del self._missing[peer_id]

    @staticmethod
    def _told(names: dict[str, str]) -> list[str]:
        told = sorted(names.values())
        names.clear()
        return told


def _name(record: pb.Record) -> str:
    return record.name or record.peer_id[-8:]
