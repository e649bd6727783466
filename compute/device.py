"""Where a worker computes: the CPU or one CUDA GPU, behind one small interface.

A device maps what the daemon's handles stand for. Every mapping is a flat uint8 tensor on the device and an absolute
address that kernels may use; host RAM is registered with a GPU so that kernels read it in place.
"""

from __future__ import annotations

from typing import Protocol

import torch

from protocol.errors import InvalidValue


class Mapping(Protocol):
    """Mapped memory. ``close`` unmaps it; no kernel or copy that uses it may be in flight."""

    tensor: torch.Tensor
    """uint8 [nbytes] on the compute device"""
    address: int

    def close(self) -> None: ...


class Copy(Protocol):
    """A copy under way."""

    def done(self) -> bool:
        """Whether the bytes are where they should be. Never waits."""

    def wait(self) -> None:
        """Return when they are."""


class Device(Protocol):
    """A compute device of this process."""

    torch_device: torch.device
    uuid: str
    """The name by which the daemon knows it."""

    def map_shared(self, fd: int, nbytes: int) -> Mapping:
        """Map a shared memory segment read-write. Takes ``fd``; raises `OsFailure` where that fails."""

    def map_device(self, fd: int, nbytes: int) -> Mapping:
        """Map VRAM that the daemon made, whole. Takes ``fd``."""

    def start_copy(self, destination: torch.Tensor, source: torch.Tensor) -> Copy:
        """Copy bytes after all work enqueued so far, beside the work that comes. Sizes are equal."""

    def synchronize(self) -> None:
        """Return when all enqueued work is done."""

    def close(self) -> None:
        """Stop what copies in the background."""


def open_device(name: str) -> Device:
    """``cpu`` or ``cuda`` (``cuda:1`` for the second GPU). Raises `NoDevice`; never falls back to the other."""
    if name == "cpu":
        from compute.device_cpu import CpuDevice

        return CpuDevice()
    if name == "cuda" or name.startswith("cuda:"):
        from compute.device_cuda import CudaDevice

        ordinal = name.removeprefix("cuda").removeprefix(":") or "0"
        if not ordinal.isdecimal():
            raise InvalidValue("device", name, "cpu, cuda or cuda:N")
        return CudaDevice(int(ordinal))
    raise InvalidValue("device", name, "cpu, cuda or cuda:N")
