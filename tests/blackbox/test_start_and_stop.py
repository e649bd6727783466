"""Starting, refusing to start, draining, and leaving nothing behind."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import posix_ipc
import pytest

from compute.client import Client
from protocol.errors import DaemonUnavailable, Draining
from tests.blackbox.daemon_process import DaemonProcess, clean_environment
from tests.blackbox.raw import FINGERPRINT
from tests.blackbox.worker_process import WorkerProcess


def refusal(run_dir: Path, **settings: str) -> tuple[int, str]:
    """Exit status and last words of a daemon that does not start."""
    with DaemonProcess(run_dir, **settings) as process:
        return process.wait(), process.log


def events(log: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.splitlines()]


def test_start_says_what_it_takes_and_stop_leaves_nothing(run_dir: Path) -> None:
    with DaemonProcess(run_dir) as process:
        process.wait_ready()
        segments = process.segments
        assert len(segments) == 16
        assert process.stop() == 0
        log = events(process.log)
    assert [entry["percent"] for entry in log if entry["event"] == "taking host RAM"][-1] == 100
    [ready] = [entry for entry in log if entry["event"] == "ready"]
    assert (ready["host_capacity"], ready["device"]) == (64 << 20, ["cpu"])
    assert not [name for name in segments if Path(name).exists()]
    assert os.listdir(run_dir) == ["kvd.lock"]


def test_case_20_run_directory_of_120_characters() -> None:
    run_dir = Path("/tmp") / ("d" * 115)
    status, log = refusal_without_log(run_dir)
    assert status == 78
    assert "socket path of 133 bytes" in log
    assert "the limit is 107" in log
    assert not run_dir.exists()


def refusal_without_log(run_dir: Path, *flags: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "kvd", "run", "--device", "cpu", "--run-dir", str(run_dir), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), check=False)
    return ended.returncode, ended.stderr


def test_longest_run_directory_works(run_dir: Path) -> None:
    longest = run_dir / ("d" * (107 - len("/handles.sock") - len(str(run_dir)) - 1))
    with DaemonProcess(longest) as process:
        process.wait_ready()
        with Client(longest) as client:
            assert client.stat().ledger == "balanced"
        assert process.stop() == 0


def test_case_23_second_daemon_is_refused(daemon: DaemonProcess) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "kvd", "run", "--device", "cpu", "--run-dir", str(daemon.run_dir)],
        capture_output=True,
        text=True,
        env=clean_environment(),
        check=False,
    )
    assert ended.returncode == 71
    [entry] = events(ended.stderr)
    assert (entry["code"], entry["pid"]) == ("daemon_running", str(daemon.process.pid))
    with Client(daemon.run_dir) as client:
        assert client.stat().pid == daemon.process.pid


@pytest.mark.parametrize("name", ["kvd.sock", "handles.sock"])
def test_case_23_what_is_not_a_socket_is_never_removed(run_dir: Path, name: str) -> None:
    (run_dir / name).write_text("precious")
    status, log = refusal(run_dir)
    assert status == 71
    assert f"{run_dir / name} is in the way" in log
    assert (run_dir / name).read_text() == "precious"


def test_lock_held_by_another_program_keeps_it_from_starting(run_dir: Path) -> None:
    with (run_dir / "kvd.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(run_dir / "kvd.sock"))
            assert refusal(run_dir)[0] == 71
            assert (run_dir / "kvd.sock").is_socket(), "only the lock's holder removes a stale socket"


def test_run_directory_that_cannot_be_made() -> None:
    status, log = refusal_without_log(Path("/proc/kvd"))
    assert status == 71
    assert "run directory /proc/kvd" in log


def test_segments_of_other_run_directories_are_left_alone(run_dir: Path, daemon: DaemonProcess) -> None:
    other = run_dir / "other"
    with DaemonProcess(other) as process:
        process.wait_ready()
        assert all(Path(name).exists() for name in daemon.segments)
        assert process.stop() == 0
    assert all(Path(name).exists() for name in daemon.segments)


def test_signal_drains_and_lets_leases_finish(run_dir: Path) -> None:
    with DaemonProcess(run_dir, drain_timeout_s="20") as process:
        process.wait_ready()
        with WorkerProcess(run_dir, "committed") as worker, Client(run_dir) as client:
            segments = process.segments
            opened = client.create_session(
                "mine", fingerprint=FINGERPRINT, encoding="q8g64", page_bytes=4096, token_capacity=640
            )
            client.extend_session(opened.session, 1, 1)
            process.process.send_signal(signal.SIGTERM)
            while not client.stat().draining:
                time.sleep(0.01)
            with pytest.raises(Draining):
                client.create_session("s", fingerprint=FINGERPRINT, encoding="x", page_bytes=1, token_capacity=1)
            with pytest.raises(Draining):
                client.open_session("mine", fingerprint=FINGERPRINT, encoding="q8g64")
            with pytest.raises(Draining):
                client.extend_session(opened.session, 1, 1)
            with pytest.raises(Draining):
                client.allocate_device("cpu", 1, "ring")
            with pytest.raises(Draining):
                Client(run_dir)
            client.truncate_session(opened.session, 1, 0)
            client.close_session(opened.session, 2)
            assert process.process.poll() is None
            worker.kill()
            # This process was given an extent and lives: its lease keeps the daemon until the second signal.
        process.process.send_signal(signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT
        assert process.segments_left(segments) == []
    assert os.listdir(run_dir) == ["kvd.lock"]


def test_second_signal_waits_for_the_books(run_dir: Path) -> None:
    command = (sys.executable, "-m", "tests.blackbox.hurried_daemon")
    with DaemonProcess(run_dir, command, drain_timeout_s="60") as process:
        process.wait_ready()
        with WorkerProcess(run_dir, "committed") as worker, Client(run_dir) as client:
            segments = process.segments
            client.allocate_device("cpu", 1, "ring")
            process.process.send_signal(signal.SIGTERM)
            while not process.stat().draining:
                time.sleep(0.01)
            worker.kill()  # its memory is released, and there the signal comes
            assert process.wait() == 128 + signal.SIGINT
        assert '"stopped"' in process.log
        assert process.segments_left(segments) == []
    assert os.listdir(run_dir) == ["kvd.lock"]


def test_drain_ends_when_the_last_lease_does(run_dir: Path) -> None:
    with DaemonProcess(run_dir, drain_timeout_s="60") as process:
        process.wait_ready()
        with WorkerProcess(run_dir, "committed") as worker:
            process.process.send_signal(signal.SIGTERM)
            while not process.stat().draining:
                time.sleep(0.01)
            worker.kill()
            assert process.wait() == 0


def test_drain_times_out(run_dir: Path) -> None:
    with DaemonProcess(run_dir, drain_timeout_s="0.5") as process:
        process.wait_ready()
        with WorkerProcess(run_dir, "committed"):
            segments = process.segments
            assert process.stop() == 0
            assert "leases did not end in time" in process.log
            assert process.segments_left(segments) == []


def test_clients_learn_that_the_daemon_is_gone(run_dir: Path) -> None:
    with pytest.raises(DaemonUnavailable, match="no daemon at"):
        Client(run_dir)
    with DaemonProcess(run_dir, drain_timeout_s="0") as process:
        process.wait_ready()
        with Client(run_dir) as client:
            memory = client.allocate_device("cpu", 1, "ring")
            assert process.stop() == 0
            with pytest.raises(DaemonUnavailable):
                client.claim(memory)


def test_service_manager_is_told(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(run_dir / "notify"))
        manager.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(run_dir / "notify"))
        with DaemonProcess(run_dir / "run", drain_timeout_s="0") as process:
            assert manager.recv(200) == b"EXTEND_TIMEOUT_USEC=30000000\nSTATUS=taking host RAM: 100 %"
            assert manager.recv(200) == b"READY=1\nSTATUS=serving"
            assert process.stat().pid == process.process.pid, "ready means that it answers"
            assert process.stop() == 0
            assert manager.recv(200) == b"STOPPING=1\nSTATUS=draining: 0 leases"
    monkeypatch.setenv("NOTIFY_SOCKET", str(run_dir / "nobody"))
    status, log = refusal(run_dir / "run")
    assert status == 71
    assert "NOTIFY_SOCKET" in log


def test_more_than_there_is_of_each_tier(run_dir: Path) -> None:
    status, log = refusal(run_dir, host_capacity="128TiB", host_extent="64GiB")
    assert status == 71
    assert "out_of_capacity" in log
    status, log = refusal(run_dir, device="cuda")
    if status != 0:
        assert status == 69
        assert "no_device" in log


def test_signal_while_host_ram_is_taken(run_dir: Path) -> None:
    with DaemonProcess(run_dir, host_capacity="1GiB", host_extent="8MiB") as process:
        while not (run_dir / "kvd.lock").exists() and process.process.poll() is None:
            time.sleep(0.001)
        prefix = segments_prefix(run_dir)
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        assert "stopped before it was ready" in process.log
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]


def segments_prefix(run_dir: Path) -> str:
    return f"kvd-{hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:12]}"


def test_sockets_have_the_mode_that_was_set(run_dir: Path) -> None:
    with DaemonProcess(run_dir, socket_mode="0600", drain_timeout_s="0") as process:
        process.wait_ready()
        modes = {name: (run_dir / name).stat().st_mode & 0o7777 for name in ("kvd.sock", "handles.sock")}
        assert modes == {"kvd.sock": 0o600, "handles.sock": 0o600}


def test_a_log_that_nobody_reads_does_not_end_the_daemon(run_dir: Path) -> None:
    command = [sys.executable, "-m", "kvd", "run", "--device", "cpu", "--run-dir", str(run_dir)]
    command += ["--host-capacity", "8MiB", "--host-extent", "4MiB", "--drain-timeout-s", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=clean_environment()) as process:
        assert process.stderr is not None
        while b'"ready"' not in process.stderr.readline():
            pass
        process.stderr.close()
        for _ in range(3):
            with Client(run_dir) as client:
                client.allocate_device("cpu", 1, "ring")
        process.terminate()
        process.wait(60)


def test_unknown_group(run_dir: Path) -> None:
    status, log = refusal(run_dir, socket_group="no-such-group")
    assert status == 78
    assert "socket.group is 'no-such-group'" in log


def test_segment_name_taken_by_a_stranger_is_an_error(run_dir: Path) -> None:
    name = f"/{segments_prefix(run_dir)}-e3"
    posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=4096).close_fd()
    path = Path("/dev/shm") / name[1:]
    os.chown(path, 65534, 65534)
    try:
        status, log = refusal(run_dir)
        assert status == 71
        assert name in log
        assert path.stat().st_uid == 65534
    finally:
        path.unlink()
    assert not [left for left in os.listdir("/dev/shm") if left.startswith(segments_prefix(run_dir))]
