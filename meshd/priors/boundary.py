"""The codec prior of a boundary: what both sides need to encode and decode, immutable and named by its hash (DESIGN
section 3). It arrives from strangers: `from_bytes` checks everything that decoding relies on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch

from meshd.errors import MismatchError
from meshd.priors.files import LARGEST, TYPES, Spec, checked_name, checked_tensors, entries
from meshd.wire.entropy import CLASSES, SYMBOLS, Tables

FORMAT = 1
SCALE_LIMIT = 64 * 40
"""Scale indices are within +-SCALE_LIMIT: scales between 2**-40 and 2**40."""

_WHAT = "a prior"
# What stands in for zero where it divides.
_LEAST = 2.0**-40
_MOST_FACT = 2**62
_LEAST_COLUMN = 1 / 64
# The JSON header of a prior's file takes about 1,500.
_HEADER_BYTES = 4096

Direction = Literal["forward", "backward"]
_DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix in eight bits, as bases cross: values (R, C) int8, times rows (R,) and columns (C,) float32.

    Against bf16 it is half of the bytes, for 0.1 to 0.4 % more error at 0.5 to 1.3 bits a value (SmolLM2, layer 15).
    """

    values: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor

    @classmethod
    def of(cls, matrix: torch.Tensor) -> Packed:
        """matrix: (R, C), floating, of a basis.

        A channel with huge values has small entries, which take those values out of the other coordinates, and one
        large entry, in the coordinate of its own. By the column's median the small ones keep their precision; the
        large one costs that of its own row only, which is huge anyway.
        """
        size = matrix.abs().float()
        columns = size.median(0).values
        columns = columns.clamp_min(float(columns.mean()) * _LEAST_COLUMN).clamp_min(_LEAST)
        rows = (size / columns).amax(1).clamp_min(_LEAST) / 127
        values = matrix.float() / columns / rows[:, None]
        return cls(values.round().to(torch.int8), rows, columns)

    def matrix(self) -> torch.Tensor:
        """(R, C) float32."""
        return self.values * self.rows[:, None] * self.columns

    def on(self, device: torch.device) -> Packed:
        return Packed(self.values.to(device), self.rows.to(device), self.columns.to(device))


@dataclass(frozen=True, eq=False)
class Basis:
    """Coordinates of one direction, in order of falling scale; K of them, at most hidden.

    packed_encode: (K, hidden), packed_decode: (hidden, K), or None where decoding is the transpose. scale_index: (K,)
    int16, of the coordinates' scale after the per-token gain, round(64 * log2(scale)). tables: for the levels of
    z / (gain * step).
    """

    packed_encode: Packed
    packed_decode: Packed | None
    scale_index: torch.Tensor
    tables: Tables

    @property
    def encode(self) -> torch.Tensor:
        """(K, hidden) float32, made anew: z = encode @ x."""
        return self.packed_encode.matrix()

    @property
    def decode(self) -> torch.Tensor:
        """(hidden, K) float32, made anew: x = decode @ z."""
        return self.encode.T if self.packed_decode is None else self.packed_decode.matrix()

    @property
    def scale(self) -> torch.Tensor:
        """(K,) float32: what the indices mean."""
        return torch.exp2(self.scale_index.to(torch.float32) / 64)

    def on(self, device: torch.device) -> Basis:
        """The same with its tensors on another device."""
        decode = None if self.packed_decode is None else self.packed_decode.on(device)
        return Basis(self.packed_encode.on(device), decode, self.scale_index.to(device), self.tables)


