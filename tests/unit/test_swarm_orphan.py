from __future__ import annotations

import asyncio

import pytest

from meshd.errors import DataError
from meshd.swarm.orphan import ending_with_parent


async def test_a_child_whose_supervisor_is_gone_stops() -> None:
    """C30: also when the supervisor was killed and could stop nobody."""
    parents = [7, 7, 1]
    stopped = asyncio.Event()
    async with asyncio.timeout(30), ending_with_parent("7", 0.0, lambda: parents.pop(0), stopped.set):
        await stopped.wait()


async def test_the_watch_ends_with_the_block() -> None:
    before = len(asyncio.all_tasks())
    async with ending_with_parent("7", 1000.0, lambda: 7, lambda: None):
        assert len(asyncio.all_tasks()) == before + 1
    assert len(asyncio.all_tasks()) == before


async def test_what_the_user_must_know_leaves_the_watch_as_it_is() -> None:
    with pytest.raises(DataError, match="no such directory"):
        async with ending_with_parent("7", 1000.0, lambda: 7, lambda: None):
            raise DataError("model.source: no such directory")


async def test_without_a_supervisor_nothing_is_watched() -> None:
    before = len(asyncio.all_tasks())
    async with ending_with_parent(None):
        assert len(asyncio.all_tasks()) == before
