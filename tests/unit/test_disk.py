"""The directory of saved files: names are data, files are whole, the limit holds, failures leave what was there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.tiers import disk
from kvd.tiers.disk import StateDirectory, file_name
from protocol.errors import DaemonRunning, InvalidValue, KvdError, OsFailure, OutOfCapacity, SavedRefused, UnknownSaved

NAME = file_name(1000, "notes")


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    directory = StateDirectory(tmp_path / "state", 10_000)
    yield directory
    assert not [left for left in os.listdir(directory.path) if left.startswith(".")]
    directory.close()


def put(state: StateDirectory, name: str, data: bytes) -> None:
    with state.replace(name, len(data)) as fd:
        os.write(fd, data)


def get(state: StateDirectory, name: str) -> bytes:
    fd = state.open(name)
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


def test_files_are_written_replaced_read_and_removed(state: StateDirectory) -> None:
    put(state, NAME, b"first")
    put(state, NAME, b"second")
    assert get(state, NAME) == b"second"
    assert [(entry.name, entry.nbytes) for entry in state.entries()] == [(NAME, 6)]
    assert (state.path / NAME).stat().st_mode & 0o777 == 0o600
    state.remove(NAME)
    assert state.entries() == []
    for verb in (state.open, state.remove):
        with pytest.raises(UnknownSaved):
            verb(NAME)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "/etc/passwd",
        "1-a/../../b.kvd",
        "1-a\0.kvd",
        f"1-{'a' * 252}.kvd",
        "1-a",
        "1-é.kvd",
        "1-a.kvd\n",
    ],
)
def test_names_that_are_none_lead_nowhere(state: StateDirectory, name: str) -> None:
    for verb in (state.open, state.remove, lambda name: put(state, name, b"x")):
        with pytest.raises(InvalidValue, match="name of a saved file"):
            verb(name)
    assert os.listdir(state.path.parent) == ["state"]


@pytest.mark.parametrize("session", [".", "..", "...", "-", "a" * 64])
def test_odd_names_of_sessions_are_names_of_files(state: StateDirectory, session: str) -> None:
    put(state, file_name(7, session), b"x")
    assert os.listdir(state.path) == [f"7-{session}.kvd"]
    assert disk.session_of_file(f"7-{session}.kvd") == (7, session, "kvd")


def test_what_is_no_file_of_ours_is_refused_and_stays(state: StateDirectory) -> None:
    outside = state.path.parent / "outside"
    outside.write_bytes(b"secret")
    plant = {
        "symlink": lambda path: path.symlink_to(outside),
        "dangling": lambda path: path.symlink_to("nowhere"),
        "fifo": os.mkfifo,
        "directory": Path.mkdir,
        "hardlink": lambda path: path.hardlink_to(outside),
    }
    for name, make in plant.items():
        make(state.path / file_name(0, name))
        with pytest.raises(SavedRefused):
            state.open(file_name(0, name))
    for name in plant:
        if name == "directory":
            with pytest.raises(OsFailure):
                put(state, file_name(0, name), b"new")
        else:
            put(state, file_name(0, name), b"new")
            assert get(state, file_name(0, name)) == b"new"
    assert outside.read_bytes() == b"secret"


def test_a_kernel_without_openat2_is_refused(state: StateDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    put(state, NAME, b"x")
    monkeypatch.setattr(disk, "_SYS_OPENAT2", 9999)
    with pytest.raises(OsFailure, match="Function not implemented"):
        state.open(NAME)


def test_the_least_recently_used_go_for_new_ones(state: StateDirectory) -> None:
    for index, name in enumerate("abcd"):
        put(state, file_name(0, name), bytes(2500))
        os.utime(state.path / file_name(0, name), (index, index))
    fd = state.open(file_name(0, "a"))
    state.touch(fd)
    os.close(fd)
    put(state, file_name(0, "e"), bytes(5000))
    assert {entry.name for entry in state.entries()} == {file_name(0, name) for name in "ade"}
    with pytest.raises(OutOfCapacity, match="disk: 10001 bytes asked, 10000 free of 10000"):
        put(state, file_name(0, "f"), bytes(10_001))
    assert len(state.entries()) == 3, "what cannot fit evicts nothing"
    with state.replace(file_name(0, "g"), 8000), pytest.raises(OutOfCapacity, match="2500 bytes asked, 2000 free"):
        put(state, file_name(0, "h"), bytes(2500))


def test_a_directory_has_one_daemon_and_nobody_else(state: StateDirectory, tmp_path: Path) -> None:
    with pytest.raises(DaemonRunning):
        StateDirectory(state.path, 1)
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(OsFailure, match="mode 0755; needed: owner"):
        StateDirectory(tmp_path / "open", 1)
    (tmp_path / "file").touch()
    with pytest.raises(OsFailure):
        StateDirectory(tmp_path / "file", 1)


def test_what_a_dead_daemon_was_writing_goes_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / ".saving-3").write_bytes(b"half")
    (tmp_path / "state" / "mine.txt").write_bytes(b"kept")
    StateDirectory(tmp_path / "state", 1).close()
    assert os.listdir(tmp_path / "state") == ["mine.txt"]


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "listdir", "stat"])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_nth_failure_leaves_the_old_file_or_the_new_one(
    state: StateDirectory, monkeypatch: pytest.MonkeyPatch, call: str, persistent: bool
) -> None:
    """Call number n fails, for n = 1 until none is reached any more."""
    real = getattr(os, call)
    for failing in range(1, 10):
        put(state, NAME, b"old")
        calls = 0

        def refuse(*args, failing=failing, **options):
            nonlocal calls
            calls += 1
            if calls == failing or (persistent and calls > failing):
                raise OSError(28, os.strerror(28))
            return real(*args, **options)

        failed = False
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse)
            try:
                put(state, NAME, b"new")
            except KvdError:
                failed = True
        assert get(state, NAME) == b"new" if not failed else get(state, NAME) in (b"old", b"new")
        assert len(os.listdir(state.path)) == 1
        if not failed:
            break
    assert not failed, "no number of calls was enough"
