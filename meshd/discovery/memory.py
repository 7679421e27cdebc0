"""A registry in memory: many peers in one process share one dict. For tests and simulation."""

from __future__ import annotations

from collections.abc import Sequence

from meshd.clock import Clock
from meshd.discovery.records import RecordBook, withdrawn
from meshd.proto import meshd_pb2 as pb


class MemorySwarm:
    """What the registries of one swarm share."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.book = RecordBook()


class MemoryRegistry:
    """The Registry of peer `me` in a MemorySwarm. A peer sees what others announced at its own `refresh`."""

    def __init__(self, swarm: MemorySwarm, me: str) -> None:
        self._swarm, self._me = swarm, me
        self._mine: pb.Record | None = None
        self._peers: tuple[pb.Record, ...] = ()

    async def announce(self, record: pb.Record) -> None:
        if record.peer_id != self._me:
            raise ValueError(f"record of {record.peer_id} announced by {self._me}")
        self._mine = pb.Record()
        self._mine.CopyFrom(record)
        self._swarm.book.add(self._mine, self._swarm.clock.time())

    async def withdraw(self) -> None:
        if self._mine is not None:
            self._swarm.book.add(withdrawn(self._mine), self._swarm.clock.time())
            self._mine = None

    async def refresh(self) -> Sequence[pb.Record]:
        self._peers = self._swarm.book.live(self._swarm.clock.time(), without=self._me)
        return self.peers

    @property
    def peers(self) -> Sequence[pb.Record]:
        now = self._swarm.clock.time()
        return tuple(record for record in self._peers if record.expires > now)

    def heard(self, record: pb.Record) -> None:
        self._swarm.book.add(record, self._swarm.clock.time())

    @property
    def problem(self) -> str:
        return ""

    async def close(self) -> None:
        """Nothing to free; the record stays until it expires, as a dead peer's would."""
