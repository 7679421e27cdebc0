"""Lloyd-Max tables, bit allotment, and the uniform quantizer with a dead zone."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.wire.quantize import (
    GAINS,
    MOST_BITS,
    allot,
    dequantize,
    levels,
    lloyd_max,
    quantize,
)

ALL_BITS = range(1, MOST_BITS + 1)


# ---- Lloyd-Max ------------------------------------------------------------------------------------------------------


def test_distortions_are_the_known_ones() -> None:
    assert lloyd_max(1).distortion == pytest.approx(1 - 2 / math.pi, rel=1e-12)
    assert lloyd_max(1).centroids.tolist() == pytest.approx([-math.sqrt(2 / math.pi), math.sqrt(2 / math.pi)])
    # Max's tables of 1960, which were iterated by hand up to some 0.2 %.
    for bits, known in ((2, 0.1175), (3, 0.03454), (4, 0.009497), (5, 0.002499)):
        assert lloyd_max(bits).distortion == pytest.approx(known, rel=2.5e-3)
    # Panter and Dite's limit for many levels, pi sqrt(3) / 2 / 4^bits, approached from below.
    limits = [lloyd_max(bits).distortion * 4**bits / (math.pi * math.sqrt(3) / 2) for bits in ALL_BITS]
    assert limits == sorted(limits)
    assert 0.995 < limits[-1] < 1


@pytest.mark.parametrize("bits", ALL_BITS)
def test_tables_meet_the_conditions_of_an_optimum(bits: int) -> None:
    """Thresholds midway, centroids at the mean of their cells, distortion as integrated: by quadrature, which shares
    nothing with the solver."""
    table = lloyd_max(bits)
    centroids, thresholds = table.centroids.numpy(), table.thresholds.numpy()
    assert (len(centroids), len(thresholds)) == (2**bits, 2**bits - 1)
    assert (np.diff(centroids) > 0).all()
    np.testing.assert_allclose(thresholds, (centroids[1:] + centroids[:-1]) / 2, atol=1e-15)
    np.testing.assert_array_equal(centroids, -centroids[::-1])
    edges = np.concatenate([[-12.0], thresholds, [12.0]])
    node, weight = np.polynomial.legendre.leggauss(80)
    width = np.diff(edges)[:, None] / 2
    x = (edges[:-1] + edges[1:])[:, None] / 2 + width * node
    mass = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * weight * width
    np.testing.assert_allclose((mass * x).sum(1) / mass.sum(1), centroids, atol=1e-8)
    assert (mass * (x - centroids[:, None]) ** 2).sum() == pytest.approx(table.distortion, rel=1e-7)


def test_a_table_is_computed_once() -> None:
    assert lloyd_max(10) is lloyd_max(10)


@pytest.mark.parametrize("bits", [0, 11, -1])
def test_tables_of_other_sizes_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="1 to 10 bits"):
        lloyd_max(bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_gaussian_is_quantized_with_the_distortion_of_the_table(dtype: torch.dtype) -> None:
    unit = torch.randn(400, 500, generator=torch.Generator().manual_seed(1)).to(dtype)
    for bits in range(1, 7):
        index = quantize(unit.T, lloyd_max(bits))
        assert index.dtype == torch.int32
        assert index.shape == (500, 400)
        assert 0 <= int(index.min()) <= int(index.max()) < 2**bits
        error = dequantize(index, lloyd_max(bits)).sub(unit.T).square().mean().item()
        assert error == pytest.approx(lloyd_max(bits).distortion, rel=0.03)


@given(
    st.lists(st.floats(-(2**100), 2**100, width=32) | st.floats(-4, 4, width=32), min_size=1, max_size=50),
    st.sampled_from(ALL_BITS),
)
@settings(deadline=None, max_examples=60)
def test_every_value_goes_to_its_nearest_centroid(values: list[float], bits: int) -> None:
    table = lloyd_max(bits)
    unit = torch.tensor(values)
    got = dequantize(quantize(unit, table), table)
    nearest = (unit[:, None] - table.centroids.float()).abs().amin(1)
    assert torch.allclose((got - unit).abs(), nearest, rtol=1e-5, atol=1e-6)
    # A centroid is its own index.
    assert torch.equal(quantize(table.centroids, table), torch.arange(2**bits, dtype=torch.int32))


# ---- allotment ------------------------------------------------------------------------------------------------------


def greedy(scales: list[int], total: int, most: int) -> list[int]:
    """One bit at a time, as the definition says."""
    bits = [0] * len(scales)
    for _ in range(min(total, most * len(scales))):
        open_ = [i for i in range(len(scales)) if bits[i] < most]
        best = max(open_, key=lambda i: (2 * scales[i] + GAINS[bits[i]], -i))
        bits[best] += 1
    return bits


scale_lists = st.lists(st.integers(-(2**15), 2**15 - 1) | st.integers(-200, 200), max_size=12)


def test_gains_are_those_of_the_tables() -> None:
    distortion = [1.0, *(lloyd_max(bits).distortion for bits in ALL_BITS)]
    assert [round(64 * math.log2(a - b)) for a, b in pairwise(distortion)] == list(GAINS)


@given(scale_lists, st.integers(0, 130), st.integers(0, MOST_BITS))
@settings(deadline=None)
def test_allotment_is_the_greedy_one(scales: list[int], total: int, most: int) -> None:
    got = allot(np.array(scales, np.int16), total, most)
    assert got.dtype == np.uint8
    assert got.tolist() == greedy(scales, total, most)
    assert got.sum() == min(total, most * len(scales))


@given(scale_lists, st.integers(0, 130))
@settings(deadline=None)
def test_more_energy_never_gets_fewer_bits(scales: list[int], total: int) -> None:
    got = allot(np.array(scales, np.int64), total)
    order = sorted(range(len(scales)), key=lambda i: (-scales[i], i))
    assert list(got[order]) == sorted(got, reverse=True)


@given(scale_lists, st.integers(0, 129))
@settings(deadline=None)
def test_one_more_bit_goes_to_one_coordinate(scales: list[int], total: int) -> None:
    before, after = (allot(np.array(scales, np.int64), t).astype(int) for t in (total, total + 1))
    assert (after >= before).all()


def test_allotment_equalizes_the_distortion() -> None:
    """Reverse water-filling: a coordinate with bits ends at the common distortion, to the grain of a whole bit; one
    without has less energy than its first bit is worth to others."""
    scales = np.arange(0, -640, -4)
    bits = allot(torch.from_numpy(scales), 400)
    worth_next = 2 * scales + np.array(GAINS)[np.minimum(bits, 9)]
    worth_last = 2 * scales + np.array(GAINS)[np.maximum(bits, 1).astype(int) - 1]
    assert worth_next.max() <= worth_last[bits > 0].min()
    assert (bits == 0).any()


def test_impossible_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match="-1 bits"):
        allot(np.zeros(3, np.int16), -1)
    with pytest.raises(ValueError, match="at most 11 each"):
        allot(np.zeros(3, np.int16), 1, most=11)


# ---- uniform step ---------------------------------------------------------------------------------------------------


def test_levels_by_hand() -> None:
    x = torch.tensor([0.0, 0.59, 0.61, 1.59, 1.61, -0.59, -0.61, -1.61])
    assert levels(x, 0.4).tolist() == [0, 0, 1, 1, 2, 0, -1, -2]
    assert levels(x, 0.5).tolist() == [0, 1, 1, 2, 2, -1, -1, -2]
    assert levels(x[:3].expand(2, 3), torch.tensor([0.5, 0.5, 0.3])).tolist() == [[0, 1, 0], [0, 1, 0]]
    assert levels(torch.tensor([0.0, 1.2, -1.2, 1.6]), -0.5).tolist() == [0, 0, 0, 1]


finite = st.floats(-(2**127), 2**127, width=32)


@given(
    st.lists(finite | st.floats(-100, 100, width=32), min_size=1, max_size=30),
    st.sampled_from([-0.5, 0.0, 0.3, 0.4, 0.5]),
)
@settings(deadline=None)
def test_levels_err_by_the_dead_zone_at_most(values: list[float], rounding: float) -> None:
    x = torch.tensor(values)
    got = levels(x, rounding)
    assert got.dtype == torch.int32
    assert torch.equal(got, -levels(-x, rounding))
    assert int(got.abs().max()) <= 2**24
    within = x.abs() < 2**23
    error = (got - x).abs()[within]
    assert bool((error <= max(rounding, 1 - rounding) + 2e-7 * x.abs()[within]).all())
    # A level is of its own value.
    assert torch.equal(levels(got.float(), rounding)[within], got[within]) or rounding < 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_levels_of_short_formats_are_those_of_their_values(dtype: torch.dtype) -> None:
    x = 100 * torch.randn(64, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert torch.equal(levels(x, 0.4), levels(x.float(), 0.4))
