"""Supervised rows: only responses are learnt, prompts do not leak over the split, mistakes name their line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import CHATML, byte_tokenizer, write_jsonl

from meshd.config.runspec import DataSpec
from meshd.data.build import build_dataset
from meshd.data.dataset import Dataset, DatasetFacts
from meshd.data.microbatch import Microbatch
from meshd.errors import DataError

T = 48


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(chat_template=CHATML)


def build(
    folder: Path, rows: list[dict[str, Any]], tokenizer: Any, **changes: Any
) -> tuple[DatasetFacts, Dataset]:
    source = write_jsonl(folder / "rows.jsonl", rows)
    spec = DataSpec(**{"kind": "sft", "sources": [str(source)], "seq_len": T, "held_out": 0.3, **changes})
    facts = build_dataset(spec, tokenizer, folder / "out")
    return facts, Dataset.open(folder / "out")


def both_sides(dataset: Dataset) -> list[Microbatch]:
    held_out = dataset.held_out_windows
    return [
        dataset.train(np.arange(dataset.train_windows)),
        *dataset.held_out_batches(held_out, held_out),
    ]


def learnt(batch: Microbatch, tokenizer: Any) -> list[str]:
    """The text of the labels that count, row by row, `¦` for those that do not."""
    return [
        "".join(
            tokenizer.decode([token]) if counts else "¦" for token, counts in zip(labels, mask, strict=True)
        )
        for labels, mask in zip(batch.labels.tolist(), batch.label_mask.tolist(), strict=True)
    ]


def pairs(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"q{n:02}?", "response": f"a{n:02}!"} for n in range(count)]


def test_only_responses_and_their_end_are_learnt(tmp_path: Path, tokenizer: Any) -> None:
    facts, dataset = build(tmp_path, pairs(30), tokenizer)
    answers: list[str] = []
    for batch in both_sides(dataset):
        for row, text in zip(batch.tokens.tolist(), learnt(batch, tokenizer), strict=True):
            found = [part for part in text.split("¦") if part]
            answers += found
            # Rows are packed whole: each window reads question, answer, end, over and over, then padding.
            whole = tokenizer.decode(row)
            assert whole.startswith("".join(f"q{a[1:3]}?{a}" for a in found))
    assert sorted(answers) == [f"a{n:02}!</s>" for n in range(30)]
    assert facts.train.label_tokens + facts.held_out.label_tokens == 30 * 5
    assert facts.train.documents + facts.held_out.documents == 30


def test_packed_rows_can_be_kept_apart(tmp_path: Path, tokenizer: Any) -> None:
    _, dataset = build(tmp_path, pairs(30), tokenizer, packing="separate")
    for batch in both_sides(dataset):
        assert batch.document_starts is not None
        for row, starts in zip(batch.inputs.tolist(), batch.document_starts.tolist(), strict=True):
            text = [tokenizer.decode([token]) for token, begins in zip(row, starts, strict=True) if begins]
            assert set(text) == {"q"}


def test_chat_turns_of_the_assistant_are_learnt(tmp_path: Path, tokenizer: Any) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"u{n:02}"},
                {"role": "assistant", "content": f"x{n:02}"},
                {"role": "user", "content": "w"},
                {"role": "assistant", "content": f"y{n:02}"},
            ]
        }
        for n in range(20)
    ]
    _, dataset = build(tmp_path, rows, tokenizer, seq_len=128)
    found = [
        part for batch in both_sides(dataset) for text in learnt(batch, tokenizer) for part in text.split("¦")
    ]
    expected = [f"{turn}{n:02}<|im_end|>\n" for n in range(20) for turn in "xy"]
    assert sorted(part for part in found if part) == sorted(expected)


def test_one_prompt_with_many_answers_stays_on_one_side(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": f"q{n:02}?", "response": f"{k}"} for n in range(20) for k in range(4)]
    facts, dataset = build(tmp_path, rows, tokenizer)
    train, held_out = (
        {n for n in range(20) for row in batch.tokens.tolist() if f"q{n:02}?" in tokenizer.decode(row)}
        for batch in both_sides(dataset)
    )
    assert train.isdisjoint(held_out)
    assert len(train) + len(held_out) == 20
    assert facts.duplicates == 0


def test_long_rows_are_cut_at_the_right_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    rows = [
        *pairs(20),
        {"prompt": "long?", "response": "z" * 100},
        {"prompt": "p" * 100, "response": "never seen"},
    ]
    facts, dataset = build(tmp_path, rows, tokenizer)
    assert (facts.truncated, facts.without_labels) == (2, 1)
    texts = [text for batch in both_sides(dataset) for text in learnt(batch, tokenizer)]
    assert "¦" * 4 + "z" * (T - 4) in texts
    assert facts.train.documents + facts.held_out.documents == 21


def test_no_row_fits(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="shorter than one sequence"):
        build(tmp_path, [{"prompt": "p" * 100, "response": "x"}], tokenizer)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, r"rows\.jsonl:1: needs text in `prompt` and `response`.*\(fields: prompt\)"),
        ({"prompt": "x", "response": ""}, r"rows\.jsonl:1: the response is empty"),
        ({"messages": "x"}, r"rows\.jsonl:1: `messages` is no list"),
        ({"messages": [{"role": "user"}]}, r"rows\.jsonl:1: `messages` is no list"),
        ({"messages": []}, r"needs an assistant turn .*roles: none"),
        ({"messages": [{"role": "user", "content": "x"}]}, r"needs an assistant turn .*roles: user"),
        ({"messages": [{"role": "assistant", "content": "x"}] * 2}, r"needs an assistant turn after another"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, tokenizer: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build(tmp_path, [row], tokenizer)


CHAT = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}


def test_a_tokenizer_without_a_chat_template(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*no chat template\. Fix"):
        build(tmp_path, [CHAT], byte_tokenizer())


def test_a_template_that_refuses(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"refuses these messages \(roles must alternate\)"):
        build(tmp_path, [CHAT], byte_tokenizer(chat_template=template))


def test_a_template_that_rewrites_earlier_turns(tmp_path: Path) -> None:
    template = "{{ messages | length }}" + CHATML
    with pytest.raises(DataError, match="renders message 1 differently"):
        build(tmp_path, [CHAT], byte_tokenizer(chat_template=template))
