"""Saving what a benchmark measured: beside its command, commit, machine and date."""

import datetime
import json
import platform
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]


def machine() -> str:
    """What this was measured on, in words."""
    return (
        f"{platform.machine()}, {psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"
    )


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return found.stdout.strip()


def save(path: Path, rows: list[dict], **more: object) -> None:
    """Write a whole result in one step: a run that failed on the way has written nothing over the last good one."""
    result = {
        "command": " ".join([f"scripts/benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        **more,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(result, indent=1) + "\n")
    draft.replace(path)
