"""What masking costs in quality, and what anchors give back of it.

    .venv/bin/python scripts/benchmarks/quality.py run tiny de [--arms REGEX] [--seeds 0,1,2] [--lr 1e-3,2e-3]
    .venv/bin/python scripts/benchmarks/quality.py daemons tiny de --arms '^spectral 16x, inject$'
    .venv/bin/python scripts/benchmarks/quality.py table

`run` trains every arm on the same text in the same order, for each seed and learning rate, and adds a line to
docs/quality/runs.jsonl for each; what is there already is not run again, so that a long run fits into pieces. Two may
run at once, with other arms or seeds. `daemons` trains the same run spec with `meshd swarm`, in real processes, and
measures the checkpoint that it exports on the same text: an arm of one process and one of daemons should agree. `table`
makes docs/results/quality.json, docs/quality/README.md and curves of it: of every arm the learning rate that is best on
text set apart for that.
"""

import argparse
import datetime
import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from time import process_time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from gossip_methods import Arm as Averaging
from quality_run import Arm, Swarm
from quality_table import tabulate
from results import ROOT, commit, machine

from meshd.config.fields import toml_value
from meshd.config.load import validate
from meshd.config.runspec import ResolvedRun, RunSpec
from meshd.data.microbatch import Microbatch
from meshd.peer.resolve import resolve

RUNS = ROOT / "docs/quality/runs.jsonl"
TASKS = {"de": "packaged:manpages-de", "bio": "packaged:biomedical"}


@dataclass(frozen=True)
class Setting:
    """A model and how long it is trained. held, chosen_on: windows of held-out text that losses are of, and others
    that learning rates are chosen on. lrs: the grid."""

    model: str
    stages: int
    steps: int
    seq: int
    microbatch: int
    batch: int
    prior_tokens: int
    held: int
    chosen_on: int
    lrs: tuple[float, ...]


SETTINGS = {
    "tiny": Setting("tests/data/tiny", 4, 200, 64, 4, 16, 8192, 800, 200, (5e-4, 1e-3, 2e-3)),
    "smollm2": Setting("packaged:smollm2-135m", 4, 100, 128, 4, 4, 8192, 400, 100, (1e-4,)),
}

SPECTRAL = {
    "16x": ("spectral:bits=1.46", "spectral:bits=0.5"),
    "20x": ("spectral:bits=1.17", "spectral:bits=0.4"),
    "32x": ("spectral:bits=0.72", "spectral:bits=0.25"),
    "64x": ("spectral:bits=0.34", "spectral:bits=0.12"),
}
GOSSIP = Averaging("gossip 640x", "gossip", every=10, subset=13, bits=3, outer_momentum=0.5)
FAITHFUL = ("random:keep=0.05", "random:keep=0.05")


def spectral(name: str, ratio: str, **values: Any) -> Arm:
    there, back = SPECTRAL[ratio]
    return Arm(f"spectral {ratio}{name}", there, back, **values)


def _arms() -> Iterator[Arm]:
    yield Arm("dense")
    # Anchors see text beyond the swarm's: as much more for dense.
    yield Arm("dense, anchors' tokens too", longer=1.1)
    yield Arm("dense, inject", anchors=1, corrector="inject:lambda=0.15")
    yield Arm("anchors alone", anchors=1, corrector="inject", only=True)
    for ratio in SPECTRAL:
        yield spectral(", no anchors", ratio)
        yield spectral("", ratio, anchors=1)
        for corrector in ("inject:lambda=0.15", "wiener", "signed", "filter:relative=0.1"):
            yield spectral(f", {corrector.partition(':')[0]}", ratio, anchors=1, corrector=corrector)
    yield spectral(", inject 0.3", "16x", anchors=1, corrector="inject:lambda=0.3")
    yield spectral(", inject 0.05", "16x", anchors=1, corrector="inject:lambda=0.05")
    for ratio in ("16x", "32x"):
        yield spectral(
            ", inject, gossip", ratio, anchors=1, corrector="inject:lambda=0.15", replicas=2, averaging=GOSSIP
        )
    full = {"corrector": "filter:tau=0.001", "rank": 0, "half_life": 1e9}
    for keep, ratio in (("0.1", "10x"), ("0.05", "20x")):
        codec = f"random:keep={keep}"
        yield Arm(f"random {ratio}, no anchors", codec, codec)
        yield Arm(f"faithful {ratio}", codec, codec, anchors=1, **full)
    inject = {"anchors": 1, "corrector": "inject:lambda=0.15"}
    for name, values in {
        "cadence 5": {"cadence": 5},
        "cadence 50": {"cadence": 50},
        "at once": {"delay": 0},
        "40 steps late": {"delay": 40},
        "rank 8": {"rank": 8},
        "rank 128": {"rank": 128},
        "follows a 13th": {"follow": 13},
        "2 anchors": {"anchors": 2},
        "4 anchors": {"anchors": 4},
        "3 anchors": {"anchors": 3},
        "3 anchors, one lies": {"anchors": 3, "liars": 1},
    }.items():
        yield spectral(f", inject, {name}", "16x", **(inject | values))


