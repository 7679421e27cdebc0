"""Moves of working peers: states to moves, and whole swarms that move on stale snapshots (C19)."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from meshd.placement import RULES, Move, Watch, best_move, confirmed
from meshd.proto import meshd_pb2 as pb

GIB = 2**30
NOW = 10_000.0
# As the directory has it: a record lives so long, so no snapshot is older.
STALE_S = 30.0
# Clocks of honest peers, against each other.
SKEW_S = 5.0


def peer(name: str, stage: int, rate: float = 10.0, **fields: float) -> pb.Record:
    values = {
        "expires": math.inf,
        "claimed": 1.0,
        "state": pb.PEER_STATE_WORKING,
        "capacity_tokens_per_s": rate,
        "memory_bytes": 4 * GIB,
        **fields,
    }
    return pb.Record(peer_id=name, role=pb.ROLE_STAGE, stage=stage, **values)


def four_and_one(**fields: float) -> list[pb.Record]:
    """Four on stage 0, d the last of them and changed by `fields`; one on stage 1."""
    some = [peer(name, 0, claimed=float(n)) for n, name in enumerate("abc", 1)]
    return [*some, peer("d", 0, **{"claimed": 4.0, **fields}), peer("e", 1)]


def named(records: list[pb.Record], needs: list[int] | None = None) -> Move | None:
    return best_move(records, needs or [GIB] * 2, NOW)


def test_the_last_comer_of_the_fast_stage_goes_to_the_slow_one() -> None:
    move = named(four_and_one())
    assert move is not None
    assert (move.peer_id, move.source, move.target) == ("d", 0, 1)
    assert move.reason == (
        "stage 1 is the slowest with 10 tokens/s, stage 0 keeps 30 tokens/s without this peer: "
        "the slower of the two gains 100%"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"pinned": True},
        {"memory_bytes": GIB // 2},
        {"claimed": NOW - 100},
        {"state": pb.PEER_STATE_SYNCING},
        {"state": pb.PEER_STATE_DRAINING},
        {"expires": NOW},
    ],
    ids=["pinned", "too small", "came just now", "not at work", "leaving", "expired"],
)
def test_who_cannot_go_is_not_named(fields: dict[str, float]) -> None:
    move = named(four_and_one(**fields))
    assert move is not None
    assert move.peer_id == "c"


def test_the_one_that_evens_the_stages_best_goes() -> None:
    rates = {"a": 30.0, "b": 40.0, "c": 25.0, "d": 5.0}
    move = named([*(peer(name, 0, rate) for name, rate in rates.items()), peer("e", 1, 20.0)])
    assert move is not None
    assert move.peer_id == "b"  # 60 and 60


@pytest.mark.parametrize(
    "records",
    [
        [peer("a", 0), peer("b", 0), peer("c", 1)],
        [
            peer("a", 0, 11.9),
            peer("b", 0, 50.0, pinned=True),
            peer("c", 0, 0.1, pinned=True),
            peer("d", 1, 60.0),
        ],
        [peer("a", 0, 1.0), peer("b", 0, 100.0, claimed=2.0), peer("c", 1, 20.0)],
        [peer("a", 0, pinned=True), peer("b", 0, pinned=True), peer("c", 0, pinned=True), peer("e", 1)],
        [*four_and_one()[:4], peer("e", 1, claimed=NOW - 30)],
        [*four_and_one(), peer("f", 1, 0.1, state=pb.PEER_STATE_JOINING, claimed=NOW - 1)],
        [*four_and_one(moving_to=1, moving_since=NOW - 5)],
        [*four_and_one(state=pb.PEER_STATE_DRAINING, moving_to=1, moving_since=NOW - 50)],
    ],
    ids=[
        "equal after it",
        "gains 20 % short",
        "source too slow without it",
        "all pinned",
        "target has just got one",
        "newcomer on its way",
        "one is about to move",
        "one moves",
    ],
)
def test_nobody_moves(records: list[pb.Record]) -> None:
    assert named(records) is None


def test_an_empty_stage_is_worth_any_move_at_once() -> None:
    records = [peer("a", 0, claimed=NOW - 5), peer("b", 0, claimed=NOW - 4)]
    move = named(records)
    assert move is not None
    assert (move.peer_id, move.target, move.empty) == ("b", 1, True)
    assert "stage 1 has no peer" in move.reason
    assert named(records[:1]) is None


def test_the_one_whom_other_stages_fit_makes_room_even_if_it_was_first() -> None:
    records = [peer("large", 0, claimed=1.0), peer("small", 0, claimed=2.0, memory_bytes=GIB)]
    move = named(records, [GIB, 2 * GIB])
    assert move is not None
    assert move.peer_id == "large"


def test_a_peer_that_hangs_on_its_way_holds_up_nobody_for_ever() -> None:
    move = named(four_and_one(moving_to=1, moving_since=NOW - 1000))
    assert move is not None


def saying(name: str, since: float, **fields: float) -> pb.Record:
    return peer(name, 0, moving_to=1, moving_since=since, **fields)


def test_the_earlier_of_two_goes_and_the_later_stays() -> None:
    some = [peer("a", 0, claimed=0.0), peer("b", 0, claimed=0.5), peer("e", 1)]
    records = [*some, saying("c", NOW - 40, claimed=2.0), saying("d", NOW - 30)]
    move = confirmed(records, [GIB] * 2, "c", NOW)
    assert isinstance(move, Move)
    assert move.source == 0
    assert confirmed(records, [GIB] * 2, "d", NOW) == "c moves to stage 1 already"
    under_way = [*some, saying("c", NOW - 40), saying("d", NOW - 30, state=pb.PEER_STATE_DRAINING)]
    assert confirmed(under_way, [GIB] * 2, "c", NOW) == "d moves to stage 1 already"


def test_a_move_that_is_not_needed_any_more_is_given_up() -> None:
    records = [peer("a", 0), peer("e", 1), peer("f", 1), saying("c", NOW - 40)]
    assert confirmed(records, [GIB] * 2, "c", NOW) == "stage 1 does not need it any more"
    with pytest.raises(ValueError, match="does not say that a"):
        confirmed(records, [GIB] * 2, "a", NOW)


def test_a_watch_waits_until_the_swarm_has_called_for_the_move_long_enough() -> None:
    """And not all as long: one with another random source acts at another moment."""
    acted = []
    for seed in range(4):
        watch = Watch([GIB] * 2, "d", random.Random(seed))
        acted.append(next(t for t in range(1000) if watch.look(four_and_one(), NOW + t)))
    assert all(RULES.quiet_s <= t <= 1.5 * RULES.quiet_s + 1 for t in acted)
    assert len(set(acted)) == 4
    watch = Watch([GIB] * 2, "d", random.Random(0))
    watch.look(four_and_one(), NOW)
    assert watch.look([*four_and_one(), peer("f", 1), peer("g", 1)], NOW + 50) is None
    assert watch.look(four_and_one(), NOW + 1.5 * RULES.quiet_s) is None, (
        "it had been quiet for this long only"
    )


# ---- whole swarms ---------------------------------------------------------------------------------------------------


# (stage, rate, memory, pinned)
Peers = list[tuple[int, float, int, bool]]


@dataclass
class Actor:
    """A peer, all that it has ever announced, and what it is about to do."""

    name: str
    rate: float
    clock: float  # its error, seconds
    watch: Watch
    record: pb.Record
    times: list[float] = field(default_factory=list)
    versions: list[pb.Record] = field(default_factory=list)
    next_at: float = math.inf
    moves: int = 0

    def announce(self, now: float, **fields: float) -> None:
        record = pb.Record()
        record.CopyFrom(self.record)
        for name, value in fields.items():
            setattr(record, name, value)
        self.record = record
        self.times.append(now)
        self.versions.append(record)

    def seen(self, at: float) -> pb.Record:
        return self.versions[max(0, bisect_right(self.times, at) - 1)]


class Swarm:
    """Peers that look, say so, confirm, drain, load and work at moments of any order, each on a snapshot of its own in
    which every other peer's record is up to STALE_S old and every capacity is off by up to `noise`."""

    def __init__(
        self,
        needs: list[int],
        peers: Peers,
        rng: random.Random,
        noise: float = 1.0,
    ) -> None:
        self.needs, self.rng, self.noise, self.now = needs, rng, noise, 1000.0
        self.actors: list[Actor] = []
        for n, (stage, rate, memory, pinned) in enumerate(peers):
            name = f"p{n:03d}"
            record = peer(name, stage, rate, claimed=float(n), memory_bytes=memory, pinned=pinned)
            watch = Watch(needs, name, random.Random(n))
            actor = Actor(name, rate, rng.uniform(-SKEW_S / 2, SKEW_S / 2), watch, record)
            actor.announce(0.0)
            self.actors.append(actor)
        self.moves: list[tuple[str, int, int]] = []

    def view(self, me: Actor) -> list[pb.Record]:
        records = []
        for actor in self.actors:
            record = me.record if actor is me else actor.seen(self.now - self.rng.uniform(0.0, STALE_S))
            if self.noise > 1.0:
                noisy = pb.Record()
                noisy.CopyFrom(record)
                noisy.capacity_tokens_per_s *= self.noise ** self.rng.uniform(-1.0, 1.0)
                record = noisy
            records.append(record)
        return records

    def speeds(self) -> list[float]:
        """What each stage can pass, those included who are on their way to it."""
        speeds = [0.0] * len(self.needs)
        for actor in self.actors:
            gone = actor.record.state == pb.PEER_STATE_DRAINING
            speeds[actor.record.moving_to if gone else actor.record.stage] += actor.rate
        return speeds

    def held(self) -> set[int]:
        """Stages with a peer at work."""
        return {a.record.stage for a in self.actors if a.record.state == pb.PEER_STATE_WORKING}

    def act(self, actor: Actor) -> None:
        record, clock, rng = actor.record, self.now + actor.clock, self.rng
        if record.state == pb.PEER_STATE_DRAINING:
            actor.announce(
                self.now,
                state=pb.PEER_STATE_SYNCING,
                stage=record.moving_to,
                claimed=clock,
                moving_since=0.0,
            )
            actor.next_at = self.now + rng.uniform(0.0, 60.0)
        elif record.state == pb.PEER_STATE_SYNCING:
            actor.announce(self.now, state=pb.PEER_STATE_WORKING)
            actor.next_at = math.inf
        elif record.moving_since:
            self._confirm(actor, clock)
        elif not record.pinned and (move := actor.watch.look(self.view(actor), clock)) is not None:
            actor.announce(self.now, moving_to=move.target, moving_since=clock)
            actor.next_at = self.now + RULES.confirm_s + rng.uniform(0.0, 10.0)

    def _confirm(self, actor: Actor, clock: float) -> None:
        move = confirmed(self.view(actor), self.needs, actor.name, clock)
        if isinstance(move, str):
            actor.announce(self.now, moving_since=0.0)
            actor.watch.restart(clock)
            actor.next_at = math.inf
            return
        before, held = self.speeds(), self.held()
        actor.announce(self.now, state=pb.PEER_STATE_DRAINING)
        actor.next_at = self.now + self.rng.uniform(0.0, 30.0)
        actor.moves += 1
        self.moves.append((actor.name, move.source, move.target))
        assert not actor.record.pinned
        assert actor.record.memory_bytes >= self.needs[move.target]
        assert held == self.held(), "the move left a stage empty"
        assert min(self.speeds()) >= min(before) * (1 - 1e-9), "the slowest stage became slower"
        assert sorted(self.speeds()) > sorted(before), "the swarm came back to where it was"

    def step(self) -> None:
        """Some time passes, then whoever is due acts, and some others look."""
        self.now += self.rng.uniform(1.0, 25.0)
        for actor in self.actors:
            if actor.next_at <= self.now:
                self.act(actor)
        idle = [actor for actor in self.actors if actor.next_at == math.inf]
        due = self.named() if self.rng.random() < 0.5 else None
        # Any peers, in any order; the one that is called for among them, sooner or later.
        some = self.rng.sample(idle, min(len(idle), 2))
        if due is not None and due.next_at == math.inf:
            some.append(due)
        self.rng.shuffle(some)
        for actor in some:
            self.act(actor)

    def named(self) -> Actor | None:
        move = best_move([actor.record for actor in self.actors], self.needs, self.now)
        return None if move is None else next(a for a in self.actors if a.name == move.peer_id)

    def settled(self) -> bool:
        """Whether nobody is under way, nor will be, however long they wait."""
        records = [actor.record for actor in self.actors]
        quiet = all(
            a.record.state == pb.PEER_STATE_WORKING and not a.record.moving_since for a in self.actors
        )
        return quiet and best_move(records, self.needs, self.now + 1e6) is None

    def settle(self, bound: float) -> None:
        """Run until all rest, then twice as long to see that they do."""
        steps = 0
        while not self.settled():
            self.step()
            steps += 1
            assert len(self.moves) <= bound, "more moves than can be"
            assert steps < 400 + 80 * bound, "it does not come to rest"
        count = len(self.moves)
        for _ in range(40):
            self.step()
        assert len(self.moves) == count, "they move on although all is well"


