"""Notices of priors: signing, checking, and the board of the newest ones. Pure: bytes and time come in as arguments.

A notice comes from strangers. It is bound to its author's key, to the run, to a file's hash, and to a version that only
grows (docs/priors.md).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from google.protobuf.message import DecodeError

from meshd.identity import Identity, peer_id_of, verify
from meshd.proto import meshd_pb2 as pb

MAX_NOTICES = 32
"""In one offer."""
MAX_NOTICE_BYTES = 512
MAX_AUTHORS = 8
MAX_AHEAD_S = 10.0
MAX_AHEAD_STEPS = 1000
"""What an author may be ahead of this peer, in inner steps and in tokens of as many steps."""
_MOST_REMEMBERED = 256  # authors, kinds and numbers whose last version is known
_CONTEXT = b"meshd-prior-v1:"


class Key(NamedTuple):
    """What versions grow within."""

    author: str
    kind: pb.PriorKind
    number: int


@dataclass(frozen=True)
class Entry:
    """A notice and how it was signed."""

    notice: pb.Notice
    signed: pb.SignedNotice

    @property
    def key(self) -> Key:
        return Key(self.notice.author, self.notice.kind, self.notice.number)


def seal(notice: pb.Notice, identity: Identity) -> Entry:
    """The notice, signed. Raises ValueError when it is not one's own."""
    if notice.author != identity.peer_id:
        raise ValueError(f"a notice of {notice.author} cannot be signed by {identity.peer_id}")
    body = notice.SerializeToString(deterministic=True)
    signed = pb.SignedNotice(
        notice=body, public_key=identity.public_key, signature=identity.sign(_CONTEXT + body)
    )
    return Entry(notice, signed)


def opened(signed: pb.SignedNotice) -> Entry | str:
    """What it says, or why it cannot be read. Neither its signature nor its content is checked."""
    if len(signed.notice) > MAX_NOTICE_BYTES:
        return f"a notice of {len(signed.notice)} bytes, more than {MAX_NOTICE_BYTES}"
    try:
        return Entry(pb.Notice.FromString(signed.notice), signed)
    except DecodeError:
        return "not a notice"


def authentic(entry: Entry) -> bool:
    """Whether its author has signed it. About 0.1 ms: not for the event loop, where many come."""
    signed = entry.signed
    if len(signed.public_key) != 32 or peer_id_of(signed.public_key) != entry.notice.author:
        return False
    return verify(signed.public_key, signed.signature, _CONTEXT + signed.notice)


@dataclass(frozen=True)
class Bounds:
    """What notices of a run may say. most_tokens: that a prior is measured on, which is its weight among others.
    most_bytes: of the file of each kind and number that this peer uses. apart_tokens, apart_s: between two of an
    author's, one of both at least."""

    run_id: str
    stages: int
    boundaries: int
    batch_tokens: int
    most_tokens: int
    most_bytes: Mapping[tuple[pb.PriorKind, int], int]
    apart_tokens: int
    apart_s: float


def wrong(notice: pb.Notice, bounds: Bounds, now: float, version: int, counted: int) -> str | None:
    """What in a notice cannot be, or None. now: seconds since the epoch; version: inner steps in the weights here;
    counted: global tokens known here."""
    if notice.run_id != bounds.run_id:
        return f"of run {notice.run_id[:40]!r}"
    there = {pb.PRIOR_KIND_BOUNDARY: bounds.boundaries, pb.PRIOR_KIND_WEIGHTS: bounds.stages}
    if not 0 <= notice.number < there.get(notice.kind, 0):
        return f"of kind {notice.kind}, number {notice.number}, which the run does not have"
    if len(notice.name) != 32:
        return f"its file's name has {len(notice.name)} bytes"
    most = bounds.most_bytes.get((notice.kind, notice.number))
    if most is not None and not 0 < notice.size_bytes <= most:
        return f"a file of {notice.size_bytes} bytes; at most {most} are taken"
    if not math.isfinite(notice.time) or notice.time > now + MAX_AHEAD_S:
        return f"measured {notice.time - now:.0f} s ahead of this peer's clock"
    if notice.weight_version > version + MAX_AHEAD_STEPS:
        return f"of weight version {notice.weight_version}; here it is {version}"
    if notice.measured > counted + MAX_AHEAD_STEPS * bounds.batch_tokens:
        return f"measured at {notice.measured} global tokens; here they are {counted}"
    if not 0 < notice.version < 2**63 or not 0 < notice.tokens <= bounds.most_tokens:
        return f"version {notice.version}, measured on {notice.tokens} tokens where {bounds.most_tokens} are the most"
    return None


