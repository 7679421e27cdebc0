"""From the names in `data.sources` to bytes: files, directories, globs, known corpora, Hugging Face data sets.

The order is that of the sources, and within one source that of the sorted paths, so that the same files always give
the same corpus.
"""

from __future__ import annotations

import glob
import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from meshd.data.known import PREFIX, known_corpus
from meshd.errors import DataError

# What a directory is searched for. A file or glob that is named outright may have any suffix.
TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex", ".py"})
ROW_SUFFIXES = frozenset({".jsonl", ".ndjson"})


@dataclass(frozen=True)
class FileSource:
    """One file. `rows`: one JSON object per line; else plain text."""

    path: Path
    rows: bool

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Its bytes, decompressed. Raises DataError when it cannot be read to its end."""
        try:
            if self.path.suffix == ".gz":
                with gzip.open(self.path, "rb") as stream:
                    yield cast(BinaryIO, stream)
            else:
                with self.path.open("rb") as stream:
                    yield stream
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"data.sources: cannot read {self.path} ({error}). "
                "Fix: make it readable and whole, or take it out of the sources"
            ) from error


@dataclass(frozen=True)
class HubSource:
    """A Hugging Face data set, its `train` split."""

    name: str
    config: str | None

    def rows(self) -> Iterator[dict[str, Any]]:
        """Its rows in order. Raises DataError when `datasets` is missing or the data set cannot be had."""
        try:
            import datasets
        except ImportError as error:
            raise DataError(
                f"data.sources: hf:{self.name} needs the package `datasets`. Fix: pip install 'meshd[datasets]'"
            ) from error
        try:
            rows = datasets.load_dataset(self.name, self.config, split="train")
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DataError(
                f"data.sources: cannot get hf:{self.name} from the Hugging Face hub: {reason}. Fix: check the name, "
                "the configuration (hf:NAME:CONFIG) and the network, or download it once and name the files"
            ) from error
        for row in rows:
            yield dict(row)


Source = FileSource | HubSource


def expand(sources: list[str]) -> list[Source]:
    """Every file and data set that `data.sources` names, each file once.

    Raises DataError when a source does not exist, matches nothing, or holds no file of a known kind.
    """
    found: list[Source] = []
    seen: set[Path] = set()
    for source in sources:
        if source.startswith("hf:"):
            found.append(_hub(source))
            continue
        for path in _paths(source):
            resolved = path.resolve()
            if resolved not in seen:
                seen.add(resolved)
                found.append(FileSource(path, _kind_suffix(path) in ROW_SUFFIXES))
    return found


def _hub(source: str) -> HubSource:
    name, _, config = source.removeprefix("hf:").partition(":")
    if not name:
        raise DataError(f"data.sources: {source!r} names no data set. Fix: write hf:NAME or hf:NAME:CONFIG")
    return HubSource(name, config or None)


def _paths(source: str) -> list[Path]:
    if source.startswith(PREFIX):
        return [known_corpus(source)]
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        paths = _walk(path)
        if not paths:
            kinds = " ".join(sorted(TEXT_SUFFIXES | ROW_SUFFIXES))
            raise DataError(
                f"data.sources: the directory {path} holds no text file. Fix: put files of these kinds into it "
                f"({kinds}, each also .gz), or name others by a glob such as {path}/*.log"
            )
        return paths
    if any(character in source for character in "*?["):
        paths = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
        if not paths:
            raise DataError(
                f"data.sources: no file matches {source!r}. Fix: correct the glob (** for any depth)"
            )
        return paths
    raise DataError(
        f"data.sources: {source!r} does not exist (looked in {Path.cwd()}). Fix: name a file, a directory, a glob, "
        f"hf:NAME, or a known corpus ({PREFIX}NAME)"
    )


def _walk(root: Path) -> list[Path]:
    """Text files below `root`, hidden ones left out, sorted by path."""

    def refuse(error: OSError) -> None:
        raise DataError(
            f"data.sources: cannot list {error.filename} ({error.strerror}). Fix: make it readable"
        )

    paths = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(folder) / name for name in files if not name.startswith(".")]
    return sorted(
        path for path in paths if _kind_suffix(path) in TEXT_SUFFIXES | ROW_SUFFIXES and path.is_file()
    )


def _kind_suffix(path: Path) -> str:
    """`.jsonl` for both `a.jsonl` and `a.jsonl.gz`."""
    return Path(path.stem if path.suffix == ".gz" else path.name).suffix.lower()
