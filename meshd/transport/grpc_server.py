"""The serving side over gRPC."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message

from meshd.errors import MeshdError, NetworkError, ResourceError
from meshd.proto import meshd_pb2 as pb
from meshd.proto import meshd_pb2_grpc as stubs
from meshd.transport.base import Duplex, Handlers, LinkLost
from meshd.transport.grpc_duplex import CALL_ENDED, PumpedDuplex
from meshd.transport.limits import CLOSE_GRACE_S, UNARY_TIMEOUT_S, checked_size
from meshd.transport.options import server_options
from meshd.transport.queue import Failure
from meshd.transport.sender import Priority
from meshd.transport.status import Status
from meshd.transport.uplink import ShapedQueue, Uplink

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Message)

# gRPC reports a dialler that ended its side and one that died with the same end of messages; in the second case the
# cancellation of the call follows at once. So long is waited for it.
_SETTLE_S = 0.05


@dataclass(frozen=True)
class GrpcServer:
    """Where a server listens: `address` is what others dial if it is reachable under the host it was bound to."""

    address: str
    port: int


class _ServerDuplex(PumpedDuplex[M]):
    """The handler's end of a stream. `close` lets the handler's iteration end, too."""

    async def close(self) -> None:
        await super().close()
        self._incoming.abandon(self._lost("the stream was closed on this side"))

    async def _failure(self) -> Failure | None:
        await asyncio.sleep(_SETTLE_S)
        return None  # a lost peer was told to `lose` meanwhile, and the first word counts

    def _input_ended(self, failure: Failure) -> None:
        """A dialler that has said all still listens."""

    async def _written(self) -> None:
        """The stream ends when the servicer returns."""


class _Servicer(
    stubs.PeerServicer,
    stubs.PipelineServicer,
    stubs.GossipServicer,
    stubs.StateServicer,
    stubs.AnchorServicer,
):
    """Calls the handlers and carries their errors over. Streams are served by tasks of `group`."""

    def __init__(self, handlers: Handlers, group: asyncio.TaskGroup, uplink: Uplink | None) -> None:
        self._handlers, self._group, self._uplink = handlers, group, uplink
        self._streams: set[asyncio.Task[Status | None]] = set()

    async def finish(self) -> None:
        """After the server stopped: streams are broken by now, their handlers have a moment to notice."""
        if self._streams:
            await asyncio.wait(self._streams, timeout=CLOSE_GRACE_S)
        for task in list(self._streams):
            log.warning("%s went on after its stream broke; cancelled", task.get_name())
            task.cancel()

    async def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloReply:
        return await self._answer(self._handlers.hello, request, context)

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.GetRunReply:
        return await self._answer(self._handlers.get_run, request, context)

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        return await self._answer(self._handlers.status, request, context)

    async def List(self, request: pb.ListRequest, context: Any) -> pb.ListReply:
        return await self._answer(self._handlers.list_bundles, request, context)

    async def Manifest(self, request: pb.ManifestRequest, context: Any) -> pb.ManifestReply:
        return await self._answer(self._handlers.manifest, request, context)

    async def Offer(self, request: pb.PriorOffer, context: Any) -> pb.PriorAnswer:
        return await self._answer(self._handlers.offer, request, context, Priority.PRIORS)

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> None:
        async def send_all() -> None:
            chunks = cast(AsyncGenerator[pb.FetchChunk, None], self._handlers.fetch(request))
            async with aclosing(chunks), _written(context, self._uplink) as write:
                async for chunk in chunks:
                    checked_size(chunk)
                    try:
                        await write(chunk)
                    except (*CALL_ENDED, LinkLost):
                        return  # nobody listens any more

        await _end(await _outcome(send_all()), context)

    async def Link(self, _: object, context: Any) -> None:
        await self._serve(self._handlers.link, context, Priority.BACKWARD)

    async def Exchange(self, _: object, context: Any) -> None:
        await self._serve(self._handlers.gossip, context, Priority.GOSSIP)

    async def _answer(
        self,
        method: Callable[[M], Awaitable[R]],
        request: M,
        context: Any,
        priority: Priority = Priority.CONTROL,
    ) -> R:
        """Serve a unary call."""
        replies: list[R] = []

        async def call() -> None:
            try:
                async with asyncio.timeout(UNARY_TIMEOUT_S):
                    reply = await method(request)
            except TimeoutError:
                raise NetworkError(f"no answer within {UNARY_TIMEOUT_S:g} s") from None
            checked_size(reply)
            replies.append(reply)

        status = await _outcome(call())
        if self._uplink is not None:
            await self._uplink.carry(replies[0] if replies else None, priority)
        await _end(status, context)
        return replies[0]

    async def _serve(
        self, handler: Callable[[Duplex[M]], Awaitable[None]], context: Any, heavy: Priority
    ) -> None:
        """Serve one stream. When gRPC cancels the call (the peer is lost, or the server stops) the handler is not
        cancelled but told so by its stream, as `Duplex` promises."""
        duplex: _ServerDuplex[M] = _ServerDuplex(_peer_name(context), context, self._uplink, heavy)
        serving = self._group.create_task(_run(handler, duplex), name=f"serves {duplex.remote}")
        self._streams.add(serving)
        serving.add_done_callback(self._streams.discard)
        try:
            status = await asyncio.shield(serving)
        except asyncio.CancelledError:
            duplex.lose("the peer is gone")
            raise
        await _end(status, context)


async def _run(handler: Callable[[Duplex[M]], Awaitable[None]], duplex: _ServerDuplex[M]) -> Status | None:
    """The handler between its pumps; None when all went well."""
    async with asyncio.TaskGroup() as pumps:
        reading = pumps.create_task(duplex.pump_in())
        writing = pumps.create_task(duplex.pump_out())
        status = await _outcome(handler(duplex))
        await duplex.close()
        # What the handler said last goes out before its end, unless the peer does not take it.
        await asyncio.wait([writing], timeout=duplex.grace_s)
        writing.cancel()
        reading.cancel()
    return status


@asynccontextmanager
async def _written(
    context: Any, uplink: Uplink | None
) -> AsyncIterator[Callable[[pb.FetchChunk], Awaitable[None]]]:
    """How the chunks of a Fetch are written. Leaving waits until all have gone, also those before an error."""
    if uplink is None:
        yield context.write
        return
    chunks: ShapedQueue[pb.FetchChunk] = ShapedQueue(uplink, lambda _: Priority.STATE)

    def over() -> LinkLost:
        return LinkLost(f"lost {_peer_name(context)}: the call has ended")

    async def pump() -> None:
        try:
            while (chunk := await chunks.get()) is not None:
                await context.write(chunk)
        except CALL_ENDED:
            chunks.fail(over, discard=True)

    failed: Exception | None = None
    async with asyncio.TaskGroup() as group:
        group.create_task(pump())
        try:
            yield lambda chunk: chunks.put(chunk, checked_size(chunk))
        except Exception as error:
            failed = error  # raised below: the group would wrap it
        chunks.close(over)
    if failed is not None:
        raise failed


async def _outcome(work: Awaitable[None]) -> Status | None:
    """How a handler ended. A bug in one is logged with its traceback and costs this call, not the daemon."""
    try:
        await work
    except MeshdError as error:
        return Status.of(error)
    except Exception:
        log.exception("a handler failed; this is a bug in meshd")
        return Status("INTERNAL", "internal error")
    return None


async def _end(status: Status | None, context: Any) -> None:
    if status is not None:
        await context.abort(grpc.StatusCode[status.code], status.text)


def _peer_name(context: Any) -> str:
    """`127.0.0.1:4711` from gRPC's `ipv4:127.0.0.1:4711`."""
    return str(context.peer()).removeprefix("ipv4:").removeprefix("ipv6:")


