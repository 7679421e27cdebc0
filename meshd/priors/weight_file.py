"""The weight priors of one stage as a file: safetensors, immutable, named by its SHA-256 (DESIGN section 4). It arrives
from strangers: `from_bytes` checks everything that correctors and `merged` rely on."""

from __future__ import annotations

from collections.abc import Mapping

import safetensors.torch
import torch

from meshd.errors import MismatchError
from meshd.priors.factors import (
    basis_bytes,
    packed_basis,
    packed_shares,
    unpacked_basis,
    unpacked_shares,
)
from meshd.priors.files import Spec, checked_name, checked_tensors, entries
from meshd.priors.weight import Triplets, WeightPrior, summed

FORMAT = 2

_WHAT = "weight priors"
# Of a tensor's entry in the JSON header, beside its name.
_HEADER_BYTES, _ENTRY_BYTES = 4096, 128

# rest, norm, mean_norm, agreement
_SCALARS = 4


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
    checked_name(data, most_bytes(shapes, rank), name, _WHAT)
    specs = _specs(shapes, rank)
    tensors = checked_tensors(entries(data, _header_bytes(specs), _WHAT), specs, _WHAT)
    raw = {part: tensor.float() if tensor.is_floating_point() else tensor for part, tensor in tensors.items()}
    version, said = raw["facts"].tolist()
    if version != FORMAT:
        raise MismatchError(f"weight priors of format {version}; this version reads {FORMAT}")
    if said != stage:
        raise MismatchError(f"weight priors of stage {said} where those of stage {stage} were expected")
    return {weight: _prior(weight, shape, raw) for weight, shape in shapes.items()}


def most_bytes(shapes: Mapping[str, torch.Size], rank: int) -> int:
    """Bytes of the largest file that fits a stage: the most that is read of one."""
    specs = _specs(shapes, rank)
    return 8 + _header_bytes(specs) + sum(spec.bytes for spec in specs.values())


def _header_bytes(specs: Mapping[str, Spec]) -> int:
    # A name of several bytes a character takes six of them in JSON.
    return _HEADER_BYTES + sum(_ENTRY_BYTES + 6 * len(name) for name in specs)


def _specs(shapes: Mapping[str, torch.Size], rank: int) -> dict[str, Spec]:
    """Every tensor of a stage's file."""
    specs = {"facts": Spec((2,), "I64")}
    for name, (rows, columns) in shapes.items():
        r = min(rank, rows, columns)
        specs[f"{name}/u"] = Spec((basis_bytes(rows, r),), "U8")
        specs[f"{name}/s"] = Spec((r,), "BF16")
        specs[f"{name}/v"] = Spec((basis_bytes(columns, r),), "U8")
        specs[f"{name}/power"] = Spec((r, r), "U8")
        specs[f"{name}/scalars"] = Spec((_SCALARS,), "F32")
    return specs


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
