"""Files of priors as strangers give them: safetensors, with the name, size, tensors' names, shapes, dtypes and values
checked before anything is used. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import safetensors
import torch
from safetensors import SafetensorError

from meshd.errors import MismatchError

LARGEST = 2.0**40
"""Floating values are below it, and above its negative."""

TYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
}
"""What a prior's tensors may be, by safetensors' names."""


class Spec(NamedTuple):
    """Shape, and dtype as safetensors calls it."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * TYPES[self.dtype].itemsize


def checked_name(data: bytes, most: int, name: bytes | None, what: str) -> bytes:
    """The name of a file of at most `most` bytes: its SHA-256. name: what that must be, when it is known.

    what: that the file is, for messages, here and below. Raises MismatchError.
    """
    if len(data) > most:
        raise MismatchError(f"{what} of {len(data)} bytes where {most} are the most")
    digest = hashlib.sha256(data).digest()
    if name is not None and digest != name:
        raise MismatchError(f"{what}: the bytes are {digest.hex()[:16]}, not {name.hex()[:16]}")
    return digest


def entries(data: bytes, most_header: int, what: str) -> dict[str, dict[str, Any]]:
    """A file's tensors as they are: shape, dtype and data by name. most_header: bytes. Raises MismatchError."""
    if int.from_bytes(data[:8], "little") > most_header:
        raise MismatchError(f"the header of {what} is damaged, or of another version")
    try:
        return dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError as fault:
        raise MismatchError(f"{what}: no safetensors file: {fault}") from None


def checked_tensors(
    found: Mapping[str, Mapping[str, Any]], specs: Mapping[str, Spec], what: str
) -> dict[str, torch.Tensor]:
    """The tensors of `entries`: exactly those of `specs`, finite and of no huge values. Raises MismatchError."""
    if found.keys() != specs.keys():
        strange = sorted(found.keys() ^ specs.keys())[0]
        raise MismatchError(f"{what}: tensor {strange[:128]!r} is missing or unknown")
    tensors = {}
    for name, spec in specs.items():
        it = Spec(tuple(found[name]["shape"]), found[name]["dtype"])
        if it != spec:
            raise MismatchError(
                f"{what}: {name} is {list(it.shape)} {it.dtype}, expected {list(spec.shape)} {spec.dtype}"
            )
        tensor = torch.frombuffer(found[name]["data"], dtype=TYPES[spec.dtype]).reshape(spec.shape)
        if tensor.is_floating_point() and not bool((tensor.abs() < LARGEST).all()):  # false for NaN as well
            raise MismatchError(f"{what}: {name} has values that are not finite, or over {LARGEST:g}")
        tensors[name] = tensor
    return tensors
