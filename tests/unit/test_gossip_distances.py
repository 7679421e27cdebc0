"""How much a partner counts: by its work and its steps, and by how far away it is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.gossip.distances import NEAR, Distances, regard, restraint
from meshd.gossip.exchange import MOST_STEPS, share
from meshd.proto import meshd_pb2 as pb

OPENS = st.builds(
    pb.GossipOpen,
    work=st.integers(0, 2**64 - 1),
    weight_version=st.integers(0, MOST_STEPS),
)


@given(OPENS, OPENS)
def test_the_two_shares_add_up_to_one_within_their_bounds(one: pb.GossipOpen, other: pb.GossipOpen) -> None:
    first, second = share(one, other), share(other, one)
    assert first + second == pytest.approx(1.0, abs=1e-12)
    assert 0.4 - 1e-12 <= min(first, second) <= max(first, second) <= 0.6 + 1e-12


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        ((0, 0), (0, 0), 0.5),
        ((100, 5), (100, 5), 0.5),
        ((100, 5), (150, 5), 0.6),
        ((150, 5), (100, 5), 0.4),
        ((100, 5), (10**12, 5), 0.6),
        ((10**12, 5), (100, 5), 0.4),
        # 20 steps behind count half, and so on.
        ((150, 50), (200, 30), 0.4),
        ((200, 30), (150, 50), 0.6),
        ((100, 90), (200, 70), 0.5),
        ((100, 10**9), (10**12, 0), 0.4),
        ((0, 5), (100, 5), 0.6),
    ],
)
def test_who_has_worked_more_counts_more_and_who_is_behind_less(
    mine: tuple[int, int], theirs: tuple[int, int], expected: float
) -> None:
    one, other = (pb.GossipOpen(work=work, weight_version=version) for work, version in (mine, theirs))
    assert share(one, other) == pytest.approx(expected)


@given(OPENS, OPENS)
def test_a_listener_moves_all_the_way_and_its_partner_not_at_all(
    one: pb.GossipOpen, other: pb.GossipOpen
) -> None:
    one.listening = True
    assert (share(one, other), share(other, one)) == (1.0, 0.0)


@given(st.floats(1e-30, 1e30), st.floats(0.0, 1e38))
def test_who_keeps_further_away_pulls_less(usual: float, distance: float) -> None:
    factor = restraint(usual, distance)
    assert 0.0 <= factor <= 1.0
    assert factor * distance <= NEAR * usual * (1 + 1e-9)
    assert restraint(usual, 2 * distance) <= factor


@pytest.mark.parametrize(
    ("usual", "distance", "expected"),
    [(0.5, 0.0, 1.0), (0.5, 0.75, 1.0), (0.5, 1.5, 1 / 64), (0.5, 3.0, 1 / 4096), (math.inf, 1e9, 1.0)],
)
def test_up_to_the_usual_distance_a_partner_counts_in_full(
    usual: float, distance: float, expected: float
) -> None:
    assert restraint(usual, distance) == pytest.approx(expected)


SIZES = st.one_of(st.just(0.0), st.floats(1e-9, 1e9))


@given(SIZES, SIZES, SIZES, SIZES, SIZES)
def test_two_that_are_abreast_regard_each_other_alike(
    usual: float, learned: float, others_usual: float, others_learned: float, distance: float
) -> None:
    mine = regard(usual, learned, others_usual, others_learned, distance)
    theirs = regard(others_usual, others_learned, usual, learned, distance)
    assert 0.0 <= mine <= 1.0
    abreast = min(learned, others_learned) >= 0.6 * max(learned, others_learned)
    used = usual or 2 * learned, others_usual or 2 * others_learned
    if abreast and min(used) >= 0.5 * max(used):
        assert mine == theirs


@pytest.mark.parametrize(
    ("mine", "theirs", "distance", "expected"),
    [
        # (usual, learned): abreast, the smaller `usual` counts, or what was learned by one that knows too few.
        ((1.0, 10.0), (2.0, 9.0), 1.5, 1.0),
        ((1.0, 10.0), (2.0, 9.0), 3.0, 1 / 64),
        ((2.0, 10.0), (1.0, 9.0), 3.0, 1 / 64),
        ((0.0, 0.5), (2.0, 0.5), 3.0, 1 / 64),
        ((2.0, 0.5), (0.0, 0.5), 3.0, 1 / 64),
        # All at the base, as a run begins.
        ((0.0, 0.0), (0.0, 0.0), 3.0, 1.0),
        # The partner has learned less: at 0.6 of what this one has it counts, at 0.3 a 64th, at nothing not at all.
        ((9.0, 10.0), (9.0, 6.0), 5.0, 1.0),
        ((9.0, 10.0), (9.0, 3.0), 5.0, 1 / 64),
        ((9.0, 10.0), (9.0, 0.0), 5.0, 0.0),
        # The partner has learned more: this one goes by what it is used to itself.
        ((9.0, 3.0), (1.0, 10.0), 5.0, 1.0),
        ((0.0, 0.0), (1.0, 10.0), 5.0, 1.0),
        ((1.0, 3.0), (9.0, 10.0), 3.0, 1 / 64),
        # This one is far from all, or they from it: each by what it is used to.
        ((30.0, 100.0), (1.0, 100.0), 30.0, 1.0),
        ((1.0, 100.0), (30.0, 100.0), 3.0, 1 / 64),
    ],
)
def test_how_much_a_partner_counts(
    mine: tuple[float, float], theirs: tuple[float, float], distance: float, expected: float
) -> None:
    assert regard(*mine, *theirs, distance) == pytest.approx(expected)


def test_the_usual_distance_is_the_median_over_partners_with_one_voice_each() -> None:
    known = Distances()
    for peer, distance in (("a", 1.0), ("b", 3.0)):
        assert known.usual == 0.0
        known.measured(peer, distance)
    assert known.usual == 0.0  # one of two may be the bad one
    known.measured("c", 2.0)
    assert known.usual == 2.0
    for _ in range(50):
        known.measured("bad", 1e9)
    assert known.usual == 2.5
    known.measured("bad", 2.2)  # the last measured counts
    assert known.usual == pytest.approx(2.1)


def test_those_refused_for_their_distance_count_until_they_are_usual() -> None:
    """Two halves of a swarm that were parted: of a replica's partners more are far than near in the end."""
    known = Distances()
    for peer in "abc":
        known.measured(peer, 1.0)
    for number in range(3):
        assert known.usual == 1.0
        known.measured(f"other {number}", 1000.0)
    known.measured("other 3", 1000.0)
    assert known.usual == 1000.0


def test_partners_are_remembered_up_to_a_number_and_the_oldest_goes_first() -> None:
    known = Distances()
    known.measured("first", 1e6)
    for number in range(1000):
        known.measured("kept", 1e6)
        known.measured(str(number), 1.0)
    assert len(known._last) <= 64
    assert "first" not in known._last
    assert known._last["kept"] == 1e6
    assert known.usual == 1.0
