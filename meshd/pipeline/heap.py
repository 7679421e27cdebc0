"""What the C library does with freed memory, told what a stage's memory is like.

A pass keeps some hundred large tensors for autograd and frees as many in between. Left to itself, glibc soon puts all
of them into one heap: each freed one leaves a hole, many of which nothing fits into again, and nothing is given back.
Measured on ten layers of SmolLM2, 4 x 128 tokens: some 70 MB of holes at the height of a backward pass (20 this way,
for 3 % more time), and 300 MB that stay taken after it.

So large blocks get pages of their own, which go back when they are freed. Fresh pages cost time to clear; while
nothing large is made that lasts (`reusing`), the heap serves large blocks as well: the same few are used over and over.
Threads share two heaps: each that has its own keeps some megabytes of what was freed in it, and a daemon has fifteen.

All of this is glibc's; with other C libraries nothing here does anything.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_HEAPS = 2
# About one hidden state of a microbatch: smaller ones are many, and their holes are small.
_LARGE_BYTES = 1 << 20
# The most that glibc takes, and where its own adaptation of the threshold ends.
_LARGEST_BYTES = 32 << 20

_Function = Callable[..., int]


def _of_libc(name: str) -> _Function | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(ctypes.util.find_library("c") or "libc.so.6")
    # Absent in musl, which keeps no freed memory to speak of.
    function: _Function | None = getattr(library, name, None)
    return function


_trim, _mallopt = _of_libc("malloc_trim"), _of_libc("mallopt")


def _own_pages_from(size: int) -> None:
    # glibc changes this number itself, in any thread's free() and without a lock: it may change while others allocate.
    if _mallopt is not None:
        _mallopt(_M_MMAP_THRESHOLD, size)


def set_up() -> None:
    """From now on large blocks of this process have pages of their own, and its threads two heaps.

    To be called before most threads start and before tensors are made: what there is stays as it is.
    """
    if _mallopt is not None:
        _mallopt(_M_ARENA_MAX, _HEAPS)
        # Given a threshold, glibc stops to adapt this one too, and would hand back every 128 KiB at the heap's top.
        _mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_BYTES)
    _own_pages_from(_LARGE_BYTES)


@contextmanager
def reusing() -> Iterator[None]:
    """Around work whose large blocks live briefly, after `set_up`: they come from the heap, and stay in it
    for the next."""
    _own_pages_from(_LARGEST_BYTES)
    try:
        yield
    finally:
        _own_pages_from(_LARGE_BYTES)


def give_back() -> None:
    """Return freed pages to the system, where the C library can. Costs milliseconds: once an inner step is enough."""
    if _trim is not None:
        _trim(0)
