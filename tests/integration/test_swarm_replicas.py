"""Replicas of a stage train one model: steps follow global tokens, parameters agree, the loss is the reference's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from google.protobuf.message import Message
from swarm import Swarm, held_out_loss, swarm, tiny_spec, whole_loss
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshd.data.stream import TokenStream, stream_seed
from meshd.observe.log import fields_of
from meshd.optim.schedule import learning_rate
from meshd.peer.export import export_checkpoint
from meshd.proto import meshd_pb2 as pb
from meshd.sim.clock import run_virtual
from meshd.state.stage_state import read_params
from meshd.transport.memory import Delivery

# Of the improvement in held-out loss that the reference makes.
TOLERANCE = 0.2


def reference(s: Swarm, origins: list[str], groups: list[list[str]]) -> float:
    """Data-parallel training with local optimizers, without a pipeline, in plain torch.

    Every origin trains its own copy on its share of each batch, with its own AdamW and clipping by stage; after each
    step all copies take over their average. Returns the held-out loss at the end.
    """
    spec, data = s.run.spec, s.data()
    copies = [AutoModelForCausalLM.from_pretrained(spec.model.source, dtype=torch.float32) for _ in origins]
    names = [name for group in groups for name in group]
    named = [dict(copy.named_parameters()) for copy in copies]
    optimizers = [
        torch.optim.AdamW(
            [mine[name] for name in names], betas=spec.optim.betas, eps=spec.optim.eps, weight_decay=0.0
        )
        for mine in named
    ]
    streams = [TokenStream(data, spec.data.microbatch, stream_seed(s.run.run_id, o)) for o in origins]
    share = spec.optim.inner_batch // spec.data.microbatch // len(origins)
    for step in range(spec.total_steps):
        for copy, mine, optimizer, stream in zip(copies, named, optimizers, streams, strict=True):
            copy.zero_grad()
            for _ in range(share):
                loss = whole_loss(copy, stream.next()[1])
                (loss / share).backward()
            for group in groups:
                torch.nn.utils.clip_grad_norm_([mine[name] for name in group], spec.optim.clip)
            for parameters in optimizer.param_groups:
                parameters["lr"] = learning_rate(spec.optim, step, spec.total_steps)
            optimizer.step()
        with torch.no_grad():
            for name in names:
                mean = torch.stack([mine[name] for mine in named]).mean(0)
                for mine in named:
                    mine[name].copy_(mean)
    return held_out_loss(copies[0], data, spec)


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_replicas_train_like_one_with_the_same_global_batch(
    replicas: int, tiny_model: Path, adapt_text: Path, tmp_path: Path
) -> None:
    spec = tiny_spec(
        tiny_model,
        adapt_text,
        optim={"lr": 1e-3, "inner_batch": 12},
        data={"held_out_sequences": 64},
        stop={"steps": 10},
    )
    stages = [[f"{letter}{stage}" for letter in "abc"[:replicas]] for stage in range(2)]
    names = [name for stage in stages for name in stage]

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(0.05, "seed", *names)
            await s.gathered(*stages)
            await s.finished(*names)
            committed = sum(s.account(name).tokens for name in stages[0])
            assert all(s.account(name).holds and not s.account(name).open for name in stages[0])
            for stage in stages:
                # On average, as replicas that got more of the work have stepped more often.
                steps = sum(s.version(name) for name in stage) / replicas
                assert steps == pytest.approx(committed / spec.batch_tokens, abs=1)
            for number, stage in enumerate(stages):
                final = read_params(s.store("seed"), f"snapshot/{number}/{spec.stop_tokens}")
                for name in stage:
                    for key, value in s.parameters(name).items():
                        assert torch.equal(value, final[key]), f"{key} of {name}"
            groups = [sorted(s.stage_peer(stage[0]).runtime.model.trainable()) for stage in stages]
            want = reference(s, stages[0], groups)
            reported = await s.held_out()
            before, after = reported[0], reported[spec.stop_tokens]
            assert want < before
            assert after == pytest.approx(want, abs=TOLERANCE * (before - want))

    run_virtual(main())


@pytest.mark.parametrize("tied", ["ring", "freeze"])
def test_the_exported_checkpoint_has_the_loss_that_the_swarm_reported(
    tied: str, tiny_model: Path, adapt_text: Path, tmp_path: Path
) -> None:
    spec = tiny_spec(tiny_model, adapt_text, model={"tied": tied}, stop={"steps": 3})
    names = ["a0", "a1", "b1"]
    again: list[str] = []

    def tap(source: str, target: str, message: Message) -> list[Delivery]:
        """At first no replica has the snapshot yet: an evaluation that is sent again must not be another one."""
        if isinstance(message, pb.LinkMessage) and message.HasField("eval_result") and source not in again:
            again.append(source)
            result = message.eval_result
            drop = pb.Drop(id=result.id, hop=result.hop, reason=pb.Drop.REASON_NO_SNAPSHOT)
            return [Delivery(pb.LinkMessage(drop=drop))]
        return [Delivery(message)]

    async def main() -> tuple[float, Swarm]:
        async with swarm(spec, tmp_path) as s:
            s.delay(0.05, "seed", *names)
            await s.gathered(["a0"], ["a1", "b1"])
            await s.until(lambda: s.tokens("a0") >= spec.stop_tokens)
            s.network.tap = tap
            await s.finished(*names)
            return (await s.held_out())[spec.stop_tokens], s

    reported, s = run_virtual(main())
    assert again
    exported = tmp_path / "checkpoint"
    assert asyncio.run(export_checkpoint(tmp_path / "seed", exported)) == spec.stop_tokens
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    AutoTokenizer.from_pretrained(exported)
    assert held_out_loss(model, s.data(), spec) == pytest.approx(reported, abs=1e-5)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    embedding = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is embedding
    moved = not torch.equal(embedding, base.get_input_embeddings().weight)
    assert moved == (tied == "ring")


def test_replicas_that_outgrow_the_batch_say_so_once_and_the_run_still_ends_where_it_should(
    tiny_model: Path, adapt_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A share is less than a microbatch: each one is a step, of the stage that has the replicas and of no other."""
    spec = tiny_spec(
        tiny_model, adapt_text, optim={"inner_batch": 2}, snapshot={"evaluate": False}, stop={"steps": 8}
    )

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(0.2, "seed", "a0", "a1", "b1")
            await s.gathered(["a0"], ["a1", "b1"])
            await s.finished("a0", "a1", "b1")
            assert s.version("a0") == s.version("a1") + s.version("b1") == 8
            assert s.account("a0").tokens == spec.stop_tokens, "not one microbatch over"

    with caplog.at_level("WARNING"):
        run_virtual(main())
    problems = [fields_of(r)["problem"] for r in caplog.records if r.getMessage() == "batch_outgrown"]
    assert len(problems) == 2  # a1's and b1's
    assert all("2 replicas" in problem and "inner_batch = 4 or more" in problem for problem in problems)
