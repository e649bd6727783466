"""The VRAM tier: per device a capacity limit, its part of the ledger, and the two pools.

It makes and releases; which process may have what is decided elsewhere. A worker maps a block whole through its file
descriptor, and keeps the memory for as long as it maps it: so what a lost lease holds is freed here only once its
process is known dead.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from kvd.alloc.allocation import Allocation
from kvd.alloc.best_fit_pool import BestFitPool
from kvd.alloc.exact_pool import ExactPool
from kvd.alloc.ledger import Account, Ledger
from kvd.alloc.sizes import require_size
from kvd.tiers.driver import DeviceDriver, vram_tier
from protocol.errors import InvalidValue, NoDevice, OutOfCapacity, TierInUse, UnknownHandle


@dataclass(frozen=True)
class _Pools:
    exact: ExactPool
    best_fit: BestFitPool

    def held_bytes(self) -> int:
        return self.exact.held_bytes() + self.best_fit.held_bytes()


class Vram:
    """All device memory of the daemon.

    ``capacities`` maps the UUIDs of the devices to serve to their limits in bytes. Raises `NoDevice` for a device that
    the driver does not have, `InvalidValue` for a limit above the device's memory.
    """

    def __init__(self, driver: DeviceDriver, ledger: Ledger, capacities: Mapping[str, int]) -> None:
        self._ledger = ledger
        self._driver = driver
        self._pools: dict[str, _Pools] = {}
        self._pool_of: dict[int, tuple[Allocation, ExactPool | BestFitPool]] = {}
        there = {device.uuid: device for device in driver.devices()}
        for device, capacity in capacities.items():
            if device not in there:
                raise NoDevice(f"there is no device {device!r}; there is {', '.join(there) or 'none'}", device=device)
            require_size(f"capacity of {vram_tier(device)}", capacity, most=there[device].total_bytes)
        handles = itertools.count(1)
        for device, capacity in capacities.items():
            tier = vram_tier(device)
            ledger.add_tier(tier, capacity)
            pools = _Pools(ExactPool(driver, device, ledger, handles), BestFitPool(driver, device, ledger, handles))
            ledger.add_auditor(tier, pools.held_bytes)
            self._pools[tier] = pools

    def resize(self, capacity: int) -> None:
        """Another limit for every device, in bytes, or for none of them.

        Temporaries that are kept for reuse are given back if they are in the way. Raises `InvalidValue` above a
        device's memory, `TierInUse` below what is held of it.
        """
        there = {vram_tier(device.uuid): device for device in self._driver.devices()}
        for tier, pools in self._pools.items():
            require_size(f"capacity of {tier}", capacity, most=there[tier].total_bytes)
            if capacity < self._held(tier):
                pools.best_fit.trim()
            if capacity < self._held(tier):
                raise TierInUse(tier, capacity, self._held(tier), self._ledger.largest_holders(tier))
        for tier in self._pools:
            self._ledger.resize_tier(tier, capacity)

    def _held(self, tier: str) -> int:
        total = self._ledger.total(tier)
        return total.committed + total.reserved

    def devices(self) -> list[str]:
        """The UUIDs of the devices that are served."""
        return [tier.removeprefix("vram:") for tier in self._pools]

    def allocate(self, account: Account, nbytes: int, *, temporary: bool) -> Allocation:
        """Memory of the device that ``account.tier`` names: exact, or from the reusing pool if it is ``temporary``.

        Temporaries that are kept for reuse never stand in its way: they are given back when there is no other room.
        Raises `InvalidValue`, `OutOfCapacity` or `OsFailure`; then nothing is held.
        """
        pools = self._pools.get(account.tier)
        if pools is None:
            raise InvalidValue("device memory tier", account.tier, f"one of {', '.join(self._pools)}")
        pool = pools.best_fit if temporary else pools.exact
        try:
            allocation = pool.allocate(account, nbytes)
        except OutOfCapacity:
            if not pools.best_fit.trim():
                raise
            allocation = pool.allocate(account, nbytes)
        self._pool_of[allocation.handle] = allocation, pool
        return allocation

    def adopt(self, account: Account, requested: int, fd: int, nbytes: int) -> Allocation:
        """Memory that an earlier run gave, by its descriptor: it goes back to the driver when it is freed.

        Raises `InvalidValue`, or `OutOfCapacity` where others have had its place meanwhile; then nothing is held.
        """
        pool = self._pools[account.tier].exact
        allocation = pool.adopt(account, requested, fd, nbytes)
        self._pool_of[allocation.handle] = allocation, pool
        return allocation

    def allocation(self, handle: int) -> Allocation:
        """The allocation in use that ``handle`` names; raises `UnknownHandle`."""
        return self._entry(handle)[0]

    def fd(self, handle: int) -> int:
        """The descriptor to pass to a worker. It stays the driver's: do not close it. Raises `UnknownHandle`."""
        return self._entry(handle)[0].block.fd

    def free(self, handle: int) -> None:
        """Give one allocation up; raises `UnknownHandle` if it is not in use."""
        allocation, pool = self._entry(handle)
        pool.free(allocation)
        del self._pool_of[handle]

    def free_lease(self, lease: int) -> None:
        """Give up all that a lease has, kept temporaries included. Only once its process is known dead."""
        for allocation in self.allocations(lease):
            self.free(allocation.handle)
        for pools in self._pools.values():
            pools.best_fit.trim(lease=lease)

    def allocations(self, lease: int | None = None) -> list[Allocation]:
        """All that is in use, or what one lease has."""
        every = (allocation for allocation, _ in self._pool_of.values())
        return [allocation for allocation in every if lease is None or allocation.account.lease == lease]

    def trim(self) -> int:
        """Give all temporaries that are kept for reuse back to the driver; returns their bytes."""
        return sum(pools.best_fit.trim() for pools in self._pools.values())

    def own_bytes(self, tier: str) -> int:
        """What the driver keeps for this process of the device that the tier is of; 0 for any other tier."""
        return self._driver.own_bytes(tier.removeprefix("vram:")) if tier in self._pools else 0

    def bytes_in_use(self) -> dict[str, int | None]:
        """By device, what the driver reports as taken by anybody; None where it cannot be asked."""
        return {device: self._driver.bytes_in_use(device) for device in self.devices()}

    def close(self) -> None:
        """Give everything back and forget the tiers."""
        for handle in list(self._pool_of):
            self.free(handle)
        self.trim()
        for tier in self._pools:
            self._ledger.remove_tier(tier)
        self._pools.clear()

    def _entry(self, handle: int) -> tuple[Allocation, ExactPool | BestFitPool]:
        try:
            return self._pool_of[handle]
        except KeyError:
            raise UnknownHandle(f"allocation {handle} is not in use", handle=handle) from None
