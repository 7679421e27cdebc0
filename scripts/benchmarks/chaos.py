"""Chaos on real processes: a local swarm whose peers are killed, frozen and restarted while it trains.

    scripts/chaos                            # 6 peers and a seed, a fault every 45 s for 8 min, then 3 undisturbed runs
    scripts/chaos --duration 75 --period 20 --replicas 1,1,1 --undisturbed 1 --out /tmp/chaos.json

A fault is a kill (SIGKILL to the daemon and its p2pd, started again after 0 to 15 s), a freeze (SIGSTOP to both for 3
to 16 s, then SIGCONT or SIGKILL) or a restart (SIGTERM, started again); all peers, the seed included, have their turn.
Then: all peers are up again, the injectors drain, everybody leaves. From the journals on disk comes what became of
every microbatch, from the peers' metrics (asked every second, for they die with their process) the rest, from the logs
who noticed a fault and when. The newest snapshot is exported, and its held-out loss measured by transformers; the
undisturbed runs train to the same count of tokens and are measured in the same way. As root on Linux every peer gets a
network namespace of its own, and links are cut, too (for 12 to 25 s); elsewhere all are on loopback.

Exit code 0: all bars met, and saved to docs/results/chaos.json. 1: a bar was missed or not measured (then it is saved
beside it, as chaos.missed.json), or the run failed (then nothing is saved). Ctrl-C ends everything at once; after a
SIGKILL of this script the next start with the same directory ends what was left. Nothing else should run on the
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

from results import ROOT, save
from rich.console import Console

from meshd.cli import prepare_environment
from meshd.config.load import load_run_spec
from meshd.errors import MeshdError


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="scripts/chaos"
    )
    parser.add_argument("--duration", type=float, default=480.0, help="seconds in which faults come (480)")
    parser.add_argument("--period", type=float, default=45.0, help="seconds from fault to fault (45)")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule of faults (1)")
    parser.add_argument("--undisturbed", type=int, default=3, metavar="N", help="runs to compare with (3)")
    parser.add_argument("--replicas", default="2,2,2", help="peers of each stage, besides the seed (2,2,2)")
    parser.add_argument(
        "--spec",
        type=Path,
        default=ROOT / "scripts/chaos.toml",
        help="run spec, for another model or text (scripts/chaos.toml); its end and schedule are set here",
    )
    parser.add_argument(
        "--directory", type=Path, default=ROOT / "runs/chaos", help="state and logs (runs/chaos)"
    )
    parser.add_argument("--no-cut", action="store_true", help="no cut links, no network namespaces")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/chaos.json")
    return parser.parse_args()


def measure(given: argparse.Namespace) -> int:
    from meshd.swarm.chaos.main import ChaosOptions, run_chaos
    from meshd.swarm.chaos.verdict import bars, detections, noticing, rows, table
    from meshd.swarm.replicas import replicas_of

    spec = load_run_spec(given.spec)
    chosen = ChaosOptions(
        spec,
        replicas_of(given.replicas, spec.model.stages),
        given.directory.absolute(),
        given.duration,
        given.period,
        given.seed,
        given.undisturbed,
        cut=not given.no_cut,
    )
    console, began = Console(), time.monotonic()

    def tell(line: str) -> None:
        console.print(
            f"[{time.monotonic() - began:6.1f} s] {line}", markup=False, highlight=False, soft_wrap=True
        )

    # Plain asyncio: children are started without fork handlers.
    chaos, plain = asyncio.run(run_chaos(chosen, tell))
    found, judged, struck = rows(chaos, plain), bars(chaos, plain), detections(chaos.trial.struck)
    noticed = noticing(chaos.trial.struck)
    # A table of this many columns is not for 80 of them.
    Console(width=max(console.width, 190)).print(table(found))
    for one in struck:
        seconds = (
            "not noticed by a stream" if one["noticed_s"] is None else f"{one['noticed_s']} s, by {one['by']}"
        )
        print(f"  {one['at_s']:6.0f} s  {one['peer']:<10} {one['fault']:<30} {seconds}")
    for what, text in noticed.items():
        print(f"noticed, {what}: {text}")
    for bar in judged:
        print(f"{'-' if bar.met is None else 'yes' if bar.met else 'NO':<4} {bar.name}: {bar.found}")
    met = all(bar.met for bar in judged)
    out = given.out if met else given.out.with_suffix(".missed.json")
    save(
        out,
        found,
        faults=struck,
        noticed=noticed,
        bars={bar.name: {"met": bar.met, "found": bar.found} for bar in judged},
    )
    print(f"saved: {out}")
    return 0 if met else 1


def main() -> None:
    given = options()
    prepare_environment(threads=0)
    try:
        code = measure(given)
    except MeshdError as error:
        print(f"scripts/chaos: {error}", file=sys.stderr)
        code = error.exit_code
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("scripts/chaos: stopped, nothing saved", file=sys.stderr)
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
