"""Signals that stop a supervised swarm."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stopped_by_signals(hurry: asyncio.Event, tell: Callable[[str], None], stopping: str) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP cancels the current task, and says `stopping`; a second one sets `hurry`.

    A SIGHUP that is ignored (`nohup`) stays so.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    asked = False

    def stop() -> None:
        nonlocal asked
        if asked:
            hurry.set()
        else:
            tell(f"{stopping}; once more to stop at once")
            task.cancel()
        asked = True

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
