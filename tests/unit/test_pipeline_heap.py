"""What freed memory does: large blocks go back to the system at once, brief ones are used again."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest
from pipeline_helpers import make_batch, make_run, make_runtimes, train

from meshd.pipeline import heap

MB = 1 << 20

# In a process of its own: its memory is nobody else's, and how it allocates is changed for good.
_MEASURED = """
import resource
import psutil, torch
from meshd.observe.metrics import private_bytes
from meshd.pipeline import heap

if {set_up}:
    heap.set_up()
me = psutil.Process()

def blocks(count, mb=2):
    return [torch.ones(mb << 18) for _ in range(count)]

def taken():
    return private_bytes(me) / 2**20

blocks(1, mb=16)  # from here on glibc by itself takes such blocks from its heap
before = taken()
kept = blocks(40)
del kept[::2]  # as between what autograd keeps
print(taken() - before)

kept.clear()
with heap.reusing():
    blocks(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        blocks(1)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
before = taken()
blocks(20)
print(taken() - before)
"""


def measured(set_up: bool) -> list[float]:
    """MiB that 20 kept blocks of 2 MiB take when 20 between them are free; page faults of 50 brief ones; MiB left of 20
    more that were freed."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED.format(set_up=set_up)], check=True, capture_output=True, text=True
    )
    return [float(line) for line in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_large_blocks_leave_no_holes_and_brief_ones_are_reused() -> None:
    kept, faults, left = measured(set_up=True)
    assert 40 <= kept < 50
    pages = 2 * MB // resource.getpagesize()  # of one block
    assert faults < 50 / 4 * pages  # fifty came from a few; the system may take back some of those
    assert left < 10


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_without_it_holes_stay_taken() -> None:
    """What the settings are for; should a C library do better by itself, they can go."""
    assert measured(set_up=False)[0] > 65


@pytest.mark.parametrize("recompute", [True, False])
def test_what_lasts_is_kept_apart(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threshold, at = [heap._LARGE_BYTES], list[tuple[str, int]]()
    monkeypatch.setattr(heap, "_own_pages_from", threshold.append)
    run = make_run([2], pipeline={"recompute": recompute})
    first, last = make_runtimes(run)
    for runtime in (first, last):
        where = f"stage {runtime.model.stage}"
        runtime.model.register_forward_hook(lambda *_, where=where: at.append((where, threshold[-1])))
        for parameter in runtime.model.parameters():
            parameter.register_hook(lambda grad: at.append(("gradient", threshold[-1])))
    brief, lasting = heap._LARGEST_BYTES, heap._LARGE_BYTES
    for gradients in (lasting, brief):  # the first pass makes them, the second adds to them
        at.clear()
        train([first, last], make_batch(1))
        passes = [seen for seen in at if seen[0] != "gradient"]
        if recompute:
            assert passes == [("stage 0", brief), ("stage 1", lasting), ("stage 0", lasting)]
        else:
            assert passes == [("stage 0", lasting), ("stage 1", lasting)]
        assert {size for name, size in at if name == "gradient"} == {gradients}
        assert threshold[-1] == lasting
