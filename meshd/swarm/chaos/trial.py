"""One run of a local swarm of real processes, disturbed or not, from start to exported checkpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshd.clock import Clock
from meshd.errors import MeshdError
from meshd.peer.export import export_checkpoint
from meshd.swarm.chaos.evidence import (
    Account,
    Detection,
    Event,
    detected,
    read_journal,
    read_log,
    summed,
    tracebacks,
)
from meshd.swarm.chaos.faults import Fault
from meshd.swarm.chaos.herd import Herd
from meshd.swarm.chaos.network import Network
from meshd.swarm.chaos.traces import Traces
from meshd.swarm.chaos.watch import Watch
from meshd.swarm.supervisor import SEED, SwarmPlan
from meshd.transport.base import Transport

# All peers are to work within so long of the start, and again of the last fault.
_READY_S = 300.0
# Without a token for so long an undisturbed run is given up.
_STALL_S = 180.0
_POLL_S = 0.5
# The newest snapshot comes within so long of its watermark, or it lacks a stage.
_SNAPSHOT_S = 45.0


@dataclass(frozen=True)
class Struck:
    """A fault that was carried out, `at` seconds since the epoch, and who noticed it first."""

    fault: Fault
    at: float
    noticed: Detection | None


@dataclass(frozen=True)
class Trial:
    """What came of one run.

    account: of all origins' journals. tokens_per_s: committed while it trained (while faults came, in a disturbed run).
    watermark: tokens of the exported checkpoint. lost_after_commit: None where no peer counts it. exits:
    ends that nobody had asked for. bugs: last lines of tracebacks in logs. leftovers: processes that still ran at the
    end, before they were ended.
    """

    account: Account
    tokens_per_s: float
    watermark: int
    checkpoint: Path
    data: Path
    replayed: int | None
    lost_after_commit: int | None
    struck: tuple[Struck, ...]
    exits: tuple[str, ...]
    bugs: tuple[str, ...]
    leftovers: int


@dataclass(frozen=True)
class Ground:
    """What trials share. options: of every daemon. network: None: no link can be cut."""

    traces: Traces
    transport: Transport
    clock: Clock
    tell: Callable[[str], None]
    options: list[str]
    network: Network | None


async def disturbed(
    plan: SwarmPlan, ground: Ground, faults: Sequence[Fault], duration_s: float, every: int
) -> Trial:
    """A swarm that trains for `duration_s` while `faults` strike it, then drains. Its run must have no end of its own
    before that. every: tokens from snapshot to snapshot. Raises MeshdError when it does not start, or does not come to
    its feet after the last fault."""

    async def course(herd: Herd, watch: Watch) -> tuple[float, list[tuple[Fault, float]]]:
        clock = ground.clock
        began = clock.monotonic()
        struck = []
        for fault in faults:
            await clock.sleep(max(0.0, began + fault.at_s - clock.monotonic()))
            struck.append((fault, await herd.strike(fault)))
        await clock.sleep(max(0.0, began + duration_s - clock.monotonic()))
        rate = watch.rate(began, clock.monotonic())
        passed = watch.tokens // every * every
        ground.tell(
            f"{watch.tokens:,} tokens, {rate:,.0f} a second; waiting for all peers and the last snapshot"
        )
        await _until(watch.working, _READY_S, "all peers to work again", clock)
        await _kept(plan, passed, clock)
        ground.tell("draining")
        return rate, struck

    return await _trial(plan, ground, course)


async def undisturbed(plan: SwarmPlan, ground: Ground) -> Trial:
    """A swarm that trains to the end of its run. Raises MeshdError when it stalls."""

    async def course(herd: Herd, watch: Watch) -> tuple[float, list[tuple[Fault, float]]]:
        clock = ground.clock
        herd.ending = True
        began = moved = clock.monotonic()
        tokens = watch.tokens
        while not watch.finished(SEED):
            await clock.sleep(_POLL_S)
            if watch.tokens > tokens:
                tokens, moved = watch.tokens, clock.monotonic()
            if clock.monotonic() - moved > _STALL_S:
                raise MeshdError(f"the run stands still at {tokens} tokens: see {plan.directory}/logs")
        return watch.rate(began, moved), []

    return await _trial(plan, ground, course)


Course = Callable[[Herd, Watch], Awaitable[tuple[float, list[tuple[Fault, float]]]]]


async def _trial(plan: SwarmPlan, ground: Ground, course: Course) -> Trial:
    herd = Herd(plan, ground.traces, ground.clock, ground.tell, ground.options, ground.network)
    watch = Watch(herd, ground.transport, ground.clock)
    async with herd.running(), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch.run())
        await _until(
            lambda: watch.working() and watch.tokens > 0, _READY_S, "all peers to work", ground.clock
        )
        ground.tell("all peers work")
        rate, struck = await course(herd, watch)
        await _drain(herd, watch)
        watermark = await _export(herd, plan)
        watching.cancel()
    left = await asyncio.to_thread(ground.traces.alive)
    return await asyncio.to_thread(_gathered, plan, herd, watch, rate, struck, watermark, len(left))


async def _until(condition: Callable[[], bool], seconds: float, what: str, clock: Clock) -> None:
    deadline = clock.monotonic() + seconds
    while not condition():
        if clock.monotonic() > deadline:
            raise MeshdError(f"waited {seconds:.0f} s for {what}, in vain")
        await clock.sleep(_POLL_S)


async def _kept(plan: SwarmPlan, watermark: int, clock: Clock) -> None:
    """Wait until the seed keeps a complete snapshot: that of `watermark`, or after a while any. Raises MeshdError."""
    began = clock.monotonic()
    while True:
        kept = await asyncio.to_thread(_complete, plan)
        waited = clock.monotonic() - began
        if kept and (kept[-1] >= watermark or waited > _SNAPSHOT_S):
            return
        if waited > _READY_S:
            raise MeshdError(
                f"the seed has had no complete snapshot for {waited:.0f} s: see {plan.directory}/logs"
            )
        await clock.sleep(_POLL_S)


def _complete(plan: SwarmPlan) -> list[int]:
    """Watermarks of which the seed has the snapshots of all stages, ascending. Blocking."""
    of_stage = [
        {
            int(path.name)
            for path in plan.state(SEED).glob(f"runs/*/bundles/snapshot/{stage}/*")
            if path.name.isdecimal()
        }
        for stage in range(len(plan.replicas))
    ]
    return sorted(set.intersection(*of_stage))


async def _drain(herd: Herd, watch: Watch) -> None:
    """Injectors first: those who finish their microbatches are still there. Then all but the seed. Where the run has
    ended, they leave by themselves."""
    if herd.ending:
        await herd.left(*herd.plan.peers())
        return
    present = [name for name in herd.plan.peers() if herd.members[name].up.is_set()]
    origins = [name for name in present if herd.plan.peers()[name] == 0]
    await herd.leave(*origins)
    await watch.look()
    await herd.leave(*(name for name in present if name not in origins))


async def _export(herd: Herd, plan: SwarmPlan) -> int:
    """The newest complete snapshot that the seed keeps, as a checkpoint; its tokens."""
    await herd.leave(SEED)
    return await export_checkpoint(plan.state(SEED), plan.checkpoint)


def _gathered(
    plan: SwarmPlan,
    herd: Herd,
    watch: Watch,
    rate: float,
    struck: Sequence[tuple[Fault, float]],
    watermark: int,
    leftovers: int,
) -> Trial:
    """Read everything that the run has left. Blocking."""
    account = Account()
    for name, stage in plan.peers().items():
        if stage == 0:
            for journal in plan.state(name).glob("runs/*/journal"):
                account += read_journal(journal)
    events = [event for name in herd.members for event in read_log(name, plan.log(name))]
    metrics: list[Mapping[str, float]] = [look.metrics for look in watch.processes.values()]
    # Of peers behind the origins; what an origin itself has lost is in its journal.
    lost = summed(metrics, "lost_after_commit")
    return Trial(
        account=account,
        tokens_per_s=rate,
        watermark=watermark,
        checkpoint=plan.checkpoint,
        data=next(plan.state(SEED).glob("runs/*/bundles/run/data")),
        replayed=summed(metrics, "microbatches_replayed") or 0,
        lost_after_commit=None if lost is None else lost + account.lost,
        struck=tuple(_noticed(struck, events)),
        exits=tuple(herd.exits),
        bugs=tuple(bug for name in herd.members for bug in tracebacks(name, plan.log(name))),
        leftovers=leftovers,
    )


def _noticed(struck: Sequence[tuple[Fault, float]], events: Sequence[Event]) -> list[Struck]:
    """Every fault with its first notice before the next one came."""
    ends = [*(at for _, at in struck), time.time()][1:]
    return [
        Struck(fault, at, detected(events, fault.peer, at, min(60.0, end - at)))
        for (fault, at), end in zip(struck, ends, strict=True)
    ]