@asynccontextmanager
async def serve(
    handlers: Handlers,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    credentials: grpc.ServerCredentials | None = None,
    max_streams: int = 256,
    grace_s: float = 2.0,
    uplink: Uplink | None = None,
) -> AsyncIterator[GrpcServer]:
    """Serve `handlers` on `host`:`port` (0: a free port) for as long as the block runs.

    credentials: TLS; None serves without. max_streams: calls at a time over all peers; further ones are refused with
    ResourceError. grace_s: on leaving, calls under way have so long to end; then their streams break, and handlers
    that go on nevertheless are cancelled. uplink: what shapes all that this peer sends. Raises ResourceError when the
    port cannot be had.
    """
    server = grpc.aio.server(options=server_options(), maximum_concurrent_rpcs=max_streams)
    failed: BaseException | None = None
    async with asyncio.TaskGroup() as group:
        servicer = _Servicer(handlers, group, uplink)
        try:
            stubs.add_PeerServicer_to_server(servicer, server)
            stubs.add_PipelineServicer_to_server(servicer, server)
            stubs.add_GossipServicer_to_server(servicer, server)
            stubs.add_StateServicer_to_server(servicer, server)
            stubs.add_AnchorServicer_to_server(servicer, server)
            bound = _bind(server, host, port, credentials)
            await server.start()
            yield GrpcServer(_join(host, bound), bound)
        except BaseException as error:
            failed = error  # raised below: the group would wrap it
        await server.stop(grace_s)
        await servicer.finish()
    if failed is not None:
        raise failed


def _bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    address = _join(host, port)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError:
        raise ResourceError(
            f"cannot listen on {address}: {_why(host, port)}. Fix: stop what uses it, or set another `port` "
            f"(0 takes a free one) or `listen` address in the peer config"
        ) from None


def _why(host: str, port: int) -> str:
    """The system's word on why an address cannot be bound: gRPC does not pass it on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError as error:
        return f"port {port}: {error.strerror or error}"
    return f"port {port} could not be bound"


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
