"""Replicas of a stage that spread priors: their real relays, stores and donors on a network in memory, virtual time."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from google.protobuf.message import Message

from meshd import PROTOCOL_VERSION
from meshd.anchor.notices import Bounds, Entry, seal
from meshd.anchor.relay import Relay
from meshd.anchor.spreading import Offering, Publisher
from meshd.config.runspec import ResolvedRun
from meshd.errors import MismatchError
from meshd.identity import Identity
from meshd.observe.metrics import Metrics
from meshd.pipeline.stage import Replica
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import EPOCH, VirtualClock
from meshd.state.bundle import BundleStore
from meshd.state.donor import Donor
from meshd.state.fetch import fetch_bundle
from meshd.transport.memory import Delivery, MemoryNetwork

RUN_ID = "ab" * 20
WEIGHTS, BOUNDARY = pb.PRIOR_KIND_WEIGHTS, pb.PRIOR_KIND_BOUNDARY
MOST = 100_000
BAD = b"no prior"


def run_of(bps: int = 0) -> ResolvedRun:
    """As much of a run of two stages as spreading looks at."""
    return cast(
        ResolvedRun,
        SimpleNamespace(
            run_id=RUN_ID,
            stages=2,
            resolved=SimpleNamespace(layers=4, cut=[2], tied="none"),
            spec=SimpleNamespace(anchors=SimpleNamespace(bps=bps)),
        ),
    )


def bounds(number: int = 1, apart_tokens: int = 0, apart_s: float = 0.0) -> Bounds:
    return Bounds(RUN_ID, 2, 1, 128, 1024, {(WEIGHTS, number): MOST}, apart_tokens, apart_s)


def identity(root: Path, name: str) -> Identity:
    return Identity.load_or_create(root / name / "identity")[0]


def notice_of(who: Identity, data: bytes, **changes: Any) -> pb.Notice:
    """A valid notice of stage 1's weights, but for what is changed."""
    values = {
        "run_id": RUN_ID,
        "author": who.peer_id,
        "kind": WEIGHTS,
        "number": 1,
        "name": hashlib.sha256(data).digest(),
        "size_bytes": len(data),
        "version": 1,
        "weight_version": 3,
        "measured": 500,
        "time": EPOCH,
        "tokens": 100,
    }
    return pb.Notice(**{**values, **changes})


