"""The dialling side over gRPC."""

from __future__ import annotations

import asyncio
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from meshd.errors import MeshdError, MismatchError
from meshd.proto import meshd_pb2 as pb
from meshd.proto import meshd_pb2_grpc as stubs
from meshd.transport.base import Duplex, LinkLost
from meshd.transport.grpc_duplex import EOF, PumpedDuplex
from meshd.transport.limits import UNARY_TIMEOUT_S, checked_size
from meshd.transport.options import CONNECT_TIMEOUT_S, PROGRESS_TIMEOUT_S, client_options
from meshd.transport.queue import Failure
from meshd.transport.sender import Priority
from meshd.transport.status import Code, Status
from meshd.transport.uplink import Uplink

M = TypeVar("M", bound=Message)

# Channels kept without a call under way. Each is small once its connection went idle.
MAX_IDLE_CHANNELS = 64


def error_of(address: str, code: grpc.StatusCode, details: str | None) -> MeshdError:
    """The error that a gRPC status means to the dialler."""
    text = " ".join((details or "no reason given").split())
    if code.name in typing.get_args(Code):
        return Status(typing.cast(Code, code.name), text).error(address)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return MismatchError(f"{address} does not serve this call: it runs another version of meshd ({text})")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return LinkLost(f"{address} did not answer within {UNARY_TIMEOUT_S:g} s")
    return LinkLost(f"lost {address}: {code.name.lower()}: {text}")


class _ClientDuplex(PumpedDuplex[M]):
    """The dialler's end of a stream."""

    async def _failure(self) -> Failure | None:
        code, details = await self._call.code(), await self._call.details()
        return None if code is grpc.StatusCode.OK else lambda: error_of(self.remote, code, details)

    def _input_ended(self, failure: Failure) -> None:
        self._outgoing.fail(failure, discard=True)  # a server that ended its side has ended the call

    async def _written(self) -> None:
        await self._call.done_writing()


class _Channel:
    """One cached channel and how many calls use it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.grpc = channel
        self.users = 0
        self.peer: Any = stubs.PeerStub(channel)
        self.pipeline: Any = stubs.PipelineStub(channel)
        self.gossip: Any = stubs.GossipStub(channel)
        self.state: Any = stubs.StateStub(channel)
        self.anchor: Any = stubs.AnchorStub(channel)

    @property
    def failed(self) -> bool:
        """The last attempt to connect failed: gRPC holds back the next one."""
        return self.grpc.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE

    async def connect(self, address: str) -> None:
        """Wait until the connection stands. LinkLost when it fails or takes too long."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                state = self.grpc.get_state(try_to_connect=True)
                while state is not grpc.ChannelConnectivity.READY:
                    # gRPC would try on by itself, ever more rarely; who and when to dial again is the caller's matter.
                    if state in (
                        grpc.ChannelConnectivity.TRANSIENT_FAILURE,
                        grpc.ChannelConnectivity.SHUTDOWN,
                    ):
                        raise LinkLost(
                            f"{address} is not reached: nobody listens there, or the way is blocked"
                        )
                    await self.grpc.wait_for_state_change(state)
                    state = self.grpc.get_state(try_to_connect=True)
        except TimeoutError:
            raise LinkLost(
                f"{address} is not reached: no connection within {CONNECT_TIMEOUT_S:g} s"
            ) from None


