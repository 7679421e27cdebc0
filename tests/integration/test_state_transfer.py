"""Bundles travel between peers that die, stall, lie and fill up (a network in memory, on virtual time)."""

import asyncio
import errno
import logging
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from meshd.errors import MismatchError, NetworkError, ResourceError
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock, run_virtual
from meshd.state import fetch as fetch_module
from meshd.state.bundle import BundleStore, Manifest
from meshd.state.donor import Donor
from meshd.state.fetch import fetch_bundle
from meshd.transport.base import CHUNK_BYTES
from meshd.transport.memory import MemoryNetwork

RUN = "ab" * 20
CHUNKS = 6
FILES = {"big": random.Random(1).randbytes((CHUNKS - 1) * CHUNK_BYTES + 99), "small": b"x" * 10, "empty": b""}


class Peer:
    """A donor that notes what is asked, and whose stream a test may tamper with."""

    def __init__(self, donor: Donor) -> None:
        self.donor = donor
        self.asked: list[tuple[str, int]] = []  # file, offset of each Fetch
        self.manifests = 0
        self.tamper: Callable[[AsyncIterator[pb.FetchChunk]], AsyncIterator[pb.FetchChunk]] = lambda stream: (
            stream
        )
        self.forge: Callable[[pb.ManifestReply], pb.ManifestReply] = lambda reply: reply

    async def list_bundles(self, request: pb.ListRequest) -> pb.ListReply:
        return await self.donor.list_bundles(request)

    async def manifest(self, request: pb.ManifestRequest) -> pb.ManifestReply:
        self.manifests += 1
        return self.forge(await self.donor.manifest(request))

    async def fetch(self, request: pb.FetchRequest) -> AsyncIterator[pb.FetchChunk]:
        self.asked.append((request.file, request.offset))
        stream = self.donor.fetch(request)
        try:
            async for piece in self.tamper(stream):
                yield piece
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # an async generator


class World:
    """Donors by address and one newcomer, "me"."""

    def __init__(self, root: Path, net: MemoryNetwork) -> None:
        self.root, self.net, self.clock = root, net, VirtualClock()
        self.peers: dict[str, Peer] = {}
        self.mine = BundleStore(root / "me")

    def store(self, address: str) -> BundleStore:
        return BundleStore(self.root / address)

    def add(
        self, address: str, files: dict[str, bytes] | None = FILES, *, slots: int = 4, run: str = RUN
    ) -> Peer:
        """A peer that has bundle base/0 with these files, or lacks it."""
        store = self.store(address)
        if files is not None:
            store.write("base/0", files, {"from": address})
        self.peers[address] = Peer(Donor(store, run, clock=self.clock, slots=slots))
        self.net.register(address, self.peers[address])  # type: ignore[arg-type]  # serves state only
        return self.peers[address]

    async def fetch(
        self, donors: fetch_module.Donors, seed: int = 0, name: str = "base/0", **more: object
    ) -> Manifest:
        transport = self.net.transport("me")
        return await fetch_bundle(
            name, donors, transport, self.mine, RUN, clock=self.clock, rng=random.Random(seed), **more
        )  # type: ignore[arg-type]

    def check(self, files: dict[str, bytes] = FILES) -> None:
        """What was fetched is whole, and nothing is left over."""
        self.mine.verify("base/0")
        for name, content in files.items():
            assert self.mine.path("base/0", name).read_bytes() == content
        assert list((self.mine.root / ".partial").iterdir()) == []


def tree(root: Path) -> set[str]:
    return {str(path) for path in root.rglob("*")}


