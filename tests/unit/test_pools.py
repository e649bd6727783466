"""What the pools commit: the exact pool its size and no more, whatever came before; the best-fit pool whole blocks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.alloc.allocation import Allocation
from kvd.alloc.best_fit_pool import BestFitPool
from kvd.alloc.exact_pool import ExactPool
from kvd.alloc.ledger import Account, Balance, Ledger
from kvd.tiers.driver import DeviceBlock, DeviceInfo, vram_tier
from kvd.tiers.driver_cpu import GRANULARITY, CpuDriver
from protocol.errors import InvalidValue, LedgerMismatch, OsFailure, OutOfCapacity, UnknownHandle

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4
HOT_CACHE = 41 * MIB // 2
"""32,768 rows of 656 bytes, 20.5 MiB: the size of the first report's out-of-memory."""

DEVICE = "cpu"
TIER = vram_tier(DEVICE)
TEMPORARY = Account(TIER, 1, 0, "temporary")
LASTING = Account(TIER, 1, 1, "hot_cache")


class CountingDriver:
    """A device that has no memory, so that tests can allocate terabytes; it counts, and can be made to fail."""

    def __init__(self, capacity: int = 16 * TIB) -> None:
        self.capacity = capacity
        self.blocks: dict[int, int] = {}
        self.created: list[int] = []
        self.extra = 0
        self.refuse_release = False
        self._handles = itertools.count(1)

    def devices(self) -> list[DeviceInfo]:
        return [DeviceInfo(DEVICE, "counted", self.capacity)]

    def granularity(self, device: str) -> int:
        return GRANULARITY

    def create(self, device: str, nbytes: int) -> DeviceBlock:
        size = -(-nbytes // GRANULARITY) * GRANULARITY + self.extra
        free = self.capacity - sum(self.blocks.values())
        if size > free:
            raise OutOfCapacity(vram_tier(device), size, free, self.capacity)
        block = DeviceBlock(-1, size, device, next(self._handles))
        self.blocks[block.handle] = size
        self.created.append(size)
        return block

    def adopt(self, device: str, fd: int, nbytes: int) -> DeviceBlock:
        raise AssertionError("not called")

    def release(self, block: DeviceBlock) -> None:
        if self.refuse_release:
            raise OsFailure("refused")
        del self.blocks[block.handle]

    def held_bytes(self, block: DeviceBlock) -> int:
        return self.blocks[block.handle]

    def own_bytes(self, device: str) -> int:
        return 0

    def bytes_in_use(self, device: str) -> int:
        return sum(self.blocks.values())


class Rig:
    """Both pools on one driver and one ledger, which audits them."""

    def __init__(self, capacity: int = 16 * TIB, driver: CpuDriver | CountingDriver | None = None) -> None:
        self.driver = driver or CountingDriver()
        self.ledger = Ledger()
        self.ledger.add_tier(TIER, capacity)
        handles = itertools.count(1)
        self.exact = ExactPool(self.driver, DEVICE, self.ledger, handles)
        self.best_fit = BestFitPool(self.driver, DEVICE, self.ledger, handles)
        self.ledger.add_auditor(TIER, self.exact.held_bytes)
        self.ledger.add_auditor(TIER, self.best_fit.held_bytes)

    def check(self) -> None:
        self.ledger.check()
        assert self.ledger.total(TIER).committed == self.driver.bytes_in_use(DEVICE)

    def seed(self, sizes: list[int]) -> None:
        """Leave freed blocks of these sizes in the best-fit pool."""
        for allocation in [self.best_fit.allocate(TEMPORARY, size) for size in sizes]:
            self.best_fit.free(allocation)

    def close(self) -> None:
        for pool in (self.exact, self.best_fit):
            for allocation in pool.allocations():
                pool.free(allocation)
        self.best_fit.trim()
        self.check()
        assert self.ledger.total(TIER).committed == 0


def test_case_17_a_freed_large_block_is_not_given_to_a_small_request() -> None:
    rig = Rig(driver=CpuDriver(600 * MIB))
    rig.exact.free(rig.exact.allocate(TEMPORARY, 512 * MIB))
    rig.seed([512 * MIB])
    allocation = rig.exact.allocate(LASTING, HOT_CACHE)
    assert allocation.requested == HOT_CACHE
    assert allocation.committed == 22 * MIB
    assert rig.ledger.purposes(TIER)["hot_cache"].committed == 22 * MIB
    rig.check()
    rig.close()


def test_the_best_fit_pool_gives_the_same_request_the_whole_block_and_the_books_say_so() -> None:
    """Why a lasting buffer must not come from it: this is the accounting that the first report lacked."""
    rig = Rig()
    rig.seed([512 * MIB])
    allocation = rig.best_fit.allocate(LASTING, HOT_CACHE)
    assert allocation.requested == HOT_CACHE
    assert allocation.committed == 512 * MIB
    assert rig.ledger.purposes(TIER)["hot_cache"] == Balance(HOT_CACHE, 512 * MIB, 0, HOT_CACHE, 512 * MIB)
    rig.check()
    rig.close()


lasting_sizes = st.one_of(
    st.just(HOT_CACHE),
    st.integers(16 * KIB, 96 * KIB),  # tables
    st.integers(1, 64).map(lambda pages: pages * 3_530_752),  # rings
    st.integers(1, 4 * GIB),
)
seeds = st.lists(
    st.one_of(st.sampled_from([512 * MIB, 4 * GIB, 2 * MIB, 1]), st.integers(1, 8 * GIB)), min_size=1, max_size=12
)


@given(seeds, st.lists(lasting_sizes, min_size=1, max_size=40), st.data())
def test_lasting_buffers_commit_their_size_rounded_up_whatever_was_freed_before(
    seeded: list[int], sizes: list[int], data: st.DataObject
) -> None:
    rig = Rig()
    rig.seed(seeded)
    kept = rig.ledger.total(TIER).committed
    allocations: list[Allocation] = []
    for size in sizes:
        allocations.append(rig.exact.allocate(LASTING, size))
        assert size <= allocations[-1].committed < size + GRANULARITY
        if data.draw(st.booleans()):
            rig.exact.free(allocations.pop(data.draw(st.integers(0, len(allocations) - 1))))
        rig.check()
    given_out = sum(-(-allocation.requested // GRANULARITY) * GRANULARITY for allocation in allocations)
    assert rig.ledger.total(TIER).committed == kept + given_out
    rig.close()


def test_fifteen_sessions_after_a_prefill_fit_where_their_sum_fits() -> None:
    """Fifteen sessions of 78 hot caches, beside kept temporaries of a prefill, commit 22 MiB per cache."""
    rig = Rig()
    rig.seed([512 * MIB, 4 * GIB, 1 * GIB, 96 * MIB] * 4)
    kept = rig.ledger.total(TIER).committed
    rig.ledger.resize_tier(TIER, kept + 15 * 78 * 22 * MIB)
    for session in range(1, 16):
        for _ in range(78):
            rig.exact.allocate(Account(TIER, 1, session, "hot_cache"), HOT_CACHE)
    assert rig.ledger.free(TIER) == 0
    with pytest.raises(OutOfCapacity):
        rig.exact.allocate(LASTING, 1)
    rig.check()
    rig.close()


@given(st.lists(st.integers(1, 64), min_size=1, max_size=10), st.integers(1, 64))
def test_best_fit_takes_the_smallest_block_that_is_large_enough(kept: list[int], asked: int) -> None:
    driver = CountingDriver()
    rig = Rig(driver=driver)
    rig.seed([size * GRANULARITY for size in kept])
    created = len(driver.created)
    allocation = rig.best_fit.allocate(TEMPORARY, asked * GRANULARITY)
    fitting = [size for size in kept if size >= asked]
    assert allocation.committed == min(fitting, default=asked) * GRANULARITY
    assert len(driver.created) == created + (not fitting)
    rig.check()
    rig.close()


def test_a_kept_block_serves_its_own_lease_only() -> None:
    rig = Rig()
    rig.seed([64 * MIB])
    other = rig.best_fit.allocate(Account(TIER, 2, 0, "temporary"), 64 * MIB)
    assert rig.driver.bytes_in_use(DEVICE) == 128 * MIB
    again = rig.best_fit.allocate(TEMPORARY, 64 * MIB)
    assert again.block != other.block
    assert rig.driver.bytes_in_use(DEVICE) == 128 * MIB
    rig.close()


def test_trim_gives_back_the_largest_first_down_to_what_may_be_kept() -> None:
    rig = Rig()
    rig.seed([2 * MIB, 8 * MIB, 4 * MIB])
    rig.best_fit.free(rig.best_fit.allocate(Account(TIER, 2, 0, "temporary"), 16 * MIB))
    assert rig.best_fit.trim(keep_bytes=6 * MIB, lease=1) == 8 * MIB
    assert rig.ledger.purposes(TIER)["cached"].committed == 22 * MIB
    rig.check()
    assert rig.best_fit.trim(lease=2) == 16 * MIB
    assert rig.best_fit.trim(lease=3) == 0
    assert rig.best_fit.trim() == 6 * MIB
    assert rig.best_fit.trim() == 0
    rig.close()


def test_kept_blocks_of_a_quarantined_lease_stay_marked() -> None:
    rig = Rig()
    allocation = rig.best_fit.allocate(TEMPORARY, 64 * MIB)
    rig.ledger.quarantine(1)
    rig.best_fit.free(allocation)
    assert [entry.quarantined for entry in rig.ledger.entries()] == [True]
    rig.close()


@pytest.mark.parametrize("kind", ["exact", "best_fit"])
class TestBothPools:
    @pytest.mark.parametrize("size", [0, -1, 2**60 + 1, 2**63, 1.0, True])
    def test_a_size_that_is_none_is_refused(self, kind: str, size: int) -> None:
        rig = Rig()
        with pytest.raises(InvalidValue, match="bytes of device memory"):
            getattr(rig, kind).allocate(LASTING, size)
        rig.close()

    def test_freeing_twice_is_an_error_and_changes_nothing(self, kind: str) -> None:
        rig = Rig()
        pool = getattr(rig, kind)
        first, second = pool.allocate(LASTING, MIB), pool.allocate(LASTING, MIB)
        pool.free(first)
        with pytest.raises(UnknownHandle, match=f"allocation {first.handle} is not in use"):
            pool.free(first)
        assert pool.allocations() == [second]
        rig.check()
        rig.close()

    def test_another_pools_allocation_is_refused(self, kind: str) -> None:
        rig = Rig()
        other = (rig.best_fit if kind == "exact" else rig.exact).allocate(LASTING, MIB)
        stranger = Rig()
        theirs = getattr(stranger, kind).allocate(TEMPORARY, MIB)
        pool = getattr(rig, kind)
        pool.allocate(LASTING, MIB)
        for allocation in (other, theirs):
            with pytest.raises(UnknownHandle):
                pool.free(allocation)
        rig.close()
        stranger.close()

    def test_an_account_of_another_tier_is_refused(self, kind: str) -> None:
        rig = Rig()
        rig.ledger.add_tier("host", GIB)
        with pytest.raises(InvalidValue, match="tier"):
            getattr(rig, kind).allocate(Account("host", 1, 1, "ring"), MIB)
        rig.close()

    def test_out_of_capacity_leaves_nothing_reserved(self, kind: str) -> None:
        rig = Rig(capacity=64 * MIB)
        pool = getattr(rig, kind)
        pool.allocate(LASTING, 60 * MIB)
        with pytest.raises(OutOfCapacity) as caught:
            pool.allocate(LASTING, 5 * MIB)
        assert (caught.value.facts["asked"], caught.value.facts["free"]) == (6 * MIB, 4 * MIB)
        assert caught.value.facts["holders"] == [f"lease 1 session 1 hot_cache: {60 * MIB} bytes"]
        pool.allocate(LASTING, 4 * MIB)
        rig.check()
        rig.close()

    def test_a_driver_that_has_less_than_the_limit_leaves_nothing_reserved(self, kind: str) -> None:
        rig = Rig(driver=CountingDriver(10 * MIB))
        with pytest.raises(OutOfCapacity):
            getattr(rig, kind).allocate(LASTING, 11 * MIB)
        assert rig.ledger.free(TIER) == 16 * TIB
        rig.close()

    def test_a_driver_that_gives_more_than_its_granularity_explains_is_found_out(self, kind: str) -> None:
        driver = CountingDriver()
        rig = Rig(driver=driver)
        driver.extra = GRANULARITY
        with pytest.raises(LedgerMismatch, match="committed 4194304 is not between requested 1 and reserved 2097152"):
            getattr(rig, kind).allocate(LASTING, 1)
        assert driver.blocks == {}
        rig.close()


def test_a_block_that_the_driver_does_not_take_back_stays_in_the_books() -> None:
    driver = CountingDriver()
    rig = Rig(driver=driver)
    allocation = rig.exact.allocate(LASTING, MIB)
    rig.seed([MIB])
    driver.refuse_release = True
    for call in (lambda: rig.exact.free(allocation), rig.best_fit.trim):
        with pytest.raises(OsFailure):
            call()
        rig.check()
    assert rig.ledger.total(TIER).committed == 4 * MIB
    driver.refuse_release = False
    rig.close()
