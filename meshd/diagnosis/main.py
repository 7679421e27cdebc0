"""`meshd codec`: measures, with progress, and shows what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from meshd.config.runspec import RunSpec
from meshd.diagnosis.diagnose import Case, Diagnosis, Effort, diagnose
from meshd.diagnosis.report import NO_PLOT, can_plot, check_outputs, plot, view, write_json

DEFAULT_PLOT = Path("codec.png")
# Tables are not squeezed into the 80 columns that a pipe is taken to have.
_PIPE_COLUMNS = 140


@dataclass(frozen=True)
class CodecOptions:
    """What the command line says. codecs: plans in words, none: the run spec's and references. plot_file: None:
    DEFAULT_PLOT where matplotlib is installed. threads: of torch, 0 leaves the number to it."""

    spec: RunSpec
    codecs: tuple[str, ...]
    effort: Effort
    json_file: Path | None
    plot_file: Path | None
    threads: int


def run_codec(options: CodecOptions) -> None:
    """Measure and report. Raises MeshdError."""
    check_outputs(options.json_file, options.plot_file)
    if options.threads:
        torch.set_num_threads(options.threads)
    diagnosis = _with_progress(options)
    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_COLUMNS
    console.print(view(diagnosis))
    if options.json_file is not None:
        write_json(diagnosis, options.json_file)
        print(f"numbers: {options.json_file}")
    picture = options.plot_file or (DEFAULT_PLOT if can_plot() else None)
    if picture is None:
        print(NO_PLOT)
    else:
        plot(diagnosis, picture)
        print(f"plot: {picture}")


def _with_progress(options: CodecOptions) -> Diagnosis:
    bars: dict[str, TaskID] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:

        def show(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total or None)
            progress.update(bars[what], completed=done)

        case = Case.of(options.spec)
        return diagnose(case, case.plans(options.codecs), options.effort, show)
