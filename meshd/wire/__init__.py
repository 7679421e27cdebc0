"""Codecs. Importing the package registers all of them."""

from meshd.wire import plain as plain
from meshd.wire.codec import Codec, CodecContext, Frame, check_header, codec_named, decode

__all__ = ["Codec", "CodecContext", "Frame", "check_header", "codec_named", "decode"]
