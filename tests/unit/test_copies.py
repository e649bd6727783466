"""Copies between memory and disk when the system refuses: call number n fails, for n = 1 until none is reached.

A failed save leaves the old file or the new one, whole. A failed restore leaves no session, no byte and no descriptor.
"""

from __future__ import annotations

import os
import select
import struct
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import structlog

from kvd.saved.copies import Copies
from kvd.saved.jobs import Jobs, Step
from kvd.saved.lazy import LazyRestores
from kvd.saved.spilling import Spilling
from kvd.sessions import blocks as session_blocks
from kvd.sessions.session import Session
from kvd.tiers.disk import SAVED, SPILLED, Pin, StateDirectory, file_name
from protocol.errors import KvdError, OutOfCapacity, SavedRefused
from protocol.messages import Reply
from tests.saved_files import read as read_file
from tests.session_world import SessionWorld, session_world
from tests.trials import report_all

_T = TypeVar("_T")


def run(steps: Generator[Step, Any, _T]) -> _T:
    """Do the steps of a job one after the other, in this thread."""
    try:
        step = next(steps)
        while True:
            try:
                result = step.result() if isinstance(step, Future) else step()
            except Exception as error:  # noqa: BLE001 - a job hears of whatever its step ended on
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as end:
        value: _T = end.value
        return value


@contextmanager
def copying(path: Path) -> Iterator[tuple[SessionWorld, Copies, Spilling]]:
    with session_world() as world:
        jobs, log = Jobs(), structlog.get_logger()
        copies = Copies(StateDirectory(path, 1 << 24), world.sessions, world.host, jobs, log)
        lazy = LazyRestores(copies, world.sessions, jobs, log)
        yield world, copies, Spilling(copies, world.sessions, lazy, log)
        jobs.close()
        copies.close()


def settle(spilling: Spilling) -> None:
    """Wait until all pages have come that are to come from disk, and spilled files of whole sessions are gone."""
    lazy = spilling._lazy
    while not lazy.is_idle:
        assert select.select([lazy._jobs.wake], [], [], 30)[0]
        lazy._jobs.resume()
        lazy.forget_ended()


