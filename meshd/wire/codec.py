"""What crosses a boundary: the codec interface, its registry, and the checks every codec shares.

A codec turns the hidden state (or its gradient) of one microbatch into a `Frame`: a small header and raw bytes.
The header names the codec, so a receiver decodes what it was sent, whatever its own run spec says, and refuses what
it does not know (DESIGN section 3).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from meshd.errors import ConfigError, MismatchError
from meshd.proto import meshd_pb2 as pb

Direction = Literal["forward", "backward"]

# Formats a tensor may have on either side, by their names in the header.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class CodecContext:
    """What both ends know besides the frame.

    boundary: number of the cut; direction: of the tensor; ids: (rows, tokens) input token ids; seed: of the
    microbatch, for codecs with shared randomness.
    """

    boundary: int
    direction: Direction
    ids: torch.Tensor
    seed: int


@dataclass(frozen=True)
class Frame:
    """One encoded tensor. `payload` is at most what `Codec.wire_bytes` says."""

    header: pb.TensorHeader
    payload: bytes


class Codec(Protocol):
    """Stateless between calls; runs on the tensor's device, called from the device's thread."""

    name: str

    def encode(self, tensor: torch.Tensor, context: CodecContext) -> Frame:
        """tensor: (rows, tokens, hidden), finite."""

    def decode(self, frame: Frame, context: CodecContext, device: torch.device) -> torch.Tensor:
        """The tensor in the shape and dtype of the header. Raises MismatchError for bytes that are not a frame of
        this codec; never returns garbage for a frame that fails its checksum."""

    def wire_bytes(self, shape: Sequence[int]) -> int:
        """Size of the payload of a tensor of this shape: exact for fixed-rate codecs, else an upper bound."""


_registry: dict[str, Codec] = {}


def register(codec: Codec) -> Codec:
    """Make a codec known by its name."""
    _registry[codec.name] = codec
    return codec


def codec_named(name: str, field: str = "wire") -> Codec:
    """The codec of that name. Raises ConfigError with the known names; `field` says where the name was given."""
    if name not in _registry:
        raise ConfigError(field, name, "no such codec", f"one of {', '.join(sorted(_registry))}")
    return _registry[name]


def make_frame(codec: str, tensor: torch.Tensor, payload: bytes) -> Frame:
    """Frame of `tensor` (for its shape and dtype) with a checksum."""
    header = pb.TensorHeader(
        codec=codec,
        shape=list(tensor.shape),
        dtype=_NAMES[tensor.dtype],
        payload_bytes=len(payload),
        checksum=zlib.crc32(payload),
    )
    return Frame(header, payload)


def check_header(header: pb.TensorHeader, shape: Sequence[int]) -> Codec:
    """Check a header before memory is reserved for its payload. Returns its codec.

    shape: what the run spec says must come. Raises MismatchError naming what is wrong.
    """
    codec = _registry.get(header.codec)
    if codec is None:
        raise MismatchError(
            f"codec {header.codec[:64]!r} is not known here; known: {', '.join(sorted(_registry))}"
        )
    if header.dtype not in DTYPES:
        raise MismatchError(f"dtype {header.dtype[:64]!r} is not one of {', '.join(DTYPES)}")
    if list(header.shape) != list(shape):
        raise MismatchError(f"shape {list(header.shape)[:8]} where {list(shape)} was expected")
    if not 0 < header.payload_bytes <= codec.wire_bytes(shape):
        raise MismatchError(
            f"payload of {header.payload_bytes} bytes where {codec.name} takes {codec.wire_bytes(shape)}"
        )
    return codec


def decode(frame: Frame, context: CodecContext, device: torch.device) -> torch.Tensor:
    """Decode with the codec that the frame names. The result is finite, or MismatchError is raised."""
    codec = check_header(frame.header, frame.header.shape)
    if len(frame.payload) != frame.header.payload_bytes or zlib.crc32(frame.payload) != frame.header.checksum:
        raise MismatchError(f"{codec.name} payload fails its checksum")
    tensor = codec.decode(frame, context, device)
    if not bool(torch.isfinite(tensor).all()):
        raise MismatchError(f"{codec.name} payload holds values that are not finite")
    return tensor


def dtype_of(header: pb.TensorHeader) -> torch.dtype:
    return DTYPES[header.dtype]


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Raw bytes of a tensor, row-major."""
    return tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()


def tensor_from(payload: bytes | memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor over a copy of raw bytes. Raises MismatchError when their number does not fit."""
    want = dtype.itemsize * int(torch.Size(shape).numel())
    if len(payload) != want:
        raise MismatchError(f"{len(payload)} bytes where {want} were expected")
    return torch.frombuffer(bytearray(payload), dtype=dtype).reshape(tuple(shape))
