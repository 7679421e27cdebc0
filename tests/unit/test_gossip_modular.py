"""Residues: differences between replicas in a few bits, unbiased, bounded, and exactly opposite on the two sides."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshd.errors import MismatchError
from meshd.gossip.modular import (
    ROUNDING,
    SAMPLES,
    differences,
    dither,
    gain,
    is_wide,
    noise,
    packed,
    plausible,
    residues,
    step_codes,
    steps_of,
    unpacked,
)

NARROW, WIDE = (next(number for number in range(1000) if is_wide(number) is wide) for wide in (False, True))


def exchanged(mine: torch.Tensor, theirs: torch.Tensor, step: float, bits: int, number: int) -> torch.Tensor:
    """What the owner of `mine` finds: theirs - mine, as far as it can tell."""
    steps, dithers = torch.full((len(mine),), step, dtype=torch.float64), dither(number, 0, len(mine))
    ours = residues(mine, steps, dithers, bits)
    others = unpacked(packed(residues(theirs, steps, dithers, bits), bits), bits, len(mine))
    return differences(ours, others, bits).double() * step


@given(
    st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=1, max_size=40),
    st.sampled_from(sorted(ROUNDING)),
    st.floats(1e-6, 1e3),
    st.integers(0, 2**64 - 1),
)
def test_both_sides_find_opposite_moves_within_half_the_levels(
    pairs: list[tuple[float, float]], bits: int, step: float, number: int
) -> None:
    mine, theirs = (torch.tensor(side) for side in zip(*pairs, strict=True))
    there, back = exchanged(mine, theirs, step, bits, number), exchanged(theirs, mine, step, bits, number)
    assert torch.equal(there, -back)
    assert bool((there.abs() < step * 2 ** (bits - 1)).all())


@given(
    st.floats(-100, 100), st.sampled_from(sorted(ROUNDING)), st.floats(1e-3, 10), st.integers(0, 2**64 - 1)
)
def test_where_replicas_agree_nothing_moves(value: float, bits: int, step: float, number: int) -> None:
    same = torch.full((8,), value)
    assert not bool(exchanged(same, same, step, bits, number).any())


@pytest.mark.parametrize("bits", sorted(ROUNDING))
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9])
def test_a_difference_within_the_levels_is_found_without_bias(bits: int, share: float) -> None:
    """Its error is that of a coin between the two multiples of the step around it: variance d (step - d)."""
    count, step = 40_000, 0.01
    difference = share * step
    mine = torch.randn(count, generator=torch.Generator().manual_seed(1)).double() * 3
    found = exchanged(mine, mine + difference, step, bits, 5)
    variance = difference * (step - difference)
    assert abs(found.mean().item() - difference) <= 5 * math.sqrt(variance / count) + 1e-12
    assert found.var().item() == pytest.approx(variance, rel=0.05, abs=1e-12)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", ["normal", "laplace"])
def test_how_much_of_a_disagreement_is_left(shape: str, bits: int) -> None:
    """Share of the energy of differences that is left when each has moved half of what was found."""
    left = {
        "normal": {2: 0.47, 3: 0.17, 4: 0.066, 8: 0.00107},
        "laplace": {2: 0.58, 3: 0.29, 4: 0.13, 8: 0.00107},
    }[shape][bits]
    generator = torch.Generator().manual_seed(3)
    count = 200_000
    difference = torch.randn(count, generator=generator)
    if shape == "laplace":  # its distribution from an even one
        even = torch.rand(count, generator=generator) - 0.5
        difference = -even.sign() * torch.log1p(-2 * even.abs()) / math.sqrt(2)
    mine = torch.randn(count, generator=generator).double()
    theirs = mine + 1e-4 * difference
    step = 1e-4 * ROUNDING[bits].step
    after = 1e-4 * difference - exchanged(mine, theirs, step, bits, 9) * ROUNDING[bits].gain
    found = (after.square().mean() / (1e-4 * difference).square().mean()).item()
    assert found == pytest.approx(left, rel=0.15)


@pytest.mark.parametrize("bits", sorted(ROUNDING))
@pytest.mark.parametrize("number", [NARROW, WIDE])
def test_how_far_apart_two_are_shows_in_what_is_found(bits: int, number: int) -> None:
    """Never further than they are, but for a few percent: a replica must not take rounding for distance."""
    generator = torch.Generator().manual_seed(bits)
    mine, apart = torch.randn(2, 20_000, generator=generator)
    step = ROUNDING[bits].step * (4.0 if number == WIDE else 1.0)
    found = exchanged(mine, mine + apart, step, bits, number).square().mean().sqrt() / noise(bits, number)
    assert 0.6 < found < 1.08
    if number == NARROW:
        assert found > 0.9
        pushed = exchanged(mine, mine + apart + 1.5, step, bits, number).square().mean().sqrt()
        assert bits == 2 or pushed / noise(bits, number) > 1.4  # 2 bits reach no further


def test_more_bits_leave_less() -> None:
    generator = torch.Generator().manual_seed(4)
    mine = torch.randn(20_000, generator=generator)
    theirs = mine + torch.randn(20_000, generator=generator)
    errors = []
    for bits in sorted(ROUNDING):
        step = steps_of(step_codes(mine[None], theirs[None], bits, NARROW)).item()
        errors.append((theirs - mine - exchanged(mine, theirs, step, bits, 2)).square().mean().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-2 * errors[0]


@given(st.floats(1e-12, 1e4), st.sampled_from(sorted(ROUNDING)))
def test_a_step_is_within_an_eighth_of_an_octave_of_what_the_samples_call_for(
    distance: float, bits: int
) -> None:
    mine = torch.zeros(1, SAMPLES)
    code = step_codes(mine, torch.full((1, SAMPLES), distance), bits, NARROW)
    assert code.dtype == torch.uint8
    wanted = torch.tensor(distance).double().item() * ROUNDING[bits].step
    if 2.0**-48 <= wanted <= 2.0**15:
        assert abs(math.log2(steps_of(code).item() / wanted)) <= 0.126


def test_equal_samples_have_the_smallest_step() -> None:
    assert step_codes(torch.ones(2, SAMPLES), torch.ones(2, SAMPLES), 2, NARROW).tolist() == [0, 0]


def test_the_dither_is_even_and_follows_from_exchange_and_position() -> None:
    found = dither(77, 0, 10_000)
    assert found.min() >= 0.0
    assert found.max() < 1.0
    assert found.mean().item() == pytest.approx(0.5, abs=0.02)
    assert torch.equal(found[100:200], dither(77, 100, 100))
    assert not torch.equal(found, dither(78, 0, 10_000))


@pytest.mark.parametrize("wrong", [b"", b"\\x00" * 4, b"\\x00" * 2])
def test_another_number_of_bytes_is_refused(wrong: bytes) -> None:
    with pytest.raises(MismatchError, match="9 residues of 2 bits"):
        unpacked(wrong, 2, 9)


def test_one_exchange_in_eight_has_steps_four_times_as_long() -> None:
    assert sum(is_wide(number) for number in range(8000)) == pytest.approx(1000, rel=0.1)
    for bits in sorted(ROUNDING):
        narrow, wide = (
            steps_of(step_codes(torch.zeros(1, SAMPLES), torch.ones(1, SAMPLES), bits, number)).item()
            for number in (NARROW, WIDE)
        )
        assert wide == pytest.approx(4 * narrow)
        assert gain(bits, WIDE) < gain(bits, NARROW) <= 1.0


@pytest.mark.parametrize("bits", sorted(ROUNDING))
def test_residues_that_are_anything_are_told_from_those_of_values(bits: int) -> None:
    generator = torch.Generator().manual_seed(6)
    mine = torch.randn(2000, generator=generator).double()
    dithers, levels = dither(3, 0, 2000), 1 << bits
    for factor in (1.0, 4.0):
        steps = torch.full((2000,), ROUNDING[bits].step * factor, dtype=torch.float64)
        ours = residues(mine, steps, dithers, bits)
        theirs = residues(mine + torch.randn(2000, generator=generator), steps, dithers, bits)
        anything = torch.randint(0, levels, (2000,), generator=generator, dtype=torch.int32)
        assert plausible(ours, theirs, bits)
        assert not plausible(ours, anything, bits)
        assert plausible(ours[:100], anything[:100], bits)  # too few to say
