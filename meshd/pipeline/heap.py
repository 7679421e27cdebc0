"""Giving freed memory back to the system.

glibc keeps what was freed between blocks that are still in use. A stage's gradients and moments come to lie between
its activations, so that without this every pass leaves holes: measured on SmolLM2, 375 MB after a few microbatches.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from collections.abc import Callable


def _malloc_trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(ctypes.util.find_library("c") or "libc.so.6")
    # Absent in musl, which does not keep memory so.
    trim: Callable[[int], int] | None = getattr(library, "malloc_trim", None)
    return trim


_trim = _malloc_trim()


def give_back() -> None:
    """Return freed pages to the system, where the C library can. Costs milliseconds: once an inner step is enough."""
    if _trim is not None:
        _trim(0)
