"""Device memory for temporaries: freed blocks are kept, and the smallest that is large enough is used again.

Fast for buffers that come and go, and wrong for any that stays: a small one can sit on a large block, which is then
gone for everybody (`kvd.alloc.exact_pool` is for those). The books count the whole block, so it shows.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator

from kvd.alloc.allocation import Allocation, create_block, release_block
from kvd.alloc.ledger import Account, Ledger
from kvd.alloc.sizes import require_size
from kvd.tiers.driver import DeviceBlock, DeviceDriver, vram_tier
from protocol.errors import UnknownHandle

CACHED = "cached"
"""The purpose of blocks that are kept for reuse; nobody requested them."""


class BestFitPool:
    """A pool that reuses blocks, for temporaries only.

    A freed block serves the same lease only: the lease's process may still map it, and its bytes are still there.
    `trim` gives kept blocks back to the driver.
    """

    def __init__(self, driver: DeviceDriver, device: str, ledger: Ledger, handles: Iterator[int] | None = None) -> None:
        self._driver = driver
        self._device = device
        self._ledger = ledger
        self._handles = itertools.count(1) if handles is None else handles
        self._live: dict[int, Allocation] = {}
        self._cached: dict[int, list[DeviceBlock]] = {}  # by lease, each list ordered by size

    def allocate(self, account: Account, nbytes: int) -> Allocation:
        """Memory for ``account``, from a kept block if one is large enough: ``committed`` is then that whole block.

        Raises `InvalidValue` for a size that is none, `OutOfCapacity`, `OsFailure`.
        """
        require_size("bytes of device memory", nbytes)
        block = self._take_cached(account, nbytes)
        if block is None:
            block = create_block(self._driver, self._device, self._ledger, account, nbytes)
        allocation = Allocation(next(self._handles), account, nbytes, block)
        self._live[allocation.handle] = allocation
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Keep its block for reuse. Raises `UnknownHandle` if it is not in use: freed before, or another pool's."""
        if self._live.get(allocation.handle) != allocation:
            raise UnknownHandle(f"allocation {allocation.handle} is not in use", handle=allocation.handle)
        account, block = allocation.account, allocation.block
        cached = _cached_account(account.tier, account.lease)
        self._ledger.transfer(account, cached, 0, block.nbytes, requested_before=allocation.requested)
        insort(self._cached.setdefault(account.lease, []), block, key=_size)
        del self._live[allocation.handle]

    def trim(self, keep_bytes: int = 0, lease: int | None = None) -> int:
        """Give kept blocks back to the driver, largest first, until at most ``keep_bytes`` are kept.

        Of ``lease`` only, or, if that is None, of every lease in turn. Returns the bytes given back.
        """
        require_size("bytes to keep", keep_bytes, least=0)
        leases = list(self._cached) if lease is None else [lease] if lease in self._cached else []
        kept = sum(block.nbytes for each in leases for block in self._cached[each])
        given_back = 0
        for each in leases:
            blocks = self._cached[each]
            while blocks and kept - given_back > keep_bytes:
                account = _cached_account(vram_tier(self._device), each)
                release_block(self._driver, self._ledger, account, 0, blocks[-1])
                given_back += blocks.pop().nbytes
            if not blocks:
                del self._cached[each]
        return given_back

    def allocations(self) -> list[Allocation]:
        """All that is in use, oldest first."""
        return list(self._live.values())

    def held_bytes(self) -> int:
        """What the driver says that the pool's blocks take, in use and kept: the ledger's auditor."""
        kept = itertools.chain.from_iterable(self._cached.values())
        used = (allocation.block for allocation in self._live.values())
        return sum(self._driver.held_bytes(block) for block in itertools.chain(used, kept))

    def _take_cached(self, account: Account, nbytes: int) -> DeviceBlock | None:
        blocks = self._cached.get(account.lease, [])
        at = bisect_left(blocks, nbytes, key=_size)
        if at == len(blocks):
            return None
        cached = _cached_account(account.tier, account.lease)
        self._ledger.transfer(cached, account, nbytes, blocks[at].nbytes, requested_before=0)
        return blocks.pop(at)


def _size(block: DeviceBlock) -> int:
    return block.nbytes


def _cached_account(tier: str, lease: int) -> Account:
    return Account(tier, lease, 0, CACHED)
