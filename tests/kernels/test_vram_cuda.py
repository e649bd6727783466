"""The VRAM tier on a real device: what the driver gives is what the books say, and no CUDA context is made.

Each test runs the daemon's part in a process of its own, as in service, because torch has a context in this one.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

PROJECT = Path(__file__).resolve().parents[2]

PREAMBLE = """
import ctypes, os
from cuda.bindings import driver as cuda
from kvd.alloc.ledger import Account, Ledger
from kvd.tiers.driver_cuda import CudaDriver
from kvd.tiers.vram import Vram
from protocol.errors import InvalidValue, NoDevice, OutOfCapacity

MIB = 1 << 20
driver = CudaDriver()
device = driver.devices()[0]
ledger = Ledger()
vram = Vram(driver, ledger, {device.uuid: device.total_bytes})
account = Account(f"vram:{device.uuid}", 1, 1, "hot_cache")

def no_context():
    error, context = cuda.cuCtxGetCurrent()
    assert error == cuda.CUresult.CUDA_SUCCESS and int(context) == 0, (error, context)
    error, flags, active = cuda.cuDevicePrimaryCtxGetState(cuda.cuDeviceGet(0)[1])
    assert error == cuda.CUresult.CUDA_SUCCESS and not active, (error, active)

def checked(result):
    error, *values = result
    assert error == cuda.CUresult.CUDA_SUCCESS, error
    return values[0] if values else None
"""


def run(script: str) -> str:
    """Run a script in a fresh interpreter; it fails the test if it exits with anything but 0."""
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(script)], cwd=PROJECT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_driver_gives_what_the_books_say_without_a_context() -> None:
    run(
        """
        assert device.uuid.startswith("GPU-") and device.total_bytes > 0, device
        assert driver.granularity(device.uuid) == 2 * MIB
        seeds = [vram.allocate(account, 512 * MIB, temporary=True) for _ in range(2)]
        for seed in seeds:
            vram.free(seed.handle)
        before = driver.bytes_in_use(device.uuid)
        caches = [vram.allocate(account, 41 * MIB // 2, temporary=False) for _ in range(78)]
        assert {cache.committed for cache in caches} == {22 * MIB}
        ledger.check()
        if before is not None:
            grown = driver.bytes_in_use(device.uuid) - before
            assert grown >= 78 * 22 * MIB, grown
        no_context()
        vram.close()
        ledger.check()
        """
    )


def test_memory_reads_zero_when_it_is_created_again() -> None:
    """Here the process plays the worker too: it imports the descriptor, maps, reads, writes and lets go."""
    run(
        """
        def import_and_map(fd, nbytes):
            handle = checked(cuda.cuMemImportFromShareableHandle(
                fd, cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
            address = checked(cuda.cuMemAddressReserve(nbytes, 0, 0, 0))
            checked(cuda.cuMemMap(address, nbytes, 0, handle, 0))
            access = cuda.CUmemAccessDesc()
            access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = 0
            access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            checked(cuda.cuMemSetAccess(address, nbytes, [access], 1))
            return handle, address

        nbytes = 64 * MIB
        for _ in range(3):
            allocation = vram.allocate(account, nbytes, temporary=False)
            context = checked(cuda.cuDevicePrimaryCtxRetain(checked(cuda.cuDeviceGet(0))))
            checked(cuda.cuCtxSetCurrent(context))
            handle, address = import_and_map(vram.fd(allocation.handle), nbytes)
            content = (ctypes.c_ubyte * nbytes)()
            checked(cuda.cuMemcpyDtoH(ctypes.addressof(content), address, nbytes))
            assert bytes(content) == bytes(nbytes)
            checked(cuda.cuMemsetD8(address, 0xA5, nbytes))
            checked(cuda.cuMemcpyDtoH(ctypes.addressof(content), address, nbytes))
            assert bytes(content) == b"\\xa5" * nbytes
            checked(cuda.cuMemUnmap(address, nbytes))
            checked(cuda.cuMemAddressFree(address, nbytes))
            checked(cuda.cuMemRelease(handle))
            vram.free(allocation.handle)
        ledger.check()
        """
    )


def test_more_than_the_device_has_is_refused_and_leaves_nothing() -> None:
    run(
        """
        for nbytes in (0, -1, 1 << 61):
            try:
                driver.create(device.uuid, nbytes)
            except InvalidValue:
                continue
            raise AssertionError(nbytes)
        try:
            driver.create(device.uuid, device.total_bytes + 2 * MIB)
        except OutOfCapacity as error:
            assert "CUDA_ERROR_OUT_OF_MEMORY" in str(error), error
        else:
            raise AssertionError("no error")
        try:
            driver.create("GPU-00000000-0000-0000-0000-000000000000", 1)
        except NoDevice:
            pass
        else:
            raise AssertionError("no error")
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(1000):
            driver.release(driver.create(device.uuid, 2 * MIB))
        assert len(os.listdir("/proc/self/fd")) == descriptors
        no_context()
        """
    )
