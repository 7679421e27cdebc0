"""Codecs without a prior: `dense` (bf16), `dense32` (fp32) and `int8` (one scale per token)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshd.wire.codec import (
    DTYPES,
    CodecContext,
    Frame,
    dtype_of,
    make_frame,
    register,
    tensor_bytes,
    tensor_from,
)


class Dense:
    """Every value in one floating-point format. Size: 2 or 4 bytes per value, exact.

    What is finite stays finite: values that would round to infinity, on the wire or back in the tensor's own format,
    become the largest that do not (bf16 ends a little before fp32, and is coarser than fp16 where that ends).
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self._dtype = name, dtype
        self._limits = {source: _limit(source, dtype) for source in DTYPES.values()}

    def encode(self, tensor: torch.Tensor, context: CodecContext) -> Frame:
        limit = self._limits[tensor.dtype]
        values = tensor.detach()
        if limit is not None:
            # Infinity stays: it must not pass for a value.
            values = torch.where(values.isinf(), values, values.clamp(-limit, limit))
        return make_frame(self.name, tensor, tensor_bytes(values.to(self._dtype)))

    def decode(self, frame: Frame, context: CodecContext, device: torch.device) -> torch.Tensor:
        raw = tensor_from(frame.payload, self._dtype, frame.header.shape)
        return raw.to(device=device, dtype=dtype_of(frame.header))

    def wire_bytes(self, shape: Sequence[int]) -> int:
        return self._dtype.itemsize * int(torch.Size(shape).numel())


# A hair under 1/127, so that 127 steps of the largest value are never rounded beyond it, to infinity.
_STEP = (1 - 2**-22) / 127


class Int8:
    """Symmetric int8 with one fp32 scale per token: `value = level * scale`, scale = max |value| / 127.

    A token's own scale keeps the few tokens with huge norms (DESIGN section 3, outlier tokens) from costing the
    others their precision. Size: hidden + 4 bytes per token, exact: levels first, then scales.
    """

    name = "int8"

    def encode(self, tensor: torch.Tensor, context: CodecContext) -> Frame:
        values = tensor.detach().float()
        # A token of zeros takes any scale; below the smallest normal number division loses all precision.
        scale = (values.abs().amax(-1, keepdim=True) * _STEP).clamp_min(torch.finfo(torch.float32).tiny)
        levels = (values / scale).round().clamp(-127, 127).to(torch.int8)
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


def _limit(source: torch.dtype, wire: torch.dtype) -> float | None:
    """The largest value of `wire` that fits `source`; None when every value of `source` survives the way."""
    largest = torch.finfo(source).max
    rounded = torch.tensor(largest, dtype=torch.float64).to(wire)
    if rounded.item() <= largest:
        return None
    return torch.nextafter(rounded, torch.zeros_like(rounded)).item()


register(Dense("dense", torch.bfloat16))
register(Dense("dense32", torch.float32))
register(Int8())
