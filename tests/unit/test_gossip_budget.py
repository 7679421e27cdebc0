"""What an exchange may cover for a rate to be kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.gossip.budget import Budget, affordable_subset
from meshd.gossip.coordinates import MOST_SUBSET

MEGA = 1_000_000


@given(st.integers(1, 10**10), st.sampled_from([2, 3, 4, 8, 16]), st.floats(0.01, 1e4), st.floats(1.0, 1e11))
def test_the_smallest_subset_that_keeps_the_rate_is_taken(
    values: int, bits: int, interval_s: float, bps: float
) -> None:
    subset = affordable_subset(values, bits, interval_s, bps)
    assert subset & (subset - 1) == 0
    if subset < MOST_SUBSET:
        assert values * bits / subset <= bps * interval_s * (1 + 1e-9)
    if subset > 1:
        assert values * bits / (subset // 2) > bps * interval_s * (1 - 1e-9)


def stepping(budget: Budget, seconds: float, steps: int = 20) -> None:
    for step in range(steps + 1):
        budget.stepped(100.0 + step * seconds)


def test_without_a_budget_the_runs_own_subset_stays() -> None:
    budget = Budget(0)
    stepping(budget, 1.0)
    assert budget.subset(13, 100 * MEGA, 3, 10) == 13


def test_before_any_step_was_timed_nothing_changes() -> None:
    budget = Budget(1000)
    assert budget.subset(13, 100 * MEGA, 3, 10) == 13
    budget.stepped(5.0)
    assert budget.subset(13, 100 * MEGA, 3, 10) == 13


@pytest.mark.parametrize(
    ("step_s", "bps", "current", "expected"),
    [
        (1.0, 2 * MEGA, 1, 16),  # 300 Mbit every 10 s: 30 Mbps of all
        (1.0, 2 * MEGA, 16, 16),
        (2.0, 2 * MEGA, 1, 8),  # slower steps leave more time
        (1.0, 2 * MEGA, 32, 32),  # a little room is not taken
        (1.0, 2 * MEGA, 64, 16),  # much is
        (1.0, 100 * MEGA, 8, 1),
        (1.0, 1, 1, MOST_SUBSET),
    ],
)
def test_the_subset_follows_from_rate_steps_and_size(
    step_s: float, bps: int, current: int, expected: int
) -> None:
    budget = Budget(bps)
    stepping(budget, step_s)
    assert budget.subset(current, 100 * MEGA, 3, 10) == expected


def test_a_slow_link_is_not_filled() -> None:
    """Of 4 Mbps that exchanges reach, gossip takes half, whatever it is allowed."""
    budget = Budget(1000 * MEGA)
    stepping(budget, 1.0)
    budget.sent(MEGA // 2, 1.0)
    assert budget.subset(1, 100 * MEGA, 3, 10) == 16
    budget.sent(1000, 10.0)  # latency alone
    assert budget.subset(16, 100 * MEGA, 3, 10) == 16
    for _ in range(50):
        budget.sent(100 * MEGA, 1.0)  # it got faster
    assert budget.subset(16, 100 * MEGA, 3, 10) == 1
