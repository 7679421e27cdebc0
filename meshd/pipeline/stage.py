"""What a stage peer's pipeline is made of, and what it asks the daemon around it."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from meshd.clock import Clock
from meshd.model.cut import Hop, hops
from meshd.model.stage import StageModel
from meshd.observe.metrics import Metrics
from meshd.observe.trace import Tracer
from meshd.optim.inner import StepReport
from meshd.optim.schedule import TokenCounter
from meshd.pipeline import worker
from meshd.pipeline.runtime import StageRuntime
from meshd.priors.boundary import BoundaryPrior
from meshd.priors.store import PriorStore
from meshd.transport.base import Transport


@dataclass(frozen=True)
class Replica:
    """Where one replica of a hop can be reached."""

    peer_id: str
    name: str
    address: str


@dataclass(frozen=True)
class Surroundings:
    """What the pipeline asks the daemon.

    replicas: working replicas of a stage, this peer left out. origin: where a peer of stage 0 can be reached that waits
    for microbatches of its own, also when it leaves and takes no others. live_replicas: of this peer's own stage, this
    peer included. holds: whether a peer has claimed this peer's own stage, working or not yet. frozen: the model of a
    snapshot watermark, or None when it is not here. priors: what this peer has of codec priors. fetch_prior: bring one
    that a peer of a stage names into it; raises MeshdError.
    """

    replicas: Callable[[int], Sequence[Replica]]
    live_replicas: Callable[[], int]
    holds: Callable[[str], bool]
    frozen: Callable[[int], Awaitable[StageModel | None]]
    stepped: Callable[[StepReport], None]
    priors: PriorStore
    fetch_prior: Callable[[int, str, bytes], Awaitable[BoundaryPrior]]
    origin: Callable[[str], Replica | None] = lambda peer_id: None


@dataclass
class Stage:
    """The parts that make up one stage peer's pipeline."""

    peer_id: str
    name: str
    incarnation: int
    runtime: StageRuntime
    worker: worker.DeviceWorker
    transport: Transport
    counter: TokenCounter
    around: Surroundings
    clock: Clock
    metrics: Metrics
    rng: random.Random
    tracer: Tracer = field(default_factory=Tracer)
    hops: list[Hop] = field(init=False)

    def __post_init__(self) -> None:
        resolved = self.runtime.run.resolved
        self.hops = hops(resolved.layers, resolved.cut, resolved.tied)
        self.runtime.tracer = self.tracer
