"""The daemon as a service: its package installed, and run by a real systemd."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.config import load
from tests.blackbox.systemd_machine import Machine, NotHere

ROOT = Path(__file__).parents[2]
PYTHON = "/usr/bin/python3"
SMALL = """device = "cpu"
host.capacity = "64MiB"
host.extent = "4MiB"
host.state_capacity = "64MiB"
vram.capacity = "256MiB"
"""

pytestmark = [
    pytest.mark.leaks_per_module,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("systemd"),
]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine with the package installed and settings for a small daemon; nothing is started."""
    shared = tmp_path_factory.mktemp("shared")
    try:
        machine = Machine(shared)
    except NotHere as reason:
        pytest.skip(f"no machine with systemd: {reason}")
    with machine:
        package = _package(shared)
        machine.run("dpkg", "--install", f"/mnt/{package.name}")
        machine.write("/etc/kvd/kvd.d/10-small.toml", SMALL)
        yield machine


def _package(folder: Path) -> Path:
    environment = {**os.environ, "OUTPUT": str(folder)}
    command = ["make", "--no-print-directory", "deb", f"PYTHON={PYTHON}"]
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    _skip_without_packages(made.stderr if made.returncode else "")
    assert made.returncode == 0, made.stderr
    [package] = folder.glob("kvd_*.deb")
    return package


def _skip_without_packages(errors: str) -> None:
    """A failed installation is no fault of ours if pip reached no index."""
    if re.search(r"No matching distribution|Could not find a version|Connection", errors):
        pytest.skip(f"the daemon's own environment cannot be filled here: {errors.splitlines()[-1]}")


@pytest.fixture
def service(machine: Machine) -> Iterator[Machine]:
    """The machine with the daemon running; it is stopped afterwards, in a second at most."""
    start(machine, "drain_timeout_s = 0\n")
    yield machine
    machine.run("systemctl", "stop", "kvd")


def wait_for(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """What ``condition`` returns, once that is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


def start(machine: Machine, settings: str) -> None:
    machine.write("/etc/kvd/kvd.d/20-test.toml", settings)
    machine.run("systemctl", "reset-failed")
    done = machine.run("systemctl", "start", "kvd", check=False)
    assert done.returncode == 0, machine.journal("kvd")


def main_pid(machine: Machine) -> int:
    return int(machine.show("kvd", "MainPID")["MainPID"])


def a_worker(machine: Machine) -> subprocess.Popen[bytes]:
    """A worker, outside any unit, that holds the session ``stored``; it says so, and ends when its input does."""
    module = [sys.executable, "-B", "-m", "tests.blackbox.worker_process", "/run/kvd", "committed", "stored", "0"]
    command = machine.inside("env", "-C", str(ROOT), "PYTHONPATH=.", *module)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def store_a_session(machine: Machine) -> None:
    """Have the daemon keep a session that nobody holds."""
    with a_worker(machine) as worker:
        worker.communicate()
    wait_for(lambda: [session["state"] for session in stat(machine)["sessions"]] == ["stored"])


def may_raise_limits() -> bool:
    """Whether root here may go beyond its own hard limits; in some containers and virtual machines it may not."""
    [capabilities] = re.findall(r"CapEff:\s+(\w+)", Path("/proc/self/status").read_text())
    cap_sys_resource = 24
    return bool(int(capabilities, 16) >> cap_sys_resource & 1)


def stat(machine: Machine) -> dict[str, Any]:
    """What a worker's user gets from kvd-stat."""
    done = machine.run("runuser", "-u", "kvd-worker", "--", "kvd-stat", "--json")
    stats: dict[str, Any] = json.loads(done.stdout)
    return stats


def test_units_verify_and_expose_little(machine: Machine) -> None:
    units = ["kvd.service", "kvd-worker@one.service", "run-kvdshm.mount"]
    done = machine.run("systemd-analyze", "verify", "--man=no", *units)
    assert done.stdout + done.stderr == ""
    words = machine.run("systemd-analyze", "security", "--no-pager", "kvd.service").stdout.splitlines()[-1]
    level = re.search(r"exposure level for kvd\.service: ([\d.]+)", words)
    assert level is not None
    assert float(level[1]) <= 2.5


def test_every_line_of_hardening_has_its_reason_above_it() -> None:
    lines = (ROOT / "systemd" / "kvd.service").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("# --- Hardening"))
    settings = [number for number in range(start, len(lines)) if re.match(r"[A-Z]\w+=", lines[number])]
    assert len(settings) > 20
    for number in settings:
        same = lines[number - 1].split("=")[0]
        assert lines[number - 1].startswith("# ") or same in {"CapabilityBoundingSet", "IPAddressDeny", "DevicePolicy"}


