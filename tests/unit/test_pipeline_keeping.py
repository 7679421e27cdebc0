"""What dies with a peer is counted: exactly, once, and not when it was not dead."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.pipeline import keeping
from meshd.pipeline.journal import Journal
from meshd.pipeline.keeping import Debts, Keeping
from meshd.pipeline.ledger import LedgerError


def test_what_came_back_and_was_not_kept_is_lost_with_the_peer() -> None:
    debts = Debts()
    for addition in (1, 2, 4, 3, 7):
        debts.returned("a", 1, addition)
    debts.kept("a", 1, 3)
    debts.gone(["a"])
    assert debts.lost == 0
    debts.gone([])
    debts.gone([])
    assert debts.lost == 2  # 4 and 7


def test_a_peer_that_comes_back_as_it_was_has_lost_nothing() -> None:
    debts = Debts()
    debts.returned("a", 1, 5)
    debts.gone([])
    assert debts.lost == 1
    debts.kept("a", 1, 0)
    assert debts.lost == 0
    debts.kept("a", 1, 5)
    debts.gone([])
    assert debts.lost == 0


def test_a_peer_started_again_has_lost_what_it_had_not_kept() -> None:
    debts = Debts()
    debts.returned("a", 1, 5)
    debts.returned("a", 1, 6)
    debts.kept("a", 1, 5)
    debts.returned("a", 2, 1)
    assert debts.lost == 1
    debts.kept("a", 2, 1)
    debts.gone([])
    assert debts.lost == 1


def test_what_is_remembered_is_bounded() -> None:
    """By a peer that never says what it keeps, and by peers that come and go under new names."""
    debts = Debts()
    for addition in range(70_000):
        debts.returned("silent", 0, addition)
    debts.gone([])
    assert debts.lost == 1 << 16
    for number in range(1000):
        debts.returned(f"peer{number}", 0, 1)
        debts.gone([])
    assert debts.lost == (1 << 16) + 1000
    assert len(debts._debts) <= 257
    debts.returned("peer999", 0, 2)  # one that comes back is still known
    assert debts.lost == (1 << 16) + 999


def test_what_is_remembered_of_all_that_went_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have owed much each."""
    monkeypatch.setattr(keeping, "_MOST_GONE_UNKEPT", 10)
    debts = Debts()
    for peer in ("a", "b", "c"):
        for addition in range(6):
            debts.returned(peer, 1, addition)
    debts.gone(["c"])
    assert debts.lost == 12
    assert set(debts._debts) == {"b", "c"}, "the one known longest went first"
    debts.gone([])
    assert debts.lost == 18
    assert set(debts._debts) == {"c"}


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(1, 30)), max_size=60),
    st.sets(st.sampled_from("abc")),
)
def test_lost_is_what_a_plain_list_says(events: list[tuple[str, bool, int]], alive: set[str]) -> None:
    debts, plain = Debts(), {peer: set[int]() for peer in "abc"}
    for peer, returned, number in events:
        if returned:
            debts.returned(peer, 0, number)
            plain[peer].add(number)
        else:
            debts.kept(peer, 0, number)
            plain[peer] = {n for n in plain[peer] if n > number}
    debts.gone(alive)
    assert debts.lost == sum(len(plain[peer]) for peer in set("abc") - alive)


def test_listeners_hear_of_what_is_new_only() -> None:
    heard: list[int] = []
    keeping = Keeping(added=9)
    keeping.listeners.append(lambda: heard.append(keeping.kept))
    for upto in (3, 3, 2, 7):
        keeping.keep(upto)
    assert heard == [3, 7]


def test_a_journal_counts_as_lost_what_was_not_kept_when_it_was_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        for item in range(5):
            journal.commit(journal.inject(item), 10)
        journal.keep(3)
        with pytest.raises(LedgerError, match="3 microbatches kept where 2"):
            journal.keep(3)
    for _ in range(2):
        with Journal(path) as journal:
            assert journal.ledger.balance().lost_after_commit == 2
    with Journal(path) as journal:
        journal.commit(journal.inject(5), 10)
        journal.keep(1)
    with Journal(path) as journal:
        assert journal.ledger.balance().lost_after_commit == 2
