"""Random masks that both ends know by a seed, and column lists."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from meshd.errors import MismatchError
from meshd.wire import mask
from meshd.wire.bits import pack
from meshd.wire.mask import columns_bytes, pack_columns, random_columns, top_columns, unpack_columns

WORD = 2**64


# ---- the generator, written down a second time ----------------------------------------------------------------------


def mix(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB % WORD
    return word ^ word >> 31


def splitmix(start: int, n: int) -> int:
    """Output n, from 0, of SplitMix64."""
    return mix((start + (n + 1) * 0x9E3779B97F4A7C15) % WORD)


def reference_columns(seed: int, boundary: int, tokens: int, hidden: int, keep: int) -> list[list[int]]:
    start = mix(mix(seed % WORD) ^ boundary)
    width = (hidden - 1).bit_length()

    def key(token: int, column: int) -> int:
        word = splitmix(start, token * hidden + column) >> width << width | column
        return word - WORD if word >> 63 else word

    return [sorted(sorted(range(hidden), key=lambda c, t=t: key(t, c))[:keep]) for t in range(tokens)]


def test_the_generator_is_splitmix64() -> None:
    """Its well-known outputs for the seed 1234567."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix(1234567, n) for n in range(4)] == known


@given(
    st.integers(-(2**63), 2**64),
    st.integers(0, 100),
    st.integers(0, 6),
    st.integers(1, 40).flatmap(lambda hidden: st.tuples(st.just(hidden), st.integers(1, hidden))),
)
@settings(deadline=None)
def test_random_columns_are_the_written_ones(
    seed: int, boundary: int, tokens: int, sizes: tuple[int, int]
) -> None:
    got = random_columns(seed, boundary, tokens, *sizes)
    assert got.shape == (tokens, sizes[1])
    assert got.tolist() == reference_columns(seed, boundary, tokens, *sizes)


def test_vectors_of_the_documentation() -> None:
    """docs/masks.md gives these as they are."""
    columns = random_columns(7, 1, 3, 32, 4)
    assert columns.tolist() == [[2, 6, 8, 23], [0, 4, 7, 29], [1, 11, 12, 18]]
    assert pack_columns(columns, 32).numpy().tobytes().hex() == "ca708d1569602a00"
    columns = random_columns(7, 1, 3, 16, 4)
    assert columns.tolist() == [[2, 5, 6, 8], [3, 7, 9, 12], [0, 4, 7, 10]]
    assert pack_columns(columns, 16).numpy().tobytes().hex() == "7204aa90524a00"
    columns = random_columns(7, 1, 3, 12, 6)
    assert columns.tolist() == [[2, 4, 5, 6, 7, 8], [0, 1, 2, 7, 8, 11], [0, 1, 2, 4, 8, 9]]
    assert pack_columns(columns, 12).numpy().tobytes().hex() == "f471981703"


def test_tokens_do_not_depend_on_how_many_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = random_columns(5, 2, 100, 48, 7)
    assert torch.equal(random_columns(5, 2, 31, 48, 7), whole[:31])
    monkeypatch.setattr(mask, "_CHUNK_CPU", 48 * 13)
    assert torch.equal(random_columns(5, 2, 100, 48, 7), whole)
    monkeypatch.setattr(mask, "_CHUNK_CPU", 1)
    assert torch.equal(random_columns(5, 2, 100, 48, 7), whole)


@pytest.mark.parametrize(("hidden", "keep"), [(576, 58), (576, 29), (1, 1), (40, 40), (4096, 410)])
def test_exactly_keep_columns_ascending(hidden: int, keep: int) -> None:
    got = random_columns(9, 0, 200, hidden, keep)
    assert got.dtype == torch.int64
    assert bool((got[:, 1:] > got[:, :-1]).all())
    assert 0 <= int(got.min()) <= int(got.max()) < hidden


@pytest.mark.parametrize(("hidden", "keep"), [(8, 0), (8, 9), (2**16 + 1, 4), (0, 0)])
def test_impossible_masks_are_refused(hidden: int, keep: int) -> None:
    with pytest.raises(ValueError, match="cannot keep"):
        random_columns(1, 0, 2, hidden, keep)
    with pytest.raises(ValueError, match="cannot keep"):
        columns_bytes(2, hidden, keep)


# ---- statistics, with fixed seeds -----------------------------------------------------------------------------------


