"""Codecs by their names, and the checks on what comes from others."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from meshd.errors import ConfigError, MismatchError
from meshd.proto import meshd_pb2 as pb
from meshd.wire.codec import DTYPES, Codec, CodecContext, Frame, Quantized, checksum_start
from meshd.wire.masked import Masked
from meshd.wire.plain import Dense, Integer
from meshd.wire.spec import PRESETS, parse

_PLAIN: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Dense("dense", torch.bfloat16),
        Dense("dense32", torch.float32),
        Integer("int8", 8),
        Integer("int4", 4),
    )
}

# A prior's name: its SHA-256.
PRIOR_BYTES = 32


@lru_cache(maxsize=256)
def codec_named(name: str, field: str = "wire") -> Codec:
    """The codec of that name: `dense` (bf16), `dense32`, `int8`, `int4`, or one of the masked family
    (`meshd.wire.spec`). Raises ConfigError; `field` says where the name was given."""
    if name in _PLAIN:
        return _PLAIN[name]
    if name.partition(":")[0] not in PRESETS:
        known = ", ".join(sorted([*_PLAIN, *PRESETS]))
        raise ConfigError(field, name[:64], "no such codec", f"one of {known}")
    return Masked(name, parse(name, field))


def check_header(header: pb.TensorHeader, shape: Sequence[int]) -> Codec:
    """Check a header before memory is reserved for its payload. Returns its codec.

    shape: what the run spec says must come. Raises MismatchError naming what is wrong.
    """
    try:
        codec = codec_named(header.codec, "codec")
    except ConfigError as error:
        raise MismatchError(str(error)) from None
    if header.dtype not in DTYPES:
        raise MismatchError(f"dtype {header.dtype[:64]!r} is not one of {', '.join(DTYPES)}")
    if list(header.shape) != list(shape):
        raise MismatchError(f"shape {list(header.shape)[:8]} where {list(shape)} was expected")
    if len(header.prior) not in (0, PRIOR_BYTES):
        raise MismatchError(f"a prior's name of {len(header.prior)} bytes where {PRIOR_BYTES} are expected")
    if codec.needs_prior and not header.prior:
        raise MismatchError(f"codec {codec.name} without the prior that it was written with")
    if not 0 < header.payload_bytes <= codec.wire_bytes(shape):
        raise MismatchError(
            f"payload of {header.payload_bytes} bytes where {codec.name} takes {codec.wire_bytes(shape)}"
        )
    return codec


def read(frame: Frame, context: CodecContext) -> Readied:
    """CPU half of decoding, with the codec that the frame names.

    Raises MismatchError for a frame that fails its checksum, or was written with a prior that the context has not.
    """
    codec = check_header(frame.header, frame.header.shape)
    checksum = zlib.crc32(frame.payload, checksum_start(frame.header))
    if len(frame.payload) != frame.header.payload_bytes or checksum != frame.header.checksum:
        raise MismatchError(f"{codec.name} payload fails its checksum")
    if codec.needs_prior and (context.prior is None or context.prior.name != frame.header.prior):
        raise MismatchError(
            f"{codec.name} payload of prior {frame.header.prior.hex()[:16]}, which is not here"
        )
    return Readied(codec, codec.read(frame, context), context)


@dataclass(frozen=True)
class Readied:
    """A frame after the CPU half of decoding."""

    codec: Codec
    quantized: Quantized
    context: CodecContext

    def tensor(self, device: torch.device) -> torch.Tensor:
        """Device half of decoding. Raises MismatchError for bytes that mean nothing, or no finite values."""
        tensor = self.codec.dequantize(self.quantized, self.context, device)
        if not bool(torch.isfinite(tensor).all()):
            raise MismatchError(f"{self.codec.name} payload holds values that are not finite")
        return tensor


def decode(frame: Frame, context: CodecContext, device: torch.device) -> torch.Tensor:
    """Both halves of decoding. Finite, in the shape and dtype of the header, or MismatchError: never garbage."""
    return read(frame, context).tensor(device)
