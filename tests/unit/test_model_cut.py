"""Where a model is cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import tiny_config

from meshd.errors import ConfigError
from meshd.model.cost import LayerCosts, measure_costs
from meshd.model.cut import Hop, balance, check_cut, hops


def slowest(costs: list[float], cut: tuple[int, ...], first: float, last: float, scale: float) -> float:
    stages = [sum(costs[a:b]) for a, b in pairwise([0, *cut, len(costs)])]
    stages[-1] = stages[-1] * scale + last
    stages[0] += first
    return max(stages)


@settings(max_examples=150, deadline=None)
@given(
    costs=st.lists(st.integers(1, 20).map(float), min_size=1, max_size=8),
    stages=st.integers(1, 8),
    first=st.integers(0, 40).map(float),
    last=st.integers(0, 40).map(float),
    scale=st.sampled_from([1.0, 0.75]),
)
def test_balance_is_optimal(costs: list[float], stages: int, first: float, last: float, scale: float) -> None:
    stages = min(stages, len(costs))
    cut = balance(costs, stages, first, last, scale)
    check_cut(len(costs), cut)
    assert len(cut) == stages - 1
    best = min(slowest(costs, c, first, last, scale) for c in combinations(range(1, len(costs)), stages - 1))
    assert slowest(costs, tuple(cut), first, last, scale) == pytest.approx(best)


def test_hops_of_an_untied_model() -> None:
    assert hops(6, [2, 3], "none") == [
        Hop(0, 0, 0, 2, embed=True, head=False),
        Hop(1, 1, 2, 3, embed=False, head=False),
        Hop(2, 2, 3, 6, embed=False, head=True),
    ]
    assert hops(6, [2, 3], "freeze") == hops(6, [2, 3], "none")


def test_ring_comes_back_to_stage_0_for_the_head() -> None:
    assert hops(6, [2, 3], "ring")[2:] == [
        Hop(2, 2, 3, 6, embed=False, head=False),
        Hop(3, 0, 6, 6, embed=False, head=True),
    ]


@pytest.mark.parametrize("tied", ["none", "ring", "freeze"])
def test_one_stage_is_one_hop(tied) -> None:
    assert hops(3, [], tied) == [Hop(0, 0, 0, 3, embed=True, head=True)]


@pytest.mark.parametrize(
    ("layers", "cut", "text"),
    [
        (3, [1, 2, 3], r"4 stages are more than the model's 3 layers.*at most 3 stages"),
        (6, [0, 2], r"model\.cut = \[0, 2\].*a stage would be empty.*2 ascending numbers from 1 to 5"),
        (6, [3, 2], r"layer 2 follows layer 3"),
        (6, [2, 2], r"layer 2 follows layer 2"),
        (6, [2, 6], r"layer 6 follows layer 6"),
        (6, [-1], r"layer -1 follows layer 0"),
    ],
)
def test_bad_cuts_are_refused(layers: int, cut: list[int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_cut(layers, cut)


def test_more_stages_than_layers() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.stages = 5: the model has 4 layers.*Fix: use 1 to 4 stages"
    ):
        balance([1.0] * 4, 5)


def test_measured_costs_cover_every_layer_and_part() -> None:
    costs = measure_costs(tiny_config("qwen2-window"), seq_len=16, microbatch=2)
    assert len(costs.forward) == len(costs.backward) == 4
    assert min(*costs.forward, *costs.backward, costs.embed, costs.head) > 0
    assert costs.forward[0] == costs.forward[1], "layers of one kind are timed once"


def test_the_head_counts_where_it_is() -> None:
    """In a ring the first stage gets fewer layers, otherwise the last; the last does not recompute."""
    costs = LayerCosts(forward=(1.0,) * 12, backward=(2.0,) * 12, embed=0.0, head=12.0)
    assert costs.cut(3, "ring") == [2, 7]
    assert costs.cut(3, "none") == [5, 10]
    assert LayerCosts((1.0,) * 11, (2.0,) * 11, 0.0, 0.0).cut(3, "freeze") == [3, 6]