class Board:
    """The newest notice of each author, kind and number, of the MAX_AUTHORS authors heard last."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, dict[Key, Entry]] = (
            OrderedDict()
        )  # by author, least recently heard first
        # Also of what was refused, and of authors that have gone: what is not over it is no news.
        self._versions: OrderedDict[Key, int] = OrderedDict()
        # When the last was taken: global tokens that it was measured at, monotonic seconds.
        self._taken: OrderedDict[Key, tuple[int, float]] = OrderedDict()

    @property
    def entries(self) -> list[Entry]:
        """By author, most recently heard last."""
        return [entry for entries in self._entries.values() for entry in entries.values()]

    def get(self, key: Key) -> Entry | None:
        return self._entries.get(key.author, {}).get(key)

    def version(self, key: Key) -> int:
        """The last that is known; 0: none."""
        # What is up here counts, however many others were heard of since.
        known = self.get(key)
        return max(self._versions.get(key, 0), 0 if known is None else known.notice.version)

    def contradicts(self, entry: Entry) -> bool:
        """Whether its author has signed something else under the same version."""
        known = self.get(entry.key)
        return (
            known is not None
            and known.notice.version == entry.notice.version
            and known.signed.notice != entry.signed.notice
        )

    def add(self, entry: Entry) -> list[Entry]:
        """Put up a checked notice. Returns those that go for it: its forerunner, or all of an author's."""
        entries = self._entries.setdefault(entry.key.author, {})
        gone = [entries[entry.key]] if entry.key in entries else []
        entries[entry.key] = entry
        self._entries.move_to_end(entry.key.author)
        self.pass_over(entry)
        if len(self._entries) > MAX_AUTHORS:
            gone += self._entries.popitem(last=False)[1].values()
        return gone

    def took(self, entry: Entry, now: float, counted: int) -> None:
        """One was put up. now: monotonic seconds; counted: global tokens known here."""
        self._taken[entry.key] = min(entry.notice.measured, counted), now
        self._taken.move_to_end(entry.key)
        if len(self._taken) > _MOST_REMEMBERED:
            self._taken.popitem(last=False)

    def too_soon(self, entry: Entry, bounds: Bounds, now: float, counted: int) -> bool:
        """Whether it is too little after the last that was taken: an author could keep everybody busy."""
        if entry.key not in self._taken:
            return False
        measured, at = self._taken[entry.key]
        # What an author says of the future does not make it later.
        passed = min(entry.notice.measured, counted) - measured
        return passed < bounds.apart_tokens and now - at < bounds.apart_s

    def remove(self, author: str) -> list[Entry]:
        """Take down all of an author's."""
        return list(self._entries.pop(author, {}).values())

    def pass_over(self, entry: Entry) -> None:
        """This version, and those before it, are no news any more."""
        self._versions[entry.key] = max(self.version(entry.key), entry.notice.version)
        self._versions.move_to_end(entry.key)
        if len(self._versions) > _MOST_REMEMBERED:
            self._versions.popitem(last=False)

    def seen(self) -> list[pb.Seen]:
        """What is known of each author, kind and number: at most 256."""
        return [
            pb.Seen(author=key.author, kind=key.kind, number=key.number, version=version)
            for key, version in self._versions.items()
        ]
