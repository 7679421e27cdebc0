"""Honest priors come though any number of peers offer files and do not deliver."""

from __future__ import annotations

import asyncio
from pathlib import Path

from google.protobuf.message import Message
from prior_peers import WEIGHTS, Fleet, fleet, identity, notice_of, sealed

from meshd.anchor.notices import Entry
from meshd.anchor.spreading import bundle_of
from meshd.anchor.wanted import FLOOR_BYTES_S, FLOOR_S, MOST_DONORS, MOST_WANTED, Donor, Queue, allowed_s
from meshd.priors.store import PRIOR
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import run_virtual
from meshd.transport.memory import Delivery

DATA = b"a prior" * 100


def entry_of(name: str, **changes: object) -> Entry:
    notice = pb.Notice(author=name, kind=WEIGHTS, number=1, name=name.encode(), version=1, **changes)  # type: ignore[arg-type]
    return Entry(notice, pb.SignedNotice(notice=notice.SerializeToString()))


def donor(name: str) -> Donor:
    return Donor(name, f"{name}:1")


def test_a_fetch_is_allowed_its_size_at_a_floor_rate() -> None:
    assert allowed_s(0) == FLOOR_S
    assert allowed_s(8 * FLOOR_BYTES_S) == FLOOR_S + 8


def test_of_one_donor_and_of_one_file_there_is_one_fetch_at_a_time() -> None:
    queue = Queue()
    queue.offered(entry_of("a"), donor("x"), 0.0)
    queue.offered(entry_of("b"), donor("x"), 0.0)
    queue.offered(entry_of("a", size_bytes=7), donor("y"), 0.0)
    first = queue.begin(0.0, proven=False)
    assert first is not None
    assert first.wanted.entry.key.author == "a"
    assert queue.begin(0.0, proven=False) is None
    queue.end(first, True, 0.0)
    rest = [queue.begin(0.0, proven=False) for _ in range(3)]
    assert [task and (task.donor.peer_id, task.wanted.entry.key.author) for task in rest] == [
        ("x", "b"), ("y", "a"), None,
    ]  # fmt: skip


def test_those_that_have_delivered_come_first_and_those_that_failed_last() -> None:
    queue = Queue()
    for name, delivered in (("good", True), ("bad", False)):
        queue.offered(entry_of(name), donor(name), 0.0)
        task = queue.begin(0.0, proven=False)
        assert task is not None
        assert queue.end(task, delivered, 0.0)
    for name in ("bad", "new", "good"):
        queue.offered(entry_of("file"), donor(name), 1.0)
    order = []
    for at, proven in ((1.0, True), (1.0, True), (1.0, False), (1.0, False)):
        if (task := queue.begin(at, proven)) is not None:
            order.append(task.donor.peer_id)
            queue.end(task, False, at)
    assert order == ["good", "new", "bad"]
    assert queue.entries == []


def test_a_flood_of_offers_does_not_keep_out_those_that_have_delivered() -> None:
    queue = Queue()
    queue.offered(entry_of("first"), donor("good"), 0.0)
    task = queue.begin(0.0, proven=False)
    assert task is not None
    queue.end(task, True, 0.0)
    for n in range(2 * MOST_WANTED):
        queue.offered(entry_of(f"lie {n}"), donor(f"liar {n}"), 1.0)
    assert len(queue.entries) == MOST_WANTED
    for n in range(2 * MOST_DONORS):
        queue.offered(entry_of("lie 0"), donor(f"another {n}"), 1.0)
    queue.offered(entry_of("lie 0"), donor("good"), 1.0)
    queue.offered(entry_of("honest"), donor("good"), 1.0)
    assert len(queue.entries) == MOST_WANTED
    seen = set()
    while (task := queue.begin(2.0, proven=True)) is not None:
        seen.add(task.wanted.entry.key.author)
        queue.end(task, True, 2.0)
    assert seen == {"lie 0", "honest"}


def never(f: Fleet) -> None:
    """Strangers' files begin, and do not come."""

    def tap(source: str, target: str, message: Message) -> list[Delivery]:
        if target == "stranger:1" and isinstance(message, pb.FetchRequest | pb.ManifestRequest):
            return [Delivery(message, 10_000.0)]
        return f.tap(source, target, message)

    f.net.tap = tap


def test_an_honest_prior_comes_soon_though_others_offer_all_the_time_and_never_deliver(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with fleet(tmp_path, 1) as f:
            publisher, _ = f.anchor("anchor")
            await publisher.publish(WEIGHTS, 1, DATA, weight_version=3, measured=500, tokens=100)
            await f.until(lambda: f.all_have(DATA))
            f.stranger()
            never(f)
            liar = identity(tmp_path, "liar")

            async def lie() -> None:
                for n in range(10_000):
                    entry = sealed(liar, b"lie %d" % n, version=n + 1, size_bytes=90_000)
                    await f.offer("r0", entry, peer_id=f"liar {n}")
                    await asyncio.sleep(0.5)

            f.running.append(f.tasks.create_task(lie()))
            await asyncio.sleep(120)
            await publisher.publish(WEIGHTS, 1, b"next", weight_version=3, measured=500, tokens=100)
            assert await f.until(lambda: f.all_have(b"next")) < 60

    run_virtual(main())


def test_a_liars_notice_of_anothers_file_does_not_take_its_place(tmp_path: Path) -> None:
    """Both are pursued, and the file is fetched once."""

    async def main() -> None:
        async with fleet(tmp_path, 1) as f:
            store, author, thief = f.stranger(), identity(tmp_path, "author"), identity(tmp_path, "thief")
            store.write(bundle_of(WEIGHTS, notice_of(author, DATA).name), {PRIOR: DATA}, {})
            await f.offer(
                "r0", sealed(thief, DATA, size_bytes=len(DATA) + 1), sealed(author, DATA), peer_id="thief"
            )
            await f.until(lambda: f.all_have(DATA), 20)
            peer = f.peers["r0"]
            assert peer.relay is not None
            assert [entry.key.author for entry in peer.relay.board.entries] == [author.peer_id]
            assert peer.count("priors_refused") == 1
            assert f.fetched["r0:1"] == 1

    run_virtual(main())