def test_package_has_commands_users_and_an_example_of_its_settings(machine: Machine) -> None:
    assert machine.run("kvd", "--version").stdout == "kvd 0.1.0\n"
    assert machine.run("id", "-nG", "kvd-worker").stdout.split() == ["kvd-worker", "kvd"]
    machine.run("kvd", "check-config")
    origins = json.loads(machine.run("kvd", "print-config", "--json").stdout)
    assert origins["host.capacity"] == {"value": 64 << 20, "origin": "/etc/kvd/kvd.d/10-small.toml"}
    assert origins["socket.mode"]["origin"] == "/etc/kvd/kvd.toml"
    assert machine.run("stat", "--format=%U %a", "/var/lib/kvd-doctor").stdout == "root 755\n"
    assert "command =" not in machine.run("cat", "/usr/lib/kvd/pyvenv.cfg").stdout
    found = machine.run("grep", "--recursive", "--files-with-matches", str(ROOT), "/usr/lib/kvd", check=False).stdout
    assert found == "", "nothing installed names the place where it was made"


def test_make_install_goes_where_it_is_told(tmp_path: Path) -> None:
    kept = tmp_path / "root/srv/etc/kvd/kvd.toml"
    kept.parent.mkdir(parents=True)
    kept.write_text("# mine\n")
    where = [f"DESTDIR={tmp_path}/root", "prefix=/opt/kvd", "sysconfdir=/srv/etc", f"PYTHON={PYTHON}"]
    command = ["make", "--no-print-directory", "install", *where, "INSTALL_EXTRAS=metrics"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    _skip_without_packages(done.stderr if done.returncode else "")
    assert done.returncode == 0, done.stderr
    root = tmp_path / "root"
    assert os.readlink(root / "opt/kvd/bin/kvd") == "/opt/kvd/lib/kvd/bin/kvd"
    assert (root / "opt/kvd/lib/kvd/bin/kvd").read_text().startswith("#!/opt/kvd/lib/kvd/bin/python\n")
    unit = (root / "opt/kvd/lib/systemd/system/kvd.service").read_text()
    assert "\nExecStart=/opt/kvd/bin/kvd run\n" in unit
    assert "\nDocumentation=file:///opt/kvd/share/doc/kvd/install.md\n" in unit
    worker = (root / "opt/kvd/lib/systemd/system/kvd-worker@.service").read_text()
    assert "\nEnvironmentFile=/srv/etc/kvd/worker-%i.env\n" in worker
    assert kept.read_text() == "# mine\n"
    assert {path.name for path in root.iterdir()} == {"opt", "srv"}
    python = [
        sys.executable,
        "-I",
        "-c",
        "import sys; sys.path.insert(0, sys.argv[1]); import kvd; print(kvd.__file__)",
    ]
    [packages] = (root / "opt/kvd/lib/kvd/lib").glob("python3.*/site-packages")
    assert subprocess.check_output([*python, packages], text=True).startswith(str(packages))


def test_example_settings_are_right() -> None:
    config = load({}, {}, ROOT / "systemd" / "kvd.toml")
    assert config.device == "cuda"
    assert config.host.capacity == 16 << 30
    assert config.disk.state_dir == "/var/lib/kvd"
    assert config.metrics.listen == "unix:/run/kvd/metrics.sock"


def test_start_is_ready_and_limits_are_those_of_the_unit(service: Machine) -> None:
    shown = service.show("kvd", "ActiveState", "StatusText", "MainPID", "NRestarts")
    assert (shown["ActiveState"], shown["StatusText"], shown["NRestarts"]) == ("active", "serving", "0")
    assert stat(service)["ledger"] == "balanced"
    process = f"/proc/{shown['MainPID']}"
    limits = service.run("cat", f"{process}/limits").stdout
    assert re.search(r"Max core file size +0 +0", limits)
    if may_raise_limits():
        assert re.search(r"Max locked memory +unlimited +unlimited", limits)
        assert re.search(r"Max open files +524288 +524288", limits)
        assert service.run("cat", f"{process}/oom_score_adj").stdout == "-900\n"
    unit = service.show("kvd", "LimitMEMLOCK", "LimitNOFILE", "OOMScoreAdjust")
    assert unit == {"LimitMEMLOCK": "infinity", "LimitNOFILE": "524288", "OOMScoreAdjust": "-900"}
    assert service.run("cat", f"{process}/coredump_filter").stdout == "00000011\n"
    assert service.run("stat", "--format=%U", process).stdout == "kvd\n"
    assert re.search(r"CapBnd:\s+0{16}\n", service.run("cat", f"{process}/status").stdout)
    sockets = service.run("stat", "--format=%U %G %a", "/run/kvd/kvd.sock", "/run/kvd/handles.sock").stdout
    assert sockets == "kvd kvd 660\n" * 2
    refused = service.run("runuser", "-u", "nobody", "--", "kvd-stat", check=False)
    assert refused.returncode in {69, 71, 77}


def test_a_worker_decodes(service: Machine) -> None:
    service.write("/etc/kvd/prompt.txt", "All work and no play makes a dull page table. " * 8)
    command = f"{sys.executable} -m compute.cli generate --prompt-file /etc/kvd/prompt.txt --tokens 4 --json"
    service.write("/etc/kvd/worker-one.env", f"WORKER_COMMAND={command}\nOMP_NUM_THREADS=1\n")
    # The interpreter with torch may lie in root's home here, and the checkout in /tmp; on a node they do not.
    service.run("chmod", "o+x", "/root")
    here = f"ProtectHome=no\nPrivateTmp=no\nWorkingDirectory={ROOT}\n"
    dropin = f"[Service]\n{here}Restart=no\nEnvironment=PYTHONDONTWRITEBYTECODE=1\n"
    service.write("/etc/systemd/system/kvd-worker@one.service.d/test.conf", dropin)
    service.run("systemctl", "daemon-reload")
    service.run("systemctl", "start", "kvd-worker@one")
    wait_for(lambda: service.show("kvd-worker@one", "ActiveState")["ActiveState"] in {"inactive", "failed"}, 100)
    log = service.journal("kvd-worker@one")
    assert service.show("kvd-worker@one", "Result")["Result"] == "success", log
    [report] = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert report["generated_tokens"] == 4
    assert report["mode"] == "offloaded"
    after = wait_for(lambda: not (stats := stat(service))["leases"] and stats)
    assert after["ledger"] == "balanced"
    uid = service.run("id", "-u", "kvd-worker").stdout.strip()
    assert f"of uid {uid}" in service.journal("kvd"), "the worker ran as the user of its unit"


def test_sessions_are_saved_and_metrics_served_under_hardening(service: Machine) -> None:
    store_a_session(service)
    service.run("kvd", "save", "stored")
    assert "stored" in service.run("kvd", "ls").stdout
    assert service.run("stat", "--format=%U %a", "/var/lib/kvd").stdout == "kvd 700\n"
    program = """import http.client, socket
connection = http.client.HTTPConnection("kvd")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect("/run/kvd/metrics.sock")
connection.request("GET", "/metrics")
print(connection.getresponse().read().decode())
"""
    text = service.run("runuser", "-u", "kvd-worker", "--", PYTHON, "-c", program).stdout
    assert '\nkvd_requests_total{outcome="done",verb="save_session"} 1.0\n' in text
    assert '\nkvd_sessions{state="stored"} 1.0\n' in text


def test_reload_takes_up_settings_and_names_what_waits(service: Machine) -> None:
    pid = main_pid(service)
    service.write("/etc/kvd/kvd.d/20-test.toml", "drain_timeout_s = 0\nlimits.max_leases = 3\nhost.numa_node = 0\n")
    service.run("systemctl", "reload", "kvd")
    log = wait_for(lambda: "settings reloaded" in (log := service.journal("kvd")) and log)
    assert '"limits.max_leases": "256 \\u2192 3"' in log or '"limits.max_leases": "256 → 3"' in log
    assert "settings that stay as they were" in wait_for(lambda: service.journal("kvd"))
    wait_for(
        lambda: service.show("kvd", "ActiveState", "StatusText") == {"ActiveState": "active", "StatusText": "serving"}
    )
    assert main_pid(service) == pid


def test_a_hung_loop_is_aborted_and_serves_again_within_five_seconds(service: Machine) -> None:
    pid = main_pid(service)
    store_a_session(service)
    service.run("kill", "-STOP", str(pid))
    stopped = time.monotonic()
    wait_for(lambda: service.show("kvd", "NRestarts", "ActiveState") == {"NRestarts": "1", "ActiveState": "active"})
    assert time.monotonic() - stopped < 3 + 5, "the watchdog's three seconds, then five"
    assert main_pid(service) != pid
    after = stat(service)
    assert after["ledger"] == "balanced"
    assert [session["name"] for session in after["sessions"]] == ["stored"], "its history outlives it"
    log = service.journal("kvd")
    assert "Watchdog timeout (limit 3s)!" in log
    assert "Fatal Python error: Aborted" in log, "it says where it was"


@pytest.mark.parametrize("signal", ["-KILL", "-ABRT"])
def test_killed_daemon_serves_again_within_five_seconds(service: Machine, signal: str) -> None:
    """SIGABRT is how libzmq ends the process when it finds no file descriptor."""
    pid = main_pid(service)
    store_a_session(service)
    killed = time.monotonic()
    service.run("kill", signal, str(pid))
    wait_for(lambda: service.show("kvd", "NRestarts", "ActiveState") == {"NRestarts": "1", "ActiveState": "active"})
    assert time.monotonic() - killed < 5
    assert main_pid(service) != pid
    assert [session["name"] for session in stat(service)["sessions"]] == ["stored"]


def test_stop_drains_and_the_next_start_is_clean(machine: Machine) -> None:
    start(machine, "drain_timeout_s = 100\n")
    with a_worker(machine) as worker:
        assert worker.stdout is not None
        assert json.loads(worker.stdout.readline())["lease"] == 1
        machine.run("systemctl", "stop", "--no-block", "kvd")
        wait_for(lambda: machine.show("kvd", "StatusText")["StatusText"] == "draining: 1 leases")
        assert stat(machine)["draining"]
        assert machine.show("kvd", "ActiveState")["ActiveState"] == "deactivating"
        worker.communicate(b"\n")
    wait_for(lambda: machine.show("kvd", "ActiveState")["ActiveState"] == "inactive")
    assert machine.show("kvd", "Result", "ExecMainStatus") == {"Result": "success", "ExecMainStatus": "0"}
    assert machine.run("ls", "/dev/shm").stdout == ""
    assert machine.run("ls", "/run/kvd", check=False).returncode == 2, "the run directory went with the service"

    cursor = machine.run("journalctl", "--lines=0", "--show-cursor").stdout.split("cursor: ")[1].strip()
    start(machine, "drain_timeout_s = 0\n")
    log = machine.journal("kvd", f"--after-cursor={cursor}")
    assert '"ready"' in log
    assert "removed what" not in log
    assert stat(machine)["sessions"] == []
    machine.run("systemctl", "stop", "kvd")


def test_a_wrong_setting_is_not_tried_again(machine: Machine) -> None:
    machine.write("/etc/kvd/kvd.d/20-test.toml", 'device = "tpu"\n')
    machine.run("systemctl", "reset-failed")
    assert machine.run("systemctl", "start", "kvd", check=False).returncode == 1
    shown = machine.show("kvd", "ActiveState", "ExecMainStatus", "NRestarts")
    assert shown == {"ActiveState": "failed", "ExecMainStatus": "78", "NRestarts": "0"}
    assert "20-test.toml: device is 'tpu'; allowed" in machine.journal("kvd")


def test_a_shared_memory_mount_of_its_own(machine: Machine) -> None:
    machine.run("systemctl", "enable", "--now", "run-kvdshm.mount")
    start(machine, "drain_timeout_s = 0\n")
    pid = main_pid(machine)
    mounts = machine.run("cat", f"/proc/{pid}/mounts").stdout.splitlines()
    [own] = [line for line in mounts if line.split()[1] == "/dev/shm"][-1:]
    assert "huge=advise" in own
    assert len(machine.run("ls", "/run/kvdshm").stdout.split()) == 16
    assert machine.run("ls", "/dev/shm").stdout == "", "the host's own has nothing of it"

    store_a_session(machine)
    machine.run("kill", "-KILL", str(pid))
    wait_for(lambda: machine.show("kvd", "NRestarts", "ActiveState") == {"NRestarts": "1", "ActiveState": "active"})
    assert [session["name"] for session in stat(machine)["sessions"]] == ["stored"], "the next one finds it"
    machine.run("systemctl", "disable", "--now", "run-kvdshm.mount")
    machine.run("systemctl", "stop", "kvd")
