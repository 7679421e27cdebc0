"""A replica that has just come follows one that works, and moves nobody, before it counts (DESIGN 6: weight 0)."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
import torch
from google.protobuf.message import Message
from gossip_peers import BASE, COUNT, SHAPES, Peer, in_order, peers, replica_of, segments_of, virtual

from meshd.gossip import listening as listening_module
from meshd.gossip.exchange import ExchangeRefused, agreed_offset
from meshd.gossip.listening import catch_up
from meshd.gossip.memory import LISTENERS
from meshd.gossip.modular import SAMPLES
from meshd.observe.log import fields_of
from meshd.proto import meshd_pb2 as pb
from meshd.transport.memory import Delivery


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 values a segment: four segments, the last one short."""
    segments_of(monkeypatch, 16)


async def listen(peer: Peer, *names: str) -> bool:
    return await catch_up(peer.gossip_service, peer.stage, lambda: [replica_of(name) for name in names])


def said(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, object]]:
    return [fields_of(record) for record in caplog.records if record.getMessage() == event]


def close(a: Peer, b: Peer, b_before: torch.Tensor) -> bool:
    """Whether a has b's values, but for the rounding of both deltas to bf16."""
    most = (b_before - in_order(BASE)).abs().max().item()
    return bool(((a.vector - b.vector).abs() <= most * 2**-6).all())


def test_a_listener_takes_over_the_values_and_its_partner_does_not_move() -> None:
    async def main() -> None:
        async with peers("ab") as (_, (a, b)):
            for follower, partner in ((a, b), (b, a)):  # whatever their peer ids
                before = partner.vector
                follower.stage.runtime.version, partner.stage.runtime.version = 2, 9
                partner.stage.counter.advance("origin", 70)
                partner.stage.runtime.keeping.stepped = 5
                kept = partner.gossip_service._steps = 1
                assert await listen(follower, partner.name)
                await asyncio.sleep(0)
                assert torch.equal(partner.vector, before)
                assert close(follower, partner, before)
                assert follower.stage.runtime.version == partner.stage.runtime.version == 9
                assert follower.stage.counter.total == 70
                # What the partner had learnt is at another peer now; that it averaged, nobody may say.
                assert partner.stage.runtime.keeping.kept == 5
                assert partner.gossip_service._steps == kept
                assert partner.counted("gossip_exchanges") == follower.counted("gossip_exchanges") == 0
                assert follower.counted("gossip_followed") == 1

                for parameter in follower.parameters.values():
                    parameter.data.add_(1.0)

    virtual(main)


def test_values_cross_one_way_only() -> None:
    """The listener's are of no use to the other side."""

    async def main() -> None:
        async with peers("ab") as (_, (a, b)):
            assert await listen(a, "b")
            await asyncio.sleep(0)
            samples = 4 * SAMPLES * len(SHAPES) + len(SHAPES)
            for listener, sent, received in ((a, 0, 2 * COUNT), (b, 2 * COUNT, 0)):
                assert listener.counted("gossip_sent_bytes") == sent + samples
                assert listener.counted("gossip_received_bytes") == received + samples

    virtual(main)


def test_a_slow_listener_keeps_nobody_from_averaging() -> None:
    """A stranger's, or one over a slow link: each message may take as long as a silence may."""

    async def main() -> None:
        async with peers("abcd") as (net, (a, b, c, d)):

            def tap(source: str, target: str, message: Message) -> list[Delivery]:
                slow = source in ("c:1", "d:1") and isinstance(message, pb.GossipMessage)
                return [Delivery(message, 4.0 if slow else 0.0)]

            net.tap = tap
            listeners = [asyncio.create_task(listen(slow, "b")) for slow in (c, d)]
            await asyncio.sleep(8.0)
            assert b.gossip_service._listeners == LISTENERS
            before = (a.vector - b.vector).norm()
            assert await a.exchange("b")
            assert (a.vector - b.vector).norm() < 0.1 * before
            assert not any(listener.done() for listener in listeners)
            assert all([await listener for listener in listeners])
            await asyncio.sleep(5.0)  # what they said last is on its way
            assert b.gossip_service._listeners == 0

    virtual(main)


def test_one_more_listener_than_there_are_places_is_told_to_come_again() -> None:
    async def main() -> None:
        async with peers("ab") as (_, (a, b)):
            b.gossip_service._listeners = LISTENERS
            with pytest.raises(ExchangeRefused, match="listen already"):
                await a.gossip_service.follow(replica_of("b"), lambda: None)
            assert b.gossip_service._listeners == LISTENERS

    virtual(main)


def test_what_one_who_has_not_claimed_the_stage_has_heard_does_not_count_as_kept() -> None:
    """It would be lost with this peer, which would not even try to give it away as it leaves."""

    async def main() -> None:
        async with peers("ab") as (_, (a, b)):
            b.stage.around = replace(b.stage.around, holds=lambda peer_id: False)
            b.stage.runtime.keeping.stepped = 5
            assert await listen(a, "b")
            await asyncio.sleep(0)
            assert b.stage.runtime.keeping.kept == 0

    virtual(main)


