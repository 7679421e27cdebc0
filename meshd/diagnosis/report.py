"""What a diagnosis says: tables for people, JSON for machines, a plot."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from meshd.diagnosis.diagnose import Diagnosis
from meshd.diagnosis.measure import BoundaryResult, Crossed, PlanResult
from meshd.errors import ConfigError, MeshdError, ResourceError

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
NO_PLOT = "no plot: matplotlib is not installed (pip install 'meshd[plot]')"


def view(diagnosis: Diagnosis) -> Group:
    """Two tables: by plan, and by plan and boundary."""
    case, measured = diagnosis.case, diagnosis.measured
    lines = [
        f"{case.spec.model.source}: first layers of the stages {[0, *case.cut]}, tied embeddings: {case.tied}",
        f"{measured.tokens:,} held-out tokens, loss without codecs {measured.loss:.4f}",
    ]
    if diagnosis.fit_tokens:
        lines.append(f"priors fitted on {diagnosis.fit_tokens:,} training tokens")
    head = Text("\n".join(lines))  # a path may look like markup
    return Group(head, _plans_table(diagnosis), _boundaries_table(diagnosis))


def _plans_table(diagnosis: Diagnosis) -> Table:
    table = _table(
        "codecs", "bytes/token", "vs bf16", "loss", "change", "cosine", "least", "by stage", "time"
    )
    for result in diagnosis.measured.plans:
        if result.failed:
            table.add_row(result.plan.name, *[""] * 6, result.failed, "")
            continue
        table.add_row(
            result.plan.name,
            f"{result.bytes_per_token:.1f}",
            f"{diagnosis.ratio(result.bytes_per_token):.2f}x",
            f"{result.loss:.4f}",
            f"{result.loss - diagnosis.measured.loss:+.4f}",
            f"{result.cosine_mean:.3f}",
            f"{result.cosine_min:.3f}",
            " ".join(f"{value:.2f}" for value in result.cosine_stages),
            f"{100 * result.cost_share:.1f} + {100 * result.coder_share:.1f} %",
        )
    return table


def _boundaries_table(diagnosis: Diagnosis) -> Table:
    table = _table(
        "codecs", "boundary", "forward", "bytes/token", "error", "backward", "bytes/token", "error", "vs bf16"
    )
    for result in diagnosis.measured.plans:
        for number, boundary in enumerate(result.boundaries):
            cells = []
            for crossed in (boundary.forward, boundary.backward):
                cells += [crossed.codec, f"{crossed.bytes_per_token:.1f}", f"{crossed.error:.4f}"]
            saved = f"{diagnosis.ratio(boundary.bytes_per_token):.2f}x"
            table.add_row(result.plan.name if number == 0 else "", str(number), *cells, saved)
    return table


def _table(*columns: str) -> Table:
    words = ("codecs", "by stage", "forward", "backward")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in columns:
        table.add_column(title, justify="left" if title in words else "right", overflow="fold")
    return table


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Everything that was measured. Bytes per token, losses in nats per label token; what failed has null in place of
    numbers and says why."""
    spec, measured = diagnosis.case.spec, diagnosis.measured
    return {
        "model": spec.model.source,
        "sources": spec.data.sources,
        "cut": list(diagnosis.case.cut),
        "tied": diagnosis.case.tied,
        "microbatch": [spec.data.microbatch, spec.data.seq_len],
        "tokens": measured.tokens,
        "fit_tokens": diagnosis.fit_tokens,
        "prior_bytes": list(diagnosis.prior_bytes),
        "loss_dense": measured.loss,
        "pass_s": measured.pass_s,
        "codecs": [_plan_json(diagnosis, result) for result in measured.plans],
    }