def chi_square_is_plausible(
    counts: torch.Tensor, expected: float, variance_share: float, freedom: int
) -> None:
    """Wilson and Hilferty's normal approximation within 4 standard deviations, on both sides: counts that are more
    even than chance would have it are as suspect as uneven ones."""
    chi = ((counts.double() - expected) ** 2 / (expected * variance_share)).sum().item()
    z = ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert abs(z) < 4, (chi, freedom)


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 11])
@pytest.mark.parametrize(("hidden", "keep"), [(24, 6), (576, 58)])
def test_every_column_is_kept_equally_often(seed: int, hidden: int, keep: int) -> None:
    tokens = 4000
    counts = random_columns(seed, 0, tokens, hidden, keep).flatten().bincount(minlength=hidden)
    share = keep / hidden
    # Exactly keep per token: the counts have one degree of freedom less, and covariances that this accounts for.
    variance = (1 - share) * hidden / (hidden - 1)
    chi_square_is_plausible(counts, tokens * share, variance, hidden - 1)


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_every_subset_is_equally_likely(seed: int) -> None:
    tokens, subsets = 40_000, {sum(1 << c for c in s): n for n, s in enumerate(combinations(range(7), 3))}
    codes = (1 << random_columns(seed, 0, tokens, 7, 3)).sum(1)
    counts = codes.bincount(minlength=128)[list(subsets)]
    assert int(counts.sum()) == tokens
    chi_square_is_plausible(counts, tokens / len(subsets), 1.0, len(subsets) - 1)


def kept(columns: torch.Tensor, hidden: int) -> torch.Tensor:
    return torch.zeros(len(columns), hidden).scatter_(1, columns, 1.0)


@pytest.mark.parametrize(
    ("other_seed", "other_boundary", "shift"),
    [(3, 0, 1), (3, 0, 7), (4, 0, 0), (3, 1, 0), (4, 1, 0), (3 + 2**32, 0, 0)],
)
def test_masks_of_different_tokens_boundaries_and_seeds_are_independent(
    other_seed: int, other_boundary: int, shift: int
) -> None:
    """Two independent subsets share hypergeometrically many columns."""
    tokens, hidden, keep = 6000, 64, 16
    a = kept(random_columns(3, 0, tokens, hidden, keep), hidden)
    b = kept(random_columns(other_seed, other_boundary, tokens, hidden, keep), hidden).roll(shift, 0)
    share = keep / hidden
    shared = (a * b).sum(1)
    variance = keep * share * (1 - share) * (hidden - keep) / (hidden - 1)
    z = (shared.mean().item() - keep * share) / math.sqrt(variance / tokens)
    assert abs(z) < 4
    assert shared.var().item() == pytest.approx(variance, rel=0.1)


def test_masked_values_over_their_share_are_unbiased() -> None:
    """E[scatter(x[columns]) / q] = x (DESIGN section 3, rescale 1/q): every coordinate, over fresh seeds."""
    tokens, hidden, keep, seeds = 50, 32, 8, 200
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(4)).exp()
    total = torch.zeros(tokens, hidden, dtype=torch.float64)
    for seed in range(seeds):
        columns = random_columns(seed, 3, tokens, hidden, keep)
        total += torch.zeros(tokens, hidden).scatter_(1, columns, x.gather(1, columns)) * (hidden / keep)
    share = keep / hidden
    z = (total / seeds / x - 1) / math.sqrt((1 - share) / share / seeds)
    assert z.abs().max().item() < 5
    assert z.square().mean().item() == pytest.approx(1, abs=0.15)
    assert abs(z.mean(0)).max().item() * math.sqrt(tokens) < 4.5


# ---- the largest, and their positions -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_columns_are_the_largest(dtype: torch.dtype) -> None:
    x = torch.randn(50, 33, generator=torch.Generator().manual_seed(5)).to(dtype)
    got = top_columns(x, 6)
    assert bool((got[:, 1:] > got[:, :-1]).all())
    largest = x.abs().sort(dim=1, descending=True).values[:, :6]
    assert torch.equal(x.gather(1, got).abs().sort(dim=1, descending=True).values, largest)
    assert top_columns(torch.zeros(2, 5), 3).shape == (2, 3)


sizes = st.one_of(st.integers(1, 12), st.sampled_from([63, 64, 65, 255, 256, 257, 576, 2**16])).flatmap(
    lambda hidden: st.tuples(st.just(hidden), st.integers(1, min(hidden, 70)))
)


