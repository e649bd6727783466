"""Every byte of a real GPU: what the driver reports in use is the sum of terms that are each measured."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvd.stat.explain import explain
from tests.blackbox.daemon_process import DaemonProcess, clean_environment

pytestmark = pytest.mark.gpu

MIB = 1 << 20
TOLERANCE = 2 * MIB


@contextmanager
def another_process(*arguments: str) -> Iterator[Callable[[str], None]]:
    """A function that has a Python program do what a line says."""
    command = [sys.executable, *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_environment()
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def do(line: str) -> None:
        stdin.write(line + "\n")
        stdin.flush()
        assert stdout.readline() == "ok\n"

    try:
        yield do
    finally:
        process.kill()
        process.wait()
        stdin.close()
        stdout.close()


def unexplained(daemon: DaemonProcess) -> int:
    """The median of some looks, other programs' processes aside: a machine may have more to do than this test."""
    found = []
    for _ in range(5):
        [terms] = explain(daemon.stat(), daemon.run_dir, None).devices
        assert terms.in_use is not None
        assert terms.unexplained is not None
        parts = (terms.driver, terms.daemon, terms.committed, terms.torch_reserved, terms.contexts, terms.unexplained)
        assert sum(parts) == terms.in_use
        found.append(terms.unexplained - terms.others)
    sys.stdout.write(f"unexplained {[round(nbytes / MIB, 2) for nbytes in found]} MiB of {terms}\n")
    return int(statistics.median(found))


TAKES_WITHOUT_CONTEXT = """
import sys
from cuda.bindings import driver

driver.cuInit(0)
memory = driver.CUmemAllocationProp()
memory.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
memory.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
memory.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
held = None
for line in sys.stdin:
    if line == "take\\n":
        status, held = driver.cuMemCreate(64 << 20, memory, 0)
        assert status == driver.CUresult.CUDA_SUCCESS, status
    elif line == "back\\n":
        driver.cuMemRelease(held)
    print("ok", flush=True)
"""


@pytest.mark.timeout(300)
def test_64_mib_outside_kvd_and_torch_are_unexplained_and_nothing_else_is(run_dir: Path) -> None:
    with DaemonProcess(
        run_dir, device="cuda", host_capacity="1GiB", host_extent="1GiB", vram_capacity="2GiB", drain_timeout_s="0"
    ) as daemon:
        empty = unexplained(daemon.wait_ready())
        with another_process("-m", "tests.blackbox.explained_worker", str(run_dir)) as do:
            do("warm now")
            [lease] = daemon.stat().leases
            assert lease.context > 300 * MIB
            first = unexplained(daemon)
            assert abs(first - empty) <= TOLERANCE, "a worker's context, and the tables of its host RAM, are explained"
            for line in ("torch 200", "kvd 300", "back torch"):
                do(line)
                assert abs(unexplained(daemon) - first) <= TOLERANCE, line
            do("driver 64")
            assert abs(unexplained(daemon) - first - 64 * MIB) <= TOLERANCE
            do("back driver")
            assert abs(unexplained(daemon) - first) <= TOLERANCE
            with another_process("-c", TAKES_WITHOUT_CONTEXT) as other:
                other("be here")
                first = unexplained(daemon)
                other("take")
                assert abs(unexplained(daemon) - first - 64 * MIB) <= TOLERANCE
                other("back")
                assert abs(unexplained(daemon) - first) <= TOLERANCE
        assert daemon.stop() == 0
