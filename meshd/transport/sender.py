"""One writer per stream that lets urgent messages overtake (DESIGN section 6, "Links are shared")."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import IntEnum
from typing import Generic, TypeVar

from google.protobuf.message import Message

from meshd.transport.base import Duplex, LinkLost
from meshd.transport.limits import checked_size
from meshd.transport.queue import ByteQueue

M = TypeVar("M", bound=Message)


class Priority(IntEnum):
    """Lower goes first. Answers are small and somebody waits for them; a gradient on its way back frees memory on
    every peer it passes. The last three never meet on one stream, only on a shaped uplink."""

    CONTROL = 0
    BACKWARD = 1
    FORWARD = 2
    GOSSIP = 3
    PRIORS = 4
    STATE = 5


class PrioritySender(Generic[M]):
    """Orders what one peer sends on one stream.

    Messages of one priority keep the order of their `send` calls, so that a header sent before its chunks arrives
    before them; those of a higher priority overtake between any two messages. A large payload is sent as its chunks,
    one `send` each, and is overtaken between them.
    """

    def __init__(self, duplex: Duplex[M], *, max_bytes: int = 8 << 20) -> None:
        """max_bytes: bound of what waits, per priority: a full queue of activations must not hold up a gradient."""
        self._duplex = duplex
        self._queues: list[ByteQueue[M]] = [ByteQueue(max_bytes) for _ in Priority]
        self._handed: dict[int, Callable[[M], None]] = {}  # by id of the message, which waits
        self._filled = asyncio.Event()
        self._closed = False

    @property
    def queued_bytes(self) -> int:
        """Bytes accepted and not yet handed to the stream (a metric: C09)."""
        return sum(queue.queued_bytes for queue in self._queues)

    @property
    def posted(self) -> int:
        """Messages of the highest priority that wait: `post` does not bound them, who posts on request must."""
        return len(self._queues[Priority.CONTROL])

    async def send(self, message: M, priority: Priority, handed: Callable[[M], None] | None = None) -> None:
        """Queue one message, waiting while its priority holds `max_bytes`. Raises LinkLost once the stream broke.

        handed: called once the message was handed to the stream.
        """
        await self._queues[priority].put(message, checked_size(message))
        if handed is not None:
            self._handed[id(message)] = handed
        self._filled.set()

    def post(self, message: M, priority: Priority = Priority.CONTROL) -> None:
        """Queue one small message without waiting: for answers, of which there is at most one per request. Dropped
        when the stream has ended: whoever would read it has gone."""
        self._queues[priority].put_now(message, checked_size(message))
        self._filled.set()

    def close(self) -> None:
        """Take no more messages; `run` returns when all that is queued is written. The stream itself stays open."""
        self._closed = True
        for queue in self._queues:
            queue.close(lambda: LinkLost(f"lost {self._duplex.remote}: this side stopped sending"))
        self._filled.set()

    async def run(self) -> None:
        """Write until `close`. Raises LinkLost when the stream breaks, and then so does every `send`."""
        try:
            while True:
                queue = next((queue for queue in self._queues if len(queue)), None)
                if queue is not None:
                    await self._write(queue)
                elif self._closed:
                    return
                else:
                    self._filled.clear()
                    await self._filled.wait()
        except BaseException as error:
            # Also when cancelled: nobody may wait for room in a queue that nobody empties.
            reason = (
                str(error)
                if isinstance(error, LinkLost)
                else f"lost {self._duplex.remote}: the sender stopped"
            )
            for queue in self._queues:
                queue.fail(lambda: LinkLost(reason), discard=True)
            raise

    async def _write(self, queue: ByteQueue[M]) -> None:
        """Hand the oldest message of `queue` to the stream; it counts as queued until that is done."""
        message = await queue.head()
        if message is not None:
            await self._duplex.send(message)
            queue.pop()
            if self._handed and (handed := self._handed.pop(id(message), None)) is not None:
                handed(message)
