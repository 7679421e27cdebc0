"""`--replicas`, and the signals that stop a swarm."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from meshd.errors import ConfigError
from meshd.swarm.interrupt import stopped_by_signals
from meshd.swarm.replicas import replicas_of


def test_counts_are_read() -> None:
    assert replicas_of("1,2, 3", 3) == (1, 2, 3)
    assert replicas_of(None, 4) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,0", "counts of 1 or more"),
        ("1,a", "counts of 1 or more"),
        ("", "counts of 1 or more"),
        ("-1,2", "counts of 1 or more"),
        ("1,1,1", "3 counts for 2 stages.*such as --replicas 1,2"),
        ("2", "1 counts for 2 stages"),
    ],
)
def test_what_is_no_count_for_every_stage_is_explained(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replicas_of(text, 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_the_first_signal_stops_in_order_and_the_second_at_once(number: signal.Signals) -> None:
    hurry, said = asyncio.Event(), list[str]()

    async def work() -> None:
        with stopped_by_signals(hurry, said.append, "stopping"):
            try:
                os.kill(os.getpid(), number)
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                assert not hurry.is_set()
                os.kill(os.getpid(), number)
                await hurry.wait()
                raise

    working = asyncio.create_task(work())
    await asyncio.wait({working}, timeout=30)
    assert working.cancelled()
    assert said == ["stopping; once more to stop at once"]


async def test_a_hangup_that_is_ignored_stays_so() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopped_by_signals(asyncio.Event(), lambda line: None, "stopping"):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
