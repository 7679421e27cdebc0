"""Which coordinates an exchange covers (docs/gossip.md): by the plain description, and that none is left behind."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshd.gossip.coordinates import Coverage, covered, sampled, subset_seed
from meshd.gossip.modular import SAMPLES
from meshd.pipeline.keeping import Keeping

WORD = 2**64


def word(start: int, number: int) -> int:
    """Output `number` of SplitMix64, as docs/gossip.md gives it."""
    x = (start + (number + 1) * 0x9E3779B97F4A7C15) % WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def mixed(x: int) -> int:
    return word(x - 0x9E3779B97F4A7C15, 0)


def place(block: int, subset: int, offset: int, seed: int) -> int:
    return block * subset + ((word(mixed(seed), block) >> 33) + offset) % subset


@given(st.integers(0, WORD - 1), st.integers(1, 4096), st.integers(0, 10_000), st.integers(0, 50), st.data())
def test_one_of_every_block_as_described(
    seed: int, subset: int, first: int, blocks: int, data: st.DataObject
) -> None:
    offset = data.draw(st.integers(0, subset - 1))
    found = covered(first, first + blocks, subset, offset, seed)
    assert found.tolist() == [place(first + block, subset, offset, seed) for block in range(blocks)]


@given(st.integers(0, WORD - 1), st.integers(1, 64), st.integers(1, 30))
def test_the_offsets_together_are_every_coordinate_once(seed: int, subset: int, blocks: int) -> None:
    sets = [covered(0, blocks, subset, offset, seed) for offset in range(subset)]
    assert sorted(torch.cat(sets).tolist()) == list(range(blocks * subset))


def test_neighbours_in_a_block_are_not_always_the_same() -> None:
    """Else an exchange would be of some columns of a matrix only."""
    found = covered(0, 10_000, 16, 3, 7) % 16
    counts = torch.bincount(found, minlength=16)
    assert counts.min() > 500
    assert counts.max() < 760


def test_a_vector() -> None:
    """docs/gossip.md."""
    assert covered(0, 6, 8, 5, 7).tolist() == [place(block, 8, 5, 7) for block in range(6)]
    assert subset_seed("run", 1) != subset_seed("run", 2)


@pytest.mark.parametrize("subset", [1, 4, 16])
def test_samples_are_covered_coordinates_of_every_tensor(subset: int) -> None:
    starts = torch.tensor([0, 7, 107, 110, 1000])
    found = sampled(starts, subset, subset - 1, 7, exchange=12)
    assert found.shape == (4, SAMPLES)
    everywhere = set(covered(0, 1000, subset, subset - 1, 7).tolist())
    for row, first, end in zip(found, starts.tolist(), starts.tolist()[1:], strict=False):
        assert bool(((row >= first) & (row < end) & (row.diff(prepend=row[:1]) >= 0)).all())
        if end - first >= 2 * subset:
            assert everywhere.issuperset(row.tolist())
    assert torch.equal(found, sampled(starts, subset, subset - 1, 7, exchange=12))
    assert not torch.equal(found, sampled(starts, subset, subset - 1, 7, exchange=13))


def test_a_replica_takes_what_it_has_not_exchanged_for_longest() -> None:
    coverage, rng = Coverage(5, 0), random.Random(0)
    taken = []
    for _ in range(15):
        offset = coverage.next(rng)
        taken.append(offset)
        coverage.exchanged(5, offset, 0, 0)
    for at in (0, 5, 10):
        assert sorted(taken[at : at + 5]) == list(range(5))


def test_what_partners_have_is_what_all_offsets_have() -> None:
    """A step counts as kept elsewhere (`Keeping`) only when all its coordinates were exchanged."""
    coverage, keeping = Coverage(3, 100), Keeping()
    for stepped, (subset, offset), kept in [
        (10, (3, 0), 0),
        (20, (3, 2), 0),
        (30, (3, 2), 0),
        (40, (3, 1), 10),  # offset 0 is what was exchanged least recently
        (50, (3, 0), 30),
        (60, (7, 4), 30),  # the partner's choice of another subset says nothing about whole offsets
        (70, (1, 0), 70),
    ]:
        keeping.keep(coverage.exchanged(subset, offset, stepped, 100 + stepped))
        assert keeping.kept == kept
    assert coverage.since(3, 2, 175) == 5
    assert coverage.since(1, 0, 175) == 5
    assert coverage.since(7, 0, 175) is None
    assert Coverage(3, 100).since(3, 0, 130) == 30
