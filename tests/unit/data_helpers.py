"""A byte-level tokenizer that needs no file, and small corpora."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    *, eos: bool = True, bos: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """One token per byte; `</s>`, `<s>` (added before each text when `bos`), and the chat marks are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special: dict[str, Any] = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    if eos:
        special["eos_token"] = "</s>"
    if bos:
        special["bos_token"] = "<s>"
        backend.add_special_tokens(["<s>"])
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = chat_template
    return tokenizer


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def documents(count: int, words: int = 30) -> list[str]:
    """Distinct documents, each with its number in every word."""
    return [" ".join(f"d{number}w{word}" for word in range(words)) for number in range(count)]
