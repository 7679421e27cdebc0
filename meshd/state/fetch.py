"""Getting a bundle from whichever peers have it (DESIGN section 7; C05, C06, C23, C24)."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar

from meshd.clock import Clock
from meshd.errors import DataError, MeshdError, MismatchError, NetworkError, ResourceError
from meshd.proto import meshd_pb2 as pb
from meshd.state.bundle import BundleStore
from meshd.state.manifest import FileEntry, Manifest, check_bundle_name
from meshd.state.partial import CorruptChunk, Partial
from meshd.transport.base import CHUNK_BYTES, NotHere, Transport

log = logging.getLogger(__name__)

T = TypeVar("T")

# Addresses ("host:port") of peers that may have the bundle: given, or asked for anew in every round.
Donors = Sequence[str] | Callable[[], Awaitable[Sequence[str]]]

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 15.0


class _Limits(NamedTuple):
    """When to leave a donor, when to give up, what to refuse (see fetch_bundle)."""

    progress_timeout_s: float
    patience_s: float
    max_bytes: int | None
    check: Callable[[Manifest], object]


async def fetch_bundle(
    name: str,
    donors: Donors,
    transport: Transport,
    store: BundleStore,
    run_id: str,
    *,
    clock: Clock,
    rng: random.Random,
    expected_sha256: str | None = None,
    progress_timeout_s: float = 10.0,
    patience_s: float = 120.0,
    max_bytes: int | None = None,
    check: Callable[[Manifest], object] = lambda manifest: None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Bring bundle `name` into `store` and return its manifest.

    `expected_sha256` is the `Manifest.sha256` that the content must have. Without it the first donor that answers
    decides: then the caller trusts its donors, and the caller must check what the content says. `check` is for what the
    manifest says: it raises MismatchError before anything is transferred, and what was here stays.

    Donors are tried in random order, so that newcomers spread; one that dies, stalls, is busy or lacks the bundle is
    passed over until the next round, one that sent wrong bytes is not asked again. Rounds follow each other with
    growing pauses. Each chunk is checked before it is kept, and kept chunks are not fetched again, by this call or by a
    later one (after a crash, too). Idempotent: what is already here is returned at once (a `live/STAGE` bundle
    without `expected_sha256` is asked for again, and transferred only if it differs).

    A donor that sends nothing for `progress_timeout_s` is left for another; there is no limit on the whole. Bundles of
    more than `max_bytes` are refused. `on_progress(done_bytes, total_bytes)` is called after each chunk.

    Raises NetworkError naming each donor and why, after `patience_s` in which no chunk came and no donor was
    merely busy; ResourceError when this machine's disk is full or not writable; DataError for a bad name.
    """
    check_bundle_name(name)
    limits = _Limits(progress_timeout_s, patience_s, max_bytes, check)
    fetch = _Fetch(name, donors, transport, store, run_id, clock, rng, expected_sha256, limits, on_progress)
    async with store.fetch_lock(name):
        return await fetch.run()


class _DonorFailed(Exception):
    """This donor, now, does not work out. Never leaves the module."""

    def __init__(self, reason: str, *, busy: bool = False, liar: bool = False) -> None:
        super().__init__(reason)
        self.busy, self.liar = busy, liar


