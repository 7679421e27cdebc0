"""Training starts although the base model cannot be evaluated."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshd.peer.evaluation import Evaluation
from meshd.pipeline.dropped import Dropped
from meshd.proto import meshd_pb2 as pb


async def base_losses(tmp_path: Path, *outcomes: Dropped | float) -> tuple[list[str], list[float]]:
    """Evaluate the base model, with these outcomes of the tries, the last one over and over: (what happened, losses
    that were kept)."""
    happened: list[str] = []
    left = list(outcomes)

    async def evaluate(batches: object, watermark: int) -> pb.LossPoint:
        assert len(happened) < 40, "it goes on for ever"
        happened.append("try")
        outcome = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(outcome, Dropped):
            raise outcome
        return pb.LossPoint(tokens=watermark, loss=outcome, label_tokens=1)

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
    return happened, [point.loss for point in status.evaluations]


@pytest.mark.parametrize("outcome", [Dropped(pb.Drop.REASON_FAILED, "no"), math.nan, math.inf])
async def test_a_base_loss_that_never_comes_is_given_up(tmp_path: Path, outcome: Dropped | float) -> None:
    happened, losses = await base_losses(tmp_path, outcome)
    assert happened == ["try", "pause", "try", "pause", "try"]
    assert losses == []


async def test_the_base_loss_waits_for_stages_that_have_no_replica_yet(tmp_path: Path) -> None:
    nobody = Dropped(pb.Drop.REASON_NO_ROUTE, "no replica of stage 2")
    happened, losses = await base_losses(tmp_path, *[nobody] * 10, 2.5)
    assert happened == ["try", "pause"] * 10 + ["try"]
    assert losses == [2.5]
