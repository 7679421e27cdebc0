"""A tiny model cut into runtimes, microbatches through them, and peers of it on a network in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from model_helpers import load_stages, tiny_config, whole_model

from meshd import PROTOCOL_VERSION
from meshd.config.load import validate
from meshd.config.runspec import Resolved, ResolvedRun, RunSpec
from meshd.data.microbatch import Microbatch
from meshd.errors import MeshdError, NetworkError
from meshd.model.cut import Tied
from meshd.observe.metrics import Metrics
from meshd.optim.schedule import TokenCounter
from meshd.pipeline.crossing import needs_priors
from meshd.pipeline.downstream import Passed
from meshd.pipeline.dropped import Dropped
from meshd.pipeline.runtime import Pace, Returned, StageRuntime, Work
from meshd.pipeline.service import Pipeline
from meshd.pipeline.stage import Replica, Stage, Surroundings
from meshd.pipeline.upstream import Intake
from meshd.pipeline.worker import DeviceWorker
from meshd.priors.boundary import BoundaryPrior
from meshd.priors.features import TokenFeatures
from meshd.priors.fit import fit
from meshd.priors.store import PriorStore
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock
from meshd.transport.base import Duplex
from meshd.transport.chunks import split
from meshd.transport.memory import MemoryNetwork
from meshd.wire import Draft, Frame, Readied, read

ROWS, TOKENS, VOCABULARY = 2, 12, 97
CPU = torch.device("cpu")
PACE = Pace(global_tokens=0, live_replicas=1)


def make_run(cut: list[int], tied: Tied = "none", **tables: Any) -> ResolvedRun:
    """A run of the models in model_helpers. Tables are merged over the defaults here: exact codecs, and a batch so
    large that no step happens."""
    values: dict[str, Any] = {
        "name": "test",
        "model": {"source": "none", "stages": len(cut) + 1, "cut": cut},
        "data": {"sources": ["none"], "seq_len": TOKENS, "microbatch": ROWS},
        "wire": {"forward": "dense32", "backward": "dense32"},
        "optim": {"lr": 1e-2, "warmup_steps": 0, "schedule": "constant", "inner_batch": 10**6},
        "stop": {"steps": 10},
    }
    for name, table in tables.items():
        values[name] = {**values.get(name, {}), **table}
    resolved = Resolved(
        layers=4,
        hidden=32,
        vocabulary=VOCABULARY,
        cut=cut,
        tied=tied,
        base_sha256=["0"] * (len(cut) + 1),
        tokenizer_sha256="0",
        data_sha256="0",
        features_sha256="0",
    )
    return ResolvedRun(spec=validate(RunSpec, values, "test"), resolved=resolved, operator="operator")


def make_runtimes(run: ResolvedRun, family: str = "gpt2-untied", dropout: float = 0.0) -> list[StageRuntime]:
    """One runtime per stage, always of the same weights."""
    model = whole_model(tiny_config(family, dropout))
    resolved = run.resolved
    features = features_of(model) if needs_priors(run.spec.wire) else None
    stages = load_stages(model, resolved.cut, resolved.tied)
    return [StageRuntime(run, stage, CPU, features) for stage in stages]


def features_of(model: Any) -> TokenFeatures:
    return TokenFeatures.from_embedding(model.get_input_embeddings().weight.detach())


def make_batch(seed: int, labels: float = 1.0, documents: bool = False) -> Microbatch:
    """labels: share of labels that count."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, VOCABULARY, (ROWS, TOKENS + 1), generator=generator)
    mask = torch.rand((ROWS, TOKENS), generator=generator) < labels
    mask[0, 0] = True
    starts = torch.zeros((ROWS, TOKENS), dtype=torch.bool)
    starts[:, 0] = starts[0, 5] = starts[1, 3] = starts[1, 9] = True
    return Microbatch(tokens, mask, starts if documents else None)


def works(batch: Microbatch, hops: int, seed: int = 5) -> list[Work]:
    """What each hop holds of one microbatch; frames come on the way."""
    return [Work(batch, batch.to_proto(VOCABULARY, seed), None) for _ in range(hops)]


def forward(runtime: StageRuntime, hop: int, work: Work, safe: bool = False) -> Frame:
    return runtime.forward(hop, work, hidden(runtime, hop, work), safe).frame()


def head(runtime: StageRuntime, hop: int, work: Work, pace: Pace = PACE) -> tuple[float, Returned]:
    return runtime.head(hop, work, hidden(runtime, hop, work), pace)


