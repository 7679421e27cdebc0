"""Payloads in pieces arrive whole, or are refused with the reason."""

from __future__ import annotations

import random
from zlib import crc32

import pytest

from meshd.errors import MismatchError
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import CHUNK_BYTES
from meshd.transport.chunks import Assembler, split

ID = pb.MicrobatchId(origin="p", sequence=7, attempt=1)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 17])
def test_a_payload_comes_out_as_it_went_in(size: int) -> None:
    payload = random.Random(size).randbytes(size)
    assembler = Assembler(size, max_bytes=size, what="hidden")
    chunks = list(split(ID, 2, payload))
    for chunk in chunks:
        assert not assembler.complete
        assert (chunk.id, chunk.hop) == (ID, 2)
        assert len(chunk.data) <= CHUNK_BYTES
        assembler.add(chunk)
    assert len(chunks) == -(-size // CHUNK_BYTES)
    assert assembler.complete
    assert assembler.finish(crc32(payload)) == payload


def test_a_view_of_other_items_is_cut_by_bytes() -> None:
    payload = memoryview(bytearray(range(256)) * 8192).cast("H")  # 2 MiB as 16-bit items
    assembler = Assembler(payload.nbytes, max_bytes=1 << 22, what="values")
    for chunk in split(ID, 0, payload):
        assembler.add(chunk)
    assert assembler.finish(crc32(payload)) == payload.tobytes()


def test_more_than_allowed_is_refused_before_anything_is_stored() -> None:
    with pytest.raises(MismatchError, match="hidden of p/7: 11 bytes announced, at most 10 expected"):
        Assembler(11, max_bytes=10, what="hidden of p/7")


@pytest.mark.parametrize(
    ("chunk", "problem"),
    [
        (pb.Chunk(offset=6, data=b"x"), "chunk at byte 6, expected one at 4"),
        (pb.Chunk(offset=0, data=b"abcd"), "chunk at byte 0, expected one at 4"),
        (pb.Chunk(offset=4, data=b"x" * 7), "11 bytes sent, 10 announced"),
        (pb.Chunk(offset=4), "chunk of 0 bytes"),
        (pb.Chunk(offset=4, data=bytes(CHUNK_BYTES + 1)), f"chunk of {CHUNK_BYTES + 1} bytes"),
    ],
)
def test_a_wrong_chunk_is_named_and_changes_nothing(chunk: pb.Chunk, problem: str) -> None:
    assembler = Assembler(10, max_bytes=10, what="hidden")
    assembler.add(pb.Chunk(offset=0, data=b"abcd"))
    with pytest.raises(MismatchError, match=problem):
        assembler.add(chunk)
    assembler.add(pb.Chunk(offset=4, data=b"efghij"))
    assert assembler.finish(crc32(b"abcdefghij")) == b"abcdefghij"


def test_a_short_or_damaged_payload_is_refused() -> None:
    assembler = Assembler(4, max_bytes=4, what="gradient")
    assembler.add(pb.Chunk(offset=0, data=b"ab"))
    with pytest.raises(MismatchError, match="gradient: 2 bytes came of 4 announced"):
        assembler.finish(crc32(b"ab"))
    assembler.add(pb.Chunk(offset=2, data=b"cx"))
    with pytest.raises(MismatchError, match=r"gradient: checksum .* damaged"):
        assembler.finish(crc32(b"abcd"))