def bound(needs: list[int], peers: Peers) -> int:
    """The most moves that there can be, as `meshd.placement.moves` has it."""
    stages = len(needs)
    speeds = [sum(rate for stage, rate, *_ in peers if stage == n) for n in range(stages)]
    slowest = min([rate for _, rate, *_ in peers] if 0.0 in speeds else speeds)
    levels = math.log(max(1.0, sum(speeds) / (stages * slowest))) / math.log(RULES.gain)
    return speeds.count(0.0) + stages * (1 + math.floor(levels))


@st.composite
def swarms(draw: st.DrawFn, smallest: int, largest: int) -> tuple[list[int], Peers, random.Random]:
    """Stages and the peers on them: any rates, memories that hold at least their stage, some pinned, lopsided. And
    what decides who acts when, and what they see."""
    stages = draw(st.integers(2, 6))
    needs = draw(
        st.just([GIB] * stages) | st.lists(st.sampled_from([GIB, 3 * GIB]), min_size=stages, max_size=stages)
    )
    pins, alike = draw(st.sampled_from([0.0, 0.2])), draw(st.booleans())
    lopsided = draw(st.sampled_from([1.0, 4.0, 20.0]))
    count, rng = draw(st.integers(smallest, largest)), random.Random(draw(st.integers(0, 2**32)))
    weights = [rng.random() ** lopsided + 1e-6 for _ in range(stages)]
    peers = []
    for stage in rng.choices(range(stages), weights, k=count):
        rate = 10.0 if alike else rng.uniform(1.0, 100.0)
        peers.append(
            (stage, rate, max(needs[stage], rng.choice([GIB, 2 * GIB, 4 * GIB])), rng.random() < pins)
        )
    return needs, peers, rng


