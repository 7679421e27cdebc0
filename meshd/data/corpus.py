"""Documents and rows out of the sources of a run spec.

What counts as a document: a row of a jsonl file or data set; a plain file; of a larger plain file each piece
of some KB (`meshd.data.pieces`), so that a split by document has something to split.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from meshd.data.pieces import pieces
from meshd.data.sources import FileSource, HubSource, expand
from meshd.errors import DataError

# A line of JSON longer than this is not a row but a mistake, or an attempt on our memory.
LONGEST_ROW_BYTES = 64 << 20


@dataclass(frozen=True)
class Row:
    """One JSON object. origin: `FILE:LINE` or `hf:NAME row N`, for messages."""

    fields: dict[str, Any]
    origin: str


@dataclass
class CorpusReport:
    """What was read and what was wrong with it. Counts are of documents, or of lines in jsonl files."""

    read: int = 0
    repaired: int = 0
    unreadable: int = 0
    first_bad: str | None = field(default=None)

    def summary(self) -> str:
        """One sentence, empty when nothing was wrong."""
        if not self.first_bad:
            return ""
        return (
            f"text that is not UTF-8: {self.unreadable} documents left out, {self.repaired} kept with their few bad "
            f"bytes replaced; the first bad byte is at {self.first_bad}"
        )


class Corpus:
    """The sources of one run spec, to be iterated once. `report` is complete after the iteration."""

    def __init__(self, sources: list[str]) -> None:
        self._sources = expand(sources)
        self.report = CorpusReport()

    def documents(self, text_field: str) -> Iterator[str]:
        """Texts in a fixed order, without the empty ones.

        Raises DataError when a row lacks `text_field` or is no JSON, and at the end when there was no text at all.
        """
        for source in self._sources:
            if isinstance(source, FileSource) and not source.rows:
                texts = self._plain(source)
            else:
                texts = (_text(row, text_field) for row in self._source_rows(source))
            for text in texts:
                if text.strip():
                    self.report.read += 1
                    yield text
        self._refuse_nothing("text")

    def rows(self) -> Iterator[Row]:
        """JSON rows in a fixed order. Raises DataError when a source is no jsonl, and when there was no row."""
        for source in self._sources:
            if isinstance(source, FileSource) and not source.rows:
                raise DataError(
                    f"data.kind = 'sft' needs rows of JSON, and {source.path} is plain text. Fix: name .jsonl files, "
                    "or set data.kind = 'text'"
                )
            for row in self._source_rows(source):
                self.report.read += 1
                yield row
        self._refuse_nothing("row")

    def _refuse_nothing(self, what: str) -> None:
        if self.report.read:
            return
        if self.report.first_bad:
            raise DataError(
                f"data.sources: nothing readable. The first byte that is not UTF-8 text is at "
                f"{self.report.first_bad}. Fix: convert the files, e.g. iconv -f LATIN1 -t UTF-8"
            )
        raise DataError(f"data.sources: no {what} in them. Fix: name files that are not empty")

    def _plain(self, source: FileSource) -> Iterator[str]:
        with source.open() as stream:
            for offset, piece in pieces(stream):
                text = self._decode(piece, f"{source.path}, byte ", offset)
                if text is not None:
                    yield text

    def _source_rows(self, source: FileSource | HubSource) -> Iterator[Row]:
        if isinstance(source, HubSource):
            for number, fields in enumerate(source.rows()):
                yield Row(fields, f"hf:{source.name} row {number}")
            return
        with source.open() as stream:
            number = offset = 0
            while line := stream.readline(LONGEST_ROW_BYTES):
                number += 1
                origin = f"{source.path}:{number}"
                text = self._decode(line, f"{origin}, byte ", offset) if line.strip() else None
                offset += len(line)
                if text is not None:
                    yield Row(_parse(text, origin), origin)

    def _decode(self, data: bytes, where: str, offset: int) -> str | None:
        """Text of one document; None when it is not text. A few bad bytes (one in a thousand) are replaced."""
        nul = data.find(b"\0")
        if nul < 0:
            try:
                return data.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                bad_at = error.start
        else:
            bad_at = nul  # binary, or UTF-16
        self.report.first_bad = self.report.first_bad or f"{where}{offset + bad_at}"
        if nul < 0:
            text = data.decode("utf-8-sig", errors="replace")
            bad = text.count("\ufffd") - data.count("\ufffd".encode())
            if bad <= max(1, len(data) // 1000):
                self.report.repaired += 1
                return text
        self.report.unreadable += 1
        return None


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise DataError(f"{origin}: not JSON ({error}). Fix: one JSON object per line") from error
    if not isinstance(fields, dict):
        raise DataError(f"{origin}: a {type(fields).__name__}, not an object. Fix: one JSON object per line")
    return fields


def _text(row: Row, text_field: str) -> str:
    value = row.fields.get(text_field)
    if not isinstance(value, str):
        has = ", ".join(sorted(map(str, row.fields))) or "none"
        raise DataError(
            f"{row.origin}: no text in the field {text_field!r} (fields: {has}). Fix: set data.text_field"
        )
    return value
