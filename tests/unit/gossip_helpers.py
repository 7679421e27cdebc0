"""Replicas of one stage in one process that average by the product's own exchange, over queues instead of a network.

What they share is what `Gossip` has for each replica (values, outer step, coverage, distances), without its times,
retries and choice of partners: thousands of exchanges in seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshd import PROTOCOL_VERSION
from meshd.errors import MeshdError
from meshd.gossip.coordinates import Coverage
from meshd.gossip.distances import Distances
from meshd.gossip.exchange import SEGMENT_BLOCKS, Exchange, ExchangeReport, TooFar, check_open
from meshd.gossip.outer import OuterStep
from meshd.gossip.values import FlatParameters
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import LinkLost

# (positions, what is there) -> what is sent.
Lie = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Tamper = Callable[[pb.GossipMessage], pb.GossipMessage | None]


class Lying(FlatParameters):
    """Of a bad replica: what it sends is not what it has. It is consistent: its samples lie like its values."""

    lie: Lie | None = None

    def read(self, positions: torch.Tensor) -> torch.Tensor:
        read = super().read(positions)
        return self.lie(positions, read) if self.lie else read


class Replica:
    """parameters: trained in place. base: by the same names; zeros if none is given."""

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, torch.nn.Parameter],
        base: Mapping[str, torch.Tensor] | None = None,
        *,
        bits: int = 3,
        subset: int = 1,
        momentum: float = 0.0,
        lie: Lie | None = None,
    ) -> None:
        base = base or {name: torch.zeros_like(one.detach()) for name, one in parameters.items()}
        self.name, self.parameters, self.bits, self.subset = name, parameters, bits, subset
        self.flat = Lying(parameters, base)
        self.flat.lie = lie
        self.outer = OuterStep(self.flat, momentum)
        self.coverage, self.distances = Coverage(subset, 0), Distances()
        self.version = self.work = 0
        self.garbage: Callable[[bytes], bytes] | None = None  # what is sent instead of its values

    @property
    def vector(self) -> torch.Tensor:
        """In the order of names."""
        return torch.cat([value for _, value in self.flat.parameters])

    @torch.no_grad()
    def put(self, vector: torch.Tensor) -> None:
        sizes = [len(value) for _, value in self.flat.parameters]
        for (_, value), new in zip(self.flat.parameters, vector.split(sizes), strict=True):
            value.copy_(new)

    def stepped(self, work: int = 1) -> None:
        """It has taken an inner step. work: as it claims."""
        self.version += 1
        self.work += work

    def opening(self, choice: pb.GossipOpen) -> pb.GossipOpen:
        return pb.GossipOpen(
            run_id="run",
            protocol=PROTOCOL_VERSION,
            peer_id=self.name,
            weight_version=self.version,
            count=self.flat.count,
            segment_blocks=SEGMENT_BLOCKS,
            exchange=choice.exchange,
            subset=choice.subset,
            offset=choice.offset,
            bits=choice.bits,
            work=self.work,
            usual=self.distances.usual,
        )


class Pipe:
    """One end of an exchange: sends to one queue, receives from the other. tamper: sees what leaves, and may change it;
    None: it is lost, and the stream with it."""

    remote = "partner"

    def __init__(self, outgoing: asyncio.Queue, incoming: asyncio.Queue, tamper: Tamper | None) -> None:
        self._outgoing, self._incoming, self._tamper = outgoing, incoming, tamper
        self._lost = False

    async def send(self, message: pb.GossipMessage) -> None:
        copy = pb.GossipMessage.FromString(message.SerializeToString())
        passing = self._tamper(copy) if self._tamper else copy
        self._lost = self._lost or passing is None
        if not self._lost:
            self._outgoing.put_nowait(passing)

    async def messages(self) -> AsyncIterator[pb.GossipMessage]:
        while (message := await self._incoming.get()) is not None:
            yield message

    def end(self) -> None:
        self._outgoing.put_nowait(None)


class Garbage:
    """Changes a bad replica's values on their way, while its samples are honest, and has its own side believe that they
    arrived as they were."""

    def __init__(self, change: Callable[[bytes], bytes]) -> None:
        self._change, self._sent = change, b""

    def leaves(self, message: pb.GossipMessage) -> pb.GossipMessage:
        if message.WhichOneof("body") == "chunk":
            self._sent = message.chunk.data
            message.chunk.data = self._change(self._sent)
        return message

    def arrives(self, message: pb.GossipMessage) -> pb.GossipMessage:
        if message.WhichOneof("body") == "done":
            message.done.checksum = zlib.crc32(self._sent)
        return message


class AtOnce(ThreadPoolExecutor):
    """Runs what the exchange gives to threads where it stands: no thread is worth a few thousand values."""

    def submit(self, job, /, *args, **options):  # type: ignore[no-untyped-def]
        future: Future = Future()
        future.set_result(job(*args, **options))
        return future


Outcome = ExchangeReport | MeshdError


def refusals(outcomes: list[tuple[Outcome, Outcome]]) -> int:
    """Pairs of which one refused the other for its distance."""
    return sum(any(isinstance(outcome, TooFar) for outcome in pair) for pair in outcomes)


class Swarm:
    """Replicas, and the randomness of their exchanges."""

    def __init__(self, replicas: list[Replica], seed: int = 0) -> None:
        self.replicas, self.rng = replicas, random.Random(seed)
        self._runner = asyncio.Runner()
        self._runner.get_loop().set_default_executor(AtOnce())

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def exchange(self, one: Replica, other: Replica, break_at_done: bool = False) -> tuple[Outcome, Outcome]:
        """`one` opens. break_at_done: its confirmation is lost: it moves, the other does not. Returns how it went, of
        both."""
        return self._runner.run(self._exchange(one, other, break_at_done))

    async def _exchange(self, one: Replica, other: Replica, break_at_done: bool) -> tuple[Outcome, Outcome]:
        subset = one.subset
        choice = pb.GossipOpen(
            exchange=self.rng.getrandbits(64),
            bits=one.bits,
            subset=subset,
            offset=one.coverage.next(self.rng) if subset > 1 else 0,
        )
        openings = [side.opening(choice) for side in (one, other)]
        queues: list[asyncio.Queue] = [asyncio.Queue(), asyncio.Queue()]
        tampers: list[Tamper | None] = [
            (lambda m: None if m.WhichOneof("body") == "done" else m) if break_at_done else None,
            None,
        ]
        for at, side in enumerate((one, other)):
            if side.garbage is not None:
                garbage = Garbage(side.garbage)
                tampers[at], tampers[1 - at] = garbage.leaves, garbage.arrives

        async def side(at: int, own: Replica, partner: Replica) -> Outcome:
            pipe = Pipe(queues[at], queues[1 - at], tampers[at])
            mine, theirs = openings[at], openings[1 - at]
            worker = SimpleNamespace(run=_at_once)
            exchange = Exchange(pipe, pipe.messages(), own.flat, own.outer, worker, 60.0)  # type: ignore[arg-type]
            carry = own.coverage.since(mine.subset, mine.offset, mine.weight_version) is not None
            try:
                check_open(mine, theirs)
                report = await exchange.run(mine, theirs, at == 0, carry)
            except TooFar as error:
                own.distances.measured(partner.name, error.distance)
                return error
            except (MeshdError, LinkLost) as error:
                return error
            finally:
                pipe.end()
            own.work = 0
            own.coverage.exchanged(mine.subset, report.offset, 0, mine.weight_version)
            own.distances.measured(partner.name, report.distance)
            return report

        return tuple(await asyncio.gather(side(0, one, other), side(1, other, one)))  # type: ignore[return-value]

    def exchange_all(self) -> list[tuple[Outcome, Outcome]]:
        """All exchange in random pairs, once. Returns how it went, of both of each pair."""
        return [self.exchange(one, other) for one, other in self.pairs()]

    def pairs(self) -> Iterator[tuple[Replica, Replica]]:
        """All replicas in random pairs, once."""
        shuffled = self.rng.sample(self.replicas, len(self.replicas))
        return zip(
            itertools.islice(shuffled, 0, None, 2), itertools.islice(shuffled, 1, None, 2), strict=False
        )

    @property
    def mean(self) -> torch.Tensor:
        """float64."""
        return torch.stack([replica.vector.double() for replica in self.replicas]).mean(0)

    @property
    def spread(self) -> float:
        """Mean square of the replicas' differences to their mean: the consensus error."""
        return spread([replica.vector for replica in self.replicas])


