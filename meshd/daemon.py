"""The daemon: from a run spec or a swarm link to a peer at work, and back to nothing left behind."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from meshd.clock import Clock, SystemClock
from meshd.config.peer import PeerConfig
from meshd.config.runspec import ResolvedRun, RunSpec
from meshd.discovery.addresses import PeerAddress, announced_hosts, readable
from meshd.discovery.dht import DhtRegistry
from meshd.discovery.link import SwarmLink
from meshd.discovery.p2pd import Endpoint
from meshd.discovery.registry import Registry
from meshd.discovery.remembered import Remembered
from meshd.discovery.static import StaticRegistry
from meshd.errors import MismatchError, ResourceError, ungrouped
from meshd.ground import Ground
from meshd.identity import Identity
from meshd.observe.daemonfile import DaemonFile
from meshd.observe.healthz import serve_health
from meshd.observe.log import event
from meshd.observe.metrics import watch_loop_lag, watch_memory
from meshd.peer.directory import Self
from meshd.peer.peer import Peer
from meshd.peer.resolve import known_run, resolve, run_directory
from meshd.proto import meshd_pb2 as pb
from meshd.state.disk import disk_faults
from meshd.transport.base import Transport
from meshd.transport.grpc_client import GrpcTransport
from meshd.transport.grpc_server import serve
from meshd.transport.shaper import LinkShape
from meshd.transport.uplink import Uplink

log = logging.getLogger(__name__)

_REMEMBER_S = 10.0
_ROLES = {"stage": pb.ROLE_STAGE, "seed": pb.ROLE_SEED, "anchor": pb.ROLE_ANCHOR}


async def run_daemon(
    ground: Ground, spec: RunSpec | None, link: SwarmLink | None, registry: Path | None = None
) -> int:
    """Run one peer until its run has ended or a signal asks it to leave. Returns the exit code.

    ground: held by the caller until this returns. spec: given by the operator (`meshd run`), who makes the run from it;
    link: given to join a swarm. With both, the operator's peer joins a swarm of that run. registry: with `spec`, in
    place of a link, the file that lists the peers.
    Raises MeshdError for what the user must know.
    """
    state_dir = ground.state_dir
    run: ResolvedRun | None
    if spec is not None:
        event(log, "preparing_run", name=spec.name)
        made, folder = await asyncio.to_thread(resolve, spec, state_dir, ground.identity.peer_id)
        run = made
        if registry is not None:
            link = SwarmLink(made.run_id, file=registry)
    else:
        assert link is not None
        folder = run_directory(state_dir, link.run_id)
        run = await asyncio.to_thread(known_run, folder, link.run_id)
    daemon = Daemon(ground.config, state_dir, ground.identity, link)
    try:
        with _signals(daemon), ungrouped():
            await daemon.run(run, folder)
    finally:
        DaemonFile.remove(state_dir)
    return 0


@contextmanager
def _signals(daemon: Daemon) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks the daemon to leave in good order; the second ends it at once."""
    loop = asyncio.get_running_loop()

    def ask() -> None:
        if daemon.leaving:
            for child in psutil.Process().children(recursive=True):
                child.kill()
            # At once means without waiting for threads that compute.
            os._exit(130)
        event(log, "leaving", hint="once more to end at once, without handing back what is held")
        daemon.leave()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, ask)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@dataclass
