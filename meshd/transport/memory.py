"""A network inside one process: the transport of tests and simulation.

What works here works on the wire: messages are serialized, sizes and buffers are bounded as over gRPC, errors cross
as status codes. What breaks on the wire breaks here, on purpose: peers die, pairs are cut off, messages are delayed,
lost, doubled or replaced. Deterministic on a VirtualLoop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar, cast

from google.protobuf.message import Message

from meshd.clock import Clock, SystemClock
from meshd.errors import MeshdError
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import Duplex, Handlers, LinkLost
from meshd.transport.limits import CLOSE_GRACE_S, MAX_MESSAGE_BYTES, UNARY_TIMEOUT_S, checked_size
from meshd.transport.options import CONNECT_TIMEOUT_S, PING_MS
from meshd.transport.queue import ByteQueue, Failure
from meshd.transport.status import Status

M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Message)


@dataclass(frozen=True)
class Delivery:
    """One message as the tap wants it delivered, `delay_s` later than it would be. Streams stay in order: a delayed
    message holds back those behind it."""

    message: Message
    delay_s: float = 0.0


# As over gRPC: a ping goes out after so long without news, and is waited for as long again.
_UNANSWERED_S = 2 * PING_MS / 1000

# tap(source address, destination address, message) -> deliveries. None at all drops the message, two double it.
# It sees every message, unary requests and replies too, and owns the copy it is given.
Tap = Callable[[str, str, Message], Sequence[Delivery]]


def _lost(text: str) -> Failure:
    return lambda: LinkLost(text)


class _Pipe(Generic[M]):
    """One direction of one call: serialized messages, each with the time at which it arrives."""

    def __init__(self, net: MemoryNetwork, source: str, target: str, kind: type[M]) -> None:
        self._net, self._source, self._target, self._kind = net, source, target, kind
        self.queue: ByteQueue[tuple[bytes, float]] = ByteQueue(net.buffer_bytes)

    async def send(self, message: M) -> None:
        checked_size(message)
        copy = self._kind.FromString(message.SerializeToString())
        net = self._net
        if net.muted(self._source, self._target):
            return
        tapped = [Delivery(copy)] if net.tap is None else net.tap(self._source, self._target, copy)
        for delivery in tapped:
            data = delivery.message.SerializeToString()
            arrives = net.clock.monotonic() + net.delay(self._source, self._target) + delivery.delay_s
            await self.queue.put((data, arrives), len(data))

    async def receive(self) -> M | None:
        """The next message once it has arrived; None at the end of the stream."""
        clock = self._net.clock
        while (item := await self.queue.head()) is not None:
            data, arrives = item
            wait_s = arrives - clock.monotonic()
            if wait_s <= 0:
                self.queue.pop()
                return self._kind.FromString(data)
            # Looked at again afterwards: the stream may break while the message is on its way.
            await clock.sleep(wait_s)
        return None


class _MemoryDuplex(Generic[M, R]):
    """One end of a call: sends M, receives R."""

    def __init__(self, remote: str, outgoing: _Pipe[M], incoming: _Pipe[R], *, serving: bool) -> None:
        self._remote, self._outgoing, self._incoming, self._serving = remote, outgoing, incoming, serving

    @property
    def remote(self) -> str:
        return self._remote

    async def send(self, message: M) -> None:
        await self._outgoing.send(message)

    async def receive(self) -> R | None:
        return await self._incoming.receive()

    def __aiter__(self) -> AsyncIterator[R]:
        return self

    async def __anext__(self) -> R:
        message = await self._incoming.receive()
        if message is None:
            raise StopAsyncIteration
        return message

    async def close(self) -> None:
        ended = _lost(f"the stream to {self._remote} was closed on this side")
        self._outgoing.queue.close(ended)
        if self._serving:
            self._incoming.queue.abandon(_lost("the peer closed the stream"))


class _Call:
    """One call under way between `client` and `server`."""

    def __init__(
        self, net: MemoryNetwork, client: str, server: str, up: type[Message], down: type[Message]
    ) -> None:
        self.client, self.server = client, server
        self.up, self.down = _Pipe(net, client, server, up), _Pipe(net, server, client, down)
        self.task: asyncio.Task[None] | None = None

    async def serve(self, handler: Callable[[_MemoryDuplex[Message, Message]], Awaitable[None]]) -> None:
        """Run the handler and carry its outcome to the dialler."""
        try:
            await handler(_MemoryDuplex(self.client, self.down, self.up, serving=True))
        except MeshdError as error:
            status = Status.of(error)
            self.down.queue.fail(lambda: status.error(self.server))
            self.up.queue.fail(lambda: status.error(self.server), discard=True)
        except asyncio.CancelledError:
            self.lose(f"{self.server} is gone")
            raise
        else:
            ended = _lost(f"{self.server} closed the stream")
            self.down.queue.close(ended)
            self.up.queue.abandon(ended)

    async def finish(self) -> None:
        """The dialler's clean end: what was sent still arrives, then the handler has a moment to return."""
        self.up.queue.close(_lost(f"the stream to {self.server} was closed on this side"))
        with suppress(MeshdError, TimeoutError):
            async with asyncio.timeout(CLOSE_GRACE_S):
                while await self.down.receive() is not None:
                    pass

    def lose(self, reason: str) -> None:
        """Break both directions; what is on its way is lost."""
        self.up.queue.fail(_lost(reason), discard=True)
        self.down.queue.fail(_lost(reason), discard=True)


