"""One lab from start to finish: network, swarm, measurement, and nothing left."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from meshd.clock import Clock, SystemClock
from meshd.config.runspec import RunSpec
from meshd.errors import ConfigError, MeshdError, ungrouped
from meshd.proto import meshd_pb2 as pb
from meshd.state.disk import disk_faults
from meshd.swarm.interrupt import stopped_by_signals
from meshd.swarm.process import Child, log_tail
from meshd.swarm.supervisor import SEED, Supervisor, SwarmPlan
from meshd.swarm.wan.names import Owner
from meshd.swarm.wan.network import MAX_PEERS, Counts, Network, clear_leftovers
from meshd.swarm.wan.rates import Link, show_rate
from meshd.swarm.wan.window import Look, Result, Step, Window
from meshd.transport.grpc_client import GrpcTransport


@dataclass(frozen=True)
class LabOptions:
    """What the command line says. Paths are absolute; replicas: peers of each stage; link: of every peer; config:
    `[link]` of every peer's config, by field; the rest as in Window and SwarmPlan. start_s: how long the swarm may take
    until it is measured, warm-up aside."""

    run_file: Path
    spec: RunSpec
    directory: Path
    replicas: tuple[int, ...]
    link: Link
    config: Mapping[str, float]
    warmup_s: float
    seconds: float | None
    tokens: int | None
    threads: int = 1
    anchors: int = 0
    start_s: float = 600.0

    def __post_init__(self) -> None:
        if 1 + sum(self.replicas) + self.anchors > MAX_PEERS:
            raise ConfigError("--replicas", sum(self.replicas), "too many peers", f"{MAX_PEERS} at most")


@dataclass(frozen=True)
class WanPlan(SwarmPlan):
    """A local swarm whose peers are each in a namespace. options: of every daemon besides the plan's."""

    network: Network | None = field(default=None, kw_only=True)
    options: tuple[str, ...] = field(default=(), kw_only=True)

    def arguments(self, peer: str, link: str | None) -> list[str]:
        assert self.network is not None
        listen = ("--listen", self.network.address(peer))
        return [*self.network.command(peer), *super().arguments(peer, link), *listen, *self.options]


async def run_lab(options: LabOptions, tell: Callable[[str], None]) -> Result:
    """Build, run, measure, take away. The first SIGINT, SIGTERM or SIGHUP stops it in order (CancelledError), a second
    one at once. Raises MeshdError."""
    hurry = asyncio.Event()
    with stopped_by_signals(hurry, tell, "stopping"):
        if cleared := clear_leftovers():
            tell(f"cleared what a killed lab had left: {', '.join(sorted(cleared))}")
        await _prepare(options, hurry, tell)
        peers = [
            SEED,
            *SwarmPlan(options.run_file, options.replicas, Path(), anchors=options.anchors).joiners(),
        ]
        network = Network(Owner.this(), dict.fromkeys(peers, options.link))
        try:
            # On the loop's own thread, some milliseconds a peer: nothing else is to happen meanwhile, and an
            # interruption must find it either not begun or done.
            folder = network.make()
            tell(
                f"{len(peers)} peers in namespaces {network.owner.name()}-*, each {show_rate(options.link.up_bps)} up "
                f"and {show_rate(options.link.down_bps)} down"
            )
            # Namespaces have no way out: a look at the model hub would only time out.
            with network.inside(), _environment(TMPDIR=str(folder), HF_HUB_OFFLINE="1"), ungrouped():
                return await _swarm(options, network, hurry, tell)
        finally:
            network.remove()


async def _prepare(options: LabOptions, hurry: asyncio.Event, tell: Callable[[str], None]) -> None:
    """Fetch what the run spec names, while there is a way out to the internet."""
    sources = [options.spec.model.source, *options.spec.data.sources]
    named = [source for source in sources if not Path(source).is_absolute()]
    if not named:
        return
    tell(f"fetching {', '.join(named)}")
    log = options.directory / "logs" / "prepare.log"
    command = [sys.executable, "-m", "meshd.swarm.prepare", str(options.run_file)]
    child = await Child.start(command, log, os.environ)
    try:
        code = await child.wait()
    finally:
        await child.stop(1.0, hurry)
    if code != 0:
        raise MeshdError(f"the run's model or text cannot be fetched. End of {log}:\n{log_tail(log)}")


async def _swarm(
    options: LabOptions, network: Network, hurry: asyncio.Event, tell: Callable[[str], None]
) -> Result:
    """The swarm, until it is measured."""
    config = options.directory / "peer.toml"
    with disk_faults(config):
        lines = [f"{name} = {value!r}" for name, value in options.config.items()]
        config.write_text("\n".join(["[link]", *lines]) + "\n")
    plan = WanPlan(
        options.run_file,
        options.replicas,
        options.directory,
        options.threads,
        grace_s=15.0,
        poll_s=0.25,
        anchors=options.anchors,
        network=network,
        options=("--config", str(config)),
    )
    transport, clock = GrpcTransport(), SystemClock()
    replies: asyncio.Queue[tuple[float, pb.StatusReply]] = asyncio.Queue()
    supervisor = Supervisor(plan, transport, clock, tell)
    supervisor.hurry = hurry
    try:
        async with asyncio.TaskGroup() as group:
            swarm = group.create_task(
                supervisor.run(lambda reply: replies.put_nowait((clock.monotonic(), reply)))
            )
            result = await _measured(options, network, clock, replies, tell)
            tell("measured; the peers leave")
            swarm.cancel()
    finally:
        await transport.close()
    return result


async def _measured(
    options: LabOptions,
    network: Network,
    clock: Clock,
    replies: asyncio.Queue[tuple[float, pb.StatusReply]],
    tell: Callable[[str], None],
) -> Result:
    """Follow what the seed says until the window is over."""
    window = Window(options.warmup_s, options.seconds, options.tokens)
    start: Look | None = None
    started = clock.monotonic()
    while True:
        try:
            async with asyncio.timeout(options.start_s):
                at, reply = await replies.get()
        except TimeoutError:
            raise MeshdError(
                f"the seed says nothing for {options.start_s:g} s; logs in {options.directory}"
            ) from None
        step = window.look(at, reply.global_tokens)
        if step is not Step.WAIT:
            counts: dict[str, Counts] = await asyncio.to_thread(network.counts)
            look = Look(clock.monotonic(), reply.global_tokens, counts)
            if start is not None:
                return Result(network.links, start, look)
            start = look
            tell(f"measuring, from {reply.global_tokens:,} tokens on")
        if reply.finished:
            raise MeshdError(
                "the run has ended before it was measured. Fix: more tokens in [stop] of the run spec, or less warm-up"
            )
        if start is None and at > started + options.start_s + options.warmup_s:
            raise MeshdError(
                f"the swarm did not train within {options.start_s:g} s; logs in {options.directory / 'logs'}"
            )


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Of the processes that are started within the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
