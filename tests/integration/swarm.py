"""A whole swarm in one process: the daemon's own parts on a network in memory, on virtual time, with real models."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshd.config.load import validate
from meshd.config.peer import PeerConfig
from meshd.config.runspec import ResolvedRun, RunSpec
from meshd.discovery.memory import MemoryRegistry, MemorySwarm
from meshd.peer.directory import Self
from meshd.peer.peer import Peer
from meshd.peer.resolve import BUNDLES, resolve
from meshd.peer.stage import StagePeer
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock
from meshd.state.bundle import BundleStore
from meshd.transport.memory import MemoryNetwork


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

    def folder(self, name: str) -> Path:
        return self.operator_folder if name == "seed" else self.root / name

    def start(
        self, name: str, stage: int | None = None, role: str = "stage", knows_run: bool = False
    ) -> Peer:
        """Start a peer. knows_run: it has the run spec already, as the operator's has."""
        config = PeerConfig(role=role, stage=stage, name=name, device="cpu", drain_s=20.0)
        me = Self(
            peer_id=name,
            name=name,
            role=pb.ROLE_SEED if role == "seed" else pb.ROLE_STAGE,
            run_id=self.run.run_id,
            incarnation=int(self.clock.time() * 1000),
            address=f"{name}:1",
        )
        peer = Peer(config, me, self.clock, random.Random(name))
        self.network.register(me.address, peer.handlers)
        registry = MemoryRegistry(self.registry, name)
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
                await asyncio.sleep(0.05)

    def kill(self, name: str) -> None:
        """As if the process died."""
        self.network.kill(f"{name}:1")
        self.running[name].cancel()


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
