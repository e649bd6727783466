"""A machine with a real systemd as pid 1, in namespaces of its own; it sees this one's files, and changes none."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

SYSTEMD = Path("/lib/systemd/systemd")
TOOLS = ("systemctl", "systemd-analyze", "systemd-sysusers", "unshare", "nsenter", "pivot_root", "dpkg", "dpkg-deb")
NOT_PERMITTED = 75
BOOT_TIMEOUT_S = 60


class NotHere(Exception):
    """Such a machine cannot be had here; the message says why."""


class Machine:
    """Up from construction to the end of the ``with`` block. ``shared`` is its ``/mnt``. Raises `NotHere`."""

    def __init__(self, shared: Path) -> None:
        if os.geteuid():
            raise NotHere("needs root, to make namespaces")
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing or not SYSTEMD.exists():
            raise NotHere(f"needs systemd and {', '.join(TOOLS)}; missing: {', '.join(missing) or SYSTEMD}")
        self._parts = Path(tempfile.mkdtemp(prefix="kvd-machine-"))
        self._group = _own_control_group()
        self._unshare = self._boot(shared)
        try:
            self._init = self._first_process()
            self._wait_booted()
        except BaseException:
            self._end()
            raise

    def run(self, *command: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command as root. With ``check`` it must succeed."""
        done = subprocess.run(self.inside(*command), capture_output=True, text=True, timeout=timeout)
        assert not check or done.returncode == 0, f"{command}: status {done.returncode}: {done.stdout}{done.stderr}"
        return done

    def inside(self, *command: str) -> list[str]:
        """The command line, from here, that runs ``command`` in the machine."""
        return ["nsenter", f"--target={self._init}", "--mount", "--pid", "--ipc", "--uts", "--cgroup", "--", *command]

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """Properties of a unit, as ``systemctl show`` has them."""
        lines = self.run("systemctl", "show", unit, f"--property={','.join(properties)}").stdout.splitlines()
        return dict(line.split("=", 1) for line in lines)

    def journal(self, unit: str, *arguments: str) -> str:
        """What the unit has logged, and what systemd has logged of it."""
        self.run("journalctl", "--sync")
        return self.run("journalctl", f"--unit={unit}", "--output=cat", "--no-pager", *arguments).stdout

    def write(self, path: str, text: str) -> None:
        """Write a file of the machine."""
        root = Path(f"/proc/{self._init}/root")
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _boot(self, shared: Path) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("machine_boot.sh")
        namespaces = ["--mount", "--propagation=private", "--pid", "--fork", "--ipc", "--uts", "--cgroup"]
        join: Sequence[str] = ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(self._group)]
        command = [*join, "unshare", *namespaces, "--kill-child", "sh", str(script)]
        command += [str(self._parts), str(shared), str(script.parents[2])]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def _first_process(self) -> int:
        """The pid, as seen from here, of the machine's pid 1."""
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._unshare.poll() is not None:
                assert self._unshare.stderr is not None
                raise NotHere(f"namespaces: {self._unshare.stderr.read().strip()}")
            found = children.read_text().split()
            if found and os.readlink(f"/proc/{found[0]}/exe").endswith("systemd"):
                return int(found[0])
            time.sleep(0.05)
        raise NotHere("systemd did not come up as pid 1")

    def _wait_booted(self) -> None:
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while (state := self.run("systemctl", "is-system-running", check=False).stdout.strip()) != "running":
            failed = self.run("systemctl", "list-units", "--failed", "--plain", "--no-legend", check=False).stdout
            if state == "degraded" or time.monotonic() > deadline:
                raise NotHere(f"systemd came up {state or 'silent'}: {failed}")
            time.sleep(0.1)

    def _end(self) -> None:
        self._unshare.kill()
        self._unshare.wait()
        if self._unshare.stderr is not None:
            self._unshare.stderr.close()
        _remove_control_group(self._group)
        self._parts.rmdir()


def _own_control_group() -> Path:
    """A new group of version 2, whose inside the machine takes for the root."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    roots = [Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"]
    if not roots:
        raise NotHere("needs control groups of version 2 mounted")
    try:
        group = Path(tempfile.mkdtemp(prefix="kvd-machine-", dir=roots[0]))
    except OSError as error:
        raise NotHere(f"needs a control group of its own: {error}") from error
    group.chmod(0o755)
    return group


def _remove_control_group(group: Path) -> None:
    """Its processes are being killed by the kernel; a group can be removed when they are gone."""
    deadline = time.monotonic() + 10
    for folder in sorted((path for path in group.rglob("*") if path.is_dir()), key=str, reverse=True):
        _remove_when_empty(folder, deadline)
    _remove_when_empty(group, deadline)


def _remove_when_empty(folder: Path, deadline: float) -> None:
    while True:
        try:
            folder.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
