"""Peers of one stage that only gossip, with the product's own service, on a network in memory with a virtual clock."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import torch
from pipeline_helpers import make_run, no_prior, no_priors

from meshd.gossip import exchange as exchange_module
from meshd.gossip import service as service_module
from meshd.gossip.service import Gossip
from meshd.gossip.values import FlatParameters
from meshd.observe.metrics import Metrics
from meshd.optim.inner import StepReport
from meshd.optim.schedule import TokenCounter
from meshd.pipeline.keeping import Keeping
from meshd.pipeline.stage import Replica, Stage, Surroundings
from meshd.pipeline.worker import DeviceWorker
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import VirtualClock, run_virtual
from meshd.transport.base import Duplex
from meshd.transport.memory import MemoryNetwork

SHAPES = {"b.weight": (6, 5), "a.bias": (7,), "c.weight": (3, 4)}
COUNT = 49


def values(seed: int, size: float = 1.0) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(size * torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }


BASE = {name: parameter.detach() for name, parameter in values(99, 3.0).items()}


def in_order(named: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([named[name].detach().flatten() for name in sorted(named)])


def replica_of(name: str) -> Replica:
    """What others know of the peer of this name."""
    return Replica(name, name, f"{name}:1")


class Peer:
    """One replica of a stage: parameters and gossip, no pipeline."""

    def __init__(
        self, net: MemoryNetwork, name: str, seed: int, others: list[str], **changes: object
    ) -> None:
        gossip = {"timeout_s": 5.0, **changes.get("gossip", {})}  # type: ignore[call-overload]
        run = make_run([2], gossip=gossip, stop={"steps": changes.get("steps", 10)})
        self.name, self.parameters = name, values(seed)
        if "without" in changes:
            del self.parameters[str(changes["without"])]
        self.clock = VirtualClock()
        self.worker = DeviceWorker(name)
        self.metrics = Metrics(self.clock)
        around = Surroundings(
            replicas=lambda stage: [replica_of(other) for other in others if other != name],
            live_replicas=lambda: len(others),
            holds=lambda peer_id: peer_id in others,
            frozen=_no_snapshot,
            stepped=_ignore,
            priors=no_priors(),
            fetch_prior=no_prior,
        )
        self.stage = Stage(
            name,
            name,
            0,
            SimpleNamespace(run=run, version=3, keeping=Keeping()),  # type: ignore[arg-type]
            self.worker,
            net.transport(f"{name}:1"),
            TokenCounter(),
            around,
            self.clock,
            self.metrics,
            random.Random(name),
        )
        self.flat = FlatParameters(self.parameters, BASE)
        self.gossip_service = Gossip(self.stage, self.flat, int(changes.get("stage", 1)))  # type: ignore[call-overload]
        net.register(f"{name}:1", self)  # type: ignore[arg-type]

    async def gossip(self, duplex: Duplex[pb.GossipMessage]) -> None:
        await self.gossip_service.serve(duplex)

    async def exchange(self, other: str, whole: bool = False) -> bool:
        """Open one exchange. True: it was completed."""
        return await self.gossip_service.exchange_with(replica_of(other), whole)

    @property
    def vector(self) -> torch.Tensor:
        return in_order(dict(self.parameters)).clone()

    def counted(self, name: str) -> float:
        return self.metrics.value(name)


async def _no_snapshot(watermark: int) -> None:
    return None


def _ignore(report: StepReport) -> None:
    return None


@asynccontextmanager
async def peers(names: str, **changes: dict[str, object]) -> AsyncIterator[tuple[MemoryNetwork, list[Peer]]]:
    """Replicas by one-letter names on one network; changes: by name."""
    async with MemoryNetwork(VirtualClock()) as net:
        made = [Peer(net, name, ord(name), list(names), **changes.get(name, {})) for name in names]
        for peer in made:
            await peer.worker.__aenter__()
        try:
            yield net, made
        finally:
            for peer in made:
                await peer.worker.__aexit__(None, None, None)


def compressed(names: str) -> dict[str, dict[str, object]]:
    """Changes for `peers`: an exchange covers a quarter of the values, in 3 bits each."""
    return {name: {"gossip": {"bits": 3, "subset": 4}} for name in names}


def segments_of(monkeypatch: pytest.MonkeyPatch, blocks: int) -> int:
    """Segments of so many blocks, so that these few values take several. Returns the number."""
    for module in (exchange_module, service_module):
        monkeypatch.setattr(module, "SEGMENT_BLOCKS", blocks)
    return blocks


def virtual(main: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await main()

    run_virtual(run())
