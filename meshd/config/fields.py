"""What the config models say of their fields, in words: used by error messages and by the commented template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from meshd.config.runspec import Table


@dataclass(frozen=True)
class FieldDoc:
    """One field of a table.

    kind: what values it takes, in words ("an integer, 8 to 131072"). table: its model when the field is a table.
    keyed: the field is a table of such tables, by key.
    """

    name: str
    description: str
    kind: str
    required: bool
    default: Any
    table: type[Table] | None
    keyed: bool


def fields_of(model: type[Table]) -> list[FieldDoc]:
    """The fields of `model` in the order of their definition."""
    schema = model.model_json_schema()
    docs = []
    for name, info in model.model_fields.items():
        table, keyed = _nested(info.annotation)
        # Of a table without a description of its own, the first line of its docstring tells.
        description = info.description or (_first_line(table) if table else "")
        docs.append(
            FieldDoc(
                name=name,
                description=description,
                kind=kind_in_words(schema["properties"][name], schema.get("$defs", {})),
                required=info.is_required(),
                default=info.get_default(call_default_factory=True),
                table=table,
                keyed=keyed,
            )
        )
    return docs


def table_at(model: type[Table], path: Sequence[int | str]) -> type[Table] | None:
    """The table at `path` (names, list indices, keys) below `model`; None when there is none."""
    current: type[Table] = model
    parts = list(path)
    while parts:
        field = current.model_fields.get(str(parts.pop(0)))
        if field is None:
            return None
        table, keyed = _nested(field.annotation)
        if table is None:
            return None
        if keyed and parts:
            parts.pop(0)
        current = table
    return current


def field_at(model: type[Table], path: Sequence[int | str]) -> FieldDoc | None:
    """The field that `path` leads to, or that holds the list item that it leads to."""
    for end in range(len(path), 0, -1):
        table = table_at(model, path[: end - 1])
        if table is None:
            continue
        for doc in fields_of(table):
            if doc.name == path[end - 1]:
                return doc
    return None


def kind_in_words(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """A JSON schema as a short phrase: `an integer, 8 to 131072`."""
    if "$ref" in schema:
        return kind_in_words(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
    if "enum" in schema:
        return "one of " + ", ".join(toml_value(value) for value in schema["enum"])
    if "const" in schema:
        return toml_value(schema["const"])
    if "anyOf" in schema:
        return " or ".join(
            kind_in_words(option, definitions) for option in schema["anyOf"] if option.get("type") != "null"
        )
    match schema.get("type"):
        case "integer":
            return "an integer" + _bounds(schema)
        case "number":
            return "a number" + _bounds(schema)
        case "boolean":
            return "true or false"
        case "string":
            if schema.get("format") == "path":
                return "a path"
            longest = f", at most {schema['maxLength']} characters" if "maxLength" in schema else ""
            form = f" that matches `{schema['pattern']}`" if "pattern" in schema else ""
            return f"a string{longest}{form}"
        case "array" if "prefixItems" in schema:
            items = schema["prefixItems"]
            return f"a list of {len(items)}, each {kind_in_words(items[0], definitions)}"
        case "array":
            least = f"{schema['minItems']} or more: " if schema.get("minItems") else ""
            return f"a list, {least}each {kind_in_words(schema.get('items', {}), definitions)}"
        case "object":
            return "a table"
    return "any value"


def toml_value(value: Any) -> str:
    """`value` as TOML writes it."""
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return f"{value:_}" if abs(value) >= 100_000 else str(value)
        case float():
            text = repr(value)
            return text if any(mark in text for mark in ".en") else f"{text}.0"
        case list() | tuple():
            return "[" + ", ".join(toml_value(item) for item in value) + "]"
        case str() | Path():
            return json.dumps(str(value), ensure_ascii=False)
    raise TypeError(f"no TOML form for {type(value).__name__}")


def _bounds(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f", {_plain(low)} to {_plain(high)}"
    parts = [
        f"{word} {_plain(bound)}"
        for word, bound in (("at least", low), ("above", above), ("below", below), ("at most", high))
        if bound is not None
    ]
    return ", " + ", ".join(parts) if parts else ""


def _plain(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


def _nested(annotation: Any) -> tuple[type[Table] | None, bool]:
    """The table type in a field's annotation, and whether the field is a dictionary of such tables."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return annotation, False
    if get_origin(annotation) is dict:
        value = get_args(annotation)[1]
        if isinstance(value, type) and issubclass(value, Table):
            return value, True
    return None, False


def _first_line(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().split("\n", 1)[0].rstrip(".")
