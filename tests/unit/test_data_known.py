"""Known corpora: the cache, failing downloads, and text out of each format."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshd.data import known
from meshd.data.corpus import Corpus
from meshd.data.known import CorpusUnavailable, KnownCorpus, known_corpus, without_repeats
from meshd.data.markup import obo_terms, reference_sections, strip_man, unescape
from meshd.errors import DataError, ResourceError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def test_a_corpus_is_built_once_and_says_where_it_comes_from(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []

    def build(work: Path) -> Iterator[str]:
        built.append(work)
        (work / "download").write_text("x")
        yield from ("Größe", "two\nlines")

    monkeypatch.setitem(known.KNOWN, "toy", KnownCorpus("toy", "A toy.", "CC0", build))
    for _ in range(2):
        assert list(Corpus(["packaged:toy"]).documents("text")) == ["Größe", "two\nlines"]
    assert len(built) == 1
    assert sorted(path.name for path in (cache / "toy").iterdir()) == ["ORIGIN.txt", "documents.jsonl"]
    assert "Licence: CC0" in (cache / "toy" / "ORIGIN.txt").read_text()


def test_a_failed_build_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(work: Path) -> Iterator[str]:
        yield "one"
        known._run("toy", [sys.executable, "-c", "import sys; sys.exit('no route to host')"], work)

    monkeypatch.setitem(known.KNOWN, "toy", KnownCorpus("toy", "A toy.", "CC0", build))
    with pytest.raises(
        CorpusUnavailable, match=r"packaged:toy: .* failed: no route to host.*packaged:python-docs"
    ):
        known_corpus("packaged:toy")
    assert list((cache / "toy").iterdir()) == []


def test_a_machine_without_the_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CorpusUnavailable, match=r"needs `apt-get`"):
        known_corpus("packaged:manpages-de")


def test_a_tool_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(CorpusUnavailable, match=r"failed: .*No such file"):
        known._run("toy", [str(tmp_path / "none")], tmp_path)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MESHD_CACHE", str(tmp_path / "file"))
    with pytest.raises(ResourceError, match="set MESHD_CACHE"):
        known_corpus("packaged:python-docs")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match="packaged:biomedical, packaged:manpages-de, packaged:python-docs"):
        known_corpus("packaged:other")


def test_python_sources_need_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "lib"
    for name in ("a.py", "test/b.py", "json/c.py", "site-packages/d.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f'"""{name}"""\n')
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    documents = [json.loads(line)["text"] for line in known_corpus("packaged:python-docs").open()]
    assert documents == ['"""a.py"""\n', '"""json/c.py"""\n']


def test_repeated_long_lines_stay_where_they_come_first() -> None:
    line = "this line is certainly longer than forty characters"
    own = ["own words of document %d " % n * 12 for n in range(2)]  # noqa: UP031
    first, second = without_repeats(f"{text}\n{line}\n{line}\nshort" for text in own)
    assert first == f"{own[0]}\n{line}\nshort"
    assert second == f"{own[1]}\nshort"
    assert list(without_repeats([own[0], own[0]])) == [own[0].strip()]


MAN = r""".\" comment
.TH LS 1 "September 2022" "GNU"
.de XX
hidden
..
.SH BEZEICHNUNG
ls \- Verzeichnis\%inhalte auflisten
.SH "ÜBERSICHT"
\fBls\fP [\fI\,OPTION\/\fP]…
.PP
Zwei Zeilen
ein \f[B]Absatz\f[R].  \" comment
.BR ls (1),
.B \-\-all
.TS
table
.TE
.IP \(bu 4
Punkt \(aqa\(aq \[u2026]
.nf
code   1
code   2
.fi
.SH ÜBERSETZUNG
Die deutsche Übersetzung wurde von
.MT x@example.org
"""


def test_manual_pages_become_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "ls.1.gz"
    path.write_bytes(gzip.compress(MAN.encode()))
    assert strip_man(path).split("\n") == [
        "",
        "BEZEICHNUNG",
        "ls - Verzeichnisinhalte auflisten",
        "",
        "ÜBERSICHT",
        "ls [OPTION]…",
        "Zwei Zeilen ein Absatz. ls(1), --all",
        "• Punkt 'a' …",
        "code   1",
        "code   2",
    ]
    path.write_bytes(gzip.compress(b".Dd today\n.Sh NAME\n"))
    assert strip_man(path) == ""


def test_escapes() -> None:
    assert unescape(r"\s-1GNU\s0 \m[blue]x\m[] a\e\~b \(lqq\(rq \*(Aq\&.") == "GNU x a\\ b “q” ."


def test_terms_in_use_with_a_definition() -> None:
    text = """format-version: 1.2

[Term]
id: 1
name: Kidney cyst
def: "A \\"cyst\\" of the kidney." [x]
comment: Seen early.

[Term]
name: No definition

[Term]
name: Old
def: "Gone." []
is_obsolete: true

[Typedef]
name: part
def: "x" []
"""
    assert list(obo_terms(text)) == ['Kidney cyst\nA "cyst" of the kidney.\nSeen early.']


def test_sections_of_a_wrapped_book(tmp_path: Path) -> None:
    path = tmp_path / "book.txt.gz"
    text = "Title\n\n    1.1. Contents\n\n1.1. Eins\n\n    Ein\n    Absatz\n\n    |---+---|\n    | a | b |\n"
    text += "\n1.2. Zwei\n\n    x\n"
    path.write_bytes(gzip.compress(text.encode()))
    assert list(reference_sections(path)) == ["1.1. Eins\nEin Absatz", "1.2. Zwei\nx"]