@settings(max_examples=60, deadline=None)
@given(swarms(2, 12))
def test_small_swarms_settle(swarm: tuple[list[int], Peers, random.Random]) -> None:
    needs, peers, rng = swarm
    Swarm(needs, peers, rng).settle(bound(needs, peers))


@settings(max_examples=30, deadline=None)
@given(swarms(2, 10))
def test_moves_on_noisy_measurements_only_improve(swarm: tuple[list[int], Peers, random.Random]) -> None:
    """Each stage's capacity is measured up to 9 % off. How few moves there are is not promised then; that no state
    comes back is, and so that they end."""
    needs, peers, rng = swarm
    made = Swarm(needs, peers, rng, noise=math.sqrt(RULES.gain) * 0.995)
    for _ in range(150):
        made.step()


@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(swarms(100, 500))
@example(([GIB] * 3, [(n % 5 and n % 3, 1.0 + n % 7, GIB, False) for n in range(500)], random.Random(0)))
def test_large_swarms_settle(swarm: tuple[list[int], Peers, random.Random]) -> None:
    needs, peers, rng = swarm
    Swarm(needs, peers, rng).settle(bound(needs, peers))


def test_four_and_one_end_as_three_and_two() -> None:
    swarm = Swarm([GIB] * 2, [(0, 10.0, GIB, False)] * 4 + [(1, 10.0, GIB, False)], random.Random(1))
    swarm.settle(1)
    assert swarm.speeds() == [30.0, 20.0]


def test_two_who_say_so_at_once_do_not_both_go() -> None:
    """Both saw the same swarm but for one record, and neither sees the other for as long as a snapshot may be old."""
    for first in range(2):
        swarm = Swarm(
            [GIB] * 2, [(0, 10.0, GIB, False)] * 2 + [(0, 10.0, GIB, False)] * 2, random.Random(first)
        )
        for actor, since in zip(swarm.actors[2:], (swarm.now, swarm.now + 1.0), strict=True):
            actor.announce(since, moving_to=1, moving_since=since + actor.clock)
        went = []
        swarm.now += RULES.confirm_s
        for actor in swarm.actors[2:][:: 1 if first else -1]:
            swarm.now += 1.0
            swarm.act(actor)
            went.append(actor.record.state == pb.PEER_STATE_DRAINING)
        assert sum(went) <= 1
