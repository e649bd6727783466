"""A worker as a process of its own, for tests to kill: it goes to a point, says so, and stays there.

Run as ``python -m tests.blackbox.worker_process RUN_DIR POINT SESSION UID``; it prints one JSON object a line. With a
star after the point a child goes there and is killed, again for every line on standard input.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from compute.client import Client
from protocol.daemon_block import read_daemon_block
from protocol.messages import SessionOpened
from protocol.session_state import WorkerBlock, WorkerBlockLayout, unpack_frame
from tests.blackbox.daemon_process import clean_environment
from tests.blackbox.raw import FINGERPRINT

PAGE_BYTES = 5000
TOKEN_CAPACITY = 64 * 600
COMMIT_BYTES = 16


class WorkerProcess:
    """The process, at its point. ``facts`` is what it said there."""

    def __init__(self, run_dir: Path, point: str, *, uid: int | None = None, session: str = "victim") -> None:
        command = [sys.executable, "-m", "tests.blackbox.worker_process", str(run_dir), point, session, str(uid or 0)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=clean_environment())
        try:
            self.facts = self.read()
        except AssertionError:
            self.end()
            raise

    @property
    def lease(self) -> int:
        return int(self.facts["lease"])

    @property
    def pid(self) -> int:
        return self.process.pid

    def read(self) -> dict[str, Any]:
        """The next line that it prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the worker ended with status {self.process.wait()}"
        facts: dict[str, Any] = json.loads(line)
        return facts

    def go_on(self) -> None:
        """Have it leave its point."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, without waiting for the end."""
        self.process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Kill it, wait for its end, and close its pipes."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Steps:
    """What the process does, one method a point; each goes through those before it."""

    def __init__(self, run_dir: Path, session: str) -> None:
        self.client = Client(run_dir, name="victim")
        self._session = session
        self._opened: SessionOpened | None = None
        self._generation = 1
        self._segments: dict[int, int] = {}

    def lease(self) -> None:
        """Nothing but the lease."""

    def allocated(self) -> None:
        """With VRAM: one claimed, one not; some of it for temporaries."""
        self.client.claim(self.client.allocate_device("cpu", 3 << 20, "ring"))
        self.client.allocate_device("cpu", 1, "tables")
        temporary = self.client.allocate_device("cpu", 5 << 20, "temporary")
        self.client.free_device(temporary.handle)

    def created(self) -> None:
        """With a session of no pages."""
        self.allocated()
        self._opened = self.client.create_session(
            self._session,
            fingerprint=FINGERPRINT,
            encoding="q8g64",
            page_bytes=PAGE_BYTES,
            token_capacity=TOKEN_CAPACITY,
            commit_bytes=COMMIT_BYTES,
        )

    def extended(self) -> None:
        """With pages, nothing committed."""
        self.created()
        self._extend(3)

    def tokens_only(self) -> None:
        """With seven acknowledged tokens and no row committed."""
        self.created()
        publish(self.client.claim(self.opened.worker_block), self.opened, tokens=7, rows=0)

    def committed(self) -> None:
        """With three pages written, tokens logged and 150 rows committed."""
        self.extended()
        opened = self.opened
        header, frames = read_daemon_block(os.pread(self.client.claim(opened.daemon_block), 1 << 20, 0))
        for page, frame in enumerate(frames):
            extent, index = unpack_frame(frame)
            os.pwrite(self._segments[extent], bytes([page + 1]) * PAGE_BYTES, index * header.page_stride)
        publish(self.client.claim(opened.worker_block), opened, tokens=160, rows=150)

    def cut(self) -> None:
        """With a session whose worker block it has cut."""
        self.extended()
        fd = self.client.claim(self.opened.worker_block)
        os.ftruncate(fd, 4096)
        os.close(fd)

    def filled(self) -> None:
        """Having had all 16 extents of the host tier, each full of ones; it has given the pages back."""
        self._opened = self.client.create_session(
            self._session, fingerprint=FINGERPRINT, encoding="x", page_bytes=4 << 20, token_capacity=64 * 16
        )
        self._extend(16)
        for fd in self._segments.values():
            os.pwrite(fd, b"\xff" * (4 << 20), 0)
        self.client.close_session(self.opened.session, 1)

    def filled_device(self) -> None:
        """With all VRAM, in two pieces, one of them temporary, each full of ones."""
        for purpose in ("ring", "temporary"):
            memory = self.client.allocate_device("cpu", 32 << 20, purpose)
            fd = self.client.claim(memory)
            os.pwrite(fd, b"\xff" * memory.committed, 0)
            os.close(fd)
            if purpose == "temporary":
                self.client.free_device(memory.handle)

    def pries_open(self) -> None:
        """With a session whose daemon block it tries to open for writing."""
        self.created()
        fd = self.client.claim(self.opened.daemon_block)
        self.say()
        try:
            os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        except OSError as error:
            sys.stdout.write(json.dumps({"refused": error.strerror}) + "\n")

    def extending(self) -> None:
        """Extends all the time, from the moment on that this is said."""
        self.committed()
        self.say()
        while True:
            for _ in range(100):
                self._extend(5)
            self.client.truncate_session(self.opened.session, self._generation, 3)
            self._generation += 1

    def disconnected(self) -> None:
        """Alive, but its connections are closed."""
        self.committed()
        self.client.close()

    def forked(self) -> None:
        """With a child that keeps every descriptor, the lease's connection included, and outlives it."""
        self.committed()
        os.dup(self.client._handles.fileno())  # the client closes its own in a forked child
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)

    @property
    def opened(self) -> SessionOpened:
        assert self._opened is not None
        return self._opened

    def _extend(self, pages: int) -> None:
        changed = self.client.extend_session(self.opened.session, self._generation, pages)
        for extent in changed.extents:
            self._segments[extent.number] = self.client.claim(extent.memory)

    def say(self) -> None:
        sys.stdout.write(json.dumps({"lease": self.client.lease.number, "pid": os.getpid()}) + "\n")
        sys.stdout.flush()


