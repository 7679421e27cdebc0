"""Whole runs in one process: many peers, a real pretrained model, virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from swarm import Swarm, swarm, tiny_spec
from transformers import AutoModelForCausalLM

from meshd.data.dataset import Dataset
from meshd.data.stream import TokenStream, stream_seed
from meshd.optim.schedule import learning_rate
from meshd.sim.clock import run_virtual
from meshd.state.stage_state import read_params


def train_alone(
    swarm: Swarm, origin: str, groups: list[list[str]]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Single-process training on the same data in the same order, in plain torch.

    groups: names of the parameters that are trained, by stage: they are clipped together. Returns the loss of every
    microbatch, and the parameters at the end.
    """
    spec = swarm.run.spec
    model = AutoModelForCausalLM.from_pretrained(spec.model.source, dtype=torch.float32)
    named = dict(model.named_parameters())
    trained = [named[name] for group in groups for name in group]
    optimizer = torch.optim.AdamW(
        trained, lr=spec.optim.lr, betas=spec.optim.betas, eps=spec.optim.eps, weight_decay=0.0
    )
    data = Dataset.open(swarm.store("seed").path("run/data", "facts.json").parent)
    stream = TokenStream(data, spec.data.microbatch, stream_seed(swarm.run.run_id, origin))
    losses = []
    per_step = spec.optim.inner_batch // spec.data.microbatch
    for step in range(spec.total_steps):
        model.zero_grad()
        for _ in range(per_step):
            _, batch = stream.next()
            logits = model(batch.inputs).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
            losses.append(loss.item())
            (loss / per_step).backward()
        for group in groups:
            torch.nn.utils.clip_grad_norm_([named[name] for name in group], spec.optim.clip)
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate(spec.optim, step, spec.total_steps)
        optimizer.step()
    return losses, {name: p.detach() for name, p in named.items()}


def in_order_of_steps(losses: list[float], per_step: int) -> list[list[float]]:
    """Losses by step. Within a step, microbatches may come back in any order."""
    return [sorted(losses[i : i + per_step]) for i in range(0, len(losses), per_step)]


@pytest.mark.parametrize("tied", ["ring", "freeze"])
def test_lockstep_equals_single_process_training(
    tied: str, tiny_model: Path, adapt_text: Path, tmp_path: Path
) -> None:
    spec = tiny_spec(
        tiny_model,
        adapt_text,
        model={"tied": tied, "stages": 3, "cut": [2, 4]},
        wire={"forward": "dense32", "backward": "dense32"},
        pipeline={"lockstep": True},
        # Clip: small enough that clipping, which is per stage, is at work. Eps: AdamW divides a gradient by its own
        # size, so that with the usual 1e-8 the rounding of a sum decides where an element with next to no gradient
        # goes. Whether there is one hangs on the data's order, that on the run id, that on this checkout's path.
        optim={"clip": 0.5, "eps": 1e-6},
        stop={"steps": 5},
    )
    names = [f"peer{stage}" for stage in range(3)]

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            for stage, name in enumerate(names):
                s.start(name, stage)
            await s.finished(*names)
            groups = [sorted(s.stage_peer(name).runtime.model.trainable()) for name in names]
            losses, parameters = train_alone(s, "peer0", groups)
            mine = [point.loss for point in s.peers["peer0"].status.losses()]
            assert len(mine) == 10
            for got, want in zip(in_order_of_steps(mine, 2), in_order_of_steps(losses, 2), strict=True):
                assert got == pytest.approx(want, rel=1e-5)
            for stage in range(3):
                final = read_params(s.store("seed"), f"snapshot/{stage}/{spec.stop_tokens}")
                assert sorted(final) == groups[stage]
                for name, value in final.items():
                    torch.testing.assert_close(value, parameters[name], rtol=1e-4, atol=1e-5)

    run_virtual(main())
