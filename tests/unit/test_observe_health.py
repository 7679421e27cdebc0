"""The progress watchdog: useful work in the last minute, or a good reason; and how it is shown."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import urllib.error
import urllib.request

import pytest
from manual_clock import ManualClock

from meshd.errors import ResourceError
from meshd.observe.health import READY_S, Health, Progress, Situation, judge, reason_to_wait
from meshd.observe.healthz import serve_health
from meshd.observe.metrics import Metrics
from meshd.peer.directory import Self
from meshd.peer.watchdog import Watchdog
from meshd.proto import meshd_pb2 as pb


def at_work(**more: object) -> Situation:
    values = {"state_since": 100.0, "doing": "serving stage 2", **more}
    return Situation(pb.PEER_STATE_WORKING, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("situation", "now", "ok", "words"),
    [
        # A peer that has just begun has a minute.
        (at_work(), 160.0, True, "working: nothing done yet"),
        (at_work(), 160.1, False, "no useful work for 1 min 1 s (nothing done yet): serving stage 2"),
        (at_work(useful="added a gradient", useful_at=500.0), 560.0, True, "working: added a gradient 1 min 0 s ago"),
        # C15: it looks healthy and does nothing.
        (
            at_work(useful="added a gradient", useful_at=500.0),
            590.0,
            False,
            "no useful work for 1 min 30 s (added a gradient 1 min 30 s ago): serving stage 2",
        ),
        (
            at_work(useful="added a gradient", useful_at=500.0, waiting="nobody serves stage 1"),
            5000.0,
            True,
            "waiting: nobody serves stage 1 (added a gradient 1 h 15 min ago)",
        ),
        # From the end of a good reason on it has its minute again.
        (at_work(useful_at=500.0, useful="kept", excused_at=900.0), 955.0, True,
         "no useful work for 55 s (kept 7 min 35 s ago): serving stage 2"),
        (
            at_work(useful_at=500.0, useful="kept", excused_at=900.0),
            961.0,
            False,
            "no useful work for 1 min 1 s (kept 7 min 41 s ago): serving stage 2",
        ),
        # Work from before it came (back) to work does not make its first minute shorter.
        (at_work(useful="added a gradient", useful_at=10.0), 150.0, True, "working: added a gradient 2 min 20 s ago"),
    ],
)  # fmt: skip
def test_a_working_peer(situation: Situation, now: float, ok: bool, words: str) -> None:
    assert judge(situation, now) == Health(ok, words)


@pytest.mark.parametrize("state", [pb.PEER_STATE_STARTING, pb.PEER_STATE_JOINING, pb.PEER_STATE_SYNCING])
def test_c02_what_comes_before_work_says_its_state_and_has_an_end(state: pb.PeerState) -> None:
    coming = Situation(state, 100.0, "getting the state of stage 2")
    now = judge(coming, 112.0)
    word = pb.PeerState.Name(state).removeprefix("PEER_STATE_").lower()
    assert now == Health(True, f"{word} for 12 s: getting the state of stage 2")
    assert judge(coming, 100.0 + READY_S).ok
    assert not judge(coming, 101.0 + READY_S).ok


@pytest.mark.parametrize("state", [pb.PEER_STATE_DRAINING, pb.PEER_STATE_FINISHED])
def test_who_leaves_or_has_finished_is_healthy(state: pb.PeerState) -> None:
    assert judge(Situation(state, 0.0, "serving its result"), 1e6).ok


def test_good_reasons_to_wait() -> None:
    def reason(**facts: object) -> str:
        values = {"missing": [], "over": False, "evaluating": False, "alone": "", **facts}
        return reason_to_wait(**values)  # type: ignore[arg-type]

    assert reason() == ""
    assert reason(missing=[1]) == "nobody serves stage 1: the swarm pauses until somebody does"
    assert reason(missing=[0, 3]).startswith("nobody serves stages 0, 3:")
    # Who sees nobody because of its own network has something to mend.
    assert reason(missing=[1], alone="cannot reach /ip4/1.2.3.4: connection refused") == ""
    assert reason(over=True, alone="alone").startswith("the run has its tokens")
    assert "evaluated" in reason(evaluating=True)
    assert reason(own="no newer snapshot") == "no newer snapshot"


def test_only_counters_of_useful_work_that_rise_are_progress() -> None:
    progress = Progress()
    progress.look({"microbatches_added": 5.0}, 10.0)
    assert (progress.useful, progress.at) == ("added a gradient", 10.0)
    progress.look({"microbatches_added": 5.0, "offers_busy": 9.0, "loop_lag_p99_s": 1.0}, 20.0)
    assert progress.at == 10.0
    progress.look({"microbatches_added": 5.0, "gossip_exchanges": 1.0}, 30.0)
    assert (progress.useful, progress.at) == ("averaged with a replica", 30.0)


def test_the_watchdog_follows_state_and_counters_and_speaks_once(caplog: pytest.LogCaptureFixture) -> None:
    clock, waits = ManualClock(), [""]
    metrics = Metrics(clock)
    me = Self("id", "attic", pb.ROLE_STAGE, "ab" * 20, 1)
    dog = Watchdog(me, metrics, clock, lambda: "serving stage 1", lambda: waits[0])
    assert dog.health() == Health(True, "starting for 0 s: serving stage 1")
    me.state = pb.PEER_STATE_WORKING
    with caplog.at_level(logging.INFO):
        dog.look()
        clock.now += 59
        dog.look()
        assert metrics.value("healthy") == 1.0
        clock.now += 2
        dog.look()
        dog.look()
        assert metrics.value("healthy") == 0.0
        waits[0] = "nobody serves stage 0"
        dog.look()
        waits[0] = ""
        dog.look()
        clock.now += 61
        dog.look()
        metrics.count("microbatches_added")
        dog.look()
    assert metrics.value("healthy") == 1.0
    said = [record.getMessage() for record in caplog.records]
    assert said == ["unhealthy", "healthy_again", "unhealthy", "healthy_again"]


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_healthz_answers_200_or_503_with_one_line_of_json() -> None:
    now = Health(True, "working: added a gradient 3 s ago")
    async with serve_health("127.0.0.1", 0, lambda: now) as url:
        status, body = await asyncio.to_thread(get, url)
        assert status == 200
        assert body.endswith("\n")
        assert body.count("\n") == 1
        assert json.loads(body) == {"healthy": True, "why": "working: added a gradient 3 s ago"}
        now = Health(False, "no useful work for 90 s")
        status, body = await asyncio.to_thread(get, url)
        assert (status, json.loads(body)["healthy"]) == (503, False)
        assert (await asyncio.to_thread(get, url.replace("healthz", "other")))[0] == 404
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(get, url)


async def test_a_taken_http_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=rf"port {port} \(http_port\).*in use.*Fix: http_port"):
            async with serve_health("127.0.0.1", port, lambda: Health(True, "")):
                pass
