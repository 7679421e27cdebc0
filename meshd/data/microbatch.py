"""One microbatch of token ids, and its form on the wire (`Batch` in the proto).

Ids are packed without gaps, `bits` = ceil(log2 vocabulary) each: bit j of id i is bit i * bits + j of the
string, and bit n of the string is bit n % 8, least significant first, of byte n // 8. Masks are packed the
same way, one bit per value, row after row. Unused bits of a last byte are zero, so that equal microbatches are
equal bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from meshd.errors import MismatchError
from meshd.proto import meshd_pb2 as pb

Bits: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Microbatch:
    """Token ids of B sequences of T inputs, which labels count, and where documents begin.

    tokens: (B, T + 1) int64. label_mask: (B, T) bool over the labels; True counts in the loss.
    document_starts: (B, T) bool over the inputs, True where positions restart and attention may not look back
    beyond; None when documents are not separated. Raises ValueError when shapes or dtypes do not fit.
    """

    tokens: torch.Tensor
    label_mask: torch.Tensor
    document_starts: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2 or self.tokens.dtype != torch.int64 or self.tokens.shape[1] < 2:
            raise ValueError(f"tokens: (B, T + 1) int64 expected, got {_form(self.tokens)}")
        expected = (self.tokens.shape[0], self.tokens.shape[1] - 1)
        for name, mask in (("label_mask", self.label_mask), ("document_starts", self.document_starts)):
            if mask is not None and (tuple(mask.shape) != expected or mask.dtype != torch.bool):
                raise ValueError(f"{name}: {expected} bool expected, got {_form(mask)}")

    @property
    def inputs(self) -> torch.Tensor:
        """(B, T) int64."""
        return self.tokens[:, :-1]

    @property
    def labels(self) -> torch.Tensor:
        """(B, T) int64: the token after each input."""
        return self.tokens[:, 1:]

    @property
    def label_tokens(self) -> int:
        """Labels that count in the loss."""
        return int(self.label_mask.sum())

    def to_proto(self, vocabulary: int, seed: int) -> pb.Batch:
        """The wire form. `seed` (64 bits) is that of the generators of dropout and masks.

        Raises ValueError when an id is not in [0, vocabulary).
        """
        ids = self.tokens.cpu().numpy()
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= vocabulary:
            raise ValueError(f"token ids {ids.min()} to {ids.max()} do not fit a vocabulary of {vocabulary}")
        starts = self.document_starts
        return pb.Batch(
            rows=ids.shape[0],
            columns=ids.shape[1] - 1,
            bits=id_bits(vocabulary),
            ids=pack_ids(ids, id_bits(vocabulary)),
            label_mask=_pack_bits(self.label_mask.cpu().numpy()),
            document_starts=b"" if starts is None else _pack_bits(starts.cpu().numpy()),
            label_tokens=self.label_tokens,
            seed=seed,
        )

    @classmethod
    def from_proto(cls, batch: pb.Batch, *, vocabulary: int, rows: int, columns: int) -> Microbatch:
        """Read the wire form of a microbatch that must have `rows` sequences of `columns` inputs.

        Every size is compared with what the run says before anything is allocated. Raises MismatchError that
        names the field: a message that fails here comes from a peer of another run, or a broken or hostile one.
        """
        bits = id_bits(vocabulary)
        for field, found, expected in (
            ("rows", batch.rows, rows),
            ("columns", batch.columns, columns),
            ("bits", batch.bits, bits),
            ("bytes of ids", len(batch.ids), -(-rows * (columns + 1) * bits // 8)),
            ("bytes of label_mask", len(batch.label_mask), -(-rows * columns // 8)),
        ):
            if found != expected:
                raise _mismatch(field, found, expected)
        if len(batch.document_starts) not in (0, len(batch.label_mask)):
            expected_starts = f"0 or {len(batch.label_mask)}"
            raise _mismatch("bytes of document_starts", len(batch.document_starts), expected_starts)

        ids = unpack_ids(batch.ids, bits, rows * (columns + 1))
        if ids.max(initial=0) >= vocabulary:
            raise _mismatch("ids", f"id {ids.max()}", f"ids below the vocabulary of {vocabulary}")
        mask = _unpack_bits("label_mask", batch.label_mask, rows, columns)
        ones = int(mask.sum())
        if ones == 0 or ones != batch.label_tokens:
            # A mean over no labels has no value, so such a microbatch is as wrong as a false count.
            raise _mismatch("label_tokens", batch.label_tokens, f"{ones or 'at least 1'}, as in label_mask")
        starts = (
            _unpack_bits("document_starts", batch.document_starts, rows, columns)
            if batch.document_starts
            else None
        )
        return cls(
            tokens=torch.from_numpy(ids.reshape(rows, columns + 1)),
            label_mask=torch.from_numpy(mask),
            document_starts=None if starts is None else torch.from_numpy(starts),
        )


def id_bits(vocabulary: int) -> int:
    """Bits per token id: ceil(log2 vocabulary), at least 1."""
    return max(1, (vocabulary - 1).bit_length())


def pack_ids(ids: npt.NDArray[np.int64], bits: int) -> bytes:
    """Ids of any shape, each in [0, 2**bits) with bits <= 32, as ceil(size * bits / 8) bytes."""
    octets = ids.astype("<u4").reshape(-1, 1).view(np.uint8)
    return np.packbits(
        np.unpackbits(octets, axis=1, count=bits, bitorder="little"), bitorder="little"
    ).tobytes()


def unpack_ids(data: bytes, bits: int, count: int) -> npt.NDArray[np.int64]:
    """The inverse of `pack_ids`: (count,) int64. Raises MismatchError when unused bits are set."""
    stream = _all_bits("ids", data, count * bits)
    wide = np.zeros((count, 32), dtype=np.uint8)
    wide[:, :bits] = stream.reshape(count, bits)
    return np.packbits(wide, axis=1, bitorder="little").view("<u4").reshape(count).astype(np.int64)


def _pack_bits(mask: Bits) -> bytes:
    return np.packbits(mask.reshape(-1), bitorder="little").tobytes()


def _unpack_bits(field: str, data: bytes, rows: int, columns: int) -> Bits:
    return _all_bits(field, data, rows * columns).astype(np.bool_).reshape(rows, columns)


def _all_bits(field: str, data: bytes, count: int) -> npt.NDArray[np.uint8]:
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")
    if bits[count:].any():
        raise _mismatch(field, "bits set after the last value", "zeros there")
    return bits[:count]


def _mismatch(field: str, found: object, expected: object) -> MismatchError:
    return MismatchError(f"microbatch.{field}: got {found}, expected {expected}")


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
