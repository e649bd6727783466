"""``kvd support-bundle``: what is in it, and what is not."""

from __future__ import annotations

import json
import struct
import tarfile
from pathlib import Path

from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.test_stat import command
from tests.blackbox.worker_process import WorkerProcess


def bundle(tmp_path: Path, run_dir: Path, *arguments: str) -> dict[str, bytes]:
    settings, archive = tmp_path / "kvd.toml", tmp_path / "kvd.tar.gz"
    settings.write_text(f'run_dir = "{run_dir}"\ndevice = "cpu"\n')
    ended = command("kvd.cli", "support-bundle", str(archive), "--config", str(settings), *arguments)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert archive.stat().st_mode & 0o777 == 0o600
    found = {}
    with tarfile.open(archive) as opened:
        for member in opened:
            file = opened.extractfile(member)
            assert file is not None
            assert member.name.startswith("kvd-support/")
            found[member.name.removeprefix("kvd-support/")] = file.read()
    return found


def test_everything_that_helps_and_nothing_secret(daemon: DaemonProcess, tmp_path: Path) -> None:
    log = tmp_path / "kvd.log"
    log.write_text("first line\n" + "x" * (1 << 20) + "\nlast line\n")
    with WorkerProcess(daemon.run_dir, "committed") as worker:
        found = bundle(tmp_path, daemon.run_dir, "--log", str(log))
    assert list(found) == [
        "versions.json",
        "settings.json",
        "stats.json",
        "explain.json",
        "doctor.json",
        "log.txt",
    ]
    settings = json.loads(found["settings.json"])
    assert settings["device"] == {"value": "cpu", "origin": str(tmp_path / "kvd.toml")}
    assert json.loads(found["stats.json"])["leases"][0]["pid"] == worker.pid
    assert json.loads(found["explain.json"])["devices"][0]["unexplained"] == 0
    assert {"check", "level", "found"} <= set(json.loads(found["doctor.json"])[0])
    assert found["log.txt"] == b"last line\n"
    tokens = struct.pack("<4i", 0, 1, 2, 3)  # what the worker has logged begins so
    for content in found.values():
        assert tokens not in content
        assert b"[0, 1, 2, 3" not in content


def test_without_a_daemon_it_says_so(run_dir: Path, tmp_path: Path) -> None:
    found = bundle(tmp_path, run_dir)
    assert "no daemon at" in json.loads(found["stats.json"])["not there"]
    assert "log.txt" not in found


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    ended = command("kvd.cli", "support-bundle", str(taken))
    assert (ended.returncode, ended.stderr) == (71, f"kvd: {taken}: File exists\n")
    assert taken.read_text() == "mine"
