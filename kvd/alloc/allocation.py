"""An allocation of device memory, and the steps by which every pool makes and unmakes the block behind it."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.alloc.ledger import Account, Ledger
from kvd.tiers.driver import DeviceBlock, DeviceDriver, vram_tier
from protocol.errors import InvalidValue
from protocol.layout import round_up


@dataclass(frozen=True, slots=True)
class Allocation:
    """Device memory that an account holds: ``requested`` bytes at the start of a block that is all its own.

    ``handle`` is never given twice by one pool, nor by pools that share their numbering.
    """

    handle: int
    account: Account
    requested: int
    block: DeviceBlock

    @property
    def committed(self) -> int:
        """Bytes that the driver gave for it: the whole block."""
        return self.block.nbytes


def create_block(driver: DeviceDriver, device: str, ledger: Ledger, account: Account, nbytes: int) -> DeviceBlock:
    """Reserve, create, commit. Raises what `Ledger.reserve` and `DeviceDriver.create` raise; then nothing is held."""
    if account.tier != vram_tier(device):
        raise InvalidValue("tier of the account", account.tier, vram_tier(device))
    with ledger.reserve(account, nbytes, round_up(nbytes, driver.granularity(device))) as reservation:
        block = driver.create(device, nbytes)
        try:
            reservation.commit(block.nbytes)
        except BaseException:
            driver.release(block)
            raise
    return block


def adopt_block(
    driver: DeviceDriver, device: str, ledger: Ledger, account: Account, requested: int, fd: int, nbytes: int
) -> DeviceBlock:
    """Have a block of ``nbytes`` that is there already. Raises what `Ledger.reserve` and `DeviceDriver.adopt` raise."""
    with ledger.reserve(account, requested, nbytes) as reservation:
        block = driver.adopt(device, fd, nbytes)
        reservation.commit(block.nbytes)
    return block


def release_block(driver: DeviceDriver, ledger: Ledger, account: Account, requested: int, block: DeviceBlock) -> None:
    """Give a block back. If the driver refuses (`OsFailure`), the account goes on holding it."""
    driver.release(block)
    ledger.release(account, requested, block.nbytes)
