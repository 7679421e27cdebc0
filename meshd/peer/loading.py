"""How a stage peer gets its stage into memory: device, memory check, and the newest state there is."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedConfig

from meshd.config.runspec import ResolvedRun
from meshd.errors import DataError, MeshdError, MismatchError, NetworkError, ResourceError
from meshd.model.families import load_config
from meshd.model.stage import StageModel
from meshd.model.weights import MemoryEstimate, memory_estimate
from meshd.observe.log import event
from meshd.peer.cgroup import cgroup_room
from meshd.peer.join import Supply
from meshd.peer.snapshots import next_watermark, watermarks_at
from meshd.pipeline import heap
from meshd.pipeline.crossing import needs_priors
from meshd.pipeline.exhaustion import with_memory
from meshd.pipeline.runtime import StageRuntime
from meshd.state.bundle import BundleStore
from meshd.state.manifest import snapshots_among
from meshd.state.stage_state import read_optimizer, read_params
from meshd.transport.base import NotHere

log = logging.getLogger(__name__)

# So many peers are asked, at once, which snapshots they have.
_MOST_ASKED = 64
# So many of the newest that they name are fetched until one can be used.
_MOST_TRIED = 8


def choose_device(wanted: str) -> torch.device:
    """`auto`: CUDA where there is one. Raises ResourceError when the named device is not there (C28)."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ResourceError(
            f'device = {wanted!r}: torch sees {torch.cuda.device_count()} CUDA devices. Fix: device = "cpu", '
            "or install a CUDA build of torch and the driver"
        )
    return device


def free_memory(device: torch.device, root: Path = Path("/")) -> tuple[int, str]:
    """Bytes free for a stage, and what limits them, in words to follow "free"; empty: the machine. root: see
    cgroup_room."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0], ""
    free = psutil.virtual_memory().available
    room = cgroup_room(root)
    if room is not None and room.free < free:
        return room.free, f" under {room}"
    return free, ""


def check_memory(needed: int, parts: str, device: torch.device, stage: int, root: Path = Path("/")) -> None:
    """Refuse a stage that cannot fit, before anything is loaded (C18). Raises ResourceError. root: see cgroup_room."""
    free, under = free_memory(device, root)
    if needed > free:
        raise ResourceError(
            f"stage {stage} needs about {needed / 2**30:.1f} GiB ({parts}), {device} has {free / 2**30:.1f} GiB "
            f"free{under}. Fix: another stage, fewer layers a stage (model.stages), a smaller microbatch, or free "
            "memory" + (", or a higher limit" if under else "")
        )


async def stage_needs(supply: Supply) -> list[int]:
    """Bytes that each stage of the run takes. Fetches the model's config."""
    run = supply.run
    config = load_config(await supply.tokenizer())
    return await asyncio.to_thread(
        lambda: [stage_memory(run, config, stage).total for stage in range(run.stages)]
    )


def stage_memory(run: ResolvedRun, config: PreTrainedConfig, stage: int) -> MemoryEstimate:
    """What training a stage of the run takes. Seconds of work: call it off the event loop."""
    resolved, data = run.resolved, run.spec.data
    return memory_estimate(
        config,
        resolved.cut,
        resolved.tied,
        stage,
        data.microbatch,
        data.seq_len,
        gossip=run.spec.gossip,
    )


def held_before(store: BundleStore, stages: int) -> int | None:
    """The stage whose state this peer has from its last time in the run: going on with it costs no download. Of
    several, as it has moved, the newest; None: there is none."""
    names, held = store.names(), dict[int, int]()
    for stage in range(stages):
        if f"live/{stage}" in names:
            try:
                held[stage] = store.manifest(f"live/{stage}").count("tokens")
            except MeshdError:
                held[stage] = -1  # whatever is wrong with it is said when it is loaded
    return max(held, key=lambda stage: held[stage], default=None)


def put_away(store: BundleStore, held: int, served: Collection[bool], base: bool) -> None:
    """Delete what this peer has of stages that it does not hold (any more), so that its disk holds one stage however
    often it moves. The newest snapshot of each stays, and the state of a stage that is not `served` (by stage) by
    anybody: they may be the last there is. base: also the base weights."""
    for stage, others in enumerate(served):
        if stage == held:
            continue
        store.prune(f"part/{stage}", 0)
        store.prune(f"snapshot/{stage}", 1)
        if others:
            store.delete(f"live/{stage}")
        if base:
            store.delete(f"base/{stage}")


def give_back_memory(device: torch.device) -> None:
    """After a stage was put down: what only cycles still hold is freed, and free memory goes back to the device or
    the system."""
    gc.collect()
    heap.give_back()
    if device.type == "cuda":
        torch.cuda.empty_cache()