def publish(fd: int, opened: SessionOpened, *, tokens: int, rows: int, token_capacity: int = TOKEN_CAPACITY) -> None:
    """Log tokens 0, 1, 2, … and commit ``rows`` rows in the worker block behind ``fd``, which is closed."""
    mapped = mmap.mmap(fd, opened.worker_block.nbytes)
    os.close(fd)
    block = WorkerBlock(memoryview(mapped), WorkerBlockLayout(token_capacity, COMMIT_BYTES), opened.session)
    block.append_tokens(range(tokens))
    if rows:
        block.logical_rows = rows
        block.publish_commit(opened.generation, rows, b"payload")
    block.release()
    mapped.close()


def main() -> None:
    run_dir, point, session = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    if uid := int(sys.argv[4]):
        _become(uid)
    if point.endswith("*"):
        _die_repeatedly(run_dir, point[:-1], session)
        return
    steps = Steps(run_dir, session)
    getattr(steps, point)()
    steps.say()
    sys.stdin.readline()


def _become(uid: int) -> None:
    """Give up root, and have ``/proc/self`` belong to the new uid, as if the program had been started by it."""
    os.setgid(uid)
    os.setuid(uid)
    set_dumpable = 4
    ctypes.CDLL(None).prctl(set_dumpable, 1, 0, 0, 0)


def _die_repeatedly(run_dir: Path, point: str, session: str) -> None:
    """For every line that is read, have a child go to the point and kill itself there."""
    while True:
        if os.fork() == 0:
            steps = Steps(run_dir, session)
            getattr(steps, point)()
            steps.say()
            os.kill(os.getpid(), signal.SIGKILL)
        os.wait()
        if not sys.stdin.readline():
            return


if __name__ == "__main__":
    main()
