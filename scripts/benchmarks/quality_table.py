"""Tables and curves of what scripts/benchmarks/quality.py has run."""

from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib
from results import ROOT, save

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FOLDER = ROOT / "docs/quality"
DENSE, INJECTED = "dense", "dense, inject"
Row = dict[str, Any]


def tabulate(rows: list[Row]) -> None:
    """Write docs/results/quality.json, docs/quality/README.md and a curve for each model and task."""
    best = compared(chosen(rows))
    save(ROOT / "docs/results/quality.json", [without(row, "curve") for row in best])
    parts = [
        "# Quality of masked training\n",
        "Made by `scripts/benchmarks/quality.py table` from [runs.jsonl](runs.jsonl); how to read it: "
        "[quality.md](../quality.md).\n",
    ]
    for model, task in sorted({(row["model"], row["task"]) for row in best}):
        some = [row for row in best if (row["model"], row["task"]) == (model, task)]
        parts.append(table(model, task, some))
        name = f"{model}-{task}.png"
        draw(FOLDER / name, f"{model}, {task}", some)
        parts.append(f"![held-out loss against tokens]({name})\n")
    (FOLDER / "README.md").write_text("\n".join(parts))


def chosen(rows: list[Row]) -> list[Row]:
    """Of each arm and task those of the learning rate with the least mean loss on the text that is for that."""
    groups: dict[tuple[str, str, str], dict[float, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row["model"], row["task"], row["arm"]][row["lr"]].append(row)
    out = []
    for by_lr in groups.values():
        most = max(map(len, by_lr.values()))
        whole = [group for group in by_lr.values() if len(group) == most]  # means over the same seeds
        out += min(whole, key=lambda group: mean(row["loss_selection"] for row in group))
    return out


def compared(rows: list[Row]) -> list[Row]:
    """Rows with what share of dense's improvement they have, of the same seed."""
    of = {(row["model"], row["task"], row["seed"], row["arm"]): row for row in rows}

    def share(row: Row, other: str) -> float | None:
        base = of.get((row["model"], row["task"], row["seed"], other))
        if base is None or base["loss"] >= base["loss_start"]:
            return None
        return round((row["loss_start"] - row["loss"]) / (base["loss_start"] - base["loss"]), 4)

    out = []
    for row in rows:
        dense = of.get((row["model"], row["task"], row["seed"], DENSE))
        more = {
            "loss_dense": dense and dense["loss"],
            "recovered": share(row, DENSE),
            "recovered_equal_anchors": share(row, INJECTED),
        }
        out.append(row | more)
    return out


def table(model: str, task: str, rows: list[Row]) -> str:
    """One line an arm, the mean over seeds and how far they lie apart."""
    arms: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        arms[row["arm"]].append(row)
    steps, tokens = rows[0]["steps"], rows[0]["tokens"]
    lines = [
        f"## {model}, {task}: {steps} steps, {tokens} tokens, from {rows[0]['loss_start']:.3f}\n",
        "| arm | PP | DP | seeds | lr | loss | recovered | of dense with anchors | bytes a token |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, of in arms.items():
        first = of[0]
        ratios = [f"{first[key]:g}x" if first[key] else "-" for key in ("pp_ratio", "dp_ratio")]
        cells = [
            arm, *ratios, str(len(of)), f"{first['lr']:g}", spread([row["loss"] for row in of], "{:.4f}"),
            spread([row["recovered"] for row in of], "{:.1%}"),
            spread([row["recovered_equal_anchors"] for row in of], "{:.1%}"),
            spread([row["bytes_per_token"] for row in of], "{:.0f}").partition(" ")[0],
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def spread(values: list[float | None], form: str) -> str:
    """Mean, and the standard deviation where there are several."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    middle = form.format(mean(known))
    return f"{middle} ± {form.format(stdev(known))}" if len(known) > 1 else middle


def draw(path: Path, title: str, rows: list[Row]) -> None:
    """Loss on the text for choosing, against tokens, of the first seed."""
    figure, axes = plt.subplots(figsize=(8, 5))
    seed = min(row["seed"] for row in rows)
    for row in rows:
        if row["seed"] == seed and ("," not in row["arm"] or "inject" in row["arm"]):
            axes.plot(*zip(*row["curve"], strict=True), label=row["arm"], linewidth=1)
    axes.set(title=title, xlabel="tokens", ylabel="held-out loss, nats")
    axes.legend(fontsize=6)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def without(row: Row, *keys: str) -> Row:
    return {key: value for key, value in row.items() if key not in keys}
