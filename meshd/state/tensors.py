"""Tensors in safetensors files: written one at a time, read through a memory map.

The library's own writer copies every tensor before it writes the first; a daemon that saves its optimizer's moments has
no room for that. The form is simple: 8 bytes of header length (little-endian), a JSON header, the raw data.
Blocking: call in a thread.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from meshd.errors import DataError, MismatchError

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {code: dtype for dtype, code in _CODES.items()}
_WRITE_BYTES = 8 << 20


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def write_tensors(
    path: Path, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write a safetensors file of the tensors in `specs`, which come in that order from `tensors`.

    Holds one tensor at a time, beyond what the caller holds. Raises DataError when one is not as its spec says, has
    values that are not finite, or a dtype without a place in the format; OSError as the disk does.
    """
    header, offset = {}, 0
    for name, spec in specs.items():
        if spec.dtype not in _CODES:
            raise DataError(f"tensor {name}: dtype {spec.dtype} cannot be stored")
        end = offset + spec.size_bytes
        header[name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begins aligned
    remaining = iter(specs.items())
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in tensors:
            wanted = next(remaining, None)
            if wanted != (name, spec_of(tensor)):
                raise DataError(f"tensor {name} ({spec_of(tensor)}) came where {wanted} was announced")
            check_finite(name, tensor)
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(raw), _WRITE_BYTES):
                file.write(raw[start : start + _WRITE_BYTES])
    missing = next(remaining, None)
    if missing is not None:
        raise DataError(f"tensor {missing[0]} was announced and did not come")


def read_specs(path: Path) -> dict[str, TensorSpec]:
    """Names (in order), shapes and dtypes in a safetensors file, without its data. Raises DataError for other files."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return {
                name: TensorSpec(tuple(s.get_shape()), _TYPES[s.get_dtype()]) for name, s in slices.items()
            }
    except (SafetensorError, KeyError) as fault:
        raise DataError(f"{path} is no safetensors file that can be used: {fault}") from fault


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, mapped: pages come from the disk when they are touched.

    Writing to a tensor changes this process's copy only. The tensors stay valid when the file is deleted. Raises
    DataError when it is not a safetensors file, or has tensors of types that are not used here.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            strange = {file.get_slice(name).get_dtype() for name in names} - set(_CODES.values())
            if strange:
                # Of other peers' making: few operations know types such as F8_E4M3.
                raise DataError(
                    f"{path} has tensors of types that are not used here: {', '.join(sorted(strange))}"
                )
            return {name: file.get_tensor(name) for name in names}
    except SafetensorError as fault:
        raise DataError(f"{path} is no safetensors file that can be used: {fault}") from fault


def check_specs(found: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec], where: str) -> None:
    """Raises MismatchError naming the first tensors that are missing, too many or of another shape or dtype (C07)."""
    problems = [f"{name} is missing (expected {expected[name]})" for name in expected if name not in found]
    problems += [f"{name} ({found[name]}) is not expected" for name in found if name not in expected]
    problems += [
        f"{name} is {found[name]}, expected {spec}"
        for name, spec in expected.items()
        if name in found and found[name] != spec
    ]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise MismatchError(
            f"{where} does not fit this stage: {'; '.join(problems[:3])}{more}. "
            "Fix: check that model, cut and dtype are those of the run that wrote it"
        )


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raises DataError naming the tensor when it holds NaN or infinity (C27)."""
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise DataError(f"tensor {name} has values that are not finite; it is neither stored nor taken")