ARMS = list(_arms())


def spec_of(setting: Setting, task: str, arm: Arm, seed: int, lr: float) -> RunSpec:
    here = ROOT / setting.model
    return validate(
        RunSpec,
        {
            "name": "quality",
            "seed": seed,
            "model": {
                "source": str(here) if here.is_dir() else setting.model,
                "stages": setting.stages,
                "tied": "freeze",
            },
            "data": {
                "sources": [TASKS[task]],
                "seq_len": setting.seq,
                "microbatch": setting.microbatch,
                "held_out": 0.12,
                "held_out_sequences": 2 * (setting.held + setting.chosen_on),
            },
            "optim": {"lr": lr, "inner_batch": setting.batch, "warmup_steps": 10},
            "wire": {"forward": arm.forward, "backward": arm.backward, "prior_tokens": setting.prior_tokens},
            "anchors": {
                "refresh_steps": arm.cadence,
                "passes": arm.passes,
                "rank": arm.rank or 256,
                "corrector": arm.corrector,
                "half_life_steps": arm.half_life,
                "max_staleness_steps": 2 * arm.cadence + arm.delay,
            },
            "pipeline": {"recompute": False},
            "stop": {"steps": round(setting.steps * arm.longer)},
        },
        "quality",
    )


def prepared(setting: Setting, task: str) -> tuple[ResolvedRun, Path]:
    """Model and text as every run of a setting and task has them, made once."""
    spec = spec_of(setting, task, Arm("dense"), 0, setting.lrs[0])
    return resolve(spec, ROOT / "runs/quality", "benchmark")


def held_out(swarm: Swarm, setting: Setting, chosen_on: bool) -> Iterator[Microbatch]:
    """Windows that losses are of, or the others that learning rates are chosen on: every other microbatch, spread over
    the held-out text."""
    count = setting.chosen_on if chosen_on else setting.held
    batches = swarm.data.held_out_batches(setting.microbatch, 2 * count)
    return islice(batches, int(chosen_on), None, 2)


def run(
    setting: Setting, name: str, task: str, arm: Arm, seed: int, lr: float, start: float | None
) -> dict[str, Any]:
    """Train one arm. Returns its row."""
    found, folder = prepared(setting, task)
    spec = spec_of(setting, task, arm, seed, lr)
    torch.manual_seed(seed)
    began = process_time()
    swarm = Swarm(arm, ResolvedRun(spec=spec, resolved=found.resolved, operator=found.operator), folder)
    if start is None:
        start = swarm.loss(held_out(swarm, setting, False))
    curve, losses = [], []
    for step in range(1, spec.total_steps + 1):
        losses.append(swarm.step())
        if step % max(1, setting.steps // 10) == 0:
            point = swarm.loss(held_out(swarm, replace(setting, chosen_on=16), True))
            curve.append([swarm.tokens, round(point, 4)])
            print(
                f"{arm.name}, seed {seed}, lr {lr:g}: step {step}, {point:.4f}, {process_time() - began:.0f} s",
                flush=True,
            )
    loss = swarm.loss(held_out(swarm, setting, False))
    counted, hidden, boundaries = swarm.bytes, found.resolved.hidden, len(swarm.replicas[0].route) - 1
    crossed = counted.crossed_tokens / 2  # there and back
    dense_dp = 2 * swarm.trained * arm.replicas * swarm.steps
    corrected = swarm.corrected
    return {
        "task": task,
        "model": name,
        "arm": arm.name,
        "corrector": arm.corrector,
        "pp_ratio": round(4 * hidden * counted.coded_tokens / 2 / counted.coded, 2)
        if counted.coded
        else None,
        "dp_ratio": round(dense_dp / swarm.averaged_bytes, 1) if swarm.averaged_bytes else None,
        "tokens": swarm.tokens,
        "seed": seed,
        "loss_start": round(start, 5),
        "loss": round(loss, 5),
        "loss_selection": round(swarm.loss(held_out(swarm, setting, True)), 5),
        "bytes_per_token": round((counted.coded + counted.safe + counted.ids) / crossed, 1),
        "anchor_bytes_per_refresh": (
            round((counted.weight_priors + counted.followed) / counted.refreshes) if counted.refreshes else 0
        ),
        "codec_prior_bytes": counted.priors,
        "lr": lr,
        "steps": swarm.steps,
        "boundaries": boundaries,
        "cosine": round(sum(c.cosine for c in corrected) / len(corrected), 4) if corrected else None,
        "effective_rank": round(sum(c.effective_rank for c in corrected) / len(corrected), 2)
        if corrected
        else None,
        "training_loss": round(sum(losses[-20:]) / len(losses[-20:]), 4),
        "curve": curve,
        "values": arm.values,
        "cpu_s": round(process_time() - began),
    }


def run_daemons(
    setting: Setting, name: str, task: str, arm: Arm, seed: int, lr: float, start: float | None
) -> dict[str, Any]:
    """As `run`, by a swarm of processes. Only what the exported checkpoint tells is known."""
    if arm.only or arm.liars or arm.averaging or arm.rank == 0 or arm.longer != 1:
        raise SystemExit(f"{arm.name}: daemons do not do that")
    spec = spec_of(setting, task, arm, seed, lr)
    slug = re.sub("[^a-z0-9.]+", "-", f"{name} {task} {arm.name} {seed} {lr:g}".lower()).strip("-")
    directory = ROOT / "runs" / f"quality-{slug}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "run.toml").write_text(toml_of(spec.model_dump(mode="json", exclude_none=True)))
    command = [sys.executable, "-m", "meshd", "swarm", str(directory / "run.toml"), "--no-ui"]
    command += ["--directory", str(directory), "--anchors", str(arm.anchors)]
    subprocess.run(command, check=True)
    found, folder = prepared(setting, task)
    swarm = Swarm(
        Arm("base"), ResolvedRun(spec=spec, resolved=found.resolved, operator=found.operator), folder
    )
    if start is None:
        start = swarm.loss(held_out(swarm, setting, False))
    swarm.load(directory / "checkpoint")
    return {
        "task": task,
        "model": name,
        "arm": f"{arm.name} (daemons)",
        "corrector": arm.corrector,
        "pp_ratio": None,
        "dp_ratio": None,
        "tokens": spec.stop_tokens,
        "seed": seed,
        "loss_start": round(start, 5),
        "loss": round(swarm.loss(held_out(swarm, setting, False)), 5),
        "loss_selection": round(swarm.loss(held_out(swarm, setting, True)), 5),
        "bytes_per_token": None,
        "anchor_bytes_per_refresh": None,
        "lr": lr,
        "steps": spec.total_steps,
        "curve": [],
        "values": arm.values | {"daemons": True},
    }


def toml_of(tables: dict[str, Any], prefix: str = "") -> str:
    """Of tables of plain values."""
    own = [f"{key} = {toml_value(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    parts = [
        f"[{prefix}{key}]\n{toml_of(value, f'{prefix}{key}.')}"
        for key, value in tables.items()
        if isinstance(value, dict) and value
    ]
    return "\n".join([*own, "", *parts])


def known() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RUNS.read_text().splitlines()] if RUNS.is_file() else []


