"""Plain text out of the formats that known corpora come in: manual pages, OBO ontologies, a wrapped text book."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

# ---- manual pages --------------------------------------------------------------------------------------------------

_FONT_OR_SIZE = re.compile(
    r"\\(?:f(?:\[[^]]*\]|\(..|.)|s(?:\[[^]]*\]|[-+]?\d)|[mMhvwlLDo](?:\[[^]]*\]|'[^']*')|k.)"
)
_NAMED = re.compile(r"\\(?:\[([^]]*)\]|\((..)|\*(?:\[[^]]*\]|\(..|.))")
_CHARACTERS = {
    "aq": "'", "dq": '"', "cq": "’", "oq": "‘", "lq": "“", "rq": "”", "em": "—", "en": "–", "hy": "-", "bu": "•",
    "co": "©", "ti": "~", "ha": "^", "rs": "\\", "mu": "×", "->": "→", "<-": "←", ">=": "≥", "<=": "≤", "ga": "`",
    "Fo": "«", "Fc": "»", "ss": "ß", ":a": "ä", ":o": "ö", ":u": "ü", ":A": "Ä", ":O": "Ö", ":U": "Ü", "mi": "-",
}  # fmt: skip
_ONE_CHARACTER = {"-": "-", "e": "\\", "~": " ", " ": " ", "0": " ", "'": "'", "`": "`", ".": "."}
_ESCAPE = re.compile(r"\\(.)?")
_ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|(\S+)')
_SPACED = {"B", "I", "SM", "SB", "IP", "OP", "UR", "MT", "UE", "ME"}
_ALTERNATING = {"BR", "BI", "IR", "IB", "RB", "RI"}
_BREAKS = {"PP", "P", "LP", "TP", "TQ", "HP", "RS", "RE", "br", "sp", "YS", "SY"}
_SKIPPED_SECTIONS = {"ÜBERSETZUNG", "TRANSLATION"}


def strip_man(path: Path) -> str:
    """Text of one gzipped page written with the `man` macros: headings and paragraphs, one paragraph a line.

    Tables, comments and the translators' closing section are left out. Empty for a page of another macro set.
    """
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as stream:
        source = stream.read()
    if not re.search(r"^\.TH\b", source, re.MULTILINE):
        return ""
    page = _Page()
    for line in source.split("\n"):
        page.feed(line)
    return page.text()


class _Page:
    """Collects one page line by line: open paragraph, finished paragraphs, and which parts are skipped."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._open: list[str] = []
        self._until: str | None = None  # a request whose end we wait for: a macro definition, a table
        self._verbatim = False
        self._skip_section = False

    def text(self) -> str:
        self._close()
        return "\n".join(self._done)

    def feed(self, line: str) -> None:
        if self._until is not None:
            if line.startswith(self._until):
                self._until = None
            return
        if line.startswith((".", "'")):
            self._request(line)
        elif not self._skip_section:
            self._words(unescape(line))

    def _request(self, line: str) -> None:
        name, _, rest = line[1:].strip().partition(" ")
        if name in {"de", "de1", "am", "ig"}:
            self._until = ".."
        elif name == "TS":
            self._until = ".TE"
        elif name in {"SH", "SS"}:
            self._close()
            heading = " ".join(_arguments(rest))
            if name == "SH":
                self._skip_section = heading in _SKIPPED_SECTIONS
            if not self._skip_section:
                self._done += ["", heading]
        elif name in _BREAKS:
            self._close()
        elif name in {"nf", "EX", "fi", "EE"}:
            self._close()
            self._verbatim = name in {"nf", "EX"}
        elif self._skip_section:
            return
        elif name in _SPACED:
            if name == "IP":
                self._close()
            arguments = _arguments(rest)
            # The second argument of .IP is an indent.
            self._words(" ".join(arguments[:1] if name == "IP" else arguments))
        elif name in _ALTERNATING:
            self._words("".join(_arguments(rest)))

    def _words(self, text: str) -> None:
        if not text.strip():
            self._close()
            return
        self._open.append(text if self._verbatim else text.strip())
        if self._verbatim:
            self._close()

    def _close(self) -> None:
        if self._open:
            self._done.append(" ".join(self._open).rstrip())
        self._open = []


def unescape(text: str) -> str:
    r"""Resolve roff escapes: `\fB`, `\-`, `\(aq`, `\[u2026]`; what has no text disappears; `\"` begins a comment."""
    text = text.split('\\"', 1)[0]
    text = _FONT_OR_SIZE.sub("", text)
    text = _NAMED.sub(lambda m: _character(m.group(1) or m.group(2) or ""), text)
    return _ESCAPE.sub(lambda m: _ONE_CHARACTER.get(m.group(1) or "", ""), text)


def _character(name: str) -> str:
    if re.fullmatch(r"u[0-9A-F]{4,5}", name):
        return chr(int(name[1:], 16))
    return _CHARACTERS.get(name, "")


def _arguments(text: str) -> list[str]:
    text = text.split('\\"', 1)[0]
    return [
        unescape(m.group(1).replace('""', '"') if m.group(1) is not None else m.group(2))
        for m in _ARGUMENT.finditer(text)
    ]


# ---- the Debian reference --------------------------------------------------------------------------------------------

_HEADING = re.compile(r"^\d+(?:\.\d+)+\. \S")
_RULE = re.compile(r"^-{20,}$|[|+]-{3,}|^\s*\|")


def reference_sections(path: Path) -> Iterator[str]:
    """Numbered sections of the book, paragraphs unwrapped; the table of contents and tables are left out."""
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as stream:
        lines = [line for line in stream.read().split("\n") if not _RULE.search(line)]
    section: list[str] = []
    for line in [*lines, "0.0. end"]:
        if _HEADING.match(line):
            if section and _HEADING.match(section[0]):
                yield "\n".join(_paragraphs(section))
            section = []
        section.append(line)


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    words: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            words.append(line.strip())
        elif words:
            yield " ".join(words)
            words = []


# ---- OBO -------------------------------------------------------------------------------------------------------------

_DEFINITION = re.compile(r'^def: "((?:[^"\\]|\\.)*)"', re.MULTILINE)
_NAME = re.compile(r"^name: (.+)$", re.MULTILINE)
_COMMENT = re.compile(r"^comment: (.+)$", re.MULTILINE)


def obo_terms(text: str) -> Iterator[str]:
    """Of each term that is in use and defined: name, definition and comment, one a line."""
    for stanza in text.split("\n\n"):
        name, definition = _NAME.search(stanza), _DEFINITION.search(stanza)
        if stanza.startswith("[Term]") and name and definition and "\nis_obsolete: true" not in stanza:
            comment = _COMMENT.search(stanza)
            parts = [name.group(1), definition.group(1), comment.group(1) if comment else ""]
            yield "\n".join(re.sub(r"\\(.)", r"\1", part).strip() for part in parts if part)
