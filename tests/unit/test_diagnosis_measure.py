"""What the codec diagnosis measures, against numbers that are worked out in another way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from model_helpers import load_stages, tiny_config, whole_model

from meshd.data.microbatch import Microbatch
from meshd.diagnosis import measure as measuring
from meshd.diagnosis.measure import Measured, Meter, NotFinite, fit_priors, measure, token_id_bytes
from meshd.diagnosis.plans import Pair, Plan
from meshd.diagnosis.staged import StagedModel, cosine
from meshd.errors import DataError
from meshd.model.cut import Tied
from meshd.priors.features import TokenFeatures
from meshd.wire import CodecContext, codec_named, decode
from meshd.wire.plain import Dense

CUT = [1, 3]
HIDDEN = 32


def microbatch(seed: int, rows: int = 2, columns: int = 16) -> Microbatch:
    ids = torch.randint(4, 97, (rows, columns + 1), generator=torch.Generator().manual_seed(seed))
    return Microbatch(ids, torch.ones((rows, columns), dtype=torch.bool))


def staged(name: str, tied: Tied) -> StagedModel:
    return StagedModel(load_stages(whole_model(tiny_config(name, dropout=0.1)), CUT, tied))


def plan(forward: str, backward: str, boundaries: int = 2) -> Plan:
    return Plan(f"{forward}/{backward}", (Pair(forward, backward),) * boundaries)


def run(model: StagedModel, plans: Sequence[Plan], batches: int = 2) -> Measured:
    return measure(model, [microbatch(n) for n in range(batches)], plans, [], None, lambda: None)


@pytest.mark.parametrize(
    ("name", "tied", "boundaries"),
    [
        ("llama", "none", 2),
        ("llama-tied", "ring", 3),
        ("llama-tied", "freeze", 2),
        ("qwen2-window", "none", 2),
        ("qwen3", "ring", 3),
        ("mistral-window", "none", 2),
        ("gpt2-untied", "none", 2),
        ("gpt_neox", "none", 2),
    ],
)
def test_the_staged_model_is_the_whole_one(name: str, tied: Tied, boundaries: int) -> None:
    """Loss and gradients of transformers' own model, in every family; dropout is off."""
    whole = whole_model(tiny_config(name, dropout=0.1)).eval()
    model = staged(name, tied)
    batch = microbatch(1)
    crossed = []
    loss = model.loss(batch, lambda hidden, boundary: crossed.append(boundary) or hidden)
    loss.backward()
    logits = whole(input_ids=batch.inputs).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    expected.backward()
    assert crossed == list(range(boundaries)) == list(range(model.boundaries))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = {key: parameter.grad for key, parameter in whole.named_parameters()}
    names = [list(stage.trainable()) for stage in model.stages]
    taken = model.take_gradients()
    for stage_names, stage in zip(names, taken, strict=True):
        for key, gradient in zip(stage_names, stage, strict=True):
            torch.testing.assert_close(gradient, gradients[key], rtol=1e-3, atol=1e-6)
    assert all(not gradient.any() for stage in model.take_gradients() for gradient in stage)


def test_document_borders_reach_every_stage() -> None:
    model = staged("llama", "none")
    batch = microbatch(1)
    starts = torch.zeros_like(batch.label_mask)
    starts[:, [0, 7]] = True
    apart = Microbatch(batch.tokens, batch.label_mask, starts)
    second = Microbatch(batch.tokens[:, 7:], batch.label_mask[:, 7:])
    seen: list[torch.Tensor] = []
    for each in (apart, second):
        model.loss(each, lambda hidden, boundary: seen.append(hidden) or hidden if boundary == 1 else hidden)
    torch.testing.assert_close(seen[0][:, 7:], seen[1], rtol=1e-4, atol=1e-5)


def test_cosine() -> None:
    a = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    assert cosine(a, a) == pytest.approx(1.0)
    assert cosine(a, [torch.tensor([0.0, 5.0]), torch.zeros(1, 1)]) == 0.0
    assert cosine(a, [torch.tensor([1.0, 0.0]), torch.tensor([[0.0]])]) == pytest.approx(0.6)
    assert cosine(a, [-2 * part for part in a]) == pytest.approx(-1.0)
    assert cosine(a, [torch.zeros(2), torch.zeros(1, 1)]) == 0.0


def test_without_loss_on_the_wire_nothing_changes() -> None:
    found = run(staged("llama", "none"), [plan("dense32", "dense32")])
    (result,) = found.plans
    assert result.loss == found.loss
    assert result.cosine_stages == pytest.approx((1.0, 1.0, 1.0), abs=1e-9)
    assert [boundary.forward.error for boundary in result.boundaries] == [0.0, 0.0]
    assert [boundary.backward.error for boundary in result.boundaries] == [0.0, 0.0]


def test_bytes_are_those_of_frames_and_token_ids() -> None:
    found = run(staged("llama", "none"), [plan("dense", "int8"), plan("int4", "topk:keep=0.25")])
    assert found.tokens == 64
    for result in found.plans:
        pair = result.plan.pairs[0]
        batch = microbatch(0)
        sizes = []
        for name in pair:
            context = CodecContext(0, "forward", batch.inputs, 0)
            frame = codec_named(name).encode(torch.randn(2, 16, HIDDEN), context)
            sizes.append((len(frame.payload) + frame.header.ByteSize()) / 32)
        for boundary in result.boundaries:
            # A checksum is a varint: a byte less now and then.
            assert boundary.forward.bytes_per_token == pytest.approx(sizes[0], abs=0.05)
            assert boundary.backward.bytes_per_token == pytest.approx(sizes[1], abs=0.05)
            total = boundary.forward.bytes_per_token + boundary.backward.bytes_per_token + 2
            assert boundary.bytes_per_token == pytest.approx(total)
        assert result.bytes_per_token == pytest.approx(sum(sizes) + 2, abs=0.1)
    assert (token_id_bytes(65_536), token_id_bytes(65_537)) == (2, 4)


