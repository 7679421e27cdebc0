"""The masked family: every member gives back what it was given, at the size it declares (DESIGN section 3)."""

from __future__ import annotations

import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from priors_helpers import FEATURES, HIDDEN, VOCABULARY, boundary_tokens, made_prior
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshd.errors import ConfigError, MismatchError
from meshd.wire import CodecContext, Frame, RateLoop, codec_named, decode
from meshd.wire.autograd import Boundary
from meshd.wire.codec import Quantized, make_frame
from meshd.wire.spec import PRESETS, parse

CPU = torch.device("cpu")
PRIOR = made_prior()
FREE = [
    "random:keep=0.5",
    "random:keep=0.25,rescale=rms,values=int8",
    "random:keep=0.25,rescale=unbiased",
    "topk:keep=0.25",
    "topk:keep=0.5,values=packed,bits=4",
    "random:mask=none,keep=1,values=packed,bits=6",
]
FITTED = [
    "leading",
    "leading:predictor=mean,values=int8",
    "lloyd:bits=2",
    "lloyd:predictor=none,bits=0.7",
    "spectral:bits=1.5",
    "spectral:bits=0.4,predictor=mean",
    "topk:basis=spectral,predictor=token,keep=0.3",
    "random:basis=spectral,keep=0.5",
]


def context(ids: torch.Tensor, direction: str = "forward") -> CodecContext:
    assert direction in ("forward", "backward")
    return CodecContext(1, direction, ids, 7, PRIOR, FEATURES)  # type: ignore[arg-type]


