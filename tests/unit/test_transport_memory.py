"""The network in memory: order, bounds, errors and faults as over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest

from meshd.errors import MismatchError, NetworkError, ResourceError
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock, run_virtual
from meshd.transport.base import Duplex, LinkLost, NotHere, Transport
from meshd.transport.memory import Delivery, MemoryNetwork


def chunk(offset: int, size: int = 8) -> pb.LinkMessage:
    return pb.LinkMessage(chunk=pb.Chunk(offset=offset, data=bytes(size)))


class Peer:
    """Echoes links; what else it does is set by the test."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.link_ended: list[str] = []
        self.fetch_closed = False

    async def hello(self, request: pb.HelloRequest) -> pb.HelloReply:
        if self.error:
            raise self.error
        return pb.HelloReply(name=f"hello {request.name}")

    async def get_run(self, request: pb.GetRunRequest) -> pb.GetRunReply:
        return pb.GetRunReply(resolved_run=request.run_id.encode())

    async def status(self, request: pb.StatusRequest) -> pb.StatusReply:
        await asyncio.Event().wait()
        return pb.StatusReply()

    async def link(self, duplex: Duplex[pb.LinkMessage]) -> None:
        try:
            async for message in duplex:
                await duplex.send(message)
                if self.error:
                    raise self.error
            self.link_ended.append("end")
        except LinkLost as error:
            self.link_ended.append(str(error))
        except asyncio.CancelledError:
            self.link_ended.append("cancelled")
            raise

    async def gossip(self, duplex: Duplex[pb.GossipMessage]) -> None:
        """Never reads."""
        await asyncio.Event().wait()

    async def offer(self, request: pb.PriorOffer) -> pb.PriorAnswer:
        return pb.PriorAnswer(seen=[pb.Seen(author=request.peer_id, version=len(request.notices))])

    async def list_bundles(self, request: pb.ListRequest) -> pb.ListReply:
        return pb.ListReply(bundles=["run/data"])

    async def manifest(self, request: pb.ManifestRequest) -> pb.ManifestReply:
        raise NotHere(f"no bundle {request.bundle}")

    async def fetch(self, request: pb.FetchRequest) -> AsyncIterator[pb.FetchChunk]:
        try:
            for offset in range(request.offset, 10):
                yield pb.FetchChunk(offset=offset)
        finally:
            self.fetch_closed = True


def on_network(body: Callable[[MemoryNetwork, Peer, Transport], Awaitable[None]]) -> None:
    """Run `body` with peer B served at `b`, dialled from `a`, on virtual time."""

    async def main() -> None:
        async with MemoryNetwork(VirtualClock()) as net:
            peer = Peer()
            net.register("b", peer)
            await body(net, peer, net.transport("a"))

    run_virtual(main())


def test_unary_calls_and_fetch() -> None:
    async def body(net: MemoryNetwork, peer: Peer, a: Transport) -> None:
        assert (await a.hello("b", pb.HelloRequest(name="x"))).name == "hello x"
        assert (await a.get_run("b", pb.GetRunRequest(run_id="r"))).resolved_run == b"r"
        assert list((await a.list_bundles("b", pb.ListRequest())).bundles) == ["run/data"]
        assert [c.offset async for c in a.fetch("b", pb.FetchRequest(offset=7))] == [7, 8, 9]
        (seen,) = (await a.offer("b", pb.PriorOffer(peer_id="x", notices=[pb.SignedNotice()]))).seen
        assert (seen.author, seen.version) == ("x", 1)
        assert asyncio.get_running_loop().time() == 0.0

    on_network(body)


def test_a_fetch_left_early_ends_at_the_peer() -> None:
    async def body(net: MemoryNetwork, peer: Peer, a: Transport) -> None:
        async with aclosing(a.fetch("b", pb.FetchRequest())) as chunks:
            async for _ in chunks:
                break
        await asyncio.sleep(1)
        assert peer.fetch_closed

    on_network(body)


