"""Memory that runs out: known in all its forms, and free again when it is told of."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from meshd.errors import ResourceError
from meshd.pipeline.exhaustion import OutOfMemory, out_of_memory, with_memory
from meshd.pipeline.worker import DeviceWorker


def too_much() -> torch.Tensor:
    """More than any machine has: torch's own allocator says so."""
    return torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has a total of"),
        torch.cuda.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
        RuntimeError("std::bad_alloc"),
        MemoryError(),
    ],
)
def test_every_way_to_run_out_of_memory_is_one_error_with_a_fix(error: BaseException) -> None:
    told = out_of_memory(error)
    assert isinstance(told, ResourceError)
    said = str(error).splitlines()[0].removeprefix("DefaultCPUAllocator: ") if str(error) else "MemoryError"
    assert f"memory ran out ({said})" in str(told)
    assert "\n" not in str(told)
    assert "Fix: " in str(told)
    assert "data.microbatch" in str(told)


def test_other_errors_stay_what_they_are() -> None:
    assert out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert out_of_memory(ValueError("out of memory")) is None
    with pytest.raises(ZeroDivisionError):
        with_memory(lambda: 1 // 0)
    assert with_memory(lambda: 7) == 7


class Tensor:
    """Stands for the activations of a pass."""


@pytest.mark.parametrize("where", ["thread", "call"])
async def test_what_did_not_fit_is_free_while_the_error_lives_on(where: str) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def work() -> None:
        tensor = Tensor()
        alive.append(weakref.ref(tensor))
        too_much()

    gc.disable()
    try:
        async with DeviceWorker() as worker:
            with pytest.raises(OutOfMemory, match=r"ran out \(can.t allocate memory: you tried") as caught:
                with_memory(work) if where == "call" else await worker.run(work)
            assert alive[0]() is None
            assert caught.value.__context__ is None
            assert await worker.run(lambda: 7) == 7
    finally:
        gc.enable()