def spread(vectors: list[torch.Tensor]) -> float:
    stacked = torch.stack([vector.double() for vector in vectors])
    return (stacked - stacked.mean(0)).square().mean().item()


async def _at_once(job: Callable[[], torch.Tensor], priority: object) -> torch.Tensor:
    return job()


SIZES = {"a.weight": 1200, "b.bias": 48, "c.weight": 800}


def flat_tensors(vector: torch.Tensor) -> dict[str, torch.nn.Parameter]:
    """Parameters of SIZES, in the order of names, that hold the vector (2048,)."""
    parts = vector.split(list(SIZES.values()))
    return {name: torch.nn.Parameter(part.clone()) for name, part in zip(SIZES, parts, strict=True)}


DIMENSION = sum(SIZES.values())


class Quadratic:
    """A loss with a different curvature at every coordinate, which each replica sees with its own noise, of its own
    size, around an optimum that is a little its own (its text)."""

    def __init__(self, count: int, seed: int = 0, own: float = 0.3, rate: float = 0.05) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._rate = rate
        self.curvature = torch.exp(torch.rand(DIMENSION, generator=generator) * -3.0)
        self.optimum = torch.randn(DIMENSION, generator=generator)
        own_parts = own * torch.randn(count, DIMENSION, generator=generator)
        self._optima = self.optimum + own_parts - own_parts.mean(0)
        self._noise = torch.linspace(0.5, 2.0, count)
        self._generators = [torch.Generator().manual_seed(seed + 1 + at) for at in range(count)]

    def step(self, at: int, vector: torch.Tensor) -> torch.Tensor:
        """Where SGD of replica `at` takes this vector."""
        noise = self._noise[at] * torch.randn(DIMENSION, generator=self._generators[at])
        return vector - self._rate * (self.curvature * (vector - self._optima[at]) + noise)

    def loss(self, vector: torch.Tensor) -> float:
        return (self.curvature * (vector - self.optimum).square()).mean().item() / 2