def test_a_link_echoes_in_order_and_its_end_reaches_the_handler() -> None:
    async def body(net: MemoryNetwork, peer: Peer, a: Transport) -> None:
        async with a.link("b") as link:
            for offset in range(20):
                await link.send(chunk(offset))
            await link.close()
            assert [message.chunk.offset async for message in link] == list(range(20))
            with pytest.raises(LinkLost, match="closed on this side"):
                await link.send(chunk(0))
        assert peer.link_ended == ["end"]

    on_network(body)


def test_messages_are_copies() -> None:
    async def body(net: MemoryNetwork, peer: Peer, a: Transport) -> None:
        async with a.link("b") as link:
            sent = chunk(1)
            await link.send(sent)
            sent.chunk.offset = 2
            async for message in link:
                assert message.chunk.offset == 1
                break

    on_network(body)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MismatchError("run x, not y"), MismatchError),
        (ResourceError("no places"), ResourceError),
        (NotHere("no file"), NotHere),
        (NetworkError("draining"), LinkLost),
    ],
)
def test_a_refusal_crosses_with_its_kind_and_text(error: Exception, kind: type[Exception]) -> None:
    async def body(net: MemoryNetwork, peer: Peer, a: Transport) -> None:
        peer.error = error
        with pytest.raises(kind, match=f"b.*{error}"):
            await a.hello("b", pb.HelloRequest())
        async with a.link("b") as link:
            await link.send(chunk(3))
            messages = aiter(link)
            assert (await anext(messages)).chunk.offset == 3  # what was said before the refusal arrives
            with pytest.raises(kind, match=f"b.*{error}"):
                await anext(messages)
            with pytest.raises(kind):
                await link.send(chunk(4))

    on_network(body)


def test_a_bug_in_a_handler_is_not_hidden() -> None:
    async def body(net: MemoryNetwork, peer: Peer, a: Transport) -> None:
        peer.error = ZeroDivisionError()
        await a.hello("b", pb.HelloRequest())

    with pytest.raises(BaseExceptionGroup) as raised:
        on_network(body)
    assert raised.group_contains(ZeroDivisionError)


def test_a_sender_waits_for_a_slow_reader() -> None:
    """C09: buffers are bounded by bytes."""

    async def body(net: MemoryNetwork, peer: Peer, a: Transport) -> None:
        async with a.gossip("b") as gossip:
            message = pb.GossipMessage(chunk=pb.GossipChunk(data=bytes(1 << 20)))
            for _ in range(3):
                await gossip.send(message)
            with pytest.raises(TimeoutError):  # the fourth, with its header, would pass 4 MiB
                await asyncio.wait_for(gossip.send(message), 5)

    on_network(body)


def test_an_oversize_message_is_refused() -> None:
    async def body(net: MemoryNetwork, peer: Peer, a: Transport) -> None:
        async with a.link("b") as link:
            with pytest.raises(ValueError, match="over the limit"):
                await link.send(chunk(0, 4 << 20))

    on_network(body)


def test_a_killed_peer_breaks_its_streams_and_cancels_its_handlers() -> None:
    async def body(net: MemoryNetwork, peer: Peer, a: Transport) -> None:
        async with a.link("b") as link:
            await link.send(chunk(0))
            await asyncio.sleep(1)
            net.kill("b")
            with pytest.raises(LinkLost, match="b is gone"):
                await anext(aiter(link))
            with pytest.raises(LinkLost):
                await link.send(chunk(1))
        await asyncio.sleep(0)
        assert peer.link_ended == ["cancelled"]
        with pytest.raises(LinkLost, match="nobody listens"):
            await a.hello("b", pb.HelloRequest())
        with pytest.raises(LinkLost, match="b is gone"):
            await net.transport("b").hello("b", pb.HelloRequest())
        net.register("b", peer)
        await a.hello("b", pb.HelloRequest())

    on_network(body)


def test_a_dead_dialler_is_noticed_by_the_handler() -> None:
    async def body(net: MemoryNetwork, peer: Peer, a: Transport) -> None:
        async with a.link("b"):
            await asyncio.sleep(1)
            net.kill("a")
            await asyncio.sleep(1)
            assert peer.link_ended == ["a is gone"]

    on_network(body)


