"""Placement: states to choices, and newcomers that spread whatever the order of their steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.placement import choose_stage, settle
from meshd.proto import meshd_pb2 as pb

NOW = 1000.0


def peer(name: str, stage: int, state: int = pb.PEER_STATE_WORKING, **fields: float) -> pb.Record:
    values = {"expires": NOW + 60, "claimed": 1.0, **fields}
    return pb.Record(peer_id=name, role=pb.ROLE_STAGE, stage=stage, state=state, **values)


def claim(name: str, stage: int, claimed: float) -> pb.Record:
    return peer(name, stage, pb.PEER_STATE_JOINING, claimed=claimed)


def test_the_first_peer_takes_stage_0() -> None:
    choice = choose_stage([], 3, "me", NOW)
    assert choice.stage == 0
    assert "stage 0 has no peer" in choice.reason


def test_an_empty_stage_goes_before_a_slow_one() -> None:
    assert (
        choose_stage([peer("a", 0, tokens_per_s=1.0), peer("b", 2, tokens_per_s=9.0)], 3, "me", NOW).stage
        == 1
    )


def test_claims_of_peers_that_do_not_work_yet_count() -> None:
    assert choose_stage([claim("a", 0, 5.0)], 2, "me", NOW).stage == 1


@pytest.mark.parametrize(
    "ignored",
    [
        peer("b", 1, pb.PEER_STATE_DRAINING),
        peer("b", 1, expires=NOW - 1),
        peer("me", 1),
        peer("b", 7),
        pb.Record(peer_id="b", role=pb.ROLE_SEED, stage=1, state=pb.PEER_STATE_WORKING, expires=NOW + 60),
    ],
    ids=["leaving", "expired", "own", "no such stage", "seed"],
)
def test_records_that_hold_no_stage_are_left_out(ignored: pb.Record) -> None:
    assert choose_stage([peer("a", 0), ignored], 2, "me", NOW).stage == 1


def test_least_throughput_wins_over_fewest_replicas() -> None:
    records = [
        peer("a", 0, tokens_per_s=500.0),
        peer("b", 1, tokens_per_s=100.0),
        peer("c", 1, tokens_per_s=100.0),
    ]
    choice = choose_stage(records, 2, "me", NOW)
    assert choice.stage == 1
    assert "2 so far, 200 tokens/s" in choice.reason


def test_equal_flow_through_all_stages_goes_by_replicas_then_by_index() -> None:
    """A running pipeline passes the same tokens everywhere, up to noise: that says nothing about need."""
    records = [
        peer("a", 0, tokens_per_s=99.0),
        peer("b", 0, tokens_per_s=1.0),
        peer("c", 1, tokens_per_s=101.0),
        peer("d", 2, tokens_per_s=100.5),
    ]
    assert choose_stage(records, 3, "me", NOW).stage == 1


def test_an_unmeasured_replica_counts_as_an_average_one() -> None:
    records = [peer("a", 0, tokens_per_s=40.0), peer("b", 1), peer("c", 1)]
    choice = choose_stage(records, 2, "me", NOW)
    assert (choice.stage, "40 tokens/s" in choice.reason) == (0, True)


def test_the_earlier_of_two_claims_keeps_the_stage_and_the_other_moves_to_the_empty_one() -> None:
    records = [claim("a", 0, 11.0), claim("b", 0, 10.0)]
    assert settle(records, 2, "b", NOW).keep
    moved = settle(records, 2, "a", NOW)
    assert (moved.keep, moved.stage) == (False, 1)
    assert "b has an earlier claim on stage 0; stage 1 has no peer" in moved.reason


def test_claims_at_the_same_time_are_ordered_by_peer_id() -> None:
    records = [claim("b", 0, 10.0), claim("a", 0, 10.0)]
    assert settle(records, 2, "a", NOW).keep
    assert not settle(records, 2, "b", NOW).keep


def test_a_working_peer_keeps_its_stage_against_an_earlier_claim() -> None:
    """A newcomer whose clock runs behind does not push out a peer that holds weights."""
    records = [peer("worker", 0, claimed=100.0), claim("newcomer", 0, 1.0)]
    assert settle(records, 2, "worker", NOW).keep
    assert settle(records, 2, "newcomer", NOW).stage == 1


def test_newcomers_on_a_full_swarm_spread_over_its_stages() -> None:
    records = [peer(f"w{stage}", stage) for stage in range(3)] + [
        claim(f"n{i}", 0, 10.0 + i) for i in range(3)
    ]
    assert [settle(records, 3, f"n{i}", NOW).stage for i in range(3)] == [0, 1, 2]


def test_settle_without_an_own_claim_is_an_error() -> None:
    with pytest.raises(ValueError, match="no claim of me"):
        settle([claim("a", 0, 1.0)], 2, "me", NOW)


class Swarm:
    """Peers that read and act at different moments: between a read and its act the swarm may have moved on."""

    def __init__(self, peers: int, stages: int) -> None:
        self.stages, self.time = stages, 0.0
        self.names = [f"p{i:02d}" for i in range(peers)]
        self.claims: dict[str, pb.Record] = {}
        self.views: dict[str, list[pb.Record]] = {name: [] for name in self.names}

    def read(self, name: str) -> None:
        self.views[name] = [r for r in self.claims.values() if r.peer_id != name]

    def act(self, name: str) -> bool:
        """True when the peer changed its claim."""
        self.time += 1.0
        if name not in self.claims:
            stage = choose_stage(self.views[name], self.stages, name, NOW).stage
        else:
            result = settle([*self.views[name], self.claims[name]], self.stages, name, NOW)
            if result.keep:
                return False
            stage = result.stage
        self.claims[name] = claim(name, stage, self.time)
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


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.integers(0, 8), st.randoms(use_true_random=False))
def test_newcomers_at_once_leave_no_stage_empty(stages: int, surplus: int, random: random.Random) -> None:
    """C19's sibling at start: bounded rounds, no stage that was held becomes empty, and in the end all rest."""
    swarm = Swarm(stages + surplus, stages)
    swarm.round(random)
    held = swarm.held()
    for _ in range(stages - 1):
        swarm.round(random)
        assert held <= swarm.held()
        held = swarm.held()
    assert held == set(range(stages))
    rounds = 0
    while swarm.round(random):
        rounds += 1
        assert rounds <= 2 * len(swarm.names), "peers keep moving"
        assert swarm.held() == set(range(stages))
    counts = [sum(r.stage == stage for r in swarm.claims.values()) for stage in range(stages)]
    assert max(counts) - min(counts) <= 1
