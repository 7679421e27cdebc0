"""What the data code needs of a tokenizer, and plain documents as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class TokenizerLike(Protocol):
    """The part of a transformers fast tokenizer that is used here."""

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    chat_template: Any

    def __len__(self) -> int: ...
    def __call__(self, text: Any, **options: Any) -> Any: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


@dataclass(frozen=True, eq=False)
class Encoded:
    """One document or row. ids: (n,) int64. labels: (n,) bool, True where the token is learnt; None: everywhere."""

    ids: Ids
    labels: npt.NDArray[np.bool_] | None = None


def begins_with_bos(tokenizer: TokenizerLike) -> bool:
    """Whether the model was trained with a begin token before each text: whether its tokenizer adds one."""
    first = tokenizer("a", verbose=False)["input_ids"][:1]
    return tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]


def encode_texts(texts: Sequence[str], tokenizer: TokenizerLike) -> list[Encoded]:
    """Documents as ids, in one batch (the tokenizer spreads it over its own threads).

    Each has the begin token where the tokenizer adds one, and the end token where there is one.
    """
    bos = [tokenizer.bos_token_id] if begins_with_bos(tokenizer) else []
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    out = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)[
        "input_ids"
    ]
    return [Encoded(np.array([*bos, *ids, *eos], dtype=np.int64)) for ids in out]
