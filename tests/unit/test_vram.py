"""The VRAM tier on the memfd device, and that device itself."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator

import pytest

from kvd.alloc.ledger import Account, Ledger
from kvd.tiers.driver_cpu import GRANULARITY, CpuDriver
from kvd.tiers.vram import Vram
from protocol.errors import InvalidValue, NoDevice, OsFailure, OutOfCapacity, UnknownHandle

MIB = 1024**2
TIER = "vram:cpu"


def account(lease: int = 1, session: int = 1, purpose: str = "ring", tier: str = TIER) -> Account:
    return Account(tier, lease, session, purpose)


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = Ledger()
    yield ledger
    ledger.check()


@pytest.fixture
def driver() -> CpuDriver:
    return CpuDriver(64 * MIB)


@pytest.fixture
def vram(driver: CpuDriver, ledger: Ledger) -> Iterator[Vram]:
    vram = Vram(driver, ledger, {"cpu": 32 * MIB})
    yield vram
    ledger.check()
    assert ledger.total(TIER).committed == driver.bytes_in_use("cpu")
    vram.close()
    assert driver.bytes_in_use("cpu") == 0
    assert ledger.tiers() == []


def test_lasting_and_temporary_memory(vram: Vram, ledger: Ledger) -> None:
    ring = vram.allocate(account(), 5 * MIB, temporary=False)
    scratch = vram.allocate(account(purpose="temporary"), 5 * MIB, temporary=True)
    assert ring.handle != scratch.handle
    assert ledger.total(TIER).committed == 12 * MIB
    assert vram.allocations() == vram.allocations(lease=1) == [ring, scratch]
    assert vram.allocation(ring.handle) is ring
    assert os.fstat(vram.fd(ring.handle)).st_size == 6 * MIB
    vram.free(ring.handle)
    vram.free(scratch.handle)
    for call in (vram.free, vram.fd, vram.allocation):
        with pytest.raises(UnknownHandle):
            call(ring.handle)
    assert {p: b.committed for p, b in ledger.purposes(TIER).items()} == {"ring": 0, "temporary": 0, "cached": 6 * MIB}
    assert vram.trim() == 6 * MIB


def test_kept_temporaries_give_way_to_what_lasts(vram: Vram, ledger: Ledger) -> None:
    vram.free(vram.allocate(account(lease=2), 20 * MIB, temporary=True).handle)
    assert ledger.free(TIER) == 12 * MIB
    vram.allocate(account(), 32 * MIB, temporary=False)
    with pytest.raises(OutOfCapacity, match="held by lease 1 session 1 ring: 33554432 bytes"):
        vram.allocate(account(), 1, temporary=True)


def test_a_dead_lease_leaves_nothing(vram: Vram, ledger: Ledger) -> None:
    kept = vram.allocate(account(lease=2), 2 * MIB, temporary=False)
    for _ in range(20):
        vram.allocate(account(), 4 * MIB, temporary=False)
        vram.allocate(account(), 2 * MIB, temporary=True)
        vram.free(vram.allocate(account(), 6 * MIB, temporary=True).handle)
        assert ledger.quarantine(1) == 12 * MIB
        vram.free_lease(1)
        ledger.check()
        assert [(entry.account, entry.balance.committed) for entry in ledger.entries()] == [(kept.account, 2 * MIB)]


def test_devices_and_limits_are_checked_before_anything_is_added(driver: CpuDriver, ledger: Ledger) -> None:
    with pytest.raises(NoDevice, match="no device 'GPU-1'; there is cpu"):
        Vram(driver, ledger, {"cpu": MIB, "GPU-1": MIB})
    for capacity in (0, 64 * MIB + 1):
        with pytest.raises(InvalidValue, match="capacity of vram:cpu"):
            Vram(driver, ledger, {"cpu": capacity})
    assert ledger.tiers() == []


def test_a_tier_that_is_no_device_is_refused(vram: Vram) -> None:
    with pytest.raises(InvalidValue, match="device memory tier is 'host'; allowed: one of vram:cpu"):
        vram.allocate(account(tier="host"), 1, temporary=False)


def test_the_driver_is_asked_what_is_in_use(vram: Vram) -> None:
    vram.allocate(account(), 1, temporary=False)
    assert vram.bytes_in_use() == {"cpu": GRANULARITY}


def test_a_memfd_block_is_zero_sealed_and_not_inherited(driver: CpuDriver) -> None:
    block = driver.create("cpu", 3 * MIB)
    assert block.nbytes == 4 * MIB == os.fstat(block.fd).st_blocks * 512
    assert not os.get_inheritable(block.fd)
    with mmap.mmap(block.fd, block.nbytes) as view:
        assert view[:] == bytes(block.nbytes)
        view[:4] = b"kvd!"
    for size in (0, 8 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(block.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(block.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    driver.release(block)
    again = driver.create("cpu", 3 * MIB)
    assert os.pread(again.fd, 4, 0) == bytes(4)
    driver.release(again)
    with pytest.raises(OsFailure):
        driver.release(again)


def test_a_worker_that_punches_a_block_out_does_not_upset_the_books(vram: Vram, ledger: Ledger) -> None:
    allocation = vram.allocate(account(), 4 * MIB, temporary=False)
    with mmap.mmap(vram.fd(allocation.handle), 4 * MIB) as view:
        view.madvise(mmap.MADV_REMOVE)
        ledger.check()
        view[::4096] = bytes(len(view) // 4096)


def test_the_memfd_device_has_limits(driver: CpuDriver) -> None:
    block = driver.create("cpu", 60 * MIB)
    with pytest.raises(OutOfCapacity) as caught:
        driver.create("cpu", 5 * MIB)
    assert (caught.value.facts["asked"], caught.value.facts["free"]) == (6 * MIB, 4 * MIB)
    for size in (0, -5, 2**61):
        with pytest.raises(InvalidValue):
            driver.create("cpu", size)
    for call in (driver.granularity, driver.bytes_in_use, lambda device: driver.create(device, 1)):
        with pytest.raises(NoDevice, match="'GPU-0'"):
            call("GPU-0")
    driver.release(block)


def test_descriptors_running_out_is_a_typed_error(driver: CpuDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(OsFailure, match="memfd of 2097152 bytes: Too many open files"):
        driver.create("cpu", 1)
    assert driver.bytes_in_use("cpu") == 0


def test_host_memory_running_out_is_out_of_capacity_and_leaves_nothing(
    driver: CpuDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OutOfCapacity, match="Cannot allocate memory"):
        driver.create("cpu", 1)
    assert driver.bytes_in_use("cpu") == 0
