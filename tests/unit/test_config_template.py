"""The template of `meshd init` is complete, loads, and tells the truth about defaults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshd.config.fields import fields_of
from meshd.config.load import load_peer_config, load_run_spec
from meshd.config.peer import PeerConfig
from meshd.config.runspec import DataSpec, ModelSpec, RunSpec, StopSpec, Table
from meshd.config.template import NEEDED, Kind, render_template

DEFAULTS = RunSpec(
    model=ModelSpec(source=NEEDED["model.source"]),
    data=DataSpec(sources=NEEDED["data.sources"]),
    stop=StopSpec(steps=NEEDED["stop.steps"]),
)


def uncommented(text: str) -> str:
    """The template with every optional field that has a default switched on."""
    return re.sub(r"(?m)^# (?=\w+ = (?!.*# example))", "", text)


def test_the_run_template_loads_as_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(render_template("run"))
    assert load_run_spec(path) == DEFAULTS


def test_the_values_shown_in_comments_are_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    text = re.sub(r"(?s)# \[wire\.boundary.*?\n\n", "", render_template("run"))
    path.write_text(uncommented(text))
    assert load_run_spec(path) == DEFAULTS
    assert "\nlr = 2e-05" in path.read_text()


def test_examples_load_too(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(re.sub(r"(?m)^# (?=[\w\[])", "", render_template("run")))
    spec = load_run_spec(path)
    assert spec.model.cut == [15]
    assert spec.stop.tokens == 1_000_000
    assert list(spec.wire.boundary) == [0]


def test_the_peer_template_loads_as_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "peer.toml"
    path.write_text(render_template("peer"))
    assert load_peer_config(path) == load_peer_config()
    path.write_text(uncommented(render_template("peer")))
    assert load_peer_config(path) == load_peer_config()


@pytest.mark.parametrize(("kind", "model"), [("run", RunSpec), ("peer", PeerConfig)])
def test_every_field_is_in_the_template_and_described(kind: Kind, model: type[Table]) -> None:
    text = render_template(kind)

    def check(table: type[Table], prefix: str) -> None:
        for field in fields_of(table):
            assert field.description, f"{prefix}{field.name} has no description"
            if field.table is not None:
                assert f"[{prefix}{field.name}" in text
                check(field.table, f"{prefix}{field.name}.")
            else:
                assert re.search(rf"(?m)^(# )?{field.name} = ", text)

    check(model, "")