@dataclass(frozen=True, eq=False)
class BoundaryPrior:
    """What is known of one boundary.

    boundary: number of the cut. tokens: how many it was fitted on. measured: the run's global tokens when it was.
    mean: (hidden,) float32, of h; predictor: (rank + 1, hidden) bf16, of h from [features, 1]. A token whose norm is
    over `outlier_norm` is an outlier: near `outlier_mean`, (hidden,) float32, and not meant for `forward`.
    `forward` has its own packed_decode; `backward.encode` is orthonormal, and decoding its transpose.
    name: SHA-256 of the bytes that cross; empty in a draft that is not `sealed` yet.
    """

    boundary: int
    tokens: int
    measured: int
    mean: torch.Tensor
    predictor: torch.Tensor
    outlier_norm: float
    outlier_mean: torch.Tensor
    forward: Basis
    backward: Basis
    name: bytes = b""
    _placed: dict[torch.device, BoundaryPrior] = field(default_factory=dict, repr=False)

    @property
    def hidden(self) -> int:
        return self.mean.shape[0]

    @property
    def rank(self) -> int:
        """Token features that the predictor takes."""
        return self.predictor.shape[0] - 1

    def basis(self, direction: Direction) -> Basis:
        return self.forward if direction == "forward" else self.backward

    def on(self, device: torch.device) -> BoundaryPrior:
        """The same with its tensors on `device`, copied there once."""
        if self.mean.device == device:
            return self
        if device not in self._placed:
            self._placed[device] = replace(
                self,
                mean=self.mean.to(device),
                predictor=self.predictor.to(device),
                outlier_mean=self.outlier_mean.to(device),
                forward=self.forward.on(device),
                backward=self.backward.on(device),
                _placed={},
            )
        return self._placed[device]

    def sealed(self) -> BoundaryPrior:
        """A draft, in the precision that crosses and named: what others get is what its author uses. On the CPU.

        Raises MismatchError when it is no valid prior.
        """
        return self.from_bytes(self.to_bytes(), self.hidden, self.rank)

    def to_bytes(self) -> bytes:
        """The file that crosses. Relays pass on the bytes that they got: another version may write others."""
        facts = [FORMAT, self.boundary, self.tokens, self.measured]
        tensors = {
            "facts": torch.tensor(facts, dtype=torch.int64),
            "mean": self.mean,
            "predictor": self.predictor,
            "outlier_norm": torch.tensor([self.outlier_norm]),
            "outlier_mean": self.outlier_mean,
        }
        for name, matrix in (
            ("forward.encode", self.forward.packed_encode),
            ("forward.decode", self.forward.packed_decode),
            ("backward.encode", self.backward.packed_encode),
        ):
            assert matrix is not None
            tensors[name] = matrix.values
            tensors[f"{name}.rows"], tensors[f"{name}.columns"] = matrix.rows, matrix.columns
        for direction in _DIRECTIONS:
            basis = self.basis(direction)
            tensors[f"{direction}.scale_index"] = basis.scale_index
            tensors[f"{direction}.tables"] = torch.from_numpy(basis.tables.to_array().astype(np.int32))
        specs = _specs(self.hidden, self.rank, len(self.forward.scale_index), len(self.backward.scale_index))
        written = {
            name: tensor.detach().to("cpu", TYPES[specs[name].dtype]).contiguous()
            for name, tensor in tensors.items()
        }
        data: bytes = safetensors.torch.save(written)
        return data

    @classmethod
    def from_bytes(cls, data: bytes, hidden: int, rank: int, name: bytes | None = None) -> BoundaryPrior:
        """Read a prior, with all that decoding relies on checked: sizes before anything is allocated, then names,
        shapes, dtypes and values.

        hidden, rank: of the run's model and token features. name: what the bytes must hash to. Raises MismatchError
        naming what is wrong.
        """
        digest = checked_name(data, most_bytes(hidden, rank), name, _WHAT)
        raw = _unpack(data, hidden, rank)
        version, boundary, tokens, measured = raw["facts"].tolist()
        if version != FORMAT:
            raise MismatchError(f"a prior of format {version}; this version reads {FORMAT}")
        if not (0 <= boundary <= _MOST_FACT and 0 <= tokens <= _MOST_FACT and 0 <= measured <= _MOST_FACT):
            raise MismatchError(f"a prior of boundary {boundary}, tokens {tokens}, measured at {measured}")
        outlier_norm = float(raw["outlier_norm"])
        if outlier_norm <= 0:
            raise MismatchError(f"a prior's outlier norm is {outlier_norm}")
        return cls(
            boundary,
            tokens,
            measured,
            raw["mean"],
            raw["predictor"],
            outlier_norm,
            raw["outlier_mean"],
            _basis(raw, "forward"),
            _basis(raw, "backward"),
            digest,
        )


