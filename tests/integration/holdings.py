"""What a peer holds on to: the sizes of all that can be reached from it, by class and attribute."""

from __future__ import annotations

import asyncio
import functools
import inspect
import types
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from google.protobuf.message import Message

# Shared by all peers of a process, or the test's own.
_SHARED = (type, types.ModuleType, asyncio.AbstractEventLoop)
_SETS = (set, frozenset)
_LISTS = (list, tuple, deque)


def holdings(roots: Iterable[object], apart: Iterable[object]) -> Counter[str]:
    """Entries of containers, bytes of buffers, messages and tensors, and instances of meshd's classes, by where they
    hang (`StatusBoard._heard`). Coroutines count with their local variables. `apart` is not entered."""
    found: Counter[str] = Counter()
    seen = {id(thing) for thing in apart}
    # Kept alive: an id is only good for as long as its object is there.
    alive: list[object] = []
    stack: list[tuple[object, str]] = [(root, type(root).__name__) for root in roots]
    while stack:
        thing, where = stack.pop()
        if id(thing) in seen or isinstance(thing, _SHARED):
            continue
        seen.add(id(thing))
        alive.append(thing)
        stack.extend(_inside(thing, where, found))
    return found


def _inside(thing: object, where: str, found: Counter[str]) -> Iterable[tuple[object, str]]:
    """Count one object; what it refers to, each with the place it hangs at."""
    if isinstance(thing, bytes | bytearray | memoryview):
        found[f"{where} bytes"] += len(thing)
    elif isinstance(thing, Message):
        found[f"{where} bytes"] += thing.ByteSize()
    elif isinstance(thing, torch.Tensor):
        found[f"{where} bytes"] += thing.numel() * thing.itemsize
    elif isinstance(thing, Mapping):
        found[where] += len(thing)
        yield from ((key, where) for key in thing)
        yield from ((value, where) for value in thing.values())
    elif isinstance(thing, _LISTS + _SETS):
        found[where] += len(thing)
        yield from ((item, where) for item in thing)
    elif isinstance(thing, types.MethodType):
        yield thing.__self__, type(thing.__self__).__name__
    elif isinstance(thing, types.FunctionType):
        for cell in thing.__closure__ or ():
            yield from _cell(cell, thing.__qualname__)
    elif isinstance(thing, functools.partial):
        yield from ((part, where) for part in (thing.func, thing.args, thing.keywords))
    elif isinstance(thing, asyncio.Task):
        found["tasks"] += 1
        yield thing.get_coro(), where
    elif isinstance(thing, types.CoroutineType | types.AsyncGeneratorType):
        yield from _running(thing)
    else:
        yield from _attributes(thing, where, found)


def _cell(cell: types.CellType, where: str) -> Iterable[tuple[object, str]]:
    try:
        yield cell.cell_contents, where
    except ValueError:
        return  # not filled yet


def _running(coroutine: Any) -> Iterable[tuple[object, str]]:
    prefix = "cr" if inspect.iscoroutine(coroutine) else "ag"
    frame, awaited = getattr(coroutine, f"{prefix}_frame"), getattr(coroutine, f"{prefix}_await")
    if frame is not None:
        yield from ((value, f"{coroutine.__qualname__}:{name}") for name, value in frame.f_locals.items())
    if awaited is not None:
        yield awaited, coroutine.__qualname__


def _attributes(thing: object, where: str, found: Counter[str]) -> Iterable[tuple[object, str]]:
    kind = type(thing)
    ours = kind.__module__.startswith("meshd")
    if ours:
        found[f"<{kind.__name__}>"] += 1
    if not ours and not kind.__module__.startswith(("asyncio", "torch.nn", "torch.optim", "contextlib")):
        return
    values = dict(getattr(thing, "__dict__", {}))
    for slot in (s for base in kind.__mro__ for s in getattr(base, "__slots__", ())):
        if hasattr(thing, slot):
            values[slot] = getattr(thing, slot)
    prefix = kind.__name__ if ours else f"{where}.{kind.__name__}"
    yield from ((value, f"{prefix}.{name}") for name, value in values.items())