class _Fetch:
    """One call of fetch_bundle."""

    def __init__(
        self,
        name: str,
        donors: Donors,
        transport: Transport,
        store: BundleStore,
        run_id: str,
        clock: Clock,
        rng: random.Random,
        expected: str | None,
        limits: _Limits,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._name, self._donors, self._transport, self._store = name, donors, transport, store
        self._run_id, self._clock, self._rng = run_id, clock, rng
        self._expected, self._limits, self._on_progress = expected, limits, on_progress
        self._live = name.startswith("live/")
        self._reasons: dict[str, str] = {}
        self._liars: set[str] = set()
        self._partial: Partial | None = None
        self._kept = 0  # chunks, by this call
        self._hope = clock.monotonic()  # the last time something spoke for going on

    async def run(self) -> Manifest:
        present = await asyncio.to_thread(self._present)
        if present is not None and (self._expected is not None or not self._live):
            return present
        pause_s = _FIRST_PAUSE_S
        while True:
            kept = self._kept
            order = await self._order()
            if not order and not callable(self._donors):
                raise NetworkError(self._farewell())
            for address in order:
                try:
                    return await self._from(address)
                except _DonorFailed as failure:
                    self._note(address, failure)
            if self._kept > kept:
                pause_s = _FIRST_PAUSE_S
            if self._clock.monotonic() - self._hope > self._limits.patience_s:
                raise NetworkError(self._farewell())
            await self._clock.sleep(pause_s * (0.5 + self._rng.random()))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _present(self) -> Manifest | None:
        """The bundle, if it is here as wanted. A damaged one counts as absent: it will be replaced."""
        try:
            manifest = self._store.manifest(self._name)
        except NotHere:
            return None
        except DataError as fault:
            log.warning("%s; fetching it again", fault)
            return None
        try:
            self._limits.check(manifest)
        except MismatchError as fault:
            log.warning("bundle %s is here and cannot be used: %s; fetching it again", self._name, fault)
            return None
        return manifest if self._expected in (None, manifest.sha256) else None

    async def _order(self) -> list[str]:
        addresses = await self._donors() if callable(self._donors) else self._donors
        left = sorted(set(addresses) - self._liars)
        self._rng.shuffle(left)
        return left

    def _note(self, address: str, failure: _DonorFailed) -> None:
        if failure.busy:
            self._hope = self._clock.monotonic()
        if failure.liar:
            self._liars.add(address)
            log.warning("%s: donor %s is set aside: %s", self._name, address, failure)
        elif self._reasons.get(address) != str(failure):
            log.info("%s: donor %s: %s", self._name, address, failure)
        self._reasons[address] = str(failure)

    def _farewell(self) -> str:
        if not self._reasons:
            return (
                f"bundle {self._name}: no peer is known that could have it. Fix: start one that does (a seed)"
            )
        reasons = "; ".join(f"{address}: {reason}" for address, reason in sorted(self._reasons.items()))
        return f"bundle {self._name} cannot be fetched from any of {len(self._reasons)} peers ({reasons})"

    async def _from(self, address: str) -> Manifest:
        """The whole bundle from one donor, as far as it is not here. Raises _DonorFailed."""
        request = pb.ManifestRequest(run_id=self._run_id, bundle=self._name)
        reply = await self._ask(self._transport.manifest(address, request))
        manifest = self._judged(reply)
        present = await asyncio.to_thread(self._present) if self._live else None
        if present is not None and present.sha256 == manifest.sha256:
            return present
        if self._partial is None or self._partial.manifest.sha256 != manifest.sha256:
            self._partial = await asyncio.to_thread(Partial, self._store, manifest)
        partial = self._partial
        for entry in manifest.files:
            if partial.chunks(entry.name) < len(entry.sha256):
                await self._file(address, partial, entry)
        await asyncio.to_thread(partial.commit)
        return partial.manifest

    def _judged(self, reply: pb.ManifestReply) -> Manifest:
        try:
            manifest = Manifest.from_proto(reply)
        except DataError as fault:
            raise _DonorFailed(f"sent a bad manifest: {fault}", liar=True) from fault
        if manifest.bundle != self._name:
            raise _DonorFailed(f"answered with bundle {manifest.bundle}", liar=True)
        if self._expected not in (None, manifest.sha256):
            raise _DonorFailed(f"has other content ({manifest.sha256[:16]}) than expected ({self._expected})")
        if self._limits.max_bytes is not None and manifest.size > self._limits.max_bytes:
            raise _DonorFailed(
                f"offers {manifest.size} bytes; at most {self._limits.max_bytes} are taken", liar=True
            )
        try:
            self._limits.check(manifest)
        except MismatchError as fault:
            raise _DonorFailed(f"offers what cannot be used: {fault}", liar=True) from fault
        return manifest

    async def _file(self, address: str, partial: Partial, entry: FileEntry) -> None:
        """The missing end of one file."""
        offset = partial.chunks(entry.name) * entry.chunk_bytes
        request = pb.FetchRequest(
            run_id=self._run_id,
            bundle=self._name,
            file=entry.name,
            offset=offset,
            manifest_sha256=bytes.fromhex(partial.manifest.sha256),
        )
        pending = bytearray()
        async with _closing(self._transport.fetch(address, request)) as pieces:
            while offset < entry.size:
                piece = await self._ask(anext(pieces, None))
                if piece is None:
                    raise _DonorFailed(f"{entry.name} ended after {offset} of {entry.size} bytes")
                if piece.offset != offset + len(pending) or not 0 < len(piece.data) <= CHUNK_BYTES:
                    raise _DonorFailed(f"{entry.name}: a piece does not follow the one before", liar=True)
                pending += piece.data
                while pending and len(pending) >= (size := entry.chunk_size(offset // entry.chunk_bytes)) > 0:
                    await self._keep(partial, entry, bytes(pending[:size]))
                    del pending[:size]
                    offset += size
        if pending:
            raise _DonorFailed(f"{entry.name}: more than its {entry.size} bytes were sent", liar=True)

    async def _keep(self, partial: Partial, entry: FileEntry, chunk: bytes) -> None:
        try:
            await asyncio.to_thread(partial.append, entry, chunk)
        except CorruptChunk as fault:
            raise _DonorFailed(str(fault), liar=True) from fault
        self._kept += 1
        self._hope = self._clock.monotonic()
        if self._on_progress is not None:
            self._on_progress(partial.done_bytes, partial.manifest.size)

    async def _ask(self, answer: Awaitable[T]) -> T:
        """Await the donor's next word. Its refusals become _DonorFailed; this machine's own faults do not pass here."""
        limit_s = self._limits.progress_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            raise _DonorFailed(f"no progress for {limit_s:g} s") from None
        except ResourceError as refusal:
            raise _DonorFailed(str(refusal), busy=True) from refusal
        except MeshdError as refusal:
            raise _DonorFailed(str(refusal)) from refusal


@asynccontextmanager
async def _closing(stream: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Leaving the block ends the stream now, so that the donor's slot is free at once (C05)."""
    try:
        yield stream
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()
