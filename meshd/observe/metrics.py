"""Numbers that a daemon keeps about itself: counters, gauges, rates. Read by `meshd status` and by tests.

Names are snake_case and end in their unit (`_s`, `_bytes`, `_per_s`) unless they are counts; docs/metrics.md lists
them. Not thread-safe: all updates come from the event loop's thread.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from meshd.clock import Clock

_NAME = re.compile(r"^[a-z][a-z0-9_]*$")


@dataclass
class _Rate:
    """Amounts in the last `window_s`, gathered in one bucket a second so that memory is bounded."""

    started: float
    buckets: deque[tuple[int, float]] = field(default_factory=deque)  # (whole second, amount)

    def add(self, now: float, amount: float, window_s: float) -> None:
        self._forget(now, window_s)
        second = int(now)
        if self.buckets and self.buckets[-1][0] == second:
            second, before = self.buckets.pop()
            amount += before
        self.buckets.append((second, amount))

    def _forget(self, now: float, window_s: float) -> None:
        while self.buckets and self.buckets[0][0] < now - window_s:
            self.buckets.popleft()

    def per_second(self, now: float, window_s: float) -> float:
        self._forget(now, window_s)
        # A young rate is divided by its age, not by the whole window; under a second would be noise.
        span = min(window_s, max(now - self.started, 1.0))
        return sum(amount for _, amount in self.buckets) / span


class Metrics:
    """A registry of numbers by name. One name has one kind; using it as another raises ValueError.

    clock: source of monotonic time. window_s: what rates are averaged over, seconds.
    """

    def __init__(self, clock: Clock, window_s: float = 60.0) -> None:
        self._clock = clock
        self._window_s = window_s
        self._values: dict[str, float] = {}
        self._rates: dict[str, _Rate] = {}
        self._kinds: dict[str, str] = {}

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add to a counter: it never falls. Raises ValueError for a negative amount."""
        if amount < 0:
            raise ValueError(f"counter {name} cannot fall (by {amount})")
        self._claim(name, "counter")
        self._values[name] = self._values.get(name, 0.0) + amount

    def gauge(self, name: str, value: float) -> None:
        """Set a gauge to `value`."""
        self._claim(name, "gauge")
        self._values[name] = value

    def rate(self, name: str, amount: float) -> None:
        """Add `amount` to a rate; `value` gives it per second over the window."""
        self._claim(name, "rate")
        now = self._clock.monotonic()
        self._rates.setdefault(name, _Rate(started=now)).add(now, amount, self._window_s)

    def value(self, name: str) -> float:
        """The present value; 0 for a name that was never used."""
        if name in self._rates:
            return self._rates[name].per_second(self._clock.monotonic(), self._window_s)
        return self._values.get(name, 0.0)

    def snapshot(self) -> dict[str, float]:
        """All values by name, sorted."""
        return {name: self.value(name) for name in sorted(self._kinds)}

    def _claim(self, name: str, kind: str) -> None:
        known = self._kinds.get(name)
        if known is None:
            if not _NAME.match(name):
                raise ValueError(f"metric name {name!r} is not snake_case")
            self._kinds[name] = kind
        elif known != kind:
            raise ValueError(f"metric {name} is a {known}, used as a {kind}")


async def watch_loop_lag(metrics: Metrics, clock: Clock, interval_s: float = 1.0, samples: int = 60) -> None:
    """Measure for ever how late the event loop wakes, over the last `samples`: `loop_lag_p99_s`, `loop_lag_max_s`.

    A loop that lags answers no keepalive, so this is the first number to look at when peers drop.
    """
    lags: deque[float] = deque(maxlen=samples)
    while True:
        before = clock.monotonic()
        await clock.sleep(interval_s)
        lags.append(max(0.0, clock.monotonic() - before - interval_s))
        ordered = sorted(lags)
        metrics.gauge("loop_lag_p99_s", ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))])
        metrics.gauge("loop_lag_max_s", ordered[-1])


@dataclass(frozen=True)
class MemoryUse:
    """Bytes. rss: resident; private: its own, not backed by a file that the system can drop; children: resident, of
    all."""

    rss_bytes: int
    private_bytes: int
    children_rss_bytes: int


def memory_use(process: psutil.Process | None = None) -> MemoryUse:
    """Memory of `process` (this one when None). Reads /proc for some milliseconds: not on the event loop."""
    process = process or psutil.Process()
    rss = process.memory_info().rss
    children = 0
    for child in process.children(recursive=True):
        try:
            children += child.memory_info().rss
        except psutil.NoSuchProcess:
            # It ended between the two calls: it uses nothing.
            continue
    return MemoryUse(rss_bytes=rss, private_bytes=private_bytes(process), children_rss_bytes=children)


def private_bytes(process: psutil.Process) -> int:
    """Anonymous memory of a process, bytes. Memory-mapped weights are not counted: they can be read again.

    Elsewhere than on Linux: the unique set size, which counts them.
    """
    try:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return int(process.memory_full_info().uss)


async def watch_memory(metrics: Metrics, clock: Clock, interval_s: float = 30.0) -> None:
    """Gauges `memory_rss_bytes`, `memory_private_bytes`, `memory_children_bytes`, for ever. 20 ms each time."""
    while True:
        use = await asyncio.to_thread(memory_use)
        metrics.gauge("memory_rss_bytes", use.rss_bytes)
        metrics.gauge("memory_private_bytes", use.private_bytes)
        metrics.gauge("memory_children_bytes", use.children_rss_bytes)
        await clock.sleep(interval_s)
