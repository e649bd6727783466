"""Reading a session that another lease holds: read-only, of one's own uid, and as long as the viewer lives."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest

from compute.client import Client
from protocol.daemon_block import read_daemon_block
from protocol.errors import GrantRefused, SessionBusy, SessionDamaged, StaleGeneration, UnknownSession
from protocol.messages import SessionOpened
from protocol.session_state import unpack_frame
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.raw import FINGERPRINT
from tests.blackbox.worker_process import PAGE_BYTES, TOKEN_CAPACITY


@pytest.fixture
def holder(daemon: DaemonProcess) -> Iterator[Client]:
    with Client(daemon.run_dir, name="holder") as client:
        yield client


@pytest.fixture
def viewer(daemon: DaemonProcess) -> Iterator[Client]:
    with Client(daemon.run_dir, name="viewer") as client:
        yield client


def made(client: Client) -> SessionOpened:
    return client.create_session(
        "viewed",
        fingerprint=FINGERPRINT,
        encoding="q8g64",
        page_bytes=PAGE_BYTES,
        token_capacity=TOKEN_CAPACITY,
        commit_bytes=16,
    )


def held(client: Client) -> SessionOpened:
    created = made(client)
    client.extend_session(created.session, created.generation, 3)
    return created


def test_a_viewer_reads_what_the_holder_writes_and_writes_nothing(holder: Client, viewer: Client) -> None:
    created = held(holder)
    before = viewer.stat().sessions
    seen = viewer.view_session(created.session, created.generation)
    assert (seen.session, seen.generation, seen.page_count) == (created.session, 1, 3)
    everything = [seen.daemon_block, seen.worker_block, *(extent.memory for extent in seen.extents)]
    assert all(memory.read_only for memory in everything)
    writing = {extent.number: extent.memory for extent in holder.extend_session(created.session, 1, 1).extents}
    assert writing == {}, "the holder has the extent already"
    for memory in everything:
        fd = viewer.claim(memory)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, memory.nbytes)
        os.close(fd)
    assert viewer.stat().sessions[0].lease == before[0].lease, "who holds it has not changed"
    assert viewer.view_session(created.session, 1).extents == [], "an extent is sent once"


def test_the_pages_are_the_same_memory(holder: Client, viewer: Client, daemon: DaemonProcess) -> None:
    requested = {tier.tier: tier.requested for tier in daemon.stat().tiers}["host"]
    created = made(holder)
    extents = holder.extend_session(created.session, 1, 3).extents
    one_copy = {tier.tier: tier.requested for tier in daemon.stat().tiers}["host"]
    assert one_copy > requested
    seen = viewer.view_session(created.session, 1)
    assert {tier.tier: tier.requested for tier in daemon.stat().tiers}["host"] == one_copy
    table = viewer.claim(seen.daemon_block)
    header, frames = read_daemon_block(os.pread(table, seen.daemon_block.nbytes, 0))
    os.close(table)
    written = {extent.number: holder.claim(extent.memory) for extent in extents}
    read = {extent.number: viewer.claim(extent.memory) for extent in seen.extents}
    for page, frame in enumerate(frames):
        extent, index = unpack_frame(frame)
        os.pwrite(written[extent], bytes([page + 1]) * PAGE_BYTES, index * header.page_stride)
        assert os.pread(read[extent], PAGE_BYTES, index * header.page_stride) == bytes([page + 1]) * PAGE_BYTES
    for fd in (*written.values(), *read.values()):
        os.close(fd)


def test_what_may_not_be_viewed(holder: Client, viewer: Client) -> None:
    created = held(holder)
    earlier = viewer.view_session(created.session, 1)
    viewer.view_session(created.session, 1)
    with pytest.raises(GrantRefused):  # they would fill the daemon's memory otherwise
        viewer.claim(earlier.worker_block)
    with pytest.raises(UnknownSession):
        viewer.view_session(created.session + 1, 1)
    with pytest.raises(StaleGeneration):
        viewer.view_session(created.session, 2)
    seen = viewer.view_session(created.session, 1)
    holder.truncate_session(created.session, 1, 1)
    with pytest.raises(GrantRefused):
        viewer.claim(seen.worker_block)
    holder.detach_session(created.session, 2)
    with pytest.raises(SessionBusy, match="held by no lease"):
        viewer.view_session(created.session, 2)
    opened = holder.open_session("viewed", fingerprint=FINGERPRINT, encoding="q8g64")
    fd = holder.claim(opened.worker_block)
    os.ftruncate(fd, opened.worker_block.nbytes // 2)
    os.close(fd)
    with pytest.raises(SessionDamaged):
        viewer.view_session(opened.session, opened.generation)


def test_an_extent_stays_with_its_uid_while_a_viewer_lives(
    holder: Client, viewer: Client, daemon: DaemonProcess
) -> None:
    created = held(holder)
    viewer.view_session(created.session, 1)
    holder.close_session(created.session, 1)
    assert daemon.stat().ledger == "balanced"
    assert not daemon.stat().sessions
    again = held(holder)
    assert viewer.view_session(again.session, 1).extents == [], "it has the extent since before"
