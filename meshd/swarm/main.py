"""`meshd swarm`: the supervised local swarm from start to finished report."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from meshd.clock import Clock, SystemClock
from meshd.config.runspec import RunSpec
from meshd.errors import MeshdError, ResourceError
from meshd.swarm.interrupt import stopped_by_signals
from meshd.swarm.report import SwarmReport, continuation, plot
from meshd.swarm.supervisor import Supervisor, SwarmPlan
from meshd.swarm.view import LiveView, PlainView, View
from meshd.transport.base import Transport
from meshd.transport.grpc_client import GrpcTransport

DEFAULT_PROMPT = "The most important thing to know is"


@dataclass(frozen=True)
class SwarmOptions:
    """What the command line says. Paths are absolute; replicas: peers of each stage; prompt: of the samples; live:
    draw on the terminal instead of writing lines; anchors: how many."""

    run_file: Path
    spec: RunSpec
    replicas: tuple[int, ...]
    directory: Path
    threads: int
    prompt: str | None
    live: bool
    anchors: int = 0


async def run_swarm(options: SwarmOptions) -> int:
    """Run the swarm to its end and report; the exit code (130 when a signal stopped it). Raises MeshdError."""
    console = Console()
    clock = SystemClock()
    view: View = LiveView(console, clock) if options.live else PlainView(console, clock)
    plan = SwarmPlan(
        options.run_file, options.replicas, options.directory, options.threads, anchors=options.anchors
    )
    try:
        plan.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"cannot make {plan.directory}: {error.strerror}") from None
    transport = GrpcTransport()
    try:
        report = await supervise(plan, transport, clock, view)
    except asyncio.CancelledError:
        print(f"stopped; the same command continues from {plan.directory}")
        return 130
    finally:
        await transport.close()
    await asyncio.to_thread(_finish, options, report)
    return 0


async def supervise(plan: SwarmPlan, transport: Transport, clock: Clock, view: View) -> SwarmReport:
    """Run `plan` under `view`. The first SIGINT, SIGTERM or SIGHUP stops it in order (CancelledError), a second at
    once."""
    supervisor = Supervisor(plan, transport, clock, view.tell)
    stopping = "stopping: peers save their state and leave"
    with view, stopped_by_signals(supervisor.hurry, view.tell, stopping):
        outcome = await supervisor.run(view.status)
    return SwarmReport.of(outcome.status, outcome.elapsed_s, outcome.restarts, plan.checkpoint)


def _finish(options: SwarmOptions, report: SwarmReport) -> None:
    """Write numbers and plot, compare samples, print the result."""
    report.write(options.directory / "report.json")
    picture = options.directory / "loss.png"
    try:
        plot(report, picture)
        plotted = str(picture)
    except MeshdError as error:
        plotted = str(error)
    prompt = options.prompt or DEFAULT_PROMPT
    print(f"\nsample, greedy, after {prompt!r}")
    print(f"  before: {continuation(base_model(options.spec), prompt)!r}")
    print(f"  after:  {continuation(Path(report.checkpoint), prompt)!r}")
    print(f"\n{report.summary()}\nplot        {plotted}")


def base_model(spec: RunSpec) -> Path:
    """Directory of the run's base model, as it was before training."""
    from meshd.model.sources import resolve_source

    return resolve_source(spec.model.source, spec.model.revision)
