"""Peers of a swarm in one process that can be stopped like processes: no messages, no timers, until they go on.

Every callback of the event loop runs in the context of the task that asked for it, and tasks inherit their maker's:
a variable in it tells whose callback it is. Those of a peer that is frozen are put by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

import pytest
from swarm import Swarm

from meshd.sim.clock import VirtualLoop
from meshd.transport.base import Handlers, LinkLost
from meshd.transport.memory import MemoryNetwork

T = TypeVar("T")

PROCESS: ContextVar[str] = ContextVar("process", default="")
# The others' pings go unanswered for so long (meshd.transport.options: one is sent after 2 s, and waits 2 s).
NOTICED_S = 5.0


class _Gate:
    """A callback that waits while its process is frozen."""

    def __init__(self, loop: FreezingLoop, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._loop, self._callback, self._args = loop, callback, args
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        # From another thread, it may be called before its handle is known here.
        if self.handle is not None and self.handle.cancelled():
            return
        held = self._loop.frozen.get(PROCESS.get())
        if held is None:
            self._callback(*self._args)
        else:
            held.append((self, copy_context()))


class FreezingLoop(VirtualLoop):
    """frozen: callbacks that wait, by process."""

    def __init__(self) -> None:
        self.frozen: dict[str, list[tuple[_Gate, Context]]] = {}
        super().__init__()

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        gate = _Gate(self, callback, args)
        gate.handle = super().call_soon(gate, context=context)
        return gate.handle

    def call_soon_threadsafe(
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        gate = _Gate(self, callback, args)
        gate.handle = super().call_soon_threadsafe(gate, context=context)
        return gate.handle

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        gate = _Gate(self, callback, args)
        handle = super().call_at(when, gate, context=context)
        gate.handle = handle
        return handle

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        # Whether a thread is at work is the loop's own business, not the process's that asked for it.
        return Context().run(super().run_in_executor, executor, func, *args)

    def freeze(self, process: str) -> None:
        self.frozen.setdefault(process, [])

    def thaw(self, process: str) -> None:
        for gate, context in self.frozen.pop(process, []):
            super().call_soon(gate, context=context)


def run_freezing(main: Coroutine[Any, Any, T]) -> T:
    """`meshd.sim.clock.run_virtual` on a FreezingLoop."""
    with asyncio.Runner(loop_factory=FreezingLoop) as runner:
        return runner.run(main)


class Freezer:
    """Makes every peer that a Swarm starts, and every call that it serves, a process of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._silent: set[str] = set()
        begin, start, reach = Swarm.start, MemoryNetwork.start, MemoryNetwork.reach

        def begun(swarm: Swarm, name: str, *rest: Any, **options: Any) -> Any:
            return self._within(name, begin, swarm, name, *rest, **options)

        def served(network: MemoryNetwork, call: Any, handler: Any) -> None:
            self._within(call.server.partition(":")[0], start, network, call, handler)

        def reached(network: MemoryNetwork, local: str, remote: str) -> Handlers:
            if remote in self._silent:
                raise LinkLost(f"{remote} is not reached: no answer")
            return reach(network, local, remote)

        monkeypatch.setattr(Swarm, "start", begun)
        monkeypatch.setattr(MemoryNetwork, "start", served)
        monkeypatch.setattr(MemoryNetwork, "reach", reached)

    @staticmethod
    def _within(process: str, call: Callable[..., T], *args: Any, **options: Any) -> T:
        context = copy_context()
        context.run(PROCESS.set, process)
        return context.run(call, *args, **options)

    async def freeze(self, swarm: Swarm, name: str, seconds: float) -> None:
        """Until this returns. What the peer holds open breaks on the way, when it takes so long that others notice."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, FreezingLoop)
        address = f"{name}:1"
        loop.freeze(name)
        try:
            await swarm.clock.sleep(min(seconds, NOTICED_S))
            if seconds > NOTICED_S:
                self._silent.add(address)
                for call in list(swarm.network._calls.values()):
                    if address in (call.client, call.server):
                        call.lose(f"{address} does not answer pings")
                await swarm.clock.sleep(seconds - NOTICED_S)
        finally:
            self._silent.discard(address)
            loop.thaw(name)
