"""The file of weight priors: what crosses is what was measured, in a few bits, and nothing else gets in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from meshd.errors import MismatchError
from meshd.priors.weight import WeightPrior, WeightStats
from meshd.priors.weight_file import from_bytes, most_bytes, to_bytes

RANK = 6
SHAPES = {"m.layers.0.a.weight": torch.Size((24, 40)), "m.layers.1.é.weight": torch.Size((5, 30))}


def priors(seed: int = 0, zero: bool = False) -> dict[str, WeightPrior]:
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in SHAPES.items():
        stats = WeightStats(shape)
        for _ in range(4):
            stats.add(torch.randn(shape, generator=generator) * (0 if zero else 1e-4))
        out[name] = stats.prior(RANK, generator)
    return out


def test_what_is_read_is_what_was_written_up_to_three_bits() -> None:
    made = priors()
    data = to_bytes(2, made)
    assert len(data) <= most_bytes(SHAPES, RANK)
    read = from_bytes(data, 2, SHAPES, RANK)
    assert read.keys() == made.keys()
    for name, prior in made.items():
        got, rank = read[name], min(RANK, *SHAPES[name])
        assert all(t.dtype == torch.float32 for t in (got.u, got.s, got.v, got.power))
        for basis, rows in zip((got.u, got.v), SHAPES[name], strict=True):
            assert basis.shape == (rows, rank)
            torch.testing.assert_close(basis.T @ basis, torch.eye(rank), rtol=0, atol=1e-5)
        for part in ("rest", "norm", "mean_norm", "agreement"):
            assert getattr(got, part) == pytest.approx(getattr(prior, part), rel=1e-6)
        assert float(got.power.sum()) + got.rest == pytest.approx(1.0, abs=1e-5)
        torch.testing.assert_close(got.power, prior.power, rtol=0.1, atol=1e-8)
        one, other = got.mean().flatten(), prior.mean().flatten()
        assert torch.cosine_similarity(one, other, dim=0) > 0.93
        assert float(one.norm() / other.norm()) == pytest.approx(1.0, abs=5e-3)
    # Three bits a value, and the header.
    values = sum(sum(shape) * min(RANK, *shape) for shape in SHAPES.values())
    assert len(data) < 3 * values / 8 + 2500


def test_a_prior_of_gradients_that_are_all_zero_crosses() -> None:
    read = from_bytes(to_bytes(0, priors(zero=True)), 0, SHAPES, RANK)
    assert all(prior.norm == 0 and prior.rest == 1 for prior in read.values())


def test_the_name_is_checked() -> None:
    with pytest.raises(MismatchError, match="bytes are"):
        from_bytes(to_bytes(0, priors()), 0, SHAPES, RANK, name=b"0" * 32)


FIRST = next(iter(SHAPES))


def one(**changes: object) -> bytes:
    made = priors()
    return to_bytes(0, {**made, FIRST: replace(made[FIRST], **changes)})  # type: ignore[arg-type]


def raw(change: Callable[[dict[str, torch.Tensor]], object]) -> bytes:
    tensors = safetensors.torch.load(to_bytes(0, priors()))
    change(tensors)
    data: bytes = safetensors.torch.save(tensors)
    return data


# 30 rows of 5 values of 3 bits: the last byte has bits to spare.
ODD = f"{list(SHAPES)[1]}/v"
BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "other stage": (lambda: to_bytes(1, priors()), "of stage 1"),
    "no file": (lambda: b"\x05\0\0\0\0\0\0\0hello", "no safetensors"),
    "empty": (lambda: b"", "no safetensors"),
    "huge header": (lambda: b"\xff" * 64, "header"),
    "too large": (lambda: one() + bytes(100_000), "are the most"),
    "cut short": (lambda: one()[:-9], "no safetensors"),
    "infinite": (lambda: one(s=torch.full((RANK,), float("inf"))), "not finite"),
    "nan scalar": (lambda: one(agreement=float("nan")), "not finite"),
    "huge norm": (lambda: one(norm=2.0**41), "not finite, or over"),
    "huge mean": (lambda: one(s=torch.full((RANK,), 2.0**40)), "not finite, or over"),
    "rising": (lambda: one(s=torch.arange(RANK).float()), "does not fall"),
    "negative s": (lambda: one(s=-torch.arange(RANK).float()), "below 0"),
    "negative rest": (lambda: one(rest=-0.5), "shares"),
    "large rest": (lambda: one(rest=1.5), "shares"),
    "no shares": (lambda: one(power=torch.zeros(RANK, RANK), rest=0.5), "shares"),
    "longer basis": (
        lambda: raw(lambda t: t.update({f"{FIRST}/u": torch.zeros(1000, dtype=torch.uint8)})),
        "expected",
    ),
    "padding": (lambda: raw(lambda t: t[ODD].__setitem__(-1, 255)), "zeros belong"),
    "negative norm": (lambda: one(norm=-1.0), "has norms"),
    "agreement": (lambda: one(agreement=1.5), "agreement"),
    "rank": (lambda: one(s=torch.ones(RANK - 1)), "expected"),
    "missing": (lambda: raw(lambda t: t.pop(f"{FIRST}/v")), "missing or unknown"),
    "unknown": (lambda: raw(lambda t: t.update(more=torch.ones(1))), "missing or unknown"),
    "dtype": (lambda: raw(lambda t: t.update({f"{FIRST}/u": t[f"{FIRST}/u"].half()})), "expected"),
    "format": (lambda: raw(lambda t: t["facts"].__setitem__(0, 1)), "format 1"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_prior_is_refused(what: str) -> None:
    make, why = BAD[what]
    with pytest.raises(MismatchError, match=why):
        from_bytes(make(), 0, SHAPES, RANK)
