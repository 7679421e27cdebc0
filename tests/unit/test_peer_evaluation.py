"""Training starts although the base model cannot be evaluated."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from meshd.peer.evaluation import Evaluation
from meshd.pipeline.dropped import Dropped
from meshd.proto import meshd_pb2 as pb


async def test_a_base_loss_that_never_comes_is_given_up(tmp_path: Path) -> None:
    happened: list[object] = []

    async def evaluate(batches: object, watermark: int) -> pb.LossPoint:
        assert len(happened) < 20, "it goes on for ever"
        happened.append("try")
        raise Dropped(pb.Drop.REASON_NONFINITE, "no")

    async def sleep(seconds: float) -> None:
        assert seconds > 0
        happened.append("pause")

    spec = SimpleNamespace(
        data=SimpleNamespace(held_out_sequences=1, microbatch=1), snapshot=SimpleNamespace(evaluate=True)
    )
    status = SimpleNamespace(evaluations=[])
    directory = SimpleNamespace(leads=lambda: True, clock=SimpleNamespace(sleep=sleep))
    data = SimpleNamespace(held_out_batches=lambda size, held_out: [])
    parts = [SimpleNamespace(evaluate=evaluate), None, data, SimpleNamespace(spec=spec), directory, status]
    await Evaluation(*cast(list[Any], parts), tmp_path).base()
    assert happened == ["try", "pause", "try", "pause", "try"]
    assert status.evaluations == []
