"""C26: a fork while RPCs are in flight freezes the parent, so nothing in meshd forks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshd

ROOT = Path(meshd.__file__).parent
FORKS = {"os.fork", "os.forkpty", "pty.fork"}
POOLS = {
    "multiprocessing",
    "torch.multiprocessing",
    "concurrent.futures.ProcessPoolExecutor",
    "concurrent.futures.process",
}
# `subprocess` uses vfork there, which runs no fork handlers; a function to run in the child makes it fork. The second
# and third call the package installer for a packaged model or text, the last two `ip`, in scripts without a server.
STARTS_PROCESSES = {
    "discovery/p2pd_process.py",
    "model/packaged.py",
    "data/known.py",
    "swarm/chaos/network.py",
    "swarm/wan/network.py",
}
# The supervisor of a local swarm is a process without a server.
SUPERVISOR = {"swarm/process.py"}
# Both fork, on uvloop.
LOOP_STARTS = {"asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"}


def names(tree: ast.AST) -> Iterator[str]:
    """Dotted names that are imported or used."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def offences(source: str, file: str) -> list[str]:
    """What in a module would fork a daemon."""
    tree = ast.parse(source)
    used = set(names(tree))
    forbidden = FORKS | POOLS
    if file not in SUPERVISOR:
        forbidden = forbidden | LOOP_STARTS
        if file not in STARTS_PROCESSES:
            forbidden = forbidden | {"subprocess"}
    found = [name for name in used for bad in forbidden if name == bad or name.startswith(f"{bad}.")]
    arguments = {k.arg for node in ast.walk(tree) if isinstance(node, ast.Call) for k in node.keywords}
    return found + sorted(arguments & {"preexec_fn"})


@pytest.mark.parametrize(
    "file", sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if path.parent.name != "proto")
)
def test_c26_no_module_forks(file: str) -> None:
    assert offences((ROOT / file).read_text(), file) == []


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.fork()",
        "from os import fork",
        "import multiprocessing as mp",
        "from multiprocessing import get_context",
        "from concurrent.futures import ProcessPoolExecutor",
        "import subprocess\nsubprocess.run(['true'])",
        "import asyncio\nasyncio.create_subprocess_exec('true')",
        "start(preexec_fn=print)",
    ],
)
def test_the_check_finds_what_forks(source: str) -> None:
    assert offences(source, "daemon.py") != []