def play(tmp_path: Path, scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with MemoryNetwork(VirtualClock(), buffer_bytes=CHUNK_BYTES) as net:
            await scenario(World(tmp_path, net))

    run_virtual(main())


def in_turn(*rounds: Sequence[str]) -> Callable[[], Awaitable[Sequence[str]]]:
    """The donors known in the first round, the second, ...; the last again and again."""
    left = list(rounds)

    async def donors() -> Sequence[str]:
        return left.pop(0) if len(left) > 1 else left[0]

    return donors


def test_fetch_is_whole_and_idempotent(tmp_path: Path) -> None:
    """C24: a second call asks nobody."""

    async def scenario(world: World) -> None:
        peer = world.add("a")
        progress: list[tuple[int, int]] = []
        manifest = await world.fetch(["a"], on_progress=lambda done, total: progress.append((done, total)))
        world.check()
        assert manifest == world.store("a").manifest("base/0")
        assert len(progress) == CHUNKS + 1
        assert progress[-1] == (manifest.size, manifest.size)
        world.net.kill("a")
        assert await world.fetch(["a"]) == manifest
        assert await world.fetch([], expected_sha256=manifest.sha256) == manifest
        assert peer.manifests == 1

    play(tmp_path, scenario)


def test_donor_that_dies_is_replaced_and_its_chunks_are_kept(tmp_path: Path) -> None:
    """C23, C05: what was proved is not fetched again."""

    async def scenario(world: World) -> None:
        world.add("a")
        b = world.add("b")
        kept: list[int] = []

        def on_progress(done: int, _: int) -> None:
            kept.append(done)
            if done == 3 * CHUNK_BYTES:
                world.net.kill("a")

        await world.fetch(in_turn(["a"], ["b"]), on_progress=on_progress)
        world.check()
        big = [offset for file, offset in b.asked if file == "big"]
        assert len(big) == 1
        assert big[0] >= 3 * CHUNK_BYTES
        assert len(kept) == CHUNKS + 1  # each chunk once

    play(tmp_path, scenario)


@pytest.mark.parametrize("torn", [False, True])
def test_crash_of_the_newcomer_continues_where_it_was(tmp_path: Path, torn: bool) -> None:
    """C24. A chunk that the crash tore is found and fetched again, with those after it."""

    async def scenario(world: World) -> None:
        peer = world.add("a")
        reached = asyncio.Event()

        def on_progress(done: int, _: int) -> None:
            if done == 4 * CHUNK_BYTES:
                reached.set()

        with suppress(asyncio.CancelledError):
            async with asyncio.TaskGroup() as group:
                task = group.create_task(world.fetch(["a"], on_progress=on_progress))
                await reached.wait()
                task.cancel()
        (partial,) = (world.mine.root / ".partial").iterdir()
        assert world.mine.names() == []
        with (partial / "big").open("r+b") as file:
            file.truncate(4 * CHUNK_BYTES)  # the cancelled task may have begun another
            if torn:
                file.seek(2 * CHUNK_BYTES + 7)
                file.write(b"torn")
        world.mine = BundleStore(world.mine.root)
        peer.asked.clear()
        await world.fetch(["a"])
        world.check()
        assert peer.asked[0] == ("big", (2 if torn else 4) * CHUNK_BYTES)

    play(tmp_path, scenario)


def test_donor_with_rotten_bytes_is_set_aside_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(world: World) -> None:
        a, b = world.add("a"), world.add("b")
        rotten = world.store("a").path("base/0", "big")
        times = rotten.stat()
        data = bytearray(rotten.read_bytes())
        data[2 * CHUNK_BYTES + 5] ^= 1
        rotten.write_bytes(data)
        os.utime(rotten, ns=(times.st_atime_ns, times.st_mtime_ns))
        with caplog.at_level(logging.WARNING):
            await world.fetch(in_turn(["a"], ["a"], ["a", "b"]))
        world.check()
        assert "donor a is set aside: chunk 2 of big does not match its hash" in caplog.text
        assert a.manifests == 1
        assert ("big", 2 * CHUNK_BYTES) in b.asked

    play(tmp_path, scenario)


def test_stalled_donor_is_left_for_another_and_its_slot_is_freed(tmp_path: Path) -> None:
    """C05, C23: a donor that hangs without closing anything."""

    async def scenario(world: World) -> None:
        a = world.add("a")
        world.add("b")

        async def hang(stream: AsyncIterator[pb.FetchChunk]) -> AsyncIterator[pb.FetchChunk]:
            yield await anext(stream)
            await asyncio.Event().wait()

        a.tamper = hang
        started = world.clock.monotonic()
        await world.fetch(in_turn(["a"], ["b"]), progress_timeout_s=10)
        world.check()
        assert 10 <= world.clock.monotonic() - started < 12
        await asyncio.sleep(1)  # virtual: the donor learns of it
        assert a.donor.busy == 0

    play(tmp_path, scenario)


def test_slow_donor_is_waited_for_as_long_as_it_goes_on(tmp_path: Path) -> None:
    """C05: there is no limit on the whole."""

    async def scenario(world: World) -> None:
        a = world.add("a")

        async def crawl(stream: AsyncIterator[pb.FetchChunk]) -> AsyncIterator[pb.FetchChunk]:
            async for piece in stream:
                await asyncio.sleep(9)
                yield piece

        a.tamper = crawl
        await world.fetch(["a"], progress_timeout_s=10, patience_s=50)
        world.check()
        assert world.clock.monotonic() > 180
        assert [file for file, _ in a.asked] == ["big", "small"]

    play(tmp_path, scenario)


def test_no_donor_left_says_each_and_why(tmp_path: Path) -> None:
    """C23: absent, dead, of another run, with other content, silent."""

    async def scenario(world: World) -> None:
        world.add("absent", None)
        world.add("other-run", run="cd" * 20)
        world.add("other-content", {"f": b"y"})
        silent = world.add("silent")

        async def hang(stream: AsyncIterator[pb.FetchChunk]) -> AsyncIterator[pb.FetchChunk]:
            await asyncio.Event().wait()
            yield await anext(stream)

        silent.tamper = hang
        expected = world.store("silent").manifest("base/0").sha256
        donors = ["absent", "dead", "other-run", "other-content", "silent"]
        with pytest.raises(NetworkError) as caught:
            await world.fetch(donors, expected_sha256=expected, patience_s=60)
        text = str(caught.value)
        assert "base/0 cannot be fetched from any of 5 peers" in text
        for words in (
            "absent: bundle base/0 is not here",
            "dead is not reached",
            "works on run cdcd",
            "other-content: has other content",
            "silent: no progress for 10 s",
        ):
            assert words in text
        assert 60 < world.clock.monotonic() < 120
        assert world.mine.names() == []
        with pytest.raises(NetworkError, match="no peer is known"):
            await world.fetch([])

    play(tmp_path, scenario)


def test_donor_that_appears_later_is_found(tmp_path: Path) -> None:
    """C23: those that lack it are passed over, and the list is asked for anew."""

    async def scenario(world: World) -> None:
        lacking = world.add("lacking", None)
        world.add("late")
        await world.fetch(in_turn(["lacking"], ["lacking"], [], ["lacking", "late"]))
        world.check()
        assert lacking.asked == []

    play(tmp_path, scenario)


def test_busy_donors_are_waited_for(tmp_path: Path) -> None:
    """C06: a donor without a free slot is alive; giving up on it would be wrong, however long it takes."""

    async def scenario(world: World) -> None:
        a = world.add("a", slots=1)
        manifest = world.store("a").manifest("base/0")
        request = pb.FetchRequest(
            run_id=RUN, bundle="base/0", file="big", manifest_sha256=bytes.fromhex(manifest.sha256)
        )
        holder = a.donor.fetch(request)
        await anext(holder)

        async def release() -> None:
            for _ in range(20):
                await asyncio.sleep(25)
                await anext(holder)
            await holder.aclose()  # type: ignore[attr-defined]  # an async generator

        async with asyncio.TaskGroup() as group:
            group.create_task(release())
            await world.fetch(["a"], patience_s=60)
        world.check()
        assert 500 <= world.clock.monotonic() < 530
        assert a.manifests < 80  # the pauses grow

    play(tmp_path, scenario)


def test_newcomers_spread_over_donors(tmp_path: Path) -> None:
    """C06."""

    async def scenario(world: World) -> None:
        for address in "abcd":
            world.add(address, {"f": b"x"})
        for seed in range(40):
            world.mine = BundleStore(world.root / f"newcomer{seed}")
            await world.fetch(["a", "b", "c", "d"], seed)
        first = Counter({address: peer.manifests for address, peer in world.peers.items()})
        assert sum(first.values()) == 40
        assert min(first.values()) >= 4

    play(tmp_path, scenario)


def test_bundle_that_changes_under_the_download_is_begun_anew(tmp_path: Path) -> None:
    """Without an expected hash: what is committed is the one or the other, never a mixture."""

    async def scenario(world: World) -> None:
        a = world.add("a")
        changed = FILES | {"big": FILES["big"][::-1], "small": b"changed"}

        def on_progress(done: int, _: int) -> None:
            if done == CHUNK_BYTES:
                a.donor._store.write("base/0", changed, {})

        await world.fetch(["a"], on_progress=on_progress)
        world.check(changed)

    play(tmp_path, scenario)


def test_live_bundle_is_asked_for_again_but_moved_only_if_it_differs(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        a = world.add("a")
        store = a.donor._store
        store.write("live/0", {"f": b"one"}, {})
        await world.fetch(["a"], name="live/0")
        await world.fetch(["a"], name="live/0")
        assert (a.manifests, len(a.asked)) == (2, 1)
        store.write("live/0", {"f": b"two"}, {})
        await world.fetch(["a"], name="live/0")
        assert world.mine.path("live/0", "f").read_bytes() == b"two"

    play(tmp_path, scenario)


def test_damaged_bundle_of_ones_own_is_fetched_again(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.add("a")
        await world.fetch(["a"])
        world.mine.path("base/0", "small").write_bytes(b"torn")
        await world.fetch(["a"])
        world.check()

    play(tmp_path, scenario)


def evil_name(reply: pb.ManifestReply) -> pb.ManifestReply:
    reply.files[0].name = "../../../escaped"
    return reply


def other_bundle(reply: pb.ManifestReply) -> pb.ManifestReply:
    reply.bundle = "base/7"
    return reply


def huge(reply: pb.ManifestReply) -> pb.ManifestReply:
    reply.files[0].size = 1 << 62
    return reply


@pytest.mark.parametrize(
    ("forge", "words"),
    [(evil_name, "plain file name"), (other_bundle, "answered with bundle base/7"), (huge, "chunk hashes")],
)
def test_forged_manifests_are_refused(
    tmp_path: Path, forge: Callable[[pb.ManifestReply], pb.ManifestReply], words: str
) -> None:
    async def scenario(world: World) -> None:
        world.add("a").forge = forge
        before = tree(tmp_path)
        with pytest.raises(NetworkError, match=words):
            await world.fetch(["a"])
        assert tree(tmp_path) == before

    play(tmp_path, scenario)


async def gap(stream: AsyncIterator[pb.FetchChunk]) -> AsyncIterator[pb.FetchChunk]:
    await anext(stream)
    async for piece in stream:
        yield piece


async def short(stream: AsyncIterator[pb.FetchChunk]) -> AsyncIterator[pb.FetchChunk]:
    yield await anext(stream)


async def nothing_for_ever(stream: AsyncIterator[pb.FetchChunk]) -> AsyncIterator[pb.FetchChunk]:
    while True:
        await asyncio.sleep(0)
        yield pb.FetchChunk(offset=0)


async def padded(stream: AsyncIterator[pb.FetchChunk]) -> AsyncIterator[pb.FetchChunk]:
    async for piece in stream:
        if len(piece.data) < 1000:
            piece.data += b"more"
        yield piece


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (gap, "does not follow"),
        (short, r"(ended after 0 of|small ended)"),
        (nothing_for_ever, "does not follow"),
        (padded, "more than its"),
    ],
)
def test_streams_out_of_form_are_refused(
    tmp_path: Path,
    tamper: Callable[[AsyncIterator[pb.FetchChunk]], AsyncIterator[pb.FetchChunk]],
    words: str,
) -> None:
    async def scenario(world: World) -> None:
        world.add("a").tamper = tamper
        with pytest.raises(NetworkError, match=words):
            await world.fetch(["a"])
        assert world.mine.names() == []

    play(tmp_path, scenario)


def test_too_large_a_bundle_is_refused(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        a = world.add("a")
        with pytest.raises(NetworkError, match="at most 1000 are taken"):
            await world.fetch(["a"], max_bytes=1000)
        assert a.asked == []

    play(tmp_path, scenario)


def test_full_disk_stops_the_download_and_it_can_go_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C29: the newcomer's own disk is not blamed on a donor; no bundle appears; proved chunks stay."""

    async def scenario(world: World) -> None:
        a = world.add("a")

        def on_progress(done: int, _: int) -> None:
            if done == 2 * CHUNK_BYTES:
                monkeypatch.setattr(Path, "open", full)

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        # The donor has its files open already: only the newcomer meets the full disk.
        with pytest.raises(ResourceError, match="Fix: free space"):
            await world.fetch(["a"], on_progress=on_progress)
        monkeypatch.undo()
        assert world.mine.names() == []
        a.asked.clear()
        await world.fetch(["a"])
        world.check()
        assert a.asked[0] == ("big", 2 * CHUNK_BYTES)

    play(tmp_path, scenario)


def test_two_calls_for_one_bundle_transfer_it_once(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        a = world.add("a")
        first, second = await asyncio.gather(world.fetch(["a"]), world.fetch(["a"]))
        assert first == second
        assert len(a.asked) == 2  # the two files that have content
        world.check()

    play(tmp_path, scenario)


def test_refusals_name_the_run(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.add("a", run="cd" * 20)
        with pytest.raises(MismatchError, match="works on run cdcd"):
            await world.net.transport("me").list_bundles("a", pb.ListRequest(run_id=RUN))

    play(tmp_path, scenario)