def backward(
    runtime: StageRuntime, hop: int, work: Work, gradient: Draft | Frame | None, pace: Pace = PACE
) -> Returned:
    assert gradient is not None
    frame = gradient.frame() if isinstance(gradient, Draft) else gradient
    readied = read(frame, runtime.returning(hop, work))
    return runtime.backward(hop, work, hidden(runtime, hop, work), readied, pace)


def hidden(runtime: StageRuntime, hop: int, work: Work) -> Readied | None:
    return None if work.frame is None else read(work.frame, runtime.incoming(hop, work))


def there(by_hop: list[StageRuntime], work: list[Work]) -> None:
    """Forward to the head's door."""
    for hop, runtime in enumerate(by_hop[:-1]):
        work[hop + 1].frame = forward(runtime, hop, work[hop])
        work[hop + 1].prior = work[hop].onward


def back(by_hop: list[StageRuntime], work: list[Work], pace: Pace = PACE) -> tuple[float, list[Returned]]:
    """The head and the way back. Returns the loss and each hop's result, last hop first."""
    last = len(by_hop) - 1
    loss, returned = head(by_hop[last], last, work[last], pace)
    results = [returned]
    for hop in range(last - 1, -1, -1):
        results.append(backward(by_hop[hop], hop, work[hop], results[-1].gradient, pace))
    return loss, results


def train(
    by_hop: list[StageRuntime], batch: Microbatch, seed: int = 5, pace: Pace = PACE
) -> tuple[float, list[Returned]]:
    """One microbatch, there and back."""
    work = works(batch, len(by_hop), seed)
    there(by_hop, work)
    return back(by_hop, work, pace)


def gradients(runtimes: list[StageRuntime]) -> dict[str, torch.Tensor]:
    """Accumulated gradients (sums over label tokens) of all stages by name."""
    return {
        name: parameter.grad.clone()
        for runtime in runtimes
        for name, parameter in runtime.model.trainable().items()
        if parameter.grad is not None
    }


def flat(runtime: StageRuntime) -> torch.Tensor:
    """Accumulated gradients of one stage as one vector."""
    return torch.cat([value.flatten() for value in gradients([runtime]).values()])


# ---- priors -------------------------------------------------------------------------------------------------------

PRIOR_TOKENS = 512


def masked_run(there: str, back: str, cut: tuple[int, ...] = (2,), **wire: Any) -> ResolvedRun:
    """A run with these codecs. wire: more of its table."""
    values = {"forward": there, "backward": back, "prior_tokens": PRIOR_TOKENS, **wire}
    return make_run(list(cut), wire=values, pipeline={"store_mb": 1})


@cache
def fitted_prior(first: int = 0) -> BoundaryPrior:
    """A prior of boundary 0 of the models here, from microbatches; another `first` gives another."""
    runtimes = make_runtimes(masked_run("spectral", "spectral"))
    for number in range(PRIOR_TOKENS):
        measured = train(runtimes, make_batch(first + number), seed=number)[1][-1].measured
        if measured is not None:
            return fit(measured, 0)
    raise AssertionError("it was never enough")


def using(run: ResolvedRun, prior: BoundaryPrior | None) -> list[StageRuntime]:
    """Runtimes whose first boundary has a prior."""
    runtimes = make_runtimes(run)
    if prior is not None:
        runtimes[0].crossings[0].use(prior)
    return runtimes


def no_priors() -> PriorStore:
    """A store that holds none, and is never written to."""
    return PriorStore(None, 32, 0, 1)  # type: ignore[arg-type]


Fetch = Callable[[int, str, bytes], Awaitable[BoundaryPrior]]


async def no_prior(stage: int, peer: str, name: bytes) -> BoundaryPrior:
    raise NetworkError("nobody has priors here")


# ---- peers on a network in memory ---------------------------------------------------------------------------------


def make_stage(
    name: str,
    runtime: StageRuntime,
    worker: DeviceWorker,
    net: MemoryNetwork,
    priors: PriorStore | None = None,
    fetch: Fetch = no_prior,
    replicas: Iterable[Replica] = (),
) -> Stage:
    """The parts of a peer at `NAME:1`. priors: what it has of them. replicas: whom it sends to."""

    async def no_snapshot(watermark: int) -> None:
        return None

    around = Surroundings(
        replicas=lambda stage: tuple(replicas),
        live_replicas=lambda: 1,
        holds=lambda peer_id: False,
        frozen=no_snapshot,
        stepped=lambda report: None,
        priors=no_priors() if priors is None else priors,
        fetch_prior=fetch,
    )
    clock, transport = VirtualClock(), net.transport(f"{name}:1")
    return Stage(
        name,
        name,
        0,
        runtime,
        worker,
        transport,
        TokenCounter(),
        around,
        clock,
        Metrics(clock),
        random.Random(0),
    )


