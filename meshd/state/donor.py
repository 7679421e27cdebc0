"""The serving side of bundles: what joiners, seeds and exporters ask of a peer that has them (DESIGN section 7)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import BinaryIO

from meshd.clock import Clock
from meshd.errors import DataError, MeshdError, MismatchError, ResourceError
from meshd.proto import meshd_pb2 as pb
from meshd.state.bundle import BundleStore
from meshd.state.live import LiveBundles
from meshd.state.manifest import FileEntry, Manifest, check_bundle_name
from meshd.transport.base import NotHere

log = logging.getLogger(__name__)

# A piece on the wire: a quarter of a chunk, so that a slow link shows progress four times as often (C05).
PIECE_BYTES = 256 << 10


class _Slot:
    """One Fetch under way."""

    def __init__(self, now: float) -> None:
        self.progress = now  # when the reader last took a piece
        self.with_reader = False  # the last piece is on its way: only then is a stall the reader's
        self.file: BinaryIO | None = None
        self.lost = False

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class Donor:
    """Serves the bundles of a store: `list_bundles`, `manifest`, `fetch` of `meshd.transport.base.Handlers`.

    At most `slots` files are being read at a time; one more asker gets ResourceError with the addresses that `others`
    gives for the bundle (C06). A slot is free again when its reader ends, breaks off, or has taken nothing for
    `stall_timeout_s` and another asks (C05).

    `live` makes the `live/STAGE` bundles that are asked for.
    """

    def __init__(
        self,
        store: BundleStore,
        run_id: str,
        *,
        clock: Clock,
        slots: int = 4,
        stall_timeout_s: float = 30.0,
        live: LiveBundles | None = None,
        others: Callable[[str], Sequence[str]] = lambda bundle: (),
    ) -> None:
        self._store, self._run_id, self._clock = store, run_id, clock
        self._slots, self._stall_timeout_s = slots, stall_timeout_s
        self._live, self._others = live, others
        self._taken: list[_Slot] = []

    @property
    def busy(self) -> int:
        """Slots taken now."""
        return len(self._taken)

    async def list_bundles(self, request: pb.ListRequest) -> pb.ListReply:
        """Names of the bundles on this disk (live ones may be had beyond these). Raises MismatchError."""
        self._check_run(request.run_id)
        return pb.ListReply(bundles=await asyncio.to_thread(self._store.names))

    async def manifest(self, request: pb.ManifestRequest) -> pb.ManifestReply:
        """Raises MismatchError for another run, NotHere, and what `LiveBundles.ensure` raises."""
        self._check_run(request.run_id)
        name = self._check_name(request.bundle)
        if self._live is not None and name.startswith("live/"):
            await self._live.ensure(name)
        try:
            manifest = await asyncio.to_thread(self._store.manifest, name)
        except DataError as fault:
            raise self._not_served(name, fault) from fault
        return manifest.to_proto()

    async def fetch(self, request: pb.FetchRequest) -> AsyncIterator[pb.FetchChunk]:
        """The file from `offset` to its end, in pieces of at most PIECE_BYTES, in order.

        Raises MismatchError for another run, another manifest than asked for, or an offset inside a chunk; NotHere;
        ResourceError when all slots are taken, or when this one was given away because the reader stalled.
        """
        self._check_run(request.run_id)
        name = self._check_name(request.bundle)
        slot = self._take(name)
        try:
            slot.file, entry = await self._open(name, request)
            offset = request.offset
            slot.file.seek(offset)
            while offset < entry.size:
                chunk = await asyncio.to_thread(slot.file.read, entry.chunk_bytes)
                if not chunk:
                    raise NotHere(f"{request.file} of bundle {name} ends at {offset} bytes here")
                for start in range(0, len(chunk), PIECE_BYTES):
                    slot.with_reader = True
                    yield pb.FetchChunk(offset=offset + start, data=chunk[start : start + PIECE_BYTES])
                    self._progress(slot, name)
                offset += len(chunk)
        finally:
            slot.close()
            if slot in self._taken:
                self._taken.remove(slot)

    def _progress(self, slot: _Slot, name: str) -> None:
        if slot.lost:
            raise ResourceError(
                f"nothing was taken for {self._stall_timeout_s:g} s; the slot serves another peer now"
            )
        slot.with_reader = False
        slot.progress = self._clock.monotonic()
        if self._live is not None:
            self._live.keep(name, slot.progress + self._stall_timeout_s)

    def _take(self, name: str) -> _Slot:
        now = self._clock.monotonic()
        for stalled in [s for s in self._taken if s.with_reader and now - s.progress > self._stall_timeout_s]:
            if len(self._taken) >= self._slots:
                stalled.lost = True
                stalled.close()
                self._taken.remove(stalled)
        if len(self._taken) >= self._slots:
            others = ", ".join(self._others(name)[:8])
            raise ResourceError(
                f"all {self._slots} donor slots are taken. Fix: "
                + (f"ask {others}" if others else "ask again later")
            )
        slot = _Slot(now)
        self._taken.append(slot)
        return slot

    async def _open(self, name: str, request: pb.FetchRequest) -> tuple[BinaryIO, FileEntry]:
        try:
            file, manifest = await asyncio.to_thread(self._store.open, name, request.file)
        except DataError as fault:
            raise self._not_served(name, fault) from fault
        try:
            return file, _requested(manifest, request)
        except MeshdError:
            file.close()
            raise

    def _check_run(self, run_id: str) -> None:
        if run_id != self._run_id:
            raise MismatchError(f"this peer works on run {self._run_id}, not on {run_id[:64]!r}")

    def _check_name(self, name: str) -> str:
        try:
            return check_bundle_name(name)
        except DataError as fault:
            raise NotHere(str(fault)) from fault

    def _not_served(self, name: str, fault: DataError) -> NotHere:
        """A damaged bundle (or a hostile file name): told in full to the log, to the asker only that it is not here."""
        log.warning("not served: %s", fault)
        return NotHere(f"bundle {name} cannot be served as asked")


def _requested(manifest: Manifest, request: pb.FetchRequest) -> FileEntry:
    entry = manifest.file(request.file)
    if entry is None:
        raise NotHere(f"bundle {manifest.bundle} has no file {request.file[:100]!r}")
    if request.manifest_sha256.hex() != manifest.sha256:
        raise MismatchError(
            f"bundle {manifest.bundle} is not what was asked for any more: it is {manifest.sha256} now"
        )
    if request.offset % entry.chunk_bytes or request.offset > entry.size:
        raise MismatchError(
            f"offset {request.offset} of {entry.name}: must be a multiple of {entry.chunk_bytes}, at most {entry.size}"
        )
    return entry
