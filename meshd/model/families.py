"""How the layers of each supported model family are made and called, over transformers' own modules.

A family is a row of names: where the parts sit in the whole model (so that parameter names are those of its
state_dict) and which classes make them. The arithmetic of a layer is transformers'; what is written here is what its
model classes do around the layers: positions, rotary tables, masks, windows, dropout after the embedding.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from meshd.errors import ConfigError, DataError
from meshd.model.cut import Tied

# `auto` for tied embeddings: measured on SmolLM2-135M, docs/tied.md.
TIED_DEFAULT: Literal["ring", "freeze"] = "freeze"


@dataclass(frozen=True)
class Family:
    """One model family. Class names are looked up in `transformers.models.<model_type>`."""

    model_type: str
    body: str  # attribute of the whole model that holds everything but the head
    embed: str
    layers: str
    norm: str
    causal_class: str
    layer_class: str
    norm_class: str  # "LayerNorm" is torch's own
    norm_eps: str  # config field
    rotary_class: str | None = None
    positions: str | None = None  # learned position embedding, inside `body`
    embed_dropout: str | None = None  # config field
    padding_idx: bool = True  # the whole model gives its embedding the config's padding token
    windows: Literal["none", "all", "by_layer"] = "none"  # who uses config.sliding_window
    old_names: tuple[tuple[str, str], ...] = ()  # (prefix in old checkpoints, prefix of the state_dict)

    def _class(self, name: str) -> Any:
        module = f"transformers.models.{self.model_type}.modeling_{self.model_type}"
        return getattr(importlib.import_module(module), name)

    def make_layer(self, config: PreTrainedConfig, index: int) -> nn.Module:
        """Decoder layer `index` of the whole model."""
        layer: nn.Module = self._class(self.layer_class)(config, layer_idx=index)
        return layer

    def make_norm(self, config: PreTrainedConfig) -> nn.Module:
        """The norm before the head."""
        eps = getattr(config, self.norm_eps)
        if self.norm_class == "LayerNorm":
            return nn.LayerNorm(config.hidden_size, eps=eps)
        norm: nn.Module = self._class(self.norm_class)(config.hidden_size, eps=eps)
        return norm

    def make_embedding(self, config: PreTrainedConfig) -> nn.Embedding:
        """Token embedding (vocabulary, hidden)."""
        padding = config.pad_token_id if self.padding_idx else None
        return nn.Embedding(config.vocab_size, config.hidden_size, padding)

    def make_rotary(self, config: PreTrainedConfig) -> nn.Module | None:
        """The module that turns (hidden, position ids) into (cos, sin), or None."""
        if self.rotary_class is None:
            return None
        rotary: nn.Module = self._class(self.rotary_class)(config=config)
        return rotary

    def window(self, config: PreTrainedConfig, index: int) -> int | None:
        """Keys that a query of layer `index` sees, itself included; None: all before it."""
        if self.windows == "none":
            return None
        if self.windows == "by_layer" and config.layer_types[index] != "sliding_attention":
            return None
        window: int | None = config.sliding_window
        return window

    @property
    def embedding_name(self) -> str:
        """Name of the token embedding in the whole model's state_dict."""
        return f"{self.body}.{self.embed}.weight"

    @property
    def head_name(self) -> str:
        """Name of the head's weight there; it depends on the version of transformers."""
        name: str = next(iter(self._class(self.causal_class)._tied_weights_keys))
        return name


def _llama_like(
    model_type: str, classes: str, windows: Literal["none", "all", "by_layer"] = "none"
) -> Family:
    return Family(
        model_type=model_type,
        body="model",
        embed="embed_tokens",
        layers="layers",
        norm="norm",
        causal_class=f"{classes}ForCausalLM",
        layer_class=f"{classes}DecoderLayer",
        norm_class=f"{classes}RMSNorm",
        norm_eps="rms_norm_eps",
        rotary_class=f"{classes}RotaryEmbedding",
        windows=windows,
    )


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        _llama_like("llama", "Llama"),
        _llama_like("qwen2", "Qwen2", windows="by_layer"),
        _llama_like("qwen3", "Qwen3", windows="by_layer"),
        _llama_like("mistral", "Mistral", windows="all"),
        _llama_like("smollm3", "SmolLM3", windows="by_layer"),
        Family(
            model_type="gpt2",
            body="transformer",
            embed="wte",
            layers="h",
            norm="ln_f",
            causal_class="GPT2LMHeadModel",
            layer_class="GPT2Block",
            norm_class="LayerNorm",
            norm_eps="layer_norm_epsilon",
            positions="wpe",
            embed_dropout="embd_pdrop",
            padding_idx=False,
            # The first published GPT-2 files name tensors without the body.
            old_names=tuple((part, f"transformer.{part}") for part in ("wte.", "wpe.", "h.", "ln_f.")),
        ),
        Family(
            model_type="gpt_neox",
            body="gpt_neox",
            embed="embed_in",
            layers="layers",
            norm="final_layer_norm",
            causal_class="GPTNeoXForCausalLM",
            layer_class="GPTNeoXLayer",
            norm_class="LayerNorm",
            norm_eps="layer_norm_eps",
            rotary_class="GPTNeoXRotaryEmbedding",
            embed_dropout="hidden_dropout",
            padding_idx=False,
            # The head's name changed within transformers 5.
            old_names=(("embed_out.", "lm_head."), ("lm_head.", "embed_out.")),
        ),
    )
}


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a model. Raises ConfigError for one that is not supported, naming those that are."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ConfigError(
            "model.source",
            config.model_type,
            "this model family is not supported",
            "use a model of one of these: " + ", ".join(sorted(FAMILIES)),
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            "model.source",
            config.model_type,
            "its weights are quantized, which cannot be trained",
            "use the unquantized model that it was made from",
        )
    if getattr(config, "add_cross_attention", False):
        raise ConfigError(
            "model.source",
            config.model_type,
            "it attends to an encoder (add_cross_attention), so it is no plain language model",
            "use a decoder-only model",
        )
    return family


def load_config(model_dir: Path) -> PreTrainedConfig:
    """Read `config.json` of a supported model. No code from the directory is run.

    Raises DataError when it is missing or no JSON, ConfigError when the family is not supported.
    """
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing. A model directory holds config.json, *.safetensors and a tokenizer"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is not valid JSON ({error}). Fetch the model again") from None
    model_type = raw.get("model_type") if isinstance(raw, dict) else None
    if model_type not in FAMILIES:
        raise ConfigError(
            "model.source",
            model_type,
            f"the model family named in {path} is not supported",
            "use a model of one of these: " + ", ".join(sorted(FAMILIES)),
        )
    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise DataError(f"{path} does not describe a {model_type} model: {error}") from error
    family_of(config)
    return config


def resolve_tied(config: PreTrainedConfig, wanted: Literal["auto", "ring", "freeze"]) -> Tied:
    """What a run does about the tie of embedding and head: `none` when the model has no tie."""
    if not config.tie_word_embeddings:
        return "none"
    return TIED_DEFAULT if wanted == "auto" else wanted


def check_seq_len(config: PreTrainedConfig, seq_len: int) -> None:
    """Refuse sequences longer than a learned table of positions. Raises ConfigError."""
    if family_of(config).positions is not None and seq_len > config.max_position_embeddings:
        raise ConfigError(
            "data.seq_len",
            seq_len,
            f"this {config.model_type} model has {config.max_position_embeddings} positions",
            f"use at most {config.max_position_embeddings}",
        )
