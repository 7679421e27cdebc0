"""A download under way: the proved chunks of a bundle, kept across donors, crashes and restarts (C05, C24).

Blocking, as `meshd.state.bundle`: call in a thread.
"""

from __future__ import annotations

import hashlib

from meshd.state.bundle import BundleStore
from meshd.state.disk import disk_faults
from meshd.state.manifest import FileEntry, Manifest


class CorruptChunk(Exception):
    """A chunk's content does not have the manifest's hash."""

    def __init__(self, file: str, index: int) -> None:
        super().__init__(f"chunk {index} of {file} does not match its hash")
        self.file, self.index = file, index


class Partial:
    """The files of one manifest, each filled from its beginning, chunk by chunk.

    Nothing beside the files is recorded: on resumption they are hashed again, so a torn write is found by itself.
    """

    def __init__(self, store: BundleStore, manifest: Manifest) -> None:
        """Opens or begins the download. Raises ResourceError when the disk has no room for the rest."""
        self.manifest = manifest
        self._store = store
        self._directory = store.partial_directory(manifest)
        with disk_faults(self._directory):
            self._have = {entry.name: self._proved(entry) for entry in manifest.files}
        store.check_space(manifest.size - self.done_bytes)

    @property
    def done_bytes(self) -> int:
        """Bytes of proved chunks."""
        return sum(
            min(self._have[entry.name] * entry.chunk_bytes, entry.size) for entry in self.manifest.files
        )

    def chunks(self, file: str) -> int:
        """How many chunks of `file` are here, counted from its beginning."""
        return self._have[file]

    def append(self, entry: FileEntry, content: bytes) -> None:
        """Add the next chunk of a file. Raises CorruptChunk when its hash is wrong, ResourceError for the disk."""
        index = self._have[entry.name]
        if hashlib.sha256(content).digest() != entry.sha256[index]:
            raise CorruptChunk(entry.name, index)
        path = self._directory / entry.name
        with disk_faults(path), path.open("r+b") as file:
            file.seek(index * entry.chunk_bytes)
            file.write(content)
        self._have[entry.name] = index + 1

    def commit(self) -> None:
        """All chunks are here: make it the bundle. Raises ResourceError for the disk."""
        self._store.adopt(self._directory, self.manifest)

    def _proved(self, entry: FileEntry) -> int:
        """Chunks at the file's beginning that have their hash; cuts off what follows them, creates the file."""
        path = self._directory / entry.name
        path.touch()
        count = 0
        with path.open("r+b") as file:
            for digest in entry.sha256:
                if hashlib.sha256(file.read(entry.chunk_size(count))).digest() != digest:
                    break
                count += 1
            file.truncate(min(count * entry.chunk_bytes, entry.size))
        return count