def tokens(rows: int, columns: int, seed: int = 3, outliers: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    h, _, ids = boundary_tokens(rows * columns, seed, outliers)
    return h.reshape(rows, columns, HIDDEN), ids.reshape(rows, columns)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(FREE + FITTED),
    rows=st.integers(1, 3),
    columns=st.integers(1, 9),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    direction=st.sampled_from(["forward", "backward"]),
    magnitude=st.sampled_from([0.0, 1e-38, 1e-6, 1.0, 1e4, 3e38]),
)
def test_any_tensor_comes_back_finite_and_within_the_size(
    name: str, rows: int, columns: int, seed: int, dtype: torch.dtype, direction: str, magnitude: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    most = torch.finfo(dtype).max
    tensor = (torch.randn(rows, columns, HIDDEN, generator=generator) * magnitude).clamp(-most, most)
    tensor = tensor.to(dtype)
    ids = torch.randint(0, VOCABULARY, (rows, columns), generator=generator)
    codec, about = codec_named(name), context(ids, direction)
    frame = codec.encode(tensor, about)
    if codec.spec.values == "entropy":  # type: ignore[attr-defined]
        assert len(frame.payload) <= codec.wire_bytes(tensor.shape)
    else:
        assert len(frame.payload) == codec.wire_bytes(tensor.shape)
    back = decode(frame, about, CPU)
    assert back.shape == tensor.shape
    assert back.dtype == dtype
    assert bool(torch.isfinite(back).all())


@pytest.mark.parametrize("values", ["lloyd", "spectral"])
def test_the_error_falls_as_bits_rise(values: str) -> None:
    h, ids = tokens(4, 64, outliers=0)
    errors = [
        relative(decode(codec_named(f"{values}:bits={n}").encode(h, context(ids)), context(ids), CPU), h)
        for n in (0.75, 1.5, 3.0, 5.0)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.3 * errors[0]


def test_the_spectral_codec_beats_top_k_of_the_same_size_by_far() -> None:
    h, ids = tokens(4, 64, outliers=0)
    centred = h - h.mean((0, 1))
    errors = {}
    for name in ("spectral:bits=1", "topk:keep=0.05"):
        codec = codec_named(name)
        frame = codec.encode(h, context(ids))
        assert len(frame.payload) <= 1.05 * h.numel() / 8
        errors[name] = float((decode(frame, context(ids), CPU) - h).norm() / centred.norm())
    assert errors["spectral:bits=1"] < 0.7 * errors["topk:keep=0.05"]


def test_the_same_random_columns_cross_both_ways_and_at_every_attempt() -> None:
    codec = codec_named("random:keep=0.5")
    ids = torch.zeros((1, 5), dtype=torch.int64)
    x = torch.randn(1, 5, HIDDEN)
    kept = decode(codec.encode(x, context(ids)), context(ids), CPU) != 0
    back = decode(codec.encode(x * 2, context(ids, "backward")), context(ids, "backward"), CPU) != 0
    assert torch.equal(kept, back)
    assert bool((kept.sum(-1) == HIDDEN // 2).all())
    other = replace(context(ids), seed=8)
    assert not torch.equal(kept, decode(codec.encode(x, other), other, CPU) != 0)


def test_the_unbiased_random_mask_is_unbiased() -> None:
    codec, x = codec_named("random:keep=0.25,rescale=unbiased"), torch.randn(1, 1, HIDDEN)
    ids = torch.zeros((1, 1), dtype=torch.int64)
    total = torch.zeros(HIDDEN)
    draws = 4000
    for seed in range(draws):
        about = replace(context(ids), seed=seed)
        total += decode(codec.encode(x, about), about, CPU)[0, 0]
    # A kept coordinate is 4 x, so the mean of the draws has a standard deviation of sqrt(3) |x| / sqrt(draws).
    assert bool(((total / draws - x[0, 0]).abs() <= 5 * 3**0.5 * x[0, 0].abs() / draws**0.5 + 1e-2).all())


def test_a_frame_is_never_read_with_another_prior() -> None:
    h, ids = tokens(1, 8)
    frame = codec_named("spectral").encode(h, context(ids))
    assert frame.header.prior == PRIOR.name
    other = replace(context(ids), prior=made_prior(seed=5))
    with pytest.raises(MismatchError, match="which is not here"):
        decode(frame, other, CPU)
    with pytest.raises(MismatchError, match="which is not here"):
        decode(frame, replace(context(ids), prior=None), CPU)


@pytest.mark.parametrize("name", FREE + FITTED)
def test_truncated_and_lengthened_payloads_are_refused_behind_the_checksum_too(name: str) -> None:
    h, ids = tokens(2, 6)
    codec, about = codec_named(name), context(ids)
    frame = codec.encode(h, about)
    for payload in (frame.payload[:-1], frame.payload[:3], b"", frame.payload + b"\0"):
        damaged = Frame(frame.header, payload)
        with pytest.raises(MismatchError):
            decode(damaged, about, CPU)
        with pytest.raises(MismatchError):
            codec.dequantize(codec.read(damaged, about), about, CPU)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(FREE + FITTED), at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_behind_the_checksum_is_refused_or_stays_in_shape(name: str, at: int, bit: int) -> None:
    h, ids = tokens(2, 6)
    codec, about = codec_named(name), context(ids)
    payload = bytearray(codec.encode(h, about).payload)
    payload[at % len(payload)] ^= 1 << bit
    frame = codec.encode(h, about)
    try:
        back = codec.dequantize(codec.read(Frame(frame.header, bytes(payload)), about), about, CPU)
    except MismatchError:
        return
    assert back.shape == h.shape


@pytest.mark.parametrize("bits", [0.5, 1.5])
def test_the_loop_holds_the_rate_of_a_stream_at_the_budget(bits: float) -> None:
    """Within 3 %, whatever the prior's model gets wrong: outliers, and a boundary that drifts half-way."""
    codec, rate, spent, values = codec_named(f"spectral:bits={bits}"), RateLoop(), 0, 0
    for seed in range(40):
        h, ids = tokens(4, 256, seed=100 + seed, outliers=4)
        if seed >= 20:
            h = h * torch.linspace(0.5, 3, HIDDEN)
        spent += 8 * len(codec.encode(h, context(ids), rate).payload)
        values += h.numel()
    assert spent / values == pytest.approx(bits, rel=0.03)


def test_without_the_loop_the_drift_would_show() -> None:
    """What the test above would not notice otherwise."""
    codec = codec_named("spectral:bits=1.5")
    h, ids = tokens(4, 256, seed=120, outliers=4)
    frame = codec.encode(h * torch.linspace(0.5, 3, HIDDEN), context(ids))
    assert abs(8 * len(frame.payload) / h.numel() / 1.5 - 1) > 0.03


def test_large_tokens_get_more_bits_and_tokens_of_nothing_none() -> None:
    """All tokens share one step: their errors are alike, however large they are."""
    _, g, ids = boundary_tokens(512, seed=9)
    g[::4] *= 8
    g[1::4] = 0
    codec, about = codec_named("spectral:bits=1.5"), context(ids[None], "backward")
    frame = codec.encode(g[None], about)
    error = (decode(frame, about, CPU)[0] - g).norm(dim=1)
    assert float(error[1::4].max()) == 0
    assert float(error[::4].mean()) == pytest.approx(float(error[2::4].mean()), rel=0.7)
    assert relative(decode(frame, about, CPU)[0][::4], g[::4]) < 0.2
    classes = codec.read(frame, about).classes  # type: ignore[attr-defined]
    assert bool((classes[1::4] == 255).all())
    assert int(classes[::4][classes[::4] != 255].max()) > int(classes[2::4][classes[2::4] != 255].max())


@pytest.mark.parametrize("name", [*FREE, *FITTED, "spectral:bits=4"])
def test_memory_in_between_is_a_small_multiple_of_the_tensor(name: str) -> None:
    """Of every half: torch's and numpy's blocks together, against the tensor in float32."""
    h, ids = tokens(8, 1024)
    codec, about = codec_named(name), context(ids)
    frame = codec.encode(h, about)  # what is kept from call to call is made here
    quantized, received = codec.quantize(h, about), codec.read(frame, about)
    halves: list[Callable[[], object]] = [
        lambda: codec.quantize(h, about),
        lambda: codec.write(quantized),
        lambda: codec.read(frame, about),
        lambda: codec.dequantize(received, about, CPU),
    ]
    for half in halves:
        assert height(half) < 10 * h.nbytes


def height(work: Callable[[], object]) -> int:
    """Bytes that were in use at once, at most, of those that `work` allocates."""
    with Blocks() as blocks:
        torch.zeros(1)  # the first operation under any such mode imports half of torch
        tracemalloc.start()
        work()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return blocks.most + most


class Blocks(TorchDispatchMode):
    """Counts the bytes of storages that operations return, while any tensor holds them."""

    def __init__(self) -> None:
        super().__init__()
        self._holders: Counter[int] = Counter()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                place, size = storage.data_ptr(), storage.nbytes()
                self.now += 0 if self._holders[place] else size
                self._holders[place] += 1
                weakref.finalize(tensor, self._drop, place, size)
        self.most = max(self.most, self.now)
        return out

    def _drop(self, place: int, size: int) -> None:
        self._holders[place] -= 1
        self.now -= 0 if self._holders[place] else size


def test_the_adjoint_is_the_transpose_of_what_encoding_keeps() -> None:
    """<A x, y> = <x, A^T y>, for the linear members and codes so fine that quantization does not show."""
    ids = torch.zeros((1, 16), dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1, 16, HIDDEN, generator=generator) for _ in range(2))
    for name in ("random:keep=0.5", "random:keep=0.5,rescale=unbiased", "leading:predictor=none,values=bf16"):
        codec, about = codec_named(name), context(ids)
        crossed = decode(codec.encode(x, about), about, CPU)
        left, right = float((crossed * y).sum()), float((x * codec.adjoint(y, about)).sum())
        assert left == pytest.approx(right, rel=0.02, abs=0.1), name


@pytest.mark.parametrize("name", ["dense32", "random:keep=0.5", "random:keep=0.25,rescale=sqrt"])
@pytest.mark.filterwarnings("ignore:Input .* requires gradient and is not a double")
def test_the_exact_adjoint_is_the_gradient_that_finite_differences_show(name: str) -> None:
    """Whole numbers cross bf16 as they are, so that differences of 1 are exact."""
    ids = torch.zeros((1, 2), dtype=torch.int64)
    x = torch.randint(-8, 9, (1, 2, HIDDEN)).float().requires_grad_()
    back = codec_named("dense32")

    def crossed(exact: bool) -> bool:
        boundary = Boundary(codec_named(name), back, exact)
        return torch.autograd.gradcheck(
            lambda x: boundary(x, context(ids)), (x,), eps=1.0, atol=1e-2, raise_exception=False
        )

    assert crossed(exact=True)
    assert crossed(exact=False) is (name == "dense32")  # straight through is not what a mask does


def test_gradients_cross_back_straight_or_by_the_adjoint() -> None:
    ids = torch.zeros((1, 4), dtype=torch.int64)
    codec, back = codec_named("random:keep=0.5"), codec_named("dense32")
    frames: list[str] = []
    for exact in (False, True):
        x = torch.randn(1, 4, HIDDEN, requires_grad=True)
        cross = Boundary(codec, back, exact, lambda frame, about: frames.append(about.direction))
        out = cross(x, context(ids))
        out.sum().backward()
        assert x.grad is not None
        zeros = out == 0
        assert bool((x.grad[zeros] == 0).all()) is exact
        assert bool((x.grad[~zeros] == 1).all())
    assert frames == ["forward", "backward"] * 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("spectral:bits=0", "bits is a number|a number over 0"),
        ("spectral:bits=nan", "a number over 0"),
        ("spectral:colour=red", "no key 'colour'"),
        ("spectral:bits", "not one key=value"),
        ("spectral:bits=1,bits=2", "not one key=value"),
        ("topk:mask=leading", "basis=spectral"),
        ("spectral:values=int8", "values=packed or entropy"),
        ("spectral:mask=topk,keep=0.1", "mask=waterfill"),
        ("topk:values=packed,bits=2.5", "bits=1 to 10"),
        ("topk:rescale=rms", "mask=random"),
        ("spectral:keep=0.5", "leave keep out"),
        ("random:" + "keep=0.1," * 100, "longer than"),
    ],
)
def test_a_name_that_means_nothing_says_what_to_write(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        codec_named(name, "wire.forward")
    assert error.value.field == "wire.forward"


def test_keys_change_single_choices_of_a_preset() -> None:
    assert parse("spectral", "x") == PRESETS["spectral"]
    assert parse("spectral:bits=1.5", "x") == replace(PRESETS["spectral"], bits=1.5)
    assert parse("topk:keep=0.05, values=bf16", "x") == replace(PRESETS["topk"], keep=0.05, values="bf16")


def test_values_that_are_not_finite_are_refused_not_clamped() -> None:
    codec, about = codec_named("random:keep=0.5"), context(torch.zeros((1, 2), dtype=torch.int64))
    for bad in (float("inf"), float("nan")):
        payload = torch.full((2, HIDDEN // 2), bad, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
        shape = (1, 2, HIDDEN)
        frame = make_frame(codec.name, Quantized(shape, torch.float32, payload, b""), payload)
        with pytest.raises(MismatchError, match="not finite"):
            decode(frame, about, CPU)
