"""Codecs: what crosses a boundary, and how it is written (DESIGN section 3)."""

from meshd.wire.codec import Codec, CodecContext, Draft, Frame, Quantized, checksum_start
from meshd.wire.named import Readied, check_header, codec_named, decode, read
from meshd.wire.rate import RateLoop

__all__ = [
    "Codec",
    "CodecContext",
    "Draft",
    "Frame",
    "Quantized",
    "RateLoop",
    "Readied",
    "check_header",
    "checksum_start",
    "codec_named",
    "decode",
    "read",
]