class GrpcTransport:
    """`Transport` over gRPC. One channel per address, kept while it works, closed when it failed or is long unused."""

    def __init__(
        self, credentials: grpc.ChannelCredentials | None = None, *, uplink: Uplink | None = None
    ) -> None:
        """credentials: TLS to every peer; None dials without. uplink: what shapes all that this peer sends."""
        self._credentials = credentials
        self._uplink = uplink
        self._channels: dict[str, _Channel] = {}  # least recently dialled first
        self._closed = False

    async def hello(self, address: str, request: pb.HelloRequest) -> pb.HelloReply:
        return typing.cast(pb.HelloReply, await self._unary(address, lambda c: c.peer.Hello, request))

    async def get_run(self, address: str, request: pb.GetRunRequest) -> pb.GetRunReply:
        return typing.cast(pb.GetRunReply, await self._unary(address, lambda c: c.peer.GetRun, request))

    async def status(self, address: str, request: pb.StatusRequest) -> pb.StatusReply:
        return typing.cast(pb.StatusReply, await self._unary(address, lambda c: c.peer.Status, request))

    async def list_bundles(self, address: str, request: pb.ListRequest) -> pb.ListReply:
        return typing.cast(pb.ListReply, await self._unary(address, lambda c: c.state.List, request))

    async def manifest(self, address: str, request: pb.ManifestRequest) -> pb.ManifestReply:
        return typing.cast(pb.ManifestReply, await self._unary(address, lambda c: c.state.Manifest, request))

    async def offer(self, address: str, request: pb.PriorOffer) -> pb.PriorAnswer:
        return typing.cast(
            pb.PriorAnswer, await self._unary(address, lambda c: c.anchor.Offer, request, Priority.PRIORS)
        )

    def link(self, address: str) -> AbstractAsyncContextManager[Duplex[pb.LinkMessage]]:
        return self._stream(address, lambda channel: channel.pipeline.Link, Priority.FORWARD)

    def gossip(self, address: str) -> AbstractAsyncContextManager[Duplex[pb.GossipMessage]]:
        return self._stream(address, lambda channel: channel.gossip.Exchange, Priority.GOSSIP)

    async def fetch(self, address: str, request: pb.FetchRequest) -> AsyncGenerator[pb.FetchChunk, None]:
        """Close it (contextlib.aclosing) when it is left before its end."""
        async with self._channel(address) as channel:
            await self._carry(request, Priority.CONTROL)
            call = channel.state.Fetch(request)
            try:
                while (chunk := await asyncio.wait_for(call.read(), PROGRESS_TIMEOUT_S)) is not EOF:
                    yield chunk
            except TimeoutError:
                raise LinkLost(f"{address} sent nothing for {PROGRESS_TIMEOUT_S:g} s") from None
            except grpc.aio.AioRpcError as error:
                raise error_of(address, error.code(), error.details()) from None
            finally:
                call.cancel()

    async def close(self) -> None:
        """Close all channels; calls under way are cancelled. Idempotent."""
        self._closed = True
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.grpc.close(None)

    async def _carry(self, request: Message, priority: Priority) -> None:
        """Wait until a request would have arrived."""
        if self._uplink is not None:
            await self._uplink.carry(request, priority)

    async def _unary(
        self,
        address: str,
        method: Callable[[_Channel], Any],
        request: Message,
        priority: Priority = Priority.CONTROL,
    ) -> Any:
        checked_size(request)
        async with self._channel(address) as channel:
            await self._carry(request, priority)
            try:
                return await method(channel)(request, timeout=UNARY_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise error_of(address, error.code(), error.details()) from None

    @asynccontextmanager
    async def _stream(
        self, address: str, method: Callable[[_Channel], Any], heavy: Priority
    ) -> AsyncIterator[Duplex[Any]]:
        async with self._channel(address) as channel:
            call = method(channel)()
            duplex: _ClientDuplex[Any] = _ClientDuplex(address, call, self._uplink, heavy)
            failed: BaseException | None = None
            async with asyncio.TaskGroup() as pumps:
                tasks = [pumps.create_task(duplex.pump_in()), pumps.create_task(duplex.pump_out())]
                try:
                    yield duplex
                    await duplex.drain()
                except BaseException as error:
                    failed = error  # raised below: the group would wrap it
                finally:
                    call.cancel()
                    for task in tasks:
                        task.cancel()
            if failed is not None:
                raise failed

    @asynccontextmanager
    async def _channel(self, address: str) -> AsyncIterator[_Channel]:
        """A connected channel to `address` for one call."""
        if self._closed:
            raise LinkLost(f"{address} is not dialled: this transport is closed")
        cached = self._channels.pop(address, None)
        channel = self._dial(address) if cached is None or cached.failed else cached
        self._channels[address] = channel
        channel.users += 1
        try:
            if cached is not None:
                await self._sweep(address, cached)
            await channel.connect(address)
            yield channel
        except LinkLost:
            # The next call begins afresh, without gRPC's own back-off.
            if self._channels.get(address) is channel:
                del self._channels[address]
            raise
        finally:
            channel.users -= 1
            await self._sweep(address, channel)

    def _dial(self, address: str) -> _Channel:
        options = client_options()
        if self._credentials is None:
            return _Channel(grpc.aio.insecure_channel(address, options=options))
        return _Channel(grpc.aio.secure_channel(address, self._credentials, options=options))

    async def _sweep(self, address: str, used: _Channel) -> None:
        """Close `used` if it was dropped and nobody uses it, and the longest unused channels beyond the limit."""
        close = [used] if not used.users and self._channels.get(address) is not used else []
        idle = [name for name, channel in self._channels.items() if not channel.users]
        close += [self._channels.pop(name) for name in idle[: max(0, len(idle) - MAX_IDLE_CHANNELS)]]
        for channel in close:
            await channel.grpc.close(None)
