"""Cutting one long text into documents of some KB."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

WHOLE_FILE_BYTES = 32 << 10
PIECE_BYTES = 4 << 10
# Where no blank line comes, a piece ends at the next line end, and at this size in any case.
LONGEST_PIECE_BYTES = 64 << 10
READ_BYTES = 1 << 20
_BLANK_LINE = re.compile(rb"\r?\n[ \t]*\r?\n")


def pieces(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Cut plain text into documents: (offset in bytes, bytes), without loss, with bounded memory."""
    buffer, offset, whole = b"", 0, True
    at_end = False
    while not at_end:
        block = stream.read(READ_BYTES)
        at_end = not block
        buffer += block
        if whole and at_end and len(buffer) <= WHOLE_FILE_BYTES:
            break
        whole = whole and not at_end and len(buffer) <= WHOLE_FILE_BYTES
        start = 0
        while not whole and (end := _cut(buffer, start, at_end)):
            yield offset + start, buffer[start:end]
            start = end
        buffer, offset = buffer[start:], offset + start
    if buffer:
        yield offset, buffer


def _cut(buffer: bytes, start: int, at_end: bool) -> int:
    """End of the piece that begins at `start`; 0 when more has to be read, or the rest is one piece."""
    if len(buffer) - start < 2 * PIECE_BYTES and at_end:
        return 0  # no crumb at the end of a file
    blank = _BLANK_LINE.search(buffer, start + PIECE_BYTES, start + LONGEST_PIECE_BYTES)
    if blank:
        return blank.end()
    if len(buffer) - start < LONGEST_PIECE_BYTES:
        return 0
    line = buffer.rfind(b"\n", start, start + LONGEST_PIECE_BYTES)
    if line >= start:
        return line + 1
    end = start + LONGEST_PIECE_BYTES
    while end > start + 1 and buffer[end - 1] & 0xC0 == 0x80:
        end -= 1  # not inside a character: back to its first byte
    return end - 1 if buffer[end - 1] >= 0xC0 else end
