"""Which stage a newcomer takes.

A newcomer calls `choose_stage`, announces its claim, reads the swarm again and calls `settle`, until that says to keep
the stage. Whoever changes its claim sets a new `Record.claimed`. No coordinator: what holds it together is one order
over claims (`claims.order`). The first claim of a stage never moves, whatever stale snapshots the others act on, so a
stage that was once claimed does not become empty again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshd.errors import ResourceError
from meshd.placement.claims import Claim, Load, claims_of, loads_of, order, rated, typical_rate
from meshd.proto import meshd_pb2 as pb

# Capacities within this ratio count as equal: what is measured differs by noise.
_EQUAL = 1.1
_GIB = float(2**30)


@dataclass(frozen=True)
class Choice:
    """A stage to claim, and why."""

    stage: int
    reason: str


@dataclass(frozen=True)
class Settlement:
    """keep: hold `stage`, which is the one claimed. Otherwise claim `stage` anew."""

    keep: bool
    stage: int
    reason: str


def choose_stage(
    records: Sequence[pb.Record], needs: Sequence[int], me: str, memory_bytes: int, now: float
) -> Choice:
    """The stage that peer `me` should claim: the one by which the swarm's throughput gains most.

    That is, of the stages that fit: empty ones first; then the slowest one, of several the one with the fewest
    replicas, then the lowest index. A replica of unknown capacity counts as a typical one. Claims of peers that do not
    work yet count, and peers about to move count where they go; peers that leave and claims that have expired do not.

    records: any mix, `me`'s own is left out. needs: bytes that each stage of the run takes. memory_bytes: what `me` has
    free, 0 when that is not known. now: seconds since the epoch. Raises ResourceError when no stage fits.
    """
    fitting = [stage for stage, need in enumerate(needs) if not memory_bytes or need <= memory_bytes]
    if not fitting:
        least = min(needs)
        raise ResourceError(
            f"no stage of this run fits in memory here: the smallest, stage {list(needs).index(least)}, needs about "
            f"{least / _GIB:.2f} GiB, and {memory_bytes / _GIB:.2f} GiB are free. Fix: free memory, another machine, "
            "or a run of more and smaller stages (model.stages) or with a smaller data.microbatch"
        )
    claims = rated(claim for claim in claims_of(records, len(needs), now) if claim.peer_id != me)
    loads = loads_of(claims, len(needs))
    stage = _neediest(loads, fitting)[0]
    reason = _why(loads, stage)
    if stage not in (needier := _neediest(loads, range(len(needs)))):
        reason += f", of those that fit: stage {needier[0]} needs {needs[needier[0]] / _GIB:.2f} GiB"
        reason += f", and {memory_bytes / _GIB:.2f} GiB are free"
    return Choice(stage, reason)


def settle(records: Sequence[pb.Record], needs: Sequence[int], me: str, now: float) -> Settlement:
    """Whether peer `me` keeps the stage it has announced, given a snapshot read after that.

    records must hold `me`'s own. Peers that have settled go before claims, and those in `claims.order`. The first of
    each stage keeps it, and so do the pinned; every other newcomer, in that order, keeps its stage if it is among the
    neediest by then, or gets the neediest one that fits it. All newcomers that see the same snapshot compute the same
    result, and act on it at once. Raises ValueError when `me` holds no stage in `records`.
    """
    known = rated(claims_of(records, len(needs), now))
    claims = sorted(known, key=lambda claim: (not claim.settled, order(claim, needs)))
    mine = next((claim for claim in claims if claim.peer_id == me), None)
    if mine is None:
        raise ValueError(f"the snapshot holds no claim of {me}")
    first: dict[int, str] = {}
    for claim in claims:
        first.setdefault(claim.stage, claim.peer_id)

    def stays(claim: Claim) -> bool:
        return claim.settled or claim.pinned or first[claim.stage] == claim.peer_id

    if stays(mine):
        return Settlement(True, mine.stage, _why_stays(mine, first))
    rate = typical_rate(known)
    loads = loads_of([claim for claim in claims if stays(claim)], len(needs))
    stage = mine.stage
    for claim in claims:
        if stays(claim):
            continue
        best = _neediest(loads, [n for n, need in enumerate(needs) if claim.fits(need)] or [claim.stage])
        stage = claim.stage if claim.stage in best else best[0]
        if claim.peer_id == me:
            break
        loads[stage].add(rate)
    if stage == mine.stage:
        return Settlement(True, stage, f"no stage needs a replica more than stage {stage}")
    return Settlement(
        False,
        stage,
        f"{first[mine.stage][-6:]} goes before on stage {mine.stage}; {_why(loads, stage)}",
    )


def _neediest(loads: Sequence[Load], among: Sequence[int]) -> list[int]:
    """Of the stages `among`, those that need a replica most, all equally. Never empty."""
    empty = [stage for stage in among if loads[stage].replicas == 0]
    if empty:
        return empty
    least = min(loads[stage].tokens_per_s for stage in among)
    slow = [stage for stage in among if loads[stage].tokens_per_s <= least * _EQUAL]
    fewest = min(loads[stage].replicas for stage in slow)
    return [stage for stage in slow if loads[stage].replicas == fewest]


def _why(loads: Sequence[Load], stage: int) -> str:
    load = loads[stage]
    if load.replicas == 0:
        return f"stage {stage} has no peer"
    return (
        f"stage {stage} needs a replica most: {load.replicas} so far, good for {load.tokens_per_s:.4g} tokens/s "
        f"(unknown ones count as typical)"
    )


def _why_stays(mine: Claim, first: dict[int, str]) -> str:
    if mine.pinned:
        return f"its user wants it on stage {mine.stage}"
    if first[mine.stage] == mine.peer_id:
        return f"the first claim on stage {mine.stage}"
    return f"settled on stage {mine.stage} already"
