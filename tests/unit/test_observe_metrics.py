from __future__ import annotations

import asyncio
import contextlib

import pytest

from meshd.observe.metrics import Metrics, memory_use, watch_loop_lag, watch_memory


class ManualClock:
    """Time moves only when the test says so; sleep takes `late` seconds longer than asked."""

    def __init__(self, lateness: list[float] | None = None) -> None:
        self.now = 100.0
        self.lateness = lateness

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if self.lateness is not None:
            if not self.lateness:
                raise asyncio.CancelledError
            self.now += seconds + self.lateness.pop(0)


def test_counters_add_and_gauges_replace() -> None:
    metrics = Metrics(ManualClock())
    metrics.count("microbatches_committed")
    metrics.count("microbatches_committed", 4)
    metrics.gauge("queue_bytes", 7)
    metrics.gauge("queue_bytes", 3)
    assert metrics.snapshot() == {"microbatches_committed": 5.0, "queue_bytes": 3.0}
    assert metrics.value("never_used") == 0.0


def test_a_rate_is_per_second_of_its_age_then_of_the_window() -> None:
    clock = ManualClock()
    metrics = Metrics(clock, window_s=10)
    metrics.rate("tokens_per_s", 50)
    assert metrics.value("tokens_per_s") == 50.0  # no age yet: one second is assumed
    clock.now += 5
    metrics.rate("tokens_per_s", 50)
    assert metrics.value("tokens_per_s") == 20.0  # 100 in 5 s
    clock.now += 6
    assert metrics.value("tokens_per_s") == 5.0  # the first 50 have left the window of 10 s
    clock.now += 10
    assert metrics.value("tokens_per_s") == 0.0


def test_a_rate_keeps_one_bucket_a_second() -> None:
    metrics = Metrics(ManualClock())
    for _ in range(1000):
        metrics.rate("tokens_per_s", 1)
    assert len(metrics._rates["tokens_per_s"].buckets) == 1
    assert metrics.value("tokens_per_s") == 1000.0


def test_a_name_keeps_its_kind_and_form() -> None:
    metrics = Metrics(ManualClock())
    metrics.count("steps")
    with pytest.raises(ValueError, match="steps is a counter, used as a gauge"):
        metrics.gauge("steps", 1)
    with pytest.raises(ValueError, match="snake_case"):
        metrics.gauge("Steps-Done", 1)
    with pytest.raises(ValueError, match="cannot fall"):
        metrics.count("steps", -1)


async def test_loop_lag_is_what_a_sleep_took_too_long() -> None:
    clock = ManualClock([0.0] * 98 + [0.5, 2.0])
    metrics = Metrics(clock)
    with contextlib.suppress(asyncio.CancelledError):
        await watch_loop_lag(metrics, clock, interval_s=0.25, samples=200)
    assert metrics.value("loop_lag_max_s") == pytest.approx(2.0)
    assert metrics.value("loop_lag_p99_s") == pytest.approx(2.0)


async def test_old_lag_is_forgotten() -> None:
    clock = ManualClock([3.0] + [0.1] * 5)
    metrics = Metrics(clock)
    with contextlib.suppress(asyncio.CancelledError):
        await watch_loop_lag(metrics, clock, samples=5)
    assert metrics.value("loop_lag_max_s") == pytest.approx(0.1)


async def test_memory_gauges_hold_this_process() -> None:
    clock = ManualClock([])
    metrics = Metrics(clock)
    with contextlib.suppress(asyncio.CancelledError):
        await watch_memory(metrics, clock)
    use = memory_use()
    assert use.private_bytes <= use.rss_bytes
    assert metrics.value("memory_private_bytes") == pytest.approx(use.private_bytes, rel=0.2)
