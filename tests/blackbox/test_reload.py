"""A running daemon that is told to read its settings again."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compute.client import Client
from protocol.errors import InvalidValue
from tests.blackbox.daemon_process import DaemonProcess


class Manager:
    """What a service manager hears."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(20)

    def wait_for(self, start: str) -> str:
        """The next message that begins so; others are passed over."""
        while not (message := self.socket.recv(500).decode()).startswith(start):
            pass
        return message


@pytest.fixture
def manager(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    manager = Manager(run_dir / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(run_dir / "notify"))
    yield manager
    manager.socket.close()


def events(process: DaemonProcess, name: str) -> list[dict[str, Any]]:
    return [entry for entry in map(json.loads, process.log.splitlines()) if entry["event"] == name]


def test_reload_takes_up_what_may_change(run_dir: Path, manager: Manager) -> None:
    file = run_dir / "kvd.toml"
    file.write_text('limits.max_leases = 1\ndrain_timeout_s = 0\nsocket.mode = "0600"\n')
    with DaemonProcess(run_dir / "run", config=str(file)) as process:
        manager.wait_for("READY=1")
        with Client(process.run_dir):
            with pytest.raises(InvalidValue, match=r"limits\.max_leases"):
                Client(process.run_dir)
            file.write_text('limits.max_leases = 2\ndrain_timeout_s = 0\nsocket.mode = "0660"\nlog.level = "debug"\n')
            before = time.monotonic_ns() // 1000
            process.process.send_signal(signal.SIGHUP)
            reloading = manager.wait_for("RELOADING=1\nMONOTONIC_USEC=")
            assert before < int(reloading.rpartition("=")[2]) < time.monotonic_ns() // 1000
            assert manager.wait_for("READY=1") == "READY=1\nSTATUS=serving"
            with Client(process.run_dir):
                pass
        [done] = events(process, "settings reloaded")
        assert done["changed"] == {"limits.max_leases": "1 → 2", "log.level": '"info" → "debug"'}
        [refused] = events(process, "settings that stay as they were")
        assert refused["refused"] == {"socket.mode": '"0600" → "0660": it needs a restart'}
        assert process.stop() == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [("limits.max_leases = 0\n", "max_leases is 0"), ("nonsense", "not TOML"), ("no_such_key = 1", "unknown key")],
)
def test_a_wrong_file_changes_nothing(run_dir: Path, manager: Manager, text: str, reason: str) -> None:
    file = run_dir / "kvd.toml"
    file.write_text("limits.max_leases = 1\n")
    with DaemonProcess(run_dir / "run", config=str(file), drain_timeout_s="0") as process:
        manager.wait_for("READY=1")
        file.write_text(text)
        process.process.send_signal(signal.SIGHUP)
        manager.wait_for("RELOADING=1")
        manager.wait_for("READY=1")
        [failed] = events(process, "reload failed: the settings stay as they were")
        assert reason in failed["reason"]
        with Client(process.run_dir), pytest.raises(InvalidValue, match="at most 1 "):
            Client(process.run_dir)
        assert process.stop() == 0


def test_the_watchdog_is_pinged_while_the_loop_runs(run_dir: Path, manager: Manager) -> None:
    with DaemonProcess(run_dir / "run", drain_timeout_s="0") as process:
        manager.wait_for("READY=1")
        manager.wait_for("WATCHDOG=1")
        manager.wait_for("WATCHDOG=1")
        assert process.stop() == 0
