"""The committed model is really pretrained, whole, and adaptable: what every test that uses it relies on."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

SEQUENCE = 128
# Nats per token on `heldout.txt`. A uniform guess costs ln 2048 = 7.62, this model 4.04.
HELD_OUT_BOUND = 4.2


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def model(tiny_model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def windows(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """The text's tokens in windows (W, SEQUENCE + 1), the remainder dropped."""
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    return ids.unfold(0, SEQUENCE + 1, SEQUENCE)


def loss_on(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def held_out_loss(model: PreTrainedModel, batch: torch.Tensor) -> float:
    with torch.inference_mode():
        return float(loss_on(model.eval(), batch))


def test_it_is_a_small_tied_llama_in_bf16(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert model.config.model_type == "llama"
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert 1_500_000 < sum(p.numel() for p in model.parameters()) < 3_000_000
    assert sum(path.stat().st_size for path in tiny_model.iterdir()) < 6_000_000


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return {k: v for k, v in x.items()}\n",
        "\ttabs,  runs   of spaces, \r\n and a trailing space ",
        "Grüße, 世界 🚀 \u0000\x7f",
        "Hello , world !  It 's odd spacing .",
    ],
)
def test_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < tokenizer.vocab_size == 2048


def test_no_token_is_added_and_the_end_token_is_one(tokenizer: PreTrainedTokenizerBase) -> None:
    end = tokenizer.eos_token_id
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer("a")["input_ids"] == tokenizer("a", add_special_tokens=False)["input_ids"]
    assert tokenizer("a<|endoftext|>")["input_ids"][-1] == end


def test_the_chat_template_is_chatml(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(prompt)
    markers = tokenizer("<|im_start|><|im_end|>")["input_ids"]
    assert len(markers) == 2


def test_it_predicts_python_that_it_never_saw(
    tiny_model: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    batch = windows(tokenizer, (tiny_model / "heldout.txt").read_text(encoding="utf-8"))
    loss = held_out_loss(model, batch)

    # The best that any model without context could do, even one that knew this file's own frequencies.
    counts = torch.bincount(batch[:, 1:].flatten()).double()
    frequencies = counts[counts > 0] / counts.sum()
    entropy = float(-(frequencies * frequencies.log()).sum())
    untrained = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model), dtype=torch.float32)

    assert loss < HELD_OUT_BOUND < entropy
    assert held_out_loss(untrained, batch) > 7.0


def test_a_few_steps_on_other_prose_lower_its_held_out_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, adapt_text: Path
) -> None:
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(adapt_text.glob("*.txt"))}
    held_out = windows(tokenizer, texts.pop("MPL-2.0"))[:16]
    training = windows(tokenizer, tokenizer.eos_token.join(texts.values()))
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    before = held_out_loss(model, held_out)
    for indices in order[: 20 * 4].split(4):
        loss_on(model.train(), training[indices]).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert held_out_loss(model, held_out) < before - 0.5
