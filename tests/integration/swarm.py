"""A whole swarm in one process: the daemon's own parts on a network in memory, on virtual time, with real models."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf.message import Message

from meshd.config.load import validate
from meshd.config.peer import PeerConfig
from meshd.config.runspec import ResolvedRun, RunSpec
from meshd.data.dataset import Dataset
from meshd.discovery.memory import MemoryRegistry, MemorySwarm
from meshd.identity import Identity
from meshd.peer.directory import Self
from meshd.peer.peer import Peer
from meshd.peer.resolve import BUNDLES, resolve
from meshd.peer.stage import StagePeer
from meshd.pipeline.runtime import Returned, StageRuntime, Work
from meshd.pipeline.service import Passed, Pipeline
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock
from meshd.state.bundle import BundleStore
from meshd.transport.memory import Delivery, MemoryNetwork, Tap


def tiny_spec(weights: Path, text: Path, /, **tables: dict[str, Any]) -> RunSpec:
    """A run of the committed small model that takes seconds. Tables are merged over the defaults here."""
    values: dict[str, Any] = {
        "name": "test",
        "seed": 3,
        "model": {"source": str(weights), "stages": 2, "cut": [3]},
        "data": {
            "sources": [str(text)],
            "seq_len": 32,
            "microbatch": 2,
            "held_out_sequences": 4,
            "held_out": 0.2,
        },
        "optim": {"lr": 1e-3, "warmup_steps": 2, "inner_batch": 4},
        "snapshot": {"every_tokens": 10**9},
        "stop": {"steps": 6},
    }
    for name, table in tables.items():
        values[name] = {**values.get(name, {}), **table}
    return validate(RunSpec, values, "test")


SERVING = (pb.PEER_STATE_WORKING, pb.PEER_STATE_FINISHED)


@dataclass
class Account:
    """A journal, read without the code that wrote it. items: how often each data item was committed."""

    injected: int = 0
    committed: int = 0
    dropped: int = 0
    partial: int = 0
    tokens: int = 0
    open: dict[int, int] = field(default_factory=dict)
    items: Counter[int] = field(default_factory=Counter)

    @property
    def holds(self) -> bool:
        """The ledger's invariant, and that no data was committed twice."""
        whole = self.injected == self.committed + self.dropped + len(self.open)
        return whole and max(self.items.values(), default=1) == 1


def read_account(path: Path) -> Account:
    """Sums of a journal. Items that were committed before it was compacted last are not in it."""
    account, sequence = Account(), 0
    for line in path.read_text().splitlines():
        kind, *fields = line.split()
        values = [int(field) for field in fields]
        if kind == "B":
            account.injected, account.committed, account.dropped, account.partial = values[:4]
            account.tokens, sequence = values[4], values[5]
        elif kind == "O":
            account.injected += 1
            account.open[values[0]] = values[1]
        elif kind == "I":
            account.injected += 1
            account.open[sequence] = values[0]
            sequence += 1
        elif kind == "C":
            account.committed += 1
            account.tokens += values[1]
            account.items[account.open.pop(values[0])] += 1
        elif kind == "D":
            account.dropped += 1
            account.partial += values[1]
            account.open.pop(values[0])
    return account


