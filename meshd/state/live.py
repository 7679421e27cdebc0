"""Bundles written when somebody asks for them: a stage's live state, for a joiner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from meshd.clock import Clock
from meshd.errors import MeshdError, ResourceError


class LiveBundles:
    """Makes `live/STAGE` bundles with `prepare`, once for all who ask within `fresh_s`.

    A bundle that somebody still reads is kept longer (`keep`), so that a newcomer does not take it away under an
    earlier one. Making it runs in `group`, not in the request: where it takes longer than `wait_s`, the asker is told
    to come again and finds it then, instead of timing out and beginning it anew each time (C05).
    """

    def __init__(
        self,
        prepare: Callable[[str], Awaitable[None]],
        group: asyncio.TaskGroup,
        clock: Clock,
        *,
        fresh_s: float = 60.0,
        wait_s: float = 5.0,
    ) -> None:
        """`prepare(name)` writes the bundle to the store; a MeshdError that it raises goes to those who asked."""
        self._prepare, self._group, self._clock = prepare, group, clock
        self._fresh_s, self._wait_s = fresh_s, wait_s
        self._fresh_until: dict[str, float] = {}
        self._making: dict[str, asyncio.Task[MeshdError | None]] = {}

    async def ensure(self, name: str) -> None:
        """Return when a fresh bundle is in the store.

        Raises ResourceError while it is being made, and what `prepare` raised.
        """
        if self._clock.monotonic() < self._fresh_until.get(name, float("-inf")):
            return
        if name not in self._making:
            self._making[name] = self._group.create_task(self._make(name), name=f"write {name}")
        making = self._making[name]
        done, _ = await asyncio.wait({making}, timeout=self._wait_s)
        if not done:
            raise ResourceError(f"{name} is being written. Fix: ask again in a few seconds")
        refusal = making.result()
        if refusal is not None:
            raise refusal

    def keep(self, name: str, until: float) -> None:
        """Somebody reads it: let it stand until then (monotonic seconds)."""
        if name in self._fresh_until:
            self._fresh_until[name] = max(self._fresh_until[name], until)

    async def _make(self, name: str) -> MeshdError | None:
        """Refusals are a result, not an exception: they must not end the group."""
        try:
            await self._prepare(name)
        except MeshdError as refusal:
            return refusal
        finally:
            del self._making[name]
        self._fresh_until[name] = self._clock.monotonic() + self._fresh_s
        return None
