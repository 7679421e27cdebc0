"""gRPC over real sockets on loopback: the same promises as the network in memory, and what only a wire can break."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import pytest

from meshd.errors import ConfigError, DataError, MismatchError, NetworkError, ResourceError
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import Duplex, LinkLost, NotHere
from meshd.transport.grpc_client import GrpcTransport
from meshd.transport.grpc_server import GrpcServer, serve

MIB = 1 << 20


def chunk(offset: int, size: int = 8) -> pb.LinkMessage:
    return pb.LinkMessage(chunk=pb.Chunk(offset=offset, data=bytes(size)))


class Peer:
    """Echoes links; raises `error` where it is set."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.link_ended: asyncio.Queue[str] = asyncio.Queue()
        self.fetch_closed = asyncio.Event()
        self.status_cancelled = asyncio.Event()

    async def hello(self, request: pb.HelloRequest) -> pb.HelloReply:
        if self.error:
            raise self.error
        return pb.HelloReply(name=f"hello {request.name}")

    async def get_run(self, request: pb.GetRunRequest) -> pb.GetRunReply:
        return pb.GetRunReply(resolved_run=bytes(int(request.run_id)))

    async def status(self, request: pb.StatusRequest) -> pb.StatusReply:
        try:
            await asyncio.Event().wait()
        finally:
            self.status_cancelled.set()
        return pb.StatusReply()

    async def link(self, duplex: Duplex[pb.LinkMessage]) -> None:
        try:
            async for message in duplex:
                await duplex.send(message)
                if self.error:
                    raise self.error
            self.link_ended.put_nowait("end")
        except LinkLost:
            self.link_ended.put_nowait("lost")

    async def gossip(self, duplex: Duplex[pb.GossipMessage]) -> None:
        """One answer, then the end: the dialler learns of both."""
        await anext(aiter(duplex))
        await duplex.send(pb.GossipMessage(done=pb.GossipDone(checksum=7)))

    async def offer(self, request: pb.PriorOffer) -> pb.PriorAnswer:
        return pb.PriorAnswer(seen=[pb.Seen(author=request.peer_id, version=len(request.notices))])

    async def list_bundles(self, request: pb.ListRequest) -> pb.ListReply:
        return pb.ListReply(bundles=["run/data"])

    async def manifest(self, request: pb.ManifestRequest) -> pb.ManifestReply:
        raise NotHere(f"no bundle {request.bundle}")

    async def fetch(self, request: pb.FetchRequest) -> AsyncIterator[pb.FetchChunk]:
        try:
            for offset in range(request.offset, 10):
                yield pb.FetchChunk(offset=offset, data=bytes(MIB))
            if self.error:
                raise self.error
        finally:
            self.fetch_closed.set()


@asynccontextmanager
async def pair(peer: Peer | None = None, **options: Any) -> AsyncIterator[tuple[GrpcServer, GrpcTransport]]:
    """A server and a transport; after both are closed no task is left over."""
    before = asyncio.all_tasks()
    async with serve(peer or Peer(), **options) as server:
        transport = GrpcTransport()
        try:
            yield server, transport
        finally:
            await transport.close()
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - before
    assert not left