def _plan_json(diagnosis: Diagnosis, result: PlanResult) -> dict[str, Any]:
    if result.failed:
        numbers = dict.fromkeys(("bytes_per_token", "ratio_bf16", "loss", "cosine_mean", "cosine_min"))
        return {"codec": result.plan.name, "failed": result.failed, **numbers}
    return {
        "codec": result.plan.name,
        "bytes_per_token": result.bytes_per_token,
        "ratio_bf16": diagnosis.ratio(result.bytes_per_token),
        "loss": result.loss,
        "cosine_mean": result.cosine_mean,
        "cosine_min": result.cosine_min,
        "cosine_stages": list(result.cosine_stages),
        "cost_share": result.cost_share,
        "coder_share": result.coder_share,
        "boundaries": [_boundary_json(diagnosis, boundary) for boundary in result.boundaries],
    }


def _boundary_json(diagnosis: Diagnosis, boundary: BoundaryResult) -> dict[str, Any]:
    def direction(crossed: Crossed) -> dict[str, Any]:
        return {
            "codec": crossed.codec,
            "bytes_per_token": crossed.bytes_per_token,
            "error": crossed.error,
        }

    return {
        "forward": direction(boundary.forward),
        "backward": direction(boundary.backward),
        "bytes_per_token": boundary.bytes_per_token,
        "ratio_bf16": diagnosis.ratio(boundary.bytes_per_token),
    }


def check_outputs(json_file: Path | None, plot_file: Path | None) -> None:
    """Refuse, before minutes of work, what could not be written at their end. Raises ConfigError, ResourceError, or
    MeshdError where a plot is wanted and matplotlib is missing."""
    for path in (json_file, plot_file):
        problem = None if path is None else _obstacle(path.absolute())
        if problem is not None:
            raise ResourceError(f"cannot write {path}: {problem}. Fix: name another file")
    if plot_file is not None:
        if plot_file.suffix not in PLOT_SUFFIXES:
            raise ConfigError(
                "--plot",
                str(plot_file),
                "no kind of picture",
                f"a name that ends in {', '.join(PLOT_SUFFIXES)}",
            )
        if not can_plot():
            raise MeshdError(NO_PLOT)


def _obstacle(path: Path) -> str | None:
    """Why a file could not be written there, as far as can be told without writing."""
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    if path.is_dir():
        return "it is a directory"
    return None if os.access(path if path.exists() else path.parent, os.W_OK) else "no permission"


def write_json(diagnosis: Diagnosis, path: Path) -> None:
    """Write `as_json`. Raises ResourceError."""
    try:
        path.write_text(json.dumps(as_json(diagnosis), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror}") from None


def can_plot() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(diagnosis: Diagnosis, path: Path) -> None:
    """Loss, and the gradients' cosine, over bytes per token, one point a plan. Raises ResourceError; needs
    matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    losses, cosines = figure.subplots(1, 2)
    shown = [result for result in diagnosis.measured.plans if not result.failed]
    for number, result in enumerate(shown):
        for axes, value in ((losses, result.loss - diagnosis.measured.loss), (cosines, result.cosine_mean)):
            (point,) = axes.plot([result.bytes_per_token], [value], marker="o", linestyle="none")
            # Codecs of equal bytes lie close together: names go to both sides.
            left = number % 2 == 1
            axes.annotate(
                result.plan.name,
                (result.bytes_per_token, value),
                xytext=(-6 if left else 6, 0),
                textcoords="offset points",
                ha="right" if left else "left",
                va="center",
                fontsize=8,
                color=point.get_color(),
            )
    # From losses that no one sees to those of a destroyed model; a codec may be on either side of zero.
    losses.set_yscale("symlog", linthresh=1e-3)
    losses.axhline(0, color="gray", linewidth=1, linestyle="--")
    losses.set_ylabel(f"held-out loss over the {diagnosis.measured.loss:.3f} without codecs, nats per token")
    cosines.set_ylabel("cosine to the uncompressed gradient, mean over stages")
    for axes in (losses, cosines):
        axes.set_xscale("log")
        axes.set_xlabel("bytes per token and boundary, both directions")
        axes.margins(x=0.25)
        axes.grid(alpha=0.3)
    figure.suptitle(f"{diagnosis.case.spec.name}: {diagnosis.case.spec.model.source}")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror}") from None
