"""Codecs without a prior: `dense` (bf16), `dense32` (fp32) and `int8` (one scale per token)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshd.wire.codec import CodecContext, Frame, dtype_of, make_frame, register, tensor_bytes, tensor_from


class Dense:
    """Every value in one floating-point format. Size: 2 or 4 bytes per value, exact."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self._dtype = name, dtype

    def encode(self, tensor: torch.Tensor, context: CodecContext) -> Frame:
        return make_frame(self.name, tensor, tensor_bytes(tensor.detach().to(self._dtype)))

    def decode(self, frame: Frame, context: CodecContext, device: torch.device) -> torch.Tensor:
        raw = tensor_from(frame.payload, self._dtype, frame.header.shape)
        return raw.to(device=device, dtype=dtype_of(frame.header))

    def wire_bytes(self, shape: Sequence[int]) -> int:
        return self._dtype.itemsize * int(torch.Size(shape).numel())


class Int8:
    """Symmetric int8 with one fp32 scale per token: `value = level * scale`, scale = max |value| / 127.

    A token's own scale keeps the few tokens with huge norms (DESIGN section 3, outlier tokens) from costing the
    others their precision. Size: hidden + 4 bytes per token, exact: levels first, then scales.
    """

    name = "int8"

    def encode(self, tensor: torch.Tensor, context: CodecContext) -> Frame:
        values = tensor.detach().float()
        scale = values.abs().amax(-1, keepdim=True) / 127
        # A token of zeros (or of subnormals) has no usable scale; its levels are zero with any.
        levels = (
            (values / scale.clamp_min(torch.finfo(torch.float32).tiny))
            .round()
            .clamp(-127, 127)
            .to(torch.int8)
        )
        return make_frame(self.name, tensor, tensor_bytes(levels) + tensor_bytes(scale))

    def decode(self, frame: Frame, context: CodecContext, device: torch.device) -> torch.Tensor:
        shape = list(frame.header.shape)
        values = int(torch.Size(shape).numel())
        payload = memoryview(frame.payload)
        levels = tensor_from(payload[:values], torch.int8, shape)
        scale = tensor_from(payload[values:], torch.float32, [*shape[:-1], 1])
        return (levels.to(device).float() * scale.to(device)).to(dtype_of(frame.header))

    def wire_bytes(self, shape: Sequence[int]) -> int:
        values = int(torch.Size(shape).numel())
        return values + 4 * (values // shape[-1])


register(Dense("dense", torch.bfloat16))
register(Dense("dense32", torch.float32))
register(Int8())
