"""VRAM on behalf of leases: which lease holds which handle, and the grants for their descriptors."""

from __future__ import annotations

import os
from functools import partial
from typing import get_args

from kvd.alloc.ledger import Account
from kvd.leases import Lease
from kvd.tiers.driver import vram_tier
from kvd.tiers.vram import Vram
from protocol import messages
from protocol.errors import InvalidValue, NoDevice, UnknownHandle
from protocol.handles import DeviceMemory, DevicePurpose
from protocol.messages import DeviceAllocated, Done, HandedOver

TEMPORARY: DevicePurpose = "temporary"
PURPOSES = get_args(DevicePurpose)


class DeviceMemoryVerbs:
    """Answers `AllocateDevice` and `FreeDevice`. No lease gets more than ``limit`` handles."""

    def __init__(self, vram: Vram, limit: int) -> None:
        self._vram = vram
        self.limit = limit

    def allocate(self, lease: Lease, request: messages.AllocateDevice) -> DeviceAllocated:
        """Take VRAM on the account of ``lease`` and of the session that the request names, which it holds."""
        self._require_room(lease, request.device)
        account = Account(vram_tier(request.device), lease.number, request.session, request.purpose)
        allocation = self._vram.allocate(account, request.nbytes, temporary=request.purpose == TEMPORARY)
        grant = lease.grant(allocation.handle, partial(self._duplicate, allocation.handle))
        lease.device_grants[allocation.handle] = grant
        memory = DeviceMemory(allocation.handle, request.device, allocation.requested, allocation.committed, grant)
        return DeviceAllocated(request.seq, memory)

    def hand_over(self, lease: Lease, request: messages.HandOver, fd: int) -> HandedOver:
        """Have VRAM that an earlier run gave to the process of ``lease``; the session, if any, is one that it holds."""
        self._require_room(lease, request.device)
        account = Account(vram_tier(request.device), lease.number, request.session, request.purpose)
        allocation = self._vram.adopt(account, request.requested, fd, request.committed)
        lease.device_grants[allocation.handle] = 0  # the process has the descriptor: there is nothing to claim
        return HandedOver(allocation.handle)

    def free(self, lease: Lease, request: messages.FreeDevice) -> Done:
        """Give one handle of ``lease`` back."""
        if request.handle not in lease.device_grants:
            raise UnknownHandle(f"lease {lease.number} has no handle {request.handle}", handle=request.handle)
        self._vram.free(request.handle)
        lease.revoke(lease.device_grants.pop(request.handle))
        return Done(request.seq)

    def _require_room(self, lease: Lease, device: str) -> None:
        """Raise `NoDevice` or `InvalidValue` unless ``lease`` may have one handle more of ``device``."""
        if device not in self._vram.devices():
            raise NoDevice(
                f"no device {device[:64]!r} is served; there is {', '.join(self._vram.devices())}",
                device=device[:64],
            )
        if len(lease.device_grants) >= self.limit:
            raise InvalidValue("device memory handles of the lease", self.limit + 1, f"at most {self.limit}")

    def lease_ended(self, lease: Lease) -> None:
        """The process of ``lease`` is dead: all its VRAM goes back."""
        self._vram.free_lease(lease.number)

    def _duplicate(self, handle: int) -> int:
        return os.dup(self._vram.fd(handle))
