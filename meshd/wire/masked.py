"""The masked family: predictor, basis, mask and values (DESIGN section 3), in one encoder and decoder.

docs/bitstream.md, "Payloads", has the parts of a payload and their order. All but the entropy-coded levels are of a
size that shape and codec fix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshd.errors import MismatchError
from meshd.wire import bits, coded, entropy, expected, mask, quantize
from meshd.wire.codec import Codec, CodecContext, Frame, Quantized, make_frame, tensor_bytes
from meshd.wire.payload import (
    REFERENCE,
    Cursor,
    gain_to_127,
    gains,
    joined,
    power_of_two,
    read_gains,
    to_int8,
)
from meshd.wire.rate import RateLoop
from meshd.wire.side import Side, side_of
from meshd.wire.spec import MaskedSpec

_TINY = torch.finfo(torch.float32).tiny


class Masked(Codec):
    """One member of the family."""

    def __init__(self, name: str, spec: MaskedSpec) -> None:
        self.name, self.spec = name, spec

    @property
    def needs_prior(self) -> bool:
        return self.spec.needs_prior

    def wire_bytes(self, shape: Sequence[int]) -> int:
        spec, hidden = self.spec, shape[-1]
        tokens = int(torch.Size(shape[:-1]).numel())
        values = tokens * self._keep(hidden)
        size = self._marks(tokens)
        size += mask.columns_bytes(tokens, hidden, self._keep(hidden)) if spec.mask == "topk" else 0
        if spec.values == "bf16":
            return size + 2 * values
        size += REFERENCE.size + tokens
        if spec.values == "int8":
            return size + values
        if spec.mask != "waterfill":
            return size + bits.packed_bytes(values, int(spec.bits))
        if spec.values == "packed":
            return size + _room(tokens, self._budget(hidden))
        budget = -(-tokens * self._budget(hidden) // 8)
        outliers = expected.most_outliers(tokens) * hidden
        return (
            size
            + coded.STEP.size
            + outliers
            + coded.MOST_OF_BUDGET * budget
            + entropy.overhead(tokens, hidden)
        )

    @property
    def _marked(self) -> bool:
        return self.spec.predictor != "none" or self.spec.values == "entropy"

    def _marks(self, tokens: int) -> int:
        """Bytes of the marks of outliers."""
        return bits.packed_bytes(tokens, 1) if self._marked else 0

    def _keep(self, hidden: int) -> int:
        """Coordinates per token that cross, where their number is fixed."""
        return max(1, round(self.spec.keep * hidden))

    def _budget(self, hidden: int) -> int:
        """Bits per token for waterfilled values: the whole budget less mark and gain."""
        return max(0, math.floor(hidden * self.spec.bits) - 9)

    # ---- encoding ------------------------------------------------------------------------------------------

    def quantize(self, tensor: Tensor, context: CodecContext, rate: RateLoop | None = None) -> Quantized:
        hidden = tensor.shape[-1]
        x = tensor.detach().reshape(-1, hidden).float()
        raw: list[Tensor | bytes] = []
        outlier = None
        if self._marked:
            outlier = expected.outliers(x, context)
            x = x - expected.value(context, self.spec.predictor, outlier)
            raw.append(bits.pack(outlier, 1))
        side = self._side(context, x.device)
        # Each token at a size near 1 goes through the products: what is finite stays so.
        peak = power_of_two(x)
        x = x / peak
        z = x if side is None else self._fitted(x @ side.encode, hidden)
        about = tuple(tensor.shape), tensor.dtype, context.prior_name
        if self.spec.values == "entropy":
            assert outlier is not None
            assert side is not None
            few = x[outlier]
            del x
            return self._coded(raw, about, z, few, outlier, peak, side, rate)
        if self.spec.mask == "topk":
            largest = mask.top_columns(z, self._keep(hidden))
            raw.append(mask.pack_columns(largest, hidden))
            columns: Tensor | None = largest
        else:
            columns = self._columns(len(z), hidden, context, z.device)
        if columns is not None:
            z = z.gather(1, columns)
        z = z * self._rescale(z, x)
        raw += self._values_of(z, peak, side, columns, hidden)
        shape, dtype, name = about
        return Quantized(shape, dtype, joined(raw), name)

    def _values_of(
        self, z: Tensor, peak: Tensor, side: Side | None, columns: Tensor | None, hidden: int
    ) -> list[Tensor | bytes]:
        """Gains and values (N, kept) of all kinds but entropy-coded ones, as they cross."""
        if self.spec.values == "bf16":
            most = torch.finfo(torch.bfloat16).max
            return [(z * peak).clamp(-most, most).bfloat16()]
        if self.spec.values == "int8":
            reference, index, gain = gains(gain_to_127(z), peak)
            return [REFERENCE.pack(reference), index, to_int8(z / gain)]
        unit = z / self._scale(side, columns, hidden)
        reference, index, gain = gains(_rms(unit), peak)
        return [REFERENCE.pack(reference), index, *self._packed(unit / gain, side, hidden)]

    def _coded(
        self,
        raw: list[Tensor | bytes],
        about: tuple[tuple[int, ...], torch.dtype, bytes],
        z: Tensor,
        few: Tensor,
        outlier: Tensor,
        peak: Tensor,
        side: Side,
        rate: RateLoop | None,
    ) -> coded.EntropyCoded:
        """Entropy-coded coordinates z (N, K), which it overwrites; few: outliers, in columns of the tensor."""
        gain = _rms(z / side.scale).masked_scatter_(outlier[:, None], gain_to_127(few))
        reference, index, gain = gains(gain, peak)
        few = to_int8(few / gain[outlier])
        # All tokens have one step: what counts is the sum of errors, and large tokens are worth more bits. A token
        # that is to be zero there is divided by infinity here.
        common = torch.where(index > 0, reference / peak, torch.inf)
        z = z.div_(common)[~outlier]
        hidden = about[0][-1]
        budget = len(outlier) * self._budget(hidden)
        lift = coded.lifts(index[~outlier, 0])
        step, levels, classes = coded.quantized(z, lift, side, budget, 8 * few.numel(), rate)
        raw = [*raw, REFERENCE.pack(reference), index, coded.STEP.pack(step), few]
        shape, dtype, name = about
        there = levels.cpu().numpy(), classes.cpu().numpy()
        return coded.EntropyCoded(shape, dtype, joined(raw), name, *there, side.tables)

    def write(self, quantized: Quantized) -> Frame:
        payload = quantized.raw
        if isinstance(quantized, coded.EntropyCoded):
            payload += entropy.encode(quantized.levels, quantized.classes, quantized.tables)
        return make_frame(self.name, quantized, payload)

    def outliers(self, quantized: Quantized) -> Tensor | None:
        tokens = int(torch.Size(quantized.shape[:-1]).numel())
        if not self._marked:
            return None
        return self._marks_of(Cursor(quantized.raw, self.name, torch.device("cpu")), tokens)

    def _marks_of(self, raw: Cursor, tokens: int) -> Tensor:
        """(N,) bool. Raises MismatchError for more marks than there may be."""
        outlier = bits.unpack(raw.take(self._marks(tokens)), 1, tokens).bool()
        if int(outlier.sum()) > expected.most_outliers(tokens):
            raise MismatchError(f"{self.name}: {int(outlier.sum())} of {tokens} tokens marked as outliers")
        return outlier

    def _side(self, context: CodecContext, device: torch.device) -> Side | None:
        """The prior's basis of this direction; None: the identity."""
        return (
            None
            if self.spec.basis == "identity"
            else side_of(expected.prior_of(context), context.direction, device)
        )

    def _fitted(self, z: Tensor, hidden: int) -> Tensor:
        """A mask of a fixed number of coordinates finds zeros where the prior's basis is cut."""
        if self.spec.mask == "waterfill" or z.shape[1] == hidden:
            return z
        return torch.nn.functional.pad(z, (0, hidden - z.shape[1]))

    def _columns(
        self, tokens: int, hidden: int, context: CodecContext, device: torch.device
    ) -> Tensor | None:
        """(N, kept) coordinates that cross, where both ends know them; None: all, or those that the frame names."""
        if self.spec.mask == "random":
            keep = self._keep(hidden)
            return mask.random_columns(context.seed, context.boundary, tokens, hidden, keep, device)
        if self.spec.mask == "leading":
            return torch.arange(self._keep(hidden), device=device).expand(tokens, -1)
        return None

    def _rescale(self, kept: Tensor, whole: Tensor) -> Tensor | float:
        """What the survivors of a random mask are multiplied by, before they are coded."""
        match self.spec.rescale:
            case "rms":
                return _norm(whole) / _norm(kept).clamp_min(_TINY)
            case "sqrt":
                return math.sqrt(whole.shape[1] / kept.shape[1])
            case "unbiased":
                return whole.shape[1] / kept.shape[1]
        return 1.0

    def _scale(self, side: Side | None, columns: Tensor | None, hidden: int) -> Tensor | float:
        """Expected size of the coordinates that cross, up to the token's gain: (1 or N, kept)."""
        if side is None:
            return 1.0
        if columns is None:
            return side.scale[None]
        return torch.nn.functional.pad(side.scale, (0, hidden - len(side.scale)), value=1.0)[columns]

    def _packed(self, unit: Tensor, side: Side | None, hidden: int) -> list[Tensor | bytes]:
        """Lloyd-Max indices of values that are of size 1."""
        if self.spec.mask != "waterfill":
            width = int(self.spec.bits)
            return [bits.pack(quantize.quantize(unit, quantize.lloyd_max(width)), width)]
        assert side is not None
        packed = [
            tensor_bytes(bits.pack(quantize.quantize(unit[:, columns], quantize.lloyd_max(width)), width))
            for width, columns in side.widths(self._budget(hidden))
        ]
        room = _room(len(unit), self._budget(hidden))
        return [*packed, bytes(room - sum(map(len, packed)))]

    # ---- decoding ------------------------------------------------------------------------------------------

    def read(self, frame: Frame, context: CodecContext) -> Quantized:
        whole = super().read(frame, context)
        if self.spec.values != "entropy":
            return whole
        tokens = int(torch.Size(whole.shape[:-1]).numel())
        side = self._side(context, torch.device("cpu"))
        assert side is not None
        raw = Cursor(whole.raw, self.name, torch.device("cpu"))
        outlier = self._marks_of(raw, tokens)
        _, index, _ = read_gains(raw, tokens)
        (step,) = coded.STEP.unpack(raw.bytes(coded.STEP.size))
        classes = side.classes(step, coded.lifts(index[~outlier, 0])).numpy()
        raw.bytes(int(outlier.sum()) * whole.shape[-1])
        head = raw.at
        levels = entropy.decode(memoryview(whole.raw)[head:], classes, side.tables)
        return coded.EntropyCoded(
            whole.shape, whole.dtype, whole.raw[:head], whole.prior, levels, classes, side.tables
        )

    def dequantize(self, quantized: Quantized, context: CodecContext, device: torch.device) -> Tensor:
        spec, hidden = self.spec, quantized.shape[-1]
        tokens = int(torch.Size(quantized.shape[:-1]).numel())
        raw = Cursor(quantized.raw, self.name, device)
        side = self._side(context, device)
        outlier = self._marks_of(raw, tokens) if self._marked else None
        if spec.mask == "topk":
            packed = raw.take(mask.columns_bytes(tokens, hidden, self._keep(hidden)))
            columns: Tensor | None = mask.unpack_columns(packed, tokens, hidden, self._keep(hidden))
        else:
            columns = self._columns(tokens, hidden, context, device)
        gain: Tensor | None = None
        if spec.values != "bf16":
            reference, _, gain = read_gains(raw, tokens)
        z = self._values(raw, quantized, side, tokens, hidden)
        if isinstance(quantized, coded.EntropyCoded):
            few = raw.typed(torch.int8, tokens - len(quantized.levels), hidden)
        raw.end()
        if spec.values == "packed":
            z = z * self._scale(side, columns, hidden)
        if columns is not None:
            z = z.new_zeros(tokens, hidden).scatter_(1, columns, z)
        if side is not None:
            known = min(z.shape[1], len(side.decode))
            z = z[:, :known] @ side.decode[:known]
        if isinstance(quantized, coded.EntropyCoded):
            assert outlier is not None
            assert gain is not None
            if len(few):
                whole = z.new_empty(tokens, hidden)
                whole[~outlier], whole[outlier] = z, few.float()
                z = whole
            gain = torch.where(outlier[:, None], gain, reference)
        x = z if gain is None else z * gain
        if outlier is not None:
            x = x + expected.value(context, self.spec.predictor, outlier)
        most = torch.finfo(quantized.dtype).max
        return x.clamp(-most, most).to(quantized.dtype).reshape(quantized.shape)

    def _values(
        self, raw: Cursor, quantized: Quantized, side: Side | None, tokens: int, hidden: int
    ) -> Tensor:
        """(N, kept) values, before gain; Lloyd-Max ones before their coordinates' scale too."""
        spec, keep = self.spec, self._keep(hidden)
        if spec.values == "bf16":
            values = raw.typed(torch.bfloat16, tokens, keep)
            if not bool(values.isfinite().all()):  # the clamp at the end would make them numbers
                raise MismatchError(f"{self.name} payload holds values that are not finite")
            return values
        if spec.values == "int8":
            return raw.typed(torch.int8, tokens, keep)
        if isinstance(quantized, coded.EntropyCoded):
            (step,) = coded.STEP.unpack(raw.bytes(coded.STEP.size))
            return coded.values(quantized, step, raw.device)
        if spec.mask != "waterfill":
            return self._unpacked(raw, int(spec.bits), tokens, keep)
        assert side is not None
        z = torch.zeros(tokens, len(side.scale), device=raw.device)
        start = raw.at
        for width, columns in side.widths(self._budget(hidden)):
            z[:, columns] = self._unpacked(raw, width, tokens, len(columns))
        raw.bytes(start + _room(tokens, self._budget(hidden)) - raw.at)
        return z

    def _unpacked(self, raw: Cursor, width: int, tokens: int, columns: int) -> Tensor:
        count = tokens * columns
        index = bits.unpack(raw.take(bits.packed_bytes(count, width)), width, count)
        return quantize.dequantize(index, quantize.lloyd_max(width)).reshape(tokens, columns)

    # ---- training through it -------------------------------------------------------------------------------

    def adjoint(self, gradient: Tensor, context: CodecContext) -> Tensor:
        """The transpose of basis, mask and way back; coordinates that quantization happens to zero count as crossing.
        Top-k's mask depends on the values that it masks: here it counts as the identity."""
        hidden = gradient.shape[-1]
        g = gradient.reshape(-1, hidden).float()
        side = self._side(context, g.device)
        if side is not None:
            g = self._fitted(g @ side.decode.T, hidden)
        columns = self._columns(len(g), hidden, context, g.device)
        if columns is not None:
            g = torch.zeros_like(g).scatter_(1, columns, g.gather(1, columns))
            if self.spec.rescale in ("sqrt", "unbiased"):
                g = g * self._rescale(g[:, : self._keep(hidden)], g)
        if side is not None:
            if self.spec.values == "entropy":
                lift = torch.zeros(1, dtype=torch.int32, device=g.device)
                g = g[:, : side.classes(side.step(self._budget(hidden), lift), lift).shape[1]]
            known = min(g.shape[1], len(side.scale))
            g = g[:, :known] @ side.encode[:, :known].T
        return g.to(gradient.dtype).reshape(gradient.shape)


def _room(tokens: int, budget: int) -> int:
    """Bytes of Lloyd-Max indices of `budget` bits per token: each of the widths may end in a byte of its own."""
    return bits.packed_bytes(tokens * budget, 1) + quantize.MOST_BITS


def _rms(x: Tensor) -> Tensor:
    """(N, 1)"""
    return x.square().mean(1, keepdim=True).sqrt()


def _norm(x: Tensor) -> Tensor:
    return x.square().sum(1, keepdim=True).sqrt()
