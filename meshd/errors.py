"""Errors that a user can cause or meet. Each says what happened, to what, and what to do.

`meshd.cli` prints them without a traceback and exits with their `exit_code`. Anything else that escapes is a bug
and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MeshdError(Exception):
    """Base of every error with a message meant for people. Exit code 1."""

    exit_code = 1


class ConfigError(MeshdError):
    """A field of a run spec or peer config is wrong. Exit code 2.

    field: dotted path (`data.seq_len`); value: what was given; problem: what is wrong; fix: what to write instead.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, problem: str, fix: str) -> None:
        super().__init__(f"{field} = {value!r}: {problem}. Fix: {fix}")
        self.field, self.value, self.problem, self.fix = field, value, problem, fix


class DataError(MeshdError):
    """The corpus or the model files cannot be used. Exit code 2."""

    exit_code = 2


class ResourceError(MeshdError):
    """This machine lacks something: a free port, memory, disk, write permission. Exit code 3."""

    exit_code = 3


class NetworkError(MeshdError):
    """Peers cannot be reached. Exit code 4."""

    exit_code = 4


class MismatchError(MeshdError):
    """The other side is of another run or protocol version, or its state does not fit. Exit code 5."""

    exit_code = 5


@contextmanager
def ungrouped() -> Iterator[None]:
    """Around a task group: when nothing but MeshdErrors went wrong in it, raises the first of them by itself, so that
    callers catch it by its kind. A group with anything else in it, a bug, leaves as it is."""
    try:
        yield
    except BaseExceptionGroup as group:
        ours, rest = group.split(MeshdError)
        if ours is None or rest is not None:
            raise
        raise _first(ours) from None


def _first(group: BaseExceptionGroup[MeshdError]) -> MeshdError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
