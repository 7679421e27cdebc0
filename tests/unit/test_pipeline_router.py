"""Which replica is asked first, and who is left alone for how long."""

from __future__ import annotations

import random

import pytest

from meshd.pipeline.router import Router


@pytest.fixture
def router() -> Router:
    return Router(random.Random(0))


def serve(router: Router, peer: str, seconds: float, times: int = 1) -> None:
    for _ in range(times):
        router.sent(peer)
        router.returned(peer, seconds, 0.0)


def test_the_earliest_virtual_finish_goes_first(router: Router) -> None:
    """What a replica still owes, at the pace it has shown."""
    serve(router, "fast", 1.0)
    serve(router, "slow", 2.5)
    assert router.order(["slow", "fast"], 0.0) == ["fast", "slow"]
    router.sent("fast")
    assert router.order(["slow", "fast"], 0.0) == ["fast", "slow"]  # 2 s against 2.5 s
    router.sent("fast")
    assert router.order(["slow", "fast"], 0.0) == ["slow", "fast"]  # 3 s against 2.5 s
    assert router.in_flight("fast") == 2
    router.abandoned("fast")
    assert router.order(["slow", "fast"], 0.0) == ["fast", "slow"]


def test_load_spreads_by_pace(router: Router) -> None:
    serve(router, "fast", 1.0)
    serve(router, "slow", 3.0)
    for _ in range(40):
        router.sent(router.order(["fast", "slow"], 0.0)[0])
    assert router.in_flight("fast") == 30
    assert router.in_flight("slow") == 10


def test_pace_follows_what_is_seen_now(router: Router) -> None:
    serve(router, "a", 1.0)
    serve(router, "b", 2.0)
    serve(router, "a", 10.0, times=20)
    assert router.order(["a", "b"], 0.0) == ["b", "a"]


def test_pace_is_per_microbatch_not_per_queue(router: Router) -> None:
    for _ in range(4):
        router.sent("busy")
    router.returned("busy", 4.0, 0.0)  # four at once, the first after 4 s: 1 s each
    serve(router, "idle", 1.5)
    assert router.in_flight("busy") == 3
    for _ in range(3):
        router.abandoned("busy")
    assert router.order(["idle", "busy"], 0.0) == ["busy", "idle"]


def test_a_replica_of_unknown_pace_is_tried_as_if_it_were_the_fastest(router: Router) -> None:
    serve(router, "fast", 1.0)
    serve(router, "slow", 5.0)
    router.sent("fast")
    assert router.order(["slow", "fast", "new"], 0.0) == ["new", "fast", "slow"]


def test_ties_are_broken_at_random(router: Router) -> None:
    firsts = {router.order(["a", "b", "c"], 0.0)[0] for _ in range(60)}
    assert firsts == {"a", "b", "c"}


def test_a_busy_replica_is_left_alone_until_credit_or_a_while_later(router: Router) -> None:
    router.busy("a", 10.0)
    assert router.order(["a", "b"], 11.9) == ["b"]
    router.credit("a")
    assert sorted(router.order(["a", "b"], 11.9)) == ["a", "b"]
    router.busy("a", 12.0)
    # The Credit may have been lost with a stream.
    assert router.order(["a"], 14.0) == ["a"]


def penalty(router: Router, peer: str, now: float) -> float:
    """Seconds until a replica that failed at `now` may be asked again."""
    router.failed(peer, now)
    tenths = next(t for t in range(10_000) if router.order([peer], now + t / 10))
    return tenths / 10


def test_each_failure_in_a_row_costs_twice_as_long_up_to_a_bound(router: Router) -> None:
    now, penalties = 0.0, []
    for _ in range(10):
        penalties.append(penalty(router, "a", now))
        now += penalties[-1]
    for expected, got in zip([1, 2, 4, 8, 16, 32, 60, 60, 60, 60], penalties, strict=True):
        assert 0.75 * expected <= got <= 1.25 * expected + 0.1
    # It has come back and done its work: the past is forgotten.
    serve(router, "a", 1.0)
    assert penalty(router, "a", now) <= 1.35


def test_the_loss_of_one_stream_is_one_failure_however_much_was_in_flight(router: Router) -> None:
    for _ in range(20):
        router.sent("a")
    for _ in range(20):
        router.failed("a", 5.0)
        router.abandoned("a")
    assert router.order(["a"], 6.3) == ["a"]
    assert router.in_flight("a") == 0


def test_books_never_go_below_zero(router: Router) -> None:
    router.abandoned("a")
    router.returned("a", 1.0, 0.0)
    assert router.in_flight("a") == 0


def test_a_replica_that_was_slow_once_is_tried_again_when_its_pace_is_old(router: Router) -> None:
    """Whoever is not asked cannot show that it has become fast."""
    serve(router, "fast", 1.0)
    serve(router, "slow", 9.0)
    router.sent("fast")
    assert router.order(["slow", "fast"], 30.0) == ["fast", "slow"]
    assert router.order(["slow", "fast"], 31.0) == ["slow", "fast"]
    router.sent("slow")
    router.sent("fast")
    router.sent("fast")
    assert router.order(["slow", "fast"], 31.0) == ["fast", "slow"], "once, not with all there is"
    router.returned("slow", 1.5, 40.0)
    assert router.order(["slow", "fast"], 40.0) == ["slow", "fast"], "what it was long ago is forgotten"


def test_peers_that_went_are_forgotten_once_they_are_not_set_aside_any_more(router: Router) -> None:
    for peer in ("here", "gone", "failed", "asked"):
        serve(router, peer, 1.0)
    router.failed("failed", 10.0)
    router.sent("asked")
    router.forget({"here"}, 10.0)
    assert set(router._replicas) == {"here", "failed", "asked"}
    router.abandoned("asked")
    router.forget({"here"}, 100.0)
    assert set(router._replicas) == {"here"}
