"""What averaging between replicas costs in loss at how few bytes: compressed gossip against dense averaging.

    .venv/bin/python scripts/benchmarks/gossip.py [--steps 900] [--replicas 8] [--out docs/results/gossip.json]
    .venv/bin/python scripts/benchmarks/gossip.py --model packaged:smollm2-135m --replicas 2 --steps 400 --held 16

Replicas of a pretrained Llama are trained side by side on text far from its training data (German manual pages), each
with its own AdamW and its own windows of the text, embeddings frozen. Only the way they average differs between the
arms; windows, seeds and schedule are the same. Exchanges run through the product's own code (meshd/gossip), without a
network. Judged is the worst replica as it is at the end: nothing is averaged for it.

Columns: ratio, bytes of dense bf16 averaging at every inner step over those that a replica sends; recovered, the share
of dense's improvement on held-out pages; exchanged, how often each coordinate was; fewest, the same of the one, of any
replica, that was least often; consensus, root mean square distance of values to the replicas' mean. Rows of other
models and learning rates that the file holds already are kept.
"""

import argparse
import json
import math
import os
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from gossip_fleet import TEXT, Fleet, Text, Training, folder_of, tokenized
from gossip_methods import DENSE, DENSE_BYTES, Arm, averaging
from results import ROOT, save
from rich.console import Console
from rich.table import Table
from transformers import logging

gossip = partial(Arm, kind="gossip", bits=3, outer_momentum=0.5)

ARMS = [
    Arm(DENSE, "dense", real=True),
    Arm("local", "local", real=True),
    gossip("gossip 640x", every=10, subset=13, real=True),
    gossip("gossip 16x", every=1, subset=3, outer_momentum=0.0),
    gossip("gossip 64x", every=3, subset=4, outer_momentum=0.0),
    gossip("gossip 256x", every=10, subset=5, real=True),
    gossip("gossip 1024x", every=16, subset=13),
    gossip("gossip 4096x", every=32, subset=30),
    Arm("agora: 5 % every 20 steps", "sparse", every=20, subset=20, real=True),
    Arm("powersgd 64x every 10 steps", "powersgd", every=10, factor=64, real=True),
    gossip("gossip 640x, no outer step", every=10, subset=13, outer_momentum=0.0),
    gossip("gossip 640x, moments averaged too", every=10, subset=13, moments=True),
    gossip("int8 to the base", every=10, subset=32, bits=8, form="base"),
    gossip("int4 to the base", every=10, subset=16, bits=4, form="base"),
    gossip("sign to the base", every=10, subset=4, bits=1, form="base"),
]


