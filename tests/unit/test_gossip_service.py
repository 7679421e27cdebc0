"""The gossip service: who opens an exchange, when, and with whom; what several exchanges come to."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from google.protobuf.message import Message
from gossip_peers import compressed, peers, replica_of, segments_of, virtual

from meshd.gossip.service import choose_partner
from meshd.proto import meshd_pb2 as pb
from meshd.transport.memory import Delivery


def test_of_two_replicas_only_one_opens() -> None:
    """So two never refuse each other because each is busy with its own exchange."""
    replicas = [replica_of(name) for name in "abcd"]
    rng = random.Random(0)
    assert choose_partner("d", replicas, (), False, rng) is None
    assert {choose_partner("b", replicas, (), False, rng).peer_id for _ in range(50)} == {"c", "d"}  # type: ignore[union-attr]
    assert choose_partner("b", replicas, {"c", "d"}, False, rng) is None
    others = replicas[:3]
    assert {choose_partner("d", others, {"b"}, True, rng).peer_id for _ in range(50)} == {"a", "c"}  # type: ignore[union-attr]


def test_a_replica_whose_partner_takes_no_steps_opens_in_the_end() -> None:
    """The one with the smaller id has no work, so that it never opens; what the other learns would stay with it."""

    async def main() -> None:
        async with peers("ab") as (_, (a, b)), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(peer.gossip_service.run()) for peer in (a, b)]
            due = 0
            while not b.counted("gossip_exchanges"):
                due += 1
                assert due < 10
                for _ in range(b.stage.runtime.run.spec.gossip.every):
                    b.gossip_service.stepped(8)
                await b.clock.sleep(5.0)
            assert due > 1  # it waits for the other first
            assert a.counted("gossip_exchanges") == 1
            for task in running:
                task.cancel()

    virtual(main)


def test_a_busy_partner_refuses_and_is_asked_again_until_it_is_free() -> None:
    async def main() -> None:
        async with peers("ab") as (_, (a, b)), asyncio.TaskGroup() as tasks:
            b.gossip_service._turn = object()
            assert not await a.exchange("b")
            assert (a.counted("gossip_busy"), a.counted("gossip_failed")) == (1, 0)
            running = tasks.create_task(a.gossip_service.run())
            a.gossip_service.stepped(8)
            await asyncio.sleep(0.25)
            assert a.counted("gossip_exchanges") == 0
            b.gossip_service._turn = None
            await asyncio.sleep(2)
            assert a.counted("gossip_exchanges") == 1
            # One exchange for one step.
            await asyncio.sleep(60)
            assert a.counted("gossip_exchanges") == 1
            running.cancel()

    virtual(main)


@pytest.mark.parametrize("leaving", [False, True])
def test_two_that_open_with_each_other_at_the_same_moment_exchange_once(leaving: bool) -> None:
    """Over a slow link neither has the other's opening before it has sent its own, however often it tries."""

    async def main() -> None:
        async with peers("ab") as (net, (a, b)):
            net.set_delay("a:1", "b:1", 2.0)
            before = a.vector + b.vector
            if leaving:
                for peer in (a, b):
                    peer.stage.runtime.keeping.stepped += 1
                await asyncio.gather(a.gossip_service.farewell(), b.gossip_service.farewell())
            else:
                assert await asyncio.gather(a.exchange("b"), b.exchange("a")) == [True, False]
            await asyncio.sleep(10.0)  # the other side has moved as well
            for peer in (a, b):
                assert (peer.counted("gossip_exchanges"), peer.counted("gossip_failed")) == (1, 0)
                assert peer.gossip_service._turn is None
            torch.testing.assert_close(a.vector + b.vector, before, rtol=1e-6, atol=1e-6)
            assert await b.exchange("a")

    virtual(main)


def test_after_a_partner_died_the_next_one_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    segments_of(monkeypatch, 16)

    async def main() -> None:
        async with peers("abc") as (net, (a, b, _)):
            count = 0

            def tap(source: str, target: str, passing: Message) -> list[Delivery]:
                nonlocal count
                count += 1
                if count == 9:
                    net.kill("b:1")
                return [Delivery(passing)]

            net.tap = tap
            assert not await a.exchange("b")
            assert a.counted("gossip_failed") == 1
            assert await a.exchange("c")
            assert bool(torch.isfinite(b.vector).all())

    virtual(main)


@pytest.mark.parametrize("names", ["abc", "abcd"])
def test_more_replicas_converge_geometrically_to_their_mean(names: str) -> None:
    async def main() -> None:
        async with peers(names) as (_, made):
            mean = sum(peer.vector for peer in made) / len(made)
            spread = [sum((peer.vector - mean).square().sum() for peer in made).item()]
            for _ in range(6):
                for opener in made:
                    for partner in made:
                        if opener.name < partner.name:
                            assert await opener.exchange(partner.name)
                            await asyncio.sleep(0.1)  # the other side has moved as well
                spread.append(sum((peer.vector - mean).square().sum() for peer in made).item())
            assert spread[1] < 0.2 * spread[0]
            # bf16 of the deltas is the floor.
            assert spread[-1] < 1e-4 * spread[0]
            torch.testing.assert_close(
                sum(peer.vector for peer in made) / len(made), mean, rtol=1e-5, atol=1e-5
            )

    virtual(main)


def test_after_long_alone_a_replica_exchanges_all_values_finely_once() -> None:
    async def main() -> None:
        async with peers("abcd", **compressed("abcd")) as (net, (a, _, _, d)):
            openings: list[tuple[int, int]] = []

            def tap(source: str, target: str, passing: Message) -> list[Delivery]:
                if source == "a:1" and getattr(passing, "open", pb.GossipOpen()).bits:
                    openings.append((passing.open.subset, passing.open.bits))
                return [Delivery(passing)]

            net.tap = tap
            for partner in "bcd":
                assert await a.exchange(partner)
            assert a.gossip_service._distances.usual > 0.0
            a.stage.runtime.version += 100
            assert await a.exchange("b")  # 100 steps are not long
            a.stage.runtime.version += 101
            apart = (a.vector - d.vector).norm()
            assert await a.exchange("d")
            assert a.gossip_service._distances.usual == 0.0  # it knows only d
            await asyncio.sleep(0.1)
            assert (a.vector - d.vector).norm() < 0.05 * apart
            assert await a.exchange("b")
            assert openings == [(4, 3)] * 4 + [(1, 16)] + [(4, 3)]

    virtual(main)
