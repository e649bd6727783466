"""How fast each GPU reads and writes host RAM, with copy engines and with a kernel that reads rows in place.

The memory is shared memory, made and registered as a worker's is. A rate is judged by the link that the GPU has:
generation and lanes as NVML reports them under load, and what of that sound machines reached.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvd.doctor.bench import Rate, host_memory
from protocol.errors import NoDevice, OsFailure

_SPAN = 4 << 30
_COPIED = 1 << 30
_ROWS = 8192
GROUP_ROW = 4 * 656
"""Bytes of one token's rows in a group of four layers: what a miss reads."""
_REPEATS = 5

_COPY_SHARE = 0.75
_GATHER_SHARE = 0.60
"""What of the link's rate a sound machine reaches at least: measured 0.87 and 0.79 on a fifth-generation link."""

# gather(target, source, offsets, row_bytes): block i copies a row from source + offsets[i] to target + i × row_bytes,
# each thread 16 bytes at a time.
_GATHER = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry gather(.param .u64 target, .param .u64 source, .param .u64 offsets, .param .u32 row_bytes)
{
    .reg .pred %done;
    .reg .b32 %at, %step, %row, %size, %a, %b, %c, %d;
    .reg .b64 %to, %from, %index, %offset, %place;
    ld.param.u64 %to, [target];
    ld.param.u64 %from, [source];
    ld.param.u64 %index, [offsets];
    ld.param.u32 %size, [row_bytes];
    mov.u32 %row, %ctaid.x;
    mov.u32 %at, %tid.x;
    shl.b32 %at, %at, 4;
    mov.u32 %step, %ntid.x;
    shl.b32 %step, %step, 4;
    mul.wide.u32 %offset, %row, 8;
    add.s64 %index, %index, %offset;
    ld.global.u64 %offset, [%index];
    add.s64 %from, %from, %offset;
    mul.wide.u32 %offset, %row, %size;
    add.s64 %to, %to, %offset;
more:
    setp.ge.u32 %done, %at, %size;
    @%done ret;
    cvt.u64.u32 %offset, %at;
    add.s64 %place, %from, %offset;
    ld.global.v4.b32 {%a, %b, %c, %d}, [%place];
    add.s64 %place, %to, %offset;
    st.global.v4.b32 [%place], {%a, %b, %c, %d};
    add.u32 %at, %at, %step;
    bra more;
}
\0"""


def cuda_rates() -> list[Rate]:
    """For each GPU: copies both ways, and a gather of scattered rows. Takes 4 GiB of host RAM and 1 GiB of VRAM.

    Raises `NoDevice` without a GPU, `OutOfCapacity` without the memory, `OsFailure` where the driver refuses.
    """
    try:
        import pynvml
        from cuda.bindings import driver
    except ImportError as error:
        raise NoDevice(f"benches of GPUs need the packages cuda-bindings and nvidia-ml-py: {error}") from error
    try:
        _call(driver, driver.cuInit, 0)
    except RuntimeError as error:  # what cuda-bindings raises when there is no libcuda to load
        raise NoDevice(f"the CUDA driver cannot be loaded: {error}") from error
    pynvml.nvmlInit()
    rates: list[Rate] = []
    with host_memory(_SPAN, threads=8) as address:
        for ordinal in range(_call(driver, driver.cuDeviceGetCount)):
            rates += _Gpu(driver, pynvml, ordinal).rates(address)
    return rates


def link_rate(generation: int, lanes: int) -> float:
    """Bytes per second of a PCIe link, after its encoding, before its packets' headers."""
    transfers = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}[generation] * 1e9
    encoding = {1: 8 / 10, 2: 8 / 10, 6: 242 / 256}.get(generation, 128 / 130)
    return transfers * lanes * encoding / 8


