"""The tokenized corpus on disk, as windows of T + 1 tokens. `meshd.data.build` writes it.

Files of the folder (and of the bundle `run/data`), the same bytes for the same input:

- `train.safetensors`, `held_out.safetensors`: `tokens` (n,) uint16 or int32; `documents` (d + 1,) int64, where each
  document begins, and n; `windows` (w, 2) int64, first token and end of each window; for sft `labels`
  (ceil(n / 8),) uint8, one bit per token, least significant first, 1: the token is learnt.
- `facts.json`: `DatasetFacts`.

Text: windows of T + 1 tokens follow each other at a stride of T, so every token but the first is a label once (the
last few of each side, less than a window, are left over). Sft: whole rows are packed into a window as long as they
fit, the rest of the window is padding that does not count; a row longer than a window keeps its left end, the whole
prompt first, and is left out when no response token remains. Both are counted in the facts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open

from meshd.config.runspec import Table
from meshd.data.microbatch import Microbatch
from meshd.errors import DataError

FACTS = "facts.json"
SIDES = ("train", "held_out")


class SideFacts(Table):
    """One side of the split. Tokens include begin and end tokens, label tokens are those in windows."""

    documents: int = Field(ge=0)
    tokens: int = Field(ge=0)
    windows: int = Field(ge=0)
    label_tokens: int = Field(ge=0)


class DatasetFacts(Table):
    """What is in a data set and what became of its sources."""

    format: Literal[1] = 1
    kind: Literal["text", "sft"]
    sources: list[str]
    seq_len: int = Field(ge=1)
    packing: Literal["concat", "separate"]
    vocabulary: int = Field(ge=1, description="length of the tokenizer")
    pad_id: int = Field(ge=0)
    train: SideFacts
    held_out: SideFacts
    duplicates: int = Field(ge=0, description="documents left out because an equal one came before")
    repaired: int = Field(ge=0, description="documents whose few bad bytes were replaced")
    unreadable: int = Field(ge=0, description="documents left out because they are not UTF-8 text")
    truncated: int = Field(ge=0, description="sft rows cut at their right end to fit a window")
    without_labels: int = Field(
        ge=0, description="sft rows left out because no response token fits the window"
    )
    held_out_long_lines: int = Field(ge=0, description="long lines in held-out documents")
    held_out_long_lines_in_train: int = Field(ge=0, description="those that occur in training documents too")

    def summary(self) -> str:
        """For people, one line."""
        seen, lines = self.held_out_long_lines_in_train, self.held_out_long_lines
        return (
            f"{self.train.tokens} tokens in {self.train.documents} documents to train on, {self.held_out.tokens} in "
            f"{self.held_out.documents} held out; {self.duplicates} duplicates dropped; {seen} of {lines} long "
            "held-out lines occur in training text"
        )


class _Side:
    """Random access to one file; pages of the tokens are read when they are used."""

    def __init__(self, path: Path, sft: bool) -> None:
        try:
            tensors: Any = safe_open(path, framework="numpy")
            self._tokens = tensors.get_slice("tokens")
            self._labels = tensors.get_slice("labels") if sft else None
            self.documents: npt.NDArray[np.int64] = tensors.get_tensor("documents")
            self.windows: npt.NDArray[np.int64] = tensors.get_tensor("windows")
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"{path} is no tokenized corpus ({error}). Fix: remove its folder, it is made or fetched again"
            ) from error

    def fits(self, facts: SideFacts, longest: int) -> bool:
        """Whether the shapes agree and no window lies outside the tokens: the file may have come from a peer."""
        shapes = [list(self._tokens.get_shape()), list(self.documents.shape), list(self.windows.shape)]
        if shapes != [[facts.tokens], [facts.documents + 1], [facts.windows, 2]]:
            return False
        if self._labels is not None and list(self._labels.get_shape()) != [-(-facts.tokens // 8)]:
            return False
        length = self.windows[:, 1] - self.windows[:, 0]
        inside = (self.windows[:, 0] >= 0) & (self.windows[:, 1] <= facts.tokens)
        return bool((inside & (length >= 2) & (length <= longest)).all())

    def tokens(self, first: int, end: int) -> npt.NDArray[np.int64]:
        return self._tokens[first:end].astype(np.int64)  # type: ignore[no-any-return]

    def labels(self, first: int, end: int) -> npt.NDArray[np.bool_]:
        """Which tokens of [first, end) are learnt."""
        if self._labels is None:
            return np.ones(end - first, dtype=np.bool_)
        octets = self._labels[first // 8 : -(-end // 8)]
        bits = np.unpackbits(octets, bitorder="little")[first % 8 :]
        return bits[: end - first].astype(np.bool_)

    def document_starts(self, first: int, end: int) -> npt.NDArray[np.int64]:
        """Places in [first, end), counted from `first`, at which a document begins."""
        a, b = np.searchsorted(self.documents[:-1], (first, end))
        return self.documents[a:b] - first


class Dataset:
    """An opened data set. Reading is safe from several threads; nothing of it is kept in memory but the windows."""

    def __init__(self, path: Path, facts: DatasetFacts) -> None:
        """Use `open`."""
        self.path, self.facts = path, facts
        self._sides = {side: _Side(path / f"{side}.safetensors", facts.kind == "sft") for side in SIDES}
        for name, side_facts in (("train", facts.train), ("held_out", facts.held_out)):
            if not self._sides[name].fits(side_facts, facts.seq_len + 1):
                raise DataError(
                    f"{path / name}.safetensors does not fit its {FACTS}. "
                    "Fix: remove the folder, it is made or fetched again"
                )

    @classmethod
    def open(cls, path: Path) -> Dataset:
        """Open a folder that `build_dataset` wrote. Raises DataError when it is missing or spoilt."""
        try:
            facts = DatasetFacts.model_validate(json.loads((path / FACTS).read_text(encoding="utf-8")))
        except (OSError, ValueError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(
                f"{path / FACTS} cannot be used ({reason}). Fix: remove the folder, it is made or fetched again"
            ) from error
        return cls(path, facts)

    @property
    def seq_len(self) -> int:
        """T: inputs per window."""
        return self.facts.seq_len

    @property
    def train_windows(self) -> int:
        """Number of training windows; each has at least one label."""
        return self.facts.train.windows

    @property
    def held_out_windows(self) -> int:
        return self.facts.held_out.windows

    def train(self, windows: npt.NDArray[np.int64]) -> Microbatch:
        """The training windows with these numbers, (B,) -> B rows. Reads from disk."""
        return self._gather(self._sides["train"], [int(window) for window in windows])

    def held_out_batches(self, microbatch: int, limit: int) -> Iterator[Microbatch]:
        """At most `limit` held-out windows, spread evenly over the held-out text, `microbatch` rows each.

        The last microbatch is filled up with rows without labels, so that all have one shape.
        """
        total = self.held_out_windows
        chosen: list[int] = (np.arange(min(limit, total)) * total // min(limit, total)).tolist()
        for start in range(0, len(chosen), microbatch):
            yield self._gather(self._sides["held_out"], chosen[start : start + microbatch], rows=microbatch)

    def _gather(self, side: _Side, windows: list[int], rows: int | None = None) -> Microbatch:
        rows = rows or len(windows)
        separate = self.facts.packing == "separate"
        tokens = np.full((rows, self.seq_len + 1), self.facts.pad_id, dtype=np.int64)
        mask = np.zeros((rows, self.seq_len), dtype=np.bool_)
        starts = np.zeros((rows, self.seq_len), dtype=np.bool_)
        starts[:, 0] = True
        for row, window in enumerate(windows):
            first, end = (int(place) for place in side.windows[window])
            tokens[row, : end - first] = side.tokens(first, end)
            mask[row, : end - first - 1] = side.labels(first, end)[1:]
            if separate:
                begins = side.document_starts(first, end)
                starts[row, begins[begins < self.seq_len]] = True
                mask[row, begins[begins > 0] - 1] = False
        return Microbatch(
            tokens=torch.from_numpy(tokens),
            label_mask=torch.from_numpy(mask),
            document_starts=torch.from_numpy(starts) if separate else None,
        )
