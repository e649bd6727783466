"""Changing settings of the host and putting them back, also after an interruption anywhere."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvd.doctor.changes import Changes
from kvd.doctor.host import Roots
from kvd.doctor.settings import COMPACTION, FileSetting, changeable
from protocol.errors import OsFailure, PermissionRefused

ROOT = Path(__file__).parents[2]


@pytest.fixture
def host_settings(tmp_path: Path) -> dict[str, FileSetting]:
    settings = {name: FileSetting(tmp_path / name) for name in ("a", "b", "c")}
    for setting in settings.values():
        setting.path.write_text("1\n")
    return settings


def values(settings: dict[str, FileSetting]) -> list[str]:
    return [setting.read() for setting in settings.values()]


WANTED = {"a": "0", "b": "0", "c": "1"}


def test_changes_are_recorded_and_put_back(tmp_path: Path, host_settings: dict[str, FileSetting]) -> None:
    changes = Changes(host_settings, tmp_path / "state")
    assert {outcome.setting: outcome.done for outcome in changes.apply(WANTED)} == {
        "a": "changed",
        "b": "changed",
        "c": "kept",
    }
    assert values(host_settings) == ["0", "0", "1"]
    assert {name: entry.original for name, entry in changes.recorded().items()} == {"a": "1", "b": "1"}
    assert {outcome.done for outcome in changes.apply(WANTED)} == {"kept"}
    assert {name: entry.original for name, entry in changes.recorded().items()} == {"a": "1", "b": "1"}
    assert [outcome.done for outcome in changes.restore()] == ["restored", "restored"]
    assert values(host_settings) == ["1", "1", "1"]
    assert changes.recorded() == {}
    assert changes.restore() == []


def test_what_somebody_else_has_set_since_stays(tmp_path: Path, host_settings: dict[str, FileSetting]) -> None:
    changes = Changes(host_settings, tmp_path / "state")
    changes.apply(WANTED)
    host_settings["a"].write("5")
    [kept, _] = changes.restore()
    assert kept.detail == "is 5: somebody has set it since; it was 1"
    assert values(host_settings) == ["5", "1", "1"]
    changes.apply(WANTED)
    host_settings["a"].write("7")
    changes.apply(WANTED)
    changes.restore()
    assert values(host_settings) == ["7", "1", "1"], "the value that was there when we last changed it"


def test_a_later_version_that_wants_another_value(tmp_path: Path, host_settings: dict[str, FileSetting]) -> None:
    changes = Changes(host_settings, tmp_path / "state")
    changes.apply({"a": "0"})
    changes.apply({"a": "3"})
    changes.restore()
    assert values(host_settings) == ["1", "1", "1"]


def test_a_setting_that_refuses_does_not_keep_the_others(tmp_path: Path, host_settings: dict[str, FileSetting]) -> None:
    host_settings["a"].path.unlink()
    host_settings["a"].path.symlink_to("/proc/self/cmdline")  # can be read, not written
    changes = Changes(host_settings, tmp_path / "state")
    original = host_settings["a"].read()
    failed, changed = changes.apply({"a": "0", "b": "0"})
    assert (failed.done, changed.done) == ("failed", "changed")
    assert "writing" in failed.detail
    changes.restore()
    assert host_settings["a"].read() == original
    assert host_settings["b"].read() == "1"


@pytest.mark.parametrize("text", ["", "{}", '{"version":2,"settings":{}}', '{"version":1,"settings":{"z":{}}}'])
def test_a_record_that_makes_no_sense_is_refused(
    tmp_path: Path, host_settings: dict[str, FileSetting], text: str
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state/originals.json").write_text(text)
    changes = Changes(host_settings, tmp_path / "state")
    for act in (changes.recorded, changes.restore, lambda: changes.apply(WANTED)):
        with pytest.raises(OsFailure, match="record of original settings"):
            act()
    assert values(host_settings) == ["1", "1", "1"]


def test_no_permission(tmp_path: Path, host_settings: dict[str, FileSetting]) -> None:
    with pytest.raises((PermissionRefused, OsFailure)):
        Changes(host_settings, Path("/proc/kvd")).apply(WANTED)
    assert values(host_settings) == ["1", "1", "1"]


def killed_at(step: int, act: Callable[[], Any]) -> bool:
    """Do it in a child that is killed before its step-th change of a file; returns whether it was."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            _count_down(step)
            act()
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


def _count_down(step: int) -> None:
    left = step

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.truncate", "fcntl.flock"):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(hook)


@pytest.mark.parametrize("interrupted", ["apply", "restore"])
def test_interrupted_anywhere_the_originals_come_back(
    tmp_path: Path, host_settings: dict[str, FileSetting], interrupted: str
) -> None:
    changes = Changes(host_settings, tmp_path / "state")
    step = 0
    while True:
        if interrupted == "restore":
            changes.apply(WANTED)
        act = changes.restore if interrupted == "restore" else lambda: changes.apply(WANTED)
        if not killed_at(step, act):
            break
        changed = [name for name, setting in host_settings.items() if setting.read() != "1"]
        assert set(changed) <= set(changes.recorded()), "nothing is changed before it is recorded"
        # Whatever comes next after the interruption, the originals are found.
        if step % 2:
            killed_at(step // 2, lambda: changes.apply(WANTED))
        changes.restore()
        assert values(host_settings) == ["1", "1", "1"]
        assert changes.recorded() == {}
        step += 1
    assert step >= 8, "it was killed at every step"
    changes.restore()
    assert values(host_settings) == ["1", "1", "1"]


def test_the_real_compaction_setting(tmp_path: Path) -> None:
    setting = changeable(Roots())[COMPACTION]
    if os.geteuid() or not os.access("/proc/sys/vm/compaction_proactiveness", os.W_OK):
        pytest.skip("needs root, and a kernel with vm.compaction_proactiveness that may be written")
    original = setting.read()
    changes = Changes(changeable(Roots()), tmp_path / "state")
    wanted = "7" if original != "7" else "8"
    try:
        assert [outcome.done for outcome in changes.apply({COMPACTION: wanted})] == ["changed"]
        assert Path("/proc/sys/vm/compaction_proactiveness").read_text() == f"{wanted}\n"
        assert [outcome.done for outcome in changes.restore()] == ["restored"]
        assert setting.read() == original
    finally:
        setting.write(original)


def test_the_real_mount_option(tmp_path: Path) -> None:
    """In a mount namespace of its own, on a mount of its own."""
    program = f"""
from pathlib import Path
from kvd.doctor.changes import Changes
from kvd.doctor.host import Roots
from kvd.doctor.settings import SHM_HUGE, changeable
changes = Changes(changeable(Roots()), Path({str(tmp_path)!r}) / "state")
setting = changeable(Roots())[SHM_HUGE]
before = setting.read()
print(before, [outcome.done for outcome in changes.apply({{SHM_HUGE: "advise"}})], setting.read())
print([outcome.done for outcome in changes.restore()], setting.read())
"""
    script = 'mount -t tmpfs -o size=1m,nosuid,nodev tmpfs /dev/shm && exec "$@"'
    python = [sys.executable, "-c", program]
    command = ["unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh", *python]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode and (
        "not permitted" in done.stderr or "ermission" in done.stderr or "bad option" in done.stderr
    ):
        pytest.skip(f"needs mounts of its own with huge pages: {done.stderr.strip()}")
    assert done.stdout.splitlines() == ["never ['changed'] advise", "['restored'] never"], done.stderr
