"""A child of `meshd swarm` ends when its supervisor has died without stopping it (killed, out of memory): C30."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from meshd.errors import ungrouped
from meshd.observe.log import event

# Set for the children of `meshd swarm`: the pid without which they are to end.
PARENT_VARIABLE = "MESHD_PARENT_PID"

logger = logging.getLogger(__name__)


@asynccontextmanager
async def ending_with_parent(
    parent: str | None,
    interval_s: float = 2.0,
    getppid: Callable[[], int] = os.getppid,
    stop: Callable[[], None] = lambda: signal.raise_signal(signal.SIGTERM),
) -> AsyncIterator[None]:
    """While the block runs, watch the parent process; once it is gone, call `stop` (SIGTERM to this process).

    parent: pid of the parent that is to be watched, as text; None or empty: nothing is watched.
    """
    if not parent:
        yield
        return
    # What ends the block is for the caller, not wrapped as an error of the watch.
    with ungrouped():
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_watch(int(parent), interval_s, getppid, stop))
            try:
                yield
            finally:
                watch.cancel()


async def _watch(
    parent: int, interval_s: float, getppid: Callable[[], int], stop: Callable[[], None]
) -> None:
    while True:
        if getppid() != parent:
            event(logger, "supervisor_gone", pid=parent)
            stop()
            return
        await asyncio.sleep(interval_s)
