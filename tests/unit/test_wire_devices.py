"""The same tensor gives the same on every device, whichever of the two ends has which.

Where there is no accelerator, a CPU that rounds otherwise stands in for one: products and sums take another order on
every device, and nothing that both ends must agree on may hang on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from priors_helpers import FEATURES, HIDDEN, boundary_tokens, made_prior
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from meshd.wire import CodecContext, RateLoop, codec_named, decode
from meshd.wire.autograd import Boundary
from meshd.wire.spec import PRESETS

PRIOR = made_prior()
CODECS = [
    "dense",
    "dense32",
    "int8",
    *PRESETS,
    "random:keep=0.5,rescale=unbiased",
    "random:keep=0.25,rescale=rms,values=int8",
    "topk:keep=0.5,values=packed,bits=4",
    "lloyd:bits=2",
    "spectral:bits=1.5",
    "spectral:bits=0.4,predictor=mean",
]


class OtherRounding(TorchDispatchMode):
    """Products, sums and functions in double, rounded at their end."""

    _OTHERWISE = ("mm", "addmm", "sum", "mean", "exp2", "log2", "sqrt", "square")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        if func._schema.name.removeprefix("aten::") in self._OTHERWISE:
            wide, more = tree_map_only(
                torch.Tensor, lambda x: x.double() if x.dtype == torch.float32 else x, given
            )
            found = func(*wide, **more)
            return found.float() if wide[0] is not args[0] else found
        return func(*given[0], **given[1])


@dataclass(frozen=True)
class Place:
    """One end: its device, and how it rounds."""

    device: torch.device
    other: bool = False

    @contextmanager
    def working(self) -> Iterator[None]:
        if self.other:
            with OtherRounding():
                yield
        else:
            yield

    def context(self, ids: torch.Tensor, direction: str) -> CodecContext:
        features = FEATURES.on(self.device)
        return CodecContext(1, direction, ids.to(self.device), 7, PRIOR, features)  # type: ignore[arg-type]


def accelerator(name: str, here: bool) -> Any:
    mark = pytest.mark.skipif(not here, reason=f"no {name} device here")
    return pytest.param(Place(torch.device(name)), marks=mark, id=name)


HERE = Place(torch.device("cpu"))
PLACES = [
    pytest.param(Place(torch.device("cpu"), other=True), id="rounds-otherwise"),
    accelerator("cuda", torch.cuda.is_available()),
    accelerator("mps", torch.backends.mps.is_available()),
]


def differs(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of a token, over its norm."""
    a, b = (x.detach().cpu().flatten(0, -2).double() for x in (a, b))
    return float(((a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-30)).max())


@pytest.mark.parametrize("there", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", CODECS)
def test_what_arrives_does_not_depend_on_the_devices(
    name: str, direction: str, dtype: torch.dtype, there: Place
) -> None:
    h, g, ids = boundary_tokens(96, 3, outliers=2, dtype=dtype)
    x, ids = (h if direction == "forward" else g).reshape(4, 24, HIDDEN), ids.reshape(4, 24)
    codec, eps = codec_named(name), torch.finfo(dtype).eps
    frames, arrived = [], []
    for sender in (HERE, there):
        with sender.working():
            frame = codec.encode(x.to(sender.device), sender.context(ids, direction))
        got = []
        for receiver in (HERE, there):
            with receiver.working():
                got.append(decode(frame, receiver.context(ids, direction), receiver.device))
            assert got[-1].device.type == receiver.device.type
            assert got[-1].dtype == dtype
        # One frame, read at both ends: sums are rounded otherwise, no more.
        assert differs(got[1], got[0]) < max(2 * eps, 1e-5)
        frames.append(frame)
        arrived.append(got[0].double())
    # Two frames of one tensor: what lies between two levels may take the one or the other.
    error, apart = (arrived[0] - x.double()).norm(), (arrived[1] - arrived[0]).norm()
    assert float(apart) <= 0.05 * float(error) + 2 * eps * float(x.double().norm())
    assert abs(len(frames[0].payload) - len(frames[1].payload)) <= 8


@pytest.mark.parametrize("there", PLACES)
def test_the_rate_is_held_on_any_device(there: Place) -> None:
    loop, codec, bits, messages = RateLoop(), codec_named("spectral:bits=1.5"), 0, 20
    with there.working():
        for seed in range(messages):
            h, _, ids = boundary_tokens(512, seed)
            quantized = codec.quantize(h.to(there.device), there.context(ids, "forward"), loop)
            bits += 8 * len(codec.write(quantized).payload)
    assert bits / (messages * 512 * HIDDEN) == pytest.approx(1.5, rel=0.03)


@pytest.mark.parametrize("there", PLACES)
@pytest.mark.parametrize("exact", [False, True], ids=["straight-through", "exact-adjoint"])
def test_gradients_cross_on_any_device(exact: bool, there: Place) -> None:
    h, _, ids = boundary_tokens(64, 5)
    gradients = []
    for place in (HERE, there):
        x = h.to(place.device, copy=True).requires_grad_()
        boundary = Boundary(codec_named("leading"), codec_named("int8"), exact_adjoint=exact)
        with place.working():
            boundary(x, place.context(ids, "forward")).square().sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert differs(gradients[1], gradients[0]) < 1e-2


def test_the_stand_in_does_round_otherwise() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    with OtherRounding():
        other = x @ x
    assert other.dtype == torch.float32
    assert 0 < differs(other, x @ x) < 1e-5