class Additions:
    """Counts every gradient that any peer adds, by (peer, incarnation, hop, origin, sequence, attempt)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: Counter[tuple[str, int, int, str, int, int]] = Counter()
        through, added = Pipeline.through, StageRuntime._added

        async def watched(pipeline: Pipeline, hop: int, id: pb.MicrobatchId, work: Work) -> Passed:
            stage = pipeline.stage
            key = (stage.peer_id, stage.incarnation, hop, id.origin, id.sequence, id.attempt)
            work.key = key  # type: ignore[attr-defined]
            return await through(pipeline, hop, id, work)

        def counted(runtime: StageRuntime, hop: int, work: Work, *rest: Any) -> Returned:
            returned = added(runtime, hop, work, *rest)
            self.seen[work.key] += 1  # type: ignore[attr-defined]
            return returned

        monkeypatch.setattr(Pipeline, "through", watched)
        monkeypatch.setattr(StageRuntime, "_added", counted)

    def check(self) -> None:
        """Nothing was added twice (DESIGN section 2.5)."""
        assert self.seen
        assert max(self.seen.values()) == 1


def unharmed(source: str, target: str, message: Message) -> list[Delivery]:
    """The tap that delivers everything."""
    return [Delivery(message)]


@dataclass
class Payloads:
    """A tap that notes what goes down from one address: targets, and attempts by sequence number of what is trained on.

    It counts chunks: of the runs here, the payload of a microbatch is a single one. then: decides on the delivery.
    """

    source: str
    then: Tap = unharmed
    targets: Counter[str] = field(default_factory=Counter)
    attempts: dict[int, set[int]] = field(default_factory=dict)

    def __call__(self, source: str, target: str, message: Message) -> list[Delivery]:
        if source == self.source and isinstance(message, pb.LinkMessage) and message.HasField("chunk"):
            id = message.chunk.id
            self.targets[target] += 1
            if id.sequence < 1 << 63:  # evaluations are numbered from there
                self.attempts.setdefault(id.sequence, set()).add(id.attempt)
        return self.then(source, target, message)

    def repeated(self) -> int:
        """How many microbatches went down whole more than once."""
        return sum(len(attempts) > 1 for attempts in self.attempts.values())


def whole_loss(model: Any, batch: Any) -> torch.Tensor:
    """Mean cross-entropy over a microbatch's label tokens, by the whole model in plain torch."""
    logits = model(batch.inputs).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    mask = batch.label_mask.flatten()
    return losses[mask].sum() / mask.sum()


@torch.no_grad()
def held_out_loss(model: Any, data: Dataset, spec: RunSpec) -> float:
    """Held-out loss of a whole model, in plain torch, over the windows that the swarm evaluates."""
    batches = list(data.held_out_batches(spec.data.microbatch, spec.data.held_out_sequences))
    tokens = [int(batch.label_mask.sum()) for batch in batches]
    losses = [whole_loss(model.eval(), batch).item() for batch in batches]
    return sum(n * loss for n, loss in zip(tokens, losses, strict=True)) / sum(tokens)


