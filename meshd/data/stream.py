"""Each injecting peer's reproducible stream of microbatches over the training windows.

The stream is a pure function of (seed, number of windows, microbatch size): item i holds the windows at places
i * B to i * B + B - 1 of an endless sequence, in which every epoch is a new permutation of all windows. So a
microbatch can be built again from its item number alone, restoring a position costs the same however far it is,
and two streams of one seed are equal on every machine (the order comes from integer hashes, not from a library's
generator, which may change between versions).
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from meshd.data.microbatch import Microbatch
from meshd.errors import MismatchError

JSON: TypeAlias = int | str | list[int]
_MASK = (1 << 64) - 1


class Windows(Protocol):
    """What a stream needs of a data set."""

    @property
    def train_windows(self) -> int: ...

    def train(self, windows: npt.NDArray[np.int64]) -> Microbatch: ...


def stream_seed(run_id: str, peer_id: str) -> int:
    """Seed of one peer's stream in one run, in [0, 2**63)."""
    digest = hashlib.sha256(f"meshd-stream-v1\n{run_id}\n{peer_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class TokenStream:
    """Draws microbatches, takes back those that were dropped, and says where it is (C25).

    Not safe for concurrent use. `state` and `restore` are the position: JSON, a few hundred bytes.
    """

    def __init__(
        self, dataset: Windows, microbatch: int, seed: int, position: Mapping[str, JSON] | None = None
    ) -> None:
        """microbatch: sequences per item. position: what `state` returned. Raises as `restore` does."""
        self._dataset, self._rows, self._seed = dataset, microbatch, seed
        self._next = 0
        self._waiting: list[int] = []
        self._order = lru_cache(maxsize=3)(self._epoch_order)
        if position is not None:
            self.restore(position)

    @property
    def position(self) -> int:
        """Items drawn so far, given-back ones included."""
        return self._next

    @property
    def epoch(self) -> float:
        """Passes over the training windows, as drawn so far."""
        return self._next * self._rows / self._dataset.train_windows

    def next(self) -> tuple[int, Microbatch]:
        """The item to inject now: the oldest one given back, else a new one."""
        if self._waiting:
            item = self._waiting.pop(0)
        else:
            item = self._next
            self._next += 1
        return item, self.microbatch(item)

    def microbatch(self, item: int) -> Microbatch:
        """The microbatch of one item, drawn before or not. The position does not move."""
        return self._dataset.train(self.windows(item))

    def windows(self, item: int) -> npt.NDArray[np.int64]:
        """(B,) numbers of the training windows of one item."""
        total = self._dataset.train_windows
        places = range(item * self._rows, (item + 1) * self._rows)
        return np.array([self._order(place // total)[place % total] for place in places], dtype=np.int64)

    def give_back(self, item: int) -> None:
        """The item was dropped: it goes out again before new data.

        Raises ValueError for an item that was not drawn, or was given back already: counting is wrong then.
        """
        if not 0 <= item < self._next or item in self._waiting:
            raise ValueError(f"item {item} was not drawn, or was given back already (position {self._next})")
        insort(self._waiting, item)

    def state(self, in_flight: Iterable[int] = ()) -> dict[str, JSON]:
        """The position as JSON. `in_flight`: items drawn and not yet committed, which a restored stream is to give
        out again, because their gradients die with this process."""
        return {
            "seed": self._seed,
            "windows": self._dataset.train_windows,
            "microbatch": self._rows,
            "next": self._next,
            "given_back": sorted({*self._waiting, *in_flight}),
        }

    def restore(self, state: Mapping[str, JSON]) -> None:
        """Continue from a `state`. Raises MismatchError when it belongs to another stream or is not one."""
        for name, expected in (
            ("seed", self._seed),
            ("windows", self._dataset.train_windows),
            ("microbatch", self._rows),
        ):
            if state.get(name) != expected:
                raise MismatchError(
                    f"data position: {name} is {state.get(name)!r}, this stream has {expected}. Fix: restore the "
                    "state of the same run and peer, or start with a new state directory"
                )
        position, waiting = state.get("next"), state.get("given_back")
        if not isinstance(position, int) or position < 0:
            raise MismatchError(f"data position: next is {position!r}, a count was expected")
        if not isinstance(waiting, list) or not all(
            isinstance(i, int) and 0 <= i < position for i in waiting
        ):
            raise MismatchError("data position: given_back does not list items below next")
        self._next, self._waiting = position, sorted(set(waiting))

    def _epoch_order(self, epoch: int) -> npt.NDArray[np.int64]:
        """(windows,) permutation of one epoch: the windows, sorted by a hash of (seed, epoch, window)."""
        key = _mix(np.array([self._seed & _MASK], dtype=np.uint64))
        key = _mix(key ^ np.uint64(epoch & _MASK))
        numbers = np.arange(self._dataset.train_windows, dtype=np.uint64)
        return np.argsort(_mix(_mix(numbers + key) ^ key), kind="stable")


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64 bits, wrapping arithmetic."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
