"""Payloads in pieces: cut on one side, put together and checked on the other (proto: Chunk)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from meshd.errors import MismatchError
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import CHUNK_BYTES

Payload = bytes | bytearray | memoryview


def split(id: pb.MicrobatchId, hop: int, payload: Payload) -> Iterator[pb.Chunk]:
    """The chunks of the payload of an Offer or Gradient, in order. None for an empty payload."""
    view = memoryview(payload).cast("B")
    for offset in range(0, len(view), CHUNK_BYTES):
        yield pb.Chunk(id=id, hop=hop, offset=offset, data=bytes(view[offset : offset + CHUNK_BYTES]))


class Assembler:
    """Puts one payload together. Every chunk is checked before it is stored; memory grows with what has arrived."""

    def __init__(self, payload_bytes: int, *, max_bytes: int, what: str, checksum: int = 0) -> None:
        """payload_bytes: the size that the peer announced. max_bytes: the most that the run allows here. what: names
        the payload in errors (`hidden of peer/7`). checksum: what that of the payload goes on from. Raises
        MismatchError when more is announced than allowed."""
        if payload_bytes > max_bytes:
            raise MismatchError(f"{what}: {payload_bytes} bytes announced, at most {max_bytes} expected")
        self._what = what
        self._size = payload_bytes
        self._data = bytearray()
        self._checksum = checksum

    @property
    def complete(self) -> bool:
        """All announced bytes are here (their checksum is `finish`'s matter)."""
        return len(self._data) == self._size

    def add(self, chunk: pb.Chunk) -> None:
        """Append the next chunk. Raises MismatchError for a gap, a repetition, or bytes beyond the announced size."""
        size = len(chunk.data)
        if chunk.offset != len(self._data):
            raise MismatchError(
                f"{self._what}: chunk at byte {chunk.offset}, expected one at {len(self._data)}"
            )
        if not 0 < size <= CHUNK_BYTES:
            raise MismatchError(f"{self._what}: chunk of {size} bytes, expected 1 to {CHUNK_BYTES}")
        if chunk.offset + size > self._size:
            raise MismatchError(f"{self._what}: {chunk.offset + size} bytes sent, {self._size} announced")
        self._data += chunk.data
        self._checksum = zlib.crc32(chunk.data, self._checksum)

    def finish(self, expected_checksum: int) -> bytearray:
        """The whole payload, handed over. Raises MismatchError when bytes are missing or the checksum differs."""
        if not self.complete:
            raise MismatchError(f"{self._what}: {len(self._data)} bytes came of {self._size} announced")
        if self._checksum != expected_checksum:
            raise MismatchError(
                f"{self._what}: checksum {self._checksum:08x}, expected {expected_checksum:08x}: damaged on the way"
            )
        return self._data
