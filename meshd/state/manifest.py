"""What a bundle holds, and the names that bundles and files may have.

Names arrive from peers. They are matched whole against the patterns here before they become part of a path, so that
nothing a peer sends reaches the file system outside the bundle store.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshd.errors import DataError, MismatchError
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import CHUNK_BYTES

MAX_FILES = 1024
MAX_FACTS_BYTES = 64 << 10

_NUMBER = "(?:0|[1-9][0-9]{0,18})"
_BUNDLE = re.compile(
    f"run/(?:tokenizer|data|features)|(?:base|live)/{_NUMBER}|(?:part|snapshot)/{_NUMBER}/{_NUMBER}"
    "|(?:prior|weights)/[0-9a-f]{64}",
    re.ASCII,
)
_SNAPSHOT = re.compile(f"snapshot/({_NUMBER})/({_NUMBER})", re.ASCII)
# Must not begin with a dot: such names are the store's own.
_FILE = re.compile("[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)


def check_bundle_name(name: str) -> str:
    """Return `name` if it is one of the known namespaces (see `State` in the proto). Raises DataError otherwise."""
    if not _BUNDLE.fullmatch(name):
        raise DataError(
            f"{name[:100]!r} is no bundle name. Fix: use run/tokenizer, run/data, run/features, base/STAGE, "
            "live/STAGE, part/STAGE/WATERMARK, snapshot/STAGE/WATERMARK, prior/HASH or weights/HASH"
        )
    return name


def snapshots_among(names: Iterable[str], stop: int) -> list[tuple[int, int]]:
    """(stage, watermark) of each snapshot in a list of bundle names, in the list's order. Pure.

    Lists come from peers: what is no snapshot's name is passed over, and so are watermarks over `stop`, the run's
    tokens, at which there is never a snapshot.
    """
    found = (_SNAPSHOT.fullmatch(name) for name in names)
    pairs = [(int(match[1]), int(match[2])) for match in found if match]
    return [(stage, watermark) for stage, watermark in pairs if watermark <= stop]


def check_file_name(name: str) -> str:
    """Return `name` if it is a plain file name (letters, digits, `._-`, no leading dot, at most 128 characters).

    Raises DataError otherwise.
    """
    if not _FILE.fullmatch(name):
        raise DataError(
            f"{name[:100]!r} is no plain file name. Fix: use letters, digits and '._-', beginning with none of '.-'"
        )
    return name


@dataclass(frozen=True)
class FileEntry:
    """One file of a bundle: its size in bytes and the SHA-256 (32 bytes) of each chunk of `chunk_bytes`.

    The last chunk may be shorter; an empty file has no chunks.
    """

    name: str
    size: int
    chunk_bytes: int
    sha256: tuple[bytes, ...]

    def chunk_size(self, index: int) -> int:
        """Bytes in chunk `index`."""
        return min(self.chunk_bytes, self.size - index * self.chunk_bytes)

    def check(self) -> None:
        """Raises DataError when name, sizes or hashes do not fit together: what a peer sent is checked here."""
        check_file_name(self.name)
        if not 0 < self.chunk_bytes <= CHUNK_BYTES:
            raise DataError(
                f"file {self.name}: chunks of {self.chunk_bytes} bytes; allowed are 1 to {CHUNK_BYTES}"
            )
        chunks = -(-self.size // self.chunk_bytes)
        if self.size < 0 or len(self.sha256) != chunks or any(len(digest) != 32 for digest in self.sha256):
            raise DataError(
                f"file {self.name}: {self.size} bytes need {chunks} chunk hashes of 32 bytes each"
            )


@dataclass(frozen=True)
class Manifest:
    """The content of a bundle: its files in the order of their names, and facts (a JSON object) about it."""

    bundle: str
    files: tuple[FileEntry, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)

    @property
    def sha256(self) -> str:
        """Hex digest that names the content: over file names, sizes, chunk sizes and chunk hashes.

        Neither the bundle's name nor the facts go in. Facts tell who wrote the content and when (contributors, times),
        which differs between hosts that hold equal files; whoever needs to trust a fact must get it elsewhere.
        """
        return hashlib.sha256(canonical_json([_entry_json(entry) for entry in self.files])).hexdigest()

    def file(self, name: str) -> FileEntry | None:
        return next((entry for entry in self.files if entry.name == name), None)

    def count(self, fact: str) -> int:
        """A fact that counts something (tokens, weight_version); 0 when it is absent.

        Whoever wrote the bundle may have put anything there. Raises MismatchError naming the fact when it is not a
        whole number from 0 to 2^63 - 1.
        """
        value = self.facts.get(fact, 0)
        # JSON's true and false are ints in Python.
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise MismatchError(
                f"bundle {self.bundle}: fact {fact} is {str(value)[:40]!r}, not a whole number from 0 to 2^63 - 1. "
                "Fix: fetch it from another peer; the one that wrote it is broken or of another version"
            )
        return value

    def check(self) -> None:
        """Raises DataError when anything in it is out of bounds. For manifests from peers and from the disk."""
        check_bundle_name(self.bundle)
        if len(self.files) > MAX_FILES:
            raise DataError(f"bundle {self.bundle}: {len(self.files)} files; at most {MAX_FILES} are allowed")
        names = [entry.name for entry in self.files]
        if names != sorted(set(names)):
            raise DataError(f"bundle {self.bundle}: files must be in the order of their names, each once")
        for entry in self.files:
            entry.check()
        facts_bytes = len(canonical_json(self.facts))
        if facts_bytes > MAX_FACTS_BYTES:
            raise DataError(f"bundle {self.bundle}: {facts_bytes} bytes of facts; at most {MAX_FACTS_BYTES}")

    def to_proto(self) -> pb.ManifestReply:
        return pb.ManifestReply(
            bundle=self.bundle,
            files=[
                pb.FileEntry(name=e.name, size=e.size, chunk_bytes=e.chunk_bytes, sha256=e.sha256)
                for e in self.files
            ],
            facts=canonical_json(self.facts).decode(),
        )

    @classmethod
    def from_proto(cls, reply: pb.ManifestReply) -> Manifest:
        """Checked. Raises DataError."""
        if len(reply.facts) > MAX_FACTS_BYTES:
            raise DataError(f"more than {MAX_FACTS_BYTES} bytes of facts")
        files = tuple(FileEntry(e.name, e.size, e.chunk_bytes, tuple(e.sha256)) for e in reply.files)
        return _checked(reply.bundle, files, reply.facts or "{}")

    def to_json(self) -> dict[str, Any]:
        return {
            "bundle": self.bundle,
            "files": [_entry_json(e) for e in self.files],
            "facts": dict(self.facts),
        }

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """Inverse of `to_json`, checked. Raises DataError."""
        try:
            files = tuple(
                FileEntry(
                    e["name"], e["size"], e["chunk_bytes"], tuple(bytes.fromhex(h) for h in e["sha256"])
                )
                for e in data["files"]
            )
            return _checked(data["bundle"], files, json.dumps(data["facts"]))
        except (KeyError, TypeError, ValueError) as fault:
            raise DataError(f"not a manifest ({fault!r})") from fault


def canonical_json(value: object) -> bytes:
    """The one byte string for a JSON value: sorted keys, no spaces, UTF-8. Raises ValueError for NaN and infinity."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False
    ).encode()


def _entry_json(entry: FileEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "size": entry.size,
        "chunk_bytes": entry.chunk_bytes,
        "sha256": [digest.hex() for digest in entry.sha256],
    }


def _checked(bundle: str, files: tuple[FileEntry, ...], facts_text: str) -> Manifest:
    try:
        facts = json.loads(facts_text)
        canonical_json(facts)
    except (ValueError, RecursionError) as fault:
        raise DataError(f"facts are not JSON ({fault})") from fault
    if not isinstance(facts, dict):
        raise DataError("facts must be a JSON object")
    manifest = Manifest(bundle, files, facts)
    manifest.check()
    return manifest