class Taker:
    """A user that keeps what it takes, and refuses what begins with BAD."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.left: list[bytes] = []

    async def take(self, notice: pb.Notice, data: bytes) -> None:
        if data.startswith(BAD):
            raise MismatchError("no prior at all")
        self.taken.append(data)

    def gone(self, notice: pb.Notice) -> None:
        self.left.append(notice.name)

    def needs(self, name: bytes) -> bool:
        return False


class Handlers:
    """What peers serve here."""

    def __init__(self, donor: Donor, relay: Relay | None = None) -> None:
        self._relay = relay
        self.manifest, self.fetch = donor.manifest, donor.fetch

    async def offer(self, request: pb.PriorOffer) -> pb.PriorAnswer:
        assert self._relay is not None
        return await self._relay.serve(request)


@dataclass
class Peer:
    """One replica, or an anchor."""

    name: str
    metrics: Metrics
    store: BundleStore
    taker: Taker = field(default_factory=Taker)
    relay: Relay | None = None

    def count(self, metric: str) -> float:
        return self.metrics.value(metric)


@dataclass
class Fleet:
    root: Path
    net: MemoryNetwork
    tasks: asyncio.TaskGroup
    run: ResolvedRun
    clock: VirtualClock
    bounds: Bounds = field(default_factory=bounds)
    counted: int = 500
    """Global tokens that all know."""
    peers: dict[str, Peer] = field(default_factory=dict)
    running: list[asyncio.Task[None]] = field(default_factory=list)
    addresses: dict[str, str] = field(default_factory=dict)
    fetched: Counter[str] = field(default_factory=Counter)
    """Files that each address has asked for."""

    def replicas(self) -> list[Replica]:
        return [
            Replica(name, name, f"{name}:1") for name, peer in self.peers.items() if peer.relay is not None
        ]

    def address(self, peer_id: str) -> str | None:
        """By records: of an anchor, a replica, or else the stranger; not of `unknown`."""
        if peer_id == "unknown":
            return None
        return self.addresses.get(peer_id, "stranger:1")

    def _parts(self, name: str) -> Peer:
        return Peer(name, Metrics(self.clock), BundleStore(self.root / name / "bundles"))

    def replica(self, name: str) -> Peer:
        """Start one."""
        peer, rng, transport = self._parts(name), random.Random(name), self.net.transport(f"{name}:1")

        async def fetch(bundle: str, address: str, most: int) -> None:
            await fetch_bundle(
                bundle, [address], transport, peer.store, RUN_ID, clock=self.clock, rng=rng, patience_s=10.0,
                max_bytes=most,
            )  # fmt: skip

        peer.relay = Relay(
            self.bounds,
            {(WEIGHTS, 1): peer.taker},
            peer.store,
            fetch,
            Offering(name, self.run, transport, self.clock, peer.metrics),
            lambda: [replica for replica in self.replicas() if replica.peer_id != name],
            self.address,
            lambda: (3, self.counted),
            self.clock,
            peer.metrics,
            rng,
        )
        self.peers[name] = peer
        self._serve(name, peer)
        self.running.append(self.tasks.create_task(peer.relay.run(), name=name))
        return peer

    def _serve(self, name: str, peer: Peer) -> None:
        donor = Donor(peer.store, RUN_ID, clock=self.clock)
        self.addresses[name] = f"{name}:1"
        self.net.register(f"{name}:1", cast(Any, Handlers(donor, peer.relay)))

    def anchor(self, name: str) -> tuple[Publisher, Peer]:
        """Start one."""
        peer = self._parts(name)
        publisher = Publisher(
            identity(self.root, name), self.run, peer.store, self.net.transport(f"{name}:1"),
            lambda stage: self.replicas() if stage == 1 else [], self.clock, peer.metrics, random.Random(name),
        )  # fmt: skip
        self.peers[name] = peer
        self._serve(name, peer)
        self.addresses[identity(self.root, name).peer_id] = f"{name}:1"
        self.running.append(self.tasks.create_task(publisher.run(), name=name))
        return publisher, peer

    async def offer(
        self, to: str, *entries: Entry, peer_id: str = "stranger", whole: bool = False
    ) -> pb.PriorAnswer:
        """As a stranger with such a record, who serves files at stranger:1."""
        request = pb.PriorOffer(
            run_id=RUN_ID, protocol=PROTOCOL_VERSION, notices=[entry.signed for entry in entries],
            peer_id=peer_id, whole=whole,
        )  # fmt: skip
        return await self.net.transport("stranger:1").offer(f"{to}:1", request)

    def stranger(self) -> BundleStore:
        """Serve what is put into this store."""
        peer = self._parts("stranger")
        self._serve("stranger", peer)
        return peer.store

    def tap(self, source: str, target: str, message: Message) -> list[Delivery]:
        if isinstance(message, pb.FetchRequest):
            self.fetched[source] += 1
        return [Delivery(message)]

    async def until(self, condition: Callable[[], bool], seconds: float = 600.0) -> float:
        """Wait until it holds. Returns the seconds that took."""
        began = self.clock.monotonic()
        async with asyncio.timeout(seconds):
            while not condition():
                await self.clock.sleep(0.1)
        return self.clock.monotonic() - began

    def all_have(self, data: bytes) -> bool:
        return all(data in peer.taker.taken for peer in self.peers.values() if peer.relay is not None)


@asynccontextmanager
async def fleet(
    root: Path, replicas: int, bps: int = 0, limits: Bounds | None = None
) -> AsyncIterator[Fleet]:
    clock = VirtualClock()
    async with MemoryNetwork(clock) as net, asyncio.TaskGroup() as tasks:
        made = Fleet(root, net, tasks, run_of(bps), clock, limits or bounds())
        net.tap = made.tap
        for number in range(replicas):
            made.replica(f"r{number}")
        try:
            yield made
        finally:
            for task in made.running:
                task.cancel()


def sealed(who: Identity, data: bytes, **changes: Any) -> Entry:
    return seal(notice_of(who, data, **changes), who)
