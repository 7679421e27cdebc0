"""Which stage a newcomer takes: pure functions of a snapshot of peer records, to a choice and its reason in words.

A newcomer calls `choose_stage`, announces its claim, reads the swarm again and calls `settle`, until that says to keep
the stage. Whoever moves sets a new `Record.claimed`. No coordinator: what holds it together is one order over claims
(`_order`). The first claim of a stage never moves, whatever stale snapshots the others act on, so a stage that was
once claimed does not become empty again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshd.proto import meshd_pb2 as pb

# Throughputs within this ratio count as equal: in a running pipeline every stage passes the same tokens, and what is
# measured differs by noise.
_EQUAL = 1.1
_SETTLED = (pb.PEER_STATE_SYNCING, pb.PEER_STATE_WORKING)
_CLAIMING = (pb.PEER_STATE_STARTING, pb.PEER_STATE_JOINING, *_SETTLED)


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


@dataclass
class _Load:
    """What one stage has: replicas, and their throughput in label tokens per second."""

    replicas: int = 0
    tokens_per_s: float = 0.0


def choose_stage(records: Sequence[pb.Record], stages: int, me: str, now: float) -> Choice:
    """The stage that peer `me` should claim.

    Empty stages first; then the stage of least throughput, of those the one with the fewest replicas, then the lowest
    index. A replica that has measured nothing yet counts as an average one. Claims of peers that do not work yet
    count; peers that are leaving do not. records: any mix, `me` and expired ones are left out; now: seconds since the
    epoch.
    """
    claims = [record for record in _claims(records, stages, now) if record.peer_id != me]
    loads = _loads(claims, stages, _typical_rate(claims))
    stage = _neediest(loads)[0]
    return Choice(stage, _why(loads, stage))


def settle(records: Sequence[pb.Record], stages: int, me: str, now: float) -> Settlement:
    """Whether peer `me` keeps the stage it has announced, given a snapshot read after that.

    records must hold `me`'s own record. Working peers go before claims, earlier claims before later ones, then by peer
    id. The first of each stage keeps it; every other newcomer, in that order, keeps its stage if it is among the
    neediest by then, or gets the neediest one. All newcomers that see the same snapshot compute the same result,
    and act on it at once. Raises ValueError when `me` holds no stage in `records`.
    """
    claims = sorted(_claims(records, stages, now), key=_order)
    mine = next((record for record in claims if record.peer_id == me), None)
    if mine is None:
        raise ValueError(f"the snapshot holds no claim of {me}")
    rate = _typical_rate(claims)
    first: dict[int, str] = {}
    for record in claims:
        first.setdefault(record.stage, record.peer_id)
    fixed = [_is_fixed(record, first) for record in claims]
    if _is_fixed(mine, first):
        return Settlement(True, mine.stage, _why_fixed(mine, first))
    loads = _loads([record for record, stays in zip(claims, fixed, strict=True) if stays], stages, rate)
    for record, stays in zip(claims, fixed, strict=True):
        if stays:
            continue
        best = _neediest(loads)
        stage = record.stage if record.stage in best else best[0]
        if record.peer_id == me:
            break
        loads[stage].replicas += 1
        loads[stage].tokens_per_s += rate
    if stage == mine.stage:
        return Settlement(True, stage, f"no stage needs a replica more than stage {stage}")
    return Settlement(
        False,
        stage,
        f"{first[mine.stage][-6:]} has an earlier claim on stage {mine.stage}; {_why(loads, stage)}",
    )


def _claims(records: Sequence[pb.Record], stages: int, now: float) -> list[pb.Record]:
    return [
        record
        for record in records
        if record.role == pb.ROLE_STAGE
        and 0 <= record.stage < stages
        and record.state in _CLAIMING
        and record.expires > now
    ]


def _order(record: pb.Record) -> tuple[bool, float, str]:
    return record.state not in _SETTLED, record.claimed, record.peer_id


def _is_fixed(record: pb.Record, first: dict[int, str]) -> bool:
    return record.state in _SETTLED or first[record.stage] == record.peer_id


def _typical_rate(claims: Sequence[pb.Record]) -> float:
    """Label tokens per second that an unmeasured replica counts for: the mean of the measured ones."""
    measured = [record.tokens_per_s for record in claims if record.tokens_per_s > 0]
    return sum(measured) / len(measured) if measured else 1.0


def _loads(claims: Sequence[pb.Record], stages: int, rate: float) -> list[_Load]:
    loads = [_Load() for _ in range(stages)]
    for record in claims:
        loads[record.stage].replicas += 1
        loads[record.stage].tokens_per_s += record.tokens_per_s if record.tokens_per_s > 0 else rate
    return loads


def _neediest(loads: Sequence[_Load]) -> list[int]:
    """The stages that need a replica most, all equally, by index. Never empty."""
    empty = [stage for stage, load in enumerate(loads) if load.replicas == 0]
    if empty:
        return empty
    least = min(load.tokens_per_s for load in loads)
    slow = [stage for stage, load in enumerate(loads) if load.tokens_per_s <= least * _EQUAL]
    fewest = min(loads[stage].replicas for stage in slow)
    return [stage for stage in slow if loads[stage].replicas == fewest]


def _why(loads: Sequence[_Load], stage: int) -> str:
    load = loads[stage]
    if load.replicas == 0:
        return f"stage {stage} has no peer"
    return (
        f"stage {stage} needs a replica most: {load.replicas} so far, {load.tokens_per_s:.4g} tokens/s "
        f"(an unmeasured replica counts as an average one)"
    )


def _why_fixed(mine: pb.Record, first: dict[int, str]) -> str:
    if first[mine.stage] == mine.peer_id:
        return f"the first claim on stage {mine.stage}"
    return f"at work on stage {mine.stage} already"
