"""Correctors against plain float64 references, and what all of them promise: DESIGN section 5."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch

from meshd.errors import ConfigError
from meshd.model.families import FAMILIES
from meshd.optim.corrector import Corrector, corrector_named, decoder_matrix, effective_rank, fade
from meshd.priors.weight import Triplets, WeightPrior, WeightStats

Array = npt.NDArray[np.float64]

NAME = "model.layers.0.mlp.up_proj.weight"
SHAPES = [(10, 24), (24, 10), (14, 14)]
ALL = [
    "filter",
    "filter:alpha=0.5,tau=0.2",
    "filter:relative=0.1",
    "inject",
    "inject:lambda=0.5,reference=0.8",
    "inject:lambda=0.15,filter=1,alpha=0.2,relative=0.1",
    "wiener",
    "wiener:keep_norm=0",
    "signed:alpha=0.3",
    "bias",
]
DTYPES = [torch.float32, torch.bfloat16]


def named(text: str) -> Corrector:
    corrector = corrector_named(text)
    assert corrector is not None
    return corrector


def triplets(shape: tuple[int, int], rank: int, generator: torch.Generator) -> Triplets:
    u, v = (torch.linalg.qr(torch.randn(side, rank, generator=generator)).Q for side in shape)
    return Triplets(u, 2.0 * 0.7 ** torch.arange(rank), v)


def a_prior(shape: tuple[int, int], rank: int, seed: int = 0) -> WeightPrior:
    generator = torch.Generator().manual_seed(seed)
    u, s, v = triplets(shape, rank, generator)
    power = torch.rand(rank, rank, generator=generator) / torch.arange(1, rank + 1) ** 2
    power *= 0.6 / power.sum()
    mean_norm = 1.1 * float(s.norm())
    return WeightPrior(u, s, v, power, 0.4, 4.0, mean_norm, 0.3, triplets(shape, min(rank, 3), generator))


def a_gradient(shape: tuple[int, int], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + seed)).to(dtype)


def array(x: torch.Tensor) -> Array:
    return x.double().numpy()


def norm(x: Array) -> float:
    return float(np.linalg.norm(x))


# ---- references: the formulas of DESIGN section 5, in float64, in full ----


@dataclass
class Known:
    """A prior in float64."""

    u: Array
    s: Array
    v: Array
    prior: WeightPrior

    @property
    def mean(self) -> Array:
        return self.u @ np.diag(self.s) @ self.v.T


def known(prior: WeightPrior) -> Known:
    return Known(array(prior.u), array(prior.s), array(prior.v), prior)


def filtered(g: Array, k: Known, alpha: float, tau: float) -> tuple[Array, Array]:
    d = k.s / (k.s + tau)
    return alpha * g + (1 - alpha) * k.u @ ((k.u.T @ g @ k.v) * np.outer(d, d)) @ k.v.T, d


def injected(g: Array, base: Array, k: Known, strength: float, reference: float, fade: float) -> Array:
    gate = min(1.0, max(0.0, k.prior.agreement / reference))
    return base + strength * fade * gate * k.mean * norm(g) / k.prior.mean_norm


def wiener(gs: list[Array], k: Known, fade: float, keep: bool) -> tuple[Array, Array]:
    """Of the last of `gs`, after the others."""
    weights = [0.05 * 0.95**age for age in range(len(gs))][::-1]
    shares = [(k.u.T @ g @ k.v) ** 2 / norm(g) ** 2 for g in gs]
    observed = sum(w * y for w, y in zip(weights, shares, strict=True)) / sum(weights)
    outside = sum(w * (1 - y.sum()) for w, y in zip(weights, shares, strict=True)) / sum(weights)
    g, power = gs[-1], array(k.prior.power)
    inside = k.u.T @ g @ k.v
    gain = power / np.maximum(power, observed)
    rest = k.prior.rest / max(k.prior.rest, outside)
    out = k.u @ (gain * inside) @ k.v.T + rest * (g - k.u @ inside @ k.v.T)
    out = (1 - fade) * g + fade * out
    return out * norm(g) / norm(out) if keep else out, np.diag(gain)


def reference(text: str, gs: list[Array], prior: WeightPrior, fade: float) -> tuple[Array, Array]:
    """Corrected last gradient, and the gain spectrum."""
    g, k = gs[-1], known(prior)
    assert prior.bias is not None
    bias = array(prior.bias.u) @ np.diag(array(prior.bias.s)) @ array(prior.bias.v).T
    a = fade * 0.7
    cases: dict[str, Callable[[], tuple[Array, Array]]] = {
        "filter": lambda: filtered(g, k, 0.3, 1e-3),
        "filter:alpha=0.5,tau=0.2": lambda: filtered(g, k, 0.5, 0.2),
        "filter:relative=0.1": lambda: filtered(g, k, 0.3, 0.1 * k.s[0]),
        "inject": lambda: (injected(g, g, k, 0.15, 0.1, fade), k.s),
        "inject:lambda=0.5,reference=0.8": lambda: (injected(g, g, k, 0.5, 0.8, fade), k.s),
        "inject:lambda=0.15,filter=1,alpha=0.2,relative=0.1": lambda: (
            injected(g, (1 - fade) * g + fade * filtered(g, k, 0.2, 0.1 * k.s[0])[0], k, 0.15, 0.1, fade),
            k.s,
        ),
        "wiener": lambda: wiener(gs, k, fade, True),
        "wiener:keep_norm=0": lambda: wiener(gs, k, fade, False),
        "signed:alpha=0.3": lambda: ((1 - a) * g + a * np.abs(g) * np.sign(k.mean), k.s),
        "bias": lambda: (g + fade * bias, array(prior.bias.s) if prior.bias else k.s),
    }
    return cases[text]()


def rank_of(spectrum: Array) -> float:
    p = spectrum[spectrum > 0] / spectrum.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


@pytest.mark.parametrize("rank", [1, 5, 99])
@pytest.mark.parametrize("text", ALL)
def test_a_corrector_computes_its_formula(text: str, rank: int) -> None:
    for shape, dtype in product(SHAPES, DTYPES):
        prior = a_prior(shape, min(rank, *shape))
        if rank == 99 and shape[0] == shape[1]:  # the basis is everything
            prior = replace(prior, power=prior.power / 0.6, rest=0.0)
        corrector = named(text)
        seen: list[Array] = []
        for step, strength in enumerate((1.0, 0.6, 0.25)):
            # The first has most of its energy in the basis, the others little.
            gradient = (a_gradient(shape, step) + 10 * (step == 0) * prior.mean()).to(dtype)
            before = gradient.clone()
            found, gain = corrector(NAME, gradient, prior, strength)
            seen.append(array(before))
            expected, spectrum = reference(text, seen, prior, strength)
            # Half of a bf16 place, and float32's own.
            rounding = 2**-8 if dtype == torch.bfloat16 else 1e-5
            np.testing.assert_allclose(
                array(found), expected, rtol=rounding, atol=1e-5 * float(np.abs(expected).max())
            )
            assert torch.equal(gradient, before)
            assert (found.dtype, found.shape) == (dtype, gradient.shape)
            g, mean = seen[-1], known(prior).mean
            assert gain.norm_in == pytest.approx(norm(g), rel=1e-5)
            assert gain.norm_out == pytest.approx(norm(expected), rel=rounding)
            assert gain.cosine == pytest.approx((g * expected).sum() / norm(g) / norm(expected), abs=rounding)
            assert gain.clean == pytest.approx((g * mean).sum() / norm(g) / norm(mean), abs=1e-5)
            assert gain.effective_rank == pytest.approx(rank_of(spectrum), rel=1e-4)
            assert gain.finite


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", ALL)
def test_a_stale_prior_leaves_exactly_the_gradient(text: str, dtype: torch.dtype) -> None:
    shape = (10, 24)
    corrector, prior, gradient = named(text), a_prior(shape, 4), a_gradient(shape, dtype=dtype)
    corrector(NAME, gradient, prior, 1.0)
    found, gain = corrector(NAME, gradient, prior, 0.0)
    assert torch.equal(found, gradient)
    assert found.dtype == dtype
    assert (gain.norm_out, gain.cosine, gain.effective_rank, gain.finite) == (gain.norm_in, 1.0, 0.0, True)


@pytest.mark.parametrize("text", [text for text in ALL if not text.startswith("filter")])
def test_a_correction_fades_without_a_jump(text: str) -> None:
    shape = (10, 24)
    prior, gradient = a_prior(shape, 4), a_gradient(shape)
    found, _ = named(text)(NAME, gradient, prior, 1e-4)
    moved = float((found - gradient).norm() / gradient.norm())
    assert 0.0 < moved < 1e-3
    assert float((named(text)(NAME, gradient, prior, 1.0)[0] - gradient).norm()) > 0.05


@pytest.mark.parametrize("text", [text for text in ALL if text.startswith("filter")])
def test_the_faithful_filter_does_not_fade(text: str) -> None:
    shape = (10, 24)
    prior, gradient = a_prior(shape, 4), a_gradient(shape)
    one, other = (named(text)(NAME, gradient, prior, strength)[0] for strength in (1.0, 1e-4))
    assert torch.equal(one, other)


@pytest.mark.parametrize("factor", [1e-6, 1e4])
@pytest.mark.parametrize("text", [text for text in ALL if text != "bias"])
def test_a_larger_gradient_is_corrected_alike(text: str, factor: float) -> None:
    shape = (10, 24)
    prior, gradient = a_prior(shape, 4), a_gradient(shape)
    one, other = (named(text)(NAME, g, prior, 0.7)[0] for g in (gradient, gradient * factor))
    torch.testing.assert_close(one * factor, other, rtol=1e-4, atol=1e-6 * factor)


@pytest.mark.parametrize("factor", [1e-6, 1e4])
@pytest.mark.parametrize("text", [text for text in ALL if text != "bias"])
def test_the_scale_of_the_prior_matters_to_an_absolute_tau_only(text: str, factor: float) -> None:
    shape = (10, 24)
    prior, gradient = a_prior(shape, 4), a_gradient(shape)
    scaled = replace(prior, s=prior.s * factor, norm=prior.norm * factor, mean_norm=prior.mean_norm * factor)
    one, other = (named(text)(NAME, gradient, p, 0.7)[0] for p in (prior, scaled))
    same = torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    assert same == (not text.startswith("filter") or "relative" in text)


@pytest.mark.parametrize("text", ALL)
def test_a_gradient_that_is_not_finite_comes_back_as_it_was(text: str) -> None:
    shape = (10, 24)
    for value, dtype in product((math.nan, math.inf, -math.inf), DTYPES):
        prior, good = a_prior(shape, 4), a_gradient(shape, dtype=dtype)
        bad = good.clone()
        bad[3, 5] = value
        corrector = named(text)
        found, gain = corrector(NAME, bad, prior, 0.8)
        assert torch.equal(found.nan_to_num(), bad.nan_to_num())
        assert not gain.finite
        # Nothing of it stays in the corrector.
        after, gain = corrector(NAME, good, prior, 0.8)
        assert torch.equal(after, named(text)(NAME, good, prior, 0.8)[0])
        assert gain.finite


@pytest.mark.parametrize("part", ["u", "s", "v", "power", "bias"])
@pytest.mark.parametrize("text", ALL)
def test_a_prior_that_is_not_finite_changes_nothing(text: str, part: str) -> None:
    shape = (10, 24)
    prior, gradient = a_prior(shape, 4), a_gradient(shape)
    for value in (math.nan, math.inf):
        if part == "bias":
            assert prior.bias is not None
            bad = replace(prior, bias=prior.bias._replace(s=prior.bias.s * value))
        else:
            spoilt = getattr(prior, part).clone()
            spoilt[(1,) * spoilt.ndim] = value
            bad = replace(prior, **{part: spoilt})
        found, gain = named(text)(NAME, gradient, bad, 0.8)
        used = {"power": "wiener", "bias": "bias"}.get(part, text)
        if text.startswith(used):
            assert torch.equal(found, gradient)
            assert not gain.finite
        else:
            assert torch.equal(found, named(text)(NAME, gradient, prior, 0.8)[0])
            assert gain.finite


def test_what_would_overflow_comes_back_as_it_was() -> None:
    shape = (10, 24)
    prior, gradient = a_prior(shape, 4), a_gradient(shape)
    assert prior.bias is not None
    huge = replace(prior, bias=prior.bias._replace(s=prior.bias.s * 1e38))
    for dtype in (*DTYPES, torch.float16):
        found, gain = named("bias")(NAME, gradient.to(dtype), huge, 1.0)
        assert torch.equal(found, gradient.to(dtype))
        assert (gain.finite, gain.norm_out) == (False, gain.norm_in)
    # A finite gradient in float32, an infinite one in the dtype that it came in.
    large = replace(prior, bias=prior.bias._replace(s=prior.bias.s * 1e6))
    assert named("bias")(NAME, gradient, large, 1.0)[1].finite
    assert not named("bias")(NAME, gradient.half(), large, 1.0)[1].finite


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", ALL)
def test_of_a_zero_gradient_only_bias_makes_something(text: str, dtype: torch.dtype) -> None:
    shape = (10, 24)
    prior, zero = a_prior(shape, 4), torch.zeros(shape, dtype=dtype)
    corrector = named(text)
    found, gain = corrector(NAME, zero, prior, 0.5)
    assert bool(found.any()) == (text == "bias")
    assert bool(torch.isfinite(found).all())
    assert (gain.norm_in, gain.cosine, gain.clean, gain.finite) == (0.0, 0.0, 0.0, True)
    after, _ = corrector(NAME, a_gradient(shape), prior, 0.5)
    assert torch.equal(after, named(text)(NAME, a_gradient(shape), prior, 0.5)[0])


@pytest.mark.parametrize("text", ALL)
def test_a_prior_of_nothing_says_nothing(text: str) -> None:
    """Of clean gradients that were all zero. The faithful filter keeps alpha G to the letter."""
    shape = (10, 24)
    prior, gradient = a_prior(shape, 4), a_gradient(shape)
    nothing = replace(
        prior,
        s=torch.zeros(4),
        power=torch.zeros(4, 4),
        rest=1.0,
        norm=0.0,
        mean_norm=0.0,
        agreement=0.0,
        bias=None,
    )
    found, gain = named(text)(NAME, gradient, nothing, 1.0)
    kept = {"filter": 0.3, "filter:alpha=0.5,tau=0.2": 0.5, "filter:relative=0.1": 0.3}.get(text, 1.0)
    kept = 0.2 if "filter=1" in text else 0.3 if text.startswith("signed") else kept
    torch.testing.assert_close(found, kept * gradient)
    assert gain.finite
    assert gain.effective_rank == 0.0


@pytest.mark.parametrize(
    ("agreement", "gate"), [(-0.5, 0.0), (0.0, 0.0), (0.05, 0.5), (0.1, 1.0), (0.9, 1.0)]
)
def test_anchors_that_do_not_agree_inject_nothing(agreement: float, gate: float) -> None:
    shape = (10, 24)
    prior, gradient = replace(a_prior(shape, 4), agreement=agreement), a_gradient(shape)
    found, gain = named("inject:lambda=0.15")(NAME, gradient, prior, 1.0)
    expected = 0.15 * gate * prior.mean() * gradient.norm() / prior.mean_norm
    torch.testing.assert_close(found - gradient, expected, rtol=1e-4, atol=1e-6)
    assert bool(gain.effective_rank) == bool(gate)


@pytest.mark.parametrize("mean_norm", [0.0, 1e-12, 1.0])
def test_no_more_than_lambda_is_injected_whatever_norm_a_prior_declares(mean_norm: float) -> None:
    shape = (10, 24)
    prior, gradient = replace(a_prior(shape, 4), mean_norm=mean_norm), a_gradient(shape)
    found, _ = named("inject:lambda=0.15")(NAME, gradient, prior, 1.0)
    assert float((found - gradient).norm()) <= 0.15001 * float(gradient.norm())


def test_signed_takes_sizes_from_the_gradient_and_signs_from_the_mean() -> None:
    shape = (10, 24)
    prior, gradient = a_prior(shape, 4), a_gradient(shape)
    found, _ = named("signed:alpha=0")(NAME, gradient, prior, 1.0)
    assert torch.equal(found.abs(), gradient.abs())
    assert torch.equal(found.sign(), prior.mean().sign())


def test_without_a_measured_bias_nothing_is_added() -> None:
    shape = (10, 24)
    prior, gradient = replace(a_prior(shape, 4), bias=None), a_gradient(shape)
    found, gain = named("bias")(NAME, gradient, prior, 1.0)
    assert torch.equal(found, gradient)
    assert gain.effective_rank == 0.0


def test_wiener_observes_each_weight_by_itself_and_anew_with_each_prior() -> None:
    shape = (10, 24)
    one, other = a_prior(shape, 4), a_prior(shape, 4, seed=1)
    first, second = a_gradient(shape, 0), a_gradient(shape, 1) * torch.linspace(0, 3, 24)
    corrector = named("wiener")
    corrector(NAME, first, one, 1.0)
    fresh = {id(p): named("wiener")(NAME, second, p, 1.0)[0] for p in (one, other)}
    assert torch.equal(corrector("another", second, one, 1.0)[0], fresh[id(one)])
    assert torch.equal(corrector(NAME, second, other, 1.0)[0], fresh[id(other)])
    assert not torch.equal(corrector(NAME, second, other, 1.0)[0], corrector(NAME, first, other, 1.0)[0])
    # Back to the first prior: what was seen in its basis is forgotten.
    assert torch.equal(corrector(NAME, second, one, 1.0)[0], fresh[id(one)])


def test_wiener_keeps_no_prior_in_memory() -> None:
    shape = (10, 24)
    corrector, gradient = named("wiener"), a_gradient(shape)
    prior = a_prior(shape, 4)
    alive = weakref.ref(prior)
    corrector(NAME, gradient, prior, 1.0)
    del prior
    gc.collect()
    assert alive() is None


def test_wiener_leaves_alone_what_has_the_clean_shares() -> None:
    """And takes out what is noise: energy where clean gradients have none."""
    shape, rank = (10, 24), 4
    prior = a_prior(shape, rank)
    inside = prior.power.sqrt() * torch.tensor([1.0, -1.0]).repeat(rank, rank // 2)
    noise = a_gradient(shape)
    noise -= prior.u @ (prior.u.T @ noise @ prior.v) @ prior.v.T
    clean = prior.u @ inside @ prior.v.T + noise / noise.norm() * prior.rest**0.5
    found, _ = named("wiener:keep_norm=0")(NAME, clean, prior, 1.0)
    torch.testing.assert_close(found, clean, rtol=1e-4, atol=1e-6)
    noisy = clean + 3 * noise / noise.norm()
    found, gain = named("wiener:keep_norm=0")(NAME, noisy, prior, 1.0)
    assert float((found - clean).norm()) < 0.8 * float((noisy - clean).norm())
    assert gain.norm_out < gain.norm_in
    kept, gain = named("wiener")(NAME, noisy, prior, 1.0)
    assert gain.norm_out == pytest.approx(gain.norm_in, rel=1e-5)
    torch.testing.assert_close(kept / kept.norm(), found / found.norm(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "text", ["filter", "filter:relative=0.1", "wiener", "inject", "inject:filter=1", "bias"]
)
@pytest.mark.parametrize("shape", [(40, 60), (60, 40)])
def test_a_corrector_brings_a_noisy_gradient_nearer_to_the_clean_one(
    text: str, shape: tuple[int, int]
) -> None:
    """Low-rank truth, unseen noise. The prior is of other clean gradients, with noise of their own."""
    generator = torch.Generator().manual_seed(5)
    u, s, v = triplets(shape, 4, generator)
    true = (u * s) @ v.T

    def noise(size: float) -> torch.Tensor:
        x = torch.randn(shape, generator=generator)
        return x * size * s.norm() / x.norm()

    two = triplets(shape, 2, generator)
    bias = 0.8 * two.matrix() / two.norm() * s.norm()
    stats = WeightStats(shape)
    for _ in range(12):
        clean = true + noise(0.7)
        stats.add(clean, clean - bias + noise(0.2))
    prior = stats.prior(8, generator)
    corrector = named(text)
    before, after = 0.0, 0.0
    for _ in range(5):
        observed = true - bias + noise(1.5)
        found, _ = corrector(NAME, observed, prior, 1.0)
        before += float(torch.cosine_similarity(observed.flatten(), true.flatten(), 0)) / 5
        after += float(torch.cosine_similarity(found.flatten(), true.flatten(), 0)) / 5
    assert after > before + 0.03


def test_a_gradient_and_a_prior_that_do_not_fit_are_a_bug() -> None:
    prior = a_prior((10, 24), 4)
    with pytest.raises(ValueError, match=NAME):
        named("filter")(NAME, torch.zeros(24, 10), prior, 1.0)
    for strength in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="fade"):
            named("filter")(NAME, torch.zeros(10, 24), prior, strength)


@pytest.mark.parametrize(
    ("spectrum", "expected"),
    [
        ([3.0], 1.0),
        ([2.0, 2.0, 2.0, 2.0], 4.0),
        ([1.0, 1.0, 0.0, 0.0], 2.0),
        ([0.5, 0.25, 0.25], 2**1.5),
        ([1e-30, 1e-30], 2.0),
        ([0.0, 0.0], 0.0),
        ([], 0.0),
    ],
)
def test_effective_rank_of_known_spectra(spectrum: list[float], expected: float) -> None:
    assert float(effective_rank(torch.tensor(spectrum))) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("steps", "seconds", "expected"),
    [
        (0, 0.0, 1.0),
        (10, 0.0, 0.5),
        (20, 59.0, 0.25),
        (30, 60.0, 0.125),
        (30.5, 0.0, 0.0),
        (0, 60.5, 0.0),
        (-4, -9.0, 1.0),
        (-4, 61.0, 0.0),
    ],
)
def test_priors_fade_with_age_and_end_at_either_bound(steps: float, seconds: float, expected: float) -> None:
    assert fade(steps, seconds, max_steps=30, max_s=60.0, half_life_steps=10) == expected


@pytest.mark.parametrize(
    ("model_type", "name", "shape", "expected"),
    [
        ("llama", "model.layers.11.self_attn.q_proj.weight", (8, 8), True),
        ("llama", "model.layers.3.mlp.down_proj.weight", (8, 24), True),
        ("llama", "model.layers.3.input_layernorm.weight", (8,), False),
        ("llama", "model.embed_tokens.weight", (100, 8), False),
        ("llama", "model.norm.weight", (8,), False),
        ("llama", "lm_head.weight", (100, 8), False),
        ("llama", "transformer.h.0.attn.c_attn.weight", (8, 24), False),
        ("llama", "3.mlp.down_proj.weight", (8, 24), False),
        ("mistral", "model.layers.0.self_attn.o_proj.weight", (8, 8), True),
        ("qwen2", "model.layers.0.self_attn.q_proj.weight", (8, 8), True),
        ("qwen2", "model.layers.0.self_attn.q_proj.bias", (8,), False),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight", (8,), False),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", (8, 24), True),
        ("gpt2", "transformer.h.0.attn.c_attn.bias", (24,), False),
        ("gpt2", "transformer.wte.weight", (100, 8), False),
        ("gpt2", "transformer.wpe.weight", (64, 8), False),
        ("gpt_neox", "gpt_neox.layers.5.attention.query_key_value.weight", (24, 8), True),
        ("gpt_neox", "gpt_neox.layers.5.attention.bias", (8, 8), False),
        ("gpt_neox", "gpt_neox.embed_in.weight", (100, 8), False),
        ("gpt_neox", "embed_out.weight", (100, 8), False),
    ],
)
def test_matrices_of_decoder_layers_are_corrected(
    model_type: str, name: str, shape: tuple[int, ...], expected: bool
) -> None:
    assert decoder_matrix(name, shape, FAMILIES[model_type]) is expected


def test_none_is_no_corrector() -> None:
    assert corrector_named("none") is None


def test_what_a_name_says_and_leaves_out() -> None:
    assert named("filter") == named("filter:alpha=0.3,tau=1e-3")
    assert named("inject") == named("inject:lambda=0.15, reference=0.1,filter=0")
    assert named("inject:filter=1") == named("inject:filter=1,alpha=0.3,tau=0.001")
    assert named("signed") == named("signed:alpha=0.3")
    assert named("filter:relative=0.1") != named("filter")
    assert named("wiener") != named("wiener")  # each observes for itself


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("filtre", "no such corrector.*bias, filter, inject, none, signed, wiener"),
        ("", "no such corrector"),
        ("none:alpha=1", "none has no key 'alpha'.*it has none"),
        ("bias:lambda=1", "bias has no key 'lambda'"),
        ("filter:lambda=1", "filter has no key 'lambda'.*one of alpha, tau, relative"),
        ("filter:alpha=1.5", "alpha=1.5.*alpha is a number from 0 to 1"),
        ("filter:alpha=nan", "alpha=nan.*from 0 to 1"),
        ("filter:alpha=much", "alpha=much.*from 0 to 1"),
        ("filter:tau=0", "tau=0.*tau is a number over 0"),
        ("filter:tau=1e-3,relative=0.1", "two ways"),
        ("filter:alpha", "not one key=value"),
        ("filter:alpha=0.1,alpha=0.2", "not one key=value"),
        ("inject:lambda=-1", "lambda=-1.*from 0 to 100"),
        ("inject:reference=0", "reference=0.*over 0, at most 1"),
        ("inject:filter=0.5", "filter=0.5.*a whole number from 0 to 1"),
        ("inject:alpha=0.3", "alpha without filter=1"),
        ("wiener:keep_norm=2", "keep_norm=2.*a whole number from 0 to 1"),
        ("filter:" + "alpha=0.3," * 100, "longer than"),
    ],
)
def test_a_name_that_means_nothing_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        corrector_named(text, "optim.corrector")
    assert error.value.field == "optim.corrector"
