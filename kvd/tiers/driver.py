"""The few calls that VRAM is made with, so that one daemon serves any kind of device.

Implementations: `kvd.tiers.driver_cuda` and, standing in for VRAM on a machine without a GPU, `kvd.tiers.driver_cpu`.
Which one is used is a setting; neither falls back to the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


def vram_tier(device: str) -> str:
    """The ledger's name for the memory of ``device``."""
    return f"vram:{device}"


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device. ``uuid`` is what settings, tiers and messages call it; ``total_bytes`` is its whole memory."""

    uuid: str
    name: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """Memory of a device that the driver gave as one piece: whole multiples of its granularity.

    ``fd`` is what a worker imports it by; it belongs to the driver and is close-on-exec. ``handle`` is the driver's own
    number.
    """

    fd: int
    nbytes: int
    device: str
    handle: int


class DeviceDriver(Protocol):
    """Makes and releases device memory that other processes can map. It maps nothing itself and holds no context."""

    def devices(self) -> list[DeviceInfo]:
        """All devices."""

    def granularity(self, device: str) -> int:
        """Blocks of ``device`` are multiples of this many bytes. Raises `NoDevice` for an unknown device."""

    def create(self, device: str, nbytes: int) -> DeviceBlock:
        """A new block of at least ``nbytes`` (> 0) zero bytes.

        Raises `OutOfCapacity` when the device has no room, `OsFailure` for any other refusal; then nothing is left.
        """

    def adopt(self, device: str, fd: int, nbytes: int) -> DeviceBlock:
        """A block of ``nbytes`` that `create` gave in an earlier process, by its descriptor, which is duplicated.

        Raises `InvalidValue` if the descriptor is not of such a block, as far as that can be told.
        """

    def release(self, block: DeviceBlock) -> None:
        """Give the block up, once. The memory is free when no process maps it any more. Raises `OsFailure`."""

    def held_bytes(self, block: DeviceBlock) -> int:
        """What the block really takes, as far as the driver or the operating system can be asked."""

    def own_bytes(self, device: str) -> int:
        """What the driver keeps of the device for this process, beside blocks: it is on nobody's account."""

    def bytes_in_use(self, device: str) -> int | None:
        """What the driver reports as taken of the whole device, by anybody; None where it cannot be asked."""
