"""CUDA C++ for what Triton cannot express (clusters, distributed shared memory): compiled at run time, launched on
torch's current stream, capturable. The library is NVIDIA's own ``cuda-bindings`` with the NVRTC that torch installs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compute.kernels.triton_support import programmatic_edge
from protocol.errors import NoDevice

Argument = tuple[int | float, Any]
"""A kernel argument: its value, and its type in ctypes."""


class CudaKernel:
    """The function ``name`` of ``name``.cu beside this file, for the current device.

    The source is compiled with ``defines``, of which ``THREADS``, and where they are given ``SHARED_BYTES`` (dynamic
    shared memory) and ``CLUSTER`` say how its blocks are launched. Raises `NoDevice` where ``cuda-bindings`` or NVRTC
    is missing, or refuses it.
    """

    def __init__(self, name: str, defines: Mapping[str, int]) -> None:
        self._threads, self._cluster = defines["THREADS"], defines.get("CLUSTER", 1)
        self._shared_bytes = defines.get("SHARED_BYTES", 0)
        torch.cuda.set_device(torch.cuda.current_device())  # makes torch's context the driver's current one
        image = compiled(name, torch.cuda.get_device_capability(), tuple(sorted(defines.items())))
        self._driver = driver = bindings()[0]
        self._module = call(driver.cuModuleLoadData, image)
        self._function = call(driver.cuModuleGetFunction, self._module, name.encode())
        attribute = driver.CUfunction_attribute
        size = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call(driver.cuFuncSetAttribute, self._function, size, self._shared_bytes)
        if self._cluster > 8:
            allowed = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            call(driver.cuFuncSetAttribute, self._function, allowed, 1)

    @staticmethod
    def address(tensor: Tensor) -> Argument:
        return tensor.data_ptr(), ctypes.c_void_p

    @staticmethod
    def int32(value: int) -> Argument:
        return value, ctypes.c_int32

    @staticmethod
    def int64(value: int) -> Argument:
        return value, ctypes.c_int64

    @staticmethod
    def float32(value: float) -> Argument:
        return value, ctypes.c_float

    def launch(self, grid: tuple[int, int], arguments: Sequence[Argument]) -> None:
        """Enqueue blocks with ``blockIdx.x`` and ``.y`` below ``grid`` on torch's current stream.

        Those of a cluster are neighbours in x.
        """
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        attributes = []
        if self._cluster > 1:
            cluster = driver.CUlaunchAttribute()
            cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = self._cluster, 1, 1
            attributes.append(cluster)
        if programmatic_edge():
            overlapped = driver.CUlaunchAttribute()
            overlapped.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlapped.value.programmaticStreamSerializationAllowed = 1
            attributes.append(overlapped)
        config.attrs, config.numAttrs = attributes, len(attributes)
        values, types = zip(*arguments, strict=True)
        call(driver.cuLaunchKernelEx, config, self._function, (values, types), 0)


@functools.cache
def compiled(name: str, capability: tuple[int, int], defines: tuple[tuple[str, int], ...]) -> bytes:
    """The machine code of ``name``.cu for a compute capability; needs no GPU."""
    nvrtc = bindings()[1]
    source = Path(__file__).with_name(f"{name}.cu").read_bytes()
    major, minor = capability
    options = [
        f"--gpu-architecture=sm_{major}{minor}{'a' if major == 9 else ''}".encode(),
        f"--include-path={Path(__file__).parent}".encode(),
        *(f"-D{key}={value}".encode() for key, value in defines),
    ]
    program = call(nvrtc.nvrtcCreateProgram, source, f"{name}.cu".encode(), 0, [], [])
    try:
        result = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * call(nvrtc.nvrtcGetProgramLogSize, program)
            call(nvrtc.nvrtcGetProgramLog, program, log)
            raise NoDevice(f"{name}.cu cannot be compiled for compute capability {major}.{minor}: {log.decode()}")
        image: bytes = b" " * call(nvrtc.nvrtcGetCUBINSize, program)
        call(nvrtc.nvrtcGetCUBIN, program, image)
        return image
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@functools.cache
def bindings() -> tuple[Any, Any]:
    """``cuda.bindings.driver`` and ``.nvrtc``; raises `NoDevice` without them."""
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise NoDevice("the package cuda-bindings is missing: install kvd-tier[cuda]", device="cuda") from error
    return driver, nvrtc


def call(function: Any, *arguments: Any) -> Any:
    """What ``function`` returns beside its status; raises `NoDevice` with the name of an error."""
    try:
        status, *values = function(*arguments)
    except RuntimeError as error:  # cuda-bindings found no library to load
        raise NoDevice(f"{function.__name__}: {error}", device="cuda") from error
    if int(status) != 0:
        raise NoDevice(f"{function.__name__}: {status.name}", device="cuda")
    return values[0] if len(values) == 1 else values
