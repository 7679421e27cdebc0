from __future__ import annotations

import io

import pytest
from rich.console import Console

from meshd.errors import NetworkError
from meshd.observe.daemonfile import DaemonFile
from meshd.observe.status import duration, fetch_status, headline, status_view, summarize
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import LinkLost


def peer(name: str, stage: int, rate: float = 0.0, age: float = 1.0, **more: object) -> pb.PeerStatus:
    role = pb.ROLE_SEED if stage < 0 else pb.ROLE_STAGE
    state = pb.PEER_STATE_WORKING
    return pb.PeerStatus(
        peer_id=f"id-{name}",
        name=name,
        stage=stage,
        role=role,
        tokens_per_s=rate,
        age_s=age,
        state=state,
        **more,
    )  # type: ignore[arg-type]


def reply(**more: object) -> pb.StatusReply:
    return pb.StatusReply(
        self=peer("seed", -1),
        peers=[
            peer("b", 1),
            peer("a", 0, 30.0),
            peer("c", 0, 20.0),
            peer("d", 0, 1000.0, age=90.0),
            peer("a", 0, 30.0),
        ],
        global_tokens=4000,
        stop_tokens=10_000,
        losses=[pb.LossPoint(loss=3.0), pb.LossPoint(loss=2.5)],
        run_name="demo",
        run_id="f" * 40,
        **more,  # type: ignore[arg-type]
    )


def shown(answer: pb.StatusReply) -> str:
    out = io.StringIO()
    Console(file=out, width=150).print(status_view(answer))
    return out.getvalue()


def test_the_swarms_rate_is_that_of_its_fresh_stage_0_replicas() -> None:
    summary = summarize(reply())
    assert summary.tokens_per_s == 50.0  # the silent peer's 1000 do not count, a peer named twice counts once
    assert summary.eta_s == 120.0
    assert {stage: [p.name for p in peers] for stage, peers in summary.stages.items()} == {
        0: ["a", "c", "d"],
        1: ["b"],
    }
    assert headline(summary) == "4,000 / 10,000 tokens (40 %)  50 tokens/s  loss 2.500  ETA 2 min 0 s"


def test_eta_is_unknown_when_nothing_moves_and_none_at_the_end() -> None:
    still = pb.StatusReply(stop_tokens=100)
    assert summarize(still).eta_s is None
    assert headline(summarize(still)).endswith("ETA unknown")
    assert summarize(pb.StatusReply(stop_tokens=100, finished=True)).eta_s == 0.0


def test_anchors_are_shown_as_such() -> None:
    answer = reply()
    anchor = peer("x", -1, weight_version=37)
    anchor.role = pb.ROLE_ANCHOR
    answer.peers.append(anchor)
    assert {p.name for p in summarize(answer).seeds} == {"seed", "x"}
    (line,) = [line for line in shown(answer).splitlines() if "anchor" in line]
    assert line.split()[:4] == ["anchor", "x", "working", "37"]


def test_a_silent_peer_is_marked_and_the_rest_is_shown() -> None:
    """C08."""
    text = shown(reply())
    assert "silent for 1 min 30 s" in text
    assert text.count("working") == 4
    assert "demo" in text


def test_text_from_peers_is_shown_as_it_is() -> None:
    answer = reply()
    answer.peers[0].doing = "waits for [stage 2] since 9 s"
    answer.peers[0].last_error = "[/bold] lost"
    text = shown(answer)
    assert "waits for [stage 2] since 9 s" in text
    assert "[/bold] lost" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (7.2, "8 s"), (61, "1 min 1 s"), (3599.5, "1 h 0 min"), (90_000, "1 d 1 h")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class Dead:
    async def status(self, address: str, request: pb.StatusRequest) -> pb.StatusReply:
        raise LinkLost(f"{address}: connection refused")


async def test_no_answer_is_a_network_error_with_the_address() -> None:
    with pytest.raises(NetworkError, match=r"no answer from the daemon at h:1: .*refused"):
        await fetch_status(Dead(), "h:1")  # type: ignore[arg-type]


def test_the_daemon_file_is_read_back_and_garbage_is_no_daemon(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert DaemonFile.read(tmp_path) is None
    written = DaemonFile("127.0.0.1:5", 12, "r", "link")
    written.write(tmp_path)
    assert DaemonFile.read(tmp_path) == written
    assert [path.name for path in tmp_path.iterdir()] == ["daemon.json"]
    for text in ("{", "[]", '{"address": "x"}'):
        (tmp_path / "daemon.json").write_text(text)
        assert DaemonFile.read(tmp_path) is None
    DaemonFile.remove(tmp_path)
    DaemonFile.remove(tmp_path)
