"""The ledger's invariant and the journal's promise: whatever the moment of a crash, the books balance and no item is
lost or counted twice (C22, C25)."""

from __future__ import annotations

import errno
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manual_clock import ManualClock

from meshd.errors import DataError, ResourceError
from meshd.pipeline import journal as journal_module
from meshd.pipeline.journal import Journal
from meshd.pipeline.ledger import Balance, LedgerError, OriginLedger, SeenAttempts

# ---- ledger ------------------------------------------------------------------------------------------------


def test_every_microbatch_is_accounted_for_once() -> None:
    ledger = OriginLedger()
    assert [ledger.inject(item) for item in (0, 1, 2)] == [0, 1, 2]
    ledger.commit(1, 64)
    assert ledger.drop(0, partial=True) == 0
    assert ledger.balance() == Balance(3, 1, 1, 1, 1, 64, 0)
    assert ledger.balance().holds
    assert ledger.returned == [0]
    assert ledger.inject(0) == 3
    assert (ledger.returned, ledger.next_item, ledger.next_sequence) == ([], 3, 4)


@pytest.mark.parametrize("again", [lambda ledger: ledger.commit(0, 1), lambda ledger: ledger.drop(0, False)])
def test_the_same_microbatch_cannot_end_twice(again) -> None:
    ledger = OriginLedger()
    ledger.inject(0)
    ledger.commit(0, 1)
    with pytest.raises(LedgerError, match="microbatch 0 is not in flight"):
        again(ledger)
    assert ledger.balance() == Balance(1, 1, 0, 0, 0, 1, 0)


def test_an_attempt_is_taken_once_until_it_is_forgotten_and_memory_is_bounded() -> None:
    seen = SeenAttempts(capacity=3)
    assert seen.first_time(("a", 1, 0, 1))
    assert not seen.first_time(("a", 1, 0, 1))
    assert seen.first_time(("a", 1, 7, 1))  # another attempt
    assert seen.first_time(("a", 1, 0, 2))  # another hop
    assert seen.first_time(("b", 1, 0, 1))  # pushes the oldest out
    assert seen.first_time(("a", 1, 0, 1))
    assert not seen.first_time(("b", 1, 0, 1))


# ---- journal -----------------------------------------------------------------------------------------------

# What an origin does: draw data (given back items first), or end the oldest or newest of what is in flight.
actions = st.lists(
    st.one_of(
        st.just(("inject",)),
        st.tuples(st.just("commit"), st.booleans(), st.integers(1, 999)),
        st.tuples(st.just("drop"), st.booleans(), st.booleans()),
    ),
    max_size=25,
)


class Origin:
    """A journal with what its user saw: the items whose commit returned, and the file's size when it did."""

    def __init__(self, path: Path) -> None:
        self.path, self.journal = path, Journal(path)
        self.committed: list[tuple[int, int, int]] = []  # (item, tokens, file size once it was on disk)

    def act(self, action: tuple) -> None:
        ledger = self.journal.ledger
        if action[0] == "inject":
            self.journal.inject(ledger.returned[0] if ledger.returned else ledger.next_item)
        elif ledger.open_items:
            sequence = (min if action[1] else max)(ledger.open_items)
            if action[0] == "commit":
                item = ledger.open_items[sequence]
                self.journal.commit(sequence, action[2])
                self.committed.append((item, action[2], self.path.stat().st_size))
            else:
                self.journal.drop(sequence, action[2])
        assert ledger.balance().holds

    def crash(self, size: int) -> None:
        """The process dies with `size` bytes of the file written."""
        with self.journal:
            pass
        content = self.path.read_bytes()
        self.path.write_bytes(content[:size])
        self.committed = [entry for entry in self.committed if entry[2] <= size]


