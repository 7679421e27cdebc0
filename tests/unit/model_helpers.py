"""Tiny random models of every supported family, whole and cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from meshd.model.cut import Tied
from meshd.model.loss import token_loss
from meshd.model.stage import StageModel

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
GQA = COMMON | {"num_key_value_heads": 2, "intermediate_size": 48}

CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, GQA | {"tie_word_embeddings": False, "attention_bias": True}),
    "llama-tied": (LlamaConfig, GQA | {"tie_word_embeddings": True}),
    "llama-llama3-rope": (
        LlamaConfig,
        GQA
        | {
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "qwen2-window": (
        Qwen2Config,
        GQA
        | {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3": (Qwen3Config, GQA | {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral-window": (MistralConfig, GQA | {"sliding_window": 5, "tie_word_embeddings": False}),
    "smollm3": (SmolLM3Config, GQA | {"tie_word_embeddings": True}),
    "smollm3-window": (
        SmolLM3Config,
        GQA | {"use_sliding_window": True, "sliding_window": 5, "no_rope_layer_interval": 2},
    ),
    "gpt2": (GPT2Config, COMMON | {"tie_word_embeddings": True, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2-untied": (GPT2Config, COMMON | {"tie_word_embeddings": False}),
    "gpt_neox": (GPTNeoXConfig, COMMON | {"intermediate_size": 48, "tie_word_embeddings": False}),
    "gpt_neox-serial": (
        GPTNeoXConfig,
        COMMON | {"intermediate_size": 48, "use_parallel_residual": False, "tie_word_embeddings": True},
    ),
}


def tiny_config(name: str, dropout: float = 0.0, **changes: Any) -> PreTrainedConfig:
    """A config of CONFIGS; `dropout` sets every dropout of the families that have it."""
    kind, values = CONFIGS[name]
    drops = {
        GPT2Config: ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
        GPTNeoXConfig: ("hidden_dropout", "attention_dropout"),
    }
    return kind(**values | dict.fromkeys(drops.get(kind, ()), dropout) | changes)


def whole_model(config: PreTrainedConfig, seed: int = 0) -> Any:
    """The transformers model, with weights large enough that every part matters, in train mode."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def load_stages(
    model: Any, cut: list[int], tied: Tied, dtype: torch.dtype = torch.float32
) -> list[StageModel]:
    """Every stage of a whole model."""
    stages = [StageModel(model.config, cut, tied, stage, dtype) for stage in range(len(cut) + 1)]
    for stage in stages:
        stage.load(model.state_dict())
        stage.train()
    return stages


def staged_loss(stages: list[StageModel], ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean loss over the label tokens, through all hops in order."""
    hidden = ids[:, :-1]
    for hop, stage in route(stages):
        hidden = stage(hop, hidden)
    return token_loss(hidden, ids[:, 1:], mask) / mask.sum()


def route(stages: list[StageModel]) -> list[tuple[int, StageModel]]:
    """Every hop with the stage that serves it, in the order a microbatch visits them."""
    return sorted(((hop.index, stage) for stage in stages for hop in stage.hops), key=lambda pair: pair[0])


def save_tiny(model: Any, folder: Path, **options: Any) -> Path:
    """Write a whole model's directory, with a tokenizer that knows the words `a` (1) and `b` (2)."""
    model.save_pretrained(folder, **options)
    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    return folder
