"""Device memory for what lives long: one block of the driver's per allocation, as large as asked and never reused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kvd.alloc.allocation import Allocation, adopt_block, create_block, release_block
from kvd.alloc.ledger import Account, Ledger
from kvd.alloc.sizes import require_size
from kvd.tiers.driver import DeviceDriver
from protocol.errors import UnknownHandle


class ExactPool:
    """Hot caches, rings, index keys and session arenas.

    An allocation commits its size rounded up to the driver's granularity, whatever was allocated and freed before, and
    a freed one goes back to the driver at once, which zeroes it.
    """

    def __init__(self, driver: DeviceDriver, device: str, ledger: Ledger, handles: Iterator[int] | None = None) -> None:
        self._driver = driver
        self._device = device
        self._ledger = ledger
        self._handles = itertools.count(1) if handles is None else handles
        self._live: dict[int, Allocation] = {}

    def allocate(self, account: Account, nbytes: int) -> Allocation:
        """Memory for ``account``. Raises `InvalidValue` for a size that is none, `OutOfCapacity`, `OsFailure`."""
        require_size("bytes of device memory", nbytes)
        block = create_block(self._driver, self._device, self._ledger, account, nbytes)
        allocation = Allocation(next(self._handles), account, nbytes, block)
        self._live[allocation.handle] = allocation
        return allocation

    def adopt(self, account: Account, requested: int, fd: int, nbytes: int) -> Allocation:
        """A block of ``nbytes`` that is there already, by its descriptor, which stays the caller's.

        Raises `InvalidValue`, `OutOfCapacity`; then nothing is held.
        """
        require_size("bytes of device memory", requested, most=nbytes)
        block = adopt_block(self._driver, self._device, self._ledger, account, requested, fd, nbytes)
        allocation = Allocation(next(self._handles), account, requested, block)
        self._live[allocation.handle] = allocation
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Give it back to the driver. Raises `UnknownHandle` if it is not in use: freed before, or another pool's."""
        if self._live.get(allocation.handle) != allocation:
            raise UnknownHandle(f"allocation {allocation.handle} is not in use", handle=allocation.handle)
        release_block(self._driver, self._ledger, allocation.account, allocation.requested, allocation.block)
        del self._live[allocation.handle]

    def allocations(self) -> list[Allocation]:
        """All that is in use, oldest first."""
        return list(self._live.values())

    def held_bytes(self) -> int:
        """What the driver says that the pool's blocks take: the ledger's auditor."""
        return sum(self._driver.held_bytes(allocation.block) for allocation in self._live.values())