@settings(max_examples=40, deadline=None)
@given(lives=st.lists(st.tuples(actions, st.floats(0, 1)), min_size=1, max_size=4))
def test_a_crash_at_any_byte_loses_no_item_and_doubles_none(lives: list) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        known: list[tuple[int, int, int]] = []
        for steps, where in lives:
            origin = Origin(path)
            origin.committed = [(item, tokens, 0) for item, tokens, _ in known]
            first = path.stat().st_size  # compacted atomically: a crash never cuts into that
            for step in steps:
                origin.act(step)
            origin.crash(first + round(where * (path.stat().st_size - first)))
            known = origin.committed

            with Journal(path) as journal:
                ledger, balance = journal.ledger, journal.ledger.balance()
                assert balance.holds
                assert balance.in_flight == 0
                assert balance.committed == len(known)
                assert balance.tokens == sum(tokens for _, tokens, _ in known)
                # Each item ever drawn is committed or goes out again, never both, never twice.
                assert Counter([item for item, _, _ in known] + ledger.returned) == Counter(
                    range(ledger.next_item)
                )
                assert ledger.next_sequence == balance.injected


def test_what_was_in_flight_at_a_crash_is_dropped_as_partial_and_goes_out_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        for item in range(3):
            journal.inject(item)
        journal.commit(1, 100)
    for _ in range(2):  # opening twice counts once
        with Journal(path) as journal:
            assert journal.ledger.balance() == Balance(3, 1, 2, 2, 0, 100, 1)
            assert journal.ledger.returned == [0, 2]
            assert (journal.ledger.next_item, journal.ledger.next_sequence) == (3, 3)


def test_a_line_torn_by_the_crash_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        journal.inject(0)
        journal.commit(0, 5)
        journal.inject(1)
    path.write_bytes(path.read_bytes()[:-2])
    with Journal(path) as journal:
        assert journal.ledger.balance() == Balance(1, 1, 0, 0, 0, 5, 1)
        assert journal.inject(1) == 1
    assert Journal(path).ledger.returned == [1]


