"""When a working peer goes to another stage: from one that can spare it to the slowest one.

`best_move` names the one move that gains the swarm most: all who see the same snapshot name the same. The peer that is
named says so in its record (`Record.moving_since`), waits until everybody must have read that, and asks `confirmed`.
What is promised, and tested:

- The slowest stage never becomes slower: a move needs min(source without the peer, target with it) to be at least
  `gain` times the target's present capacity, and the target is the slowest stage.
- It ends. With capacities as measured, each move takes one stage out of those below `gain` times the slowest and puts
  none in. So S stages whose slowest has capacity T, R all together, settle within S * (1 + log_gain(R / (S T))) moves,
  after at most one for each stage that was empty.
- It does not oscillate, also when capacities are measured with an error of up to a ratio of sqrt(gain) a stage: both
  stages of a move end above what the slower one had, so no state comes back.
- No stage becomes empty. The first of a stage in `claims.order`, among those at work, never moves. Of all who ever
  worked there one is the first, and nobody can have shown it an earlier one; so this holds for snapshots of any age.
- Two moves do not meet. A snapshot is never older than a record lives; who has said so for longer has been read by
  all who could go now, and the earlier one goes. So each mover knows of all moves before its own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from meshd.placement.claims import Claim, Load, claims_of, loads_of, order, rated, staying
from meshd.proto import meshd_pb2 as pb


@dataclass(frozen=True)
class Rules:
    """gain: by what a move must multiply the capacity of the slowest stage. quiet_s: how long no peer has come to that
    stage, and it has been the slowest. stay_s: how long a peer stays where it is. confirm_s: between saying so and
    going; more than a record lives and clocks differ. An empty stage is worth any move: for it the swarm waits
    `urgent_s` and nobody has to stay."""

    gain: float = 1.2
    quiet_s: float = 60.0
    urgent_s: float = 15.0
    stay_s: float = 300.0
    confirm_s: float = 36.0


RULES = Rules()


@dataclass(frozen=True)
class Move:
    """Peer `peer_id` is to go from one stage to another. empty: nobody has the target."""

    peer_id: str
    source: int
    target: int
    empty: bool
    reason: str


def best_move(
    records: Sequence[pb.Record],
    needs: Sequence[int],
    now: float,
    rules: Rules = RULES,
    only: str | None = None,
) -> Move | None:
    """The move that gains the swarm most, or None when none gains enough, or when the swarm has to settle first.

    records: the whole swarm, `me` included. needs: bytes that each stage takes. now: seconds since the epoch. only: the
    peer whose moves are looked at. A peer is taken to have the same capacity on another stage: the cut makes stages
    cost alike.
    """
    claims = rated(claims_of(records, len(needs), now))
    if any(claim.moving_since for claim in claims):
        return None
    loads = loads_of(claims, len(needs))
    target = min(range(len(needs)), key=lambda stage: loads[stage].tokens_per_s)
    have = loads[target].tokens_per_s
    empty = not loads[target].replicas
    if any(claim.stage == target and _within(rules.quiet_s, claim, now) for claim in claims):
        return None
    best: tuple[float, float, tuple[bool, int, float, str]] | None = None
    chosen: Claim | None = None
    spare = loads_of([claim for claim in claims if claim.working], len(needs))
    for claim in _free(claims, needs):
        if claim.stage == target or not claim.fits(needs[target]) or only not in (None, claim.peer_id):
            continue
        if not empty and _within(rules.stay_s, claim, now):
            continue
        left = spare[claim.stage].tokens_per_s - claim.tokens_per_s
        gained = min(left, have + claim.tokens_per_s)
        if gained < rules.gain * have:
            continue
        rank = (gained, left, order(claim, needs))
        if best is None or rank > best:
            best, chosen = rank, claim
    if chosen is None:
        return None
    return Move(chosen.peer_id, chosen.stage, target, empty, _why(chosen, loads, spare, target))


def confirmed(
    records: Sequence[pb.Record], needs: Sequence[int], me: str, now: float, rules: Rules = RULES
) -> Move | str:
    """The move that `me` has said it would make, if it is to go now; else why not.

    records: read `confirm_s` after it said so, `me`'s own among them. Whoever said so earlier, or is on its way, goes
    before; later ones see `me`. Raises ValueError when `me` has not said so.
    """
    mine = next((record for record in records if record.peer_id == me), None)
    if mine is None or not mine.moving_since:
        raise ValueError(f"the snapshot does not say that {me} is about to move")
    for record in records:
        if record.peer_id == me or not record.moving_since:
            continue
        earlier = (record.moving_since, record.peer_id) < (mine.moving_since, me)
        if (earlier or record.state == pb.PEER_STATE_DRAINING) and claims_of([record], len(needs), now):
            return f"{record.name or record.peer_id[-8:]} moves to stage {record.moving_to} already"
    settled = [staying(record) if record.moving_since else record for record in records]
    # Whether it is the best by a hair's breadth changes with every measurement; that it is good enough does not.
    move = best_move(settled, needs, now, rules, only=me)
    if move is None or move.target != mine.moving_to:
        return f"stage {mine.moving_to} does not need it any more"
    return move


class Watch:
    """One peer's patience: lets a move pass once the swarm has called for it long enough. Clock and randomness come
    in."""

    def __init__(self, needs: Sequence[int], me: str, rng: random.Random, rules: Rules = RULES) -> None:
        self._needs, self._me, self._rng, self._rules = needs, me, rng, rules
        self._target: int | None = None
        self._since = 0.0
        self._patience = 0.0

    def look(self, records: Sequence[pb.Record], now: float) -> Move | None:
        """The move that `me` should say it makes now, given a snapshot with its own record."""
        move = best_move(records, self._needs, now, self._rules)
        if move is None or move.target != self._target:
            self._start(now, move)
        if move is None or move.peer_id != self._me:
            return None
        # Should two peers see different swarms, they do not act at the same moment.
        wait = self._rules.urgent_s if move.empty else self._rules.quiet_s
        return move if now - self._since >= wait * self._patience else None

    def restart(self, now: float) -> None:
        """Be patient anew: a move was given up."""
        self._start(now, None)

    def _start(self, now: float, move: Move | None) -> None:
        self._target = None if move is None else move.target
        self._since = now
        self._patience = self._rng.uniform(1.0, 1.5)


def _within(seconds: float, claim: Claim, now: float) -> bool:
    """Whether it was claimed less than so long ago. One that says that it is of the future does not count for ever."""
    return abs(now - claim.claimed) < seconds


def _free(claims: Sequence[Claim], needs: Sequence[int]) -> list[Claim]:
    """Those at work who may leave their stage: not pinned, and not the first there."""
    first: dict[int, Claim] = {}
    for claim in claims:
        if claim.working:
            held = first.get(claim.stage)
            if held is None or order(claim, needs) < order(held, needs):
                first[claim.stage] = claim
    return [
        claim for claim in claims if claim.working and not claim.pinned and first[claim.stage] is not claim
    ]


def _why(claim: Claim, loads: Sequence[Load], spare: Sequence[Load], target: int) -> str:
    left = spare[claim.stage].tokens_per_s - claim.tokens_per_s
    kept = f"stage {claim.stage} keeps {left:.4g} tokens/s without this peer"
    have = loads[target].tokens_per_s
    if not loads[target].replicas:
        return f"stage {target} has no peer; {kept}"
    return (
        f"stage {target} is the slowest with {have:.4g} tokens/s, {kept}: "
        f"the slower of the two gains {min(left, have + claim.tokens_per_s) / have - 1:.0%}"
    )