@dataclass
class Swarm:
    """Peers by name. Each has its own folder, address and registry view."""

    run: ResolvedRun
    operator_folder: Path
    root: Path
    network: MemoryNetwork
    registry: MemorySwarm
    clock: VirtualClock
    tasks: asyncio.TaskGroup
    peers: dict[str, Peer] = field(default_factory=dict)
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    traces: Path | None = None  # of the peers started from then on

    def folder(self, name: str) -> Path:
        return self.operator_folder if name == "seed" else self.root / name

    def start(
        self,
        name: str,
        stage: int | None = None,
        role: str = "stage",
        knows_run: bool = False,
        clock: VirtualClock | None = None,
        run_id: str | None = None,
        offload: bool = False,
    ) -> Peer:
        """Start a peer. knows_run: it has the run spec already, as the operator's has. clock, run_id: when its own
        differ from the swarm's. offload: as an anchor."""
        trace = str(self.traces / f"{name}.json") if self.traces else ""
        config = PeerConfig(
            role=role, stage=stage, name=name, device="cpu", drain_s=20.0, offload=offload, trace=trace
        )
        # Anchors sign what they publish; of others the name tells enough.
        identity = Identity.load_or_create(self.folder(name) / "identity")[0] if role == "anchor" else None
        me = Self(
            peer_id=name if identity is None else identity.peer_id,
            name=name,
            role=pb.Role.Value(f"ROLE_{role.upper()}"),
            run_id=run_id or self.run.run_id,
            incarnation=int(self.clock.time() * 1000),
            address=f"{name}:1",
        )
        peer = Peer(config, me, clock or self.clock, random.Random(name), identity)
        self.network.register(me.address, peer.handlers)
        registry = MemoryRegistry(self.registry, me.peer_id)
        transport = self.network.transport(me.address)
        run = self.run if knows_run or name == "seed" else None
        self.peers[name] = peer
        self.running[name] = self.tasks.create_task(
            peer.run(run, self.folder(name), registry, transport), name=name
        )
        return peer

    def stage_peer(self, name: str) -> StagePeer:
        role = self.peers[name].role
        assert isinstance(role, StagePeer)
        return role

    def store(self, name: str) -> BundleStore:
        return BundleStore(self.folder(name) / BUNDLES)

    async def finished(self, *names: str) -> None:
        """Wait until these peers have left by themselves."""
        await asyncio.gather(*(self.running[name] for name in names))

    async def until(self, condition: Any, seconds: float = 600.0) -> None:
        """Wait (virtual time) until `condition()` holds."""
        async with asyncio.timeout(seconds):
            while not condition():
                await self.clock.sleep(0.05)

    async def kill(self, name: str) -> None:
        """As if the process died."""
        self.network.kill(f"{name}:1")
        self.running[name].cancel()
        await asyncio.wait({self.running[name]})

    def delay(self, seconds: float, *names: str) -> None:
        """One-way delay of every message between these peers: with it a run takes (virtual) time."""
        for a, b in combinations(names, 2):
            self.network.set_delay(f"{a}:1", f"{b}:1", seconds)

    def cut(self, some: list[str], others: list[str]) -> None:
        """Part two groups until `self.network.heal()`."""
        for a in some:
            for b in others:
                self.network.cut(f"{a}:1", f"{b}:1")

    async def working(self, *names: str) -> None:
        """Wait until these peers work and each has heard that the others do."""

        def knows(name: str) -> bool:
            peer = self.peers[name]
            if peer.status.directory is None or peer.me.state not in SERVING:
                return False
            heard = {r.peer_id for r in peer.status.directory.peers if r.state in SERVING}
            return heard >= {*names} - {name}

        await self.until(lambda: all(map(knows, names)))

    async def gathered(self, *stages: list[str]) -> None:
        """Start peers, `stages[n]` on stage n, and let training begin once all of them know of each other.

        Until then neighbours cannot reach each other: nobody steps while it does not know its replicas.
        """
        for upstream, downstream in zip(stages, [*stages[1:], stages[0]], strict=True):
            self.cut(upstream, downstream)
        for number, names in enumerate(stages):
            for name in names:
                self.start(name, number)
        everyone = [name for names in stages for name in names]
        await self.working(*everyone)
        self.network.heal()

    def counted(self, metric: str, *names: str) -> float:
        """Sum of a counter over these peers (all of them when none are named)."""
        chosen = names or tuple(self.peers)
        return sum(self.peers[name].metrics.value(metric) for name in chosen)

    def replayed(self) -> float:
        """Microbatches that went a second time over some link."""
        return self.counted("microbatches_replayed")

    def version(self, name: str) -> int:
        """Inner steps in a peer's weights."""
        return self.stage_peer(name).runtime.version

    def tokens(self, name: str) -> int:
        """What a peer knows of the global token counter."""
        directory = self.peers[name].status.directory
        return 0 if directory is None else directory.counter.total

    def account(self, name: str) -> Account:
        """What an origin did with its data, by its journal on disk."""
        return read_account(self.folder(name) / "journal")

    async def held_out(self) -> dict[int, float]:
        """Held-out losses that the swarm reports, by watermark."""
        reply = await self.peers["seed"].status.answer(pb.StatusRequest(swarm=True))
        return {point.tokens: point.loss for point in reply.evaluations}

    def losses(self, *names: str) -> list[float]:
        """Training losses of these origins in the order in which they came back."""
        points = [point for name in names for point in self.peers[name].status.losses()]
        return [point.loss for point in sorted(points, key=lambda point: point.time)]

    def parameters(self, name: str) -> dict[str, torch.Tensor]:
        """A stage peer's trained parameters, copied."""
        return {n: p.detach().clone() for n, p in self.stage_peer(name).runtime.model.trainable().items()}

    def data(self) -> Dataset:
        return Dataset.open(self.store("seed").path("run/data", "facts.json").parent)


@asynccontextmanager
async def swarm(spec: RunSpec, root: Path) -> AsyncIterator[Swarm]:
    """The operator's seed is up when the block begins; everything is stopped when it ends."""
    clock = VirtualClock()
    run, folder = await asyncio.to_thread(resolve, spec, root / "seed", "seed")
    async with MemoryNetwork(clock) as network, asyncio.TaskGroup() as tasks:
        made = Swarm(run, folder, root, network, MemorySwarm(clock), clock, tasks)
        made.start("seed", role="seed")
        try:
            yield made
        finally:
            for task in made.running.values():
                task.cancel()
