"""The run spec of a trial: the given one with another end, written where the daemons read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshd.config.runspec import RunSpec, StopSpec

# An end that no trial comes to: about what int64 counts of tokens can take in sums.
ENDLESS = 2**40


def ending_at(spec: RunSpec, tokens: int) -> RunSpec:
    """`spec` with its end at `tokens`, and a learning rate that does not depend on where the end is: only then do runs
    of different ends have equal histories up to the same count of tokens."""
    optim = spec.optim.model_copy(update={"schedule": "constant"})
    return spec.model_copy(update={"stop": StopSpec(tokens=tokens, steps=None), "optim": optim})


def write_spec(spec: RunSpec, path: Path) -> Path:
    """As TOML. Blocking."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(_lines(spec.model_dump(mode="json", exclude_none=True), "")) + "\n")
    return path


def _lines(values: Mapping[str, Any], prefix: str) -> list[str]:
    # JSON's strings, numbers, lists and booleans are TOML's, too.
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += [f"[{prefix}{key}]", *_lines(value, f"{prefix}{key}.")]
    return lines
