"""docs/metrics.md names every metric that the code keeps, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import meshd

SOURCE = Path(meshd.__file__).parent
PAGE = SOURCE.parent / "docs" / "metrics.md"


def literals(node: ast.expr) -> Iterator[str]:
    """The names that an argument may be; of one that is put together, its beginning and a star."""
    match node:
        case ast.Constant(value=str() as name):
            yield name
        case ast.IfExp():
            yield from literals(node.body)
            yield from literals(node.orelse)
        case ast.JoinedStr(values=[ast.Constant(value=str() as beginning), *_]):
            yield f"{beginning}*"
        case _:
            raise AssertionError(f"line {node.lineno}: a metric's name that cannot be read off")


def kept() -> set[str]:
    """Names of the metrics in the code."""
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="count" | "gauge" | "rate", value=owner), args=[name, *_]
                ) if ast.unparse(owner).endswith("metrics"):
                    found.update(literals(name))
    return found


def test_the_page_and_the_code_name_the_same_metrics() -> None:
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`([a-z0-9_]+)`", row)]
    assert len(listed) == len(set(listed))
    code = kept()
    assert len(code) > 30
    whole = {name for name in code if not name.endswith("*")}
    beginnings = tuple(name.removesuffix("*") for name in code - whole)
    assert whole - set(listed) == set()
    assert {name for name in set(listed) - whole if not name.startswith(beginnings)} == set()
    for beginning in beginnings:
        assert any(name.startswith(beginning) for name in listed), beginning
