"""From sources to a data set: read, drop duplicates, split by document, tokenize, lay out windows, write."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import save_file

from meshd.config.runspec import DataSpec
from meshd.data.corpus import Corpus
from meshd.data.dataset import FACTS, DatasetFacts, SideFacts
from meshd.data.sft import SftRow, encode_rows, read_row
from meshd.data.tokens import Encoded, TokenizerLike, encode_texts
from meshd.errors import DataError, ResourceError

log = logging.getLogger(__name__)

# Text tokenized in one call: enough for all of the tokenizer's threads, little memory.
BATCH_CHARACTERS = 2_000_000
# Lines at least so long are looked for on both sides of the split.
LONG_LINE_CHARACTERS = 60


@dataclass(frozen=True)
class _Unit:
    """One document or row on its way. group: what the split goes by."""

    text: str
    group: str
    row: SftRow | None = None


@dataclass
class _Side:
    """What one side has collected."""

    tokens: list[npt.NDArray[Any]] = field(default_factory=list)
    labels: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    long_lines: list[bytes] = field(default_factory=list)

    @property
    def documents(self) -> npt.NDArray[np.int64]:
        """(d + 1,) where each document begins, and the end."""
        return np.cumsum([0, *map(len, self.tokens)], dtype=np.int64)

    def long_line_hashes(self) -> npt.NDArray[np.uint64]:
        return np.frombuffer(b"".join(self.long_lines), dtype="<u8").astype(np.uint64)


@dataclass
class _Counts:
    duplicates: int = 0
    truncated: int = 0
    without_labels: int = 0


def build_dataset(spec: DataSpec, tokenizer: TokenizerLike, dest: Path) -> DatasetFacts:
    """Tokenize the sources of a run spec into the folder `dest` (format: `meshd.data.dataset`).

    The split goes by a hash of each document's text (of the prompt, for sft) and `split_seed`, so a document stays on
    its side when others come or go, and equal documents can't be on both. Equal input gives equal bytes. Blocks
    (minutes for large corpora); the tokens are held in memory, 2 or 4 bytes each.

    Raises DataError for sources that cannot be read, rows that do not fit, and a side shorter than one sequence;
    ResourceError when `dest` cannot be written.
    """
    counts = _Counts()
    corpus = Corpus(spec.sources)
    train, held_out = _Side(), _Side()
    longest = spec.seq_len + 1
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.int32
    for batch in _batches(_distinct(_units(corpus, spec, tokenizer), counts)):
        for unit, encoded in zip(batch, _encode(batch, tokenizer), strict=True):
            fitting = encoded if spec.kind == "text" else _fit(encoded, longest, counts)
            if fitting is None:
                continue
            side = held_out if _is_held_out(unit.group, spec) else train
            side.tokens.append(fitting.ids.astype(dtype))
            if fitting.labels is not None:
                side.labels.append(fitting.labels)
            side.long_lines += _long_lines(unit.text)

    layout: Callable[[_Side, DataSpec], npt.NDArray[np.int64]]
    layout = _text_windows if spec.kind == "text" else _packed_windows
    windows = {"train": layout(train, spec), "held_out": layout(held_out, spec)}
    held_lines, train_lines = held_out.long_line_hashes(), np.unique(train.long_line_hashes())
    facts = DatasetFacts(
        kind=spec.kind,
        sources=spec.sources,
        seq_len=spec.seq_len,
        packing=spec.packing,
        vocabulary=len(tokenizer),
        pad_id=_pad_id(tokenizer),
        train=_side_facts("train", train, windows["train"], spec),
        held_out=_side_facts("held_out", held_out, windows["held_out"], spec),
        duplicates=counts.duplicates,
        repaired=corpus.report.repaired,
        unreadable=corpus.report.unreadable,
        truncated=counts.truncated,
        without_labels=counts.without_labels,
        held_out_long_lines=len(held_lines),
        held_out_long_lines_in_train=int(np.isin(held_lines, train_lines).sum()),
    )
    _write(dest, {"train": train, "held_out": held_out}, windows, facts)
    for line in (facts.summary(), corpus.report.summary()):
        if line:
            log.info("%s", line)
    return facts


def _units(corpus: Corpus, spec: DataSpec, tokenizer: TokenizerLike) -> Iterator[_Unit]:
    if spec.kind == "text":
        for text in corpus.documents(spec.text_field):
            yield _Unit(text, text)
    else:
        for row in corpus.rows():
            rendered = read_row(row, tokenizer)
            yield _Unit(rendered.text, rendered.group, rendered)


def _distinct(units: Iterable[_Unit], counts: _Counts) -> Iterator[_Unit]:
    seen: set[bytes] = set()
    for unit in units:
        digest = hashlib.blake2b(_utf8(unit.text), digest_size=16).digest()
        if digest in seen:
            counts.duplicates += 1
        else:
            seen.add(digest)
            yield unit


def _batches(units: Iterable[_Unit]) -> Iterator[list[_Unit]]:
    batch: list[_Unit] = []
    size = 0
    for unit in units:
        batch.append(unit)
        size += len(unit.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(batch: Sequence[_Unit], tokenizer: TokenizerLike) -> list[Encoded]:
    rows = [unit.row for unit in batch if unit.row is not None]
    return encode_rows(rows, tokenizer) if rows else encode_texts([unit.text for unit in batch], tokenizer)


def _fit(encoded: Encoded, longest: int, counts: _Counts) -> Encoded | None:
    """An sft row cut at its right end to a window; None when no response is left to learn.

    The prompt is kept whole rather than cut from its left: a response to half a question teaches the wrong thing.
    """
    if len(encoded.ids) > longest:
        counts.truncated += 1
        labels = None if encoded.labels is None else encoded.labels[:longest]
        encoded = Encoded(encoded.ids[:longest], labels)
    # The first token is never predicted.
    if len(encoded.ids) < 2 or (encoded.labels is not None and not encoded.labels[1:].any()):
        counts.without_labels += 1
        return None
    return encoded


def _is_held_out(group: str, spec: DataSpec) -> bool:
    digest = hashlib.blake2b(_utf8(f"{spec.split_seed}\n{group}"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < spec.held_out * 2**64


def _long_lines(text: str) -> list[bytes]:
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [
        hashlib.blake2b(_utf8(x), digest_size=8).digest() for x in lines if len(x) >= LONG_LINE_CHARACTERS
    ]


def _utf8(text: str) -> bytes:
    # JSON may hold lone surrogates, which strict UTF-8 cannot write.
    return text.encode("utf-8", errors="surrogatepass")


def _text_windows(side: _Side, spec: DataSpec) -> npt.NDArray[np.int64]:
    """(w, 2): T + 1 tokens each at a stride of T; those without a label (all borders) are left out."""
    documents = side.documents
    first = np.arange((max(1, int(documents[-1])) - 1) // spec.seq_len, dtype=np.int64) * spec.seq_len
    windows = np.stack([first, first + spec.seq_len + 1], axis=1)
    return windows[_label_counts(side, windows, spec) > 0]


def _packed_windows(side: _Side, spec: DataSpec) -> npt.NDArray[np.int64]:
    """(w, 2): consecutive whole rows, as many as fit T + 1 tokens."""
    windows, start, end = [], 0, 0
    for following in side.documents[1:].tolist():
        if following - start > spec.seq_len + 1:
            windows.append((start, end))
            start = end
        end = following
    if end > start:
        windows.append((start, end))
    return np.array(windows, dtype=np.int64).reshape(-1, 2)


def _label_counts(side: _Side, windows: npt.NDArray[np.int64], spec: DataSpec) -> npt.NDArray[np.int64]:
    """(w,) labels that count in each window: learnt tokens but its first, but borders where documents are apart."""
    total = int(side.documents[-1])
    learnt = np.concatenate(side.labels) if side.labels else np.ones(total, dtype=np.bool_)
    if spec.packing == "separate":
        learnt = learnt.copy()
        learnt[side.documents[:-1]] = False
    before = np.concatenate([[0], np.cumsum(learnt, dtype=np.int64)])
    counts: npt.NDArray[np.int64] = before[windows[:, 1]] - before[windows[:, 0] + 1]
    return counts


def _side_facts(name: str, side: _Side, windows: npt.NDArray[np.int64], spec: DataSpec) -> SideFacts:
    tokens = int(side.documents[-1])
    if not len(windows):
        which = "training text" if name == "train" else "held-out text"
        fix = "a smaller data.held_out" if name == "train" else "a larger data.held_out"
        raise DataError(
            f"data.sources: the {which} is shorter than one sequence: {tokens} tokens in {len(side.tokens)} documents, "
            f"and data.seq_len = {spec.seq_len} needs {spec.seq_len + 1}. Fix: more text, in more documents (the "
            f"split goes by document), a smaller data.seq_len, or {fix} (now {spec.held_out})"
        )
    return SideFacts(
        documents=len(side.tokens),
        tokens=tokens,
        windows=len(windows),
        label_tokens=int(_label_counts(side, windows, spec).sum()),
    )


def _pad_id(tokenizer: TokenizerLike) -> int:
    """Any id will do: padding is never a label, and it follows everything that is."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return candidate
    return 0


def _write(
    dest: Path, sides: dict[str, _Side], windows: dict[str, npt.NDArray[np.int64]], facts: DatasetFacts
) -> None:
    """Every file is written beside its name and moved there; the facts come last and complete the data set."""
    try:
        dest.mkdir(parents=True, exist_ok=True)
        (dest / FACTS).unlink(missing_ok=True)
        for name, side in sides.items():
            tensors: dict[str, npt.NDArray[Any]] = {
                "tokens": np.concatenate(side.tokens),
                "documents": side.documents,
                "windows": windows[name],
            }
            if facts.kind == "sft":
                tensors["labels"] = np.packbits(np.concatenate(side.labels), bitorder="little")
            partial = dest / f".{name}.partial"
            save_file(tensors, partial)
            os.replace(partial, dest / f"{name}.safetensors")
        partial = dest / ".facts.partial"
        text = json.dumps(facts.model_dump(mode="json"), indent=1, sort_keys=True, ensure_ascii=False)
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, dest / FACTS)
    except (OSError, SafetensorError) as error:
        raise ResourceError(
            f"cannot write the tokenized corpus to {dest} ({error}). Fix: make room, or make the folder writable"
        ) from error
