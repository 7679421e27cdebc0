"""How replicas average, for scripts/benchmarks/gossip.py: the product's gossip, and what it is compared with."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from gossip_fleet import Fleet
from torch import Tensor

from meshd.gossip import modular
from meshd.gossip.coordinates import Coverage, covered, sampled, subset_seed
from meshd.gossip.distances import Distances, regard
from meshd.gossip.exchange import CARRY
from meshd.gossip.forms import BF16, Deltas, Residues
from meshd.gossip.memory import SEGMENT_BLOCKS
from meshd.gossip.outer import OuterStep
from meshd.gossip.values import FlatParameters
from meshd.proto import meshd_pb2 as pb
from meshd.wire.bits import pack, unpack

DENSE = "dense"
DENSE_BYTES = 2
"""Of a value: bf16."""


@dataclass(frozen=True)
class Arm:
    """How replicas average.

    kind: `dense`, `local` (never), `gossip` (pairs), or what others do: `sparse` and `powersgd`. form: of values on
    the wire of gossip: `residues`, or `base`: quantized as differences to the start. moments: AdamW's are averaged as
    well. factor: by how much PowerSGD compresses. real: also run with models other than the small one.
    """

    name: str
    kind: Literal["dense", "local", "gossip", "sparse", "powersgd"]
    every: int = 1
    subset: int = 1
    bits: int = BF16
    outer_momentum: float = 0.0
    form: Literal["residues", "base"] = "residues"
    moments: bool = False
    factor: int = 1
    real: bool = False


class Averaging(Protocol):
    """bytes_sent: by all replicas together. exchanged: values that were exchanged, of all replicas together. fewest:
    exchanges of the coordinate, of whichever replica, that had fewest."""

    bytes_sent: int
    exchanged: int
    fewest: int

    def stepped(self, step: int) -> None:
        """All replicas have taken inner step `step`, counted from 1."""


class Local:
    """No averaging."""

    bytes_sent = exchanged = fewest = 0

    def stepped(self, step: int) -> None:
        return


class Dense:
    """All values of all replicas at every inner step, as if bf16 lost nothing."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.bytes_sent = self.exchanged = self.fewest = 0

    def stepped(self, step: int) -> None:
        values = self._fleet.values
        values.copy_(values.mean(0, keepdim=True).expand_as(values))
        self.exchanged += values.numel()
        self.fewest += 1
        self.bytes_sent += DENSE_BYTES * values.numel()


class Replica:
    """What the product keeps for one replica."""

    def __init__(self, flat: FlatParameters, row: int, arm: Arm) -> None:
        self.flat, self.row = flat, row
        self.coverage, self.distances = Coverage(arm.subset, 0), Distances()
        self.exchanges = [0] * arm.subset  # by offset
        self.outer = OuterStep(self.flat, arm.outer_momentum)


class QuantizedToBase:
    """What residues replaced: differences to the base in a few bits, with one scale a tensor. In the place of
    meshd.gossip.forms.Residues. One bit is the sign; more round to a grid up to the tensor's largest."""

    def __init__(self, opening: pb.GossipOpen, flat: FlatParameters) -> None:
        self._bits, self._exchange, self._flat = opening.bits, opening.exchange, flat
        self._levels = (1 << (self._bits - 1)) - 1  # either side of 0

    def encode(self, first: int, positions: Tensor, values: Tensor) -> bytes:
        """As of Deltas: scales, then the packed numbers."""
        tensors, sizes = self._flat.tensor_of(positions), self._flat.starts.diff()
        if self._bits == 1:
            counts = tensors.bincount(minlength=len(sizes)).clamp(min=1)
            scales = torch.zeros(len(sizes)).index_add_(0, tensors, values.abs()) / counts
            numbers = (values >= 0).int()
        else:
            largest = torch.zeros(len(sizes)).scatter_reduce_(0, tensors, values.abs(), "amax")
            scales = largest.clamp(min=1e-12) / self._levels
            dithers = modular.dither(self._exchange, first, len(positions)).float()
            rounded = (values / scales[tensors]).add_(dithers).floor_()
            numbers = rounded.clamp_(-self._levels, self._levels).int().add_(self._levels)
        return scales.numpy().tobytes() + pack(numbers, self._bits).numpy().tobytes()

    def difference(self, positions: Tensor, mine: bytes, theirs: bytes) -> Tensor:
        """As of Deltas."""
        return self._decoded(positions, theirs) - self._decoded(positions, mine)

    def distance(self, difference: Tensor) -> float:
        """As of Deltas. Not known: all partners count in full."""
        return 0.0

    def _decoded(self, positions: Tensor, data: bytes) -> Tensor:
        tensors, scales_bytes = self._flat.tensor_of(positions), 4 * (len(self._flat.starts) - 1)
        scales = torch.frombuffer(bytearray(data[:scales_bytes]), dtype=torch.float32)
        packed = torch.frombuffer(bytearray(data[scales_bytes:]), dtype=torch.uint8)
        numbers = unpack(packed, self._bits, len(positions))
        signed = 2 * numbers - 1 if self._bits == 1 else numbers - self._levels
        return signed * scales[tensors]


