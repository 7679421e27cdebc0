"""Sources to documents: order, kinds of files, bad bytes, and every mistake named with its fix."""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path
from types import ModuleType

import pytest
from data_helpers import write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.data.corpus import Corpus
from meshd.data.pieces import LONGEST_PIECE_BYTES, PIECE_BYTES, WHOLE_FILE_BYTES, pieces
from meshd.errors import DataError


def read(*sources: Path | str, text_field: str = "text") -> list[str]:
    return list(Corpus([str(source) for source in sources]).documents(text_field))


def test_directories_globs_and_files_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b/z.txt", "b/a.md", "a.txt", ".hidden/h.txt", "b/picture.png", "c.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    with gzip.open(tmp_path / "d.rst.gz", "wt") as stream:
        stream.write("d.rst.gz")
    write_jsonl(tmp_path / "e.jsonl", [{"text": "row 1"}, {"text": " \n"}, {"text": "row 2"}])
    assert read(tmp_path) == ["a.txt", "b/a.md", "b/z.txt", "d.rst.gz", "row 1", "row 2"]
    assert read(tmp_path / "*.log", tmp_path / "b", tmp_path / "**" / "*.txt") == [
        "c.log",
        "b/a.md",
        "b/z.txt",
        "a.txt",
    ]
    assert read(tmp_path / "a.txt", tmp_path / "a.txt") == ["a.txt"]


def test_a_large_plain_file_becomes_documents_at_blank_lines(tmp_path: Path) -> None:
    paragraphs = [f"paragraph {n}: " + "word " * 100 for n in range(200)]
    text = "\n\n".join(paragraphs)
    path = tmp_path / "book.txt"
    path.write_text(text)
    found = read(path)
    assert "".join(found) == text
    assert len(found) > 15
    assert all(document.endswith("\n\n") and len(document) >= PIECE_BYTES for document in found[:-1])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["wörd ", "\n", "\n\n", "\r\n\r\n", "x" * 9000, "€" * 30_000]), max_size=40))
def test_pieces_lose_nothing_and_are_bounded(parts: list[str]) -> None:
    data = "".join(parts).encode()
    found = list(pieces(io.BytesIO(data)))
    assert b"".join(piece for _, piece in found) == data
    assert [offset for offset, _ in found] == [sum(len(p) for _, p in found[:n]) for n in range(len(found))]
    assert len(found) <= 1 or all(len(piece) <= LONGEST_PIECE_BYTES for _, piece in found)
    assert len(data) > WHOLE_FILE_BYTES or len(found) <= 1
    for _, piece in found:
        piece.decode()


def test_a_few_bad_bytes_are_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 3000 + b"\xff" + b"y" * 3000 + "�".encode())
    (tmp_path / "b.txt").write_bytes("Größe und Länge".encode("latin-1") * 5)
    (tmp_path / "c.txt").write_text("fine")
    corpus = Corpus([str(tmp_path)])
    assert [text[2999:3002] for text in corpus.documents("text")] == ["x�y", ""]
    assert (corpus.report.read, corpus.report.repaired, corpus.report.unreadable) == (2, 1, 1)
    assert f"{tmp_path}/a.txt, byte 3000" in corpus.report.summary()


def test_bad_bytes_in_a_row_are_found_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": "' + b"\xe4\xf6" * 20 + b'"}\n')
    corpus = Corpus([str(path)])
    assert list(corpus.documents("text")) == ["one"]
    assert corpus.report.first_bad == f"{path}:2, byte 26"


@pytest.mark.parametrize(
    ("content", "byte"),
    [("Größe ".encode("latin-1") * 50, 2), ("word ".encode("utf-16-le"), 1), (b"ab\0\1\2", 2)],
)
def test_nothing_readable_names_the_first_bad_byte(tmp_path: Path, content: bytes, byte: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.txt, byte {byte}.*iconv"):
        read(path)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfword")
    assert read(tmp_path / "a.txt") == ["word"]


def test_missing_sources_say_what_to_write(tmp_path: Path) -> None:
    for source, message in (
        (tmp_path / "none.txt", "does not exist"),
        (tmp_path / "*.txt", "no file matches"),
        (tmp_path, "holds no text file"),
        ("hf:", "names no data set"),
        ("packaged:nothing", "packaged:biomedical"),
    ):
        with pytest.raises(DataError, match=message):
            read(source)


def test_empty_sources_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" \n ")
    with pytest.raises(DataError, match="no text in them"):
        read(tmp_path / "a.txt")


def test_a_broken_gzip_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"word " * 1000)[:-10])
    with pytest.raises(DataError, match=r"cannot read .*a\.txt\.gz"):
        read(tmp_path / "a.txt.gz")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x"}', r"rows\.jsonl:2: no text in the field 'text' \(fields: body\).*data\.text_field"),
        ('{"text": 3}', r"rows\.jsonl:2: no text"),
        ("{text: x}", r"rows\.jsonl:2: not JSON"),
        ("[1]", r"rows\.jsonl:2: a list, not an object"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        read(path)


def test_another_text_field(tmp_path: Path) -> None:
    assert read(write_jsonl(tmp_path / "a.jsonl", [{"body": "x"}]), text_field="body") == ["x"]


def test_plain_text_is_no_sft(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word")
    with pytest.raises(DataError, match=r"data\.kind = 'sft'.*a\.txt"):
        list(Corpus([str(tmp_path)]).rows())


def test_hub_rows_and_their_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, str]]:
        calls.append((name, config, split))
        if config == "gone":
            raise ConnectionError("no route to the hub\nmore")
        return [{"text": "one"}, {"text": "two"}]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert read("hf:org/name:config") == ["one", "two"]
    assert calls == [("org/name", "config", "train")]
    with pytest.raises(DataError, match=r"cannot get hf:org/name .*no route to the hub\. Fix"):
        read("hf:org/name:gone")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'meshd\[datasets\]'"):
        read("hf:org/name")
