"""The commented TOML template of `meshd init`, made from the models themselves so that it cannot go out of date.

Required fields stand with an example; every other field is commented out at its default.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any, Literal

from meshd.config.fields import FieldDoc, fields_of, toml_value
from meshd.config.peer import PeerConfig
from meshd.config.runspec import RunSpec, Table

Kind = Literal["run", "peer"]

_WIDTH = 100

# Fields without a default that can be shown. The first group is needed by every run and stands uncommented.
NEEDED: Mapping[str, Any] = {
    "model.source": "packaged:smollm2-135m",
    "data.sources": ["packaged:biomedical"],
    "stop.steps": 100,
}
SHOWN: Mapping[str, Any] = {
    "model.revision": "main",
    "model.cut": [15],
    "stop.tokens": 1_000_000,
    "stage": 0,
    "announce": "203.0.113.7",
}

_HEADS: Mapping[Kind, tuple[type[Table], str]] = {
    "run": (
        RunSpec,
        "A run of meshd: one adaptation job. Start it with `meshd run FILE`, or as a whole local swarm with "
        "`meshd swarm FILE`. Relative paths start at this file's directory. Lines that begin with `#` and a name "
        "are optional fields, shown at their default or with an example.",
    ),
    "peer": (
        PeerConfig,
        "One meshd daemon on this machine. Use it with `meshd run RUN.toml --config FILE` or "
        "`meshd join LINK --config FILE`; options on the command line override it. Lines that begin with `#` and "
        "a name are optional fields, shown at their default or with an example.",
    ),
}


def render_template(kind: Kind) -> str:
    """The commented template of a run spec (`run`) or a peer config (`peer`); it loads as it is."""
    model, head = _HEADS[kind]
    return "\n".join([*_comment(head), *_table(model, "")]).rstrip() + "\n"


def _table(model: type[Table], prefix: str) -> list[str]:
    """The fields of one table, plain ones first (TOML has them before the tables below)."""
    fields = fields_of(model)
    lines = []
    for field in fields:
        if field.table is None:
            lines += ["", *_field(field, prefix)]
    for field in fields:
        if field.table is not None:
            lines += ["", "", *_nested(field, prefix)]
    return lines


def _nested(field: FieldDoc, prefix: str) -> list[str]:
    assert field.table is not None
    path = f"{prefix}{field.name}"
    if not field.keyed:
        return [*_comment(field.description), f"[{path}]", *_table(field.table, f"{path}.")]
    shown = [f"# {inner.name} = {toml_value(inner.default)}" for inner in fields_of(field.table)]
    return [*_comment(f"{field.description} (optional tables, one per key)"), f"# [{path}.0]", *shown]


def _field(field: FieldDoc, prefix: str) -> list[str]:
    """Comment and line of one plain field."""
    path = f"{prefix}{field.name}"
    about = f"{field.description.rstrip('.')} ({field.kind})" if field.description else field.kind
    lines = _comment(about)
    if path in NEEDED:
        return [*lines, f"{field.name} = {toml_value(NEEDED[path])}"]
    if field.default is None:
        return [*lines, f"# {field.name} = {toml_value(SHOWN[path])}  # example; not set by default"]
    return [*lines, f"# {field.name} = {toml_value(field.default)}"]


def _comment(text: str) -> list[str]:
    # Two spaces: so a comment's line never looks like a field that is commented out.
    return textwrap.wrap(text, _WIDTH, initial_indent="#  ", subsequent_indent="#  ", break_on_hyphens=False)
