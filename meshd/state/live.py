"""Bundles written when somebody asks for them: a stage's live state, for a joiner."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from meshd.clock import Clock
from meshd.errors import MeshdError, ResourceError
from meshd.transport.base import NotHere


class LiveBundles:
    """Makes the bundle `name` (`live/STAGE`) with `prepare`, once for all who ask for it within `fresh_s`.

    A bundle that somebody still reads is kept longer (`keep`), so that a newcomer does not take it away under an
    earlier one. Making it runs in `group`, not in the request: where it takes longer than `wait_s`, the asker is told
    to come again and finds it then, instead of timing out and beginning it anew each time (C05).
    """

    def __init__(
        self,
        name: str,
        prepare: Callable[[str], Awaitable[None]],
        group: asyncio.TaskGroup,
        clock: Clock,
        *,
        fresh_s: float = 60.0,
        wait_s: float = 5.0,
    ) -> None:
        """`prepare(name)` writes the bundle to the store; a MeshdError that it raises goes to those who asked."""
        self._name, self._prepare, self._group, self._clock = name, prepare, group, clock
        self._fresh_s, self._wait_s = fresh_s, wait_s
        self._fresh_until = -math.inf
        self._making: asyncio.Task[MeshdError | None] | None = None

    async def ensure(self, name: str) -> None:
        """Return when a fresh bundle is in the store; at once for another one than this makes.

        Raises ResourceError while it is being made, and what `prepare` raised; NotHere for a disk that does not take
        it, for that may last: the asker had better look elsewhere.
        """
        if name != self._name or self._clock.monotonic() < self._fresh_until:
            return
        if self._making is None:
            self._making = self._group.create_task(self._make(), name=f"write {name}")
        making = self._making
        done, _ = await asyncio.wait({making}, timeout=self._wait_s)
        if not done:
            raise ResourceError(f"{name} is being written. Fix: ask again in a few seconds")
        refusal = making.result()
        if refusal is not None:
            raise refusal

    def keep(self, name: str, until: float) -> None:
        """Somebody reads it: let it stand until then (monotonic seconds)."""
        if name == self._name:
            self._fresh_until = max(self._fresh_until, until)

    async def _make(self) -> MeshdError | None:
        """Refusals are a result, not an exception: they must not end the group."""
        try:
            await self._prepare(self._name)
        except ResourceError as fault:
            return NotHere(f"{self._name} cannot be written here: {fault}")
        except MeshdError as refusal:
            return refusal
        finally:
            self._making = None
        self._fresh_until = self._clock.monotonic() + self._fresh_s
        return None