def test_a_listener_that_sends_values_is_refused() -> None:
    async def main() -> None:
        async with peers("ab") as (net, (a, b)):

            def tap(source: str, target: str, message: Message) -> list[Delivery]:
                if source == "a:1" and isinstance(message, pb.GossipMessage) and message.HasField("done"):
                    chunk = pb.GossipChunk(offset=0, data=bytes(32))
                    return [Delivery(pb.GossipMessage(chunk=chunk)), Delivery(message)]
                return [Delivery(message)]

            net.tap = tap
            before = b.vector
            listening = asyncio.create_task(listen(a, "b"))
            await asyncio.sleep(10)
            listening.cancel()
            assert b.counted("gossip_failed") > 0
            assert torch.equal(b.vector, before)

    virtual(main)


@pytest.mark.parametrize(("exchange", "listening", "expected"), [(4, False, 1), (5, False, 2), (5, True, 1)])
def test_whose_part_is_exchanged(exchange: int, listening: bool, expected: int) -> None:
    opening = pb.GossipOpen(exchange=exchange, offset=1, listening=listening)
    answer = pb.GossipOpen(exchange=exchange, offset=2)
    assert agreed_offset(opening, answer, opener=True) == expected
    assert agreed_offset(answer, opening, opener=False) == expected


def test_the_only_replica_does_not_wait() -> None:
    async def main() -> None:
        async with peers("a") as (_, (a,)):
            assert not await listen(a)
            assert asyncio.get_running_loop().time() == 0

    virtual(main)


def test_a_break_half_way_is_one_more_try(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with peers("ab") as (net, (a, b)):
            before, broken = b.vector, 0

            def tap(source: str, target: str, message: Message) -> list[Delivery]:
                nonlocal broken
                if isinstance(message, pb.GossipMessage) and message.done.segment == 2 and broken < 2:
                    broken += 1
                    net.cut("a:1", "b:1")
                    net.heal()
                return [Delivery(message)]

            net.tap = tap
            assert await listen(a, "b")
            assert broken == 2
            assert torch.equal(b.vector, before)
            assert close(a, b, before)

    with caplog.at_level(logging.INFO):
        virtual(main)
    assert len(said(caplog, "not_followed")) == 1, "one line for each peer"
    assert [line["peer"] for line in said(caplog, "caught_up")] == ["b"]


def test_a_replica_whose_values_are_not_finite_is_left_for_another() -> None:
    """C27."""

    async def main() -> None:
        async with peers("abc") as (_, (a, b, c)):
            for parameter in b.parameters.values():
                parameter.data.fill_(float("nan"))
            for _ in range(4):  # whichever is asked first
                assert await listen(a, "b", "c")
                assert close(a, c, c.vector)

    virtual(main)


def test_a_listener_waits_for_a_busy_replica_longer_than_for_a_silent_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening_module, "_PATIENCE_S", 60.0)

    async def main() -> None:
        async with peers("ab") as (_, (a, b)), asyncio.TaskGroup() as tasks:
            b.gossip_service._listeners = LISTENERS
            listening = tasks.create_task(listen(a, "b"))
            await asyncio.sleep(30)
            assert not listening.done()
            b.gossip_service._listeners = 0
            await asyncio.sleep(2)
            assert listening.result()
            b.gossip_service._listeners = LISTENERS
            assert not await listen(a, "b")  # it does not wait for ever either
            assert 90 < asyncio.get_running_loop().time() < 100

    virtual(main)


def test_without_an_answer_it_counts_with_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with peers("a") as (_, (a,)):
            before = a.vector
            assert not await listen(a, "gone")
            assert 15 < asyncio.get_running_loop().time() < 20
            assert torch.equal(a.vector, before)
            assert a.stage.runtime.version == 3

    with caplog.at_level(logging.INFO):
        virtual(main)
    assert len(said(caplog, "not_followed")) == 1
    (line,) = said(caplog, "not_caught_up")
    assert str(line["reason"]).startswith("gone: no answer for 1")


def test_one_exchange_that_breaks_late_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica answers, but what it sends takes longer than a silence may, and breaks once."""
    monkeypatch.setattr(listening_module, "_SILENT_S", 2.0)

    async def main() -> None:
        async with peers("ab") as (net, (a, b)):
            broken = False

            def tap(source: str, target: str, message: Message) -> list[Delivery]:
                nonlocal broken
                if (
                    isinstance(message, pb.GossipMessage)
                    and message.WhichOneof("body") == "chunk"
                    and not broken
                ):
                    broken = True
                    net.cut("a:1", "b:1")
                    net.heal()
                return [Delivery(message)]

            net.tap = tap
            assert await listen(a, "b")
            assert broken
            assert close(a, b, b.vector)

    virtual(main)


def test_a_replica_that_claims_impossible_steps_is_not_followed() -> None:
    """Its version would not fit this peer's own record any more."""

    async def main() -> None:
        async with peers("ab") as (_, (a, b)):
            b.stage.runtime.version = (1 << 64) - 1
            before = a.vector
            assert not await listen(a, "b")
            assert a.stage.runtime.version == 3
            assert torch.equal(a.vector, before)

    virtual(main)


def test_those_set_aside_are_forgotten_in_time() -> None:
    """Every peer that ever failed would otherwise be remembered until the end."""

    async def main() -> None:
        async with peers("ab") as (_, (a, _b)):
            for name in "cdef":
                assert not await a.exchange(name)
            assert len(a.gossip_service._aside) == 4
            running = asyncio.create_task(a.gossip_service.run())
            await asyncio.sleep(60)
            a.gossip_service.stepped(8)
            await asyncio.sleep(5)
            running.cancel()
            assert not a.gossip_service._aside

    virtual(main)