async def load_stage(supply: Supply, number: int, device: torch.device) -> StageRuntime:
    """The stage with the best state there is: a working replica's, this peer's own, the newest snapshot's, or the base
    model's. Raises ResourceError, before anything is loaded, when it does not fit in memory."""
    run, resolved = supply.run, supply.run.resolved
    folder = await supply.tokenizer()
    features = await supply.features() if needs_priors(run.spec.wire) else None
    config = load_config(folder)
    estimate = await asyncio.to_thread(stage_memory, run, config, number)
    check_memory(estimate.total, str(estimate), device, number)
    await supply.base(number)
    if number == 0:
        await supply.data()
    model = StageModel(config, resolved.cut, resolved.tied, number)
    base = supply.store.path(f"base/{number}", "weights.safetensors")
    await asyncio.to_thread(with_memory, lambda: model.load(base, device))
    runtime = StageRuntime(run, model, device, features)
    async with aclosing(_states(supply, number)) as states:
        async for state in states:
            if await _restored(runtime, state, supply.store):
                break
    event(
        log,
        "stage_ready",
        stage=number,
        device=str(device),
        dtype="float32",
        weight_version=runtime.version,
    )
    return runtime


async def _states(supply: Supply, number: int) -> AsyncGenerator[str, None]:
    """Bring states of the stage here, best first, and yield their bundles' names, for as long as they are asked for.

    That is a working replica's; then this peer's own and the snapshots that anybody has, those of most tokens first.
    """
    name, store = f"live/{number}", supply.store
    version = tokens = -1
    if name in await asyncio.to_thread(store.names):
        own = await asyncio.to_thread(store.manifest, name)
        try:
            version, tokens = own.count("weight_version"), own.count("tokens")
        except MismatchError as error:
            event(log, "own_state_unusable", level=logging.WARNING, stage=number, reason=str(error))
    peers = [p for p in supply.directory.stage_peers(number) if p.weight_version > version]
    if peers:
        try:
            await supply.live(number, [p.address for p in peers])
            yield name
            version = -1  # it has taken the place of this peer's own
        except NetworkError as error:
            event(log, "no_live_state", level=logging.WARNING, stage=number, reason=str(error))
    snapshots = await _snapshots(supply, number)
    states = [(mark, f"snapshot/{number}/{mark}") for mark in snapshots]
    states += [(tokens, name)] if version >= 0 else []
    # Of equal tokens this peer's own comes first ("live" before "snapshot"): it has the optimizer's moments.
    for mark, state in sorted(states, key=lambda found: (-found[0], found[1])):
        if state == name or await _fetched(supply, number, mark, snapshots[mark]):
            yield state


async def _snapshots(supply: Supply, number: int) -> dict[int, list[str]]:
    """Watermarks of the stage's snapshots that seeds, replicas, other peers of the run or this one have, newest first,
    and who has them. Of those that are not here only the newest few: anybody may name any."""
    run, directory = supply.run, supply.directory
    donors = list(dict.fromkeys([*directory.donors(number), *directory.everyone()]))[:_MOST_ASKED]
    answers = await asyncio.gather(*(watermarks_at([it], number, supply.transport, run) for it in donors))
    every, stop = run.spec.snapshot.every_tokens, run.spec.stop_tokens
    here = {
        mark
        for stage, mark in snapshots_among(await asyncio.to_thread(supply.store.names), stop)
        if stage == number
    }
    possible = {
        mark for mark in set().union(*answers) - here if next_watermark(mark - 1, every, stop) == mark
    }
    found = here | set(sorted(possible, reverse=True)[:_MOST_TRIED])
    return {
        mark: [donor for donor, marks in zip(donors, answers, strict=True) if mark in marks]
        for mark in sorted(found - {0}, reverse=True)
    }


async def _fetched(supply: Supply, number: int, watermark: int, donors: list[str]) -> bool:
    try:
        await supply.snapshot(number, watermark, donors)
    except NetworkError as error:
        event(log, "no_snapshot", level=logging.WARNING, stage=number, tokens=watermark, reason=str(error))
        return False
    event(log, "state_from_snapshot", stage=number, tokens=watermark)
    return True


async def _restored(runtime: StageRuntime, name: str, store: BundleStore) -> bool:
    """Take over a state. False: it is as its manifest says, and still none of this stage; then it is deleted."""
    try:
        await asyncio.to_thread(with_memory, lambda: _restore(runtime, name, store))
    except (DataError, MismatchError, NotHere) as error:
        event(log, "state_unusable", level=logging.WARNING, bundle=name, reason=str(error))
        await asyncio.to_thread(store.delete, name)
        return False
    return True


def _restore(runtime: StageRuntime, name: str, store: BundleStore) -> None:
    version = store.manifest(name).count("weight_version")
    runtime.adopt(read_params(store, name))
    runtime.version = version
    try:
        runtime.optimizer.restore(read_optimizer(store, name))
    except NotHere:
        return  # a snapshot has none: its moments begin anew
    except (DataError, MismatchError) as error:
        event(log, "moments_unusable", level=logging.WARNING, bundle=name, reason=str(error))
