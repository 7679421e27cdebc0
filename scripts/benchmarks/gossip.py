"""What averaging between replicas costs in loss at how few bytes: compressed gossip against dense averaging.

    .venv/bin/python scripts/benchmarks/gossip.py [--steps 900] [--replicas 8] [--out docs/results/gossip.json]
    .venv/bin/python scripts/benchmarks/gossip.py --model packaged:smollm2-135m --replicas 2 --steps 400 --held 16

Replicas of a pretrained Llama are trained side by side on text far from its training data (German manual pages), each
with its own AdamW and its own windows of the text, embeddings frozen. Only the way they average differs between the
arms; windows, seeds and schedule are the same. Exchanges run through the product's own code (meshd/gossip), without a
network. Judged is the worst replica as it is at the end: nothing is averaged for it.

Columns: ratio, bytes of dense bf16 averaging at every inner step over those that a replica sends; recovered, the share
of dense's improvement on held-out pages; exchanged, how often each coordinate was; fewest, the same of the one, of any
replica, that was least often; consensus, root mean square distance of values to the replicas' mean. Rows of other
models and learning rates that the file holds already are kept.
"""

import argparse
import json
import math
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Literal, Protocol

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from results import ROOT, save
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from meshd.config.runspec import OptimSpec
from meshd.data.known import known_corpus
from meshd.gossip import modular
from meshd.gossip.coordinates import Coverage, covered, sampled, subset_seed
from meshd.gossip.distances import Distances, regard
from meshd.gossip.exchange import BF16, CARRY, SEGMENT_BLOCKS, Deltas, Residues
from meshd.gossip.outer import OuterStep
from meshd.gossip.values import FlatParameters
from meshd.model.sources import resolve_source
from meshd.optim.schedule import learning_rate
from meshd.proto import meshd_pb2 as pb
from meshd.wire.bits import pack, unpack

TEXT = "packaged:manpages-de"
# One document in so many is held out; tokens of its windows that are measured.
HELD_OUT, HELD_COLUMNS = 20, 256
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


gossip = partial(Arm, kind="gossip", bits=3, outer_momentum=0.5)

ARMS = [
    Arm(DENSE, "dense", real=True),
    Arm("local", "local", real=True),
    gossip("gossip 640x", every=10, subset=13, real=True),
    gossip("gossip 16x", every=1, subset=3, outer_momentum=0.0),
    gossip("gossip 64x", every=3, subset=4, outer_momentum=0.0),
    gossip("gossip 256x", every=10, subset=5, real=True),
    gossip("gossip 1024x", every=16, subset=13),
    gossip("gossip 4096x", every=32, subset=30),
    Arm("agora: 5 % every 20 steps", "sparse", every=20, subset=20, real=True),
    Arm("powersgd 64x every 10 steps", "powersgd", every=10, factor=64, real=True),
    gossip("gossip 640x, no outer step", every=10, subset=13, outer_momentum=0.0),
    gossip("gossip 640x, moments averaged too", every=10, subset=13, moments=True),
    gossip("int8 to the base", every=10, subset=32, bits=8, form="base"),
    gossip("int4 to the base", every=10, subset=16, bits=4, form="base"),
    gossip("sign to the base", every=10, subset=4, bits=1, form="base"),
]


@dataclass(frozen=True)
class Training:
    """What all arms have in common. seq: tokens of a window. batch: windows that a replica steps on. held: those
    that are measured in the end."""

    model: str
    replicas: int
    steps: int
    lr: float
    seq: int
    batch: int
    held: int
    seed: int


@dataclass(frozen=True)
class Text:
    """Token ids, one document after the other: int64 (tokens,). NumPy, for processes to hand over as it is."""

    train: np.ndarray
    held: np.ndarray


def folder_of(model: str) -> Path:
    """Of a model of this repository or of any other source."""
    here = ROOT / model
    return resolve_source(str(here) if here.is_dir() else model)


