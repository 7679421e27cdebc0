"""The shaper over real sockets. What it holds back is counted in bytes and messages: time is that of a busy machine."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from test_grpc_transport import Peer, chunk

from meshd.clock import SystemClock
from meshd.errors import MismatchError
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import LinkLost
from meshd.transport.grpc_client import GrpcTransport
from meshd.transport.grpc_server import GrpcServer, serve
from meshd.transport.shaper import BURST_S, LinkShape, wire_bytes
from meshd.transport.uplink import Uplink

MIB = 1 << 20
KIB = 1 << 10


def uplink(delay_s: float = 0.0, jitter_s: float = 0.0, rate_bps: float = 0.0) -> Uplink:
    return Uplink(LinkShape(delay_s, jitter_s, rate_bps), SystemClock(), random.Random(1))


class StatusPeer(Peer):
    async def status(self, request: pb.StatusRequest) -> pb.StatusReply:
        return pb.StatusReply(run_name="here")


@asynccontextmanager
async def pair(
    dialler: Uplink | None = None, server: Uplink | None = None, peer: Peer | None = None
) -> AsyncIterator[tuple[GrpcServer, GrpcTransport]]:
    """A server and a transport with an uplink each; after both are closed no task is left over."""
    before = asyncio.all_tasks()
    async with serve(peer or StatusPeer(), uplink=server) as served:
        transport = GrpcTransport(uplink=dialler)
        try:
            yield served, transport
        finally:
            await transport.close()
    # gRPC's own tasks of a call that was cancelled end a little later.
    if left := asyncio.all_tasks() - before:
        _, pending = await asyncio.wait(left, timeout=30)
        assert not pending


async def test_all_that_a_peer_sends_stays_under_its_rate() -> None:
    """Streams, a state fetch and calls at once: never more than a full bucket and the rate times the time since."""
    rate = 40_000_000
    async with pair(server=uplink(rate_bps=rate)) as (server, transport):
        began, got = time.monotonic(), 0

        def count(message: pb.LinkMessage | pb.FetchChunk | pb.StatusReply) -> None:
            nonlocal got
            got += wire_bytes(message.ByteSize())
            assert got <= rate / 8 * (time.monotonic() - began + BURST_S)

        async def echo() -> None:
            async with transport.link(server.address) as link:
                for number in range(16):
                    await link.send(chunk(number, 64 * KIB))
                await link.close()
                offsets = []
                async for message in link:
                    count(message)
                    offsets.append(message.chunk.offset)
                assert offsets == list(range(16))

        async def fetch() -> None:
            async with aclosing(transport.fetch(server.address, pb.FetchRequest(offset=8))) as chunks:
                async for message in chunks:
                    count(message)

        async def ask() -> None:
            for _ in range(5):
                count(await transport.status(server.address, pb.StatusRequest()))

        await asyncio.gather(echo(), echo(), fetch(), ask())
        assert got > 4 * MIB


async def test_what_is_urgent_overtakes_a_state_fetch() -> None:
    """On a link for which the fetch alone is ten seconds' work."""
    async with (
        pair(server=uplink(rate_bps=8 * MIB)) as (server, transport),
        aclosing(transport.fetch(server.address, pb.FetchRequest())) as chunks,
    ):
        offsets = [(await anext(chunks)).offset]
        fetching = asyncio.ensure_future(_rest(chunks, offsets))
        try:
            async with transport.link(server.address) as link:
                for number in range(8):
                    await link.send(chunk(number, 128 * KIB))
                messages = aiter(link)
                for number in range(8):
                    assert (await anext(messages)).chunk.offset == number
            assert (await transport.status(server.address, pb.StatusRequest())).run_name == "here"
            # A mebibyte went before them. Taking turns, eight of the state's would have come.
            assert len(offsets) <= 3
        finally:
            fetching.cancel()
            await asyncio.wait([fetching])


async def _rest(chunks: AsyncIterator[pb.FetchChunk], offsets: list[int]) -> None:
    async for message in chunks:
        offsets.append(message.offset)


async def test_delay_and_jitter_keep_order_and_let_messages_fly_together() -> None:
    """Each side's delay is paid once per direction, by all messages together."""
    there, back = uplink(delay_s=0.2, jitter_s=0.1), uplink(delay_s=0.1)
    async with pair(there, back) as (server, transport), transport.link(server.address) as link:
        sent: list[float] = []
        for number in range(200):
            sent.append(time.monotonic())
            await link.send(chunk(number))
        messages = aiter(link)
        trips = []
        for number in range(200):
            assert (await anext(messages)).chunk.offset == number
            trips.append(time.monotonic() - sent[number])
        assert min(trips) >= 0.3
        # One at a time they would have taken a minute. That 200 tiny messages take a tenth of it is not asked much.
        assert time.monotonic() - sent[0] < 200 * 0.3 / 10


async def test_calls_are_delayed_by_both_sides_and_refusals_too() -> None:
    peer = StatusPeer()
    async with pair(uplink(delay_s=0.1), uplink(delay_s=0.2), peer) as (server, transport):
        await transport.status(server.address, pb.StatusRequest())  # connected now
        began = time.monotonic()
        await transport.hello(server.address, pb.HelloRequest())
        assert time.monotonic() - began >= 0.3
        peer.error = MismatchError("run x, not y")
        began = time.monotonic()
        with pytest.raises(MismatchError, match="run x, not y"):
            await transport.hello(server.address, pb.HelloRequest())
        assert time.monotonic() - began >= 0.3


async def test_what_was_said_before_the_end_arrives_on_a_slow_link() -> None:
    peer = StatusPeer()
    async with pair(uplink(delay_s=0.3), uplink(delay_s=0.3), peer) as (server, transport):
        async with transport.link(server.address) as link:
            await link.send(chunk(1))
        assert await peer.link_ended.get() == "end"
        async with transport.gossip(server.address) as gossip:
            await gossip.send(pb.GossipMessage(open=pb.GossipOpen()))
            assert [message.done.checksum async for message in gossip] == [7]
        peer.error = MismatchError("changed")
        chunks = transport.fetch(server.address, pb.FetchRequest(offset=8))
        assert [(await anext(chunks)).offset, (await anext(chunks)).offset] == [8, 9]
        with pytest.raises(MismatchError, match="changed"):
            await anext(chunks)


async def test_a_fetch_that_is_left_ends_though_its_chunks_wait_for_the_link() -> None:
    peer = StatusPeer()
    async with pair(server=uplink(rate_bps=8 * MIB), peer=peer) as (server, transport):
        async with aclosing(transport.fetch(server.address, pb.FetchRequest())) as chunks:
            assert (await anext(chunks)).offset == 0
        await asyncio.wait_for(peer.fetch_closed.wait(), 30)


async def test_a_stream_that_is_closed_ends_though_a_message_waits_for_the_link() -> None:
    """The message alone is over a minute's work."""
    async with pair(uplink(rate_bps=100_000)) as (server, transport):

        async def close_it() -> None:
            async with transport.link(server.address) as link:
                sending = asyncio.ensure_future(link.send(chunk(0, MIB)))
                await asyncio.sleep(0)
                await link.close()
                with pytest.raises(LinkLost, match="closed on this side"):
                    await sending

        await asyncio.wait_for(close_it(), 60)
