"""The command line of scripts/wanlab."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from meshd.cli import prepare_environment
from meshd.config.load import load_run_spec, validate
from meshd.config.peer import LinkTable
from meshd.errors import ConfigError, MeshdError

# Of a limited uplink, what the peers' own shapers may fill with --pace: then what waits, waits where it has priorities.
PACE = 0.95


def parser() -> argparse.ArgumentParser:
    from meshd.swarm.wan.rates import parse_rate

    def rate(text: str) -> int:
        try:
            return parse_rate(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    made = argparse.ArgumentParser(
        prog="scripts/wanlab",
        description="Run a swarm of real daemons on this machine, each behind a link that the kernel limits, and "
        "measure what it trains and sends. Linux, as root. See docs/lab.md.",
    )
    made.add_argument("run_file", type=Path, metavar="RUN.toml", help="the run spec")
    made.add_argument(
        "--replicas", metavar="N,N,...", help="peers of each stage, besides the seed (one each)"
    )
    made.add_argument("--anchors", type=_natural, default=0, help="anchors besides (0)")
    made.add_argument("--rate", type=rate, default=0, help="of every link, both ways: 20mbit, 500kbit (none)")
    made.add_argument("--up", type=rate, help="of every uplink, in place of --rate")
    made.add_argument("--down", type=rate, help="of every downlink, in place of --rate")
    made.add_argument("--delay-ms", type=float, default=0.0, help="one way, by the peers' own shapers (0)")
    made.add_argument("--jitter-ms", type=float, default=0.0, help="up to so much more (0)")
    made.add_argument(
        "--pace",
        action="store_true",
        help=f"peers know their uplink and send at {PACE:.0%}% of it at most: then what is urgent overtakes",
    )
    made.add_argument("--warmup", type=_seconds, default=10.0, help="seconds from the first commit on (10)")
    end = made.add_mutually_exclusive_group()
    end.add_argument("--seconds", type=_seconds, help="how long to measure (60)")
    end.add_argument("--tokens", type=_natural, help="how many committed tokens to measure")
    made.add_argument("--threads", type=_natural, default=1, help="torch threads of each process (1)")
    made.add_argument("--directory", type=Path, help="state and logs (runs/NAME-wan)")
    return made


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    prepare_environment(threads=0)
    from meshd.swarm.wan.network import check_ground

    console, began = Console(), time.monotonic()

    def tell(line: str) -> None:
        age = time.monotonic() - began
        console.print(f"[{age:6.1f} s] {line}", markup=False, highlight=False, soft_wrap=True)

    try:
        check_ground()
        return _run(given, console, tell)
    except MeshdError as error:
        print(f"wanlab: {error}", file=sys.stderr)
        return error.exit_code


def _run(given: argparse.Namespace, console: Console, tell: Callable[[str], None]) -> int:
    from meshd.swarm.replicas import replicas_of
    from meshd.swarm.wan.lab import LabOptions, run_lab
    from meshd.swarm.wan.rates import Link

    spec = load_run_spec(given.run_file)
    link = Link(
        given.rate if given.up is None else given.up, given.rate if given.down is None else given.down
    )
    if given.pace and not link.up_bps:
        raise ConfigError("--pace", True, "uplinks have no limit to keep to", "add --rate or --up")
    shaped = {
        "delay_ms": given.delay_ms,
        "jitter_ms": given.jitter_ms,
        "rate_bps": int(link.up_bps * PACE) if given.pace else 0,
    }
    validate(LinkTable, shaped, "options")
    directory = (given.directory or Path("runs") / f"{spec.name}-wan").absolute()
    options = LabOptions(
        given.run_file.absolute(),
        spec,
        directory,
        replicas_of(given.replicas, spec.model.stages),
        link,
        shaped,
        given.warmup,
        given.seconds or (None if given.tokens else 60.0),
        given.tokens,
        given.threads,
        given.anchors,
    )
    directory.mkdir(parents=True, exist_ok=True)
    try:
        result = asyncio.run(run_lab(options, tell))
    except (asyncio.CancelledError, KeyboardInterrupt):
        print(f"stopped; logs in {directory / 'logs'}")
        return 130
    console.print(result.table())
    print(result.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
