"""Looking at every peer of a run once a second: how far it is, and what its counters say before it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshd.clock import Clock
from meshd.errors import MeshdError
from meshd.proto import meshd_pb2 as pb
from meshd.swarm.chaos.herd import Herd
from meshd.transport.base import Transport

_EVERY_S = 1.0
_ANSWER_S = 1.5


@dataclass(frozen=True)
class Look:
    """What one peer's process said last."""

    state: int
    tokens: int
    finished: bool
    metrics: Mapping[str, float]


@dataclass
class Watch:
    """series: (monotonic seconds, globally committed tokens as the best informed peer knew them), one a second.
    processes: the last look at every process, by (peer, pid)."""

    herd: Herd
    transport: Transport
    clock: Clock
    series: list[tuple[float, int]] = field(default_factory=list)
    processes: dict[tuple[str, int], Look] = field(default_factory=dict)
    _now: dict[str, Look] = field(default_factory=dict)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await self.clock.sleep(_EVERY_S)

    async def look(self) -> None:
        """Ask all peers once, all at a time; those that do not answer are left out."""
        names = list(self.herd.members)
        looks = await asyncio.gather(*(self._ask(name) for name in names))
        self._now = {name: look for name, look in zip(names, looks, strict=True) if look is not None}
        self.series.append(
            (self.clock.monotonic(), max([self.tokens, *(k.tokens for k in self._now.values())]))
        )

    @property
    def tokens(self) -> int:
        """Globally committed tokens, as far as anybody has said so far."""
        return self.series[-1][1] if self.series else 0

    def working(self) -> bool:
        """Whether every peer has answered the last look and works."""
        states = [self._now[name].state if name in self._now else None for name in self.herd.members]
        return all(state in (pb.PEER_STATE_WORKING, pb.PEER_STATE_FINISHED) for state in states)

    def finished(self, name: str) -> bool:
        """Whether a peer says that the run has ended."""
        return name in self._now and self._now[name].finished

    def rate(self, began: float, ended: float) -> float:
        """Committed tokens a second between two times (monotonic seconds)."""
        span = [point for point in self.series if began <= point[0] <= ended]
        if len(span) < 2:
            return 0.0
        return (span[-1][1] - span[0][1]) / (span[-1][0] - span[0][0])

    async def _ask(self, name: str) -> Look | None:
        found = await asyncio.to_thread(self.herd.daemon, name)
        if found is None:
            return None
        try:
            async with asyncio.timeout(_ANSWER_S):
                reply = await self.transport.status(found.address, pb.StatusRequest())
        except (MeshdError, TimeoutError):
            return None
        me = reply.self
        look = Look(me.state, reply.global_tokens, reply.finished, dict(me.metrics))
        self.processes[name, found.pid] = look
        return look
