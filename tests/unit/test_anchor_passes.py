"""Clean passes give the model's own gradients, whatever device its stages are on, and priors that are right by them."""

from __future__ import annotations

import math

import pytest
import torch
from model_helpers import load_stages, tiny_config, whole_model

from meshd.anchor.passes import BoundaryMoments, CleanPasses
from meshd.anchor.worth import ENOUGH
from meshd.data.microbatch import Microbatch
from meshd.diagnosis.measure import clean_pass
from meshd.diagnosis.staged import StagedModel
from meshd.errors import DataError
from meshd.model.cut import Tied
from meshd.optim.corrector import decoder_matrix
from meshd.priors.boundary import BoundaryPrior
from meshd.priors.features import TokenFeatures
from meshd.priors.fit import fit
from meshd.priors.stats import BoundaryStats
from meshd.wire import codec_named

CPU = torch.device("cpu")
HIDDEN = 32
PASSES = 3


def microbatch(seed: int, documents: bool = False) -> Microbatch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 97, (2, 17), generator=generator)
    starts = torch.rand((2, 16), generator=generator) < 0.2
    return Microbatch(ids, torch.ones((2, 16), dtype=torch.bool), starts if documents else None)


def staged(name: str = "llama", tied: Tied = "none") -> StagedModel:
    return StagedModel(load_stages(whole_model(tiny_config(name)), [1, 3], tied))


def features(model: StagedModel) -> TokenFeatures:
    return TokenFeatures.from_embedding(model.embedding, 8)


def measuring(model: StagedModel, *, rank: int = 4, tokens: int = 64, offload: bool = False) -> CleanPasses:
    return CleanPasses(
        model, features(model), CPU, rank=rank, passes=PASSES, boundary_tokens=tokens, seed=1, offload=offload
    )


def gradients(model: StagedModel) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad
        for stage in model.stages
        for name, parameter in stage.named().items()
        if parameter.grad is not None
    }


@pytest.mark.parametrize(
    ("name", "tied"),
    [("llama", "none"), ("llama-tied", "ring"), ("llama-tied", "freeze"), ("gpt2-untied", "none")],
)
@pytest.mark.parametrize("documents", [False, True])
def test_passes_with_stages_that_visit_the_device_are_the_plain_ones(
    name: str, tied: Tied, documents: bool
) -> None:
    plain, offloaded = staged(name, tied), staged(name, tied)
    made = [measuring(plain, rank=64), measuring(offloaded, rank=64, offload=True)]
    for passes in made:
        for seed in range(3):
            passes.run(microbatch(seed, documents))
    assert made[0].corrected == made[1].corrected != []
    for stage in made[0].corrected:
        ours, theirs = made[0].weight_priors(stage), made[1].weight_priors(stage)
        for name, prior in ours.items():
            torch.testing.assert_close(theirs[name].mean(), prior.mean(), rtol=1e-4, atol=1e-7)
            assert theirs[name].norm == pytest.approx(prior.norm, rel=1e-4)
    for one, other in zip(made[0].boundaries, made[1].boundaries, strict=True):
        assert other.now.tokens == one.now.tokens > 0
        for moment in ("joint", "gradient"):
            torch.testing.assert_close(
                getattr(other.now, moment), getattr(one.now, moment), rtol=1e-5, atol=1e-9
            )


def test_weight_priors_are_of_the_mean_gradient_of_the_decoders_matrices() -> None:
    model, reference = staged(), staged()
    passes = measuring(model, rank=64)
    expected: list[dict[str, torch.Tensor]] = []
    stats = [BoundaryStats(features(reference), HIDDEN, seed=0) for _ in range(reference.boundaries)]
    for seed in range(2 * PASSES):
        clean_pass(reference, microbatch(seed), stats)
        expected.append(gradients(reference))
        reference.take_gradients()
        assert passes.run(microbatch(seed)) == 0
    found = {name: prior for stage in passes.corrected for name, prior in passes.weight_priors(stage).items()}
    family = model.stages[0].family
    corrected = {name for name, g in expected[0].items() if decoder_matrix(name, g.shape, family)}
    assert found.keys() == corrected
    # What a refresh leaves of the one before: a quarter.
    shares = [0.25 ** (age / PASSES) for age in reversed(range(len(expected)))]
    for name, prior in found.items():
        parts = zip(shares, expected, strict=True)
        mean = torch.stack([share * one[name] for share, one in parts]).sum(0) / sum(shares)
        torch.testing.assert_close(prior.mean(), mean, rtol=1e-3, atol=1e-6)
    assert not gradients(model), "they would count again"


