"""Virtual time: an event loop that jumps to the next timer instead of waiting for it.

Everything that measures time by the loop (asyncio.sleep, timeout, wait_for, call_later) runs on it unchanged, so the
daemons' own code is simulated, not a copy of it. Only in-process work belongs in such a loop: jobs given to
`run_in_executor` (and asyncio.to_thread) take no virtual time, sockets of other processes cannot be waited for.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")

# Virtual wall clock at the start of a run: fixed, so that two runs see the same times.
EPOCH = 1_800_000_000.0


class VirtualDeadlock(RuntimeError):
    """Every task waits and nothing is left that could wake one."""


class VirtualClock:
    """`meshd.clock.Clock` of the running VirtualLoop. A peer whose wall clock is off gets another `epoch`."""

    def __init__(self, epoch: float = EPOCH) -> None:
        self._epoch = epoch

    def time(self) -> float:
        return self._epoch + self.monotonic()

    def monotonic(self) -> float:
        """Seconds since the loop was made."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _JumpingSelector(selectors.SelectSelector):
    """Asks the real selector what is ready; when nothing is, moves the loop's time instead of blocking."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.jobs = 0  # executor jobs under way: time stands still until they are done
        self.describe: Callable[[], str] = lambda: ""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if self.jobs:
            return super().select(None)  # a finishing job writes to the loop's own wake-up socket
        if timeout is None:
            raise VirtualDeadlock(
                f"at virtual time {self.now:.3f} s nothing can happen any more; {self.describe()}"
            )
        # At least one representable step: rounding must not leave the timer in the future for ever.
        self.now = max(self.now + timeout, math.nextafter(self.now, math.inf))
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time, starting at 0 s. Raises VirtualDeadlock instead of hanging."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._jumping.describe = self._waiting
        # A timer is due when it lies within the resolution. asyncio takes it from the system clock (1 ns), which a
        # float cannot tell apart from zero after some months of virtual time: the timer would never be due.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(  # type: ignore[override]  # typeshed's signature needs TypeVarTuple's full generality
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        self._jumping.jobs += 1
        future.add_done_callback(self._job_done)
        return future

    def _job_done(self, _: asyncio.Future[Any]) -> None:
        self._jumping.jobs -= 1

    async def shutdown_default_executor(self) -> None:
        self._jumping.jobs += 1  # waits for a thread, too
        try:
            await super().shutdown_default_executor()
        finally:
            self._jumping.jobs -= 1

    def _waiting(self) -> str:
        """Each unfinished task and the line it waits at."""
        lines = []
        for task in sorted(asyncio.all_tasks(self), key=lambda task: task.get_name()):
            frames = task.get_stack(limit=1)
            where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "not started"
            lines.append(f"{task.get_name()} waits at {where}")
        return "; ".join(lines) or "no tasks"


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a fresh VirtualLoop to its end and return its result. For plain (not async) tests.

    Deterministic: timers fire in the order of their times, ties in the order they were set. Raises VirtualDeadlock.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
