"""A byte-bounded queue with an end: the buffer behind every stream, in memory and over gRPC."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from meshd.errors import MeshdError

T = TypeVar("T")

# Makes the error afresh for each caller: one exception instance raised in several tasks would mix their tracebacks.
Failure = Callable[[], MeshdError]


class ByteQueue(Generic[T]):
    """Messages between one or more writers and one reader, at most `max_bytes` of them (or one larger message).

    It ends in one of three ways: `close` (the writer is done: what is queued is still read), `fail` (the stream
    broke) or `abandon` (the reader wants no more). Cancelling a waiting `put` or `head` loses and duplicates nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()
        self._writers = asyncio.Lock()  # fair: messages keep the order of the calls
        self._ended = False
        self._read_failure: Failure | None = None
        self._write_failure: Failure | None = None

    @property
    def queued_bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: T, size: int) -> None:
        """Append `item` (`size` bytes), waiting for room. Raises the failure once the queue has ended."""
        async with self._writers:
            while not self._ended and self._bytes and self._bytes + size > self._max_bytes:
                self._writable.clear()
                await self._writable.wait()
            if self._write_failure is not None:
                raise self._write_failure()
            self._items.append((item, size))
            self._bytes += size
            self._readable.set()

    def put_now(self, item: T, size: int) -> None:
        """Append `item` whatever is queued: for small messages whose number the protocol bounds. Dropped once the
        queue has ended."""
        if not self._ended:
            self._items.append((item, size))
            self._bytes += size
            self._readable.set()

    async def head(self) -> T | None:
        """Wait for the oldest item and return it without taking it; None at the end. Raises the read failure."""
        while not self._items:
            if self._read_failure is not None:
                raise self._read_failure()
            if self._ended:
                return None
            self._readable.clear()
            await self._readable.wait()
        return self._items[0][0]

    def pop(self) -> None:
        """Take the item that `head` returned. Nothing happens if the queue was emptied meanwhile."""
        if self._items:
            _, size = self._items.popleft()
            self._bytes -= size
            self._writable.set()

    async def get(self) -> T | None:
        """Take the oldest item; None at the end."""
        item = await self.head()
        self.pop()
        return item

    def close(self, failure: Failure) -> None:
        """The writer is done. The reader gets what is queued, then the end; later writes raise `failure`."""
        self._end(None, failure, discard=False)

    def fail(self, failure: Failure, *, discard: bool = False) -> None:
        """The stream broke: writes raise at once, reads after what is queued (at once with `discard`)."""
        self._end(failure, failure, discard=discard)

    def abandon(self, failure: Failure) -> None:
        """The reader is done: it sees the end at once, writes raise `failure`."""
        self._end(None, failure, discard=True)

    def _end(self, read: Failure | None, write: Failure, *, discard: bool) -> None:
        if self._ended and not (discard or read is not None):
            return
        if discard:
            self._items.clear()
            self._bytes = 0
        if not self._ended:
            self._write_failure = write
        # A break after a clean close still has to reach a reader that waits behind delayed messages.
        self._read_failure = self._read_failure or read
        self._ended = True
        self._readable.set()
        self._writable.set()
