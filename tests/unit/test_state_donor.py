"""The donor's slots, its answers to what is wrong, and bundles made on request."""

import asyncio
import io
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest
from manual_clock import ManualClock

from meshd.errors import MismatchError, ResourceError
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock, run_virtual
from meshd.state.bundle import BundleStore
from meshd.state.donor import PIECE_BYTES, Donor
from meshd.state.live import LiveBundles
from meshd.transport.base import CHUNK_BYTES, NotHere

RUN = "ab" * 20
CONTENT = bytes(range(256)) * (3 * CHUNK_BYTES // 256) + b"end"


@pytest.fixture
def store(tmp_path: Path) -> BundleStore:
    store = BundleStore(tmp_path)
    store.write("base/0", {"f": CONTENT}, {})
    return store


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(0.0)


Reader = AsyncGenerator[pb.FetchChunk, None]


def request(store: BundleStore, **change: object) -> pb.FetchRequest:
    digest = bytes.fromhex(store.manifest("base/0").sha256)
    return pb.FetchRequest(
        **({"run_id": RUN, "bundle": "base/0", "file": "f", "manifest_sha256": digest} | change)
    )


def read(donor: Donor, store: BundleStore, **change: object) -> Reader:
    return cast(Reader, donor.fetch(request(store, **change)))


async def test_serves_from_an_offset_in_small_pieces(store: BundleStore, clock: ManualClock) -> None:
    donor = Donor(store, RUN, clock=clock)
    pieces = [piece async for piece in read(donor, store, offset=CHUNK_BYTES)]
    assert b"".join(piece.data for piece in pieces) == CONTENT[CHUNK_BYTES:]
    assert [piece.offset for piece in pieces] == [*range(CHUNK_BYTES, 3 * CHUNK_BYTES + 1, PIECE_BYTES)]
    assert donor.busy == 0
    assert (await donor.list_bundles(pb.ListRequest(run_id=RUN))).bundles == ["base/0"]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"run_id": "cd" * 20}, MismatchError, "works on run abab"),
        ({"bundle": "base/1"}, NotHere, "not here"),
        ({"bundle": "../../etc"}, NotHere, "no bundle name"),
        ({"file": "g"}, NotHere, "no file g"),
        ({"file": "../../../etc/passwd"}, NotHere, "cannot be served"),
        ({"file": ".manifest.json"}, NotHere, "cannot be served"),
        ({"offset": 5}, MismatchError, "multiple of"),
        ({"offset": 1 << 40}, MismatchError, "at most"),
        ({"manifest_sha256": b"x" * 32}, MismatchError, "not what was asked for any more"),
        ({"manifest_sha256": b""}, MismatchError, "not what was asked for any more"),
    ],
)
async def test_wrong_requests_are_refused_and_hold_no_slot(
    store: BundleStore, clock: ManualClock, change: dict[str, object], error: type[Exception], words: str
) -> None:
    donor = Donor(store, RUN, clock=clock)
    with pytest.raises(error, match=words):
        await anext(read(donor, store, **change))
    assert donor.busy == 0


async def test_full_donor_names_others(store: BundleStore, clock: ManualClock) -> None:
    """C06."""
    donor = Donor(store, RUN, clock=clock, slots=2, others=lambda bundle: [f"peer-{bundle}:1", "peer:2"])
    readers = [read(donor, store) for _ in range(2)]
    for reader in readers:
        await anext(reader)
    with pytest.raises(ResourceError, match=r"all 2 donor slots are taken\. Fix: ask peer-base/0:1, peer:2"):
        await anext(read(donor, store))
    await readers[0].aclose()  # goes away in the middle
    assert donor.busy == 1
    async for _ in readers[1]:
        pass
    assert donor.busy == 0
    assert (await anext(read(donor, store))).offset == 0