class TinyTask:
    """The tests' small pretrained model, adapted to the prose that it never saw; each reads windows of its own."""

    def __init__(self, model: Path, text: Path, count: int, *, rows: int = 4, tokens: int = 96) -> None:
        self._model, self._rows = model, rows
        tokenizer = AutoTokenizer.from_pretrained(model)
        windows = []
        for path in sorted(text.glob("*.txt")):
            ids = torch.tensor(tokenizer(path.read_text(), verbose=False)["input_ids"])
            windows.append(ids.unfold(0, tokens + 1, tokens))
        every = torch.cat(windows)
        held = torch.arange(len(every)) % 8 == 7
        self._held = every[held][:24]
        # Neighbours, so that replicas read different documents.
        self._texts = every[~held].tensor_split(count)
        self._generators = [torch.Generator().manual_seed(at) for at in range(count)]
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self.base = dict(self._fresh().named_parameters())

    def _fresh(self) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32)

    def replicas(self, **options: Any) -> list[Replica]:
        """New ones, all from the base."""
        self._models = [self._fresh() for _ in self._texts]
        self._optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in self._models]
        for at, generator in enumerate(self._generators):
            generator.manual_seed(at)
        base = {name: parameter.detach() for name, parameter in self.base.items()}
        return [
            Replica(f"r{at}", dict(model.named_parameters()), base, **options)
            for at, model in enumerate(self._models)
        ]

    def step(self, at: int) -> None:
        text = self._texts[at]
        rows = torch.randint(len(text), (self._rows,), generator=self._generators[at])
        self._optimizers[at].zero_grad()
        _next_token_loss(self._models[at], text[rows]).backward()
        self._optimizers[at].step()

    def train(self, swarm: Swarm, steps: int, every: int) -> list[tuple[Outcome, Outcome]]:
        """Inner steps of the swarm's replicas, which are this task's. every: steps between exchanges of all; 0: none.
        Returns how the exchanges went, of both of each pair."""
        outcomes = []
        for step in range(steps):
            for at, replica in enumerate(swarm.replicas):
                self.step(at)
                replica.stepped()
            if every and step % every == every - 1:
                outcomes += swarm.exchange_all()
        return outcomes

    @torch.no_grad()
    def loss(self, at: int) -> float:
        return _next_token_loss(self._models[at], self._held).item()


def _next_token_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
