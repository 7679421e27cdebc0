"""Memory that ran out in the middle of work: torch's many ways to say so, as one error that costs the work alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import torch

from meshd.errors import ResourceError

T = TypeVar("T")

# torch's CPU allocator, CUDA outside torch's own allocator, cuBLAS and cuDNN, and C++ itself have no class of their
# own in Python.
_WORDS = re.compile(
    r"can't allocate memory|not enough memory|out of memory|_ALLOC_FAILED|bad_alloc", re.IGNORECASE
)
# CUDA's message goes on for a page about its allocator.
_TEXT = 200


class OutOfMemory(ResourceError):
    """A computation was given up because memory ran out. The process and its other work go on."""


def out_of_memory(error: BaseException) -> OutOfMemory | None:
    """What to raise in place of `error` when it says that memory ran out, else None.

    It stands by itself, without `error` as its cause: the traceback of that one holds the frames, and with them the
    tensors, of the computation that did not fit.
    """
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if not known and not (isinstance(error, RuntimeError) and _WORDS.search(str(error))):
        return None
    said = next(iter(str(error).splitlines()), "") or type(error).__name__
    # The CPU allocator begins with a place in its source.
    said = said.rpartition("DefaultCPUAllocator: ")[2]
    lost = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return OutOfMemory(
        f"memory ran out ({said[:_TEXT]}){lost}. Fix: free memory on this machine, hold another "
        "stage, or make a run with a smaller data.microbatch"
    )


def with_memory(call: Callable[[], T]) -> T:
    """Result of `call`. Raises OutOfMemory when memory ran out in it."""
    try:
        return call()
    except Exception as error:
        told = out_of_memory(error)
        if told is None:
            raise
    # Outside the handler, or the error would go along as the context of this one.
    raise told