def reference_bytes(columns: list[list[int]], hidden: int) -> bytes:
    """The packed columns, bit by bit, as docs/masks.md says."""
    keep = len(columns[0])
    forms = {0: hidden}
    for low in range(1, (hidden - 1).bit_length()):
        forms[low] = keep * low + keep + ((hidden - 1) >> low)
    low = min(forms, key=lambda form: (forms[form], form))
    marks = forms[low] - keep * low
    lows = sum((c & (1 << low) - 1) << low * n for n, c in enumerate(c for row in columns for c in row))
    places = [[(c >> low) + i for i, c in enumerate(row)] if low else row for row in columns]
    bitmap = sum(1 << marks * n + place for n, row in enumerate(places) for place in row)
    low_bytes, map_bytes = -(-len(columns) * keep * low // 8), -(-len(columns) * marks // 8)
    return lows.to_bytes(low_bytes, "little") + bitmap.to_bytes(map_bytes, "little")


@given(sizes, st.integers(1, 9), st.integers(0, 2**32))
@settings(deadline=None)
def test_columns_come_back_from_the_written_bytes(size: tuple[int, int], tokens: int, seed: int) -> None:
    hidden, keep = size
    columns = random_columns(seed, 0, tokens, hidden, keep)
    packed = pack_columns(columns, hidden)
    assert packed.numpy().tobytes() == reference_bytes(columns.tolist(), hidden)
    assert len(packed) == columns_bytes(tokens, hidden, keep)
    # Never more than a bitmap, but for the padding of the second of two streams.
    assert len(packed) <= -(-tokens * hidden // 8) + 1
    assert torch.equal(unpack_columns(packed, tokens, hidden, keep), columns)


@given(sizes, st.integers(1, 5), st.data())
@settings(deadline=None)
def test_garbage_is_refused_or_is_what_its_columns_pack_to(
    size: tuple[int, int], tokens: int, data: st.DataObject
) -> None:
    hidden, keep = size
    packed = pack_columns(random_columns(1, 0, tokens, hidden, keep), hidden)
    for flip in data.draw(st.lists(st.integers(0, 8 * len(packed) - 1), min_size=1, max_size=4)):
        packed[flip // 8] ^= 1 << flip % 8
    try:
        columns = unpack_columns(packed, tokens, hidden, keep)
    except MismatchError:
        return
    assert bool((columns[:, 1:] > columns[:, :-1]).all())
    assert 0 <= int(columns.min()) <= int(columns.max()) < hidden
    assert torch.equal(pack_columns(columns, hidden), packed)


def test_what_is_wrong_with_columns_is_said() -> None:
    packed = pack_columns(random_columns(1, 0, 3, 576, 40), 576)
    with pytest.raises(MismatchError, match=rf"{len(packed) - 1} bytes of columns where 40 of 576 for 3"):
        unpack_columns(packed[:-1], 3, 576, 40)
    with pytest.raises(MismatchError, match="bytes of columns"):
        unpack_columns(torch.cat([packed, packed.new_zeros(1)]), 3, 576, 40)
    with pytest.raises(MismatchError, match="without exactly 40 marks"):
        unpack_columns(torch.zeros_like(packed), 3, 576, 40)
    # Of 576, 40 come as 3 low bits each and then their marks: with equal low bits, columns repeat.
    good = pack_columns(torch.arange(40)[None], 576)
    bad = torch.cat([pack(torch.zeros(40, dtype=torch.int64), 3), good[40 * 3 // 8 :]])
    with pytest.raises(MismatchError, match="do not ascend"):
        unpack_columns(bad, 1, 576, 40)
    # One column past the end: 570 of 571, 3 low bits, made 575.
    good = pack_columns(torch.tensor([[*range(0, 390, 10), 570]]), 571)
    assert unpack_columns(good, 1, 571, 40)[0, -1] == 570
    good[40 * 3 // 8 - 1] |= 0b11100000
    with pytest.raises(MismatchError, match="not under 571"):
        unpack_columns(good, 1, 571, 40)


def test_positions_cost_little_more_than_they_must() -> None:
    """log2(C(576, 58)) = 267 bits; a list of indices takes 580."""
    assert columns_bytes(8, 576, 58) == 303
    assert columns_bytes(1, 576, 288) == 72
    assert columns_bytes(1000, 4096, 205) * 8 / 1000 == pytest.approx(1280, abs=1)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, list | tuple) else [out]:
            if isinstance(item, torch.Tensor):
                self.bytes = max(self.bytes, item.numel() * item.element_size())
        return out


def test_no_tensor_is_much_larger_than_the_input() -> None:
    tokens, hidden = 4096, 576
    x = torch.randn(tokens, hidden)
    for keep in (29, 58, 288):
        with Largest() as largest:
            columns = random_columns(1, 0, tokens, hidden, keep)
            unpack_columns(pack_columns(top_columns(x, keep), hidden), tokens, hidden, keep)
        assert columns.shape == (tokens, keep)
        assert largest.bytes <= 2 * x.numel() * x.element_size()