@pytest.fixture(autouse=True)
def no_noise(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """C10: no tracebacks and no complaints of asyncio about forgotten tasks."""
    yield
    deliberate = ("deliberate", "over the limit")
    noisy = [r for when in ("setup", "call") for r in caplog.get_records(when) if r.levelno >= logging.ERROR]
    unasked = [r for r in noisy if not any(word in str(r.exc_info) for word in deliberate)]
    assert not [r for r in unasked if not late_for_an_earlier_loop(r)]


def late_for_an_earlier_loop(record: logging.LogRecord) -> bool:
    """gRPC has one poller for all loops of a process: an event for an earlier test's loop, closed since, becomes a
    complaint in the loop that runs now."""
    error = record.exc_info and record.exc_info[1]
    of_the_poller = record.name == "asyncio" and "PollerCompletionQueue._handle_events" in record.getMessage()
    return of_the_poller and isinstance(error, RuntimeError) and str(error) == "Event loop is closed"


@contextmanager
def server_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process of its own that serves an echoing Peer, killed at the end."""
    code = (
        "import asyncio, sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_grpc_transport import Peer, serve\n"
        "async def main():\n"
        "    async with serve(Peer()) as server:\n"
        "        print(server.address, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, os.path.dirname(__file__)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_unary_calls() -> None:
    async with pair() as (server, transport):
        assert server.address == f"127.0.0.1:{server.port}"
        assert (await transport.hello(server.address, pb.HelloRequest(name="x"))).name == "hello x"
        assert list((await transport.list_bundles(server.address, pb.ListRequest())).bundles) == ["run/data"]
        (seen,) = (await transport.offer(server.address, pb.PriorOffer(peer_id="x"))).seen
        assert (seen.author, seen.version) == ("x", 0)
        with pytest.raises(NotHere, match="no bundle base/3"):
            await transport.manifest(server.address, pb.ManifestRequest(bundle="base/3"))


async def test_many_megabytes_both_ways_on_one_stream() -> None:
    async with pair() as (server, transport), transport.link(server.address) as link:

        async def write() -> None:
            for offset in range(32):
                await link.send(chunk(offset, MIB))
            await link.close()

        async with asyncio.TaskGroup() as group:
            group.create_task(write())
            echoed = [(message.chunk.offset, len(message.chunk.data)) async for message in link]
        assert echoed == [(offset, MIB) for offset in range(32)]


async def test_several_streams_at_once_keep_apart() -> None:
    async with pair() as (server, transport):

        async def talk(number: int) -> list[int]:
            async with transport.link(server.address) as link:
                for step in range(20):
                    await link.send(chunk(number * 100 + step, 50_000))
                await link.close()
                return [message.chunk.offset async for message in link]

        answers = await asyncio.gather(*(talk(number) for number in range(8)))
        assert answers == [[number * 100 + step for step in range(20)] for number in range(8)]


async def test_the_last_message_of_each_side_arrives() -> None:
    async with pair() as (server, transport):
        for _ in range(20):
            async with transport.gossip(server.address) as gossip:
                await gossip.send(pb.GossipMessage(open=pb.GossipOpen()))
                assert [message.done.checksum async for message in gossip] == [7]
                with pytest.raises(LinkLost, match="closed the stream"):
                    await gossip.send(pb.GossipMessage())


async def test_leaving_the_block_is_a_clean_end_and_delivers_what_was_sent() -> None:
    peer = Peer()
    async with pair(peer) as (server, transport):
        async with transport.link(server.address) as link:
            await link.send(chunk(1))
        assert await peer.link_ended.get() == "end"


async def test_an_error_in_the_block_breaks_the_stream_and_stays_itself() -> None:
    peer = Peer()

    async def fail(transport: GrpcTransport, address: str) -> None:
        async with transport.link(address) as link:
            await link.send(chunk(0))
            await anext(aiter(link))
            raise ZeroDivisionError

    async with pair(peer) as (server, transport):
        with pytest.raises(ZeroDivisionError):
            await fail(transport, server.address)
        assert await peer.link_ended.get() == "lost"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MismatchError("run x, not y"), MismatchError),
        (ResourceError("no places"), ResourceError),
        (NotHere("no file"), NotHere),
        (NetworkError("draining"), LinkLost),
        (DataError("disk says no"), LinkLost),
        (ConfigError("a.b", 1, "wrong", "2"), LinkLost),
    ],
)
async def test_a_refusal_crosses_with_its_kind_and_text(error: Exception, kind: type[Exception]) -> None:
    peer = Peer()
    peer.error = error
    async with pair(peer) as (server, transport):
        with pytest.raises(kind, match=f"{server.address}.*{error}"):
            await transport.hello(server.address, pb.HelloRequest())
        async with transport.link(server.address) as link:
            await link.send(chunk(3))
            messages = aiter(link)
            assert (await anext(messages)).chunk.offset == 3  # what was said before the refusal arrives
            with pytest.raises(kind, match=f"{server.address}.*{error}"):
                await anext(messages)
            with pytest.raises(kind):
                await link.send(chunk(4))
        chunks = transport.fetch(server.address, pb.FetchRequest(offset=9))
        assert (await anext(chunks)).offset == 9
        with pytest.raises(kind):
            await anext(chunks)


async def test_a_bug_in_a_handler_is_logged_and_costs_one_call(caplog: pytest.LogCaptureFixture) -> None:
    peer = Peer()
    peer.error = ZeroDivisionError("deliberate")
    async with pair(peer) as (server, transport):
        with pytest.raises(LinkLost, match="internal error"):
            await transport.hello(server.address, pb.HelloRequest())
        async with transport.link(server.address) as link:
            await link.send(chunk(0))
            await anext(aiter(link))
            with pytest.raises(LinkLost, match="internal error"):
                await anext(aiter(link))
        assert [
            record.exc_info is not None for record in caplog.records if record.levelno >= logging.ERROR
        ] == [True] * 2
        peer.error = None
        await transport.hello(server.address, pb.HelloRequest())


async def test_an_oversize_message_is_refused_on_both_sides() -> None:
    async with pair() as (server, transport):
        async with transport.link(server.address) as link:
            with pytest.raises(ValueError, match="over the limit"):
                await link.send(chunk(0, 4 * MIB))
        with pytest.raises(LinkLost, match="internal error"):  # the handler's bug: it should have sent chunks
            await transport.get_run(server.address, pb.GetRunRequest(run_id=str(4 * MIB)))


async def test_a_server_refuses_an_oversize_message_of_a_foreign_client() -> None:
    import grpc

    from meshd.proto import meshd_pb2_grpc as stubs

    async with pair() as (server, _), grpc.aio.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stubs.PeerStub(channel).Hello(pb.HelloRequest(name="x" * (4 * MIB)))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_more_streams_than_allowed_are_refused() -> None:
    async with pair(max_streams=1) as (server, transport), transport.link(server.address) as link:
        await link.send(chunk(0))
        await anext(aiter(link))
        with pytest.raises(ResourceError, match="out of room"):
            await transport.hello(server.address, pb.HelloRequest())


async def test_a_fetch_left_early_ends_at_the_peer() -> None:
    peer = Peer()
    async with pair(peer) as (server, transport):
        async with aclosing(transport.fetch(server.address, pb.FetchRequest())) as chunks:
            assert (await anext(chunks)).offset == 0
        await peer.fetch_closed.wait()


async def test_a_cancelled_read_or_send_harms_nothing() -> None:
    async with pair() as (server, transport), transport.link(server.address) as link:
        messages = aiter(link)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(messages), 0.01)
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while True:  # the echo stops when nobody reads it, and so does this
                await link.send(chunk(sent, MIB))
                sent += 1

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(flood(), 0.5)
        assert sent > 0
        for expected in range(sent):
            assert (await anext(messages)).chunk.offset == expected


async def test_a_task_cancelled_mid_stream_leaves_nothing_behind() -> None:
    peer = Peer()
    async with pair(peer) as (server, transport):
        talking = asyncio.Event()

        async def talk() -> None:
            async with transport.link(server.address) as link:
                while True:
                    await link.send(chunk(0, MIB))
                    await anext(aiter(link))
                    talking.set()

        before = asyncio.all_tasks()
        task = asyncio.ensure_future(talk())
        await talking.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await peer.link_ended.get() == "lost"
        waiting = asyncio.ensure_future(transport.status(server.address, pb.StatusRequest()))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await peer.status_cancelled.wait()
        await asyncio.sleep(0.1)
        left = {t for t in asyncio.all_tasks() - before if "AioServer" not in repr(t)}  # its own loop
        assert not left


async def test_a_port_in_use_is_named_with_the_fix() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=f"{port}: Address already in use. Fix: .*`port`"):
            async with serve(Peer(), port=port):
                pass
    async with pair() as (server, _):
        with pytest.raises(ResourceError, match=f"{server.port}: Address already in use"):
            async with serve(Peer(), port=server.port):
                pass


async def test_nobody_there_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    transport = GrpcTransport()
    with pytest.raises(LinkLost, match=f"{address} is not reached"):
        await transport.hello(address, pb.HelloRequest())
    with pytest.raises(LinkLost, match=f"{address} is not reached"):
        async with transport.link(address):
            pass
    async with serve(Peer(), port=int(address.rsplit(":")[1])):  # and it is not remembered
        await transport.hello(address, pb.HelloRequest())
    await transport.close()


async def test_a_restarted_server_is_reached_at_the_first_call() -> None:
    transport = GrpcTransport()
    async with serve(Peer(), grace_s=0) as server:
        lost = asyncio.ensure_future(hold_until_lost(transport, server.address))
        await transport.hello(server.address, pb.HelloRequest())
    await lost
    with pytest.raises(LinkLost):
        await transport.hello(server.address, pb.HelloRequest())
    async with serve(Peer(), port=server.port):
        await transport.hello(server.address, pb.HelloRequest())
    await transport.close()


async def hold_until_lost(transport: GrpcTransport, address: str) -> None:
    async with transport.link(address) as link:
        with pytest.raises(LinkLost):
            await anext(aiter(link))


async def test_a_silent_listener_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshd.transport.grpc_client.CONNECT_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        transport = GrpcTransport()
        with pytest.raises(LinkLost, match=r"no connection within 0.2 s"):
            await transport.hello(f"127.0.0.1:{sock.getsockname()[1]}", pb.HelloRequest())
        await transport.close()


async def test_a_stopped_server_breaks_its_streams() -> None:
    peer = Peer()
    before = asyncio.all_tasks()
    transport = GrpcTransport()
    async with asyncio.TaskGroup() as group, serve(peer, grace_s=0.1) as server:
        opened = asyncio.Event()

        async def hold() -> None:
            async with transport.link(server.address) as link:
                await link.send(chunk(0))
                await anext(aiter(link))
                opened.set()
                with pytest.raises(LinkLost):
                    await anext(aiter(link))

        group.create_task(hold())
        await opened.wait()
    assert await peer.link_ended.get() == "lost"
    await transport.close()
    assert asyncio.all_tasks() == before


async def test_a_killed_server_process_is_noticed_at_once() -> None:
    with server_process() as (process, address):
        transport = GrpcTransport()
        async with transport.link(address) as link:
            await link.send(chunk(0))
            await anext(aiter(link))
            process.kill()
            async with asyncio.timeout(
                3
            ):  # far below the time-outs of keepalive: the socket's end is what tells
                with pytest.raises(LinkLost, match=address):
                    await anext(aiter(link))
                with pytest.raises(LinkLost, match=address):
                    await link.send(chunk(1))
        await transport.close()


@pytest.mark.parametrize(
    "end",
    [pytest.param("SIGKILL"), pytest.param("SIGSTOP", marks=pytest.mark.slow)],  # at once; within seconds
)
async def test_a_dead_or_frozen_dialler_is_a_lost_stream_to_the_handler(end: str) -> None:
    peer = Peer()
    code = (
        "import asyncio, os, signal, sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_grpc_transport import GrpcTransport, chunk\n"
        "async def main():\n"
        "    async with GrpcTransport().link(sys.argv[2]) as link:\n"
        "        await link.send(chunk(0))\n"
        "        await anext(aiter(link))\n"
        "        os.kill(os.getpid(), signal.Signals[sys.argv[3]])\n"
        "asyncio.run(main())"
    )
    async with pair(peer) as (server, _):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, os.path.dirname(__file__), server.address, end
        )
        try:
            async with asyncio.timeout(20):
                assert await peer.link_ended.get() == "lost"
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest.mark.slow
async def test_a_frozen_server_is_noticed_within_seconds() -> None:
    with server_process() as (process, address):
        transport = GrpcTransport()
        async with transport.link(address) as link:
            await link.send(chunk(0))
            await anext(aiter(link))
            process.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(20):  # 62 s without the ping time-out
                with pytest.raises(LinkLost, match=address):
                    await anext(aiter(link))
        await transport.close()


def test_it_works_under_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")
    tests: list[Callable[[], Coroutine[Any, Any, None]]] = [
        test_many_megabytes_both_ways_on_one_stream,
        test_a_task_cancelled_mid_stream_leaves_nothing_behind,
        test_a_stopped_server_breaks_its_streams,
    ]
    for test in tests:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test())
