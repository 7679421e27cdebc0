"""A staged forward and backward equals the whole transformers model, on every family (issue: stages)."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from model_helpers import CONFIGS, load_stages, route, staged_loss, tiny_config, whole_model

from meshd.errors import ConfigError, MismatchError
from meshd.model.cut import Tied
from meshd.model.loss import token_loss
from meshd.model.stage import StageModel

TOKENS, LAYERS = 24, 4


def batch(config, rows: int = 2, tokens: int = TOKENS, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens (rows, tokens + 1) and a label mask (rows, tokens) with holes."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab_size, (rows, tokens + 1), generator=generator)
    return ids, torch.rand((rows, tokens), generator=generator) < 0.8


def whole_loss(model, ids, mask) -> torch.Tensor:
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def gradients(stages) -> dict[str, torch.Tensor]:
    return {name: p.grad for stage in stages for name, p in stage.trainable().items()}


@pytest.mark.parametrize("cut", [[], [1], [1, 3]], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_staged_equals_whole(name: str, cut: list[int]) -> None:
    config = tiny_config(name)
    model = whole_model(config)
    tied: Tied = "ring" if config.tie_word_embeddings else "none"
    stages = load_stages(model, cut, tied)
    ids, mask = batch(config)
    loss, want = staged_loss(stages, ids, mask), whole_loss(model, ids, mask)
    loss.backward()
    want.backward()
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-6)
    got = gradients(stages)
    expected = dict(model.named_parameters())
    assert got.keys() == expected.keys()
    for parameter, grad in got.items():
        torch.testing.assert_close(grad, expected[parameter].grad, rtol=1e-4, atol=1e-7, msg=parameter)


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_frozen_tie_trains_the_rest_like_the_whole_model(name: str) -> None:
    config = tiny_config(name)
    model = whole_model(config)
    model.get_input_embeddings().weight.requires_grad_(False)
    stages = load_stages(model, [2], "freeze")
    ids, mask = batch(config)
    staged_loss(stages, ids, mask).backward()
    whole_loss(model, ids, mask).backward()
    embedding = stages[0].family.embedding_name
    for stage in stages:
        assert embedding in stage.named()
        assert embedding not in stage.trainable()
        assert stage.named()[embedding].grad is None
    got = gradients(stages)
    expected = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
    assert got.keys() == expected.keys()
    for key, grad in got.items():
        torch.testing.assert_close(grad, expected[key], rtol=1e-4, atol=1e-7, msg=key)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_equal_documents_run_apart(name: str) -> None:
    config = tiny_config(name)
    model = whole_model(config)
    stages = load_stages(model, [1, 3], "ring" if config.tie_word_embeddings else "none")
    ids, _ = batch(config, rows=2)
    bounds = [[0, 7, 19, TOKENS], [0, 12, TOKENS]]
    starts = torch.zeros((2, TOKENS), dtype=torch.bool)
    for row, edges in enumerate(bounds):
        starts[row, edges[1:-1]] = True  # position 0 begins a document whether marked or not
    x = ids[:, :-1]
    hidden = x
    for hop, stage in route(stages):
        hidden = stage(hop, hidden, starts)
    for row, edges in enumerate(bounds):
        for first, last in pairwise(edges):
            alone = model(input_ids=x[row : row + 1, first:last], use_cache=False).logits
            torch.testing.assert_close(hidden[row : row + 1, first:last], alone, rtol=1e-4, atol=1e-5)


def test_sliding_window_matters() -> None:
    """The window test above would pass with windows ignored if the window were never reached."""
    with_window, without = tiny_config("mistral-window"), tiny_config("mistral-window", sliding_window=None)
    model = whole_model(with_window)
    ids, mask = batch(with_window)
    other = [StageModel(without, [], "none", 0)]
    other[0].load(model.state_dict())
    narrow = staged_loss(load_stages(model, [], "none"), ids, mask)
    assert abs(narrow - staged_loss(other, ids, mask)) > 1e-4


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_recomputation_with_restored_seed_repeats_dropout(name: str) -> None:
    config = tiny_config(name, dropout=0.2)
    stages = load_stages(whole_model(config), [2], "ring" if config.tie_word_embeddings else "none")
    ids, _ = batch(config)
    for stage in stages:
        stage.train()
    x = ids[:, :-1]

    def run(seed: int) -> list[torch.Tensor]:
        out, hidden = [], x
        for hop, stage in route(stages):
            torch.manual_seed(seed + hop)
            hidden = stage(hop, hidden)
            out.append(hidden.detach())
        return out

    first, other = run(5), run(6)
    again = run(5)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    for stage in stages:
        stage.eval()
    assert all(torch.equal(a, b) for a, b in zip(run(5), run(6), strict=True))


def test_dynamic_rope_does_not_remember_longer_sequences() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    config = tiny_config("llama", rope_parameters=rope, max_position_embeddings=8)
    model = whole_model(config)
    (stage,) = load_stages(model, [], "none")
    ids, _ = batch(config)
    short = stage(0, ids[:, :12])
    stage(0, ids)
    assert torch.equal(stage(0, ids[:, :12]), short)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_stage_holds_only_its_own_tensors(name: str) -> None:
    """A peer keeps and reads nothing of other stages; before `load` it keeps nothing at all."""
    config = tiny_config(name)
    state = {key: value.clone() for key, value in whole_model(config).state_dict().items()}
    tied: Tied = "ring" if config.tie_word_embeddings else "none"
    read: list[str] = []

    class Spy(dict):
        def __getitem__(self, key):
            read.append(key)
            return super().__getitem__(key)

    stage = StageModel(config, [1, 3], tied, 1)
    assert all(p.is_meta for p in stage.parameters())
    stage.load(Spy(state))
    layers = f"{stage.family.body}.{stage.family.layers}"
    own = [key for key in state if key.startswith((f"{layers}.1.", f"{layers}.2."))]
    assert sorted(set(read)) == sorted(own) == sorted(stage.parameter_names())
    assert not any(p.is_meta for p in stage.parameters())


def test_rotary_frequencies_stay_exact_in_bf16() -> None:
    config = tiny_config("llama")
    stage = StageModel(config, [2], "none", 1, dtype=torch.bfloat16)
    buffers = dict(stage.named_buffers())
    assert buffers["_rotary.inv_freq"].dtype == torch.float32
    torch.testing.assert_close(
        buffers["_rotary.inv_freq"], 1.0 / 10_000.0 ** (torch.arange(0, 8, 2).float() / 8), rtol=0, atol=0
    )


def test_bf16_is_close_to_fp32() -> None:
    config = tiny_config("llama")
    model = whole_model(config)
    ids, mask = batch(config)
    want = staged_loss(load_stages(model, [2], "none"), ids, mask)
    got = staged_loss(load_stages(model, [2], "none", torch.bfloat16), ids, mask)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=2e-2, atol=0)


def test_tie_holds_after_training_in_a_ring() -> None:
    """Embedding and head remain one weight, and train like the whole tied model."""
    config = tiny_config("llama-tied")
    model = whole_model(config)
    stages = load_stages(model, [1, 3], "ring")
    mine = [torch.optim.AdamW(stage.trainable().values(), lr=1e-2) for stage in stages]
    reference = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = model.get_input_embeddings().weight.detach().clone()
    for step in range(3):
        ids, mask = batch(config, seed=step)
        staged_loss(stages, ids, mask).backward()
        whole_loss(model, ids, mask).backward()
        for optimizer in [*mine, reference]:
            optimizer.step()
            optimizer.zero_grad()
    holders = [stage for stage in stages if stage.family.embedding_name in stage.named()]
    assert holders == [stages[0]]
    assert stages[0].family.head_name not in stages[0].named()
    trained = stages[0].named()[stages[0].family.embedding_name]
    torch.testing.assert_close(trained, model.get_input_embeddings().weight, rtol=1e-3, atol=1e-4)
    assert (trained - before).abs().max() > 1e-3


def test_load_names_tensor_and_both_shapes() -> None:
    """C07."""
    config = tiny_config("llama")
    state = dict(whole_model(config).state_dict())
    state["model.layers.3.mlp.up_proj.weight"] = torch.zeros(5, 7)
    del state["model.norm.weight"]
    stage = StageModel(config, [2], "none", 1)
    with pytest.raises(MismatchError) as caught:
        stage.load(state)
    text = str(caught.value)
    assert "model.layers.3.mlp.up_proj.weight: expected (48, 32), found (5, 7)" in text
    assert "model.norm.weight: expected (32,), found nothing" in text
    assert all(p.is_meta for p in stage.parameters()), "nothing is loaded when something does not fit"


def test_unsupported_family_names_the_supported_ones() -> None:
    from transformers import GemmaConfig

    with pytest.raises(ConfigError, match=r"model\.source = 'gemma'.*gpt2.*llama.*mistral.*qwen2.*smollm3"):
        StageModel(GemmaConfig(), [], "none", 0)


def test_config_of_the_caller_is_left_alone() -> None:
    config = tiny_config("llama")
    before = config.to_dict()
    StageModel(config, [2], "none", 0)
    assert config.to_dict() == before


def test_token_loss_equals_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshd.model.loss._CHUNK_VALUES", 100)  # several chunks, the last one short
    torch.manual_seed(0)
    logits = torch.randn(2, 9, 31, dtype=torch.float64).float().requires_grad_()
    labels = torch.randint(0, 31, (2, 9))
    mask = torch.rand(2, 9) < 0.6
    want = torch.nn.functional.cross_entropy(logits[mask], labels[mask], reduction="sum")
    (expected,) = torch.autograd.grad(want * 0.25, logits)
    labels[~mask] = -100
    got = token_loss(logits, labels, mask)
    (grad,) = torch.autograd.grad(got * 0.25, logits)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grad, expected)
    assert token_loss(logits, labels, torch.zeros_like(mask)) == 0.0
    assert token_loss(logits.bfloat16(), labels, mask).dtype == torch.float32
