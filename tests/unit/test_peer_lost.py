"""Who vanished without taking leave is remembered, told once with the others, and asked again (C01)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from meshd.peer.lost import Changes, Roster
from meshd.proto import meshd_pb2 as pb

LIFE = 30.0


class World:
    """Peers whose records are renewed, taken back or not renewed any more, looked at every 3 s."""

    def __init__(self, *names: str) -> None:
        self.roster, self.now = Roster(), 0.0
        self.ends = dict.fromkeys(names, LIFE)

    def look(self, renewing: Sequence[str]) -> Changes:
        self.now += 3.0
        for name in renewing:
            self.ends[name] = self.now + LIFE
        records = [
            pb.Record(peer_id=f"id of {name}", name=name, expires=1000.0 + end)
            for name, end in self.ends.items()
            if end > self.now
        ]
        return self.roster.look(records, 1000.0 + self.now, self.now)


def test_a_half_that_is_lost_and_comes_back_is_one_line_each() -> None:
    world = World()
    assert sorted(world.look("abc").found) == ["a", "b", "c"]
    world.ends["c"] += 3.0  # its last renewal was a little later than b's
    changes = [world.look("a") for _ in range(20)]
    assert [change.lost for change in changes if change.lost] == [["b", "c"]]
    assert not any(change.left or change.found or change.back for change in changes)
    assert [(r.name, away) for r, away in world.roster.missing(world.now)] == [("b", 30.0), ("c", 27.0)]
    back = [world.look("ab"), world.look("abc"), world.look("abc"), world.look("abc")]
    assert [change.back for change in back] == [(), (), ["b", "c"], []]
    assert back[2].back_after_s == 39.0
    assert not any(change.found for change in back)
    assert world.roster.missing(world.now) == []


def test_who_takes_its_record_back_has_left_and_is_not_asked_again() -> None:
    world = World()
    world.look("ab")
    del world.ends["b"]
    assert world.look("a").left == ["b"]
    assert world.roster.missing(world.now) == []
    assert world.look("ab").found == ["b"]


def test_who_is_missing_is_asked_less_and_less_often_and_forgotten_in_the_end() -> None:
    world, asked = World(), list[float]()
    world.look("ab")
    for _ in range(1300):
        world.look("a")
        asked += [world.now for _ in world.roster.due(world.now)]
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert pauses[:3] == [12.0, 21.0, 30.0]
    assert set(pauses[2:]) == {30.0}
    assert 3500 < asked[-1] - asked[0] <= 3600
    assert world.roster.missing(world.now) == []


def test_none_of_many_that_are_missing_is_kept_from_its_turn() -> None:
    world, asked = World(), Counter[str]()
    names = [f"peer{number}" for number in range(100)]
    world.look(names)
    for _ in range(110):
        world.look([])
        asked.update(record.name for record in world.roster.due(world.now))
    assert min(asked[name] for name in names) >= 7


def test_what_is_remembered_is_bounded_and_few_are_asked_at_once() -> None:
    world = World()
    names = [f"peer{number}" for number in range(1000)]
    world.look(names)
    for _ in range(15):
        world.look([])
    assert len(world.roster.missing(world.now)) == 256
    assert len(world.roster.due(world.now)) == 8
    assert not {r.name for r in world.roster.due(world.now)} & {r.name for r in world.roster.due(world.now)}
