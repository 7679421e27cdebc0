"""The one thread that computes on a device.

torch calls block; the event loop must not. One thread per device keeps its work in order without locks, and a
priority keeps what frees memory (backward) ahead of what takes it (forward).
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from types import TracebackType
from typing import Any, TypeVar

from meshd.errors import NetworkError
from meshd.observe.trace import Phase, Tracer
from meshd.pipeline import heap
from meshd.pipeline.exhaustion import out_of_memory

T = TypeVar("T")

# Lower runs first. Gossip only reads and moves a segment of values, in milliseconds, while a partner waits: behind the
# work of a device that is always busy, partners would give each other up.
GOSSIP, BACKWARD, FORWARD, BACKGROUND = 0, 1, 2, 3
# What jobs are called in a trace when their callers give them no phase.
_CALLED = {GOSSIP: "gossip", BACKWARD: "backward", FORWARD: "forward", BACKGROUND: "background"}
# Later jobs that may overtake one of the next lower priority: without a bound, a device that is always busy would never
# get to take a snapshot.
_HEAD_START = 16

_Job = tuple[int, int, Callable[[], Any] | None, Future[Any] | None]


class DeviceWorker:
    """Runs functions one at a time in its own thread, by priority, then in order of arrival."""

    def __init__(self, name: str = "device", tracer: Tracer | None = None) -> None:
        self._tracer = tracer or Tracer()
        self._queue: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._order = itertools.count()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._stopped = False
        self.busy_s = 0.0

    async def __aenter__(self) -> DeviceWorker:
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stopped = True
        # Behind everything: what was asked for is finished first, unless its caller was cancelled.
        self._queue.put((next(self._order) + _HEAD_START * (BACKGROUND + 1), BACKGROUND + 1, None, None))
        await asyncio.to_thread(self._thread.join)

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return self._queue.qsize()

    async def run(self, call: Callable[[], T], priority: int = BACKGROUND, phase: Phase | None = None) -> T:
        """Run `call` in the device's thread; its result or exception is this coroutine's. When memory ran out in it,
        that is an OutOfMemory, and what the call held is free by then. phase: what it is in a trace.

        Cancelling takes a waiting job out of the queue; one that runs already runs to its end.
        """
        lane = _Lane(self, priority)
        if not self._tracer.on:
            return await asyncio.get_running_loop().run_in_executor(lane, call)
        phase = phase or self._tracer.phase("device", _CALLED[priority])
        return await asyncio.get_running_loop().run_in_executor(lane, phase.around, call)

    def submit(self, call: Callable[[], T], priority: int) -> Future[T]:
        """Queue a call; for `run`. Raises NetworkError once the block has ended: a peer's request may come late."""
        if self._stopped:
            raise NetworkError("this peer has stopped computing")
        future: Future[T] = Future()
        self._queue.put((next(self._order) + _HEAD_START * priority, priority, call, future))
        return future

    def _work(self) -> None:
        while True:
            _, _, call, future = self._queue.get()
            if call is None or future is None:
                return
            began = time.perf_counter()
            _do(call, future)
            # A job's references (tensors) must not live until the next job comes.
            del call, future
            self.busy_s += time.perf_counter() - began


def _do(call: Callable[[], Any], future: Future[Any]) -> None:
    """Run one job, unless its caller was cancelled while it waited."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # the caller's to handle, in its own task
        exhausted = out_of_memory(error)
        if exhausted is None:
            future.set_exception(error)
            # The error's traceback holds this frame: without its locals it makes no cycle that keeps tensors alive.
            del call, future
            return
    else:
        future.set_result(result)
        return
    # With the error and its traceback gone, what did not fit is free: others on this machine may need it.
    heap.give_back()
    future.set_exception(exhausted)


class _Lane(Executor):
    """The worker as an Executor of one priority: the event loop then knows that a job is under way, which a loop on
    virtual time must (meshd.sim.clock)."""

    def __init__(self, worker: DeviceWorker, priority: int) -> None:
        self._worker, self._priority = worker, priority

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return self._worker.submit(lambda: fn(*args, **kwargs), self._priority)
