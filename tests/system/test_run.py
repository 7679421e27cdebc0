"""A whole run of separate processes that find each other over the DHT: from start to a checkpoint, and nothing left."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from daemons import Daemon, Launcher, launcher, meshd, status, until, write_spec
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshd.data.dataset import Dataset
from meshd.proto import meshd_pb2 as pb

TOKENS = 24 * 4 * 32

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]


@dataclass
class Run:
    """The finished run; its seed is still up."""

    launch: Launcher
    link: str
    seed: Daemon
    stages: list[Daemon]
    codes: list[int]
    while_running: dict[str, Any]

    def files(self, name: str, pattern: str) -> list[Path]:
        return sorted((self.launch.root / name).glob(f"runs/*/bundles/{pattern}"))


@pytest.fixture(scope="module")
def run(tiny_model: Path, adapt_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    root = tmp_path_factory.mktemp("run")
    with launcher(root) as launch:
        seed = launch.seed(write_spec(root / "run.toml", tiny_model, adapt_text))
        link = seed.link()
        stages = [launch.stage(link, 1, name) for name in ("left", "right")]
        # Without the first stage nothing can have finished yet.
        until(lambda: _working(seed), "both replicas are seen to work")
        done = meshd("status", "--json", "--state-dir", str(seed.state))
        assert done.code == 0, done.err
        stages.append(launch.start("first", "join", link))
        codes = [daemon.ended() for daemon in stages]
        yield Run(launch, link, seed, stages, codes, json.loads(done.out))
        seed.leave()
        assert launch.sessions() == []
        assert launch.forgotten() == []


def _working(seed: Daemon) -> bool:
    states = [peer.state for peer in status(seed).peers]
    return states == [pb.PEER_STATE_WORKING] * 2


def test_stage_peers_end_by_themselves_with_exit_code_0(run: Run) -> None:
    for daemon, code in zip(run.stages, run.codes, strict=True):
        assert code == 0, daemon.text()
        assert "Traceback" not in daemon.text()
    # It was not told where it is needed.
    assert "stage_claimed stage=0" in run.stages[2].text()


def test_status_while_running_shows_every_peer(run: Run) -> None:
    reply = run.while_running
    assert sorted(peer["name"] for peer in reply["peers"]) == ["left", "right"]
    assert {peer["doing"] for peer in reply["peers"]} == {"serving stage 1"}
    assert reply["self"]["role"] == "ROLE_SEED"
    assert not reply["finished"]
    assert int(reply["stop_tokens"]) == TOKENS


def test_status_of_the_finished_run_is_complete(run: Run) -> None:
    reply = status(run.seed)
    assert reply.finished
    assert reply.global_tokens == TOKENS
    assert [point.tokens for point in reply.evaluations] == [0, TOKENS // 2, TOKENS]
    assert reply.evaluations[-1].loss < reply.evaluations[0].loss
    shown = meshd("status", "--state-dir", str(run.seed.state))
    assert shown.code == 0
    assert "finished" in shown.out
    assert f"{TOKENS:,} / {TOKENS:,} tokens" in shown.out


def test_replicas_of_a_stage_end_alike(run: Run) -> None:
    left, right = (load_file(run.files(name, "live/1/weights.safetensors")[0]) for name in ("left", "right"))
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize("source", ["state directory", pytest.param("link", marks=pytest.mark.slow)])
def test_export_is_a_checkpoint_with_the_reported_held_out_loss(
    run: Run, source: str, tmp_path: Path
) -> None:
    where = ["--state-dir", str(run.seed.state)] if source == "state directory" else [run.link]
    done = meshd("export", str(tmp_path / "out"), *where)
    assert done.code == 0, done.err
    assert done.out == f"checkpoint: {tmp_path / 'out'} ({TOKENS} tokens)\n"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("text")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    data = Dataset.open(run.files("seed", "run/data/facts.json")[0].parent)
    total, count = 0.0, 0
    with torch.inference_mode():
        for batch in data.held_out_batches(2, 64):
            logits = model(batch.inputs).logits.flatten(0, 1)
            total += torch.nn.functional.cross_entropy(logits, batch.labels.flatten(), reduction="sum").item()
            count += batch.labels.numel()
    reported = status(run.seed).evaluations[-1]
    assert reported.label_tokens == count
    # bf16 rounds what crosses the boundary.
    assert total / count == pytest.approx(reported.loss, abs=2e-3)