def most_bytes(hidden: int, rank: int) -> int:
    """Bytes of the largest prior that fits a run: the most that is read of one."""
    return _HEADER_BYTES + sum(spec.bytes for spec in _specs(hidden, rank, hidden, hidden).values())


def _specs(hidden: int, rank: int, forward: int, backward: int) -> dict[str, Spec]:
    """Every tensor of a prior with so many coordinates in each direction."""
    specs = {
        "facts": Spec((4,), "I64"),
        "mean": Spec((hidden,), "F32"),
        "predictor": Spec((rank + 1, hidden), "BF16"),
        "outlier_norm": Spec((1,), "F32"),
        "outlier_mean": Spec((hidden,), "F32"),
        **_packed_specs("forward.decode", hidden, forward),
    }
    for direction, coded in zip(_DIRECTIONS, (forward, backward), strict=True):
        specs |= _packed_specs(f"{direction}.encode", coded, hidden)
        specs[f"{direction}.scale_index"] = Spec((coded,), "I16")
        specs[f"{direction}.tables"] = Spec((CLASSES, SYMBOLS), "I32")
    return specs


def _packed_specs(name: str, rows: int, columns: int) -> dict[str, Spec]:
    return {
        name: Spec((rows, columns), "I8"),
        f"{name}.rows": Spec((rows,), "F32"),
        f"{name}.columns": Spec((columns,), "F32"),
    }


def _unpack(data: bytes, hidden: int, rank: int) -> dict[str, torch.Tensor]:
    """The tensors of a prior, of the right names, shapes and dtypes, and finite. Raises MismatchError."""
    found = entries(data, _HEADER_BYTES, _WHAT)
    coded = [_coordinates(found, direction, hidden) for direction in _DIRECTIONS]
    return checked_tensors(found, _specs(hidden, rank, *coded), _WHAT)


def _coordinates(found: dict[str, dict[str, Any]], direction: Direction, hidden: int) -> int:
    name = f"{direction}.scale_index"
    shape = found[name]["shape"] if name in found else []
    if len(shape) != 1 or not 1 <= shape[0] <= hidden:
        raise MismatchError(
            f"a prior's {name} is of shape {shape[:8]}; 1 to {hidden} coordinates are expected"
        )
    return int(shape[0])


def _basis(raw: dict[str, torch.Tensor], direction: Direction) -> Basis:
    index = raw[f"{direction}.scale_index"]
    if int(index.min()) < -SCALE_LIMIT or int(index.max()) > SCALE_LIMIT:
        raise MismatchError(f"a prior's {direction}.scale_index is outside +-{SCALE_LIMIT}")
    if bool((index[1:] > index[:-1]).any()):
        raise MismatchError(f"a prior's {direction}.scale_index does not fall")
    encode = _packed(raw, f"{direction}.encode")
    decode = _packed(raw, "forward.decode") if direction == "forward" else None
    tables = Tables.from_array(raw[f"{direction}.tables"].numpy().astype(np.uint32))
    return Basis(encode, decode, index, tables)


def _packed(raw: dict[str, torch.Tensor], name: str) -> Packed:
    packed = Packed(raw[name], raw[f"{name}.rows"], raw[f"{name}.columns"])
    if 127 * float(packed.rows.abs().max()) * float(packed.columns.abs().max()) > LARGEST:
        raise MismatchError(f"a prior's {name} has values over {LARGEST:g}")
    return packed
