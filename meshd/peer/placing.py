"""Placement at work: a peer claims a stage, and later says, confirms and makes its moves."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from meshd.observe.log import event
from meshd.peer.directory import Directory
from meshd.placement import RULES, Move, Watch, choose_stage, confirmed, settle
from meshd.proto import meshd_pb2 as pb

log = logging.getLogger(__name__)

# Between a claim and the second look at the swarm: long enough for claims made at the same time to be seen.
_SETTLE_S = 2.0
_SETTLE_ROUNDS = 8
_LOOK_S = 10.0


async def claim_stage(directory: Directory, wanted: int | None, needs: Sequence[int]) -> None:
    """Take a stage: the wanted one, or the one by which the swarm gains most; settled with others who come just now.

    needs: bytes that each stage takes; only looked at when none is wanted. Raises ResourceError when none fits.
    """
    me, clock = directory.me, directory.clock
    me.state = pb.PEER_STATE_JOINING
    if wanted is not None:
        me.stage, me.claimed = wanted, clock.time()
        await directory.announce()
        return
    await directory.refresh()
    choice = choose_stage(directory.peers, needs, me.peer_id, me.memory_bytes, clock.time())
    me.stage, me.claimed = choice.stage, clock.time()
    event(log, "stage_claimed", stage=choice.stage, reason=choice.reason)
    for _ in range(_SETTLE_ROUNDS):
        await directory.announce()
        await clock.sleep(_SETTLE_S)
        await directory.refresh()
        settled = settle(_swarm(directory), needs, me.peer_id, clock.time())
        if settled.keep:
            return
        me.stage, me.claimed = settled.stage, clock.time()
        event(log, "stage_changed", stage=settled.stage, reason=settled.reason)


async def next_move(
    directory: Directory, needs: Sequence[int], may: Callable[[], bool], rng: random.Random
) -> Move:
    """Wait until this peer is to go to another stage, all others having had the time to read that it would.

    may: whether it could go now. Until it has gone, `Self.moving_since` says that it will; cancelled, it stays.
    """
    me, clock = directory.me, directory.clock
    watch = Watch(needs, me.peer_id, rng, RULES)
    while True:
        await clock.sleep(_LOOK_S * rng.uniform(0.75, 1.25))
        if not may():
            watch.restart(clock.time())
            continue
        move = watch.look(_swarm(directory), clock.time())
        if move is None:
            continue
        me.moving_to, me.moving_since = move.target, clock.time()
        try:
            await directory.announce()
            await clock.sleep(RULES.confirm_s)
            await directory.refresh()
        except asyncio.CancelledError:
            me.moving_since = 0.0
            raise
        verdict: Move | str = "it may not any more"
        if may():
            verdict = confirmed(_swarm(directory), needs, me.peer_id, clock.time(), RULES)
        if isinstance(verdict, Move):
            event(log, "stage_left", stage=verdict.source, to=verdict.target, reason=verdict.reason)
            return verdict
        event(log, "move_given_up", level=logging.DEBUG, to=move.target, reason=verdict)
        me.moving_since = 0.0
        watch.restart(clock.time())
        await directory.announce()


def _swarm(directory: Directory) -> list[pb.Record]:
    return [*directory.peers, directory.record()]
