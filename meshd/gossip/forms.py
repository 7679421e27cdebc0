"""Values as they cross in an exchange: bf16 differences to the base, or residues of a few bits (docs/gossip.md)."""

from __future__ import annotations

import torch

from meshd.errors import MismatchError
from meshd.gossip import modular
from meshd.gossip.values import FlatParameters
from meshd.proto import meshd_pb2 as pb

BF16 = 16
"""Bits of values that are sent as bf16 differences to the base, not as residues."""


class Deltas:
    """Values as bf16 differences to the base: all that bf16 can tell, for newcomers and where bytes cost nothing."""

    def encode(self, first: int, positions: torch.Tensor, values: torch.Tensor) -> bytes:
        """values: (count,) fp32, at these positions, those of blocks `first` and on."""
        return raw_bytes(values.bfloat16()).tobytes()

    def difference(self, positions: torch.Tensor, mine: bytes, theirs: bytes) -> torch.Tensor:
        """The partner's values minus this side's, as far as what crossed tells: (count,) fp32, exactly opposite on the
        two sides. Raises MismatchError."""
        return finite(_bf16(theirs)).float() - _bf16(mine).float()

    def distance(self, difference: torch.Tensor) -> float:
        """Root mean square of the two sides' differences, as far as those that were found tell; 0: too few."""
        return _size(difference)


class Residues:
    """Values modulo a few steps (meshd/gossip/modular.py)."""

    def __init__(self, opening: pb.GossipOpen, flat: FlatParameters, codes: torch.Tensor) -> None:
        """opening: `bits` and `exchange` are used. codes: of each tensor's step."""
        self._bits, self._exchange, self._flat = opening.bits, opening.exchange, flat
        self._steps = modular.steps_of(codes)
        self._gain = modular.gain(opening.bits, opening.exchange)
        self._noise = modular.noise(opening.bits, opening.exchange)

    def encode(self, first: int, positions: torch.Tensor, values: torch.Tensor) -> bytes:
        """As of Deltas."""
        steps = self._steps[self._flat.tensor_of(positions)]
        dithers = modular.dither(self._exchange, first, len(positions))
        return modular.packed(modular.residues(values, steps, dithers, self._bits), self._bits)

    def difference(self, positions: torch.Tensor, mine: bytes, theirs: bytes) -> torch.Tensor:
        """As of Deltas."""
        ours, others = (modular.unpacked(data, self._bits, len(positions)) for data in (mine, theirs))
        if not modular.plausible(ours, others, self._bits):
            raise MismatchError("the partner's values differ by more than its sample says")
        steps = self._steps[self._flat.tensor_of(positions)].mul_(self._gain)
        return modular.differences(ours, others, self._bits).mul(steps).float()

    def distance(self, difference: torch.Tensor) -> float:
        """As of Deltas."""
        return _size(difference) / (self._gain * self._noise)


def _size(values: torch.Tensor) -> float:
    """Root mean square; 0 of too few to say."""
    return values.double().square().mean().sqrt().item() if len(values) >= modular.ENOUGH else 0.0


def finite(values: torch.Tensor) -> torch.Tensor:
    """The same; raises MismatchError for values of a partner that are not."""
    if not bool(torch.isfinite(values).all()):
        # C27: one NaN would reach every replica within a few exchanges.
        raise MismatchError("the partner sent values that are not finite")
    return values


def _bf16(data: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.bfloat16)
        if data
        else torch.empty(0, dtype=torch.bfloat16)
    )


def raw_bytes(values: torch.Tensor) -> memoryview:
    """Of a tensor, row-major."""
    return memoryview(values.contiguous().view(torch.uint8).numpy().data)
