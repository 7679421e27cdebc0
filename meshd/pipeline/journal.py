"""The origin's journal: one line per injection and per end of a microbatch, so that a peer killed at any moment knows
at its next start what it had out and where its data stands (DESIGN section 2.5, case C25).

Lines: `I item`, `C sequence tokens`, `D sequence partial`, `K count` (so many of the committed ones are kept, see
`meshd.pipeline.keeping`), each ended by a newline; a last line without one was torn by the crash and is ignored. The
first line `B injected committed dropped partial tokens next_sequence next_item lost` carries the sums of what was
compacted away. Behind it, in any number: `R item`, data that is to go out again; `O sequence item`, injected beyond
those sums and still out; `U count`, so many of the committed ones are not kept.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO

from meshd.errors import DataError, ResourceError
from meshd.observe.log import event
from meshd.pipeline.ledger import Balance, LedgerError, OriginLedger
from meshd.state.disk import FULL, write_synced

log = logging.getLogger(__name__)

# So many lines and the file is compacted: it holds a day's work of one start otherwise, and the next has to read it.
_MOST_LINES = 1 << 16
# Between tries to write a file that lacks something.
_RETRY_S = 1.0


class Journal:
    """An OriginLedger whose every change is on disk before the call returns (in the page cache: it survives the
    process, not the machine's power).

    On a full disk the work goes on with what is in memory, which `problem` says. Changes try anew to write the whole as
    sums, in place of a file that lacks something, so no more is kept than the ledger itself; once a second at most, for
    that waits for the disk. So does the compaction, on the caller's event loop: once in 65536 changes, for the time
    that a disk takes to sync a few kilobytes. Unsynced, a file that the power left empty would stop the next start.

    Opening it drops what was in flight when the last incarnation ended: nobody can answer it any more.
    """

    def __init__(self, path: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        """monotonic: source of time, seconds. Raises DataError for a file that does not read, ResourceError for one
        that may not be read or written."""
        self._path, self._monotonic = path, monotonic
        self._file: IO[bytes] | None = None
        self._lines = 0
        self._retry_at = 0.0
        self.problem = ""
        """Why the file lacks the last changes; empty when it has all."""
        self.ledger = _replay(path)
        for sequence in list(self.ledger.open_items):
            # Some stage may have added it: the origin that could have been told is gone.
            self.ledger.drop(sequence, partial=True)
        self.ledger.lose()
        try:
            self._compact()
        except OSError as error:
            if error.errno not in FULL:
                raise ResourceError(
                    f"cannot write {self._path}: {error}. Check space and permissions"
                ) from error
            self._lacks(str(error))

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self.problem:
            self._catch_up()
        if self._file is not None:
            self._file.close()

    def inject(self, item: int) -> int:
        sequence = self.ledger.inject(item)
        self._write(f"I {item}\n")
        return sequence

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
        """The ledger has changed: note it. Never raises."""
        if self.problem:
            if self._monotonic() >= self._retry_at:
                self._catch_up()
            return
        data = line.encode()
        try:
            assert self._file is not None
            written = self._file.write(data)
        except OSError as error:
            self._lacks(str(error))
            return
        if written != len(data):
            # The file ends in a part of a line: nothing may follow that.
            self._lacks("no space left on the disk")
            return
        self._lines += 1
        if self._lines >= _MOST_LINES:
            self._lines = 0
            try:
                self._compact()
            except OSError as error:
                event(log, "journal_not_compacted", level=logging.WARNING, reason=str(error))

    def _lacks(self, reason: str) -> None:
        self.problem = (
            f"cannot write {self._path}: {reason}. Training goes on; killed now, this peer would train on some of its "
            "data again and count it anew. Fix: free space there"
        )
        self._retry_at = self._monotonic() + _RETRY_S
        event(log, "journal_not_written", level=logging.ERROR, reason=self.problem)

    def _catch_up(self) -> None:
        try:
            self._compact()
        except OSError:
            self._retry_at = self._monotonic() + _RETRY_S
            return
        self.problem = ""
        event(log, "journal_written_again", path=self._path)

    def _compact(self) -> None:
        """Rewrite as sums, and go on behind them. Raises OSError; then the file is what it was."""
        fresh = self._path.with_suffix(".new")
        write_synced(fresh, _sums_of(self.ledger).encode())
        following = open(fresh, "ab", buffering=0)  # noqa: SIM115 (closed with the journal)
        try:
            os.replace(fresh, self._path)
        except OSError:
            following.close()
            raise
        if self._file is not None:
            self._file.close()
        self._file = following


def _sums_of(ledger: OriginLedger) -> str:
    b = ledger.balance()
    sums = (
        b.injected - b.in_flight,
        b.committed,
        b.dropped,
        b.partial,
        b.tokens,
        ledger.next_sequence,
        ledger.next_item,
        b.lost_after_commit,
    )
    lines = ["B " + " ".join(map(str, sums))]
    lines += [f"R {item}" for item in ledger.returned]
    lines += [f"O {sequence} {item}" for sequence, item in ledger.open_items.items()]
    lines += [f"U {ledger.unkept}"] if ledger.unkept else []
    return "\n".join(lines) + "\n"


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
        case "O":
            ledger.reopen(*values)
        case "U":
            (ledger.unkept,) = values
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