class MemoryNetwork:
    """Peers by address. Use as `async with MemoryNetwork(clock) as net`: leaving cancels all handlers.

    A handler's MeshdError crosses to the dialler; any other exception is a bug and ends the whole network.
    """

    def __init__(self, clock: Clock | None = None, *, buffer_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """buffer_bytes: what each direction of each stream holds before its sender waits."""
        self.clock: Clock = clock or SystemClock()
        self.buffer_bytes = buffer_bytes
        self.tap: Tap | None = None
        self._handlers: dict[str, Handlers] = {}
        self._dead: set[str] = set()
        self._cuts: set[frozenset[str]] = set()
        self._mutes: set[frozenset[str]] = set()
        self._delays: dict[frozenset[str], float] = {}
        self._calls: dict[asyncio.Task[None], _Call] = {}  # in the order they were opened
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> MemoryNetwork:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handlers.clear()
        for task, call in list(self._calls.items()):
            call.lose("the network was shut down")
            task.cancel()
        if error is not None and not isinstance(error, asyncio.CancelledError):
            # The body's own error leaves as it is, not in a group: all tasks are cancelled already.
            kind = error = trace = None
        await self._group.__aexit__(kind, error, trace)

    def register(self, address: str, handlers: Handlers) -> None:
        """Serve `address` with `handlers`; a killed peer comes back to life so."""
        self._handlers[address] = handlers
        self._dead.discard(address)

    def unregister(self, address: str) -> None:
        """Take no new calls at `address`; those under way go on."""
        self._handlers.pop(address, None)

    def transport(self, local_address: str) -> MemoryTransport:
        """The dialling side of the peer at `local_address` (which need not be registered)."""
        return MemoryTransport(self, local_address)

    def kill(self, address: str) -> None:
        """As if the process died: its handlers are cancelled, its streams break, it can neither dial nor be dialled."""
        self.unregister(address)
        self._dead.add(address)
        for task, call in list(self._calls.items()):
            if address in (call.client, call.server):
                call.lose(f"{address} is gone")
            if address == call.server:
                task.cancel()

    def cut(self, a: str, b: str) -> None:
        """Part two peers: their streams break on both sides, and neither reaches the other until `heal`."""
        self._cuts.add(frozenset((a, b)))
        for call in list(self._calls.values()):
            if {call.client, call.server} == {a, b}:
                call.lose(f"{a} and {b} are cut off from each other")

    def mute(self, a: str, b: str) -> None:
        """From now on what two peers send each other vanishes without a word, as with a cable pulled or a peer frozen:
        their streams break when pings stay unanswered, dialling times out, until `heal`."""
        pair = frozenset((a, b))
        if pair not in self._mutes:
            self._mutes.add(pair)
            calls = [call for call in self._calls.values() if {call.client, call.server} == pair]
            self._group.create_task(self._starve(pair, calls))

    async def _starve(self, pair: frozenset[str], calls: Sequence[_Call]) -> None:
        await self.clock.sleep(_UNANSWERED_S)
        if pair in self._mutes:
            for call in calls:
                call.lose(f"{call.client} and {call.server}: no answer to a ping for {_UNANSWERED_S:g} s")

    def muted(self, a: str, b: str) -> bool:
        """Whether what one sends the other vanishes."""
        return frozenset((a, b)) in self._mutes

    async def connect(self, local: str, remote: str) -> None:
        """Raises LinkLost when nothing comes back from there."""
        if self.muted(local, remote):
            await self.clock.sleep(CONNECT_TIMEOUT_S)
            if self.muted(local, remote):
                raise LinkLost(f"{remote} is not reached: no answer within {CONNECT_TIMEOUT_S:g} s")

    def heal(self, a: str | None = None, b: str | None = None) -> None:
        """Undo one cut or mute; all of them when called without addresses."""
        for broken in (self._cuts, self._mutes):
            if a is None or b is None:
                broken.clear()
            else:
                broken.discard(frozenset((a, b)))

    def set_delay(self, a: str, b: str, seconds: float) -> None:
        """One-way delay of each message between two peers, in both directions, from now on."""
        self._delays[frozenset((a, b))] = seconds

    def delay(self, a: str, b: str) -> float:
        """One-way delay between two peers, seconds."""
        return self._delays.get(frozenset((a, b)), 0.0)

    def reach(self, local: str, remote: str) -> Handlers:
        """The handlers at `remote`, or LinkLost with the reason."""
        if local in self._dead:
            raise LinkLost(f"{local} is gone")
        if frozenset((local, remote)) in self._cuts:
            raise LinkLost(f"{remote} is not reached: cut off from {local}")
        if remote not in self._handlers:
            raise LinkLost(f"{remote} is not reached: nobody listens there")
        return self._handlers[remote]

    def start(
        self, call: _Call, handler: Callable[[_MemoryDuplex[Message, Message]], Awaitable[None]]
    ) -> None:
        """Serve `call` with `handler`, in the network's task group."""
        task = self._group.create_task(call.serve(handler), name=f"{call.server} serves {call.client}")
        call.task = task
        self._calls[task] = call
        task.add_done_callback(self._calls.pop)


class MemoryTransport:
    """`Transport` of one peer of a MemoryNetwork."""

    def __init__(self, net: MemoryNetwork, local: str) -> None:
        self._net, self._local = net, local

    async def hello(self, address: str, request: pb.HelloRequest) -> pb.HelloReply:
        return await self._unary(address, request, pb.HelloReply, self._reach(address).hello)

    async def get_run(self, address: str, request: pb.GetRunRequest) -> pb.GetRunReply:
        return await self._unary(address, request, pb.GetRunReply, self._reach(address).get_run)

    async def status(self, address: str, request: pb.StatusRequest) -> pb.StatusReply:
        return await self._unary(address, request, pb.StatusReply, self._reach(address).status)

    async def list_bundles(self, address: str, request: pb.ListRequest) -> pb.ListReply:
        return await self._unary(address, request, pb.ListReply, self._reach(address).list_bundles)

    async def manifest(self, address: str, request: pb.ManifestRequest) -> pb.ManifestReply:
        return await self._unary(address, request, pb.ManifestReply, self._reach(address).manifest)

    async def offer(self, address: str, request: pb.PriorOffer) -> pb.PriorAnswer:
        return await self._unary(address, request, pb.PriorAnswer, self._reach(address).offer)

    def link(self, address: str) -> AbstractAsyncContextManager[Duplex[pb.LinkMessage]]:
        return self._stream(address, pb.LinkMessage, lambda handlers: handlers.link)

    def gossip(self, address: str) -> AbstractAsyncContextManager[Duplex[pb.GossipMessage]]:
        return self._stream(address, pb.GossipMessage, lambda handlers: handlers.gossip)

    async def fetch(self, address: str, request: pb.FetchRequest) -> AsyncGenerator[pb.FetchChunk, None]:
        """Close it (contextlib.aclosing) when it is left before its end."""
        handlers = self._reach(address)

        async def serve(duplex: _MemoryDuplex[Message, Message]) -> None:
            received = await duplex.receive()
            if received is None:
                return
            chunks = cast(
                AsyncGenerator[pb.FetchChunk, None], handlers.fetch(cast(pb.FetchRequest, received))
            )
            async with aclosing(chunks):
                async for chunk in chunks:
                    await duplex.send(chunk)

        async with self._call(address, pb.FetchRequest, pb.FetchChunk, serve, cancel=True) as duplex:
            await duplex.send(request)
            while (chunk := await duplex.receive()) is not None:
                yield cast(pb.FetchChunk, chunk)

    async def close(self) -> None:
        """Nothing is held between calls."""

    def _reach(self, address: str) -> Handlers:
        return self._net.reach(self._local, address)

    async def _unary(
        self, address: str, request: M, reply: type[R], handler: Callable[[M], Awaitable[R]]
    ) -> R:
        async def serve(duplex: _MemoryDuplex[Message, Message]) -> None:
            received = await duplex.receive()
            if received is not None:
                await duplex.send(await handler(cast(M, received)))

        try:
            async with (
                asyncio.timeout(UNARY_TIMEOUT_S),
                self._call(address, type(request), reply, serve, cancel=True) as duplex,
            ):
                await duplex.send(request)
                answer = await duplex.receive()
        except TimeoutError:
            answer = None
        if answer is None:
            raise LinkLost(f"{address} did not answer")
        return cast(R, answer)

    @asynccontextmanager
    async def _stream(
        self,
        address: str,
        kind: type[M],
        choose: Callable[[Handlers], Callable[[Duplex[M]], Awaitable[None]]],
    ) -> AsyncIterator[Duplex[M]]:
        handler = choose(self._reach(address))

        async def serve(duplex: _MemoryDuplex[Message, Message]) -> None:
            await handler(cast(Duplex[M], duplex))

        async with self._call(address, kind, kind, serve, cancel=False) as duplex:
            yield cast(Duplex[M], duplex)

    @asynccontextmanager
    async def _call(
        self,
        address: str,
        up: type[Message],
        down: type[Message],
        handler: Callable[[_MemoryDuplex[Message, Message]], Awaitable[None]],
        *,
        cancel: bool,
    ) -> AsyncIterator[_MemoryDuplex[Message, Message]]:
        """Open one call. cancel: its handler ends with it; else the handler is told by its stream (LinkLost)."""
        await self._net.connect(self._local, address)
        call = _Call(self._net, self._local, address, up, down)
        self._net.start(call, handler)
        try:
            yield _MemoryDuplex(address, call.up, call.down, serving=False)
            await call.finish()
        finally:
            call.lose(f"{self._local} closed the stream")
            if cancel and call.task is not None:
                call.task.cancel()
