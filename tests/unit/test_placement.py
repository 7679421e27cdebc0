"""Placement of newcomers: states to choices, and newcomers that spread whatever the order of their steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.errors import ResourceError
from meshd.placement import choose_stage, settle
from meshd.proto import meshd_pb2 as pb

NOW = 1000.0
GIB = 2**30


def peer(
    name: str, stage: int, state: int = pb.PEER_STATE_WORKING, rate: float = 0.0, **fields: float
) -> pb.Record:
    """rate: capacity in tokens/s, 0 while unknown."""
    values = {"expires": NOW + 60, "claimed": 1.0, "capacity_tokens_per_s": rate, **fields}
    return pb.Record(peer_id=name, role=pb.ROLE_STAGE, stage=stage, state=state, **values)


def claim(name: str, stage: int, claimed: float, **fields: float) -> pb.Record:
    return peer(name, stage, pb.PEER_STATE_JOINING, claimed=claimed, **fields)


def chosen(records: list[pb.Record], stages: int) -> int:
    return choose_stage(records, [GIB] * stages, "me", 0, NOW).stage


def test_the_first_peer_takes_stage_0() -> None:
    choice = choose_stage([], [GIB] * 3, "me", 2 * GIB, NOW)
    assert (choice.stage, choice.reason) == (0, "stage 0 has no peer")


def test_an_empty_stage_goes_before_a_slow_one() -> None:
    assert chosen([peer("a", 0, rate=1.0), peer("b", 2, rate=9.0)], 3) == 1


def test_claims_of_peers_that_do_not_work_yet_count() -> None:
    assert chosen([claim("a", 0, 5.0)], 2) == 1


@pytest.mark.parametrize(
    "ignored",
    [
        peer("b", 1, pb.PEER_STATE_DRAINING),
        peer("b", 1, expires=NOW),
        peer("me", 1),
        peer("b", 7),
        peer("b", 0, moving_since=NOW - 10, moving_to=7),
        pb.Record(peer_id="b", role=pb.ROLE_SEED, stage=1, state=pb.PEER_STATE_WORKING, expires=NOW + 60),
    ],
    ids=["leaving", "expired", "own", "no such stage", "moves to no such stage", "seed"],
)
def test_records_that_hold_no_stage_are_left_out(ignored: pb.Record) -> None:
    assert chosen([peer("a", 0), ignored], 2) == 1


def test_a_peer_about_to_move_counts_where_it_goes() -> None:
    """Unless it has said so for so long that it hangs."""
    records = [peer("a", 0), peer("b", 0, pb.PEER_STATE_DRAINING, moving_to=1, moving_since=NOW - 10)]
    assert chosen(records, 3) == 2
    hangs = peer("b", 1, moving_to=2, moving_since=NOW - 1000)
    assert chosen([peer("a", 0), hangs], 3) == 2


def test_the_slowest_stage_gains_most_however_many_replicas_it_has() -> None:
    """What flows through a stage is the same everywhere and says nothing; what it could pass does."""
    records = [
        peer("a", 0, rate=500.0, tokens_per_s=1.0),
        peer("b", 1, rate=100.0, tokens_per_s=50.0),
        peer("c", 1, rate=100.0, tokens_per_s=50.0),
    ]
    choice = choose_stage(records, [GIB] * 2, "me", 0, NOW)
    assert choice.stage == 1
    assert "2 so far, good for 200 tokens/s" in choice.reason


def test_equal_stages_go_by_replicas_then_by_index() -> None:
    records = [
        peer("a", 0, rate=99.0),
        peer("b", 0, rate=1.0),
        peer("c", 1, rate=101.0),
        peer("d", 2, rate=100.5),
    ]
    assert chosen(records, 3) == 1


def test_a_replica_of_unknown_capacity_counts_as_a_typical_one() -> None:
    records = [peer("a", 0, rate=40.0), peer("b", 1), peer("c", 1)]
    choice = choose_stage(records, [GIB] * 2, "me", 0, NOW)
    assert (choice.stage, "good for 40 tokens/s" in choice.reason) == (0, True)


def test_a_stage_that_does_not_fit_is_not_chosen() -> None:
    """C18."""
    needs = [3 * GIB, GIB, 2 * GIB]
    choice = choose_stage([peer("a", 1), peer("b", 2)], needs, "me", 2 * GIB, NOW)
    assert choice.stage == 1
    assert "stage 0 needs 3.00 GiB, and 2.00 GiB are free" in choice.reason
    assert choose_stage([peer("a", 1), peer("b", 2)], needs, "me", 3 * GIB, NOW).stage == 0


def test_when_no_stage_fits_the_error_says_what_is_needed_and_what_there_is() -> None:
    with pytest.raises(
        ResourceError, match=r"stage 1, needs about 2\.00 GiB, and 1\.50 GiB are free\. Fix: "
    ):
        choose_stage([], [3 * GIB, 2 * GIB], "me", GIB * 3 // 2, NOW)


def test_the_earlier_of_two_claims_keeps_the_stage_and_the_other_goes_to_the_empty_one() -> None:
    records, needs = [claim("a", 0, 11.0), claim("b", 0, 10.0)], [GIB] * 2
    assert settle(records, needs, "b", NOW).keep
    moved = settle(records, needs, "a", NOW)
    assert (moved.keep, moved.stage) == (False, 1)
    assert "b goes before on stage 0; stage 1 has no peer" in moved.reason


def test_claims_at_the_same_time_are_ordered_by_peer_id() -> None:
    records = [claim("b", 0, 10.0), claim("a", 0, 10.0)]
    assert settle(records, [GIB] * 2, "a", NOW).keep
    assert not settle(records, [GIB] * 2, "b", NOW).keep


def test_a_working_peer_keeps_its_stage_against_an_earlier_claim() -> None:
    """A newcomer whose clock runs behind does not push out a peer that holds weights."""
    records = [peer("worker", 0, claimed=100.0), claim("newcomer", 0, 1.0)]
    assert settle(records, [GIB] * 2, "worker", NOW).keep
    assert settle(records, [GIB] * 2, "newcomer", NOW).stage == 1


@pytest.mark.parametrize("fields", [{"pinned": True}, {"memory_bytes": GIB}], ids=["pinned", "small"])
def test_who_can_go_nowhere_else_keeps_its_stage_against_an_earlier_claim(fields: dict[str, float]) -> None:
    records, needs = [claim("a", 0, 1.0, memory_bytes=4 * GIB), claim("b", 0, 2.0, **fields)], [GIB, 2 * GIB]
    assert settle(records, needs, "b", NOW).keep
    assert settle(records, needs, "a", NOW).stage == 1


def test_newcomers_on_a_full_swarm_spread_over_its_stages() -> None:
    records = [peer(f"w{stage}", stage) for stage in range(3)] + [
        claim(f"n{i}", 0, 10.0 + i) for i in range(3)
    ]
    assert [settle(records, [GIB] * 3, f"n{i}", NOW).stage for i in range(3)] == [0, 1, 2]


def test_settle_without_an_own_claim_is_an_error() -> None:
    with pytest.raises(ValueError, match="no claim of me"):
        settle([claim("a", 0, 1.0)], [GIB] * 2, "me", NOW)


class Swarm:
    """Peers that read and act at different moments: between a read and its act the swarm may have changed."""

    def __init__(self, memories: list[int], needs: list[int]) -> None:
        self.needs, self.time = needs, 0.0
        self.memory = {f"p{i:02d}": memory for i, memory in enumerate(memories)}
        self.names = list(self.memory)
        self.claims: dict[str, pb.Record] = {}
        self.views: dict[str, list[pb.Record]] = {name: [] for name in self.names}

    def read(self, name: str) -> None:
        self.views[name] = [r for r in self.claims.values() if r.peer_id != name]

    def act(self, name: str) -> bool:
        """True when the peer changed its claim."""
        self.time += 1.0
        if name not in self.claims:
            stage = choose_stage(self.views[name], self.needs, name, self.memory[name], NOW).stage
        else:
            result = settle([*self.views[name], self.claims[name]], self.needs, name, NOW)
            if result.keep:
                return False
            stage = result.stage
        assert self.memory[name] >= self.needs[stage]
        self.claims[name] = claim(name, stage, self.time, memory_bytes=self.memory[name])
        return True

    def round(self, random: random.Random) -> bool:
        """Every peer reads once and acts once, later, in any interleaving."""
        waiting, read = list(self.names), []
        changed = False
        while waiting or read:
            if waiting and (not read or random.random() < 0.5):
                name = waiting.pop(random.randrange(len(waiting)))
                self.read(name)
                read.append(name)
            else:
                changed |= self.act(read.pop(random.randrange(len(read))))
        return changed

    def held(self) -> set[int]:
        return {record.stage for record in self.claims.values()}

    def rests_within(self, rounds: int, random: random.Random) -> None:
        while self.round(random):
            rounds -= 1
            assert rounds >= 0, "peers keep moving"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 8), st.randoms(use_true_random=False))
def test_newcomers_at_once_leave_no_stage_empty(stages: int, surplus: int, random: random.Random) -> None:
    """C19's sibling at start: bounded rounds, no stage that was held becomes empty, and in the end all rest."""
    swarm = Swarm([GIB] * (stages + surplus), [GIB] * stages)
    swarm.round(random)
    held = swarm.held()
    for _ in range(stages - 1):
        swarm.round(random)
        assert held <= swarm.held()
        held = swarm.held()
    assert held == set(range(stages))
    swarm.rests_within(2 * len(swarm.names), random)
    assert swarm.held() == set(range(stages))
    counts = [sum(r.stage == stage for r in swarm.claims.values()) for stage in range(stages)]
    assert max(counts) - min(counts) <= 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.lists(st.integers(1, 4), min_size=2, max_size=12),
    st.randoms(use_true_random=False),
)
def test_newcomers_of_unequal_memory_rest_and_never_leave_a_stage_empty(
    needs: list[int], memories: list[int], random: random.Random
) -> None:
    least = min(needs)
    swarm = Swarm([max(memory, least) for memory in memories], needs)
    held = swarm.held()
    for _ in range(4 * len(memories)):
        if not swarm.round(random):
            break
        assert held <= swarm.held()
        held = swarm.held()
    swarm.rests_within(0, random)