def test_the_finer_codec_is_nearer_to_the_truth() -> None:
    found = run(staged("llama-tied", "ring"), [plan(name, name, 3) for name in ("dense", "int8", "int4")])
    dense, fine, coarse = found.plans
    assert dense.loss == pytest.approx(found.loss, abs=2e-3)
    assert dense.cosine_min > 0.9999
    assert dense.cosine_mean > fine.cosine_mean > coarse.cosine_mean > 0.5
    assert coarse.cosine_min == min(coarse.cosine_stages) < coarse.cosine_mean
    for a, b, c in zip(dense.boundaries, fine.boundaries, coarse.boundaries, strict=True):
        assert a.forward.error < b.forward.error < c.forward.error
        assert a.backward.error < b.backward.error < c.backward.error
    assert all(result.cost_share > 0 for result in found.plans)


def test_a_boundary_may_have_codecs_of_its_own() -> None:
    """Only the gradients of the stages behind it on the way back suffer from a backward codec."""
    mixed = Plan("mixed", (Pair("dense32", "dense32"), Pair("dense32", "int4")))
    (result,) = run(staged("llama", "none"), [mixed]).plans
    assert [boundary.backward.codec for boundary in result.boundaries] == ["dense32", "int4"]
    assert result.boundaries[0].backward.error == 0.0 < result.boundaries[1].backward.error
    assert result.cosine_stages[2] == pytest.approx(1.0, abs=1e-9)
    assert max(result.cosine_stages[:2]) < 0.9999


def test_errors_count_each_token_alike() -> None:
    """Of what was sent, in both directions; a token without a gradient has none."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 6, HIDDEN, generator=generator) * torch.tensor([1.0, 1e4, 1, 1, 1, 1])[:, None]
    gradient = torch.randn(1, 6, HIDDEN, generator=generator)
    gradient[0, 3] = 0
    ids = torch.zeros(1, 6, dtype=torch.int64)
    meter = Meter(Pair("int4", "int8"), 0, None, None)
    leaf = hidden.clone().requires_grad_()
    received = meter(leaf * 1, ids, 5)
    received.backward(gradient)
    result = meter.result(2)
    for crossed, codec, sent in (
        (result.forward, "int4", hidden), (result.backward, "int8", gradient),
    ):  # fmt: skip
        context = CodecContext(0, "forward", ids, 5)
        came = decode(codec_named(codec).encode(sent, context), context, torch.device("cpu"))
        relative = ((came - sent).norm(dim=2) / sent.norm(dim=2))[sent.any(2)]
        assert crossed.error == pytest.approx(float(relative.square().mean().sqrt()), rel=1e-4)
        assert crossed.error > 0


def test_priors_fitted_on_other_text_beat_a_mask_by_magnitude() -> None:
    model = staged("llama", "none")
    features = TokenFeatures.from_embedding(model.embedding, 8)
    told: list[int] = []
    fitting = [microbatch(100 + n, rows=8) for n in range(4)]
    priors = fit_priors(model, fitting, features, lambda: told.append(1))
    assert [prior.tokens for prior in priors] == [512, 512]
    assert len(told) == 4
    plans = [plan("spectral:bits=3", "spectral:bits=2"), plan("topk:keep=0.25", "topk:keep=0.12")]
    found = measure(model, [microbatch(n) for n in range(3)], plans, priors, features, lambda: None)
    spectral, topk = found.plans
    assert spectral.bytes_per_token < 1.1 * topk.bytes_per_token
    assert abs(spectral.loss - found.loss) < abs(topk.loss - found.loss)
    assert spectral.cosine_mean > topk.cosine_mean + 0.1


class Exploding(Dense):
    """What it writes is finite; what the model makes of it is not."""

    def quantize(self, tensor, context, rate=None):  # type: ignore[no-untyped-def]
        return super().quantize(tensor * 1e30, context, rate)


def test_a_plan_whose_numbers_are_not_finite_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    exploding = Exploding("dense32", torch.float32)
    monkeypatch.setattr(
        measuring, "codec_named", lambda name: exploding if name == "explode" else codec_named(name)
    )
    monkeypatch.setattr(Pair, "needs_prior", False)
    plans = [plan("explode", "dense"), plan("dense", "explode"), plan("dense", "dense")]
    found = run(staged("gpt2-untied", "none"), plans)
    assert [bool(result.failed) for result in found.plans] == [True, True, False]
    assert "not finite" in found.plans[1].failed
    assert found.plans[2].loss == pytest.approx(found.loss, abs=2e-3)


def test_what_is_not_finite_is_refused_on_both_ways() -> None:
    meter = Meter(Pair("dense", "dense"), 2, None, None)
    ids = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(NotFinite, match="activations at boundary 2"):
        meter(torch.full((1, 2, 4), float("inf")), ids, 0)
    received = meter(torch.ones(1, 2, 4, requires_grad=True) * 1, ids, 0)
    with pytest.raises(NotFinite, match="gradients at boundary 2"):
        received.backward(torch.full((1, 2, 4), float("nan")))


def test_a_model_that_is_broken_itself_is_said_to_be() -> None:
    model = staged("llama", "none")
    with torch.no_grad():
        next(iter(model.stages[2].trainable().values())).fill_(float("nan"))
    with pytest.raises(DataError, match="own loss on this text is nan"):
        run(model, [plan("dense", "dense")])