def test_it_does_not_grow_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        for item in range(200):
            journal.commit(journal.inject(item), 7)
    with Journal(path):
        assert path.stat().st_size < 64


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("X 1", "unknown kind 'X'"),
        ("I one", "invalid literal"),
        ("I", "missing"),
        ("I 1 2", "takes"),
        ("C 77 5", "microbatch 77 is not in flight"),
        ("C 0", "missing"),
        ("C 0 -5", "below zero"),
        ("D 0", "not enough values"),
        ("", "unknown kind ''"),
        ("B 9 9 0 0 9 9 9 0", "unknown kind 'B'"),
        ("O 0 0", "microbatch 0 cannot be out"),
        ("O 7 0", "microbatch 7 cannot be out"),
        ("U", "not enough values"),
        ("\xff\xfe", "unknown kind|decode"),
    ],
)
def test_a_line_that_is_not_one_is_an_error_with_its_place(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        journal.inject(0)
    good = path.read_bytes()
    path.write_bytes(good + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError, match=f"journal, line 3: .*({problem}).*Move the file away"):
        Journal(path)
    # Nothing was overwritten: a person can still look.
    assert path.read_bytes().startswith(good)


@pytest.mark.parametrize(
    "content", [b"", b"B 1 1", b"hello\n", b"I 0\n", b"B 5 1 1 0 9 5 5 0\n", b"B 1 2 3\n"]
)
def test_a_file_without_its_first_line_is_not_taken_for_a_new_journal(tmp_path: Path, content: bytes) -> None:
    """Starting at zero beside old data would train on it twice without a word (C25)."""
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(DataError, match="journal, line 1"):
        Journal(path)


class Disk:
    """Where a journal writes, and how many bytes still fit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, journal: Journal) -> None:
        self.free: int | None = None
        self.tries = 0  # to write the whole
        self._journal = journal
        self._file = journal._file
        journal._file = self  # type: ignore[assignment]
        synced = journal_module.write_synced

        def write_synced(path: Path, data: bytes) -> None:
            self.tries += 1
            if self.free is not None and len(data) > self.free:
                raise OSError(errno.ENOSPC, "No space left on device")
            synced(path, data)

        monkeypatch.setattr(journal_module, "write_synced", write_synced)

    def write(self, data: bytes) -> int:
        if self.free == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        assert self._file is not None
        return self._file.write(data if self.free is None else data[: self.free])

    def close(self) -> None:
        assert self._file is not None
        self._file.close()


@pytest.mark.parametrize("free", [0, 2])
def test_c29_on_a_full_disk_the_books_are_kept_in_memory_and_written_when_there_is_room(
    free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the disk took a part of a line: nothing follows that. A kill meanwhile goes back to before."""
    path, clock = tmp_path / "journal", ManualClock()
    with Journal(path, clock.monotonic) as journal:
        for item in range(4):
            journal.inject(item)
        journal.commit(0, 5)
        disk = Disk(monkeypatch, journal)
        assert not journal.problem
        disk.free = free
        journal.commit(1, 5)
        assert "No space left" in journal.problem or "no space left" in journal.problem
        assert "Training goes on" in journal.problem
        assert journal.drop(2, partial=False) == 2
        killed = tmp_path / "killed"
        killed.write_bytes(path.read_bytes())
        assert Journal(killed).ledger.balance() == Balance(4, 1, 3, 3, 0, 5, 1)
        disk.free = None
        clock.now += 1
        assert journal.inject(2) == 4
        assert not journal.problem
        journal.keep(1)
        journal.commit(3, 5)
        killed.write_bytes(path.read_bytes())
        again = Journal(killed).ledger
        assert again.balance() == Balance(5, 3, 2, 1, 0, 15, 2)
        assert (again.returned, again.next_item, again.next_sequence) == ([2], 4, 5)


def test_a_full_disk_is_tried_once_a_second_however_much_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try waits for the disk, and with it the event loop."""
    path, clock = tmp_path / "journal", ManualClock()
    with Journal(path, clock.monotonic) as journal:
        disk = Disk(monkeypatch, journal)
        disk.free = 0
        tries = []
        for _ in range(3):
            for item in range(20):
                journal.commit(journal.inject(item), 5)
            tries.append(disk.tries)
            clock.now += 1
        assert tries == [0, 1, 2]
        disk.free = None
        journal.keep(1)
        assert (journal.problem, disk.tries) == ("", 3)
    assert Journal(path).ledger.balance().committed == 60


def test_what_was_kept_in_memory_is_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        disk = Disk(monkeypatch, journal)
        disk.free = 0
        journal.commit(journal.inject(0), 5)
        disk.free = None
    assert Journal(path).ledger.balance() == Balance(1, 1, 0, 0, 0, 5, 1)


def test_a_start_on_a_full_disk_goes_on_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        journal.inject(0)

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "write_synced", full)
        journal = Journal(path)
        assert "No space left" in journal.problem
        assert journal.inject(0) == 1
    with journal:
        journal.commit(1, 5)
    assert Journal(path).ledger.balance() == Balance(2, 1, 1, 1, 0, 5, 1)


@settings(max_examples=30, deadline=None)
@given(steps=actions, most=st.integers(1, 6))
def test_it_does_not_grow_while_a_peer_lives_and_says_the_same(steps: list, most: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module, "_MOST_LINES", most)
        compacted, whole = Origin(Path(folder) / "compacted"), None
        for step in steps:
            compacted.act(step)
        patch.undo()
        whole = Origin(Path(folder) / "whole")
        for step in steps:
            whole.act(step)
        content = compacted.path.read_text().splitlines()
        # The sums, what is out, what is not kept, what goes out again; and what came since.
        balance = compacted.journal.ledger.balance()
        assert len(content) <= 2 + balance.in_flight + len(compacted.journal.ledger.returned) + 2 * most
        copies = [path.with_suffix(".copy") for path in (compacted.path, whole.path)]
        for origin, copy in zip((compacted, whole), copies, strict=True):
            copy.write_bytes(origin.path.read_bytes())
        one, other = (Journal(copy).ledger for copy in copies)
        assert one.balance() == other.balance()
        assert (sorted(one.returned), one.next_item) == (sorted(other.returned), other.next_item)
        assert one.next_sequence == other.next_sequence


def test_a_folder_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"cannot write .*journal"):
        Journal(tmp_path / "missing" / "journal")
    with pytest.raises(ResourceError, match="cannot read"):
        Journal(tmp_path)
