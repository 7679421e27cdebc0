"""What is urgent goes first, what waits is bounded, and nobody waits for a broken stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import run_virtual
from meshd.transport.base import LinkLost
from meshd.transport.chunks import split
from meshd.transport.sender import Priority, PrioritySender


class Stream:
    """A Duplex that takes a message whenever the test lets it."""

    remote = "peer:1"

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []
        self.permits = asyncio.Semaphore(0)
        self.broken = False

    async def send(self, message: pb.LinkMessage) -> None:
        await self.permits.acquire()
        if self.broken:
            raise LinkLost("lost peer:1: reset")
        kind = message.WhichOneof("body") or ""
        self.sent.append((kind, message.chunk.offset >> 20 if kind == "chunk" else -1))

    def __aiter__(self) -> AsyncIterator[pb.LinkMessage]:
        raise NotImplementedError

    async def close(self) -> None: ...


def chunks(sequence: int, count: int) -> list[pb.LinkMessage]:
    return [
        pb.LinkMessage(chunk=chunk)
        for chunk in split(pb.MicrobatchId(sequence=sequence), 1, bytes(count << 20))
    ]


def test_answers_and_gradients_overtake_between_the_chunks_of_an_activation() -> None:
    async def main() -> None:
        stream = Stream()
        sender = PrioritySender[pb.LinkMessage](stream)
        async with asyncio.TaskGroup() as group:
            group.create_task(sender.run())
            for message in chunks(1, 3):
                await sender.send(message, Priority.FORWARD)
            stream.permits.release()
            await asyncio.sleep(1)
            assert stream.sent == [("chunk", 0)]  # the second is in the stream's hands already
            for message in [pb.LinkMessage(gradient=pb.Gradient()), *chunks(2, 2)]:
                await sender.send(message, Priority.BACKWARD)
            sender.post(pb.LinkMessage(answer=pb.Answer()))
            sender.close()
            for _ in range(6):
                stream.permits.release()
        assert stream.sent[1:] == [
            ("chunk", 1),
            ("answer", -1),
            ("gradient", -1),
            ("chunk", 0),
            ("chunk", 1),
            ("chunk", 2),
        ]
        assert sender.queued_bytes == 0
        sender.post(pb.LinkMessage(answer=pb.Answer()))  # nobody is there to read it
        assert sender.queued_bytes == 0

    run_virtual(main())


def test_queues_are_bounded_and_a_full_one_does_not_hold_up_gradients() -> None:
    """C09."""

    async def main() -> None:
        stream = Stream()
        sender = PrioritySender[pb.LinkMessage](stream, max_bytes=(2 << 20) + 200)
        forward = chunks(1, 3)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(sender.run())
            for message in forward[:2]:
                await sender.send(message, Priority.FORWARD)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sender.send(forward[2], Priority.FORWARD), 5)
            assert 2 << 20 < sender.queued_bytes <= (2 << 20) + 200
            await sender.send(pb.LinkMessage(gradient=pb.Gradient()), Priority.BACKWARD)
            waiting = group.create_task(sender.send(forward[2], Priority.FORWARD))
            await asyncio.sleep(1)
            assert not waiting.done()
            for _ in range(2):
                stream.permits.release()
            await waiting
            running.cancel()
        with pytest.raises(LinkLost, match="the sender stopped"):
            await sender.send(forward[0], Priority.CONTROL)

    run_virtual(main())


def test_a_broken_stream_ends_run_and_every_waiting_send() -> None:
    async def main() -> None:
        stream = Stream()
        stream.broken = True
        sender = PrioritySender[pb.LinkMessage](stream, max_bytes=1)
        first, second = chunks(1, 2)
        await sender.send(first, Priority.FORWARD)
        waiting = asyncio.ensure_future(sender.send(second, Priority.FORWARD))
        await asyncio.sleep(1)
        stream.permits.release()
        with pytest.raises(LinkLost, match="reset"):
            await sender.run()
        with pytest.raises(LinkLost, match="reset"):
            await waiting
        with pytest.raises(LinkLost, match="reset"):
            await sender.send(first, Priority.BACKWARD)
        assert sender.queued_bytes == 0

    run_virtual(main())
