"""Streams that other peers have open here, for as long as this peer is there for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from google.protobuf.message import Message

from meshd.errors import NetworkError, ungrouped
from meshd.transport.base import Duplex

M = TypeVar("M", bound=Message)


class Visits:
    """Serves streams that can be ended together: what serves them holds on to the stage's memory.

    why: told to those whose streams are ended.
    """

    def __init__(self, why: str) -> None:
        self._why = why
        self._over = asyncio.Event()

    def serving(
        self, handler: Callable[[Duplex[M]], Awaitable[None]]
    ) -> Callable[[Duplex[M]], Awaitable[None]]:
        """The handler, for streams that end with `end` at the latest: who has one then gets a NetworkError."""

        async def serve(duplex: Duplex[M]) -> None:
            async def handle() -> None:
                await handler(duplex)

            with ungrouped():
                async with asyncio.TaskGroup() as tasks:
                    handling = tasks.create_task(handle())
                    over = tasks.create_task(self._over.wait())
                    await asyncio.wait({handling, over}, return_when=asyncio.FIRST_COMPLETED)
                    handling.cancel()
                    over.cancel()
            if self._over.is_set():
                raise NetworkError(self._why)

        return serve

    def end(self) -> None:
        """End all streams, now open or still to come."""
        self._over.set()
