"""Stage state: bits kept, misfits named, averages right."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from meshd.errors import DataError, MismatchError
from meshd.state.bundle import BundleStore
from meshd.state.stage_state import (
    WEIGHTS,
    average,
    read_optimizer,
    read_params,
    write_average,
    write_stage,
)
from meshd.state.tensors import TensorSpec, read_specs, spec_of, write_tensors
from meshd.transport.base import NotHere


@pytest.fixture
def store(tmp_path: Path) -> BundleStore:
    return BundleStore(tmp_path / "bundles")


def params(seed: int = 0) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return {
        "model.layers.3.mlp.up_proj.weight": torch.randn(6, 4, generator=gen),
        "model.layers.3.norm.weight": torch.randn(5, generator=gen).bfloat16(),
        "model.layers.3.q.weight": torch.randn(4, 6, generator=gen).t(),  # not contiguous
        "scalar": torch.tensor(3.25, dtype=torch.float16),
        "empty": torch.zeros(0, 3),
    }


def trained() -> tuple[torch.nn.Module, torch.optim.AdamW]:
    torch.manual_seed(1)
    model = torch.nn.Linear(7, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(torch.randn(2, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_params_and_optimizer_come_back_to_the_bit(store: BundleStore) -> None:
    model, optimizer = trained()
    moments = {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    assert len(moments) == 6
    write_stage(store, "live/0", dict(model.named_parameters()), moments, {"weight_version": 3, "tokens": 40})
    again = BundleStore(store.root)
    found = read_optimizer(again, "live/0")
    assert {k: (bits(v), spec_of(v)) for k, v in found.items()} == {
        k: (bits(v), spec_of(v)) for k, v in moments.items()
    }
    weights = read_params(again, "live/0")
    assert {k: bits(v) for k, v in weights.items()} == {k: bits(v) for k, v in model.named_parameters()}
    assert again.manifest("live/0").facts == {"weight_version": 3, "tokens": 40}


def test_file_is_what_the_library_reads(store: BundleStore) -> None:
    """All dtypes, a transposed, a scalar and an empty tensor."""
    write_stage(store, "base/0", params(), None, {})
    read = load_file(store.path("base/0", WEIGHTS))
    assert list(read_specs(store.path("base/0", WEIGHTS))) == sorted(params())
    for name, tensor in params().items():
        assert spec_of(read[name]) == spec_of(tensor)
        assert torch.equal(read[name], tensor)
    with pytest.raises(NotHere):
        read_optimizer(store, "base/0")


def test_tensors_read_are_mapped_copies(store: BundleStore) -> None:
    """In-place training on them changes no file, and they outlive it."""
    manifest = write_stage(store, "base/0", params(), None, {})
    read = read_params(store, "base/0")
    read["model.layers.3.mlp.up_proj.weight"].zero_()
    assert store.verify("base/0") == manifest
    store.delete("base/0")
    assert torch.equal(read["model.layers.3.norm.weight"], params()["model.layers.3.norm.weight"])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["params", "optimizer"])
def test_values_that_are_not_finite_are_refused(store: BundleStore, value: float, where: str) -> None:
    """C27: the tensor is named, and the former bundle stands."""
    before = write_stage(store, "live/0", params(), {"a.exp_avg": torch.ones(2)}, {})
    bad = torch.ones(3)
    bad[1] = value
    weights, moments = params(), {"a.exp_avg": torch.ones(2)}
    (weights if where == "params" else moments)["the.bad.one"] = bad
    with pytest.raises(DataError, match=r"the\.bad\.one"):
        write_stage(store, "live/0", weights, moments, {})
    assert store.verify("live/0") == before


def test_misfit_names_tensor_expected_and_found(store: BundleStore) -> None:
    """C07."""
    write_stage(store, "base/0", params(), None, {})
    expected = {name: spec_of(tensor) for name, tensor in params().items()}
    assert read_params(store, "base/0", expected).keys() == expected.keys()
    norm = "model.layers.3.norm.weight"
    with pytest.raises(MismatchError, match=rf"{norm} is \[5\] bfloat16, expected \[5\] float32"):
        read_params(store, "base/0", expected | {norm: TensorSpec((5,), torch.float32)})
    with pytest.raises(
        MismatchError, match=r"weights\.safetensors of bundle base/0 .*\[5\] bfloat16, expected \[6\]"
    ):
        read_params(store, "base/0", expected | {norm: TensorSpec((6,), torch.bfloat16)})
    with pytest.raises(MismatchError, match=r"other is missing \(expected \[1\] float32\)"):
        read_params(store, "base/0", expected | {"other": TensorSpec((1,), torch.float32)})
    del expected[norm]
    with pytest.raises(MismatchError, match=rf"{norm} \(\[5\] bfloat16\) is not expected"):
        read_params(store, "base/0", expected)


def test_file_that_is_no_safetensors_is_said(store: BundleStore) -> None:
    store.write("base/0", {WEIGHTS: b"\xff" * 64}, {})
    with pytest.raises(DataError, match="no safetensors file"):
        read_params(store, "base/0")
    with pytest.raises(DataError, match="no safetensors file"):
        read_params(store, "base/0", {})


def test_writer_holds_the_announcement(tmp_path: Path) -> None:
    specs = {"a": TensorSpec((2,), torch.float32), "b": TensorSpec((1,), torch.float32)}
    with pytest.raises(DataError, match="came where"):
        write_tensors(tmp_path / "f", specs, [("a", torch.ones(3))])
    with pytest.raises(DataError, match="b was announced"):
        write_tensors(tmp_path / "f", specs, [("a", torch.ones(2))])
    with pytest.raises(DataError, match="complex64"):
        write_tensors(tmp_path / "f", {"c": TensorSpec((1,), torch.complex64)}, [])


def test_average_is_the_weighted_mean() -> None:
    sources = [
        {"w": torch.tensor([1.0, 8.0])},
        {"w": torch.tensor([3.0, 0.0])},
        {"w": torch.tensor([5.0, 4.0])},
    ]
    ((name, mean),) = average(sources, [1, 2, 1])
    assert name == "w"
    assert mean.tolist() == [3.0, 3.0]
    ((_, mean),) = average(sources, [0, 1, 0])
    assert mean.tolist() == [3.0, 0.0]
    assert sources[0]["w"].tolist() == [1.0, 8.0]


def test_average_is_computed_in_float32() -> None:
    """1 + 2^-8 and 1 in bfloat16: their mean needs more bits than bfloat16 has."""
    low, high = torch.tensor([1.0]).bfloat16(), torch.tensor([1.0078125]).bfloat16()
    ((_, mean),) = average([{"w": low}, {"w": high}], [1, 1])
    assert mean.dtype == torch.float32
    assert mean.item() == 1.00390625


def test_average_of_equal_sources_is_exact() -> None:
    value = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    ((_, mean),) = average([{"w": value}] * 3, [0.1, 0.2, 0.7])
    assert torch.equal(mean, value)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"w": torch.ones(3)}, r"source 1 .*w is \[3\], expected \[2\]"),
        ({"v": torch.ones(2)}, r"w is absent, expected \[2\]"),
        ({"w": torch.ones(2), "v": torch.ones(1)}, r"v is \[1\], expected absent"),
    ],
)
def test_sources_that_differ_are_named(other: dict[str, Tensor], words: str) -> None:
    """C07."""
    with pytest.raises(MismatchError, match=words):
        list(average([{"w": torch.ones(2)}, other], [1, 1]))


def test_source_with_nan_is_named() -> None:
    """C27."""
    with pytest.raises(DataError, match="w of source 1"):
        list(average([{"w": torch.ones(2)}, {"w": torch.tensor([1.0, math.nan])}], [1, 1]))


@pytest.mark.parametrize("weights", [[1], [0, 0], [1, -1], [1, math.nan], [math.inf, 1]])
def test_weights_without_sense_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        list(average([{"w": torch.ones(1)}] * 2, weights))


def test_write_average(store: BundleStore) -> None:
    write_stage(store, "base/0", {"w": torch.tensor([1.0, 2.0]).bfloat16()}, None, {})
    write_average(
        store,
        "snapshot/0/64",
        [read_params(store, "base/0"), {"w": torch.tensor([2.0, 4.0])}],
        [1, 3],
        {"tokens": 64},
    )
    assert read_params(store, "snapshot/0/64")["w"].tolist() == [1.75, 3.5]
    assert store.manifest("snapshot/0/64").facts == {"tokens": 64}
