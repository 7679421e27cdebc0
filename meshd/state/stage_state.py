"""A stage's state as a bundle: parameters, optimizer moments and facts (DESIGN section 7). No pickle.

Files: `weights.safetensors` (whole-model parameter names) and, where there is an optimizer, `optimizer.safetensors`
(names as the optimizer gives them: for AdamW `<parameter>.exp_avg`, `<parameter>.exp_avg_sq`, `<parameter>.step`).
Blocking: call in a thread, and where the tensors must not move meanwhile, in the one that computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from meshd.errors import MismatchError
from meshd.state.bundle import BundleStore
from meshd.state.manifest import Manifest
from meshd.state.tensors import (
    TensorSpec,
    check_finite,
    check_specs,
    read_specs,
    read_tensors,
    spec_of,
    write_tensors,
)

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"


def write_stage(
    store: BundleStore,
    name: str,
    params: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor] | None,
    facts: Mapping[str, Any],
) -> Manifest:
    """Write bundle `name` (facts: weight_version, tokens, ...) with the exact bits of every tensor.

    Raises DataError naming a tensor with values that are not finite, ResourceError for the disk; then nothing changed.
    """
    with store.writing(name, facts) as directory:
        write_tensors(directory / WEIGHTS, _specs(params), params.items())
        if optimizer is not None:
            write_tensors(directory / OPTIMIZER, _specs(optimizer), optimizer.items())
    return store.manifest(name)


def write_average(
    store: BundleStore,
    name: str,
    sources: Sequence[Mapping[str, torch.Tensor]],
    weights: Sequence[float],
    facts: Mapping[str, Any],
) -> Manifest:
    """Write `average(sources, weights)` as bundle `name`, in float32, one tensor at a time. Errors of both."""
    specs = {key: TensorSpec(tuple(tensor.shape), torch.float32) for key, tensor in sources[0].items()}
    with store.writing(name, facts) as directory:
        write_tensors(directory / WEIGHTS, specs, average(sources, weights))
    return store.manifest(name)


def read_params(
    store: BundleStore, name: str, expected: Mapping[str, TensorSpec] | None = None
) -> dict[str, torch.Tensor]:
    """Parameters of bundle `name`, memory-mapped. With `expected`, names, shapes and dtypes are compared first.

    Raises NotHere, DataError for a damaged bundle, MismatchError naming the tensors that do not fit (C07).
    """
    return _read(store, name, WEIGHTS, expected)


def read_optimizer(
    store: BundleStore, name: str, expected: Mapping[str, TensorSpec] | None = None
) -> dict[str, torch.Tensor]:
    """Optimizer state of bundle `name`; as `read_params`. Raises NotHere when the bundle has none."""
    return _read(store, name, OPTIMIZER, expected)


def average(
    sources: Sequence[Mapping[str, torch.Tensor]], weights: Sequence[float]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weighted mean of the sources, tensor by tensor, in float32, in the order of the first source.

    Computed as the first source plus weighted differences: equal sources give their value to the bit. Weights are
    finite, not negative, and not all 0 (ValueError). Raises MismatchError when the sources differ in names or shapes,
    DataError naming source and tensor for values that are not finite (C27).
    """
    total = math.fsum(weights)
    usable = all(math.isfinite(weight) and weight >= 0 for weight in weights)
    if len(weights) != len(sources) or not usable or total <= 0:
        raise ValueError(f"{len(sources)} sources cannot be averaged with weights {list(weights)}")
    shapes = [{name: tuple(tensor.shape) for name, tensor in source.items()} for source in sources]
    for index, other in enumerate(shapes[1:], start=1):
        _check_same(shapes[0], other, index)
    for name, first in sources[0].items():
        start = _source(name, first, 0)
        mean = start.clone()
        for index, (source, weight) in enumerate(zip(sources[1:], weights[1:], strict=True), start=1):
            mean.add_(_source(name, source[name], index) - start, alpha=weight / total)
        yield name, mean


def _source(name: str, tensor: torch.Tensor, index: int) -> torch.Tensor:
    check_finite(f"{name} of source {index}", tensor)
    return tensor.detach().to(device="cpu", dtype=torch.float32)


def _check_same(
    first: Mapping[str, tuple[int, ...]], other: Mapping[str, tuple[int, ...]], index: int
) -> None:
    for name in [*first, *(name for name in other if name not in first)]:
        if first.get(name) != other.get(name):
            raise MismatchError(
                f"source {index} cannot be averaged with source 0: {name} is {_words(other.get(name))}, "
                f"expected {_words(first.get(name))}"
            )


def _words(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))


def _specs(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: spec_of(tensor) for name, tensor in tensors.items()}


def _read(
    store: BundleStore, name: str, file: str, expected: Mapping[str, TensorSpec] | None
) -> dict[str, torch.Tensor]:
    path = store.path(name, file)
    if expected is not None:
        check_specs(read_specs(path), expected, f"{file} of bundle {name}")
    return read_tensors(path)
