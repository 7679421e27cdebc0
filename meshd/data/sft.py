"""Supervised fine-tuning rows: prompt and response, or chat messages; only responses count in the loss."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt

from meshd.data.corpus import Row
from meshd.data.tokens import Encoded, TokenizerLike, begins_with_bos
from meshd.errors import DataError

_ROLES_HINT = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


@dataclass(frozen=True)
class SftRow:
    """One checked row. spans of `text` that are responses: (first, end) in characters.

    group: what the split goes by, so that one prompt with several answers stays on one side.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    group: str
    chat: bool


def read_row(row: Row, tokenizer: TokenizerLike) -> SftRow:
    """Check one row and render it. Raises DataError with file, line and fix."""
    if "messages" in row.fields:
        return _chat(row, tokenizer)
    prompt, response = row.fields.get("prompt"), row.fields.get("response")
    if not isinstance(prompt, str) or not isinstance(response, str):
        has = ", ".join(sorted(map(str, row.fields))) or "none"
        raise DataError(
            f"{row.origin}: needs text in `prompt` and `response`, or `messages` (fields: {has}). "
            f'Fix: {{"prompt": "...", "response": "..."}} or {_ROLES_HINT}'
        )
    if not response:
        raise DataError(f"{row.origin}: the response is empty, nothing can be learnt. Fix: remove the row")
    return SftRow(prompt + response, ((len(prompt), len(prompt) + len(response)),), prompt, chat=False)


def _chat(row: Row, tokenizer: TokenizerLike) -> SftRow:
    if not tokenizer.chat_template:
        raise DataError(
            f"{row.origin}: chat messages, but the model's tokenizer has no chat template. Fix: use a model with one "
            "(an instruct model), or rows of `prompt` and `response`"
        )
    messages = _checked_messages(row)
    whole = _render(row, tokenizer, messages, prompt=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(row, tokenizer, messages[:index], prompt=True)
        after = _render(row, tokenizer, messages[: index + 1], prompt=False)
        if not after.startswith(before) or not whole.startswith(after):
            raise DataError(
                f"{row.origin}: the chat template renders message {index} differently once others follow, so its "
                "response cannot be told from its prompt. Fix: one assistant turn per row, or `prompt` and `response`"
            )
        spans.append((len(before), len(after)))
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return SftRow(whole, tuple(spans), json.dumps(messages[:first], sort_keys=True), chat=True)


def _checked_messages(row: Row) -> list[dict[str, Any]]:
    messages = row.fields["messages"]
    fits = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    )
    if not fits:
        raise DataError(
            f"{row.origin}: `messages` is no list of objects with role and content. Fix: {_ROLES_HINT}"
        )
    roles = [m["role"] for m in messages]
    if "assistant" not in roles[1:] or roles[0] == "assistant":
        raise DataError(
            f"{row.origin}: needs an assistant turn after another turn (roles: {', '.join(roles) or 'none'}). "
            f"Fix: {_ROLES_HINT}"
        )
    return messages  # type: ignore[no-any-return]


def _render(row: Row, tokenizer: TokenizerLike, messages: list[dict[str, Any]], *, prompt: bool) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise DataError(
            f"{row.origin}: the model's chat template refuses these messages ({error}). Fix: change the roles or "
            "their order to what the model expects"
        ) from error


def encode_rows(rows: Sequence[SftRow], tokenizer: TokenizerLike) -> list[Encoded]:
    """Token ids and label marks. A token counts when it begins inside a response.

    Prompt and response are tokenized apart, so that no token reaches over the border, as at inference; the end token
    closes the response and is learnt. A chat is tokenized whole, its template places all special tokens.
    """
    chats = iter(_encode_chats([row for row in rows if row.chat], tokenizer))
    pairs = iter(_encode_pairs([row for row in rows if not row.chat], tokenizer))
    return [next(chats if row.chat else pairs) for row in rows]


def _encode_chats(rows: Sequence[SftRow], tokenizer: TokenizerLike) -> Iterable[Encoded]:
    if not rows:
        return
    out = tokenizer(
        [row.text for row in rows],
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    for row, ids, offsets in zip(rows, out["input_ids"], out["offset_mapping"], strict=True):
        begins = np.array(offsets, dtype=np.int64).reshape(-1, 2)[:, 0]
        labels = np.zeros(len(ids), dtype=np.bool_)
        for first, end in row.spans:
            labels |= (begins >= first) & (begins < end)
        yield Encoded(np.array(ids, dtype=np.int64), labels)


def _encode_pairs(rows: Sequence[SftRow], tokenizer: TokenizerLike) -> Iterable[Encoded]:
    if not rows:
        return
    texts = [part for row in rows for part in (row.text[: row.spans[0][0]], row.text[row.spans[0][0] :])]
    out = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    bos = [tokenizer.bos_token_id] if begins_with_bos(tokenizer) else []
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for prompt, response in zip(out[::2], out[1::2], strict=True):
        ids: npt.NDArray[np.int64] = np.array([*bos, *prompt, *response, *eos], dtype=np.int64)
        labels = np.zeros(len(ids), dtype=np.bool_)
        labels[len(bos) + len(prompt) :] = True
        yield Encoded(ids, labels)
