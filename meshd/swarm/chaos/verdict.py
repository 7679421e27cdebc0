"""The rows that are kept of chaos, and whether its bars are met. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from meshd.swarm.chaos.trial import Struck, Trial

MOST_DROPPED = 0.05
LEAST_THROUGHPUT = 0.60
# A frozen peer shows after keepalive's 2 s and the ping's 2 s; a freeze that ends before cannot be noticed.
_SHORT_FREEZE_S = 6.0
# Student's t, two-sided 95 %, by degrees of freedom: where one more undisturbed run would come out.
_T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


@dataclass(frozen=True)
class Bar:
    """One requirement. met: None when it was not measured."""

    name: str
    met: bool | None
    found: str


@dataclass(frozen=True)
class Scored:
    """A trial with the held-out loss of its checkpoint (nats per token; None: not measured)."""

    scenario: str
    peers: int
    trial: Trial
    loss: float | None


def rows(chaos: Scored, plain: Sequence[Scored]) -> list[dict[str, Any]]:
    """The disturbed run first. throughput_share: of the undisturbed runs' mean; loss_undisturbed: one loss each."""
    mean = statistics.fmean(run.trial.tokens_per_s for run in plain) if plain else None
    return [_row(run, mean, [one.loss for one in plain] if run is chaos else None) for run in (chaos, *plain)]


def _row(run: Scored, mean: float | None, losses: list[float | None] | None) -> dict[str, Any]:
    trial = run.trial
    account = trial.account
    return {
        "scenario": run.scenario,
        "peers": run.peers,
        "injected": account.injected,
        "committed": account.committed,
        "dropped": account.dropped,
        "in_flight": account.in_flight,
        "partial": account.partial,
        "replayed": trial.replayed,
        "lost_after_commit": trial.lost_after_commit,
        "throughput_share": round(trial.tokens_per_s / mean, 3) if mean else None,
        "loss": None if run.loss is None else round(run.loss, 4),
        "loss_undisturbed": None if not losses else [None if x is None else round(x, 4) for x in losses],
        "leftover_processes": trial.leftovers,
        "tokens": account.tokens,
        "checkpoint_tokens": trial.watermark,
        "tokens_per_s": round(trial.tokens_per_s, 1),
    }


def bars(chaos: Scored, plain: Sequence[Scored]) -> list[Bar]:
    """What the issue asks for, each with what was found."""
    account, runs = chaos.trial.account, [chaos, *plain]
    share = account.dropped / max(1, account.injected)
    wrong = [run.scenario for run in runs if not run.trial.account.holds]
    left = sum(run.trial.leftovers for run in runs)
    strange = [text for run in runs for text in (*run.trial.exits, *run.trial.bugs)]
    return [
        Bar(
            "every microbatch accounted for, none in flight",
            not wrong and account.injected > 0,
            "wrong in " + ", ".join(wrong) if wrong else f"{account.injected} injected",
        ),
        Bar(f"at most {MOST_DROPPED:.0%} dropped", share <= MOST_DROPPED, f"{share:.2%}"),
        _throughput(chaos, plain),
        _loss(chaos, plain),
        Bar("no process left behind", left == 0, str(left)),
        Bar("no peer ended by itself, no traceback", not strange, "; ".join(strange) or "none"),
    ]


def _throughput(chaos: Scored, plain: Sequence[Scored]) -> Bar:
    name = f"throughput over {LEAST_THROUGHPUT:.0%} of the undisturbed swarm"
    if not plain:
        return Bar(name, None, "no undisturbed run")
    mean = statistics.fmean(run.trial.tokens_per_s for run in plain)
    share = chaos.trial.tokens_per_s / mean if mean else 0.0
    return Bar(
        name,
        share > LEAST_THROUGHPUT,
        f"{share:.0%} ({chaos.trial.tokens_per_s:,.0f} of {mean:,.0f} tokens/s)",
    )


def _loss(chaos: Scored, plain: Sequence[Scored]) -> Bar:
    """Not above the highest of the undisturbed runs. Of four equal runs any one is the highest in a quarter of all
    cases, so what is above is also held against where a further equal run would lie in 95 % of all cases; the bar stays
    the range."""
    name = f"held-out loss within the spread of {len(plain)} undisturbed runs"
    losses = [run.loss for run in plain if run.loss is not None]
    if chaos.loss is None or not losses:
        return Bar(name, None, "not measured")
    found = f"{chaos.loss:.4f}; undisturbed {', '.join(f'{loss:.4f}' for loss in losses)}"
    if chaos.loss > max(losses) and len(losses) > 1:
        count = len(losses)
        reach = _T95.get(count - 1, 2.0) * statistics.stdev(losses) * (1 + 1 / count) ** 0.5
        bound = statistics.fmean(losses) + reach
        found += f"; a further undisturbed run would lie below {bound:.4f}"
    return Bar(name, chaos.loss <= max(losses), found)


def detections(struck: Sequence[Struck]) -> list[dict[str, Any]]:
    """Every fault and who noticed it, for the result's file."""
    return [
        {
            "at_s": round(one.fault.at_s, 1),
            "peer": one.fault.peer,
            "fault": one.fault.words,
            "noticed_s": None if one.noticed is None else round(one.noticed.seconds, 2),
            "by": None if one.noticed is None else one.noticed.by,
            "reason": None if one.noticed is None else one.noticed.reason,
        }
        for one in struck
    ]


def noticing(struck: Sequence[Struck]) -> dict[str, str]:
    """How soon others' streams showed killed and frozen peers, in words."""
    kills = [one for one in struck if one.fault.kind == "kill"]
    frozen = [one for one in struck if one.fault.kind == "freeze" and one.fault.frozen_s > _SHORT_FREEZE_S]
    cut = [one for one in struck if one.fault.kind == "cut"]
    return {
        "killed (about 1 s)": _times(kills),
        "frozen (about 5 s)": _times(frozen),
        "cut link (about 10 s)": _times(cut) if cut else "not measured",
    }


def _times(struck: Sequence[Struck]) -> str:
    times = sorted(one.noticed.seconds for one in struck if one.noticed is not None)
    if not times:
        return f"not noticed by any stream ({len(struck)} cases)" if struck else "no case"
    silent = len(struck) - len(times)
    text = f"median {statistics.median(times):.1f} s, worst {times[-1]:.1f} s, in {len(times)} cases"
    return text + (f"; {silent} more had no line" if silent else "")


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """All keys of the rows as columns."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for key in rows[0]:
        shown.add_column(
            key.replace("_", " "), justify="left" if key == "scenario" else "right", overflow="fold"
        )
    for row in rows:
        shown.add_row(*(_cell(value) for value in row.values()))
    return shown


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(_cell(one) for one in value)
    return f"{value:,}" if isinstance(value, int) else str(value)
