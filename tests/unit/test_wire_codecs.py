"""Codecs: what is promised of values, sizes and refusals (C27, C28)."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.errors import ConfigError, MismatchError
from meshd.proto import meshd_pb2 as pb
from meshd.wire import CodecContext, Frame, check_header, checksum_start, codec_named, decode

CODECS = ["dense", "dense32", "int8"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")
CONTEXT = CodecContext(0, "forward", torch.zeros(1, 1, dtype=torch.int64), 0)

shapes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9))


def tensors(dtype: torch.dtype) -> st.SearchStrategy[torch.Tensor]:
    """(rows, tokens, hidden) of any finite values of the dtype, its extremes often among them."""
    info = torch.finfo(dtype)
    edges = st.sampled_from([0.0, -0.0, info.max, -info.max, info.tiny, info.smallest_normal / 4, 1.0])
    values = st.one_of(edges, st.floats(-info.max, info.max, width=32), st.floats(-8, 8))

    def fill(shape: tuple[int, int, int]) -> st.SearchStrategy[torch.Tensor]:
        count = shape[0] * shape[1] * shape[2]
        return st.lists(values, min_size=count, max_size=count).map(
            lambda found: (
                torch.tensor(found, dtype=torch.float64).clamp(-info.max, info.max).to(dtype).reshape(shape)
            )
        )

    return shapes.flatmap(fill)


def through(codec: str, tensor: torch.Tensor) -> torch.Tensor:
    return decode(codec_named(codec).encode(tensor, CONTEXT), CONTEXT, CPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_shape_dtype_and_finiteness_are_kept_and_the_size_is_as_declared(
    name: str, dtype: torch.dtype
) -> None:
    @settings(max_examples=40, deadline=None)
    @given(tensors(dtype))
    def check(tensor: torch.Tensor) -> None:
        codec = codec_named(name)
        frame = codec.encode(tensor, CONTEXT)
        assert len(frame.payload) == frame.header.payload_bytes == codec.wire_bytes(tensor.shape)
        assert check_header(frame.header, tensor.shape) is codec
        back = decode(frame, CONTEXT, CPU)  # raises for what is not finite
        assert back.shape == tensor.shape
        assert back.dtype == dtype

    check()


@settings(max_examples=40, deadline=None)
@given(tensors(torch.float32))
def test_dense32_is_exact(tensor: torch.Tensor) -> None:
    assert torch.equal(through("dense32", tensor), tensor)


@settings(max_examples=40, deadline=None)
@given(tensors(torch.bfloat16))
def test_dense_is_exact_for_bf16(tensor: torch.Tensor) -> None:
    assert torch.equal(through("dense", tensor), tensor)


@pytest.mark.parametrize(("source", "limit"), [(torch.float32, 3.3895e38), (torch.float16, 65280.0)])
def test_dense_saturates_where_bf16_would_round_to_infinity(source: torch.dtype, limit: float) -> None:
    largest = torch.finfo(source).max
    back = through("dense", torch.tensor([[[largest, -largest, 1.5]]], dtype=source))
    assert back.flatten().tolist() == pytest.approx([limit, -limit, 1.5], rel=1e-4)


@settings(max_examples=60, deadline=None)
@given(tensors(torch.float32))
def test_int8_errs_by_half_a_step_of_its_own_token(tensor: torch.Tensor) -> None:
    back = through("int8", tensor).double()
    step = tensor.double().abs().amax(-1, keepdim=True) / 127
    # Rounding of scale, quotient and product in fp32 adds some 127 * 2^-23 of a step.
    assert bool(((back - tensor.double()).abs() <= step * (0.5 + 1e-4) + 1e-38).all())


def test_a_huge_token_does_not_cost_the_others_their_precision_and_zeros_stay_zeros() -> None:
    tensor = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))
    tensor[0, 0] *= 1e6
    tensor[0, 2] = 0.0
    back = through("int8", tensor)
    assert (back[0, 1] - tensor[0, 1]).abs().max() <= tensor[0, 1].abs().max() / 127 * 0.501
    assert torch.equal(back[0, 2], tensor[0, 2])


@pytest.mark.parametrize("name", CODECS)
def test_encoding_leaves_its_input_alone_and_takes_a_tensor_of_the_graph(name: str) -> None:
    tensor = torch.full((1, 2, 4), 3.5, requires_grad=True)
    out = tensor * 2
    frame = codec_named(name).encode(out.transpose(1, 2), CONTEXT)  # not contiguous
    assert list(frame.header.shape) == [1, 4, 2]
    assert decode(frame, CONTEXT, CPU).flatten().tolist() == pytest.approx([7.0] * 8, rel=1e-2)
    assert torch.equal(out, torch.full((1, 2, 4), 7.0))


# ---- what a peer can get wrong ------------------------------------------------------------------------------------


def frame_of(name: str) -> Frame:
    tensor = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    return codec_named(name).encode(tensor, CONTEXT)


def changed(frame: Frame, payload: bytes | None = None, **fields: object) -> Frame:
    header = pb.TensorHeader()
    header.CopyFrom(frame.header)
    for field, value in fields.items():
        if field == "shape":
            del header.shape[:]
            header.shape.extend(value)  # type: ignore[arg-type]
        else:
            setattr(header, field, value)
    return Frame(header, frame.payload if payload is None else payload)


def resigned(frame: Frame) -> Frame:
    """With the checksum of what it has become."""
    return changed(frame, checksum=zlib.crc32(frame.payload, checksum_start(frame.header)))


@pytest.mark.parametrize("name", CODECS)
def test_damage_is_refused(name: str) -> None:
    """Every cut and every flipped bit: MismatchError, never another tensor."""
    good = frame_of(name)
    for size in (0, 1, len(good.payload) - 1):
        with pytest.raises(MismatchError):
            decode(changed(good, good.payload[:size]), CONTEXT, CPU)
        # Also when the sender signs for it.
        cut = good.payload[:size]
        with pytest.raises(MismatchError):
            decode(
                changed(good, cut, payload_bytes=size, checksum=zlib.crc32(cut, checksum_start(good.header))),
                CONTEXT,
                CPU,
            )
    for bit in range(0, 8 * len(good.payload), 37):
        flipped = bytearray(good.payload)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MismatchError, match="checksum"):
            decode(changed(good, bytes(flipped)), CONTEXT, CPU)
    longer = good.payload + b"\0"
    with pytest.raises(MismatchError):
        decode(
            changed(
                good,
                longer,
                payload_bytes=len(longer),
                checksum=zlib.crc32(longer, checksum_start(good.header)),
            ),
            CONTEXT,
            CPU,
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"codec": "zip"}, "codec = 'zip': no such codec"),
        ({"codec": "x" * 10_000}, "no such codec"),
        ({"dtype": "int64"}, "dtype 'int64' is not one of float32"),
        ({"shape": [2, 3, 9]}, r"shape \[2, 3, 9\] where \[2, 3, 8\]"),
        ({"shape": [1] * 1000}, r"shape \[1, 1, 1, 1, 1, 1, 1, 1\] where"),
        ({"payload_bytes": 2 * 48 + 1}, "payload of 97 bytes where dense takes 96"),
        ({"payload_bytes": 2**60}, "payload of"),
        ({"payload_bytes": 0}, "payload of 0 bytes"),
    ],
)
def test_a_header_is_refused_before_anything_is_allocated(fields: dict[str, object], message: str) -> None:
    header = changed(frame_of("dense"), **fields).header
    with pytest.raises(MismatchError, match=message) as error:
        check_header(header, (2, 3, 8))
    assert len(str(error.value)) < 300


def test_a_frame_that_was_not_checked_before_is_refused_too() -> None:
    good = frame_of("int8")
    for fields in ({"codec": "zip"}, {"dtype": "int64"}, {"codec": "dense"}, {"shape": [2, 3, 4]}):
        with pytest.raises(MismatchError):
            decode(changed(good, **fields), CONTEXT, CPU)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", CODECS)
def test_values_that_are_not_finite_are_refused(name: str, value: float) -> None:
    """C27."""
    tensor = torch.randn(1, 2, 4)
    tensor[0, 1, 2] = value
    with pytest.raises(MismatchError, match="not finite"):
        decode(codec_named(name).encode(tensor, CONTEXT), CONTEXT, CPU)


def test_an_fp32_payload_that_overflows_the_announced_fp16_is_refused() -> None:
    frame = codec_named("dense32").encode(torch.full((1, 1, 2), 1e6), CONTEXT)
    with pytest.raises(MismatchError, match="finite"):
        decode(resigned(changed(frame, dtype="float16")), CONTEXT, CPU)


def test_an_unknown_codec_of_the_run_spec_names_the_field() -> None:
    with pytest.raises(
        ConfigError,
        match=r"wire.forward = 'zip': no such codec. Fix: one of dense, dense32, int4, int8, leading",
    ):
        codec_named("zip", "wire.forward")
