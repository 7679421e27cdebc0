"""The weight priors of one stage as a file: safetensors, immutable, named by its SHA-256 (DESIGN section 4). It arrives
from strangers: `from_bytes` checks everything that correctors and `merged` rely on."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError

from meshd.errors import MismatchError
from meshd.priors.factors import (
    basis_bytes,
    packed_basis,
    packed_shares,
    unpacked_basis,
    unpacked_shares,
)
from meshd.priors.weight import Triplets, WeightPrior, summed

FORMAT = 2

_LARGEST = 2.0**40
# Of a tensor's entry in the JSON header, beside its name.
_HEADER_BYTES, _ENTRY_BYTES = 4096, 128
_TYPES = {"I64": torch.int64, "F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}

# rest, norm, mean_norm, agreement
_SCALARS = 4


class _Spec(NamedTuple):
    """Shape, and dtype as safetensors calls it."""

    shape: tuple[int, ...]
    dtype: str


def to_bytes(stage: int, priors: Mapping[str, WeightPrior]) -> bytes:
    """The file of a stage's weight priors, by the weights' whole-model names. `bias` is left out."""
    tensors = {"facts": torch.tensor([FORMAT, stage], dtype=torch.int64)}
    for name, prior in priors.items():
        tensors[f"{name}/u"], tensors[f"{name}/v"] = packed_basis(prior.u), packed_basis(prior.v)
        tensors[f"{name}/s"] = prior.s.detach().to("cpu", torch.bfloat16)
        tensors[f"{name}/power"] = packed_shares(prior.power)
        tensors[f"{name}/scalars"] = torch.tensor([prior.rest, prior.norm, prior.mean_norm, prior.agreement])
    data: bytes = safetensors.torch.save(tensors)
    return data


def from_bytes(
    data: bytes, stage: int, shapes: Mapping[str, torch.Size], rank: int, name: bytes | None = None
) -> dict[str, WeightPrior]:
    """Read one: priors in float32 on the CPU, by the weights' names, all of `shapes`.

    shapes: (m, n) of the stage's corrected weights. rank: of the run; of a weight min(rank, m, n). name: what the bytes
    must hash to. Raises MismatchError naming what is wrong.
    """
    if len(data) > most_bytes(shapes, rank):
        raise MismatchError(
            f"weight priors of {len(data)} bytes where {most_bytes(shapes, rank)} are the most"
        )
    digest = hashlib.sha256(data).digest()
    if name is not None and digest != name:
        raise MismatchError(f"weight priors' bytes are {digest.hex()[:16]}, not {name.hex()[:16]}")
    raw = _unpack(data, shapes, rank)
    version, said = raw["facts"].tolist()
    if version != FORMAT:
        raise MismatchError(f"weight priors of format {version}; this version reads {FORMAT}")
    if said != stage:
        raise MismatchError(f"weight priors of stage {said} where those of stage {stage} were expected")
    return {weight: _prior(weight, shape, raw) for weight, shape in shapes.items()}


def most_bytes(shapes: Mapping[str, torch.Size], rank: int) -> int:
    """Bytes of the largest file that fits a stage: the most that is read of one."""
    specs = _specs(shapes, rank)
    sizes = sum(math.prod(spec.shape) * _TYPES[spec.dtype].itemsize for spec in specs.values())
    return 8 + _header_bytes(specs) + sizes


def _header_bytes(specs: Mapping[str, _Spec]) -> int:
    # A name of several bytes a character takes six of them in JSON.
    return _HEADER_BYTES + sum(_ENTRY_BYTES + 6 * len(name) for name in specs)


def _specs(shapes: Mapping[str, torch.Size], rank: int) -> dict[str, _Spec]:
    """Every tensor of a stage's file."""
    specs = {"facts": _Spec((2,), "I64")}
    for name, (rows, columns) in shapes.items():
        r = min(rank, rows, columns)
        specs[f"{name}/u"] = _Spec((basis_bytes(rows, r),), "U8")
        specs[f"{name}/s"] = _Spec((r,), "BF16")
        specs[f"{name}/v"] = _Spec((basis_bytes(columns, r),), "U8")
        specs[f"{name}/power"] = _Spec((r, r), "U8")
        specs[f"{name}/scalars"] = _Spec((_SCALARS,), "F32")
    return specs


def _unpack(data: bytes, shapes: Mapping[str, torch.Size], rank: int) -> dict[str, torch.Tensor]:
    """The tensors, of the right names, shapes and dtypes, finite and of no huge size. Raises MismatchError."""
    specs = _specs(shapes, rank)
    if int.from_bytes(data[:8], "little") > _header_bytes(specs):
        raise MismatchError("the header of weight priors is damaged, or of another version")
    try:
        found = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError as fault:
        raise MismatchError(f"weight priors are no safetensors file: {fault}") from None
    if found.keys() != specs.keys():
        strange = sorted(found.keys() ^ specs.keys())[0]
        raise MismatchError(f"weight priors: tensor {strange[:128]!r} is missing or unknown")
    tensors = {}
    for name, spec in specs.items():
        it = _Spec(tuple(found[name]["shape"]), found[name]["dtype"])
        if it != spec:
            raise MismatchError(
                f"weight priors: {name} is {list(it.shape)} {it.dtype}, expected {list(spec.shape)} {spec.dtype}"
            )
        tensor = torch.frombuffer(found[name]["data"], dtype=_TYPES[spec.dtype]).reshape(spec.shape)
        if tensor.is_floating_point():
            if not bool((tensor.abs() < _LARGEST).all()):  # false for NaN as well
                raise MismatchError(
                    f"weight priors: {name} has values that are not finite, or over {_LARGEST:g}"
                )
            tensor = tensor.float()
        tensors[name] = tensor
    return tensors


def _prior(name: str, shape: torch.Size, raw: Mapping[str, torch.Tensor]) -> WeightPrior:
    s, power = raw[f"{name}/s"], unpacked_shares(raw[f"{name}/power"])
    rest, norm, mean_norm, agreement = raw[f"{name}/scalars"].tolist()
    if float(s.min()) < 0 or bool((s[1:] > s[:-1]).any()):
        raise MismatchError(f"weight priors: {name}/s does not fall, or is below 0")
    inside = float(power.sum())
    if not 0 <= rest <= 1 or (inside == 0 and rest < 1):
        raise MismatchError(f"weight priors: the shares of {name} are {inside:.3g} and {rest:.3g}")
    if norm < 0 or mean_norm < 0 or not -1 <= agreement <= 1:
        raise MismatchError(
            f"weight priors: {name} has norms {norm:.3g} and {mean_norm:.3g}, agreement {agreement:.3g}"
        )
    u, v = (unpacked_basis(raw[f"{name}/{side}"], n, len(s)) for side, n in zip("uv", shape, strict=True))
    # Bases that are orthonormal, whatever quantization (or a stranger) has made of them, and a mean of the norm that it
    # had. They turn a little on the way, shares do not.
    u, s, v = summed([(Triplets(u, s, v), 1.0)])
    s = s * (raw[f"{name}/s"].norm() / s.norm().clamp_min(torch.finfo(torch.float32).tiny))
    power = power * ((1 - rest) / inside if inside else 0.0)
    return WeightPrior(u, s, v, power, rest, norm, mean_norm, agreement)
