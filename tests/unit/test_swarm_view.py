from __future__ import annotations

import io

from rich.console import Console

from meshd.proto import meshd_pb2 as pb
from meshd.swarm.view import LiveView, PlainView, sparkline


class ManualClock:
    now = 0.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


def reply(tokens: int, finished: bool = False) -> pb.StatusReply:
    peers = [
        pb.PeerStatus(peer_id=str(n), name=f"p{n}", role=pb.ROLE_STAGE, stage=s, tokens_per_s=10)
        for n, s in enumerate((0, 1, 1))
    ]
    return pb.StatusReply(
        self=pb.PeerStatus(peer_id="seed", name="seed", role=pb.ROLE_SEED, stage=-1),
        peers=peers,
        global_tokens=tokens,
        stop_tokens=1000,
        losses=[pb.LossPoint(loss=3.0), pb.LossPoint(loss=2.0)],
        finished=finished,
    )


def test_sparkline_goes_from_lowest_to_highest() -> None:
    assert sparkline([3.0, 2.0, 1.0], 10) == "█▅▁" or sparkline([3.0, 2.0, 1.0], 10) == "█▄▁"
    assert sparkline([4.0, 4.0, 0.0, 0.0], 2) == "█▁"
    assert sparkline([1.0, 1.0], 5) == "▁▁"
    assert sparkline([], 5) == ""
    assert len(sparkline([float(n) for n in range(1000)], 60)) == 60


def test_plain_view_writes_events_at_once_and_progress_now_and_then() -> None:
    out, clock = io.StringIO(), ManualClock()
    with PlainView(Console(file=out, width=80), clock, every_s=10) as view:
        for clock.now, tokens in ((0, 100), (3, 200), (9, 300), (11, 400)):
            view.status(reply(tokens))
        view.tell("stage1-0: [left]")
        view.status(reply(1000, finished=True))
    lines = out.getvalue().splitlines()
    assert [line.split("/")[0] for line in lines] == [
        "[0 s] 100 ",
        "[11 s] 400 ",
        "[11 s] stage1-0: [left]",
        "[11 s] 1,000 ",
    ]
    assert lines[0].endswith("10 tokens/s  loss 2.000  ETA 1 min 30 s  peers per stage 1,2")


def test_live_view_shows_progress_peers_and_the_latest_events() -> None:
    out, clock = io.StringIO(), ManualClock()
    console = Console(file=out, width=120)
    view = LiveView(console, clock, events=2)
    for number in range(4):
        view.tell(f"event {number}")
    view.status(reply(500))
    console.print(view.render())
    text = out.getvalue()
    assert "500 / 1,000 tokens (50 %)" in text
    assert "loss 3.000 █▁ 2.000" in text
    assert all(name in text for name in ("p0", "p1", "p2", "seed"))
    assert "event 3" in text
    assert "event 1" not in text