def tokenized(folder: Path) -> Text:
    """The text in the tokens of a model, split by document."""
    logging.set_verbosity_error()  # documents are longer than the model's context, and are cut into windows
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with known_corpus(TEXT).open(encoding="utf-8") as lines:
        documents = [json.loads(line)["text"] for line in lines]
    train: list[int] = []
    held: list[int] = []
    for number, ids in enumerate(tokenizer(documents)["input_ids"]):
        (train if number % HELD_OUT else held).extend([*ids, tokenizer.eos_token_id])
    return Text(np.array(train), np.array(held))


class Fleet:
    """Replicas of a Llama with tied, frozen embeddings, trained side by side: one batched product for each of their
    matrices. `values` (replicas, count) holds the trainable parameters by name, one replica a row."""

    def __init__(self, folder: Path, training: Training, text: Text) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.config = model.config
        if self.config.model_type != "llama" or not self.config.tie_word_embeddings:
            raise SystemExit(f"{training.model}: only Llamas with tied embeddings are trained here")
        found = {name: p.detach() for name, p in model.named_parameters() if "embed_tokens" not in name}
        self.embedding = model.model.embed_tokens.weight.detach()
        self.shapes = {name: found[name].shape for name in sorted(found)}
        self.start = torch.cat([found[name].reshape(-1) for name in self.shapes])
        self.training, self.count = training, len(self.start)
        self.values = self.start.repeat(training.replicas, 1)
        self._gradients = torch.zeros_like(self.values)
        self._parameters = self.named(self.values)
        for parameter, gradient in zip(
            self._parameters.values(), self.named(self._gradients).values(), strict=True
        ):
            parameter.requires_grad_().grad = gradient
        self.values.grad = self._gradients
        self._schedule = OptimSpec(lr=training.lr, warmup_steps=20, clip=1.0)
        # Of one flat matrix: AdamW takes every value by itself, whichever replica it is of.
        self.adamw = torch.optim.AdamW(
            [self.values], lr=training.lr, betas=self._schedule.betas, weight_decay=0.0, fused=True
        )
        self._draws = [
            torch.Generator().manual_seed(training.seed * 1000 + replica)
            for replica in range(training.replicas)
        ]
        self._train, self._held = torch.from_numpy(text.train), torch.from_numpy(text.held)
        self._cosine, self._sine = self._rotations(max(training.seq, HELD_COLUMNS))

    def named(self, rows: Tensor) -> dict[str, Tensor]:
        """Views (rows, ...) of a matrix (rows, count)."""
        pieces = rows.split([shape.numel() for shape in self.shapes.values()], dim=1)
        return {
            name: piece.view(len(rows), *shape)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    def step(self, number: int) -> float:
        """One inner step of every replica. Returns their mean loss."""
        seq, batch = self.training.seq, self.training.batch
        ids = torch.stack([self._windows(draw, batch, seq) for draw in self._draws])
        losses = self._losses(ids, self._parameters)
        self._gradients.zero_()
        losses.sum().backward()
        norms = self._gradients.norm(dim=1, keepdim=True)
        self._gradients.mul_((self._schedule.clip / norms).clamp_(max=1.0))
        self.adamw.param_groups[0]["lr"] = learning_rate(self._schedule, number, self.training.steps)
        self.adamw.step()
        return losses.mean().item()

    def moments(self) -> list[Tensor]:
        """AdamW's: (replicas, count) each, none before the first step."""
        state = self.adamw.state[self.values]
        return [state["exp_avg"], state["exp_avg_sq"]] if state else []

    @torch.no_grad()
    def held_out(self, rows: Tensor) -> list[float]:
        """Loss on held-out text of each row of values. rows: (rows, count)."""
        firsts = torch.linspace(0, len(self._held) - HELD_COLUMNS - 1, self.training.held).long()
        windows = torch.stack([self._held[first : first + HELD_COLUMNS + 1] for first in firsts.tolist()])
        found = []
        for row in rows:
            parameters = self.named(row[None])
            losses = [self._losses(few[None], parameters) for few in windows.split(4)]
            found.append(torch.cat(losses).mean().item())
        return found

    def _windows(self, draw: torch.Generator, batch: int, seq: int) -> Tensor:
        firsts = torch.randint(0, len(self._train) - seq, (batch,), generator=draw)
        return torch.stack([self._train[first : first + seq + 1] for first in firsts.tolist()])

    def _losses(self, ids: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """Mean loss of each replica: (replicas,). ids: (replicas, batch, seq + 1)."""
        logits = self._logits(ids[:, :, :-1], parameters)
        losses = F.cross_entropy(logits.flatten(0, 2), ids[:, :, 1:].flatten(), reduction="none")
        return losses.view(len(ids), -1).mean(1)

    def _logits(self, ids: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """As transformers' Llama gives them. ids: (replicas, batch, seq)."""
        hidden = self.embedding[ids].flatten(1, 2)
        for layer in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            weights = {
                name.removeprefix(prefix).removesuffix(".weight"): weight
                for name, weight in parameters.items()
                if name.startswith(prefix)
            }
            normed = self._normed(hidden, weights["input_layernorm"])
            hidden = hidden + self._attention(normed, weights, ids.shape)
            normed = self._normed(hidden, weights["post_attention_layernorm"])
            gate = F.silu(_times(normed, weights["mlp.gate_proj"]))
            hidden = hidden + _times(gate * _times(normed, weights["mlp.up_proj"]), weights["mlp.down_proj"])
        return (self._normed(hidden, parameters["model.norm.weight"]) @ self.embedding.t()).view(
            *ids.shape, -1
        )

    def _attention(self, hidden: Tensor, weights: dict[str, Tensor], shape: torch.Size) -> Tensor:
        replicas, batch, seq = shape
        query, key, value = (
            _times(hidden, weights[f"self_attn.{which}_proj"])
            .view(replicas * batch, seq, -1, self.config.head_dim)
            .transpose(1, 2)
            for which in "qkv"
        )
        out = F.scaled_dot_product_attention(
            self._rotated(query), self._rotated(key), value, is_causal=True, enable_gqa=True
        )
        joined = out.transpose(1, 2).reshape(replicas, batch * seq, -1)
        return _times(joined, weights["self_attn.o_proj"])

    def _rotations(self, seq: int) -> tuple[Tensor, Tensor]:
        width = self.config.head_dim
        frequencies = self.config.rope_parameters["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(seq).float(), frequencies).repeat(1, 2)
        return angles.cos(), angles.sin()

    def _rotated(self, heads: Tensor) -> Tensor:
        seq, half = heads.shape[-2], heads.shape[-1] // 2
        turned = torch.cat([-heads[..., half:], heads[..., :half]], dim=-1)
        return heads * self._cosine[:seq] + turned * self._sine[:seq]

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return hidden * scale * weight[:, None]


def _times(hidden: Tensor, weight: Tensor) -> Tensor:
    """(replicas, tokens, out) from (replicas, tokens, in) and (replicas, out, in)."""
    return torch.bmm(hidden, weight.transpose(1, 2))


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
    """What the product keeps for one replica of a fleet."""

    def __init__(self, fleet: Fleet, row: int, arm: Arm) -> None:
        self.row = row
        views, base = fleet.named(fleet.values[row : row + 1].detach()), fleet.named(fleet.start[None])
        self.flat = FlatParameters(
            {name: torch.nn.Parameter(view[0], requires_grad=False) for name, view in views.items()},
            {name: tensor[0] for name, tensor in base.items()},
        )
        if self.flat.count != fleet.count:
            raise AssertionError("a fleet's values are those of its parameters")
        self.coverage, self.distances = Coverage(arm.subset, 0), Distances()
        self.exchanges = [0] * arm.subset  # by offset
        self.outer = OuterStep(self.flat, arm.outer_momentum)


class QuantizedToBase:
    """What residues replaced: differences to the base in a few bits, with one scale a tensor. In the place of
    meshd.gossip.exchange.Residues. One bit is the sign; more round to a grid up to the tensor's largest."""

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

    def __init__(self, fleet: Fleet, arm: Arm) -> None:
        self._fleet, self._arm = fleet, arm
        self._replicas = [Replica(fleet, row, arm) for row in range(len(fleet.values))]
        self._random = random.Random(fleet.training.seed)
        self._seed = subset_seed(f"benchmark {fleet.training.seed}", 0)
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
        count, subset = self._fleet.count, self._arm.subset
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
        for moment in self._fleet.moments():
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


def averaging(arm: Arm, fleet: Fleet) -> Averaging:
    """What an arm does after inner steps."""
    match arm.kind:
        case "dense":
            return Dense(fleet)
        case "local":
            return Local()
        case "gossip":
            return Pairs(fleet, arm)
        case "sparse":
            return Sparse(fleet, arm)
        case "powersgd":
            return PowerSgd(fleet, arm)


def measure(arm: Arm, training: Training, text: Text, threads: int) -> dict[str, object]:
    """Train all replicas by an arm. Its row, but for what follows from dense's."""
    began = perf_counter()
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    # Gradients are views of one matrix as parameters are: they are added to in place, as they should be.
    warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")
    fleet = Fleet(folder_of(training.model), training, text)
    loss_start = fleet.held_out(fleet.start[None])[0]
    method = averaging(arm, fleet)
    training_began = perf_counter()
    for step in range(1, training.steps + 1):
        loss = fleet.step(step - 1)
        with torch.no_grad():
            method.stepped(step)
        if step % max(1, training.steps // 5) == 0:
            each = (perf_counter() - training_began) / step
            print(
                f"{arm.name}: step {step}/{training.steps}, training loss {loss:.3f}, {each:.2f} s a step",
                flush=True,
            )
    losses, mean = fleet.held_out(fleet.values), fleet.values.mean(0, keepdim=True)
    loss_of_mean = fleet.held_out(mean)[0]
    if not all(map(math.isfinite, [*losses, loss_of_mean])):
        raise SystemExit(f"{arm.name}: the loss is not finite")
    all_values = training.replicas * fleet.count
    dense_bytes = DENSE_BYTES * all_values * training.steps
    return {
        "model": training.model,
        "replicas": training.replicas,
        "method": arm.name,
        "byte_ratio": round(dense_bytes / method.bytes_sent, 1) if method.bytes_sent else None,
        "loss_start": round(loss_start, 4),
        "loss_dense": None,
        "loss": round(max(losses), 4),
        "recovered": None,
        "loss_best": round(min(losses), 4),
        "loss_of_mean": round(loss_of_mean, 4),
        "lr": training.lr,
        "steps": training.steps,
        "tokens": training.steps * training.replicas * training.batch * training.seq,
        "every": arm.every if method.exchanged else None,
        "subset": arm.subset if method.exchanged else None,
        "bits": arm.bits if arm.kind == "gossip" else None,
        "outer_momentum": arm.outer_momentum,
        "exchanges_per_coordinate": round(method.exchanged / all_values, 2),
        "fewest_exchanges": method.fewest,
        "consensus": float(f"{(fleet.values - mean).square().mean().sqrt().item():.3g}"),
        "seconds": round(perf_counter() - began),
    }


def measured(
    arms: list[Arm], training: Training, text: Text, jobs: int, threads: int
) -> Iterator[dict[str, object]]:
    """Rows in the order in which they come, `jobs` arms at a time. One that fails ends it all."""

    def apart(arm: Arm) -> dict[str, object]:
        # A process for each arm: what one leaves in memory would be missing for the next.
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            return process.submit(measure, arm, training, text, threads).result()

    with ThreadPoolExecutor(jobs) as waiting:
        futures = [waiting.submit(apart, arm) for arm in arms]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            waiting.shutdown(cancel_futures=True)


def with_dense(row: dict, dense: dict | None) -> dict:
    """A row with what dense averaging came to, and what share of its improvement the row's method has."""
    if dense is None:
        return row
    improved, of_dense = row["loss_start"] - row["loss"], dense["loss_start"] - dense["loss"]
    return row | {"loss_dense": dense["loss"], "recovered": round(improved / of_dense, 4)}


def view(rows: list[dict]) -> Table:
    """The table that is printed."""
    columns = {
        "method": "method",
        "byte_ratio": "ratio",
        "loss": "loss, worst",
        "loss_best": "best",
        "loss_of_mean": "of the mean",
        "recovered": "recovered",
        "every": "every",
        "subset": "subset",
        "bits": "bits",
        "outer_momentum": "momentum",
        "exchanges_per_coordinate": "exchanged",
        "fewest_exchanges": "fewest",
        "consensus": "consensus",
        "seconds": "s",
    }
    table = Table(
        title=f"{rows[0]['model']}, {rows[0]['replicas']} replicas, {rows[0]['steps']} steps, lr {rows[0]['lr']}"
    )
    for key, title in columns.items():
        table.add_column(title, justify="left" if key == "method" else "right")
    for row in rows:
        cells = {key: "-" if row[key] is None else str(row[key]) for key in columns}
        if row["recovered"] is not None:
            cells["recovered"] = f"{row['recovered']:.1%}"
        table.add_row(*cells.values())
    return table


def save_beside(path: Path, rows: list[dict], **more: object) -> None:
    """Save rows of one model and learning rate; others that the file holds stay, with what they came from."""
    kept, earlier = [], []
    if path.is_file():
        before = json.loads(path.read_text())
        kept = [row for row in before["rows"] if any(row[key] != rows[0][key] for key in ("model", "lr"))]
        runs = [
            *before.get("earlier", []),
            {key: before[key] for key in before if key not in ("rows", "earlier")},
        ]
        needed = {(row["model"], row["lr"]) for row in kept}
        earlier = [run for run in runs if (run["model"], run["lr"]) in needed]
    save(path, [*rows, *kept], model=rows[0]["model"], **more, earlier=earlier)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tests/data/tiny", help="as model.source: a Llama")
    parser.add_argument("--steps", type=int, default=900, help="inner steps of every replica")
    parser.add_argument("--replicas", type=int, default=8, help="an even number")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak; a cosine down to a tenth of it")
    parser.add_argument("--seq", type=int, default=64, help="tokens of a window")
    parser.add_argument("--batch", type=int, default=1, help="windows of a replica's inner step")
    parser.add_argument(
        "--held", type=int, default=40, help="windows of 256 held-out tokens that are measured"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the windows and of who meets whom")
    parser.add_argument("--jobs", type=int, default=2, help="arms at a time")
    parser.add_argument("--threads", type=int, default=1, help="of torch, for each")
    parser.add_argument("--arms", default="", help="regular expression; for trials: saves only with --out")
    parser.add_argument("--out", type=Path, help="default: docs/results/gossip.json")
    options = parser.parse_args()
    if options.replicas % 2:
        parser.error("--replicas must be even: they exchange in pairs")
    small = options.model == parser.get_default("model")
    arms = [arm for arm in ARMS if (small or arm.real) and re.search(options.arms, arm.name)]
    if not arms:
        parser.error(f"--arms {options.arms}: there is none")
    out = options.out or (None if options.arms else ROOT / "docs/results/gossip.json")
    training = Training(
        **{
            key: getattr(options, key)
            for key in ("model", "replicas", "steps", "lr", "seq", "batch", "held", "seed")
        }
    )
    text = tokenized(folder_of(training.model))
    print(f"{len(text.train)} tokens to train on, {len(text.held)} held out", flush=True)
    by_name: dict[str, dict] = {}
    for row in measured(arms, training, text, options.jobs, options.threads):
        by_name[row["method"]] = row
        print(json.dumps(with_dense(row, by_name.get(DENSE))), flush=True)
    rows = [with_dense(by_name[arm.name], by_name.get(DENSE)) for arm in arms]
    Console(width=170).print(view(rows))
    if out:
        save_beside(out, rows, text=TEXT, lr=training.lr, seq=training.seq, batch=training.batch)


if __name__ == "__main__":
    main()