def filled(world: SessionWorld, name: str, rows: int, tag: str) -> Session:
    session = world.create(name, -(-rows // 64))
    for page in range(len(session.frames)):
        world.write_page(session, page, f"{tag} {page}".encode())
    world.acknowledge(session, list(range(rows)), rows, tag.encode())
    return session


def refusing(patch: pytest.MonkeyPatch, call: str, failing: int, *, persistent: bool) -> None:
    """Have the call of this number, or every one from it on, end with an error."""
    real, calls = getattr(os, call), 0

    def refuse(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing or (persistent and calls > failing):
            raise OSError(5, os.strerror(5))
        return real(*args, **options)

    patch.setattr(os, call, refuse)


def until_it_succeeds(
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    persistent: bool,
    attempt: Callable[[], object],
    check: Callable[[], None],
) -> None:
    """Run ``attempt`` with call n failing, then ``check``, for n = 1 until ``attempt`` succeeds."""
    for failing in range(1, 200):
        with monkeypatch.context() as patch:
            refusing(patch, call, failing, persistent=persistent)
            try:
                attempt()
            except KvdError:
                succeeded = False
            else:
                succeeded = True
        if succeeded:
            assert failing > 1, f"{call} is never called"
            report_all(f"failures of {call}", failing - 1, persistent=persistent)
            return
        check()
    raise AssertionError(f"{call} is called too often")


PERSISTENT = pytest.mark.parametrize("persistent", [False, True], ids=["once", "for ever"])


@PERSISTENT
@pytest.mark.parametrize("call", ["pwrite", "preadv", "pread", "fsync", "rename", "listdir"])
def test_a_save_that_fails_leaves_a_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, persistent: bool
) -> None:
    with copying(tmp_path / "state") as (world, copies, _):
        session = filled(world, "s", 300, "old")
        run(copies.write(session, SAVED))
        path = tmp_path / "state" / file_name(os.getuid(), "s")
        old = path.read_bytes()
        for page in range(len(session.frames)):
            world.write_page(session, page, f"new {page}".encode())
        before = [(str(entry.account), entry.balance) for entry in world.ledger.entries()]

        def check() -> None:
            data = path.read_bytes()
            _, content, pages = read_file(data, copies.pool)
            assert data == old or pages.startswith(b"new 0")
            assert len(content.tokens) == 1200
            assert (os.listdir(path.parent), session.busy) == ([path.name], "")
            assert [(str(entry.account), entry.balance) for entry in world.ledger.entries()] == before
            if data != old:  # the failure came after the name was given
                path.write_bytes(old)

        until_it_succeeds(monkeypatch, call, persistent, lambda: run(copies.write(session, SAVED)), check)
        assert path.read_bytes() != old


@PERSISTENT
@pytest.mark.parametrize("call", ["pwrite", "preadv", "ftruncate", "fstat"])
def test_a_restore_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, persistent: bool
) -> None:
    with copying(tmp_path / "state") as (world, copies, spilling):
        session = filled(world, "s", 300, "old")
        run(copies.write(session, SAVED))
        world.close(session)
        fds = len(os.listdir("/proc/self/fd"))
        before = [(str(entry.account), entry.balance.committed) for entry in world.ledger.entries()]

        def restore() -> None:
            uid = os.getuid()
            try:
                run(copies.read(uid, "s", SAVED, lambda _: None, spilling.prepare))
            except OSError as error:  # of a call that no daemon survives in a state to answer
                raise SavedRefused("s", str(error)) from error

        def check() -> None:
            assert len(world.sessions) == 0
            assert len(os.listdir("/proc/self/fd")) == fds
            assert [(str(entry.account), entry.balance.committed) for entry in world.ledger.entries()] == before

        until_it_succeeds(monkeypatch, call, persistent, restore, check)
        restored = world.session("s")
        assert [world.read_page(restored, page).rstrip(b"\0") for page in range(5)] == [
            b"old %d" % page for page in range(5)
        ]


def test_a_spill_that_fails_keeps_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with copying(tmp_path / "state") as (world, _, spilling):
        session = filled(world, "s", 300, "old")
        world.detach(session)

        def check() -> None:
            assert world.session("s") is session
            assert session.is_idle()

        until_it_succeeds(monkeypatch, "pwrite", False, lambda: run(spilling.spill(session)), check)
        assert not world.sessions.has(os.getuid(), "s")

        def still_spilled() -> None:
            assert (os.getuid(), "s") in world.sessions.spilled
            assert not world.sessions.has(os.getuid(), "s")

        until_it_succeeds(
            monkeypatch, "preadv", False, lambda: run(spilling.bring_back(os.getuid(), "s")), still_spilled
        )
        assert world.sessions.has(os.getuid(), "s")
        assert not world.sessions.spilled
        settle(spilling)
        assert not (tmp_path / "state" / file_name(os.getuid(), "s", SPILLED)).exists()


def test_a_spilled_file_of_a_session_in_memory_goes_at_start(tmp_path: Path) -> None:
    with copying(tmp_path / "state") as (world, copies, spilling):
        for name in ("live", "gone"):
            run(copies.write(filled(world, name, 64, name), SPILLED))
        world.close(world.session("gone"))
        Spilling(copies, world.sessions, spilling._lazy, structlog.get_logger())
        assert world.sessions.spilled == {(os.getuid(), "gone")}
        assert os.listdir(tmp_path / "state") == [file_name(os.getuid(), "gone", SPILLED)]


def test_a_session_that_is_spilled_again_keeps_its_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that it came back from is still being removed then, and the new one is all there is of the session."""
    may_go, remove = threading.Event(), StateDirectory.remove_pinned

    def removed_late(directory: StateDirectory, pin: Pin) -> None:
        may_go.wait()
        remove(directory, pin)

    monkeypatch.setattr(StateDirectory, "remove_pinned", removed_late)
    with copying(tmp_path / "state") as (world, _, spilling):
        session = filled(world, "s", 300, "old")
        world.detach(session)
        run(spilling.spill(session))
        run(spilling.bring_back(os.getuid(), "s"))
        world.write_page(world.session("s"), 0, b"new 0")
        run(spilling.spill(world.session("s")))
        may_go.set()
        settle(spilling)
        assert os.listdir(tmp_path / "state") == [file_name(os.getuid(), "s", SPILLED)]
        run(spilling.bring_back(os.getuid(), "s"))
        assert world.read_page(world.session("s"), 0).rstrip(b"\0") == b"new 0"
        settle(spilling)
        assert os.listdir(tmp_path / "state") == []


def test_a_spilled_file_that_cannot_be_removed_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with copying(tmp_path / "state") as (world, copies, spilling):
        world.detach(filled(world, "s", 300, "old"))
        run(spilling.spill(world.session("s")))
        with monkeypatch.context() as patch:
            refusing(patch, "unlink", 1, persistent=True)
            run(spilling.bring_back(os.getuid(), "s"))
            settle(spilling)
        assert world.session("s").is_idle()
        assert os.listdir(tmp_path / "state") == [file_name(os.getuid(), "s", SPILLED)]
        Spilling(copies, world.sessions, spilling._lazy, structlog.get_logger())
        assert os.listdir(tmp_path / "state") == []
        assert not world.sessions.spilled


def test_pages_of_a_spilled_session_come_after_it(tmp_path: Path) -> None:
    """Its file stays until the last of them is there, and it is not spilled anew before."""
    with copying(tmp_path / "state") as (world, _, spilling):
        session = filled(world, "s", 300, "old")
        world.detach(session)
        run(spilling.spill(session))
        run(spilling.bring_back(os.getuid(), "s", lazy=True))
        session = world.session("s")
        assert (session.absent, session.is_idle()) == (set(range(5)), False)
        assert os.listdir(tmp_path / "state") == [file_name(os.getuid(), "s", SPILLED)]
        settle(spilling)
        assert (session.absent, session.is_idle()) == (set(), True)
        assert [world.read_page(session, page).rstrip(b"\0") for page in range(5)] == [
            b"old %d" % page for page in range(5)
        ]
        assert os.listdir(tmp_path / "state") == []


def test_a_session_that_is_opened_does_not_make_room_for_itself(tmp_path: Path) -> None:
    with copying(tmp_path / "state") as (world, _, spilling):
        for name in ("first", "second"):
            filled(world, name, 64, name)
            world.detach(world.session(name))
        refusals = [OutOfCapacity("host", 1, 0, 1), OutOfCapacity("host", 1, 0, 1)]

        def act() -> Reply:
            raise refusals.pop(0)

        with pytest.raises(OutOfCapacity):
            run(spilling.opening(os.getuid(), "first", act, lazy=False))
        assert world.sessions.spilled == {(os.getuid(), "second")}
        assert not refusals


def test_a_death_amid_the_making_of_a_session_leaves_an_empty_one_or_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each write to its blocks, what is there is what a daemon that died now would leave."""
    tokens = struct.pack("<300i", *range(300))
    seen = []

    with copying(tmp_path / "state") as (world, copies, spilling):
        run(copies.write(filled(world, "s", 300, "old"), SAVED))
        world.close(world.session("s"))
        write = session_blocks._write

        def looked_at(fd: int, offset: int, data: bytes | memoryview) -> None:
            for session in world.sessions._preparing.values():
                state = session.blocks.worker_state()
                log = os.pread(session.blocks.worker_fd, 4 * state.tokens, session.blocks.log_offset)
                assert (state.tokens, state.commit.rows) == (0, 0) or log == tokens
                seen.append(state.tokens)
            write(fd, offset, data)

        monkeypatch.setattr(session_blocks, "_write", looked_at)
        run(copies.read(os.getuid(), "s", SAVED, lambda _: None, spilling.prepare))
        assert len(seen) > 3
        assert world.session("s").blocks.worker_state().tokens == 300