def measure(arm: Arm, training: Training, text: Text, threads: int) -> dict[str, object]:
    """Train all replicas by an arm. Its row, but for what follows from dense's."""
    began = perf_counter()
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    # Gradients are views of one matrix as parameters are: they are added to in place, as they should be.
    warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")
    fleet = Fleet(folder_of(training.model), training, text)
    loss_start = fleet.held_out(fleet.start[None])[0]
    method = averaging(arm, fleet)
    training_began = perf_counter()
    for step in range(1, training.steps + 1):
        loss = fleet.step(step - 1)
        with torch.no_grad():
            method.stepped(step)
        if step % max(1, training.steps // 5) == 0:
            each = (perf_counter() - training_began) / step
            print(
                f"{arm.name}: step {step}/{training.steps}, training loss {loss:.3f}, {each:.2f} s a step",
                flush=True,
            )
    losses, mean = fleet.held_out(fleet.values), fleet.values.mean(0, keepdim=True)
    loss_of_mean = fleet.held_out(mean)[0]
    if not all(map(math.isfinite, [*losses, loss_of_mean])):
        raise SystemExit(f"{arm.name}: the loss is not finite")
    all_values = training.replicas * fleet.count
    dense_bytes = DENSE_BYTES * all_values * training.steps
    return {
        "model": training.model,
        "replicas": training.replicas,
        "method": arm.name,
        "byte_ratio": round(dense_bytes / method.bytes_sent, 1) if method.bytes_sent else None,
        "loss_start": round(loss_start, 4),
        "loss_dense": None,
        "loss": round(max(losses), 4),
        "recovered": None,
        "loss_best": round(min(losses), 4),
        "loss_of_mean": round(loss_of_mean, 4),
        "lr": training.lr,
        "steps": training.steps,
        "tokens": training.steps * training.replicas * training.batch * training.seq,
        "every": arm.every if method.exchanged else None,
        "subset": arm.subset if method.exchanged else None,
        "bits": arm.bits if arm.kind == "gossip" else None,
        "outer_momentum": arm.outer_momentum,
        "exchanges_per_coordinate": round(method.exchanged / all_values, 2),
        "fewest_exchanges": method.fewest,
        "consensus": float(f"{(fleet.values - mean).square().mean().sqrt().item():.3g}"),
        "seconds": round(perf_counter() - began),
    }


def measured(
    arms: list[Arm], training: Training, text: Text, jobs: int, threads: int
) -> Iterator[dict[str, object]]:
    """Rows in the order in which they come, `jobs` arms at a time. One that fails ends it all."""

    def apart(arm: Arm) -> dict[str, object]:
        # A process for each arm: what one leaves in memory would be missing for the next.
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            return process.submit(measure, arm, training, text, threads).result()

    with ThreadPoolExecutor(jobs) as waiting:
        futures = [waiting.submit(apart, arm) for arm in arms]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            waiting.shutdown(cancel_futures=True)


def with_dense(row: dict, dense: dict | None) -> dict:
    """A row with what dense averaging came to, and what share of its improvement the row's method has."""
    if dense is None:
        return row
    improved, of_dense = row["loss_start"] - row["loss"], dense["loss_start"] - dense["loss"]
    return row | {"loss_dense": dense["loss"], "recovered": round(improved / of_dense, 4)}


def view(rows: list[dict]) -> Table:
    """The table that is printed."""
    columns = {
        "method": "method",
        "byte_ratio": "ratio",
        "loss": "loss, worst",
        "loss_best": "best",
        "loss_of_mean": "of the mean",
        "recovered": "recovered",
        "every": "every",
        "subset": "subset",
        "bits": "bits",
        "outer_momentum": "momentum",
        "exchanges_per_coordinate": "exchanged",
        "fewest_exchanges": "fewest",
        "consensus": "consensus",
        "seconds": "s",
    }
    table = Table(
        title=f"{rows[0]['model']}, {rows[0]['replicas']} replicas, {rows[0]['steps']} steps, lr {rows[0]['lr']}"
    )
    for key, title in columns.items():
        table.add_column(title, justify="left" if key == "method" else "right")
    for row in rows:
        cells = {key: "-" if row[key] is None else str(row[key]) for key in columns}
        if row["recovered"] is not None:
            cells["recovered"] = f"{row['recovered']:.1%}"
        table.add_row(*cells.values())
    return table


def save_beside(path: Path, rows: list[dict], **more: object) -> None:
    """Save rows of one model and learning rate; others that the file holds stay, with what they came from."""
    kept, earlier = [], []
    if path.is_file():
        before = json.loads(path.read_text())
        kept = [row for row in before["rows"] if any(row[key] != rows[0][key] for key in ("model", "lr"))]
        runs = [
            *before.get("earlier", []),
            {key: before[key] for key in before if key not in ("rows", "earlier")},
        ]
        needed = {(row["model"], row["lr"]) for row in kept}
        earlier = [run for run in runs if (run["model"], run["lr"]) in needed]
    save(path, [*rows, *kept], model=rows[0]["model"], **more, earlier=earlier)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tests/data/tiny", help="as model.source: a Llama")
    parser.add_argument("--steps", type=int, default=900, help="inner steps of every replica")
    parser.add_argument("--replicas", type=int, default=8, help="an even number")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak; a cosine down to a tenth of it")
    parser.add_argument("--seq", type=int, default=64, help="tokens of a window")
    parser.add_argument("--batch", type=int, default=1, help="windows of a replica's inner step")
    parser.add_argument(
        "--held", type=int, default=40, help="windows of 256 held-out tokens that are measured"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the windows and of who meets whom")
    parser.add_argument("--jobs", type=int, default=2, help="arms at a time")
    parser.add_argument("--threads", type=int, default=1, help="of torch, for each")
    parser.add_argument("--arms", default="", help="regular expression; for trials: saves only with --out")
    parser.add_argument("--out", type=Path, help="default: docs/results/gossip.json")
    options = parser.parse_args()
    if options.replicas % 2:
        parser.error("--replicas must be even: they exchange in pairs")
    small = options.model == parser.get_default("model")
    arms = [arm for arm in ARMS if (small or arm.real) and re.search(options.arms, arm.name)]
    if not arms:
        parser.error(f"--arms {options.arms}: there is none")
    out = options.out or (None if options.arms else ROOT / "docs/results/gossip.json")
    training = Training(
        **{
            key: getattr(options, key)
            for key in ("model", "replicas", "steps", "lr", "seq", "batch", "held", "seed")
        }
    )
    text = tokenized(folder_of(training.model))
    print(f"{len(text.train)} tokens to train on, {len(text.held)} held out", flush=True)
    by_name: dict[str, dict] = {}
    for row in measured(arms, training, text, options.jobs, options.threads):
        by_name[row["method"]] = row
        print(json.dumps(with_dense(row, by_name.get(DENSE))), flush=True)
    rows = [with_dense(by_name[arm.name], by_name.get(DENSE)) for arm in arms]
    Console(width=170).print(view(rows))
    if out:
        save_beside(out, rows, text=TEXT, lr=training.lr, seq=training.seq, batch=training.batch)


if __name__ == "__main__":
    main()