def test_a_body_that_fails_breaks_the_stream_and_keeps_its_error() -> None:
    async def body(net: MemoryNetwork, peer: Peer, a: Transport) -> None:
        async def fail() -> None:
            async with a.link("b") as link:
                await link.send(chunk(0))
                await asyncio.sleep(1)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        await asyncio.sleep(1)
        assert peer.link_ended == ["a closed the stream"]

    on_network(body)


def test_a_cut_parts_two_peers_until_it_heals() -> None:
    async def body(net: MemoryNetwork, peer: Peer, a: Transport) -> None:
        async with a.link("b") as link:
            await asyncio.sleep(1)
            net.cut("b", "a")
            with pytest.raises(LinkLost, match="cut off"):
                await link.send(chunk(0))
        with pytest.raises(LinkLost, match="cut off"):
            await a.hello("b", pb.HelloRequest())
        await net.transport("c").hello("b", pb.HelloRequest())
        net.heal("a", "b")
        await a.hello("b", pb.HelloRequest())
        assert peer.link_ended == ["b and a are cut off from each other"]

    on_network(body)


def test_delay_adds_to_each_message_and_overlaps() -> None:
    async def body(net: MemoryNetwork, peer: Peer, a: Transport) -> None:
        net.set_delay("a", "b", 0.25)
        await a.hello("b", pb.HelloRequest())
        assert net.clock.monotonic() == pytest.approx(0.5)
        async with a.link("b") as link:
            for offset in range(10):
                await link.send(chunk(offset))
            await link.close()
            assert [m.chunk.offset async for m in link] == list(range(10))
        assert net.clock.monotonic() == pytest.approx(1.0)

    on_network(body)


def test_the_tap_drops_doubles_replaces_and_delays() -> None:
    async def body(net: MemoryNetwork, peer: Peer, a: Transport) -> None:
        def tap(source: str, target: str, message: object) -> list[Delivery]:
            assert isinstance(message, pb.LinkMessage)
            if source == "b":
                return [Delivery(message)]
            return {
                0: [],
                1: [Delivery(message), Delivery(message)],
                2: [Delivery(chunk(42))],
                3: [Delivery(message, delay_s=7.0)],
            }[message.chunk.offset]

        net.tap = tap
        async with a.link("b") as link:
            for offset in range(4):
                await link.send(chunk(offset))
            await link.close()
            assert [m.chunk.offset async for m in link] == [1, 1, 42, 3]
        assert net.clock.monotonic() == pytest.approx(7.0)

    on_network(body)


def test_an_unanswered_call_times_out() -> None:
    async def body(net: MemoryNetwork, peer: Peer, a: Transport) -> None:
        with pytest.raises(LinkLost, match="did not answer"):
            await a.status("b", pb.StatusRequest())
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    on_network(body)


def test_a_cancelled_read_loses_nothing() -> None:
    async def body(net: MemoryNetwork, peer: Peer, a: Transport) -> None:
        net.set_delay("a", "b", 1.0)
        async with a.link("b") as link:
            await link.send(chunk(5))
            messages = aiter(link)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await anext(messages)
            assert (await anext(aiter(link))).chunk.offset == 5

    on_network(body)


def test_leaving_the_network_ends_all_handlers() -> None:
    async def main() -> None:
        peer = Peer()
        async with MemoryNetwork(VirtualClock()) as net:
            net.register("b", peer)
            async with asyncio.TaskGroup() as group:
                entered = asyncio.Event()

                async def hold() -> None:
                    async with net.transport("a").link("b") as link:
                        entered.set()
                        async for _ in link:
                            pass

                holder = group.create_task(hold())
                await entered.wait()
                await asyncio.sleep(0)
                holder.cancel()
        assert len(asyncio.all_tasks()) == 1
        assert len(peer.link_ended) == 1

    run_virtual(main())
