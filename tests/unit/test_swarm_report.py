from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from meshd.errors import MeshdError
from meshd.proto import meshd_pb2 as pb
from meshd.swarm.report import Point, SwarmReport, continuation, plot, smoothed


def status(**more: object) -> pb.StatusReply:
    return pb.StatusReply(
        run_name="demo",
        run_id="a" * 40,
        global_tokens=1000,
        losses=[
            pb.LossPoint(tokens=1000, loss=2.0, time=30.0),
            pb.LossPoint(tokens=200, loss=3.0, time=10.0),
        ],
        **more,  # type: ignore[arg-type]
    )


def report(**more: object) -> SwarmReport:
    return SwarmReport.of(status(**more), elapsed_s=61.0, restarts=0, checkpoint=Path("/out/checkpoint"))


EVALUATIONS = [
    pb.LossPoint(tokens=1000, loss=2.1),
    pb.LossPoint(tokens=0, loss=3.1),
    pb.LossPoint(tokens=500, loss=2.5),
]


def test_before_and_after_are_the_first_and_last_evaluation() -> None:
    got = report(evaluations=EVALUATIONS)
    assert (got.before, got.after) == (3.1, 2.1)
    assert got.tokens_per_s == 40.0  # 800 tokens in 20 s
    assert got.losses == (Point(200, 3.0), Point(1000, 2.0))
    assert "3.1000 before, 2.1000 after (-1.000 nats per token)" in got.summary()
    assert "/out/checkpoint" in got.summary()


def test_an_evaluation_of_the_trained_model_is_never_taken_for_before() -> None:
    got = report(evaluations=[pb.LossPoint(tokens=500, loss=2.5)])
    assert (got.before, got.after) == (None, 2.5)
    assert "not evaluated before, 2.5000 after" in got.summary()
    assert report(evaluations=[pb.LossPoint(tokens=0, loss=3.1)]).after is None


def test_a_run_without_losses_has_a_report() -> None:
    got = SwarmReport.of(pb.StatusReply(), 1.0, 2, Path("c"))
    assert got.tokens_per_s == 0.0
    assert "restarts    2" in got.summary()


def test_the_report_is_written_as_json(tmp_path: Path) -> None:
    report(evaluations=EVALUATIONS).write(tmp_path / "r.json")
    values = json.loads((tmp_path / "r.json").read_text())
    assert values["losses"][0] == {"tokens": 200, "loss": 3.0}
    assert values["after"] == 2.1


def test_smoothing_is_a_running_mean() -> None:
    points = tuple(Point(n, loss) for n, loss in enumerate((4.0, 2.0, 0.0, 6.0)))
    assert [point.loss for point in smoothed(points, 2)] == [4.0, 3.0, 1.0, 3.0]
    assert [point.loss for point in smoothed(points, 1)] == [4.0, 2.0, 0.0, 6.0]


def test_the_plot_is_a_png_with_a_curve(tmp_path: Path) -> None:
    from PIL import Image

    plot(report(evaluations=EVALUATIONS), tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as image:
        assert image.format == "PNG"
        colors = {color for _, color in image.convert("RGB").getcolors(1 << 24)}
    assert (255, 127, 14) in colors  # tab:orange, the held-out curve


def test_without_matplotlib_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MeshdError, match=r"pip install 'meshd\[plot\]'"):
        plot(report(), tmp_path / "loss.png")


def test_a_continuation_is_new_text_and_greedy(tiny_model: Path) -> None:
    first = continuation(tiny_model, "The function", tokens=8)
    assert first
    assert not first.startswith("The function")
    assert continuation(tiny_model, "The function", tokens=8) == first
