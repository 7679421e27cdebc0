"""A gRPC stream as a `Duplex`, the same on both sides.

grpc.aio cancels the whole call when one of its reads or writes is cancelled, and allows one of each at a time. Two
pump tasks therefore own the call, and users of the Duplex only ever wait at byte-bounded queues, where a time-out or
a cancellation harms nothing.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from meshd.errors import MeshdError
from meshd.transport.base import LinkLost
from meshd.transport.limits import BUFFER_BYTES, CLOSE_GRACE_S, checked_size
from meshd.transport.queue import ByteQueue, Failure
from meshd.transport.sender import Priority
from meshd.transport.uplink import ShapedQueue, Uplink, outgoing

M = TypeVar("M", bound=Message)

EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # grpc-stubs lacks it

# What reads and writes of a call that has ended raise.
CALL_ENDED = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)


class PumpedDuplex(ABC, Generic[M]):
    """`Duplex` between a gRPC call and two queues. `pump_in` and `pump_out` run for as long as the call does."""

    def __init__(self, remote: str, call: Any, uplink: Uplink | None, heavy: Priority) -> None:
        """call: the client's call or the server's context; grpc.aio gives both the same read and write. uplink: what
        shapes this peer's link, where something does; heavy: with what priority payloads of this stream take it."""
        self._remote = remote
        self._call = call
        self._incoming: ByteQueue[M] = ByteQueue(BUFFER_BYTES)
        self._outgoing: ByteQueue[M] | ShapedQueue[M] = outgoing(uplink, heavy)
        # A closing stream waits for what is in flight, this way and (taken to be as far) back.
        self.grace_s = CLOSE_GRACE_S + (2 * uplink.shape.longest_delay_s if uplink else 0.0)

    @property
    def remote(self) -> str:
        return self._remote

    async def send(self, message: M) -> None:
        await self._outgoing.put(message, checked_size(message))

    def __aiter__(self) -> AsyncIterator[M]:
        return self

    async def __anext__(self) -> M:
        message = await self._incoming.get()
        if message is None:
            raise StopAsyncIteration
        return message

    async def close(self) -> None:
        self._outgoing.close(self._lost("the stream was closed on this side"))

    def lose(self, reason: str) -> None:
        """The stream broke: what was received is still read, what was to be sent is forgotten."""
        self._incoming.fail(self._lost(reason))
        self._outgoing.fail(self._lost(reason), discard=True)

    async def pump_in(self) -> None:
        """Read the call to its end."""
        try:
            while (message := await self._call.read()) is not EOF:
                await self._incoming.put(message, message.ByteSize())
        except CALL_ENDED:
            pass  # how it ended is asked for below
        except MeshdError:
            return  # nobody reads any more
        except asyncio.CancelledError:
            self.lose("the call was cancelled")
            raise
        failure = await self._failure()
        closed = self._lost("the peer closed the stream")
        if failure is None:
            self._incoming.close(closed)
        else:
            self._incoming.fail(failure)
        self._input_ended(failure or closed)

    async def pump_out(self) -> None:
        """Write to the call until this side closes or the call ends."""
        try:
            while (message := await self._outgoing.get()) is not None:
                await self._call.write(message)
            await self._written()
        except CALL_ENDED:
            failure = await self._failure()
            self._outgoing.fail(failure or self._lost("the peer closed the stream"), discard=True)
        except MeshdError:
            pass  # the queue was failed by whoever noticed first
        except asyncio.CancelledError:
            self._outgoing.fail(self._lost("the call was cancelled"), discard=True)
            raise

    @abstractmethod
    async def _failure(self) -> Failure | None:
        """Why the call ended; None when it ended well."""

    @abstractmethod
    def _input_ended(self, failure: Failure) -> None:
        """The peer sends no more: whether it still reads depends on the side."""

    @abstractmethod
    async def _written(self) -> None:
        """All is written: tell the peer, where the protocol has a way to."""

    def _lost(self, reason: str) -> Failure:
        return lambda: LinkLost(f"lost {self._remote}: {reason}")

    async def drain(self) -> None:
        """Close, and throw away what still comes until the peer ends its side or the grace is over."""
        await self.close()
        with suppress(MeshdError, TimeoutError):
            async with asyncio.timeout(self.grace_s):
                async for _ in self:
                    pass
