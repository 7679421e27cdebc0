"""The origin's journal: one line per injection and per end of a microbatch, so that a peer killed at any moment knows
at its next start what it had out and where its data stands (DESIGN section 2.5, case C25).

Lines: `I item`, `C sequence tokens`, `D sequence partial`, `K count` (so many of the committed ones are kept, see
`meshd.pipeline.keeping`), each ended by a newline; a last line without one was torn by the crash and is ignored. The
first line `B injected committed dropped partial tokens next_sequence next_item lost` carries the sums of what was
compacted away; `R item` lines after it name data that is to go out again.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import IO

from meshd.errors import DataError, ResourceError
from meshd.pipeline.ledger import Balance, LedgerError, OriginLedger


class Journal:
    """An OriginLedger whose every change is on disk before the call returns (in the page cache: it survives the
    process, not the machine's power).

    Opening it drops what was in flight when the last incarnation ended: nobody can answer it any more.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._torn = False
        self.ledger = _replay(path)
        for sequence in list(self.ledger.open_items):
            # Some stage may have added it: the origin that could have been told is gone.
            self.ledger.drop(sequence, partial=True)
        self.ledger.lose()
        self._file = self._compact()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._file.close()

    def inject(self, item: int) -> int:
        self._write(f"I {item}\n")
        return self.ledger.inject(item)

    def commit(self, sequence: int, tokens: int) -> None:
        self.ledger.commit(sequence, tokens)
        self._write(f"C {sequence} {tokens}\n")

    def drop(self, sequence: int, partial: bool) -> int:
        item = self.ledger.drop(sequence, partial)
        self._write(f"D {sequence} {int(partial)}\n")
        return item

    def keep(self, count: int) -> None:
        self.ledger.keep(count)
        self._write(f"K {count}\n")

    def _write(self, line: str) -> None:
        if self._torn:
            raise ResourceError(f"{self._path} broke off at an earlier error. Free space and start again")
        data = line.encode()
        # Until the whole line is there, the file may end in a part of it, and nothing may follow that.
        self._torn = True
        try:
            written = self._file.write(data)
        except OSError as error:
            raise ResourceError(f"cannot write {self._path}: {error}. Free space and start again") from error
        if written != len(data):
            raise ResourceError(f"cannot write {self._path}: the disk is full. Free space and start again")
        self._torn = False

    def _compact(self) -> IO[bytes]:
        """Rewrite as sums, so that the file does not grow over restarts."""
        ledger, b = self.ledger, self.ledger.balance()
        sums = (
            b.injected,
            b.committed,
            b.dropped,
            b.partial,
            b.tokens,
            ledger.next_sequence,
            ledger.next_item,
            b.lost_after_commit,
        )
        lines = ["B " + " ".join(map(str, sums))] + [f"R {item}" for item in ledger.returned]
        fresh = self._path.with_suffix(".new")
        try:
            with open(fresh, "wb") as file:
                file.write(("\n".join(lines) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, self._path)
            return open(self._path, "ab", buffering=0)
        except OSError as error:
            raise ResourceError(f"cannot write {self._path}: {error}. Check space and permissions") from error


def _replay(path: Path) -> OriginLedger:
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return OriginLedger()
    except OSError as error:
        raise ResourceError(f"cannot read {path}: {error}. Check permissions") from error
    ledger: OriginLedger | None = None
    # Its first line was written whole before the file got its name: without one it is no journal.
    for number, line in enumerate(lines or [b""], 1):
        try:
            kind, *fields = line.decode().split() or [""]
            values = [int(field) for field in fields]
            if min(values, default=0) < 0:
                raise ValueError("a number below zero")
            if ledger is None:
                ledger = _sums(kind, values)
            else:
                _apply(ledger, kind, values)
        except (ValueError, TypeError, LedgerError) as error:
            raise DataError(
                f"{path}, line {number}: {error}. Move the file away to start a new journal"
            ) from error
    assert ledger is not None
    return ledger


def _sums(kind: str, values: list[int]) -> OriginLedger:
    """The ledger as the first line has it. Raises ValueError."""
    if kind != "B":
        raise ValueError(f"kind {kind[:20]!r} where the sums `B` come first")
    injected, committed, dropped, partial, tokens, next_sequence, next_item, lost = values
    start = Balance(injected, committed, dropped, partial, 0, tokens, lost)
    if not start.holds:
        raise ValueError(f"{injected} injected, but {committed} committed and {dropped} dropped")
    return OriginLedger(start, next_sequence, next_item)


def _apply(ledger: OriginLedger, kind: str, values: list[int]) -> None:
    """Repeat one change. Raises ValueError, TypeError or LedgerError."""
    match kind:
        case "R":
            ledger.returned.append(*values)
        case "I":
            ledger.inject(*values)
        case "C":
            ledger.commit(*values)
        case "K":
            ledger.keep(*values)
        case "D":
            sequence, partial = values
            ledger.drop(sequence, bool(partial))
        case _:
            raise ValueError(f"unknown kind {kind[:20]!r}")