async def test_slot_of_a_stalled_reader_goes_to_who_asks(store: BundleStore, clock: ManualClock) -> None:
    """C05: only after the time-out, only when it is needed, and only the stalled one's."""
    donor = Donor(store, RUN, clock=clock, slots=2, stall_timeout_s=30)
    stalled, slow = read(donor, store), read(donor, store)
    await anext(stalled)
    await anext(slow)
    for _ in range(3):
        clock.now += 10
        await anext(slow)
    with pytest.raises(ResourceError, match="slots are taken"):
        await anext(read(donor, store))
    clock.now += 0.5
    newcomer = read(donor, store)
    assert (await anext(newcomer)).offset == 0
    assert donor.busy == 2
    assert (await anext(slow)).offset == 4 * PIECE_BYTES
    with pytest.raises(ResourceError, match="nothing was taken for 30 s"):
        await anext(stalled)
    assert donor.busy == 2


async def test_reader_that_stalls_while_nobody_else_asks_goes_on(
    store: BundleStore, clock: ManualClock
) -> None:
    donor = Donor(store, RUN, clock=clock, slots=1)
    reader = read(donor, store)
    await anext(reader)
    clock.now += 1000
    rest = [piece async for piece in reader]
    assert rest[-1].data == b"end"


async def test_stall_of_the_donors_own_disk_costs_the_reader_nothing(
    store: BundleStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    donor = Donor(store, RUN, clock=clock, slots=1)
    reading, go_on = threading.Event(), threading.Event()

    class SlowFile(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            reading.set()
            go_on.wait()
            return super().read(size)

    monkeypatch.setattr(store, "open", lambda *_: (SlowFile(CONTENT), store.manifest("base/0")))
    reader = read(donor, store)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(anext(reader))  # type: ignore[arg-type]  # a coroutine in effect
        await asyncio.to_thread(reading.wait)
        clock.now += 1000
        with pytest.raises(ResourceError, match="slots are taken"):
            await anext(read(donor, store))
        go_on.set()
    assert first.result().offset == 0


async def test_cancelled_reader_frees_its_slot(store: BundleStore, clock: ManualClock) -> None:
    donor = Donor(store, RUN, clock=clock)
    taken = asyncio.Event()

    async def consume() -> None:
        reader = read(donor, store)
        try:
            await anext(reader)
            taken.set()
            await asyncio.Event().wait()
        finally:
            await reader.aclose()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(consume())
        await taken.wait()
        assert donor.busy == 1
        task.cancel()
    assert donor.busy == 0


async def test_replaced_bundle_is_served_whole_to_who_began(store: BundleStore, clock: ManualClock) -> None:
    donor = Donor(store, RUN, clock=clock)
    old = request(store)
    reader = cast(Reader, donor.fetch(old))
    first = await anext(reader)
    store.write("base/0", {"f": b"new"}, {})
    assert first.data + b"".join([piece.data async for piece in reader]) == CONTENT
    with pytest.raises(MismatchError, match="any more"):
        await anext(cast(Reader, donor.fetch(old)))


async def test_damaged_bundle_is_not_served(
    store: BundleStore, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    old = request(store)
    store.path("base/0", "f").write_bytes(b"torn")
    donor = Donor(store, RUN, clock=clock)
    with pytest.raises(NotHere, match="cannot be served"):
        await donor.manifest(pb.ManifestRequest(run_id=RUN, bundle="base/0"))
    with pytest.raises(NotHere, match="cannot be served"):
        await anext(cast(Reader, donor.fetch(old)))
    assert "f has 4 bytes instead of" in caplog.text


def preparing(store: BundleStore, made: list[str]) -> Callable[[str], Awaitable[None]]:
    async def prepare(name: str) -> None:
        made.append(name)
        await asyncio.sleep(0)
        store.write(name, {"f": bytes(2 * CHUNK_BYTES) + bytes([len(made)])}, {})

    return prepare


async def test_live_bundle_is_made_once_for_all_who_ask(store: BundleStore, clock: ManualClock) -> None:
    made: list[str] = []
    ask = pb.ManifestRequest(run_id=RUN, bundle="live/0")
    async with asyncio.TaskGroup() as group:
        live = LiveBundles("live/0", preparing(store, made), group, clock, fresh_s=60)
        donor = Donor(store, RUN, clock=clock, live=live)
        first, second = await asyncio.gather(donor.manifest(ask), donor.manifest(ask))
        assert first == second
        assert made == ["live/0"]
        await donor.manifest(pb.ManifestRequest(run_id=RUN, bundle="base/0"))
        assert made == ["live/0"]
        clock.now += 61
        assert await donor.manifest(ask) != first
        assert made == ["live/0"] * 2


async def test_live_bundle_is_not_taken_away_from_a_reader(store: BundleStore, clock: ManualClock) -> None:
    """A second newcomer, later, gets what the first still reads: else no slow one would ever end (C05)."""
    ask = pb.ManifestRequest(run_id=RUN, bundle="live/0")
    async with asyncio.TaskGroup() as group:
        live = LiveBundles("live/0", preparing(store, []), group, clock, fresh_s=60)
        donor = Donor(store, RUN, clock=clock, stall_timeout_s=30, live=live)
        first = await donor.manifest(ask)
        digest = bytes.fromhex(store.manifest("live/0").sha256)
        reader = read(donor, store, bundle="live/0", manifest_sha256=digest)
        for _ in range(7):
            clock.now += 20
            await anext(reader)
        assert await donor.manifest(ask) == first
        await reader.aclose()
        clock.now += 31
        assert await donor.manifest(ask) != first


def test_slow_making_goes_on_while_the_asker_is_sent_away(store: BundleStore) -> None:
    """C05: the asker's time-out must not begin it anew each time."""
    began: list[str] = []

    async def prepare(name: str) -> None:
        began.append(name)
        await asyncio.sleep(18)
        store.write(name, {"f": b"x"}, {})

    async def main() -> None:
        ask = pb.ManifestRequest(run_id=RUN, bundle="live/0")
        async with asyncio.TaskGroup() as group:
            live = LiveBundles("live/0", prepare, group, VirtualClock(), wait_s=5)
            donor = Donor(store, RUN, clock=VirtualClock(), live=live)
            for _ in range(3):
                with pytest.raises(ResourceError, match="live/0 is being written"):
                    await donor.manifest(ask)
            assert (await donor.manifest(ask)).files[0].size == 1
        assert began == ["live/0"]

    run_virtual(main())


async def test_failure_to_make_it_reaches_the_asker_and_ends_nothing(
    store: BundleStore, clock: ManualClock
) -> None:
    async def prepare(name: str) -> None:
        raise NotHere(f"{name}: another stage works here")

    async with asyncio.TaskGroup() as group:
        donor = Donor(store, RUN, clock=clock, live=LiveBundles("live/7", prepare, group, clock))
        for _ in range(2):
            with pytest.raises(NotHere, match="live/7: another stage"):
                await donor.manifest(pb.ManifestRequest(run_id=RUN, bundle="live/7"))


async def test_a_disk_that_does_not_take_it_sends_the_asker_elsewhere(
    store: BundleStore, clock: ManualClock
) -> None:
    """C29: for a donor that is merely busy a newcomer would wait for as long as the disk is full."""

    async def prepare(name: str) -> None:
        raise ResourceError("no space left on the disk")

    async with asyncio.TaskGroup() as group:
        donor = Donor(store, RUN, clock=clock, live=LiveBundles("live/0", prepare, group, clock))
        with pytest.raises(NotHere, match="live/0 cannot be written here: no space left"):
            await donor.manifest(pb.ManifestRequest(run_id=RUN, bundle="live/0"))


async def test_live_bundles_of_other_stages_are_not_made(store: BundleStore, clock: ManualClock) -> None:
    made: list[str] = []
    async with asyncio.TaskGroup() as group:
        donor = Donor(
            store, RUN, clock=clock, live=LiveBundles("live/0", preparing(store, made), group, clock)
        )
        with pytest.raises(NotHere):
            await donor.manifest(pb.ManifestRequest(run_id=RUN, bundle="live/1"))
    assert not made
