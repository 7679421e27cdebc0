"""Token features: what both sides of a boundary know of a token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshd.errors import DataError, MismatchError
from meshd.priors.features import TokenFeatures


def embedding(vocabulary: int = 300, hidden: int = 24, seed: int = 0) -> torch.Tensor:
    """Directions of falling energy, with a mean."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator))[0]
    spread = 0.8 ** torch.arange(hidden)
    return torch.randn(vocabulary, hidden, generator=generator) * spread @ mixed + 3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_features_span_the_leading_directions_of_the_embedding(dtype: torch.dtype) -> None:
    weight = embedding().to(dtype)
    features = TokenFeatures.from_embedding(weight, 10)
    found = features.features(torch.arange(300))
    assert features.values.dtype == torch.int8
    assert found.shape == (300, 10)
    assert found.dtype == torch.float32
    # Mean 0, variance 1, uncorrelated: up to the rounding to eight bits.
    torch.testing.assert_close(found.mean(0), torch.zeros(10), atol=0.02, rtol=0)
    torch.testing.assert_close(found.T @ found / 300, torch.eye(10), atol=0.02, rtol=0)
    # Together with a constant they explain as much of the embedding as its ten leading singular directions do.
    centred = weight.float() - weight.float().mean(0)
    left = centred - found @ torch.linalg.lstsq(found, centred).solution
    best = torch.linalg.svdvals(centred)[10:].pow(2).sum()
    assert left.pow(2).sum() == pytest.approx(float(best), rel=0.05)


def test_ids_of_any_shape() -> None:
    features = TokenFeatures.from_embedding(embedding(), 6)
    ids = torch.randint(0, 300, (2, 7))
    found = features.features(ids)
    assert found.shape == (2, 7, 6)
    torch.testing.assert_close(found[1, 3], features.features(ids[1, 3]), rtol=0, atol=0)


def test_rank_is_at_most_what_the_embedding_has() -> None:
    assert TokenFeatures.from_embedding(embedding(hidden=5), 128).rank == 5
    assert TokenFeatures.from_embedding(embedding(vocabulary=4), 128).rank == 4


@pytest.mark.parametrize(
    "weight", [torch.zeros(40, 8), torch.full((40, 8), 2.5), embedding(40, 1).expand(40, 8)]
)
def test_directions_without_spread_say_nothing(weight: torch.Tensor) -> None:
    found = TokenFeatures.from_embedding(weight, 8).features(torch.arange(40))
    assert bool(torch.isfinite(found).all())
    assert float(found.abs().max()) < 10


def test_an_embedding_that_is_not_finite_is_refused() -> None:
    weight = embedding()
    weight[3, 2] = torch.nan
    with pytest.raises(DataError, match="embedding has values that are not finite"):
        TokenFeatures.from_embedding(weight, 4)


def test_the_file_gives_them_back(tmp_path: Path) -> None:
    features = TokenFeatures.from_embedding(embedding(), 6)
    features.save(tmp_path / "f")
    again = TokenFeatures.load(tmp_path / "f", 300)
    assert torch.equal(again.values, features.values)
    assert torch.equal(again.scale, features.scale)
    with pytest.raises(MismatchError, match="values is"):
        TokenFeatures.load(tmp_path / "f", 301)
    (tmp_path / "g").write_bytes(b"x" * 100)
    with pytest.raises(DataError, match="no safetensors file"):
        TokenFeatures.load(tmp_path / "g", 300)


def test_scales_that_are_none_are_refused(tmp_path: Path) -> None:
    features = TokenFeatures.from_embedding(embedding(), 6)
    TokenFeatures(features.values, -features.scale).save(tmp_path / "f")
    with pytest.raises(MismatchError, match="scales that are not finite and positive"):
        TokenFeatures.load(tmp_path / "f", 300)
