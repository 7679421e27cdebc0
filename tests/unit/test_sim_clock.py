"""Virtual time: fast, in order, and never hanging."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from meshd.clock import Clock
from meshd.sim.clock import EPOCH, VirtualClock, VirtualDeadlock, run_virtual


def test_an_hour_of_sleeps_and_timeouts_takes_no_real_time() -> None:
    clock: Clock = VirtualClock()

    async def main() -> tuple[int, int]:
        timeouts = ticks = 0
        while clock.monotonic() < 3600:
            await clock.sleep(1.0)
            ticks += 1
            try:
                async with asyncio.timeout(0.5):
                    await asyncio.Event().wait()
            except TimeoutError:
                timeouts += 1
        assert clock.time() == pytest.approx(EPOCH + 3600)
        return ticks, timeouts

    began = time.monotonic()
    assert run_virtual(main()) == (2400, 2400)
    assert time.monotonic() - began < 60  # not a measure of speed: an hour was not waited for


def test_tasks_wake_in_the_order_of_their_times() -> None:
    async def main() -> list[tuple[float, str]]:
        clock, woken = VirtualClock(), []

        async def sleeper(name: str, seconds: float) -> None:
            await clock.sleep(seconds)
            woken.append((clock.monotonic(), name))

        async with asyncio.TaskGroup() as group:
            for name, seconds in [("c", 3.0), ("a", 1.0), ("b", 2.0), ("a2", 1.0)]:
                group.create_task(sleeper(name, seconds))
        return woken

    expected = [(1.0, "a"), (1.0, "a2"), (2.0, "b"), (3.0, "c")]
    assert run_virtual(main()) == expected
    assert run_virtual(main()) == expected


def test_wait_for_runs_on_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 1e5)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(1e5)


def test_a_deadlock_is_raised_with_the_place_it_waits_at() -> None:
    async def main() -> None:
        await asyncio.sleep(5)
        await asyncio.Event().wait()

    with pytest.raises(
        VirtualDeadlock, match=r"at virtual time 5.000 s nothing can happen.*test_sim_clock.py:\d+"
    ):
        run_virtual(main())


def test_threads_take_no_virtual_time() -> None:
    async def main() -> tuple[float, str]:
        loop, gate = asyncio.get_running_loop(), threading.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(10))
            job = group.create_task(asyncio.to_thread(gate.wait, 30))
            await asyncio.sleep(0)  # the job starts
            gate.set()
            await job
            return loop.time(), "done"

    assert run_virtual(main()) == (0.0, "done")


def test_far_times_do_not_stall_on_rounding() -> None:
    async def main() -> float:
        await asyncio.sleep(1e8)
        for _ in range(1000):
            await asyncio.sleep(1e-9)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) >= 1e8
