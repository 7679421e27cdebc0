"""Priors among many replicas: each gets every file once, whatever is lost, cut off or lied about."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from google.protobuf.message import Message
from prior_peers import BAD, WEIGHTS, Fleet, bounds, fleet, identity, notice_of, sealed

from meshd import PROTOCOL_VERSION
from meshd.anchor.notices import MAX_NOTICES, Board, Entry
from meshd.anchor.spreading import Bucket, bundle_of
from meshd.errors import MismatchError, ResourceError
from meshd.priors.store import PRIOR
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import EPOCH, run_virtual
from meshd.transport.memory import Delivery

DATA = b"a prior" * 100


async def published(f: Fleet, name: str = "anchor", data: bytes = DATA) -> None:
    publisher, _ = f.anchor(name)
    await publisher.publish(WEIGHTS, 1, data, weight_version=3, measured=500, tokens=100)


def test_a_notice_offered_to_two_reaches_all_and_each_fetches_its_file_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, 24) as f:
            await published(f)
            assert await f.until(lambda: f.all_have(DATA)) < 180
            await asyncio.sleep(300)
            assert f.fetched == {f"r{number}:1": 1 for number in range(24)}
            assert all(peer.taker.taken == [DATA] for name, peer in f.peers.items() if name != "anchor")
            assert f.peers["anchor"].count("priors_relayed") < 12
            assert sum(peer.count("priors_refused") for peer in f.peers.values()) == 0
            assert sum(peer.count("prior_bytes_received") for peer in f.peers.values()) == 24 * len(DATA)

    run_virtual(main())


def test_the_next_version_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, 4) as f:
            publisher, _ = f.anchor("anchor")
            versions = [bytes([n]) * 50 for n in range(12)]
            for n, data in enumerate(versions):
                await publisher.publish(WEIGHTS, 1, data, weight_version=n, measured=500, tokens=100)
                await f.until(lambda data=data: f.all_have(data))
            peer = f.peers["r0"]
            assert peer.relay is not None
            assert len(peer.taker.left) == 11
            (entry,) = peer.relay.board.entries
            assert entry.notice.weight_version == 11
            here = [name for name in peer.store.names() if name.startswith("weights/")]
            assert len(here) <= 9
            assert len(f.peers["anchor"].store.names()) == 2

    run_virtual(main())


def test_lost_messages_are_made_up_for(tmp_path: Path) -> None:
    """Two of three offers vanish."""

    async def main() -> None:
        async with fleet(tmp_path, 8) as f:
            count = 0

            def lossy(source: str, target: str, message: Message) -> list[Delivery]:
                nonlocal count
                if isinstance(message, pb.PriorOffer):
                    count += 1
                    if count % 3:
                        return []
                return f.tap(source, target, message)

            f.net.tap = lossy
            await published(f)
            await f.until(lambda: f.all_have(DATA), 3600)
            assert max(f.fetched.values()) == 1

    run_virtual(main())


def test_both_sides_of_a_partition_have_it_soon_after_it_heals(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, 6) as f:
            near, far = ["r0", "r1", "r2", "anchor"], ["r3", "r4", "r5", "other"]
            for a in near:
                for b in far:
                    f.net.cut(f"{a}:1", f"{b}:1")
            await published(f)
            await published(f, "other", b"another")
            await asyncio.sleep(300)
            assert all(DATA in f.peers[name].taker.taken for name in near[:3])
            assert all(f.peers[name].taker.taken == [b"another"] for name in far[:3])
            f.net.heal()
            f.net.kill("anchor:1")
            f.net.kill("other:1")
            assert await f.until(lambda: f.all_have(DATA) and f.all_have(b"another")) < 240

    run_virtual(main())


def test_a_newcomer_is_offered_what_it_lacks(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, 2) as f:
            await published(f)
            await f.until(lambda: f.all_have(DATA))
            f.net.kill("anchor:1")
            f.replica("new")
            assert await f.until(lambda: f.all_have(DATA)) < 5

    run_virtual(main())


def test_an_anchor_that_dies_mid_push_costs_its_prior_only(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, 3) as f:
            f.stranger()  # of what it announces it has nothing
            entry = sealed(identity(tmp_path, "dead"), b"gone")
            await f.offer("r0", entry)
            await published(f)
            await f.until(lambda: f.all_have(DATA), 30)
            await asyncio.sleep(60)
            assert f.peers["r0"].taker.taken == [DATA]
            assert f.peers["r0"].count("priors_refused") == 0

    run_virtual(main())


def wrongs(who: Path) -> list[tuple[str, Entry]]:
    author, other = identity(who, "liar"), identity(who, "other")
    unsigned = sealed(author, DATA)
    unsigned.signed.signature = b""
    forged = sealed(author, DATA)
    forged.signed.public_key = other.public_key
    stolen = sealed(other, DATA)
    stolen = Entry(stolen.notice, pb.SignedNotice())
    stolen.signed.CopyFrom(sealed(other, DATA).signed)
    stolen.signed.notice = notice_of(author, DATA).SerializeToString()
    garbage = Entry(pb.Notice(), pb.SignedNotice(notice=b"\xff" * 40))
    long = Entry(pb.Notice(), pb.SignedNotice(notice=b"x" * 10_000))
    changed: dict[str, dict[str, object]] = {
        "run": {"run_id": "cd" * 20},
        "kind": {"kind": 7},
        "no kind": {"kind": 0},
        "stage": {"number": 2},
        "negative": {"number": -1},
        "boundary": {"kind": pb.PRIOR_KIND_BOUNDARY, "number": 1},
        "future": {"time": EPOCH + 1e5},
        "nan": {"time": float("nan")},
        "ahead": {"weight_version": 5000},
        "measured ahead": {"measured": 10**9},
        "size": {"size_bytes": 10**9},
        "empty": {"size_bytes": 0},
        "name": {"name": b"short"},
        "version": {"version": 0},
        "huge version": {"version": 2**64 - 1},
        "tokens": {"tokens": 10**9},
        "no tokens": {"tokens": 0},
    }
    out = [
        ("unsigned", unsigned),
        ("forged", forged),
        ("stolen", stolen),
        ("garbage", garbage),
        ("long", long),
    ]
    return out + [(name, sealed(author, DATA, **changes)) for name, changes in changed.items()]


def test_what_cannot_be_is_refused_counted_and_blamed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with fleet(tmp_path, 2) as f:
            f.stranger()
            for number, (what, entry) in enumerate(wrongs(tmp_path), 1):
                caplog.clear()
                await f.offer("r0", entry)
                await asyncio.sleep(20)
                assert f.peers["r0"].count("priors_refused") == number, what
                (record,) = [each for each in caplog.records if each.getMessage() == "prior_refused"]
                assert "stranger" in str(vars(record)), what
            assert f.fetched == {}
            assert f.peers["r1"].count("priors_heard") == 0

    run_virtual(main())


@pytest.mark.parametrize("what", ["not a prior", "other bytes", "other size"])
def test_a_bad_file_is_refused_and_goes_no_further(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with fleet(tmp_path, 4) as f:
            store, author = f.stranger(), identity(tmp_path, "liar")
            data = BAD + DATA if what == "not a prior" else DATA
            entry = sealed(author, data, size_bytes=len(data) + (what == "other size"))
            given = b"x" * len(data) if what == "other bytes" else data
            store.write(bundle_of(WEIGHTS, entry.notice.name), {PRIOR: given}, {})
            await f.offer("r0", entry)
            await asyncio.sleep(120)
            assert [peer.count("priors_refused") for peer in f.peers.values()] == [1, 0, 0, 0]
            assert not any(peer.taker.taken for peer in f.peers.values())
            assert f.peers["r0"].store.names() == []
            (record,) = [each for each in caplog.records if each.getMessage() == "prior_refused"]
            # Who gives other bytes than were announced is not the author, perhaps.
            assert (author.peer_id in str(vars(record))) == (what != "other bytes")
            before = f.fetched["r0:1"]
            await f.offer("r0", entry)
            await asyncio.sleep(60)
            # An honest file may still come from another peer.
            assert f.fetched["r0:1"] - before == (what == "other bytes")
            # The author's next one is welcome.
            await f.offer("r0", sealed(author, DATA, version=2))
            store.write(bundle_of(WEIGHTS, notice_of(author, DATA).name), {PRIOR: DATA}, {})
            await f.until(lambda: f.all_have(DATA))

    run_virtual(main())


def test_the_honest_file_comes_from_the_second_who_offers_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, 3) as f:
            store, author = f.stranger(), identity(tmp_path, "author")
            entry = sealed(author, DATA)
            store.write(bundle_of(WEIGHTS, entry.notice.name), {PRIOR: b"x" * len(DATA)}, {})
            await f.offer("r0", entry)
            await asyncio.sleep(5)
            assert f.peers["r0"].taker.taken == []
            good = f.peers["r1"]
            good.store.write(bundle_of(WEIGHTS, entry.notice.name), {PRIOR: DATA}, {})
            await _offered_by(f, "r1", "r0", entry)
            await f.until(lambda: f.all_have(DATA), 120)

    run_virtual(main())


def test_who_has_no_record_makes_nobody_connect_anywhere(tmp_path: Path) -> None:
    """Files are fetched where the records say, not where an offer would like it."""

    async def main() -> None:
        async with fleet(tmp_path, 1) as f:
            store, author = f.stranger(), identity(tmp_path, "author")
            entry = sealed(author, DATA)
            store.write(bundle_of(WEIGHTS, entry.notice.name), {PRIOR: DATA}, {})
            with pytest.raises(MismatchError, match="no record"):
                await f.offer("r0", entry, peer_id="unknown")
            await asyncio.sleep(60)
            assert not f.fetched
            assert f.peers["r0"].taker.taken == []
            await f.offer("r0", entry)
            await f.until(lambda: f.all_have(DATA))

    run_virtual(main())


async def _offered_by(f: Fleet, source: str, target: str, entry: Entry) -> None:
    request = pb.PriorOffer(
        run_id=entry.notice.run_id, protocol=PROTOCOL_VERSION, notices=[entry.signed],
        peer_id=source,
    )  # fmt: skip
    await f.net.transport(f"{source}:1").offer(f"{target}:1", request)


def test_a_replay_is_no_news_and_a_contradiction_is_blamed(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, 2) as f:
            store, author = f.stranger(), identity(tmp_path, "author")
            first, second = sealed(author, DATA), sealed(author, DATA + b"2", version=2)
            for data, entry in ((DATA, first), (DATA + b"2", second)):
                store.write(bundle_of(WEIGHTS, entry.notice.name), {PRIOR: data}, {})
                await f.offer("r0", entry)
                await f.until(lambda data=data: f.all_have(data))
            answer = await f.offer("r0", first)
            assert [(seen.author, seen.version) for seen in answer.seen] == [(author.peer_id, 2)]
            await asyncio.sleep(60)
            assert f.peers["r0"].taker.taken == [DATA, DATA + b"2"]
            assert f.peers["r0"].count("priors_refused") == 0
            await f.offer("r0", sealed(author, DATA, version=2))
            await asyncio.sleep(60)
            assert f.peers["r0"].taker.taken == [DATA, DATA + b"2"]
            assert f.peers["r0"].count("priors_refused") == 1

    run_virtual(main())


def test_another_authors_file_announced_as_ones_own_is_not_deleted(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, 1) as f:
            await published(f)
            await f.until(lambda: f.all_have(DATA))
            f.stranger()
            thief = identity(tmp_path, "thief")
            await f.offer("r0", sealed(thief, DATA, size_bytes=len(DATA) + 1))
            await asyncio.sleep(30)
            assert f.peers["r0"].count("priors_refused") == 1
            assert bundle_of(WEIGHTS, notice_of(thief, DATA).name) in f.peers["r0"].store.names()

    run_virtual(main())


def test_a_flood_of_offers_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with fleet(tmp_path, 2) as f:
            liar = identity(tmp_path, "liar")
            entries = [sealed(liar, DATA, run_id="x", version=n + 1) for n in range(MAX_NOTICES)]
            with pytest.raises(MismatchError):
                await f.offer("r0", *entries, entries[0])
            await asyncio.gather(*(f.offer("r0", *entries, peer_id=f"p{n % 50}") for n in range(500)))
            await asyncio.sleep(1)
            assert f.peers["r0"].count("priors_refused") <= 150 * MAX_NOTICES
            assert sum(each.getMessage() == "prior_refused" for each in caplog.records) <= 50
            await published(f)
            await f.until(lambda: f.all_have(DATA))

    caplog.set_level(logging.INFO)
    run_virtual(main())


def test_the_least_recently_heard_of_nine_authors_goes(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, 1) as f:
            for n in range(9):
                await published(f, f"a{n}", b"%d" % n * 40)
                await f.until(lambda n=n: f.all_have(b"%d" % n * 40))
            peer = f.peers["r0"]
            assert peer.relay is not None
            assert len(peer.relay.board.entries) == 8
            assert len(peer.taker.left) == 1

    run_virtual(main())


def test_an_older_one_that_comes_late_does_not_take_the_place_of_a_newer(tmp_path: Path) -> None:
    """Both are fetched at once, and the newer one is here first."""

    async def main() -> None:
        async with fleet(tmp_path, 1) as f:
            store, author = f.stranger(), identity(tmp_path, "author")
            old, new = sealed(author, DATA), sealed(author, DATA + b"2", version=2)
            for data, entry in ((DATA, old), (DATA + b"2", new)):
                store.write(bundle_of(WEIGHTS, entry.notice.name), {PRIOR: data}, {})

            def slow(source: str, target: str, message: Message) -> list[Delivery]:
                late = isinstance(message, pb.FetchRequest) and message.bundle.endswith(old.notice.name.hex())
                return [Delivery(message, 5.0 if late else 0.0)]

            f.net.tap = slow
            await f.offer("r0", old)
            await f.offer("r0", new, peer_id="another")  # of one peer, files come one after the other
            await asyncio.sleep(60)
            peer = f.peers["r0"]
            assert peer.relay is not None
            assert [entry.notice.version for entry in peer.relay.board.entries] == [2]
            assert peer.taker.taken == [DATA + b"2"]
            assert peer.store.names() == [bundle_of(WEIGHTS, new.notice.name)]

    run_virtual(main())


def test_many_other_authors_do_not_make_an_old_notice_news(tmp_path: Path) -> None:
    board = Board()
    author = identity(tmp_path, "author")
    first, second = sealed(author, DATA), sealed(author, DATA, version=2)
    board.add(second)
    for n in range(300):
        board.pass_over(Entry(pb.Notice(author=f"liar {n}", kind=WEIGHTS, number=1, version=1), first.signed))
    assert board.version(first.key) == 2


def test_a_disk_that_fails_costs_the_prior_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with fleet(tmp_path, 1) as f:
            store, author = f.stranger(), identity(tmp_path, "liar")
            bad = sealed(author, BAD)
            store.write(bundle_of(WEIGHTS, bad.notice.name), {PRIOR: BAD}, {})
            peer = f.peers["r0"]

            def full(name: str) -> None:
                raise ResourceError("no space left")

            with monkeypatch.context() as patch:
                patch.setattr(peer.store, "delete", full)
                await f.offer("r0", bad)
                await asyncio.sleep(30)
            await published(f)
            await f.until(lambda: f.all_have(DATA))

    run_virtual(main())


def test_nothing_more_is_taken_of_a_barred_author(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, 1) as f:
            publisher, _ = f.anchor("anchor")
            await publisher.publish(WEIGHTS, 1, DATA, weight_version=3, measured=500, tokens=100)
            await f.until(lambda: f.all_have(DATA))
            peer = f.peers["r0"]
            assert peer.relay is not None
            peer.relay.bar(identity(tmp_path, "anchor").peer_id, "worse than nothing")
            assert len(peer.taker.left) == peer.count("priors_refused") == 1
            await publisher.publish(WEIGHTS, 1, b"next", weight_version=3, measured=500, tokens=100)
            await asyncio.sleep(60)
            assert peer.taker.taken == [DATA]
            await published(f, "other", b"another's")
            await f.until(lambda: f.all_have(b"another's"))

    run_virtual(main())


def test_an_authors_next_one_is_taken_when_it_is_far_enough_from_the_last(tmp_path: Path) -> None:
    """What comes too soon is no fault, and is taken later."""

    async def main() -> None:
        async with fleet(tmp_path, 2, limits=bounds(apart_tokens=100, apart_s=1000.0)) as f:
            publisher, _ = f.anchor("anchor")
            peer = f.peers["r0"]

            async def publish(data: bytes, measured: int) -> None:
                await publisher.publish(WEIGHTS, 1, data, weight_version=3, measured=measured, tokens=100)

            await publish(b"first", 500)
            await f.until(lambda: f.all_have(b"first"))
            f.counted = 599
            for n in range(20):
                await publish(b"%d" % n, 10_000)  # what it says of the future does not count
                await asyncio.sleep(20)
            assert peer.taker.taken == [b"first"]
            assert sum(f.fetched.values()) == 2
            f.counted = 600
            await f.until(lambda: f.all_have(b"19"), 120)
            assert peer.taker.taken == [b"first", b"19"]
            await publish(b"late", 600)
            assert 800 < await f.until(lambda: f.all_have(b"late"), 1200) < 1200
            assert sum(peer.count("priors_refused") for peer in f.peers.values()) == 0

    run_virtual(main())


def test_a_restarted_anchor_goes_on_where_it_was_and_leaves_no_files_behind(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, 2) as f:
            for n in range(4):
                await published(f, "anchor", b"%d" % n * 50)
                await f.until(lambda n=n: f.all_have(b"%d" % n * 50))
            assert len(f.peers["anchor"].store.names()) == 1

    run_virtual(main())


def test_uploads_keep_within_the_runs_rate(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, 6, bps=8000) as f:
            publisher, anchor = f.anchor("anchor")
            for n in range(20):
                await publisher.publish(WEIGHTS, 1, bytes([n]) * 5000, weight_version=1, measured=1, tokens=1)
                await asyncio.sleep(2)
            elapsed = f.clock.monotonic()
            assert 0 < anchor.count("prior_bytes_sent") <= 1000 * elapsed + 2 * 5000
            await f.until(lambda: f.all_have(bytes([19]) * 5000))

    run_virtual(main())


def test_a_notice_is_dated_by_when_its_measurement_began(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, 1) as f:
            publisher, _ = f.anchor("anchor")
            await publisher.publish(
                WEIGHTS, 1, DATA, weight_version=3, measured=500, tokens=100, time=EPOCH - 90
            )
            await f.until(lambda: f.all_have(DATA))
            peer = f.peers["r0"]
            assert peer.relay is not None
            (entry,) = peer.relay.board.entries
            assert entry.notice.time == EPOCH - 90

    run_virtual(main())


def test_who_always_says_that_it_lacks_all_is_charged_once_for_each_file(tmp_path: Path) -> None:
    async def main() -> None:
        async with fleet(tmp_path, 1, bps=80) as f:
            peer = f.peers["r0"]
            assert peer.relay is not None
            fetch_of = peer.relay.serve

            async def lie(offer: pb.PriorOffer) -> pb.PriorAnswer:
                await fetch_of(offer)
                return pb.PriorAnswer()

            peer.relay.serve = lie  # type: ignore[method-assign]
            publisher, anchor = f.anchor("anchor")
            await publisher.publish(WEIGHTS, 1, DATA, weight_version=3, measured=500, tokens=100)
            await f.until(lambda: f.all_have(DATA))
            await asyncio.sleep(600)
            assert anchor.count("prior_bytes_sent") == len(DATA)
            await publisher.publish(WEIGHTS, 1, b"next", weight_version=3, measured=500, tokens=100)
            assert await f.until(lambda: f.all_have(b"next")) < 10

    run_virtual(main())


def test_a_bucket_makes_up_for_what_was_sent_at_once() -> None:
    bucket = Bucket(800)
    assert bucket.wait_s(5.0) == 0.0
    bucket.spend(300)
    assert bucket.wait_s(5.0) == pytest.approx(3.0)
    assert bucket.wait_s(7.0) == pytest.approx(1.0)
    assert bucket.wait_s(100.0) == 0.0
    free = Bucket(0)
    free.spend(10**12)
    assert free.wait_s(0.0) == 0.0
