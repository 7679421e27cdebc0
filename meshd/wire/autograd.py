"""A boundary inside one process's autograd graph: what training through a codec sees, bytes and all.

Benchmarks and diagnosis use it; in a swarm the two halves are on two peers (`meshd.pipeline.runtime`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import process_time
from typing import Any

import torch

from meshd.wire.codec import Codec, CodecContext, Draft, Frame
from meshd.wire.named import read
from meshd.wire.rate import RateLoop


@dataclass(eq=False)
class Boundary:
    """One boundary with a codec in each direction.

    exact_adjoint: the gradient is multiplied by the transpose of what encoding did to the activations; otherwise it
    passes straight through (Bengio et al., 2013). on_frame: told of every frame and its direction. device_s, coder_s:
    processor seconds spent so far, in the halves that run on the tensor's device and in those that run in threads
    beside it.
    """

    forward: Codec
    backward: Codec
    exact_adjoint: bool = False
    on_frame: Callable[[Frame, CodecContext], None] | None = None
    device_s: float = 0.0
    coder_s: float = 0.0
    _rates: tuple[RateLoop, RateLoop] = field(default_factory=lambda: (RateLoop(), RateLoop()))

    def __call__(self, hidden: torch.Tensor, context: CodecContext) -> torch.Tensor:
        """What the far side sees of `hidden` (rows, tokens, hidden); its gradient crosses back.

        context: of the forward direction.
        """
        out: torch.Tensor = _Cross.apply(hidden, self, context)  # type: ignore[no-untyped-call]
        return out

    def _crossed(
        self, codec: Codec, tensor: torch.Tensor, context: CodecContext, rate: RateLoop
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the far side sees, and the outliers that it was told of."""
        began = process_time()
        draft = Draft(codec, codec.quantize(tensor, context, rate))
        quantized = process_time()
        frame = draft.frame()
        readied = read(frame, context)
        coded = process_time()
        received = readied.tensor(tensor.device)
        self.coder_s += coded - quantized
        self.device_s += quantized - began + process_time() - coded
        if self.on_frame is not None:
            self.on_frame(frame, context)
        return received, codec.outliers(readied.quantized)


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, boundary: Boundary, context: CodecContext) -> torch.Tensor:
        out, outliers = boundary._crossed(boundary.forward, hidden, context, boundary._rates[0])
        ctx.boundary, ctx.context, ctx.outliers = boundary, context, outliers
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        boundary, context = ctx.boundary, ctx.context
        back = replace(context, direction="backward", outliers=ctx.outliers)
        gradient, _ = boundary._crossed(boundary.backward, gradients[0], back, boundary._rates[1])
        if boundary.exact_adjoint:
            gradient = boundary.forward.adjoint(gradient, context)
        return gradient, None, None
