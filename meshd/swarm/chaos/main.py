"""Chaos from end to end: one disturbed run, undisturbed ones to the same count of tokens, and what came of them."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshd.clock import SystemClock
from meshd.config.runspec import RunSpec
from meshd.errors import ungrouped
from meshd.state.disk import disk_faults
from meshd.state.lock import lock_state_dir
from meshd.swarm.chaos.faults import KINDS, Fault, schedule
from meshd.swarm.chaos.held_out import held_out_loss
from meshd.swarm.chaos.network import Network, NoNetwork
from meshd.swarm.chaos.spec import ENDLESS, ending_at, write_spec
from meshd.swarm.chaos.traces import Traces
from meshd.swarm.chaos.trial import Ground, Trial, disturbed, undisturbed
from meshd.swarm.chaos.verdict import Scored
from meshd.swarm.supervisor import SEED, SwarmPlan
from meshd.transport.grpc_client import GrpcTransport

log = logging.getLogger(__name__)

# Of every daemon: what `drain` may take, and logs whose times can be read.
_PEER_CONFIG = 'log_format = "json"\ndrain_s = 60.0\n'


@dataclass(frozen=True)
class ChaosOptions:
    """replicas: peers of each stage. directory: holds everything, and belongs to chaos alone. duration_s, period_s: of
    the faults; seed: of their schedule. undisturbed: how many runs to compare with. cut: links, too,
    where namespaces can be had."""

    spec: RunSpec
    replicas: tuple[int, ...]
    directory: Path
    duration_s: float
    period_s: float
    seed: int
    undisturbed: int
    cut: bool = True
    threads: int = 1


async def run_chaos(options: ChaosOptions, tell: Callable[[str], None]) -> tuple[Scored, list[Scored]]:
    """The disturbed run and the undisturbed ones. Raises MeshdError; CancelledError after SIGINT or SIGTERM. Whatever
    happens, no process that it started is left."""
    folder = options.directory
    with lock_state_dir(folder):
        ended = await asyncio.to_thread(Traces.read(folder).clear)
        if ended:
            tell(f"ended {len(ended)} processes that a killed run had left: {' '.join(map(str, ended))}")
        # Sockets have short paths.
        traces = Traces(folder, Path(tempfile.mkdtemp(prefix="meshd-chaos-")))
        traces.write()
        transport = GrpcTransport()
        network = await asyncio.to_thread(_network, options, tell)
        try:
            with _terminated(), ungrouped():
                return await _all(options, traces, transport, network, tell)
        finally:
            await transport.close()
            await asyncio.to_thread(traces.clear)
            if network is not None:
                await asyncio.to_thread(network.remove)


def _network(options: ChaosOptions, tell: Callable[[str], None]) -> Network | None:
    """Namespaces for the peers, where they are wanted and can be had. Blocking."""
    if not options.cut:
        return None
    network = Network.of(options.directory, _names(options))
    try:
        network.make()
    except NoNetwork as error:
        tell(f"no link will be cut: {error}")
        return None
    return network


def _names(options: ChaosOptions) -> list[str]:
    return [SEED, *SwarmPlan(Path(), options.replicas, Path()).peers()]


async def _all(
    options: ChaosOptions,
    traces: Traces,
    transport: GrpcTransport,
    network: Network | None,
    tell: Callable[[str], None],
) -> tuple[Scored, list[Scored]]:
    config = options.directory / "peer.toml"
    with disk_faults(config):
        config.write_text(_PEER_CONFIG)
    ground = Ground(traces, transport, SystemClock(), tell, ["--config", str(config)], network)
    peers = 1 + sum(options.replicas)
    faults, every = _schedule(options, network is not None), options.spec.snapshot.every_tokens
    tell(f"{len(faults)} faults in {options.duration_s:.0f} s, seed {options.seed}; {peers} peers")
    trial = await disturbed(_plan(options, "disturbed", ENDLESS), ground, faults, options.duration_s, every)
    scenario = f"a fault every {options.period_s:.0f} s for {options.duration_s / 60:g} min"
    chaos = await _scored(scenario, peers, trial, options.spec)
    tell(
        f"disturbed: {trial.tokens_per_s:,.0f} tokens/s, held-out {chaos.loss:.4f} at {trial.watermark:,} tokens"
    )
    plain = []
    for number in range(1, options.undisturbed + 1):
        name = f"undisturbed {number}"
        tell(f"{name} of {options.undisturbed}: to {trial.watermark:,} tokens")
        run = await undisturbed(_plan(options, f"undisturbed-{number}", trial.watermark), ground)
        plain.append(await _scored(name, peers, run, options.spec))
        tell(f"{name}: {run.tokens_per_s:,.0f} tokens/s, held-out {plain[-1].loss:.4f}")
    return chaos, plain


def _schedule(options: ChaosOptions, cut: bool) -> list[Fault]:
    kinds = [kind for kind in KINDS if cut or kind != "cut"]
    rng = random.Random(options.seed)
    return schedule(_names(options), options.duration_s, options.period_s, rng, kinds)


def _plan(options: ChaosOptions, name: str, tokens: int) -> SwarmPlan:
    """A fresh run directory with a run spec that ends at `tokens`."""
    folder = options.directory / name
    with disk_faults(folder):
        if folder.exists():
            shutil.rmtree(folder)
        spec = write_spec(ending_at(options.spec, tokens), folder / "run.toml")
    return SwarmPlan(spec, options.replicas, folder, options.threads)


async def _scored(scenario: str, peers: int, trial: Trial, spec: RunSpec) -> Scored:
    loss = await asyncio.to_thread(held_out_loss, trial.checkpoint, trial.data, spec)
    return Scored(scenario, peers, trial, loss)


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
