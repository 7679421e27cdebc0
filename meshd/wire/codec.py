"""What crosses a boundary: the codec interface and the frame. `meshd.wire.named` knows the codecs by name.

A codec turns the hidden state (or its gradient) of one microbatch into a `Frame`: a small header and raw bytes.
The header names the codec and the prior, so a receiver decodes what it was sent, whatever its own run spec says, and
refuses what it does not know (DESIGN section 3).

Both ways have two halves: one on the tensor's device (`quantize`, `dequantize`), one on the CPU (`write`, `read`: the
entropy coder), so that the device need not wait for the other.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from meshd.errors import MismatchError
from meshd.proto import meshd_pb2 as pb
from meshd.wire.rate import RateLoop

if TYPE_CHECKING:
    from meshd.priors.boundary import BoundaryPrior
    from meshd.priors.features import TokenFeatures

Direction = Literal["forward", "backward"]

# Formats a tensor may have on either side, by their names in the header.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class CodecContext:
    """What both ends know besides the frame.

    boundary: number of the cut; direction: of the tensor; ids: (rows, tokens) input token ids; seed: of the
    microbatch, for codecs with shared randomness. prior: of the boundary. At the sender: the one to encode with, None
    before there is one; at the receiver: the one that the frame names. features: of the run's vocabulary, on the
    tensor's device, for priors that predict from tokens. outliers: for the way back, at its sender: the tokens
    (rows * tokens,) that the frame on the way there had marked (`Codec.outliers`).
    """

    boundary: int
    direction: Direction
    ids: torch.Tensor
    seed: int
    prior: BoundaryPrior | None = None
    features: TokenFeatures | None = None
    outliers: torch.Tensor | None = None

    @property
    def prior_name(self) -> bytes:
        """What a frame says of it, whatever its codec: the way back may need it."""
        return b"" if self.prior is None else self.prior.name


@dataclass(frozen=True)
class Frame:
    """One encoded tensor. `payload` is at most what `Codec.wire_bytes` says."""

    header: pb.TensorHeader
    payload: bytes


@dataclass(frozen=True)
class Quantized:
    """A tensor between the halves, on the CPU. raw: what crosses as it is; prior: the name that the frame gives, empty
    for none."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    raw: bytes
    prior: bytes


@dataclass(frozen=True)
class Draft:
    """A tensor after the device half of encoding. quantized: of `codec`."""

    codec: Codec
    quantized: Quantized

    def frame(self) -> Frame:
        """The CPU half."""
        return self.codec.write(self.quantized)


class Codec(ABC):
    """Stateless; the same object serves every boundary and both directions."""

    name: str

    @abstractmethod
    def quantize(
        self, tensor: torch.Tensor, context: CodecContext, rate: RateLoop | None = None
    ) -> Quantized:
        """Device half of encoding. tensor: (rows, tokens, hidden), finite. rate: the sender's loop that holds an
        entropy-coded rate at its budget; fixed-rate codecs do not look at it."""

    @abstractmethod
    def dequantize(self, quantized: Quantized, context: CodecContext, device: torch.device) -> torch.Tensor:
        """Device half of decoding: the tensor, in its shape and dtype. Raises MismatchError for bytes that are not
        of this codec."""

    @abstractmethod
    def wire_bytes(self, shape: Sequence[int]) -> int:
        """Size of the payload of a tensor of this shape: exact for fixed-rate codecs, else an upper bound."""

    @property
    def needs_prior(self) -> bool:
        """Whether it can encode nothing without a prior of the boundary."""
        return False

    def write(self, quantized: Quantized) -> Frame:
        """CPU half of encoding."""
        return make_frame(self.name, quantized, quantized.raw)

    def read(self, frame: Frame, context: CodecContext) -> Quantized:
        """CPU half of decoding. Raises MismatchError for what is not a frame of this codec."""
        header = frame.header
        return Quantized(tuple(header.shape), DTYPES[header.dtype], frame.payload, header.prior)

    def outliers(self, quantized: Quantized) -> torch.Tensor | None:
        """(rows * tokens,) bool: tokens coded apart, which the gradient's codec then codes apart as well."""
        return None

    def adjoint(self, gradient: torch.Tensor, context: CodecContext) -> torch.Tensor:
        """Gradient with respect to what was encoded, of a gradient with respect to what was decoded: the transpose of
        the linear part of encode and decode, quantization counted as the identity. Without masking it is the identity.

        gradient: (rows, tokens, hidden).
        """
        return gradient

    def encode(self, tensor: torch.Tensor, context: CodecContext, rate: RateLoop | None = None) -> Frame:
        """Both halves of encoding in one."""
        return self.write(self.quantize(tensor, context, rate))


def make_frame(codec: str, quantized: Quantized, payload: bytes) -> Frame:
    """Frame of a payload, with a checksum."""
    header = pb.TensorHeader(
        codec=codec,
        prior=quantized.prior,
        shape=list(quantized.shape),
        dtype=_NAMES[quantized.dtype],
        payload_bytes=len(payload),
    )
    header.checksum = zlib.crc32(payload, checksum_start(header))
    return Frame(header, payload)


def checksum_start(header: pb.TensorHeader) -> int:
    """What a payload's CRC-32 goes on from: that of what its meaning hangs on. Under another codec or prior the same
    bytes may well decode, to garbage."""
    shape = ",".join(map(str, header.shape))
    return zlib.crc32(f"{header.codec}\n{header.prior.hex()}\n{shape}\n{header.dtype}\n".encode())


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Raw bytes of a tensor, row-major."""
    return tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()


def tensor_from(payload: bytes | memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor over a copy of raw bytes. Raises MismatchError when their number does not fit."""
    want = dtype.itemsize * int(torch.Size(shape).numel())
    if len(payload) != want:
        raise MismatchError(f"{len(payload)} bytes where {want} were expected")
    if not want:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(bytearray(payload), dtype=dtype).reshape(tuple(shape))
