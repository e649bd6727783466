"""Any order of operations on the VRAM pools and on the host tier, against models that are plain dictionaries."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvd.alloc.allocation import Allocation
from kvd.alloc.ledger import Account, Ledger
from kvd.tiers.driver_cpu import GRANULARITY, CpuDriver
from kvd.tiers.extent import frame_extent
from kvd.tiers.host_ram import HostRam
from kvd.tiers.vram import Vram
from protocol.errors import OutOfCapacity, UnknownHandle

KIB, MIB = 1024, 1024**2
CAPACITY = 32 * MIB
TIER = "vram:cpu"

leases = st.integers(1, 3)
sessions = st.integers(1, 3)


class VramMachine(RuleBasedStateMachine):
    """The model: what is in use by handle, and, per lease, the sizes of temporaries that are kept."""

    allocations = Bundle("allocations")

    @initialize()
    def start(self) -> None:
        self.driver = CpuDriver(CAPACITY)
        self.ledger = Ledger()
        self.vram = Vram(self.driver, self.ledger, {"cpu": CAPACITY})
        self.live: dict[int, tuple[Allocation, bool]] = {}
        self.kept: dict[int, list[int]] = {}

    @property
    def committed(self) -> int:
        in_use = sum(allocation.committed for allocation, _ in self.live.values())
        return in_use + sum(sum(sizes) for sizes in self.kept.values())

    @rule(
        target=allocations,
        lease=leases,
        session=sessions,
        nbytes=st.one_of(st.integers(1, 6 * MIB), st.sampled_from([16 * KIB, 2 * MIB, 2 * MIB + 1, 24 * MIB])),
        temporary=st.booleans(),
    )
    def allocate(self, lease: int, session: int, nbytes: int, temporary: bool) -> object:
        whole = -(-nbytes // GRANULARITY) * GRANULARITY
        fitting = [size for size in self.kept.get(lease, []) if size >= nbytes] if temporary else []
        in_use = sum(allocation.committed for allocation, _ in self.live.values())
        account = Account(TIER, lease, session, "temporary" if temporary else "ring")
        if not fitting and in_use + whole > CAPACITY:
            with pytest.raises(OutOfCapacity):
                self.vram.allocate(account, nbytes, temporary=temporary)
            self.kept.clear()
            return multiple()
        if not fitting and self.committed + whole > CAPACITY:
            self.kept.clear()
        allocation = self.vram.allocate(account, nbytes, temporary=temporary)
        if fitting:
            self.kept[lease].remove(min(fitting))
        assert allocation.committed == min(fitting, default=whole)
        assert (allocation.requested, allocation.account) == (nbytes, account)
        assert allocation.handle not in self.live
        self.live[allocation.handle] = allocation, temporary
        return allocation

    @rule(allocation=consumes(allocations))
    def free(self, allocation: Allocation) -> None:
        if allocation.handle not in self.live:
            with pytest.raises(UnknownHandle):
                self.vram.free(allocation.handle)
            return
        self.vram.free(allocation.handle)
        _, temporary = self.live.pop(allocation.handle)
        if temporary:
            self.kept.setdefault(allocation.account.lease, []).append(allocation.committed)
        with pytest.raises(UnknownHandle):
            self.vram.free(allocation.handle)

    @rule(lease=leases)
    def lease_dies(self, lease: int) -> None:
        self.ledger.quarantine(lease)
        self.vram.free_lease(lease)
        self.kept.pop(lease, None)
        self.live = {handle: each for handle, each in self.live.items() if each[0].account.lease != lease}
        assert not any(entry.account.lease == lease for entry in self.ledger.entries())

    @rule()
    def trim(self) -> None:
        assert self.vram.trim() == sum(sum(sizes) for sizes in self.kept.values())
        self.kept.clear()

    @invariant()
    def books_agree(self) -> None:
        self.ledger.check()
        total = self.ledger.total(TIER)
        assert total.committed == self.committed == self.driver.bytes_in_use("cpu")
        assert total.requested == sum(allocation.requested for allocation, _ in self.live.values())
        assert total.reserved == 0
        assert {allocation.handle for allocation in self.vram.allocations()} == self.live.keys()

    def teardown(self) -> None:
        self.vram.close()
        assert self.driver.bytes_in_use("cpu") == 0


EXTENTS = 4
EXTENT = 2 * MIB
STRIDES = (256 * KIB, 700 * KIB, 2 * MIB)


class HostMachine(RuleBasedStateMachine):
    """The model: who holds each frame. Every frame in use is stamped with its owner through a descriptor."""

    batches = Bundle("batches")

    @initialize()
    def start(self) -> None:
        self.ledger = Ledger()
        self.host = HostRam(
            self.ledger,
            capacity_bytes=EXTENTS * EXTENT,
            extent_bytes=EXTENT,
            prefix=f"/kvd-stateful-{os.getpid():x}",
        )
        self.frames: dict[int, tuple[Account, int, int]] = {}  # frame: account, uid, stride
        self.grants: dict[int, set[int]] = {}  # extent: leases
        self.last_uid: dict[int, int] = {}  # extent: whose bytes it may have

    def extents_of(self, uid: int, stride: int) -> int:
        """How many frames the uid could have, by the rules alone."""
        per_extent = EXTENT // stride
        available = 0
        for extent in range(EXTENTS):
            used = [held for frame, held in self.frames.items() if frame_extent(frame) == extent]
            if used:
                available += (per_extent - len(used)) if used[0][1:] == (uid, stride) else 0
            elif not self.grants.get(extent) or self.last_uid.get(extent) == uid:
                available += per_extent
        return available

    @rule(
        target=batches,
        session=sessions,
        uid=st.integers(1000, 1002),
        stride=st.sampled_from(STRIDES),
        count=st.integers(1, 12),
    )
    def allocate(self, session: int, uid: int, stride: int, count: int) -> object:
        account = Account("host", 0, session, "pages")
        available = self.extents_of(uid, stride)
        if count > available:
            with pytest.raises(OutOfCapacity) as caught:
                self.host.allocate_frames(account, uid, stride, count, stride - 1)
            assert caught.value.facts["free"] == available * stride
            return multiple()
        frames = self.host.allocate_frames(account, uid, stride, count, stride - 1)
        assert len(set(frames)) == count
        assert not self.frames.keys() & set(frames)
        for frame in frames:
            old = self.swap(frame, uid)
            assert old in (0, uid), f"uid {uid} was given bytes of uid {old}"
            self.frames[frame] = account, uid, stride
            self.last_uid[frame_extent(frame)] = uid
        return tuple(frames)

    def swap(self, frame: int, uid: int) -> int:
        """Stamp the frame with a uid; returns the one that it was stamped with."""
        fd = self.host.open_fd(frame_extent(frame), read_only=False)
        try:
            at = self.host.offset(frame)
            old = int.from_bytes(os.pread(fd, 8, at), "little")
            os.pwrite(fd, uid.to_bytes(8, "little"), at)
        finally:
            os.close(fd)
        return old

    @rule(batch=consumes(batches))
    def free(self, batch: tuple[int, ...]) -> None:
        self.host.free_frames(batch)
        for frame in batch:
            del self.frames[frame]
        with pytest.raises(UnknownHandle):
            self.host.free_frames(batch[:1])

    @rule(batch=batches, session=sessions)
    def move(self, batch: tuple[int, ...], session: int) -> None:
        account = Account("host", 0, session, "pages")
        self.host.move_frames(batch, account)
        for frame in batch:
            self.frames[frame] = account, *self.frames[frame][1:]

    @rule(batch=batches, lease=leases)
    def grant(self, batch: tuple[int, ...], lease: int) -> None:
        for extent in {frame_extent(frame) for frame in batch}:
            self.host.granted(extent, lease)
            self.grants.setdefault(extent, set()).add(lease)

    @rule(lease=leases)
    def lease_gone(self, lease: int) -> None:
        self.host.lease_gone(lease)
        for held in self.grants.values():
            held.discard(lease)

    @rule(most=st.integers(0, EXTENTS))
    def renew(self, most: int) -> None:
        used = {frame_extent(frame) for frame in self.frames}
        old = [extent for extent in sorted(self.last_uid) if extent not in used and not self.grants.get(extent)]
        assert self.host.renew(most) == min(most, len(old))
        for extent in old[:most]:
            del self.last_uid[extent]

    @invariant()
    def books_agree(self) -> None:
        self.ledger.check()
        by_account: dict[Account, int] = {}
        for account, _, stride in self.frames.values():
            by_account[account] = by_account.get(account, 0) + stride
        entries = {entry.account: entry.balance for entry in self.ledger.entries("host")}
        unassigned = entries.pop(Account("host", 0, 0, "unassigned"), None)
        assert {account: balance.committed for account, balance in entries.items()} == by_account
        assert (unassigned.committed if unassigned else 0) == EXTENTS * EXTENT - sum(by_account.values())
        assert self.ledger.total("host").requested == sum(stride - 1 for _, _, stride in self.frames.values())
        assert self.host.damaged_extents() == []

    @invariant()
    def an_extent_has_one_uid_and_one_stride(self) -> None:
        kinds: dict[int, set[tuple[int, int]]] = {}
        for frame, (_, uid, stride) in self.frames.items():
            kinds.setdefault(frame_extent(frame), set()).add((uid, stride))
        assert all(len(kind) == 1 for kind in kinds.values())

    def teardown(self) -> None:
        self.host.close()
        self.ledger.check()


TestVram = VramMachine.TestCase
TestVram.settings = settings(max_examples=40, stateful_step_count=40)
TestHostRam = HostMachine.TestCase
TestHostRam.settings = TestVram.settings