class Daemon:
    """One peer in this process, on gRPC and the registry that its link names."""

    config: PeerConfig
    state_dir: Path
    identity: Identity
    link: SwarmLink | None
    clock: Clock = field(default_factory=SystemClock)
    rng: random.Random = field(default_factory=random.Random)
    leaving: bool = False
    _peer: Peer | None = None

    def leave(self) -> None:
        """Ask the peer to leave in good order."""
        self.leaving = True
        if self._peer is not None:
            self._peer.leave()

    async def run(self, run: ResolvedRun | None, folder: Path) -> None:
        """Serve, register, play the role until the end. `run`: None when it must be asked for in the swarm."""
        config = self.config
        me = Self(
            peer_id=self.identity.peer_id,
            name=config.name or socket.gethostname()[:64],
            role=_ROLES[config.role],
            run_id=self._run_id(run),
            # Milliseconds, so that no two starts of one peer are alike.
            incarnation=int(self.clock.time() * 1000),
        )
        self._peer = peer = Peer(config, me, self.clock, self.rng, self.identity)
        if self.leaving:
            peer.leave()
        shape = LinkShape(config.link.delay_ms / 1000, config.link.jitter_ms / 1000, config.link.rate_bps)
        uplink = Uplink.of(shape, self.clock, self.rng)
        async with (
            serve(peer.handlers, config.listen, config.port, uplink=uplink) as server,
            _closing(GrpcTransport(uplink=uplink)) as transport,
            self._healthz(peer) as health,
            self._registered(me.run_id, run, folder, transport) as registry,
        ):
            host = announced_hosts(config.listen, config.announce)[0]
            me.address = f"[{host}]:{server.port}" if ":" in host else f"{host}:{server.port}"
            async with asyncio.TaskGroup() as tasks:
                services = [
                    tasks.create_task(watch_loop_lag(peer.metrics, self.clock)),
                    tasks.create_task(watch_memory(peer.metrics, self.clock)),
                ]
                if isinstance(registry, DhtRegistry):
                    me.maddrs = [str(address) for address in registry.maddrs()]
                    services.append(tasks.create_task(registry.run()))
                    services.append(tasks.create_task(self._remember(registry, folder)))
                self._say_where(me, health)
                await peer.run(run, folder, registry, transport)
                for service in services:
                    service.cancel()

    @asynccontextmanager
    async def _healthz(self, peer: Peer) -> AsyncIterator[str]:
        """`/healthz`, from the start on (C02); its URL, empty when it is off."""
        config = self.config
        if config.http_port == "off":
            yield ""
            return
        async with serve_health(config.http_listen, config.http_port, peer.watchdog.health) as url:
            yield url

    def _run_id(self, run: ResolvedRun | None) -> str:
        if run is not None:
            if self.link is not None and self.link.run_id != run.run_id:
                raise MismatchError(
                    f"the link is of run {self.link.run_id}, the run spec makes run {run.run_id}. "
                    "Fix: the operator's own state directory, or `meshd join LINK`"
                )
            return run.run_id
        assert self.link is not None
        return self.link.run_id

    @asynccontextmanager
    async def _registered(
        self, run_id: str, run: ResolvedRun | None, folder: Path, transport: Transport
    ) -> AsyncIterator[Registry]:
        """The registry that the link names; the DHT, alone, without one."""
        config, link = self.config, self.link
        if link is not None and link.file is not None:
            registry: Registry = await StaticRegistry.start(
                link.file, run_id, self.identity.peer_id, transport, self.clock
            )
        else:
            before = await asyncio.to_thread(Remembered.read, folder)
            registry = await DhtRegistry.start(
                self.identity,
                run_id,
                endpoint=Endpoint(config.listen, config.dht_port, config.announce, before.dht_port),
                bootstrap=link.addresses if link is not None else (),
                remembered=before.peers,
                stages=run.stages if run is not None else 0,
                clock=self.clock,
                rng=self.rng,
            )
        try:
            yield registry
        finally:
            await registry.close()

    async def _remember(self, registry: DhtRegistry, folder: Path) -> None:
        """Keep on disk where this peer and the others are to be found, for the next start."""
        kept = Remembered()
        while True:
            others = (
                a for peer in registry.peers for a in readable(peer.maddrs) if a.peer_id == peer.peer_id
            )
            # An empty view is no news: the swarm may be back when this peer is.
            now = Remembered(registry.port, tuple(sorted(others, key=str)) or kept.peers)
            if now != kept:
                try:
                    await asyncio.to_thread(now.write, folder)
                    kept = now
                except ResourceError as error:
                    event(log, "peers_not_remembered", level=logging.WARNING, reason=str(error))
            await self.clock.sleep(_REMEMBER_S)

    def _say_where(self, me: Self, health: str) -> None:
        """Log the link that leads here, and leave it for commands on this machine."""
        link = self.link
        if link is None or link.file is None:
            link = SwarmLink(me.run_id, tuple(PeerAddress.parse(text) for text in me.maddrs))
        with disk_faults(self.state_dir):
            DaemonFile(me.address, os.getpid(), me.run_id, str(link), health).write(self.state_dir)
        event(log, "listening", grpc=me.address, peer_id=me.peer_id, link=link, health=health or "off")


@asynccontextmanager
async def _closing(transport: GrpcTransport) -> AsyncIterator[GrpcTransport]:
    try:
        yield transport
    finally:
        await transport.close()
