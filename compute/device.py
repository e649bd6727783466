"""Where a worker computes: the CPU or one CUDA GPU, behind one small interface.

A device maps what the daemon's handles stand for. Every mapping is a flat uint8 tensor on the device and an absolute
address that kernels may use; host RAM is registered with a GPU so that kernels read it in place.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class OwnMemory:
    """Bytes of the device: those that torch's allocator holds, and the context's; None where that is not known."""

    torch_reserved: int
    context: int | None


class Device(Protocol):
    """A compute device of this process."""

    torch_device: torch.device
    uuid: str
    """The name by which the daemon knows it."""

    def map_shared(self, fd: int, nbytes: int, *, read_only: bool = False) -> Mapping:
        """Map a shared memory segment. Takes ``fd``; raises `OsFailure` where that fails.

        Of a read-only mapping the tensor looks writable, and a write to it ends the process.
        """

    def registering(self, nbytes: int) -> AbstractContextManager[None]:
        """Around the calls of `map_shared` that map ``nbytes`` in all: what they take of the device is its own."""

    def map_device(self, fd: int, nbytes: int) -> Mapping:
        """Map VRAM that the daemon made, whole. Takes ``fd``."""

    def start_copy(self, destination: torch.Tensor, source: torch.Tensor) -> Copy:
        """Copy bytes after all work enqueued so far, beside the work that comes. Sizes are equal."""

    def own_memory(self) -> OwnMemory:
        """What this process has of the device beside what the daemon gave. Any thread may ask; never waits for it."""

    def warmed_up(self) -> None:
        """Kernels that are loaded when they first run have run: what the context takes is measured anew."""

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
