"""Bit packing (docs/bitstream.md, "Packed values")."""

import bitstream_reference as reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.errors import MismatchError
from meshd.wire.bits import pack, pack_array, packed_bytes, unpack, unpack_array


@settings(max_examples=150, deadline=None)
@given(data=st.data(), bits=st.integers(1, 31), count=st.integers(0, 70))
def test_round_trip_in_the_bytes_of_the_reference(data: st.DataObject, bits: int, count: int) -> None:
    values = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count))
    packed = pack(torch.tensor(values, dtype=torch.int64), bits)
    assert packed.numpy().tobytes() == reference.pack(values, bits)
    assert len(packed) == packed_bytes(count, bits)
    again = unpack(packed, bits, count)
    assert again.dtype == torch.int32
    assert again.tolist() == values


def test_the_documents_example() -> None:
    assert pack(torch.tensor([1, 2, 5]), 3).tolist() == [0x51, 0x01]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_dtype_shape_and_strides(dtype: torch.dtype) -> None:
    values = torch.arange(35).reshape(5, 7).remainder(2)
    assert pack(values.t().to(dtype), 1).tolist() == list(reference.pack(values.t().flatten().tolist(), 1))


def test_only_the_lowest_bits_are_packed() -> None:
    """So that no value can spoil its neighbours, and low bits of a signed level need no step of their own."""
    values = [-1, -32768, 5, 8, -3, 1023, 0, -9, 6]
    for dtype in (torch.int16, torch.int32, torch.int64):
        packed = pack(torch.tensor(values, dtype=dtype), 3)
        assert unpack(packed, 3, len(values)).tolist() == [value % 8 for value in values]


@pytest.mark.parametrize(("bits", "count"), [(3, 5), (1, 9), (16, 3), (31, 8)])
def test_other_sizes_are_refused(bits: int, count: int) -> None:
    packed = pack(torch.ones(count, dtype=torch.int32), bits)
    for wrong in (packed[:-1], packed[:0], torch.cat([packed, packed[:1] * 0])):
        with pytest.raises(MismatchError, match=f"{len(wrong)} bytes where {count} values of {bits} bits"):
            unpack(wrong, bits, count)


def test_a_huge_count_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(MismatchError):
        unpack(torch.zeros(8, dtype=torch.uint8), 3, 2**60)


def test_set_padding_is_refused() -> None:
    packed = pack(torch.tensor([1, 2, 5]), 3)
    for place in range(1, 8):
        spoiled = packed.clone()
        spoiled[1] |= 1 << place
        with pytest.raises(MismatchError, match="bits set after the last of 3 values"):
            unpack(spoiled, 3, 3)


@pytest.mark.parametrize("bits", [0, -1, 32])
def test_a_width_that_cannot_be_packed(bits: int) -> None:
    with pytest.raises(ValueError, match="1 to 31"):
        pack(torch.tensor([0]), bits)
    with pytest.raises(ValueError, match="1 to 31"):
        unpack(torch.tensor([0], dtype=torch.uint8), bits, 1)


@settings(deadline=None)
@given(data=st.data(), bits=st.integers(1, 16))
def test_arrays_are_packed_as_tensors_are(data: st.DataObject, bits: int) -> None:
    """Two implementations of one format; both take the lowest bits of what is larger or negative."""
    values = data.draw(st.lists(st.integers(-(2**20), 2**20), max_size=70))
    array = np.array(values, dtype=np.int32)
    packed = pack_array(array, bits)
    assert packed == pack(torch.from_numpy(array), bits).numpy().tobytes()
    assert unpack_array(packed, bits, len(values)).tolist() == [value % 2**bits for value in values]
    with pytest.raises(MismatchError):
        unpack_array(packed + b"\0", bits, len(values))
    if used := len(values) * bits % 8:
        with pytest.raises(MismatchError, match="bits set after the last"):
            unpack_array(packed[:-1] + bytes([packed[-1] | 1 << used]), bits, len(values))