class Taker:
    """The last stage of a run, serving links at `taker:1`. refused: what links ended with."""

    def __init__(
        self, net: MemoryNetwork, run: ResolvedRun, priors: PriorStore | None = None, fetch: Fetch = no_prior
    ) -> None:
        self.worker = DeviceWorker()
        self.runtime = make_runtimes(run)[-1]
        stage = make_stage("taker", self.runtime, self.worker, net, priors, fetch)
        self.metrics, self.counter = stage.metrics, stage.counter
        self.intake = Intake(Pipeline(stage))
        self.refused: list[str] = []
        net.register("taker:1", self)  # type: ignore[arg-type]

    async def link(self, duplex: Duplex[pb.LinkMessage]) -> None:
        try:
            await self.intake.serve(duplex)
        except MeshdError as error:  # anything else would end the network, and the test
            self.refused.append(str(error))
            raise


@asynccontextmanager
async def taker(
    run: ResolvedRun, priors: PriorStore | None = None, fetch: Fetch = no_prior
) -> AsyncIterator[tuple[Taker, MemoryNetwork]]:
    async with MemoryNetwork(VirtualClock()) as net:
        made = Taker(net, run, priors, fetch)
        async with made.worker:
            yield made, net


@dataclass
class Sender:
    """The first stage of a run."""

    stage: Stage
    pipeline: Pipeline
    _sequence: int = 0

    async def send(self) -> Passed | Dropped:
        """A microbatch there and back, always of the same tokens."""
        self._sequence += 1
        id = pb.MicrobatchId(origin="first", sequence=self._sequence)
        try:
            return await self.pipeline.through(0, id, works(make_batch(1), 1)[0])
        except Dropped as dropped:
            return dropped

    @property
    def corrupt(self) -> float:
        return self.stage.metrics.value("dropped_corrupt")

    @property
    def tokens(self) -> int:
        return self.stage.runtime.optimizer.tokens


@asynccontextmanager
async def sender(run: ResolvedRun, net: MemoryNetwork, prior: BoundaryPrior) -> AsyncIterator[Sender]:
    """It uses the prior, and sends to `taker:1`."""
    runtime = using(run, prior)[0]
    async with DeviceWorker() as worker, asyncio.TaskGroup() as tasks:
        stage = make_stage("first", runtime, worker, net, replicas=[Replica("taker", "taker", "taker:1")])
        pipeline = Pipeline(stage)
        running = tasks.create_task(pipeline.run())
        yield Sender(stage, pipeline)
        running.cancel()


def opening(run_id: str) -> pb.LinkMessage:
    """How a link to hop 1 begins."""
    link = pb.LinkOpen(run_id=run_id, protocol=PROTOCOL_VERSION, peer_id="evil", name="evil", hop=1)
    return pb.LinkMessage(open=link)


@asynccontextmanager
async def evil(net: MemoryNetwork, run: ResolvedRun) -> AsyncIterator[Duplex[pb.LinkMessage]]:
    """A link to the taker from one that says whatever it likes."""
    async with net.transport("evil:1").link("taker:1") as duplex:
        await duplex.send(opening(run.run_id))
        yield duplex


async def replies(duplex: Duplex[pb.LinkMessage], count: int) -> list[pb.LinkMessage]:
    """The next messages; a time-out when there are not so many in 30 s."""
    messages = aiter(duplex)
    async with asyncio.timeout(30):
        return [await anext(messages) for _ in range(count)]


def numbered(offer: pb.Offer, sequence: int) -> pb.LinkMessage:
    """The same offer of another microbatch."""
    copy = pb.Offer()
    copy.CopyFrom(offer)
    copy.id.sequence = sequence
    return pb.LinkMessage(offer=copy)


def chunks_of(id: pb.MicrobatchId, payload: bytes) -> list[pb.LinkMessage]:
    """A payload at hop 1."""
    return [pb.LinkMessage(chunk=chunk) for chunk in split(id, 1, payload)]
