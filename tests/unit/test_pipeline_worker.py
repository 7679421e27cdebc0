"""One thread per device: order, cancelling, errors, and its end."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref

import pytest

from meshd.errors import NetworkError
from meshd.pipeline.worker import BACKGROUND, BACKWARD, FORWARD, GOSSIP, DeviceWorker
from meshd.sim.clock import run_virtual


class Gate:
    """Holds the worker's thread until it is opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.entered.set()
        assert self.opened.wait(30)


async def held(worker: DeviceWorker, tasks: asyncio.TaskGroup) -> Gate:
    gate = Gate()
    tasks.create_task(worker.run(gate.wait, BACKGROUND))
    await asyncio.to_thread(gate.entered.wait)
    return gate


async def test_backward_goes_before_forward_before_gossip_then_in_order_of_arrival() -> None:
    done: list[tuple[int, int]] = []
    async with DeviceWorker() as worker, asyncio.TaskGroup() as tasks:
        gate = await held(worker, tasks)
        for turn in range(2):
            for priority in (BACKGROUND, GOSSIP, FORWARD, BACKWARD):
                job = worker.run(lambda key=(priority, turn): done.append(key), priority)  # type: ignore[misc]
                tasks.create_task(job)
        await asyncio.sleep(0)
        assert worker.waiting == 8
        gate.opened.set()
    assert done == [
        (priority, turn) for priority in (GOSSIP, BACKWARD, FORWARD, BACKGROUND) for turn in (0, 1)
    ]


@pytest.mark.parametrize(
    ("priority", "overtaking"), [(GOSSIP, 48), (BACKWARD, 32), (FORWARD, 16), (BACKGROUND, 0)]
)
async def test_only_so_many_later_jobs_overtake_one_in_the_background(priority: int, overtaking: int) -> None:
    done: list[str] = []
    async with DeviceWorker() as worker, asyncio.TaskGroup() as tasks:
        gate = await held(worker, tasks)
        worker.submit(lambda: done.append("snapshot"), BACKGROUND)
        for _ in range(100):
            worker.submit(lambda: done.append("later"), priority)
        gate.opened.set()
    assert len(done) == 101
    assert done.index("snapshot") == overtaking


async def test_a_device_that_is_always_busy_gets_to_the_background() -> None:
    """Each backward pass brings the next two, as a pipeline does whose senders are faster than this peer."""
    snapshot, passes = threading.Event(), itertools.count()

    async with DeviceWorker() as worker, asyncio.TaskGroup() as tasks:

        def backward() -> None:
            if not snapshot.is_set() and next(passes) < 1000:
                for _ in range(2):
                    worker.submit(backward, BACKWARD)

        gate = await held(worker, tasks)
        worker.submit(backward, BACKWARD)
        taken = worker.submit(snapshot.set, BACKGROUND)
        gate.opened.set()
        await asyncio.wrap_future(taken)
    assert next(passes) < 1000


async def test_cancelling_takes_a_waiting_job_out_and_lets_a_running_one_end() -> None:
    ran: list[str] = []
    async with DeviceWorker() as worker, asyncio.TaskGroup() as tasks:
        gate = Gate()

        def slow() -> None:
            gate.wait()
            ran.append("running")

        running = tasks.create_task(worker.run(slow))
        await asyncio.to_thread(gate.entered.wait)
        waiting = tasks.create_task(worker.run(lambda: ran.append("waiting")))
        await asyncio.sleep(0)
        running.cancel()
        waiting.cancel()
        await asyncio.wait({running, waiting})
        assert running.cancelled()
        assert waiting.cancelled()
        gate.opened.set()
        await worker.run(lambda: ran.append("next"))
    assert ran == ["running", "next"]


async def test_an_exception_is_the_callers_and_the_thread_goes_on() -> None:
    def fail() -> None:
        raise ZeroDivisionError("in the device's thread")

    async with DeviceWorker() as worker:
        with pytest.raises(ZeroDivisionError, match="in the device's thread"):
            await worker.run(fail)
        assert await worker.run(lambda: 7) == 7
        assert worker.busy_s > 0


@pytest.mark.parametrize("how", ["returned", "raised", "cancelled"])
async def test_what_a_job_held_is_freed_before_the_next_comes(how: str) -> None:
    """A microbatch's activations: hundreds of megabytes."""

    class Tensor:
        pass

    gc.disable()
    try:
        async with DeviceWorker() as worker, asyncio.TaskGroup() as tasks:
            tensor = Tensor()
            alive = weakref.ref(tensor)

            def use(tensor: Tensor = tensor) -> None:
                if how == "raised":
                    raise ValueError

            if how == "cancelled":
                gate = await held(worker, tasks)
                job = asyncio.ensure_future(worker.run(use))
                await asyncio.sleep(0)
                job.cancel()
                await asyncio.wait({job})
                gate.opened.set()
                del job
            else:
                with pytest.raises(ValueError) if how == "raised" else _nothing():
                    await worker.run(use)
            del use, tensor
            done = threading.Event()
            await worker.run(done.set)  # the thread has let go of what came before
            for _ in range(3):
                await asyncio.sleep(0)
            assert alive() is None
    finally:
        gc.enable()


def _nothing():
    import contextlib

    return contextlib.nullcontext()


def test_it_takes_no_virtual_time() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with DeviceWorker() as worker, asyncio.TaskGroup() as tasks:
            sleeping = tasks.create_task(asyncio.sleep(5))
            assert await worker.run(lambda: sum(range(1_000_000))) == 499_999_500_000
            assert loop.time() == 0.0
            assert not sleeping.done()
        assert loop.time() == pytest.approx(5.0)

    run_virtual(main())


async def test_the_thread_is_gone_when_the_block_ends_and_nothing_is_taken_after() -> None:
    before = set(threading.enumerate())
    ran: list[int] = []
    async with DeviceWorker("cuda:7") as worker:
        mine = [thread for thread in threading.enumerate() if thread.name == "cuda:7"]
        job = asyncio.ensure_future(worker.run(lambda: ran.append(1)))
        await asyncio.sleep(0)
    await job
    assert ran == [1]  # what was asked for before the end is done
    assert not mine[0].is_alive()
    assert not {t for t in set(threading.enumerate()) - before if t.name == "cuda:7"}
    with pytest.raises(NetworkError, match="stopped"):
        await worker.run(lambda: ran.append(2))
