"""From sources to windows: every label once, no leak between the sides, equal bytes, documents apart."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import byte_tokenizer, documents, write_jsonl

from meshd.config.runspec import DataSpec
from meshd.data.build import build_dataset
from meshd.data.dataset import Dataset
from meshd.data.stream import TokenStream
from meshd.errors import DataError, ResourceError

T = 16


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def spec(source: Path, **changes: Any) -> DataSpec:
    return DataSpec(**{"sources": [str(source)], "seq_len": T, "held_out": 0.2, **changes})


def corpus(folder: Path, texts: list[str]) -> Path:
    return write_jsonl(folder / "corpus.jsonl", [{"text": text} for text in texts])


def all_train(dataset: Dataset) -> Any:
    return dataset.train(np.arange(dataset.train_windows))


def side_texts(dataset: Dataset, tokenizer: Any, side: str) -> list[str]:
    """The documents of one side, put together again from its windows (text, concat), the unfinished last left out."""
    count = dataset.train_windows if side == "train" else dataset.held_out_windows
    batches = [all_train(dataset)] if side == "train" else list(dataset.held_out_batches(count, count))
    rows = [row.tolist() for batch in batches for row in batch.tokens]
    ids = rows[0][:1] + [token for row in rows for token in row[1:]]
    return tokenizer.decode(ids).split("</s>")[:-1]  # type: ignore[no-any-return]


def test_every_token_is_a_label_once(tmp_path: Path, tokenizer: Any) -> None:
    """Windows follow each other at a stride of T: the labels, one after the other, are the text."""
    texts = documents(40)
    facts = build_dataset(spec(corpus(tmp_path, texts)), tokenizer, tmp_path / "out")
    dataset = Dataset.open(tmp_path / "out")
    assert dataset.facts == facts
    batch = all_train(dataset)
    assert batch.tokens.shape == (facts.train.windows, T + 1)
    assert batch.label_mask.all()
    assert batch.document_starts is None
    assert (batch.tokens[1:, 0] == batch.tokens[:-1, -1]).all()
    assert facts.train.tokens - batch.labels.numel() - 1 < T
    assert facts.train.label_tokens == batch.label_tokens
    train, held_out = side_texts(dataset, tokenizer, "train"), side_texts(dataset, tokenizer, "held_out")
    assert set(train) | set(held_out) <= set(texts)
    assert len(train) + len(held_out) >= len(texts) - 2
    assert facts.train.documents + facts.held_out.documents == len(texts)


def test_no_document_is_on_both_sides(tmp_path: Path, tokenizer: Any) -> None:
    texts = documents(60)
    facts = build_dataset(spec(corpus(tmp_path, texts + texts[::-1])), tokenizer, tmp_path / "out")
    dataset = Dataset.open(tmp_path / "out")
    train, held_out = (set(side_texts(dataset, tokenizer, side)) for side in ("train", "held_out"))
    assert train
    assert held_out
    assert train.isdisjoint(held_out)
    assert facts.duplicates == 60


def test_a_document_stays_on_its_side_when_others_come(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "more").mkdir()
    sides = []
    for folder, texts in ((tmp_path, documents(50)), (tmp_path / "more", documents(80)[::-1])):
        build_dataset(spec(corpus(folder, texts)), tokenizer, folder / "out")
        sides.append(set(side_texts(Dataset.open(folder / "out"), tokenizer, "held_out")))
    few, more = sides
    assert few
    # The last document of a side may be unfinished in the windows.
    assert len(few - more) <= 1
    other = spec(tmp_path / "corpus.jsonl", split_seed=1)
    build_dataset(other, tokenizer, tmp_path / "other")
    assert set(side_texts(Dataset.open(tmp_path / "other"), tokenizer, "held_out")) != few


def test_equal_input_gives_equal_bytes(tmp_path: Path, tokenizer: Any) -> None:
    source = corpus(tmp_path, documents(40))
    for name in ("one", "two"):
        build_dataset(spec(source), tokenizer, tmp_path / name)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["facts.json", "held_out.safetensors", "train.safetensors"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_separate_documents_have_starts_and_no_label_across(tmp_path: Path, tokenizer: Any) -> None:
    build_dataset(
        spec(corpus(tmp_path, documents(40, words=3)), packing="separate"), tokenizer, tmp_path / "out"
    )
    batch = all_train(Dataset.open(tmp_path / "out"))
    assert batch.document_starts is not None
    end = tokenizer.eos_token_id
    assert batch.document_starts[:, 0].all()
    # A document begins exactly after each end token; the label of that end token is of another document.
    assert (batch.document_starts[:, 1:] == (batch.inputs[:, :-1] == end)).all()
    assert (batch.label_mask == (batch.inputs != end)).all()
    assert (batch.inputs == end).any()


def test_a_begin_token_where_the_tokenizer_adds_one(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(bos=True, eos=False)
    build_dataset(spec(corpus(tmp_path, documents(40))), tokenizer, tmp_path / "out")
    tokens = all_train(Dataset.open(tmp_path / "out")).tokens
    assert tokens[0, 0] == tokenizer.bos_token_id
    assert (tokens == tokenizer.bos_token_id).sum() > 20


def test_held_out_batches_have_one_shape_and_spread_over_the_text(tmp_path: Path, tokenizer: Any) -> None:
    facts = build_dataset(spec(corpus(tmp_path, documents(60))), tokenizer, tmp_path / "out")
    dataset = Dataset.open(tmp_path / "out")
    batches = list(dataset.held_out_batches(4, 10))
    assert [batch.tokens.shape for batch in batches] == [(4, T + 1)] * 3
    assert [batch.label_tokens for batch in batches] == [4 * T, 4 * T, 2 * T]
    everything = next(iter(dataset.held_out_batches(facts.held_out.windows, 10**9)))
    assert everything.label_tokens == facts.held_out.label_tokens
    place = {tuple(row.tolist()): number for number, row in enumerate(everything.tokens)}
    chosen = [
        place[tuple(row.tolist())]
        for batch in batches
        for row in batch.tokens
        if tuple(row.tolist()) in place
    ]
    assert chosen == [n * facts.held_out.windows // 10 for n in range(10)]


def test_a_corpus_shorter_than_one_sequence_says_what_is_missing(tmp_path: Path, tokenizer: Any) -> None:
    source = corpus(tmp_path, ["word"])
    with pytest.raises(
        DataError, match=r"training text .*: 5 tokens in 1 documents.*needs 17\. Fix: more text"
    ):
        build_dataset(spec(source), tokenizer, tmp_path / "out")
    long = corpus(tmp_path, documents(1))
    with pytest.raises(DataError, match=r"held-out text .*: 0 tokens.*a larger data\.held_out \(now 0\.2\)"):
        build_dataset(spec(long), tokenizer, tmp_path / "out")
    assert not (tmp_path / "out" / "facts.json").exists()


def test_long_lines_on_both_sides_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    line = "a line that is long enough to be found again on the other side of the split"
    texts = [f"{text}\n  {line}" for text in documents(40, words=5)]
    facts = build_dataset(spec(corpus(tmp_path, texts)), tokenizer, tmp_path / "out")
    assert facts.held_out_long_lines == facts.held_out_long_lines_in_train == facts.held_out.documents


def test_bad_text_is_reported_once(tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    for number, text in enumerate(documents(40)):
        (tmp_path / f"{number:02}.txt").write_text(text)
    for number in range(3):
        (tmp_path / f"bad{number}.txt").write_bytes(b"\xe4\xf6\xfc" * 20)
    with caplog.at_level(logging.INFO, logger="meshd.data"):
        facts = build_dataset(spec(tmp_path), tokenizer, tmp_path / "out")
    assert facts.unreadable == 3
    assert [r.getMessage() for r in caplog.records if "not UTF-8" in r.getMessage()] == [
        f"text that is not UTF-8: 3 documents left out, 0 kept with their few bad bytes replaced; the first bad byte "
        f"is at {tmp_path}/bad0.txt, byte 0"
    ]


def test_a_folder_that_cannot_be_written(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ResourceError, match="cannot write the tokenized corpus"):
        build_dataset(spec(corpus(tmp_path, documents(40))), tokenizer, tmp_path / "out")


def test_a_missing_or_spoilt_data_set_is_named(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"facts\.json cannot be used"):
        Dataset.open(tmp_path)
    out = tmp_path / "out"
    build_dataset(spec(corpus(tmp_path, documents(40))), tokenizer, out)
    facts = json.loads((out / "facts.json").read_text())
    facts["seq_len"] = T - 1
    (out / "facts.json").write_text(json.dumps(facts))
    with pytest.raises(DataError, match=r"train\.safetensors does not fit its facts\.json"):
        Dataset.open(out)
    facts["seq_len"] = T
    (out / "facts.json").write_text(json.dumps(facts))
    Dataset.open(out)
    (out / "held_out.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(DataError, match=r"held_out\.safetensors is no tokenized corpus"):
        Dataset.open(out)


def test_a_stream_over_a_data_set(tmp_path: Path, tokenizer: Any) -> None:
    build_dataset(spec(corpus(tmp_path, documents(40))), tokenizer, tmp_path / "out")
    dataset = Dataset.open(tmp_path / "out")
    stream = TokenStream(dataset, 3, seed=1)
    seen = {
        tuple(row) for _ in range(-(-dataset.train_windows // 3)) for row in stream.next()[1].tokens.tolist()
    }
    assert seen == {tuple(row) for row in all_train(dataset).tokens.tolist()}
