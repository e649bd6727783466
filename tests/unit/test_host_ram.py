"""Frames of the host tier: what they commit, whose an extent is, what becomes of a damaged one."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd.alloc.ledger import Account, Ledger
from kvd.tiers import segment
from kvd.tiers.extent import frame_extent, frame_index
from kvd.tiers.host_ram import HostRam
from protocol.errors import InvalidValue, LedgerMismatch, OutOfCapacity, UnknownHandle

KIB, MIB = 1024, 1024**2
PREFIX = f"/kvd-test-{os.getpid():x}"
EXTENT = 2 * MIB
STRIDE = 256 * KIB
"""Eight frames to an extent."""

ALICE, BOB = 1000, 1001


def pages(session: int = 1, lease: int = 0) -> Account:
    return Account("host", lease, session, "pages")


def names() -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").glob(f"{PREFIX[1:]}*"))


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = Ledger()
    yield ledger
    ledger.check()
    assert ledger.tiers() == []
    assert names() == []


@pytest.fixture
def make(ledger: Ledger) -> Iterator[Callable[..., HostRam]]:
    made = []

    def make(extents: int = 4, **settings: object) -> HostRam:
        settings = {"capacity_bytes": extents * EXTENT, "extent_bytes": EXTENT, "prefix": PREFIX} | settings
        made.append(HostRam(ledger, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    if made:
        ledger.check()
        made[0].close()


def allocate(host: HostRam, count: int, uid: int = ALICE, session: int = 1, stride: int = STRIDE) -> list[int]:
    return host.allocate_frames(pages(session), uid, stride, count, stride - 100)


def write(host: HostRam, frame: int, data: bytes) -> None:
    fd = host.open_fd(frame_extent(frame), read_only=False)
    try:
        os.pwrite(fd, data, host.offset(frame))
    finally:
        os.close(fd)


def content(host: HostRam, extent: int) -> bytes:
    fd = host.open_fd(extent, read_only=True)
    try:
        return os.pread(fd, EXTENT, 0)
    finally:
        os.close(fd)


def damage(host: HostRam, extent: int, how: str) -> None:
    """What a process can do with the descriptor that it was given."""
    fd = host.open_fd(extent, read_only=False)
    try:
        if how == "cut":
            os.ftruncate(fd, 4096)
        elif how == "cut and grown again":
            os.ftruncate(fd, 0)
            os.ftruncate(fd, EXTENT)
        elif how == "grown":
            os.ftruncate(fd, 2 * EXTENT)
        else:
            with mmap.mmap(fd, EXTENT) as view:
                view.madvise(mmap.MADV_REMOVE, 4096, 4096)
    finally:
        os.close(fd)


def test_frames_are_counted_by_stride_and_by_what_was_asked(make: Callable[..., HostRam], ledger: Ledger) -> None:
    host = make()
    frames = allocate(host, 10)
    assert [(frame_extent(frame), frame_index(frame)) for frame in frames] == [
        *((0, index) for index in range(8)),
        (1, 0),
        (1, 1),
    ]
    assert [host.offset(frame) for frame in frames[6:9]] == [6 * STRIDE, 7 * STRIDE, 0]
    balances = ledger.purposes("host")
    assert (balances["pages"].requested, balances["pages"].committed) == (10 * (STRIDE - 100), 10 * STRIDE)
    assert (balances["unassigned"].requested, balances["unassigned"].committed) == (0, 4 * EXTENT - 10 * STRIDE)
    host.free_frames(frames)
    assert [(entry.account.purpose, entry.balance.committed) for entry in ledger.entries()] == [
        ("unassigned", 4 * EXTENT)
    ]


def test_a_stride_that_does_not_divide_the_extent_leaves_its_rest_unassigned(
    make: Callable[..., HostRam], ledger: Ledger
) -> None:
    host = make(1)
    frames = allocate(host, 2, stride=700 * KIB)
    assert ledger.purposes("host")["unassigned"].committed == EXTENT - 2 * 700 * KIB
    with pytest.raises(OutOfCapacity):
        allocate(host, 1, stride=700 * KIB)
    host.free_frames(frames)


def test_allocation_is_all_or_nothing(make: Callable[..., HostRam], ledger: Ledger) -> None:
    host = make()
    allocate(host, 3, session=5)
    before = list(ledger.entries())
    with pytest.raises(OutOfCapacity) as caught:
        allocate(host, 30)
    facts = caught.value.facts
    assert (facts["asked"], facts["free"], facts["capacity"]) == (30 * STRIDE, 29 * STRIDE, 4 * EXTENT)
    assert facts["holders"] == [f"kvd session 5 pages: {3 * STRIDE} bytes"]
    assert list(ledger.entries()) == before
    assert len(allocate(host, 29)) == 29


def test_an_extent_is_of_one_uid_and_one_stride(make: Callable[..., HostRam]) -> None:
    host = make()
    allocate(host, 1, ALICE)
    allocate(host, 1, ALICE, stride=128 * KIB)
    allocate(host, 1, BOB)
    frames = [*allocate(host, 7, ALICE), *allocate(host, 15, ALICE, stride=128 * KIB), *allocate(host, 7, BOB)]
    assert [{frame_extent(frame) for frame in part} for part in (frames[:7], frames[7:22], frames[22:])] == [
        {0},
        {1},
        {2},
    ]
    allocate(host, 1, BOB, stride=128 * KIB)
    with pytest.raises(OutOfCapacity):
        allocate(host, 9, BOB)


def test_the_fullest_extent_is_filled_first(make: Callable[..., HostRam]) -> None:
    host = make()
    frames = allocate(host, 24)
    host.free_frames([*frames[0:6], *frames[8:10], *frames[16:21]])
    assert [frame_extent(frame) for frame in allocate(host, 13)] == [1] * 2 + [2] * 5 + [0] * 6


def test_freeing_a_frame_that_is_not_in_use_frees_none(make: Callable[..., HostRam], ledger: Ledger) -> None:
    host = make()
    frames = allocate(host, 10)
    host.free_frames(frames[:1])
    before = list(ledger.entries())
    for bad in (frames[0], -1, 3 << 32, 99 << 32, (1 << 32) | 8, 1 << 70):
        with pytest.raises(UnknownHandle, match=f"frame {bad} .*is not in use"):
            host.free_frames([frames[5], bad])
        with pytest.raises(UnknownHandle):
            host.move_frames([frames[5], bad], pages(2))
        with pytest.raises(UnknownHandle):
            host.offset(bad)
    with pytest.raises(UnknownHandle):
        host.free_frames([frames[5], frames[6], frames[5]])
    assert list(ledger.entries()) == before
    host.free_frames(frames[1:])


def test_frames_change_hands_with_their_bytes(make: Callable[..., HostRam], ledger: Ledger) -> None:
    host = make()
    frames = allocate(host, 4, session=1)
    write(host, frames[1], b"kept")
    host.move_frames(frames[:2], pages(2))
    assert host.accounts(0) == {pages(1), pages(2)}
    held = {entry.account: entry.balance.committed for entry in ledger.entries()}
    assert (held[pages(1)], held[pages(2)]) == (2 * STRIDE, 2 * STRIDE)
    assert content(host, 0)[STRIDE : STRIDE + 4] == b"kept"
    host.free_frames(frames)


def test_another_uid_gets_an_extent_only_zeroed_and_as_a_new_segment(
    make: Callable[..., HostRam], ledger: Ledger
) -> None:
    host = make(1)
    frames = allocate(host, 8, ALICE)
    for frame in frames:
        write(host, frame, b"secret")
    old = host.open_fd(0, read_only=False)
    try:
        host.free_frames(frames)
        allocate(host, 1, BOB)
        assert content(host, 0) == bytes(EXTENT)
        os.pwrite(old, b"written to the old segment", 0)
        assert content(host, 0) == bytes(EXTENT)
        assert os.fstat(old).st_nlink == 0
    finally:
        os.close(old)
    ledger.check()


def test_the_same_uid_gets_its_own_extent_back_before_a_clean_one(make: Callable[..., HostRam]) -> None:
    host = make()
    frames = allocate(host, 9)
    write(host, frames[8], b"old")
    host.free_frames(frames)
    bobs = allocate(host, 1, BOB)
    assert frame_extent(bobs[0]) == 2
    assert {frame_extent(frame) for frame in allocate(host, 16)} == {0, 1}
    assert content(host, 1)[:3] == b"old"


def test_an_extent_that_a_living_lease_may_map_goes_to_the_same_uid_only(
    make: Callable[..., HostRam], ledger: Ledger
) -> None:
    host = make(2)
    frames = allocate(host, 16, ALICE)
    for extent, lease in ((0, 7), (0, 8), (1, 9)):
        host.granted(extent, lease)
    host.free_frames(frames)
    host.lease_gone(9)
    with pytest.raises(
        OutOfCapacity, match=re.escape("1 unassigned extents that leases [7, 8] may still map")
    ) as error:
        allocate(host, 9, BOB)
    assert error.value.facts["free"] == EXTENT
    again = allocate(host, 1, ALICE)
    assert frame_extent(again[0]) == 0
    host.free_frames(again)
    host.lease_gone(7)
    with pytest.raises(OutOfCapacity):
        allocate(host, 9, BOB)
    host.lease_gone(8)
    host.lease_gone(8)
    assert len(allocate(host, 16, BOB)) == 16
    assert content(host, 0) == content(host, 1) == bytes(EXTENT)


def test_only_an_extent_in_use_can_be_granted(make: Callable[..., HostRam]) -> None:
    host = make()
    for extent in (0, 4, -1):
        with pytest.raises(UnknownHandle):
            host.granted(extent, 1)
    allocate(host, 1)
    with pytest.raises(InvalidValue, match="lease"):
        host.granted(0, 0)


@pytest.mark.parametrize("how", ["cut", "cut and grown again", "grown", "punched"])
def test_case_25_an_extent_that_a_worker_cut_is_found_and_never_reused(
    make: Callable[..., HostRam], ledger: Ledger, how: str
) -> None:
    host = make(2)
    frames = allocate(host, 4, session=1)
    host.granted(0, 7)
    assert host.damaged_extents() == []
    damage(host, 0, how)
    ledger.check()
    assert host.damaged_extents() == [0]
    assert host.accounts(0) == {pages(1)}
    others = allocate(host, 4, session=2)
    assert {frame_extent(frame) for frame in others} == {1}
    host.free_frames(frames)
    with pytest.raises(OutOfCapacity, match=r"leases \[7\] may still map"):
        allocate(host, 5, session=2)
    host.lease_gone(7)
    again = allocate(host, 8, session=2)
    assert {frame_extent(frame) for frame in again} == {0, 1}
    assert host.damaged_extents() == []
    assert content(host, 0) == bytes(EXTENT)
    ledger.check()


def test_what_was_never_granted_is_audited(make: Callable[..., HostRam], ledger: Ledger) -> None:
    host = make()
    damage(host, 3, "punched")
    with pytest.raises(LedgerMismatch, match=f"{4 * EXTENT - 4096} really taken != committed {4 * EXTENT}"):
        ledger.check()
    assert host.renew(9) == 1
    ledger.check()


def test_extents_are_renewed_when_there_is_time(make: Callable[..., HostRam]) -> None:
    host = make()
    kept = allocate(host, 25)
    host.granted(1, 7)
    host.free_frames(kept[:24])
    assert host.renew(1) == 1
    assert host.renew(9) == 1
    assert host.renew(9) == 0
    host.lease_gone(7)
    assert host.renew(9) == 1
    assert all(content(host, extent) == bytes(EXTENT) for extent in range(3))
    inodes = [Path("/dev/shm", name).stat().st_ino for name in names()]
    allocate(host, 24, BOB)
    assert [Path("/dev/shm", name).stat().st_ino for name in names()] == inodes


def test_a_renewal_that_fails_gives_the_memory_up_and_is_tried_again(
    make: Callable[..., HostRam], ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make(2)
    host.free_frames(allocate(host, 16, ALICE))

    def refuse(nbytes: int) -> None:
        raise OutOfCapacity("shared memory mount", nbytes, 0, 5)

    with monkeypatch.context() as patch:
        patch.setattr(segment, "require_memory", refuse)
        with pytest.raises(OutOfCapacity, match="shared memory mount"):
            allocate(host, 1, BOB)
        ledger.check()
        assert ledger.total("host").committed == EXTENT
        assert host.damaged_extents() == []
        with pytest.raises(UnknownHandle, match="has no memory at present"):
            host.open_fd(0, read_only=True)
        assert len(allocate(host, 8, ALICE)) == 8
    assert len(allocate(host, 8, BOB)) == 8
    assert ledger.total("host").committed == 2 * EXTENT


def test_a_read_only_descriptor_cannot_be_written_and_none_is_inherited(make: Callable[..., HostRam]) -> None:
    host = make()
    fd = host.open_fd(0, read_only=True)
    try:
        assert not os.get_inheritable(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, EXTENT)
    finally:
        os.close(fd)
    with pytest.raises(UnknownHandle, match="extent 4 is not one of 4"):
        host.open_fd(4, read_only=True)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((ALICE, 0, 1, 1), "stride of frames is 0"),
        ((ALICE, 4095, 1, 1), "stride of frames"),
        ((ALICE, 6144, 1, 1), "stride of frames is 6144; allowed: a multiple of 4096"),
        ((ALICE, EXTENT + 4096, 1, 1), "stride of frames"),
        ((ALICE, 4096, 0, 1), "number of frames is 0"),
        ((ALICE, 4096, -1, 1), "number of frames"),
        ((ALICE, 4096, 1, 0), "payload of a frame is 0"),
        ((ALICE, 4096, 1, 4097), "payload of a frame is 4097"),
        ((-1, 4096, 1, 1), "uid is -1"),
    ],
)
def test_case_22_frames_of_no_size_are_refused(
    make: Callable[..., HostRam], ledger: Ledger, arguments: tuple[int, int, int, int], what: str
) -> None:
    host = make(1)
    with pytest.raises(InvalidValue, match=re.escape(what)):
        host.allocate_frames(pages(), *arguments)
    with pytest.raises(InvalidValue, match="tier of the account"):
        host.allocate_frames(Account("vram:cpu", 0, 1, "pages"), ALICE, STRIDE, 1, 1)
    assert ledger.purposes("host").keys() == {"unassigned"}
