"""Copies between memory and disk when the system refuses: call number n fails, for n = 1 until none is reached.

A failed save leaves the old file or the new one, whole. A failed restore leaves no session, no byte and no descriptor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import structlog

from kvd.saved.copies import Copies
from kvd.saved.jobs import Jobs, Step
from kvd.saved.spilling import Spilling
from kvd.sessions.session import Session
from kvd.tiers.disk import SAVED, SPILLED, StateDirectory, file_name
from protocol.errors import KvdError, SavedRefused
from tests.saved_files import read as read_file
from tests.session_world import SessionWorld, session_world

_T = TypeVar("_T")


def run(steps: Generator[Step, Any, _T]) -> _T:
    """Do the steps of a job one after the other, in this thread."""
    try:
        step = next(steps)
        while True:
            try:
                result = step()
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
        yield world, copies, Spilling(copies, world.sessions, log)
        jobs.close()
        copies.close()


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
            _, content, pages = read_file(data, copies._pool)
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
        assert not (tmp_path / "state" / file_name(os.getuid(), "s", SPILLED)).exists()


def test_a_spilled_file_of_a_session_in_memory_goes_at_start(tmp_path: Path) -> None:
    with copying(tmp_path / "state") as (world, copies, _):
        for name in ("live", "gone"):
            run(copies.write(filled(world, name, 64, name), SPILLED))
        world.close(world.session("gone"))
        Spilling(copies, world.sessions, structlog.get_logger())
        assert world.sessions.spilled == {(os.getuid(), "gone")}
        assert os.listdir(tmp_path / "state") == [file_name(os.getuid(), "gone", SPILLED)]