class Pairs:
    """The product's gossip: random pairs exchange every so many steps. `_exchange` is Exchange.run of
    meshd/gossip/exchange.py without messages, and with equal shares: all replicas do equal work."""

    def __init__(
        self, flats: Sequence[FlatParameters], arm: Arm, seed: int, moments: Callable[[], list[Tensor]] = list
    ) -> None:
        """flats: of replicas, an even number. moments: AdamW's, (replicas, count) each, where the arm averages them."""
        self._arm, self._moments = arm, moments
        self._replicas = [Replica(flat, row, arm) for row, flat in enumerate(flats)]
        self._random = random.Random(seed)
        self._seed = subset_seed(f"benchmark {seed}", 0)
        self.bytes_sent = self.exchanged = self.fewest = 0

    def stepped(self, step: int) -> None:
        if step % self._arm.every:
            return
        rows = list(range(len(self._replicas)))
        self._random.shuffle(rows)
        for pair in zip(rows[::2], rows[1::2], strict=True):
            self._exchange((self._replicas[pair[0]], self._replicas[pair[1]]), step)

    def _exchange(self, sides: tuple[Replica, Replica], step: int) -> None:
        opening = pb.GossipOpen(
            exchange=self._random.getrandbits(64),
            bits=self._arm.bits,
            subset=self._arm.subset,
            offset=self._random.choice(sides).coverage.next(self._random),  # agreed_offset
        )
        forms, regarded = self._forms(opening, sides)
        for positions, first in self._segments(opening.offset):
            self._average(sides, regarded, forms, first, positions)
        for side in sides:
            side.coverage.exchanged(opening.subset, opening.offset, step, step)
            side.exchanges[opening.offset] += 1
        self.fewest = min(min(replica.exchanges) for replica in self._replicas)

    def _forms(
        self, opening: pb.GossipOpen, sides: tuple[Replica, Replica]
    ) -> tuple[list[Residues] | list[QuantizedToBase], Callable[[int, float], float]]:
        """How the two sides write their values, and how much the partner counts for a side (0 or 1) at a distance; for
        residues samples cross first."""
        if self._arm.form == "base":
            return [QuantizedToBase(opening, side.flat) for side in sides], lambda side, distance: 1.0
        starts = sides[0].flat.starts
        positions = sampled(starts, opening.subset, opening.offset, self._seed, opening.exchange)
        samples = [side.flat.read(positions.view(-1)).view(positions.shape) for side in sides]
        self.bytes_sent += sum(sample.nbytes + len(starts) - 1 for sample in samples)
        codes = modular.step_codes(*samples, opening.bits, opening.exchange)
        size = sides[0].flat.root_mean_square
        distance = size(samples[0].double() - samples[1].double())
        known = [
            (side.distances.usual, size(sample.double())) for side, sample in zip(sides, samples, strict=True)
        ]
        for side, partner in zip(sides, reversed(sides), strict=True):
            side.distances.measured(str(partner.row), distance)

        def regarded(side: int, found: float) -> float:
            return regard(*known[side], *known[1 - side], max(distance, found))

        return [Residues(opening, side.flat, codes) for side in sides], regarded

    def _segments(self, offset: int) -> Iterator[tuple[Tensor, int]]:
        """Positions that an exchange covers, and their first block."""
        count, subset = self._replicas[0].flat.count, self._arm.subset
        blocks = -(-count // subset)
        for first in range(0, blocks, SEGMENT_BLOCKS):
            positions = covered(first, min(blocks, first + SEGMENT_BLOCKS), subset, offset, self._seed)
            yield positions[positions < count], first

    def _average(
        self,
        sides: tuple[Replica, Replica],
        regarded: Callable[[int, float], float],
        forms: list[Residues] | list[QuantizedToBase],
        first: int,
        positions: Tensor,
    ) -> None:
        payloads = [
            form.encode(first, positions, side.flat.read(positions))
            for form, side in zip(forms, sides, strict=True)
        ]
        found = [
            form.difference(positions, mine, theirs)
            for form, mine, theirs in zip(forms, payloads, reversed(payloads), strict=True)
        ]
        for at, (side, form, difference) in enumerate(zip(sides, forms, found, strict=True)):
            counts = regarded(at, form.distance(difference))
            side.flat.move(positions, difference.mul_(0.5 * counts))
            side.outer.averaged(positions, carry=counts >= CARRY)
        self.exchanged += 2 * len(positions)
        self.bytes_sent += sum(map(len, payloads))
        if self._arm.moments:
            self._average_moments([side.row for side in sides], positions)

    def _average_moments(self, rows: list[int], positions: Tensor) -> None:
        """Exactly; counted as bf16."""
        for moment in self._moments():
            mean = sum(moment[row, positions] for row in rows) / len(rows)
            for row in rows:
                moment[row, positions] = mean
            self.bytes_sent += DENSE_BYTES * len(rows) * len(positions)


class Sparse:
    """A part of the values of all replicas together, in bf16, every so many steps; each part in its turn."""

    def __init__(self, fleet: Fleet, arm: Arm) -> None:
        self._fleet, self._arm = fleet, arm
        order = torch.randperm(fleet.count, generator=torch.Generator().manual_seed(fleet.training.seed))
        self._parts = order.tensor_split(arm.subset)
        self.bytes_sent = self.exchanged = self.fewest = 0

    def stepped(self, step: int) -> None:
        if step % self._arm.every:
            return
        positions = self._parts[step // self._arm.every % self._arm.subset]
        values, form = self._fleet.values, Deltas()
        start = self._fleet.start[positions]
        payloads = [form.encode(0, positions, row[positions] - start) for row in values]
        sent = [torch.frombuffer(bytearray(payload), dtype=torch.bfloat16).float() for payload in payloads]
        mean = torch.stack(sent).mean(0)
        for row, own in zip(values, sent, strict=True):
            row[positions] += mean - own
        self.exchanged += len(values) * len(positions)
        self.fewest = step // self._arm.every // self._arm.subset
        self.bytes_sent += sum(map(len, payloads))


class PowerSgd:
    """What all replicas did since they last were equal, averaged as matrices of low rank, with error feedback: Vogels
    et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019. Vectors are averaged
    as they are. Replicas are equal after it.

    All products are with the mean of the replicas' matrices, so only the mean of their errors matters and is kept.
    """

    def __init__(self, fleet: Fleet, arm: Arm) -> None:
        self._fleet, self._every = fleet, arm.every
        self._agreed, self._error = fleet.start.clone(), torch.zeros(fleet.count)
        self.ranks = ranks(fleet.shapes, arm.factor)
        draw = torch.Generator().manual_seed(fleet.training.seed)
        self._right = {
            name: torch.randn(fleet.shapes[name][1], rank, generator=draw)
            for name, rank in self.ranks.items()
        }
        self._values_sent = _values_sent(fleet.shapes, self.ranks)
        self.bytes_sent = self.exchanged = self.fewest = 0

    def stepped(self, step: int) -> None:
        if step % self._every:
            return
        values = self._fleet.values
        change = values.mean(0).sub_(self._agreed).add_(self._error)
        averaged = change.clone()
        for name, matrix in self._fleet.named(averaged[None]).items():
            if name in self._right:
                left = torch.linalg.qr(matrix[0] @ self._right[name]).Q
                right = self._right[name] = matrix[0].t() @ left
                matrix[0] = left @ right.t()
        self._error = change - averaged
        self._agreed += averaged
        values.copy_(self._agreed.expand_as(values))
        self.exchanged += values.numel()
        self.fewest += 1
        self.bytes_sent += DENSE_BYTES * len(values) * self._values_sent


def ranks(shapes: dict[str, torch.Size], factor: int) -> dict[str, int]:
    """Ranks of matrices, at least 1, by which about a `factor`-th of all values is sent: while there is room, the one
    that is furthest below its share gets one more."""
    found = {name: 1 for name, shape in shapes.items() if len(shape) == 2}
    budget = sum(shape.numel() for shape in shapes.values()) / factor
    room = budget - _values_sent(shapes, found)
    while True:
        fitting = [name for name in found if sum(shapes[name]) <= room]
        if not fitting:
            return found
        lowest = min(fitting, key=lambda name: found[name] * sum(shapes[name]) / shapes[name].numel())
        found[lowest] += 1
        room -= sum(shapes[lowest])


def _values_sent(shapes: dict[str, torch.Size], ranks: dict[str, int]) -> int:
    return sum(ranks[name] * sum(shape) if name in ranks else shape.numel() for name, shape in shapes.items())


def _flats(fleet: Fleet) -> list[FlatParameters]:
    """A fleet's replicas as the product sees them."""
    base = {name: tensor[0] for name, tensor in fleet.named(fleet.start[None]).items()}
    flats = []
    for row in fleet.values.detach().split(1):
        views = {name: view[0] for name, view in fleet.named(row).items()}
        parameters = {name: torch.nn.Parameter(view, requires_grad=False) for name, view in views.items()}
        flats.append(FlatParameters(parameters, base))
        if flats[-1].count != fleet.count:
            raise AssertionError("a fleet's values are those of its parameters")
    return flats


def averaging(arm: Arm, fleet: Fleet) -> Averaging:
    """What an arm does after inner steps."""
    match arm.kind:
        case "dense":
            return Dense(fleet)
        case "local":
            return Local()
        case "gossip":
            return Pairs(_flats(fleet), arm, fleet.training.seed, fleet.moments)
        case "sparse":
            return Sparse(fleet, arm)
        case "powersgd":
            return PowerSgd(fleet, arm)