class _Gpu:
    """One GPU, with a context of its own while `rates` runs."""

    def __init__(self, driver: Any, nvml: Any, ordinal: int) -> None:
        self._driver = driver
        self._nvml = nvml
        self._device = self._do(driver.cuDeviceGet, ordinal)
        bus = self._do(driver.cuDeviceGetPCIBusId, 32, self._device).split(b"\0")[0].decode()
        self._handle = nvml.nvmlDeviceGetHandleByPciBusId(bus)
        self.name = bus

    def rates(self, address: int) -> list[Rate]:
        """Rates between this GPU and the host RAM at ``address``."""
        driver = self._driver
        with self._context(), self._registered(address) as mapped, self._memory(_COPIED) as memory:
            down = self._rate(_COPIED, lambda: self._do(driver.cuMemcpyHtoDAsync, memory, address, _COPIED, 0))
            generation = self._nvml.nvmlDeviceGetCurrPcieLinkGeneration(self._handle)
            lanes = self._nvml.nvmlDeviceGetCurrPcieLinkWidth(self._handle)
            up = self._rate(_COPIED, lambda: self._do(driver.cuMemcpyDtoHAsync, address, memory, _COPIED, 0))
            gather = self._gather(address, mapped, memory)
        link = link_rate(generation, lanes)
        where = f"{self.name}, PCIe {generation} x{lanes}"
        return [
            _judged("copy from host RAM", down, link, _COPY_SHARE, where),
            _judged("copy to host RAM", up, link, _COPY_SHARE, where),
            _judged(f"gather of {GROUP_ROW:,}-byte rows over 4 GiB", gather, link, _GATHER_SHARE, where),
        ]

    def _gather(self, address: int, mapped: int, memory: int) -> float:
        """Rows at random places, read in place; some are looked at afterwards."""
        driver = self._driver
        generator = random.Random(0)
        offsets = [16 * generator.randrange((_SPAN - GROUP_ROW) // 16) for _ in range(_ROWS)]
        for offset in offsets[:64]:
            ctypes.memmove(address + offset, generator.randbytes(GROUP_ROW), GROUP_ROW)
        table = (ctypes.c_uint64 * _ROWS)(*offsets)
        target, index = memory, memory + _COPIED - ctypes.sizeof(table)
        self._do(driver.cuMemcpyHtoD, index, ctypes.addressof(table), ctypes.sizeof(table))
        module = self._do(driver.cuModuleLoadData, _GATHER)
        kernel = self._do(driver.cuModuleGetFunction, module, b"gather")
        values = (target, mapped, index, GROUP_ROW)
        types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)
        launch = (kernel, _ROWS, 1, 1, 192, 1, 1, 0, 0, (values, types), 0)
        rate = self._rate(_ROWS * GROUP_ROW, lambda: self._do(driver.cuLaunchKernel, *launch))
        row = ctypes.create_string_buffer(GROUP_ROW)
        for number, offset in enumerate(offsets[:64]):
            self._do(driver.cuMemcpyDtoH, ctypes.addressof(row), target + number * GROUP_ROW, GROUP_ROW)
            if row.raw != ctypes.string_at(address + offset, GROUP_ROW):
                raise OsFailure(f"{self.name}: row {number} read in place differs from the one in host RAM")
        self._do(driver.cuModuleUnload, module)
        return rate

    def _rate(self, nbytes: int, enqueue: Callable[[], Any]) -> float:
        """The best of several, by events on the default stream."""
        driver = self._driver
        begin, end = self._do(driver.cuEventCreate, 0), self._do(driver.cuEventCreate, 0)
        best = 0.0
        for _ in range(_REPEATS):
            self._do(driver.cuEventRecord, begin, 0)
            enqueue()
            self._do(driver.cuEventRecord, end, 0)
            self._do(driver.cuEventSynchronize, end)
            best = max(best, nbytes / (self._do(driver.cuEventElapsedTime, begin, end) / 1e3))
        self._do(driver.cuEventDestroy, begin)
        self._do(driver.cuEventDestroy, end)
        return best

    @contextmanager
    def _context(self) -> Iterator[None]:
        context = self._do(self._driver.cuDevicePrimaryCtxRetain, self._device)
        self._do(self._driver.cuCtxSetCurrent, context)
        try:
            yield
        finally:
            self._do(self._driver.cuDevicePrimaryCtxRelease, self._device)

    @contextmanager
    def _registered(self, address: int) -> Iterator[int]:
        """The device's address of the host RAM."""
        driver = self._driver
        self._do(driver.cuMemHostRegister, address, _SPAN, driver.CU_MEMHOSTREGISTER_DEVICEMAP)
        try:
            yield int(self._do(driver.cuMemHostGetDevicePointer, address, 0))
        finally:
            self._do(driver.cuMemHostUnregister, address)

    @contextmanager
    def _memory(self, nbytes: int) -> Iterator[int]:
        memory = self._do(self._driver.cuMemAlloc, nbytes)
        try:
            yield int(memory)
        finally:
            self._do(self._driver.cuMemFree, memory)

    def _do(self, function: Any, *arguments: Any) -> Any:
        return _call(self._driver, function, *arguments)


def _judged(case: str, value: float, link: float, share: float, where: str) -> Rate:
    return Rate(
        f"{case}, {where}", value, f"{value / link:.0%} of the link; sound: {share:.0%}", link, value >= share * link
    )


def _call(driver: Any, function: Any, *arguments: Any) -> Any:
    """What the driver returns; raises `OsFailure` with the name of its error."""
    error, *values = function(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise OsFailure(f"{function.__name__}: {error.name}", call=function.__name__, error=error.name)
    return values[0] if values else None
