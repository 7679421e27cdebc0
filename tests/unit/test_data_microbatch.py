"""Microbatches on the wire: packing, and refusal of every message that does not fit the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.data.microbatch import Microbatch, checksum_of, id_bits
from meshd.errors import MismatchError
from meshd.proto import meshd_pb2 as pb


def make(rows: int, columns: int, vocabulary: int, seed: int, *, separate: bool) -> Microbatch:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand((rows, columns), generator=generator) < 0.5
    mask[0, 0] = True
    return Microbatch(
        tokens=torch.randint(0, vocabulary, (rows, columns + 1), generator=generator),
        label_mask=mask,
        document_starts=torch.rand((rows, columns), generator=generator) < 0.1 if separate else None,
    )


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 37),
    vocabulary=st.integers(1, 2**31 - 1) | st.sampled_from([1, 2, 3, 256, 257, 49_152, 65_536, 128_256]),
    seed=st.integers(0, 2**31),
    separate=st.booleans(),
    wire_seed=st.integers(0, 2**64 - 1),
)
def test_round_trip(
    rows: int, columns: int, vocabulary: int, seed: int, separate: bool, wire_seed: int
) -> None:
    batch = make(rows, columns, vocabulary, seed, separate=separate)
    message = pb.Batch.FromString(batch.to_proto(vocabulary, wire_seed).SerializeToString())
    assert message.seed == wire_seed
    assert len(message.ids) == -(-rows * (columns + 1) * id_bits(vocabulary) // 8)
    again = Microbatch.from_proto(message, vocabulary=vocabulary, rows=rows, columns=columns)
    assert torch.equal(again.tokens, batch.tokens)
    assert torch.equal(again.label_mask, batch.label_mask)
    assert again.label_tokens == int(batch.label_mask.sum())
    if batch.document_starts is None:
        assert again.document_starts is None
    else:
        assert again.document_starts is not None
        assert torch.equal(again.document_starts, batch.document_starts)


def test_ids_and_masks_are_packed_little_endian_without_gaps() -> None:
    """Test vector, by hand: ids 1, 2, 5 at 3 bits are 0b101_010_001; masks likewise at 1 bit."""
    batch = Microbatch(
        tokens=torch.tensor([[1, 2, 5]]),
        label_mask=torch.tensor([[False, True]]),
        document_starts=torch.tensor([[True, True]]),
    )
    message = batch.to_proto(8, seed=0)
    assert message.ids == bytes([0b01010001, 0b1])
    assert (message.label_mask, message.document_starts) == (bytes([0b10]), bytes([0b11]))


def test_bits_are_the_ceiling_of_the_logarithm() -> None:
    assert [id_bits(v) for v in (1, 2, 3, 4, 5, 49_152, 65_536, 65_537)] == [1, 1, 2, 2, 3, 16, 16, 17]


def test_inputs_and_labels_are_one_token_apart() -> None:
    batch = make(2, 5, 10, 0, separate=False)
    assert torch.equal(batch.inputs[:, 1:], batch.labels[:, :-1])


def _set(field: str, value: object) -> Callable[[pb.Batch], None]:
    return lambda message: setattr(message, field, value)


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("rows", _set("rows", 3)),
        ("rows", _set("rows", 2**32 - 1)),
        ("columns", _set("columns", 2**32 - 1)),
        ("bits", _set("bits", 5)),
        ("ids", _set("ids", b"")),
        ("ids", _set("ids", bytes(9))),
        ("ids", _set("ids", b"\xff" * 6)),  # id 15 of a vocabulary of 10
        ("label_mask", _set("label_mask", b"\x01")),
        ("label_mask", _set("label_mask", b"\xff\xff")),
        ("document_starts", _set("document_starts", b"\x01")),
        ("document_starts", _set("document_starts", b"\x80\x80")),
        ("label_tokens", _set("label_tokens", 0)),
        ("label_tokens", _set("label_tokens", 11)),
        ("checksum", _set("seed", 1)),
        ("checksum", _set("checksum", 0)),
    ],
)
def test_a_message_that_does_not_fit_is_refused_by_field(
    field: str, spoil: Callable[[pb.Batch], None]
) -> None:
    message = make(2, 5, 10, 1, separate=True).to_proto(10, 0)
    Microbatch.from_proto(message, vocabulary=10, rows=2, columns=5)
    spoil(message)
    with pytest.raises(MismatchError, match=field):
        Microbatch.from_proto(message, vocabulary=10, rows=2, columns=5)


def test_one_flipped_bit_anywhere_is_refused() -> None:
    """Of the ids above all: they would be other data, as valid as these."""
    message = make(2, 5, 16, 1, separate=True).to_proto(16, 7)
    for field in ("ids", "label_mask", "document_starts"):
        for bit in range(8 * len(getattr(message, field))):
            spoilt = pb.Batch.FromString(message.SerializeToString())
            data = bytearray(getattr(spoilt, field))
            data[bit // 8] ^= 1 << bit % 8
            setattr(spoilt, field, bytes(data))
            with pytest.raises(MismatchError):
                Microbatch.from_proto(spoilt, vocabulary=16, rows=2, columns=5)


def test_no_labels_at_all_is_refused() -> None:
    batch = Microbatch(torch.zeros((1, 4), dtype=torch.int64), torch.zeros((1, 3), dtype=torch.bool))
    with pytest.raises(MismatchError, match="label_tokens"):
        Microbatch.from_proto(batch.to_proto(10, 0), vocabulary=10, rows=1, columns=3)


def test_ids_outside_the_vocabulary_never_leave() -> None:
    batch = make(2, 5, 10, 1, separate=False)
    with pytest.raises(ValueError, match="vocabulary of 5"):
        batch.to_proto(5, 0)


def test_wrong_shapes_are_refused_at_construction() -> None:
    tokens = torch.zeros((2, 5), dtype=torch.int64)
    with pytest.raises(ValueError, match="label_mask"):
        Microbatch(tokens, torch.zeros((2, 5), dtype=torch.bool))
    with pytest.raises(ValueError, match="tokens"):
        Microbatch(tokens.int(), torch.zeros((2, 4), dtype=torch.bool))


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(0, 3) | st.just(2**32 - 1),
    columns=st.integers(0, 6),
    bits=st.integers(3, 5),
    ids=st.binary(min_size=5, max_size=7),
    mask=st.binary(min_size=1, max_size=3),
    starts=st.binary(max_size=3),
    count=st.integers(0, 11),
)
def test_any_message_is_read_or_refused(
    rows: int, columns: int, bits: int, ids: bytes, mask: bytes, starts: bytes, count: int
) -> None:
    """Malformed input costs the sender its place, never the receiver its process."""
    message = pb.Batch(
        rows=rows,
        columns=columns,
        bits=bits,
        ids=ids,
        label_mask=mask,
        document_starts=starts,
        label_tokens=count,
    )
    message.checksum = checksum_of(message)
    try:
        batch = Microbatch.from_proto(message, vocabulary=10, rows=2, columns=5)
    except MismatchError:
        return
    # What is read is canonical: it goes out again as the same bytes.
    assert batch.to_proto(10, 0).SerializeToString(deterministic=True) == message.SerializeToString(
        deterministic=True
    )
