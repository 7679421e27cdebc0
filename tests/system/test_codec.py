"""`meshd codec` as a person starts it: a process of its own, on the committed small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from daemons import meshd, write_spec

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]


@pytest.mark.slow
def test_codecs_of_a_run_spec_are_measured(tmp_path: Path, tiny_model: Path, adapt_text: Path) -> None:
    """Ring, three stages, an entropy-coded boundary of its own; tables, numbers and plot, and nothing but them."""
    spec = write_spec(
        tmp_path / "run.toml",
        tiny_model,
        adapt_text,
        model={"stages": 3, "cut": [2, 4], "tied": "ring"},
        wire={"forward": "int8", "boundary": {}},
    )
    spec.write_text(
        spec.read_text().replace("boundary = {}\n", '[wire.boundary.2]\nforward = "spectral:bits=2"\n')
    )
    numbers, plot = tmp_path / "numbers.json", tmp_path / "plot.svg"
    done = meshd("codec", str(spec), "--fit", "16", "--json", str(numbers), "--plot", str(plot))
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    said = json.loads(numbers.read_text())
    assert said["tied"] == "ring"
    own = said["codecs"][0]
    forward = [boundary["forward"]["codec"] for boundary in own["boundaries"]]
    assert forward == ["int8", "int8", "spectral:bits=2"]
    losses = {row["codec"]: row["loss"] for row in said["codecs"]}
    assert abs(losses["dense"] - said["loss_dense"]) < 1e-3
    assert losses["spectral 16x"] < losses["topk 16x"] < losses["random 16x"]
    for name, loss in losses.items():
        assert name in done.out
        assert f"{loss:.4f}" in done.out
    assert plot.read_bytes().startswith(b"<?xml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["numbers.json", "plot.svg", "run.toml"]