def keep(row: dict[str, Any]) -> None:
    """Add a row with where it comes from; others may be adding theirs."""
    row |= {"commit": commit(), "machine": machine(), "date": datetime.date.today().isoformat()}
    RUNS.parent.mkdir(parents=True, exist_ok=True)
    with RUNS.open("a") as out:
        fcntl.flock(out, fcntl.LOCK_EX)
        out.write(json.dumps(row) + "\n")


def same(row: dict[str, Any], name: str, task: str, arm: Arm, seed: int, lr: float, real: bool) -> bool:
    """Whether a row is of this run. real: by daemons."""
    values = json.loads(json.dumps(arm.values | ({"daemons": True} if real else {})))
    return (row["model"], row["task"], row["seed"], row["lr"], row["values"]) == (
        name,
        task,
        seed,
        lr,
        values,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="train arms")
    daemons = commands.add_parser("daemons", help="train arms with real processes")
    for command in (running, daemons):
        command.add_argument("setting", choices=SETTINGS)
        command.add_argument("task", choices=TASKS)
        command.add_argument("--arms", default="", help="regular expression")
        command.add_argument("--seeds", default="0", help="comma-separated")
        command.add_argument("--lr", default="", help="comma-separated; default: the setting's grid")
    commands.add_parser("table", help="write the tables of what was run")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if options.command == "table":
        tabulate(known())
        return
    setting, real = SETTINGS[options.setting], options.command == "daemons"
    arms = [arm for arm in ARMS if re.search(options.arms, arm.name)]
    if not arms:
        parser.error(f"--arms {options.arms}: there is none")
    lrs = [float(lr) for lr in options.lr.split(",")] if options.lr else setting.lrs
    one = run_daemons if real else run
    name, task = options.setting, options.task
    for seed, arm, lr in product(map(int, options.seeds.split(",")), arms, lrs):
        rows = known()
        if any(same(row, name, task, arm, seed, lr, real) for row in rows):
            continue
        # The same for all: nothing is trained yet.
        starts = [row["loss_start"] for row in rows if (row["model"], row["task"]) == (name, task)]
        row = one(setting, name, task, arm, seed, lr, starts[0] if starts else None)
        keep(row)
        print(json.dumps({key: row[key] for key in row if key not in ("curve", "values")}), flush=True)


if __name__ == "__main__":
    main()
