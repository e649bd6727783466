"""What the test process holds: open files, shared memory, threads, children; and what of it a test left behind."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

GRACE_SECONDS = 5.0
"""How long a test's threads, children and segments may take to end after it."""

_SHM = Path("/dev/shm")
_ORPHANS_LOCK = Path(tempfile.gettempdir()) / f"kvd-tests-{os.getuid()}.lock"
# Opened by libraries at their first use and kept: the kernel's tables, random bytes, the CUDA driver's devices. And the
# lock that is held while this is looked at.
_LAZY = re.compile(r"/(proc|sys)/|/dev/(u?random|null|nvidia)|" + re.escape(str(_ORPHANS_LOCK)))
_SERIAL = re.compile(r"\[\d+\]")


@dataclass(frozen=True)
class Holdings:
    """A snapshot. Open files are counted by target, since numbers of descriptors are used again."""

    files: Counter[str]
    segments: frozenset[str]
    threads: frozenset[threading.Thread]
    children: frozenset[psutil.Process]

    @classmethod
    def now(cls) -> Holdings:
        return cls(
            files=_open_files(),
            segments=frozenset(name for name in os.listdir(_SHM) if name.startswith("kvd")),
            threads=frozenset(threading.enumerate()),
            children=frozenset(_children()),
        )

    def left_behind(self) -> list[str]:
        """What there is now beyond this snapshot, in words; waits `GRACE_SECONDS` for it to go."""
        deadline = time.monotonic() + GRACE_SECONDS
        pause = 0.001
        while self._difference(Holdings.now()):
            gc.collect()
            if time.monotonic() > deadline:
                with orphans_expected():  # segments of daemons that a test beside this one kills are gone after it
                    return self._difference(Holdings.now())
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        return []

    def _difference(self, later: Holdings) -> list[str]:
        files = later.files - self.files
        segments = later.segments - self.segments
        if segments:
            segments -= _segments_of_others()
        return [
            *(f"{count} open {target}" for target, count in files.items()),
            *(f"shared memory {name}" for name in sorted(segments)),
            *(f"thread {thread.name}" for thread in later.threads - self.threads),
            *(f"child process {child.pid} {_command(child)}" for child in later.children - self.children),
        ]


@contextlib.contextmanager
def orphans_expected() -> Iterator[None]:
    """Held by a test that kills daemons: until the next daemon takes them up, their segments are no process's.

    One test at a time in all processes of a run.
    """
    with _ORPHANS_LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _open_files() -> Counter[str]:
    files: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:  # the descriptor that listed the directory
            continue
        if not _LAZY.match(target):
            files[_SERIAL.sub("", target)] += 1
    return files


def _children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.is_running()]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:6]) or process.status()
    except psutil.NoSuchProcess:
        return "(just ended)"


def _segments_of_others() -> frozenset[str]:
    """Segments that a process outside this one's family has open or mapped: other tests run beside this one."""
    family = {os.getpid(), *(child.pid for child in _children())}
    names: set[str] = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) in family:
            continue
        try:
            held = [os.readlink(link) for link in (process / "fd").iterdir()]
            held += (process / "maps").read_text().split()
        except OSError:  # it ended, or is another user's
            continue
        names.update(path.removeprefix("/dev/shm/") for path in held if path.startswith("/dev/shm/kvd"))
    return frozenset(names)
