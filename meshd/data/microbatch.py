"""One microbatch of token ids, and its form on the wire (`Batch` in the proto).

Ids are packed without gaps, `bits` = ceil(log2 vocabulary) each, masks with one bit per value, row after row, as
`meshd.wire.bits` packs everything: equal microbatches are equal bytes.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import torch

from meshd.errors import MismatchError
from meshd.proto import meshd_pb2 as pb
from meshd.wire.bits import pack, packed_bytes, unpack


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
        ids = self.tokens
        if ids.numel() and (ids.min() < 0 or ids.max() >= vocabulary):
            raise ValueError(f"token ids {ids.min()} to {ids.max()} do not fit a vocabulary of {vocabulary}")
        starts = self.document_starts
        batch = pb.Batch(
            rows=ids.shape[0],
            columns=ids.shape[1] - 1,
            bits=id_bits(vocabulary),
            ids=_packed(ids, id_bits(vocabulary)),
            label_mask=_packed(self.label_mask, 1),
            document_starts=b"" if starts is None else _packed(starts, 1),
            label_tokens=self.label_tokens,
            seed=seed,
        )
        batch.checksum = checksum_of(batch)
        return batch

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
            ("bytes of ids", len(batch.ids), packed_bytes(rows * (columns + 1), bits)),
            ("bytes of label_mask", len(batch.label_mask), packed_bytes(rows * columns, 1)),
        ):
            if found != expected:
                raise _mismatch(field, found, expected)
        if len(batch.document_starts) not in (0, len(batch.label_mask)):
            expected_starts = f"0 or {len(batch.label_mask)}"
            raise _mismatch("bytes of document_starts", len(batch.document_starts), expected_starts)

        ids = _unpack("ids", batch.ids, bits, (rows, columns + 1)).long()
        if ids.max() >= vocabulary:
            raise _mismatch("ids", f"id {ids.max()}", f"ids below the vocabulary of {vocabulary}")
        mask = _unpack("label_mask", batch.label_mask, 1, (rows, columns)).bool()
        ones = int(mask.sum())
        if ones == 0 or ones != batch.label_tokens:
            # A mean over no labels has no value, so such a microbatch is as wrong as a false count.
            raise _mismatch("label_tokens", batch.label_tokens, f"{ones or 'at least 1'}, as in label_mask")
        starts = (
            _unpack("document_starts", batch.document_starts, 1, (rows, columns)).bool()
            if batch.document_starts
            else None
        )
        if batch.checksum != checksum_of(batch):
            # Other ids than the sender's would train a stage on other data, and predict another hidden state.
            raise _mismatch(
                "checksum", f"{batch.checksum:08x}", f"{checksum_of(batch):08x}: damaged on the way"
            )
        return cls(
            tokens=ids,
            label_mask=mask,
            document_starts=starts,
        )


def id_bits(vocabulary: int) -> int:
    """Bits per token id: ceil(log2 vocabulary), at least 1."""
    return max(1, (vocabulary - 1).bit_length())


def checksum_of(batch: pb.Batch) -> int:
    """What its field `checksum` must hold."""
    numbers = (batch.rows, batch.columns, batch.bits, batch.label_tokens, batch.seed)
    start = zlib.crc32(struct.pack("<5Q", *numbers))
    for data in (batch.ids, batch.label_mask, batch.document_starts):
        start = zlib.crc32(data, start)
    return start


def _packed(values: torch.Tensor, bits: int) -> bytes:
    return pack(values.cpu(), bits).numpy().tobytes()


def _unpack(field: str, data: bytes, bits: int, shape: tuple[int, int]) -> torch.Tensor:
    """Values of `bits` bits of the field, int32, in that shape."""
    packed = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        return unpack(packed, bits, shape[0] * shape[1]).view(shape)
    except MismatchError as error:
        raise MismatchError(f"microbatch.{field}: {error}") from error


def _mismatch(field: str, found: object, expected: object) -> MismatchError:
    return MismatchError(f"microbatch.{field}: got {found}, expected {expected}")


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
