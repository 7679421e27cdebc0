"""How fast a local swarm trains, against single-process training of the same model on the same cores, in one run.

    .venv/bin/python scripts/benchmarks/swarm_speed.py [--steps 12] [--out docs/results/swarm_speed.json]

The yardstick is plain torch with activation recomputation (transformers' gradient checkpointing), fused AdamW, the
same microbatches and the same frozen embedding, with one and with two threads; the better one counts. The swarm is the
README's: a seed and three stages, the middle one with two replicas, one thread each, dense codec, DHT, gRPC on
loopback. Also recorded: the highest private (anonymous) memory of every daemon, and for a stage what it needs in any
case (weights, gradients, optimizer state, one microbatch, as the daemon estimates it before it loads) and what it
takes beyond.
Needs the packaged model (about 100 MB from the package index, once). Nothing else should run on the machine.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import psutil
from results import ROOT, save

from meshd.observe.metrics import private_bytes


def spec_text(steps: int) -> str:
    """The README's run, shortened, without evaluation and snapshots in between: training alone is timed."""
    text = (ROOT / "scripts/swarm.toml").read_text()
    spec = tomllib.loads(text)
    batch = spec["optim"]["inner_batch"] * spec["data"]["seq_len"]
    head = text.partition("[snapshot]")[0]
    return (
        f"{head}[snapshot]\nevery_tokens = {10 * steps * batch}\nevaluate = false\n[stop]\nsteps = {steps}\n"
    )


def alone(spec: dict, threads: int, steps: int) -> float:
    """Tokens/s of single-process training in a process of its own (a count of threads cannot be lowered later)."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import swarm_speed as b; " + (
        f"print(b.train({spec!r}, {threads}, {steps}))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    return float(out.stdout.split()[-1])


def train(spec: dict, threads: int, steps: int) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    from meshd.model.sources import resolve_source

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(resolve_source(spec["model"]["source"]), dtype=torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    model.get_input_embeddings().weight.requires_grad_(False)  # as a frozen tie leaves it
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    rows, columns = spec["data"]["microbatch"], spec["data"]["seq_len"]
    per_step = spec["optim"]["inner_batch"] // rows
    ids = torch.randint(0, model.config.vocab_size, (rows, columns + 1))
    began = 0.0
    for step in range(steps + 1):
        if step == 1:  # the first one warms up
            began = time.perf_counter()
        for _ in range(per_step):
            logits = model(ids[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            (loss / per_step).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return steps * per_step * rows * columns / (time.perf_counter() - began)


def swarm(steps: int) -> tuple[float, list[dict]]:
    """Tokens/s of the swarm while it trains, and what its daemons used."""
    folder = Path(tempfile.mkdtemp(prefix="meshd-bench-"))
    try:
        (folder / "run.toml").write_text(spec_text(steps))
        command = [sys.executable, "-m", "meshd", "swarm", str(folder / "run.toml"), "--replicas", "1,2,1"]
        with open(folder / "log", "w") as log:
            child = subprocess.Popen(
                [*command, "--directory", str(folder / "d"), "--no-ui"], stdout=log, stderr=log
            )
            memory: dict[str, dict] = {}
            while child.poll() is None:
                time.sleep(2)
                watch(folder / "d", memory)
        if child.returncode:
            raise SystemExit(f"the swarm failed:\n{(folder / 'log').read_text()[-2000:]}")
        report = json.loads((folder / "d/report.json").read_text())
        return report["tokens_per_s"], [beyond_need(row, folder / "d") for row in memory.values()]
    finally:
        shutil.rmtree(folder)


def watch(directory: Path, memory: dict[str, dict]) -> None:
    """Highest private memory of each daemon seen so far."""
    for file in directory.glob("peers/*/daemon.json"):
        try:
            process = psutil.Process(json.loads(file.read_text())["pid"])
            private = private_bytes(process)
        except (psutil.NoSuchProcess, OSError, ValueError):
            continue  # it has just left
        row = memory.setdefault(file.parent.name, {"peer": file.parent.name, "private_mb": 0})
        row["private_mb"] = max(row["private_mb"], round(private / 1e6))


def beyond_need(row: dict, directory: Path) -> dict:
    """The row of a stage's daemon with what it needed and what it took beyond, MB."""
    from meshd.config.runspec import ResolvedRun
    from meshd.model.families import load_config
    from meshd.model.weights import memory_estimate

    stage = re.fullmatch(r"stage(\d+)-\d+", row["peer"])
    if stage is None:
        return row
    state = directory / "peers" / row["peer"]
    run = ResolvedRun.model_validate_json(next(state.glob("**/run.json")).read_bytes())
    config = load_config(next(state.glob("**/config.json")).parent)
    data, cut = run.spec.data, run.resolved.cut
    need = memory_estimate(config, cut, run.resolved.tied, int(stage[1]), data.microbatch, data.seq_len).total
    return {**row, "needed_mb": round(need / 1e6), "beyond_mb": row["private_mb"] - round(need / 1e6)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="inner steps of the swarm")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/swarm_speed.json")
    options = parser.parse_args()
    spec = tomllib.loads(spec_text(options.steps))
    rows = [
        {"arm": f"single process, {threads} threads", "tokens_per_s": round(alone(spec, threads, 4), 1)}
        for threads in (1, 2)
    ]
    speed, memory = swarm(options.steps)
    best = max(row["tokens_per_s"] for row in rows)
    rows.append({"arm": "swarm 1,2,1", "tokens_per_s": round(speed, 1), "of_single": round(speed / best, 3)})
    save(options.out, rows, memory=memory)
    for row in [*rows, *memory]:
        print(row)


if __name__ == "__main__":
    main()
