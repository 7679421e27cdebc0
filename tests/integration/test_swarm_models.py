"""Other data and other models, end to end: supervised rows, and GPT-2 with dropout."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm import held_out_loss, swarm, tiny_spec
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from meshd.pipeline.runtime import StageRuntime, Work
from meshd.sim.clock import run_virtual
from meshd.state.stage_state import read_params


def pairs(path: Path, count: int) -> Path:
    """Prompts that cannot be guessed, responses that all follow one rule."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    rows = [
        {"prompt": "".join(rng.choices(letters, k=5)) + ": ", "response": "yes, of course"}
        for _ in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_supervised_rows_packed_apart_are_learnt_by_their_responses_alone(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pairs(tmp_path / "rows.jsonl", 200)
    spec = tiny_spec(
        tiny_model,
        rows,
        data={"kind": "sft", "packing": "separate"},
        optim={"lr": 2e-3},
        stop={"tokens": 800, "steps": None},
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    learnt: list[str] = []
    head = StageRuntime.head

    def watched(runtime: StageRuntime, hop: int, work: Work, *rest: Any) -> Any:
        # On the last stage: what the mask that crossed the wire lets through.
        batch = work.batch
        assert batch.document_starts is not None
        assert int(batch.document_starts.sum()) > len(batch.document_starts)
        learnt.append(tokenizer.decode(batch.labels[batch.label_mask], skip_special_tokens=True))
        return head(runtime, hop, work, *rest)

    monkeypatch.setattr(StageRuntime, "head", watched)

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(0.05, "seed", "a0", "a1")
            await s.gathered(["a0"], ["a1"])
            await s.finished("a0", "a1")
            losses = await s.held_out()
            assert losses[spec.stop_tokens] < 0.7 * losses[0]
            account = s.account("a0")
            assert account.holds
            # Label tokens are those of responses: far fewer than positions.
            assert account.tokens < 0.8 * account.committed * spec.data.microbatch * spec.data.seq_len

    run_virtual(main())
    assert learnt
    assert set("".join(learnt).replace("yes, of course", "").strip()) <= set(" ")


def gpt2(folder: Path, tiny_model: Path, tied: bool) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=64,
        n_embd=48,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gpt2_with_dropout_trains(tied: bool, tiny_model: Path, adapt_text: Path, tmp_path: Path) -> None:
    model = gpt2(tmp_path / "gpt2", tiny_model, tied)
    spec = tiny_spec(
        model,
        adapt_text,
        model={"cut": [2], **({"tied": "ring"} if tied else {})},
        optim={"lr": 5e-3},
        data={"held_out_sequences": 64},
        stop={"steps": 12},
    )

    async def main() -> None:
        async with swarm(spec, tmp_path) as s:
            s.delay(0.05, "seed", "a0", "a1")
            await s.gathered(["a0"], ["a1"])
            await s.finished("a0", "a1")
            losses = await s.held_out()
            assert losses[spec.stop_tokens] < losses[0] - 0.1
            # Reported without dropout: it is the loss of the model as people will use it.
            whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            assert held_out_loss(whole, s.data(), spec) == pytest.approx(losses[0], abs=1e-5)
            state = whole.state_dict()
            for stage in range(2):
                state.update(read_params(s.store("seed"), f"snapshot/{stage}/{spec.stop_tokens}"))
            if tied:
                state["lm_head.weight"] = state["transformer.wte.weight"]
            whole.load_state_dict(state)
            assert held_out_loss(whole, s.data(), spec) == pytest.approx(losses[spec.stop_tokens], abs=1e-5)

    run_virtual(main())