def test_what_a_pass_that_was_broken_off_has_left_counts_for_nothing() -> None:
    model, clean = staged(), staged()
    passes, others = measuring(model), measuring(clean)
    assert passes.weight_priors(0) == {}
    for stage in model.stages:
        for parameter in stage.parameters():
            parameter.grad = torch.ones_like(parameter)
    passes.run(microbatch(0))
    others.run(microbatch(0))
    assert {stats.count for stats in passes._weights[1].values()} == {1}
    found = passes.weight_priors(1)
    for name, prior in others.weight_priors(1).items():
        torch.testing.assert_close(found[name].mean(), prior.mean())


def test_gradients_that_are_not_finite_are_left_out() -> None:
    model = staged()
    passes = measuring(model)
    passes.run(microbatch(0))
    before = passes.weight_priors(1)
    with torch.no_grad():
        next(iter(model.stages[0].parameters())).fill_(float("nan"))
    assert passes.run(microbatch(1)) > 0
    for name, prior in passes.weight_priors(1).items():
        assert prior.mean_norm == before[name].mean_norm


def test_without_a_corrector_or_codecs_that_need_them_nothing_is_measured_for_them() -> None:
    model = staged()
    without = CleanPasses(model, None, CPU, rank=4, passes=1, boundary_tokens=64, seed=1)
    without.run(microbatch(0))
    assert without.boundaries == []
    assert without.lacking == 0
    assert without.weight_priors(0)
    assert measuring(staged(), rank=0).corrected == []


def counted(moments: BoundaryMoments, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        h, g = (torch.randn((32, HIDDEN), generator=generator) for _ in range(2))
        moments.now.add(h, g, torch.randint(4, 97, (32,), generator=generator))


def test_a_boundary_prior_is_of_the_last_tokens_and_never_of_few() -> None:
    moments = BoundaryMoments(features(staged()), HIDDEN, 64, seed=5)
    assert moments.lacking == 64
    with pytest.raises(DataError, match="missing"):
        moments.prior(0, 7)
    seen = []
    for first in range(0, 24, 2):
        counted(moments, range(first, first + 2))
        assert moments.lacking == 0
        seen.append(moments.prior(3, first)[0].tokens)
    assert seen[0] == 64
    assert set(seen[1:]) == {128}


def test_a_boundary_prior_of_two_generations_is_that_of_all_their_tokens() -> None:
    moments = BoundaryMoments(features(staged()), HIDDEN, 96, seed=5)
    counted(moments, range(3))
    moments.prior(0, 0)
    counted(moments, range(3, 5))
    prior, better = moments.prior(0, 11)
    assert better == math.inf, "none was sent yet"
    whole = BoundaryMoments(features(staged()), HIDDEN, 10**6, seed=5)
    counted(whole, range(5))
    expected = fit(whole.now, 0, measured=11)
    assert (prior.tokens, prior.measured) == (expected.tokens, 11)
    torch.testing.assert_close(prior.mean, expected.mean, rtol=1e-4, atol=1e-5)
    BoundaryPrior.from_bytes(prior.to_bytes(), HIDDEN, 8)


def test_a_prior_is_only_worth_sending_when_the_boundary_has_changed() -> None:
    codecs = (codec_named("spectral:bits=2"), codec_named("spectral:bits=1"))
    moments = BoundaryMoments(features(staged()), HIDDEN, 1024, seed=5, codecs=codecs)
    mixing = torch.randn((HIDDEN, HIDDEN), generator=torch.Generator().manual_seed(0)) * 0.8 ** torch.arange(
        HIDDEN
    )

    def count(seed: int, turn: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        h, g = (torch.randn((1024, HIDDEN), generator=generator) @ mixing.T for _ in range(2))
        h = (1 - turn) * h + turn * h.flip(1)
        moments.now.add(h, g, torch.randint(4, 97, (1024,), generator=generator))

    count(0, 0.0)
    moments.sent, better = moments.prior(0, 0)
    assert better == math.inf
    for seed in range(1, 4):
        count(seed, 0.0)
        assert 0.9 < moments.prior(0, seed)[1] < ENOUGH
    count(4, 1.0)
    assert moments.prior(0, 4)[1] > 1.3
