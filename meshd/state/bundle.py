"""Bundles on disk: named sets of files, written whole or not at all (DESIGN section 7).

Layout under the store's root (its own, under the peer's locked state directory):

    <bundle name>/            committed files and `.manifest.json`
    .new/                     bundles being written; emptied at start
    .old/                     what a replacement is about to delete; put back at start if the replacement was not done
    .partial/                 downloads under way (`meshd.state.partial`)

Every method blocks on the disk (and hashes: about 1 s per GB): call them with `asyncio.to_thread`. They may be called
from several threads.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from weakref import WeakValueDictionary

from meshd.errors import DataError, ResourceError
from meshd.state.disk import disk_faults, sync_directory, sync_file, write_synced
from meshd.state.manifest import FileEntry, Manifest, canonical_json, check_bundle_name, check_file_name
from meshd.transport.base import CHUNK_BYTES, NotHere

__all__ = ["BundleStore", "FileEntry", "Manifest", "check_bundle_name", "check_file_name"]

log = logging.getLogger(__name__)

_MANIFEST = ".manifest.json"
# Left free on the disk when a bundle is written: other writers (logs, the peer's own state) must go on.
_SPARE_BYTES = 16 << 20
# Downloads kept that were broken off, of all bundles together: many are of what nobody has any more.
_MOST_BROKEN_OFF = 8

# What a bundle cannot be read for, and is not damaged for.
_NOT_THE_DISK = {
    errno.EMFILE: "raise the limit (`ulimit -n`)",
    errno.ENFILE: "raise the system's limit of open files",
    errno.ENOMEM: "free memory",
    errno.EACCES: "give the files there to the user that runs meshd",
    errno.EPERM: "give the files there to the user that runs meshd",
}

_Stamp = tuple[int, int]  # size in bytes, mtime in ns


class _Known(NamedTuple):
    """A manifest as read from the disk."""

    stamp: _Stamp  # of the manifest file
    manifest: Manifest
    stamps: dict[str, _Stamp]  # of the bundle's files, at the commit


class BundleStore:
    """The bundles of one peer. Two stores on one root are not supported: hold `lock_state_dir`."""

    def __init__(self, root: Path) -> None:
        """Creates `root` if need be and clears what a crash left. Raises ResourceError when that is not permitted."""
        self.root = root
        self._new, self._old, self._partial = root / ".new", root / ".old", root / ".partial"
        self._lock = threading.RLock()
        self._cache: dict[str, _Known] = {}
        # Names hold numbers and hashes, of which there is no end: a lock goes with the last who holds it or waits.
        self._fetching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        with disk_faults(root):
            for directory in (self._new, self._old, self._partial):
                directory.mkdir(parents=True, exist_ok=True)
            self._recover()

    def write(self, name: str, files: Mapping[str, Path | bytes], facts: Mapping[str, Any]) -> Manifest:
        """Store copies of `files` (a path to copy, or the content) as bundle `name`, replacing what it was.

        Raises DataError for a bad name, ResourceError for a full or unwritable disk; then nothing has changed.
        """
        with self.writing(name, facts) as directory:
            for file, source in files.items():
                target = directory / check_file_name(file)
                if isinstance(source, bytes):
                    target.write_bytes(source)
                else:
                    shutil.copyfile(source, target)
        return self.manifest(name)

    @contextmanager
    def writing(self, name: str, facts: Mapping[str, Any]) -> Iterator[Path]:
        """A directory to put the files of bundle `name` in. Leaving the block normally commits; raising discards.

        `facts` is read at the commit, so the block may still add to it. Errors as `write`, also for faults of the
        disk within the block.
        """
        check_bundle_name(name)
        directory = self._new / uuid.uuid4().hex
        try:
            with disk_faults(self.root):
                directory.mkdir()
                yield directory
                entries = tuple(
                    hash_file(path) for path in sorted(directory.iterdir(), key=lambda path: path.name)
                )
            self.adopt(directory, Manifest(name, entries, dict(facts)))
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def adopt(self, directory: Path, manifest: Manifest) -> None:
        """Make `directory` (under the store's root, holding exactly the manifest's files, hashes proved) the bundle.

        All is on the disk before the name appears. Raises DataError for a bad manifest, ResourceError for the disk.
        """
        manifest.check()
        target = self.root / manifest.bundle
        old = self._old / _flat(manifest.bundle)
        with disk_faults(target), self._lock:
            for entry in manifest.files:
                sync_file(directory / entry.name)
            self._write_manifest(directory, manifest)
            sync_directory(directory)
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.rename(target, old)
            os.rename(directory, target)
            sync_directory(target.parent)
            self._cache.pop(manifest.bundle, None)
            shutil.rmtree(old, ignore_errors=True)

    def names(self) -> list[str]:
        """Names of the bundles here, in order (numbers by value)."""
        found = [
            str(path.parent.relative_to(self.root))
            for pattern in ("*/*", "*/*/*")
            for path in self.root.glob(f"{pattern}/{_MANIFEST}")
        ]
        return sorted((name for name in found if _is_bundle_name(name)), key=_by_number)

    def manifest(self, name: str) -> Manifest:
        """The manifest of bundle `name`, from memory when nothing changed on the disk.

        Sizes and times of the files are compared with those at the commit; where only times differ (the directory was
        copied), everything is hashed once and the new times are noted. Raises NotHere when the bundle is not here,
        DataError when it is damaged or the disk does not give it, ResourceError when this process is out of files.
        """
        directory = self.root / check_bundle_name(name)
        with self._lock, self._reading(name):
            try:
                stamp = _stamp(directory / _MANIFEST)
            except (FileNotFoundError, NotADirectoryError):
                raise NotHere(f"bundle {name} is not here") from None
            known = self._cache.get(name)
            if known is None or known.stamp != stamp:
                known = self._read_manifest(name, stamp)
            self._cache[name] = self._check_files(name, known)
            return known.manifest

    def has(self, name: str, sha256: str) -> bool:
        """Whether bundle `name` is here, whole, with this content."""
        try:
            return self.manifest(name).sha256 == sha256
        except (NotHere, DataError):
            return False

    def verify(self, name: str) -> Manifest:
        """Like `manifest`, and hashes every byte. Raises NotHere, DataError naming the file and the chunk."""
        manifest = self.manifest(name)
        for entry in manifest.files:
            with self._reading(name):
                found = hash_file(self.root / name / entry.name, entry.chunk_bytes)
            if found != entry:
                pairs = zip(found.sha256, entry.sha256, strict=False)
                bad = next((index for index, (is_now, was) in enumerate(pairs) if is_now != was), 0)
                raise self._damaged(name, f"{entry.name}: chunk {bad} has changed")
        return manifest

    def path(self, name: str, file: str) -> Path:
        """Where a file of bundle `name` lies. Do not write to it. Raises NotHere when the bundle has no such file."""
        if self.manifest(name).file(check_file_name(file)) is None:
            raise NotHere(f"bundle {name} has no file {file}")
        return self.root / name / file

    def open(self, name: str, file: str) -> tuple[BinaryIO, Manifest]:
        """A file of bundle `name`, open for reading, and the manifest that it belongs to.

        The two stay consistent when the bundle is replaced or deleted meanwhile. Raises as `path`.
        """
        with self._lock, self._reading(name):
            return self.path(name, file).open("rb"), self.manifest(name)

    def delete(self, name: str) -> None:
        """Remove bundle `name` at one blow; no effect when it is not here. Open and mapped files stay readable."""
        source = self.root / check_bundle_name(name)
        doomed = self._new / uuid.uuid4().hex
        with self._lock, disk_faults(source):
            self._cache.pop(name, None)
            with suppress(FileNotFoundError):
                os.rename(source, doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def prune(self, prefix: str, keep: int, max_bytes: int | None = None) -> list[str]:
        """Delete all but the `keep` highest numbered bundles `prefix/NUMBER` (C29: bounded depth and bytes).

        With `max_bytes`, the lowest numbered of those go too until the rest fits; the highest always stays when
        `keep` is positive. Returns the deleted names.
        """
        names = [name for name in self.names() if name.rpartition("/")[0] == prefix][::-1]
        kept, used = 0, 0
        doomed = []
        for name in names:
            used += sum(path.stat().st_size for path in (self.root / name).iterdir())
            if kept < keep and (kept == 0 or max_bytes is None or used <= max_bytes):
                kept += 1
            else:
                doomed.append(name)
        for name in doomed:
            self.delete(name)
        return doomed

    def check_space(self, needed_bytes: int) -> None:
        """Raises ResourceError when the disk lacks room for `needed_bytes` more."""
        free = shutil.disk_usage(self.root).free
        if free < needed_bytes + _SPARE_BYTES:
            raise ResourceError(
                f"{self.root}: {needed_bytes} bytes are to be stored and {free} are free (and {_SPARE_BYTES} stay "
                "free). Fix: free space there, or put the state directory on a larger disk"
            )

    def partial_directory(self, manifest: Manifest) -> Path:
        """The directory that collects a download with this content. Downloads of the same bundle with other content
        are deleted, and so are the longest untouched of those that nobody goes on with: abandoned ones must not fill
        the disk."""
        directory = self._partial / f"{_flat(manifest.bundle)}~{manifest.sha256}"
        with disk_faults(directory):
            broken_off = []
            for other in self._partial.iterdir():
                name = other.name.rpartition("~")[0]
                if name == _flat(manifest.bundle):
                    if other != directory:
                        shutil.rmtree(other, ignore_errors=True)
                elif name.replace("~", "/") not in self._fetching:
                    broken_off.append(other)
            for other in sorted(broken_off, key=_touched)[:-_MOST_BROKEN_OFF]:
                shutil.rmtree(other, ignore_errors=True)
            directory.mkdir(exist_ok=True)
        return directory

    def fetch_lock(self, name: str) -> asyncio.Lock:
        """Held by the download of bundle `name`, so that two never write the same partial files. Event loop only."""
        return self._fetching.setdefault(name, asyncio.Lock())

    def scratch(self, name: str) -> Path:
        """A folder for files on their way, for the caller to make and remove; the next start removes what is left."""
        return self._new / name

    def drop_damaged(self) -> list[str]:
        """Delete the bundles of which a crash or the disk left less than was written, with a warning for each: what is
        older is used then, or it is fetched again. Contents are hashed where times differ only. Returns their names."""
        dropped = []
        for name in self.names():
            try:
                self.manifest(name)
            except DataError as fault:
                log.warning("%s", fault.args[0].replace("Fix: delete", "Deleted", 1))
                self.delete(name)
                dropped.append(name)
        return dropped

    def _recover(self) -> None:
        for leftover in self._new.iterdir():
            shutil.rmtree(leftover, ignore_errors=True)
        for old in self._old.iterdir():
            target = self.root / old.name.replace("~", "/")
            if _is_bundle_name(old.name.replace("~", "/")) and not target.exists():
                log.warning("bundle %s: a replacement was interrupted; the former content is back", target)
                os.rename(old, target)
            else:
                shutil.rmtree(old, ignore_errors=True)

    def _write_manifest(self, directory: Path, manifest: Manifest) -> None:
        """Written beside and renamed, so that noting new times cannot tear a committed manifest."""
        stamps = {entry.name: list(_stamp(directory / entry.name)) for entry in manifest.files}
        draft = directory / f"{_MANIFEST}.new"
        content = {"manifest": manifest.to_json(), "stamps": stamps}
        write_synced(draft, canonical_json({**content, "sha256": _digest(content)}))
        os.replace(draft, directory / _MANIFEST)

    def _read_manifest(self, name: str, stamp: _Stamp) -> _Known:
        try:
            data = json.loads((self.root / name / _MANIFEST).read_bytes())
            # Of before it was noted there is none.
            if data.pop("sha256", None) not in (None, _digest(data)):
                raise ValueError("it has changed since it was written")
            manifest = Manifest.from_json(data["manifest"])
            stamps = {file: (int(size), int(mtime)) for file, (size, mtime) in data["stamps"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, DataError) as fault:
            raise self._damaged(name, f"{_MANIFEST}: {fault}") from fault
        if manifest.bundle != name:
            raise self._damaged(name, f"{_MANIFEST}: it belongs to bundle {manifest.bundle}")
        return _Known(stamp, manifest, stamps)

    def _check_files(self, name: str, known: _Known) -> _Known:
        """Compare the files with what is known of them; returns it with new times where only those differed."""
        directory = self.root / name
        moved = {}
        for entry in known.manifest.files:
            try:
                found = _stamp(directory / entry.name)
            except FileNotFoundError:
                raise self._damaged(name, f"{entry.name} is missing") from None
            if found[0] != entry.size:
                raise self._damaged(name, f"{entry.name} has {found[0]} bytes instead of {entry.size}")
            if found != known.stamps.get(entry.name):
                if hash_file(directory / entry.name, entry.chunk_bytes) != entry:
                    raise self._damaged(name, f"{entry.name} has changed")
                moved[entry.name] = found
        if not moved:
            return known
        stamp = known.stamp
        try:
            self._write_manifest(directory, known.manifest)
            stamp = _stamp(directory / _MANIFEST)
        except OSError as fault:
            # The bundle is good, and this store knows it now.
            log.warning("bundle %s: new file times are not noted (%s); the next start hashes it", name, fault)
        return _Known(stamp, known.manifest, known.stamps | moved)

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Turn a disk that does not give what bundle `name` holds into the error of a damaged bundle."""
        try:
            yield
        except OSError as fault:
            if fault.errno in _NOT_THE_DISK:
                fix = _NOT_THE_DISK[fault.errno]
                raise ResourceError(
                    f"cannot read bundle {name} in {self.root}: {fault}. Fix: {fix}"
                ) from fault
            raise self._damaged(name, f"it cannot be read: {fault}") from fault

    def _damaged(self, name: str, problem: str) -> DataError:
        return DataError(
            f"bundle {name} in {self.root} is damaged: {problem}. "
            f"Fix: delete {self.root / name}; it is fetched again from other peers"
        )


def hash_file(path: Path, chunk_bytes: int = CHUNK_BYTES) -> FileEntry:
    """The entry of a file as it is on the disk. Raises DataError when its name is not plain."""
    digests = []
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(chunk_bytes):
            digests.append(hashlib.sha256(chunk).digest())
            size += len(chunk)
    return FileEntry(check_file_name(path.name), size, chunk_bytes, tuple(digests))


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(content)).hexdigest()


def _touched(directory: Path) -> int:
    """When a download last took something in, ns; 0: it has just gone."""
    with suppress(OSError):
        return max(path.stat().st_mtime_ns for path in [directory, *directory.iterdir()])
    return 0


def _stamp(path: Path) -> _Stamp:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _flat(name: str) -> str:
    """A bundle name as one path component."""
    return name.replace("/", "~")


def _is_bundle_name(name: str) -> bool:
    try:
        check_bundle_name(name)
    except DataError:
        return False
    return True


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split("/")]
