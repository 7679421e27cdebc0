"""The codec prior's file: what is read back, what its name is, and that nothing a stranger sends does harm."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from priors_helpers import HIDDEN, RANK, made_prior

from meshd.errors import MismatchError
from meshd.priors.boundary import SCALE_LIMIT, BoundaryPrior, Packed, most_bytes


@cache
def original() -> tuple[BoundaryPrior, bytes]:
    prior = made_prior(boundary=2, measured=77)
    return prior, prior.to_bytes()


def changed(**tensors: torch.Tensor | None) -> bytes:
    """The file with some of its tensors replaced, or left out."""
    found = safetensors.torch.load(original()[1]) | tensors
    return safetensors.torch.save({name: t for name, t in found.items() if t is not None})


def tensor(name: str) -> torch.Tensor:
    return safetensors.torch.load(original()[1])[name]


def test_bytes_give_the_prior_back_under_the_same_name() -> None:
    prior, data = original()
    again = BoundaryPrior.from_bytes(data, HIDDEN, RANK, prior.name)
    assert again.name == prior.name == hashlib.sha256(data).digest()
    assert again.to_bytes() == data
    assert (again.boundary, again.measured, again.tokens) == (2, 77, 195)
    assert (again.hidden, again.rank) == (HIDDEN, RANK)
    assert again.outlier_norm == prior.outlier_norm
    for name in ("mean", "predictor", "outlier_mean"):
        assert torch.equal(getattr(again, name), getattr(prior, name))
    for direction in ("forward", "backward"):
        one, other = again.basis(direction), prior.basis(direction)
        for part in ("encode", "decode", "scale_index", "scale"):
            assert torch.equal(getattr(one, part), getattr(other, part))
        assert np.array_equal(one.tables.to_array(), other.tables.to_array())
    assert torch.equal(again.backward.decode, again.backward.encode.T)


def test_tensors_have_the_precision_that_crosses() -> None:
    prior, _ = original()
    assert prior.predictor.dtype == torch.bfloat16
    assert prior.forward.packed_encode.values.dtype == torch.int8
    assert prior.forward.encode.dtype == prior.forward.decode.dtype == torch.float32
    assert prior.mean.dtype == prior.outlier_mean.dtype == torch.float32
    assert prior.forward.scale_index.dtype == torch.int16
    torch.testing.assert_close(
        prior.forward.scale, 2.0 ** (prior.forward.scale_index.double() / 64), check_dtype=False
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_huge_channel_does_not_cost_the_others_their_precision(dtype: torch.dtype) -> None:
    """Channel 3 has small entries everywhere but in its own coordinate: each is rounded to its own measure."""
    matrix = torch.linalg.qr(torch.randn(40, 40, generator=torch.Generator().manual_seed(0)))[0]
    matrix[:, 3] /= 50
    matrix[7] = torch.eye(40)[3]
    found = Packed.of(matrix.to(dtype))
    assert found.values.dtype == torch.int8
    error = (found.matrix() - matrix.to(dtype).float()).abs()
    others = torch.arange(40) != 7
    size = matrix[others].abs()
    assert bool((error[others].pow(2).mean(0).sqrt() < 0.02 * size.pow(2).mean(0).sqrt()).all())
    assert error[7, 3] < 0.005


@pytest.mark.parametrize(
    "matrix", [torch.zeros(2, 3), torch.eye(5), torch.ones(3, 1), torch.tensor([[0.0, 2.0]])]
)
def test_matrices_that_are_mostly_zero_stay_what_they_are(matrix: torch.Tensor) -> None:
    torch.testing.assert_close(Packed.of(matrix).matrix(), matrix)


def test_the_largest_prior_fits_the_limit() -> None:
    prior, data = original()
    assert len(prior.forward.scale_index) <= HIDDEN
    whole = replace(
        prior,
        forward=replace(
            prior.forward,
            packed_encode=Packed.of(torch.ones(HIDDEN, HIDDEN)),
            packed_decode=Packed.of(torch.ones(HIDDEN, HIDDEN)),
            scale_index=torch.zeros(HIDDEN, dtype=torch.int16),
        ),
        backward=replace(
            prior.backward,
            packed_encode=Packed.of(torch.ones(HIDDEN, HIDDEN)),
            scale_index=torch.zeros(HIDDEN, dtype=torch.int16),
        ),
    )
    assert len(data) <= len(whole.to_bytes()) <= most_bytes(HIDDEN, RANK)
    assert len(whole.sealed().backward.scale_index) == HIDDEN


def test_another_device_gets_one_copy() -> None:
    prior, _ = original()
    assert prior.on(torch.device("cpu")) is prior
    meta = prior.on(torch.device("meta"))
    assert prior.on(torch.device("meta")) is meta
    assert (
        meta.forward.encode.device == meta.backward.decode.device == meta.predictor.device == meta.mean.device
    )
    assert meta.name == prior.name


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 500, 3000, -1])
def test_a_truncated_file_is_refused(length: int) -> None:
    with pytest.raises(MismatchError):
        BoundaryPrior.from_bytes(original()[1][:length], HIDDEN, RANK)


def test_a_file_that_is_too_long_is_refused_unread() -> None:
    with pytest.raises(MismatchError, match="are the most"):
        BoundaryPrior.from_bytes(bytes(most_bytes(HIDDEN, RANK) + 1), HIDDEN, RANK)
    with pytest.raises(MismatchError):
        BoundaryPrior.from_bytes(original()[1] + b"\0", HIDDEN, RANK)


def test_a_prior_of_another_run_is_refused() -> None:
    _, data = original()
    with pytest.raises(MismatchError, match=f"mean is \\[{HIDDEN}\\] F32, expected \\[{HIDDEN + 1}\\]"):
        BoundaryPrior.from_bytes(data, HIDDEN + 1, RANK)
    with pytest.raises(MismatchError, match="predictor is"):
        BoundaryPrior.from_bytes(data, HIDDEN, RANK + 1)
    with pytest.raises(MismatchError, match="not 0101"):
        BoundaryPrior.from_bytes(data, HIDDEN, RANK, b"\1" * 32)


def _falling(values: list[int]) -> torch.Tensor:
    index = tensor("forward.scale_index").clone()
    index[: len(values)] = torch.tensor(values, dtype=torch.int16)
    return index


BAD: dict[str, tuple[str, object]] = {
    "missing": ("'mean' is missing", lambda: {"mean": None}),
    "no coordinates named": ("forward.scale_index is of shape", lambda: {"forward.scale_index": None}),
    "unknown": ("'extra' is missing or unknown", lambda: {"extra": torch.zeros(1)}),
    "dtype": (
        "mean is .*BF16",
        lambda: {"mean": tensor("mean").bfloat16()},
    ),
    "exotic dtype": ("mean is", lambda: {"mean": tensor("mean").to(torch.float8_e4m3fn)}),
    "shape": ("predictor is", lambda: {"predictor": tensor("predictor")[:-1].contiguous()}),
    "transposed": ("outlier_mean is", lambda: {"outlier_mean": tensor("outlier_mean")[None]}),
    "nan": ("mean has values", lambda: {"mean": tensor("mean") * torch.nan}),
    "infinite": (
        "forward.encode.rows has values",
        lambda: {"forward.encode.rows": tensor("forward.encode.rows") * torch.inf},
    ),
    "huge": (
        "forward.decode.columns has values",
        lambda: {"forward.decode.columns": tensor("forward.decode.columns") * 1e30},
    ),
    "huge together": (
        "backward.encode has values over",
        lambda: {
            f"backward.encode.{x}": tensor(f"backward.encode.{x}") * 0 + 2.0**25 for x in ("rows", "columns")
        },
    ),
    "norm zero": ("outlier norm is 0", lambda: {"outlier_norm": torch.zeros(1)}),
    "norm negative": ("outlier norm is -1", lambda: {"outlier_norm": -torch.ones(1)}),
    "no coordinates": (
        "1 to 24 coordinates",
        lambda: {"backward.scale_index": torch.zeros(0, dtype=torch.int16)},
    ),
    "too many": (
        "1 to 24 coordinates",
        lambda: {"backward.scale_index": torch.zeros(HIDDEN + 1, dtype=torch.int16)},
    ),
    "order": ("forward.scale_index does not fall", lambda: {"forward.scale_index": _falling([5, 6])}),
    "scale high": ("outside", lambda: {"forward.scale_index": _falling([SCALE_LIMIT + 1])}),
    "scale lowest": (
        "outside",
        lambda: {"forward.scale_index": torch.full_like(tensor("forward.scale_index"), -(2**15))},
    ),
    "tables": ("entropy tables", lambda: {"forward.tables": tensor("forward.tables") * 0 + 1}),
    "tables negative": ("entropy tables", lambda: {"backward.tables": -tensor("backward.tables")}),
    "format": ("format 9", lambda: {"facts": torch.tensor([9, 0, 0, 0])}),
    "boundary": ("boundary -1", lambda: {"facts": torch.tensor([1, -1, 0, 0])}),
    "tokens": ("tokens -9223372036854775808", lambda: {"facts": torch.tensor([1, 0, -(2**63), 0])}),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_tensor_is_named(kind: str) -> None:
    message, tensors = BAD[kind]
    data = changed(**tensors())  # type: ignore[operator]
    with pytest.raises(MismatchError, match=message):
        BoundaryPrior.from_bytes(data, HIDDEN, RANK)


def check_usable(prior: BoundaryPrior) -> None:
    """All that decoding relies on holds."""
    for direction in ("forward", "backward"):
        basis = prior.basis(direction)
        coded = len(basis.scale_index)
        assert basis.encode.shape == (coded, HIDDEN)
        assert basis.decode.shape == (HIDDEN, coded)
        assert bool(torch.isfinite(basis.scale).all())
        assert bool(torch.isfinite(basis.encode).all() & torch.isfinite(basis.decode).all())
        assert bool((basis.tables.to_array().sum(1) == 1 << 24).all())
    assert bool(torch.isfinite(prior.mean).all() & torch.isfinite(prior.predictor).all())


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), min_size=1, max_size=5), st.booleans())
def test_flipped_bits_are_refused_or_give_another_sound_prior(
    flips: list[tuple[int, int]], header: bool
) -> None:
    prior, data = original()
    bent = bytearray(data)
    for place, bit in flips:
        bent[place % (1600 if header else len(bent))] ^= 1 << bit
    try:
        found = BoundaryPrior.from_bytes(bytes(bent), HIDDEN, RANK)
    except MismatchError:
        pass
    else:
        assert (found.name == prior.name) == (bent == data)
        check_usable(found)
    if bent != data:
        with pytest.raises(MismatchError):
            BoundaryPrior.from_bytes(bytes(bent), HIDDEN, RANK, prior.name)


@given(st.data())
def test_pieces_of_files_are_refused(data: st.DataObject) -> None:
    """Cut at any place, with a piece taken out, or doubled."""
    whole = original()[1]
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = data.draw(st.integers(start + 1, len(whole)))
    for piece in (whole[:start], whole[:start] + whole[stop:], whole[:stop] + whole[start:]):
        with pytest.raises(MismatchError):
            BoundaryPrior.from_bytes(piece, HIDDEN, RANK)


@given(st.binary(max_size=2000), st.booleans())
def test_noise_is_refused(noise: bytes, framed: bool) -> None:
    data = len(noise).to_bytes(8, "little") + noise if framed else noise
    with pytest.raises(MismatchError):
        BoundaryPrior.from_bytes(data, HIDDEN, RANK)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    ["mean", "dtype", "shape", "data_offsets", "__metadata__", "forward.scale_index"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_strange_headers_are_refused(header: object) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(MismatchError):
        BoundaryPrior.from_bytes(len(text).to_bytes(8, "little") + text + bytes(64), HIDDEN, RANK)
