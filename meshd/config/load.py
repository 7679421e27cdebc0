"""Reading run specs and peer configs from TOML, with errors made for the person who wrote the file.

Every problem of a file is reported at once; each names the dotted field, the value, what is wrong, and what to write.
Types are strict: `seq_len = "256"` is an error, not a guess.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshd.config.fields import field_at, table_at
from meshd.config.peer import PeerConfig
from meshd.config.runspec import RunSpec, Table
from meshd.errors import ConfigError

T = TypeVar("T", bound=Table)

# Sources with such a prefix are names, not paths.
_NAMED = re.compile(r"^[a-z][a-z0-9+.-]*:(?![\\/])")


class ConfigErrors(ConfigError):
    """All problems of one file. `errors` has one ConfigError each; field and value are those of the first.

    source: the file, or what else the values came from.
    """

    def __init__(self, source: str, errors: Sequence[ConfigError]) -> None:
        first = errors[0]
        super().__init__(first.field, first.value, first.problem, first.fix)
        self.source = source
        self.errors = tuple(errors)

    def __str__(self) -> str:
        if len(self.errors) == 1:
            return f"{self.source}: {self.errors[0]}"
        return "\n".join(
            [f"{self.source}: {len(self.errors)} problems", *(f"  - {error}" for error in self.errors)]
        )


class _NotGiven:
    def __repr__(self) -> str:
        return "(not given)"


NOT_GIVEN = _NotGiven()
"""The value of a field that is missing, in a ConfigError."""


def load_run_spec(path: Path) -> RunSpec:
    """The run spec in the TOML file `path`.

    Relative data and model paths are resolved against the file's directory, so that they come out absolute and the
    run does not depend on where it was started. Raises ConfigError.
    """
    values = read_toml(path, hint=f"write one with `meshd init {path}`")
    spec = validate(RunSpec, values, str(path))
    base = path.resolve().parent
    model = spec.model.model_copy(update={"source": resolve_source(spec.model.source, base)})
    data = spec.data.model_copy(update={"sources": [resolve_source(s, base) for s in spec.data.sources]})
    return spec.model_copy(update={"model": model, "data": data})


def load_peer_config(path: Path | None = None, options: Mapping[str, object] | None = None) -> PeerConfig:
    """Defaults, overridden by the TOML file `path`, overridden by `options` (plain fields that are not None).

    `state_dir` comes out absolute, and `trace`, too, when the file names it: from the file relative to the file's
    directory, from the options to the working directory. Raises ConfigError.
    """
    values: dict[str, object] = {}
    sources = []
    if path is not None:
        values = read_toml(path, hint=f"write one with `meshd init --kind peer {path}`")
        sources.append(str(path))
        if isinstance(state_dir := values.get("state_dir"), str):
            values["state_dir"] = str(path.resolve().parent / Path(state_dir).expanduser())
        if isinstance(trace := values.get("trace"), str) and trace:
            values["trace"] = str(path.resolve().parent / Path(trace).expanduser())
    # Options are plain fields. `meshd join` has an argument that is called like a table: the swarm's link.
    given = {
        name: value
        for name, value in (options or {}).items()
        if value is not None and table_at(PeerConfig, [name]) is None
    }
    if given:
        sources.append("options")
    config = validate(PeerConfig, {**values, **given}, " and ".join(sources) or "defaults")
    return config.model_copy(update={"state_dir": config.state_dir.expanduser().absolute()})


def resolve_source(source: str, base: Path) -> str:
    """`source` as an absolute path or glob if it is a relative one; names such as `hub:ORG/NAME` stay as they are."""
    if _NAMED.match(source):
        return source
    return str(base / Path(source).expanduser())


def read_toml(path: Path, hint: str) -> dict[str, object]:
    """The TOML file `path` as a dictionary. `hint`: the fix when there is no such file. Raises ConfigError."""
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise ConfigError("file", str(path), "no such file", hint) from None
    except IsADirectoryError:
        raise ConfigError("file", str(path), "is a directory", "name the TOML file itself") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            "file", str(path), f"not UTF-8 at byte {error.start}", "save the file as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(
            "file", str(path), f"cannot be read ({error.strerror})", "check path and permissions"
        ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(path, text, str(error)) from None


def _syntax_error(path: Path, text: str, message: str) -> ConfigError:
    """A ConfigError whose field is FILE:LINE:COLUMN and whose value is that line."""
    lines = text.splitlines() or [""]
    place = re.search(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)", message)
    problem = message[: place.start()] if place else message
    line, column = (int(place[1]), int(place[2])) if place and place[1] else (len(lines), len(lines[-1]) + 1)
    where = f"{path}:{line}:{column}"
    shown = lines[min(line, len(lines)) - 1].strip()
    fix = 'strings need quotes, tables look like [data], lists like ["a", "b"], true and false are lower case'
    return ConfigError(where, shown, f"not valid TOML: {problem[:1].lower()}{problem[1:]}", fix)


def validate(model: type[T], values: Mapping[str, object], source: str) -> T:
    """`values` as a `model`. Raises ConfigErrors with every problem; `source` says where the values came from."""
    # JSON mode because strictness there still takes a TOML list for a tuple, a string for a path, "0" for the key 0.
    text = json.dumps(values, default=str)
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False)
    raise ConfigErrors(source, [_explain(model, detail) for detail in details])


def _explain(model: type[Table], detail: ErrorDetails) -> ConfigError:
    """One pydantic error in the words of the file."""
    loc, kind, context = detail["loc"], detail["type"], detail.get("ctx", {})
    path = dotted(loc)
    if kind == "extra_forbidden":
        return _unknown(model, loc, detail["input"])
    field = field_at(model, loc)
    about = f" ({field.description})" if field is not None and field.description else ""
    if kind == "missing":
        return ConfigError(path, NOT_GIVEN, "is needed", f"add {_place(loc)}{about}")
    if kind == "value_error":
        # Our own validators say what to write.
        return ConfigError(path or "file", detail["input"], "does not fit", str(context["error"]))
    expected = field.kind if field is not None else ""
    problem = detail["msg"][:1].lower() + detail["msg"][1:]
    fix = f"give {expected}{about}" if expected else f"see the template of `meshd init`{about}"
    if kind in _WRONG_TYPE:
        problem = f"wrong type: {problem}"
    return ConfigError(path, detail["input"], problem, fix)


_WRONG_TYPE = {
    "int_type", "float_type", "string_type", "bool_type", "list_type", "tuple_type", "dict_type", "model_type",
    "path_type", "int_from_float",
}  # fmt: skip


def _unknown(model: type[Table], loc: Sequence[int | str], value: object) -> ConfigError:
    """An unknown field: suggests the closest name of its table, or the table that has a field of that name."""
    name = str(loc[-1])
    table = table_at(model, loc[:-1])
    known = list(table.model_fields) if table is not None else []
    elsewhere = [
        f"{other}.{name}"
        for other, field in model.model_fields.items()
        if isinstance(field.annotation, type)
        and issubclass(field.annotation, Table)
        and name in field.annotation.model_fields
    ]
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        fix = f"did you mean `{close[0]}`?"
    elif elsewhere:
        fix = f"did you mean `{elsewhere[0]}`?"
    else:
        fix = f"remove it; known here: {', '.join(known)}"
    return ConfigError(dotted(loc), value, "unknown field", fix)


def dotted(loc: Sequence[int | str]) -> str:
    """`("data", "sources", 0)` as `data.sources[0]`."""
    text = ""
    for part in loc:
        if part == "[key]":
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _place(loc: Sequence[int | str]) -> str:
    """How to add the field at `loc`: `[stop]`, or `sources = ...` under `[data]`."""
    *tables, name = [str(part) for part in loc]
    if not tables:
        return f"`{name}`"
    return f"`{name} = ...` under `[{'.'.join(tables)}]`"
