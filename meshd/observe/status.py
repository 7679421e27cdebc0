"""Asking a daemon what it and its swarm do, and showing the answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from meshd.errors import NetworkError
from meshd.observe.daemonfile import DaemonFile
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import LinkLost, Transport

# A peer whose last record is older than this is shown as silent (records are renewed several times as often).
SILENT_S = 30.0

# Of peers that hold no stage of their own.
_UNSTAGED = {pb.ROLE_SEED: "seed", pb.ROLE_ANCHOR: "anchor"}
STATES = {
    pb.PEER_STATE_STARTING: ("starting", "yellow"),
    pb.PEER_STATE_JOINING: ("joining", "yellow"),
    pb.PEER_STATE_SYNCING: ("syncing", "yellow"),
    pb.PEER_STATE_WORKING: ("working", "green"),
    pb.PEER_STATE_DRAINING: ("draining", "cyan"),
    pb.PEER_STATE_FINISHED: ("finished", "cyan"),
}


def daemon_address(state_dir: Path) -> str:
    """gRPC address of the daemon that runs on `state_dir`. Raises NetworkError with what to do when none does."""
    found = DaemonFile.read(state_dir)
    if found is None:
        raise NetworkError(
            f"no daemon runs on {state_dir}: start one with `meshd run` or `meshd join`, or name another with "
            "--state-dir or --address"
        )
    if not found.alive():
        raise NetworkError(
            f"the daemon on {state_dir} (pid {found.pid}, {found.address}) is no longer running: it was killed or "
            "the machine restarted. Start it again; it continues from its state"
        )
    return found.address


async def fetch_status(transport: Transport, address: str, timeout_s: float = 10.0) -> pb.StatusReply:
    """What the daemon at `address` knows of itself and the swarm. Raises NetworkError when it does not answer."""
    try:
        async with asyncio.timeout(timeout_s):
            return await transport.status(address, pb.StatusRequest(swarm=True))
    except LinkLost as lost:
        raise NetworkError(f"no answer from the daemon at {address}: {lost}. Is it running?") from lost
    except TimeoutError:
        raise NetworkError(
            f"the daemon at {address} accepted the call but did not answer in {timeout_s:g} s"
        ) from None


@dataclass(frozen=True)
class SwarmSummary:
    """A StatusReply in the few numbers that people follow.

    tokens_per_s: label tokens through all stage-0 replicas. loss: newest training loss, held_out: newest evaluation,
    both nats per token, None before the first. eta_s: seconds to the stop condition, None when nothing moves.
    stages: peers by stage, ascending; seeds: peers that hold none, anchors too.
    """

    tokens: int
    stop_tokens: int
    tokens_per_s: float
    loss: float | None
    held_out: float | None
    eta_s: float | None
    stages: dict[int, list[pb.PeerStatus]]
    seeds: list[pb.PeerStatus]


def summarize(reply: pb.StatusReply) -> SwarmSummary:
    """The numbers of one reply. Pure."""
    peers = {peer.peer_id: peer for peer in [*reply.peers, reply.self]}
    stages: dict[int, list[pb.PeerStatus]] = {}
    seeds = []
    for peer in sorted(peers.values(), key=lambda peer: (peer.name, peer.peer_id)):
        if peer.role in _UNSTAGED or peer.stage < 0:
            seeds.append(peer)
        else:
            stages.setdefault(peer.stage, []).append(peer)
    rate = sum(peer.tokens_per_s for peer in stages.get(0, []) if peer.age_s < SILENT_S)
    left = max(0, reply.stop_tokens - reply.global_tokens)
    eta = 0.0 if reply.finished or not left else left / rate if rate > 0 else None
    return SwarmSummary(
        tokens=reply.global_tokens,
        stop_tokens=reply.stop_tokens,
        tokens_per_s=rate,
        loss=_newest(reply.losses),
        held_out=_newest(reply.evaluations),
        eta_s=eta,
        stages=dict(sorted(stages.items())),
        seeds=seeds,
    )


def _newest(points: Sequence[pb.LossPoint]) -> float | None:
    return points[-1].loss if points else None


def status_view(reply: pb.StatusReply) -> Group:
    """The whole answer for a terminal: a headline, and one row per peer, by stage."""
    summary = summarize(reply)
    name = reply.run_name or "run"
    head = Text.assemble(
        (name, "bold"), f"  {reply.run_id[:12]}", ("  finished" if reply.finished else "", "green")
    )
    return Group(head, Text(headline(summary)), peers_table(summary))


def headline(summary: SwarmSummary) -> str:
    """`12,800 / 51,200 tokens (25 %)  210 tokens/s  loss 2.950  held-out 3.012  ETA 3 min 2 s`."""
    parts = [f"{summary.tokens:,} / {summary.stop_tokens:,} tokens"]
    if summary.stop_tokens:
        parts[0] += f" ({100 * min(1.0, summary.tokens / summary.stop_tokens):.0f} %)"
    parts.append(f"{summary.tokens_per_s:,.0f} tokens/s")
    if summary.loss is not None:
        parts.append(f"loss {summary.loss:.3f}")
    if summary.held_out is not None:
        parts.append(f"held-out {summary.held_out:.3f}")
    parts.append("ETA " + (duration(summary.eta_s) if summary.eta_s is not None else "unknown"))
    return "  ".join(parts)


def peers_table(summary: SwarmSummary) -> Table:
    """One row per peer; what a silent peer last said is marked as old, and the rest is shown (C08)."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("stage", "peer", "state", "tokens/s", "steps", "doing", "last error"):
        table.add_column(
            title, justify="right" if title in ("tokens/s", "steps") else "left", overflow="fold"
        )
    for stage, peers in summary.stages.items():
        for number, peer in enumerate(peers):
            table.add_row(str(stage) if number == 0 else "", *_cells(peer))
    for peer in summary.seeds:
        table.add_row(_UNSTAGED.get(peer.role, "none"), *_cells(peer))
    return table


def _cells(peer: pb.PeerStatus) -> list[Text]:
    word, style = STATES.get(peer.state, ("unknown", "red"))
    if peer.age_s >= SILENT_S:
        word, style = f"silent for {duration(peer.age_s)}", "red"
    elif peer.metrics.get("healthy", 1.0) == 0.0:
        word, style = f"{word}, of no use", "red"
    trains, steps = peer.role not in _UNSTAGED, peer.role != pb.ROLE_SEED
    return [
        Text(peer.name or peer.peer_id[-8:]),
        Text(word, style=style),
        Text(f"{peer.tokens_per_s:,.0f}" if trains else ""),
        Text(str(peer.weight_version) if steps else ""),
        Text(peer.doing),
        Text(peer.last_error, style="red"),
    ]


def duration(seconds: float) -> str:
    """`8 s`, `3 min 2 s`, `5 h 20 min`, `2 d 3 h`."""
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
