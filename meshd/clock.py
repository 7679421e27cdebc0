"""Time as a parameter, so that decisions can be tested on a virtual clock."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Source of time. All values in seconds."""

    def time(self) -> float:
        """Wall clock, seconds since the epoch: for what other peers read (records, leases)."""

    def monotonic(self) -> float:
        """Never goes back: for durations and time-outs."""

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own clock."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
