"""The progress watchdog of a daemon: looks once a second whether it is of use, and says so when that changes."""

from __future__ import annotations

import logging
from collections.abc import Callable

from meshd.clock import Clock
from meshd.observe.health import Health, Progress, Situation, judge
from meshd.observe.log import event
from meshd.observe.metrics import Metrics
from meshd.peer.directory import Self
from meshd.proto import meshd_pb2 as pb

log = logging.getLogger(__name__)

_LOOK_S = 1.0


class Watchdog:
    """`health` may be asked at any time; `run` must be running. Gauge: `healthy`, 1 or 0.

    doing, waiting: what the peer says of itself, asked at every look (meshd.observe.health.Situation).
    """

    def __init__(
        self,
        me: Self,
        metrics: Metrics,
        clock: Clock,
        doing: Callable[[], str],
        waiting: Callable[[], str],
    ) -> None:
        self._me, self._metrics, self._clock = me, metrics, clock
        self._doing, self._waiting = doing, waiting
        self._progress = Progress()
        self._state: pb.PeerState = me.state
        self._since = clock.monotonic()
        self._excused: float | None = None
        self._told = True

    def health(self) -> Health:
        """Now. Does not block."""
        return judge(
            Situation(
                self._state,
                self._since,
                self._doing(),
                self._progress.useful,
                self._progress.at,
                self._waiting(),
                self._excused,
            ),
            self._clock.monotonic(),
        )

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self.look()
            await self._clock.sleep(_LOOK_S)

    def look(self) -> None:
        """Once: counters, state, and a line in the log when the verdict has changed."""
        now = self._clock.monotonic()
        if self._me.state != self._state:
            self._state, self._since = self._me.state, now
        self._progress.look(self._metrics.snapshot(), now)
        if self._waiting():
            self._excused = now
        health = self.health()
        self._metrics.gauge("healthy", float(health.ok))
        if health.ok != self._told:
            self._told = health.ok
            level = logging.INFO if health.ok else logging.WARNING
            event(log, "healthy_again" if health.ok else "unhealthy", level=level, why=health.why)
