"""Codecs without a prior: `dense` (bf16), `dense32` (fp32), `int8` and `int4` (one scale per token)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshd.wire import bits
from meshd.wire.codec import DTYPES, Codec, CodecContext, Quantized, tensor_bytes, tensor_from
from meshd.wire.rate import RateLoop


class Dense(Codec):
    """Every value in one floating-point format. Size: 2 or 4 bytes per value, exact.

    What is finite stays finite: values that would round to infinity, on the wire or back in the tensor's own format,
    become the largest that do not (bf16 ends a little before fp32, and is coarser than fp16 where that ends).
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self._dtype = name, dtype
        self._limits = {source: _limit(source, dtype) for source in DTYPES.values()}

    def quantize(
        self, tensor: torch.Tensor, context: CodecContext, rate: RateLoop | None = None
    ) -> Quantized:
        limit = self._limits[tensor.dtype]
        values = tensor.detach()
        if limit is not None:
            # Infinity stays: it must not pass for a value.
            values = torch.where(values.isinf(), values, values.clamp(-limit, limit))
        raw = tensor_bytes(values.to(self._dtype))
        return Quantized(tuple(tensor.shape), tensor.dtype, raw, context.prior_name)

    def dequantize(self, quantized: Quantized, context: CodecContext, device: torch.device) -> torch.Tensor:
        tensor = tensor_from(quantized.raw, self._dtype, quantized.shape)
        return tensor.to(device=device, dtype=quantized.dtype)

    def wire_bytes(self, shape: Sequence[int]) -> int:
        return self._dtype.itemsize * int(torch.Size(shape).numel())


class Integer(Codec):
    """Symmetric integers with one fp32 scale per token: `value = level * scale`, scale = max / (2^(bits-1) - 1).

    A token's own scale keeps the few tokens with huge norms (DESIGN section 3, outlier tokens) from costing the
    others their precision. Size: hidden * bits / 8 + 4 bytes per token, exact (rounded up once): levels first, offset
    by 2^(bits-1) and packed, then scales.
    """

    def __init__(self, name: str, bits: int) -> None:
        self.name, self._bits = name, bits
        self._most = 2 ** (bits - 1) - 1
        # A hair under 1/most, so that so many steps of the largest value are never rounded beyond it, to infinity.
        self._step = (1 - 2**-22) / self._most

    def quantize(
        self, tensor: torch.Tensor, context: CodecContext, rate: RateLoop | None = None
    ) -> Quantized:
        values = tensor.detach().float()
        # A token of zeros takes any scale; below the smallest normal number division loses all precision.
        scale = (values.abs().amax(-1, keepdim=True) * self._step).clamp_min(torch.finfo(torch.float32).tiny)
        levels = (values / scale).round().clamp(-self._most, self._most).int() + 2 ** (self._bits - 1)
        raw = tensor_bytes(bits.pack(levels, self._bits)) + tensor_bytes(scale)
        return Quantized(tuple(tensor.shape), tensor.dtype, raw, context.prior_name)

    def dequantize(self, quantized: Quantized, context: CodecContext, device: torch.device) -> torch.Tensor:
        shape = quantized.shape
        values = int(torch.Size(shape).numel())
        payload = memoryview(quantized.raw)
        end = -(-values * self._bits // 8)
        packed = tensor_from(payload[:end], torch.uint8, (end,)).to(device)
        scale = tensor_from(payload[end:], torch.float32, [*shape[:-1], 1]).to(device)
        levels = (bits.unpack(packed, self._bits, values) - 2 ** (self._bits - 1)).reshape(shape)
        tensor: torch.Tensor = levels.float() * scale
        return tensor.to(quantized.dtype)

    def wire_bytes(self, shape: Sequence[int]) -> int:
        values = int(torch.Size(shape).numel())
        return -(-values * self._bits // 8) + 4 * (values // shape[-1])


def _limit(source: torch.dtype, wire: torch.dtype) -> float | None:
    """The largest value of `wire` that fits `source`; None when every value of `source` survives the way."""
    largest = torch.finfo(source).max
    rounded = torch.tensor(largest, dtype=torch.float64).to(wire)
    if rounded.item() <= largest:
        return None
    return torch.nextafter(rounded, torch.zeros_like(rounded)).item()
