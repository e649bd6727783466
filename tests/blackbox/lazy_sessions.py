"""Sessions that come from disk page by page: a daemon that takes its time, and who holds them."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compute.client import Client
from protocol.daemon_block import read_daemon_block, split_entries
from protocol.layout import PAGE_TOKENS
from protocol.messages import SessionOpened
from protocol.session_state import WorkerBlock, WorkerBlockLayout
from protocol.stats import SessionStats
from tests.blackbox.daemon_process import DaemonProcess, clean_environment
from tests.blackbox.raw import FINGERPRINT

PAGES, STRIDE = 12, 8192
PAGE_BYTES = 5000
ROWS = PAGES * PAGE_TOKENS - 10
OLD = b"\xee" * STRIDE
"""What is in frames that are given again."""
FOREVER = 30.0


@contextmanager
def lazy_daemon(run_dir: Path, pause: float = 0.0, nth: int = 0, vram: str = "64MiB") -> Iterator[DaemonProcess]:
    command = [sys.executable, "-m", "tests.blackbox.lazy_daemon", str(pause), str(nth)]
    settings = {"drain_timeout_s": "0", "disk_state_dir": str(run_dir / "state"), "vram_capacity": vram}
    with DaemonProcess(run_dir, command, **settings) as process:
        yield process.wait_ready()
        if process.process.poll() is None:
            assert process.stat().ledger == "balanced"
            process.stop()
            assert '"exception"' not in process.log


def state_file(run_dir: Path, name: str = "long") -> Path:
    return run_dir / "state" / f"{os.getuid()}-{name}.kvd"


def content(page: int, name: str = "long") -> bytes:
    return f"{name} page {page} ".encode().ljust(PAGE_BYTES, b"\x5a").ljust(STRIDE, b"\0")


def make_held(client: Client, name: str) -> tuple[SessionOpened, tuple[int, ...]]:
    """A session of `ROWS` rows, and its frames."""
    opened = client.create_session(
        name, fingerprint=FINGERPRINT, encoding="q8g64", page_bytes=PAGE_BYTES, token_capacity=4096, commit_bytes=8
    )
    changed = client.extend_session(opened.session, 1, PAGES)
    extents.update((extent.number, client.claim(extent.memory)) for extent in changed.extents)
    frames, _ = table(client, opened)
    for page, frame in enumerate(frames):
        os.pwrite(extents[frame >> 32], content(page, name), (frame & 0xFFFFFFFF) * STRIDE)
    worker = client.claim(opened.worker_block)
    with mmap.mmap(worker, opened.worker_block.nbytes) as mapped:
        block = WorkerBlock(memoryview(mapped), WorkerBlockLayout(4096, 8), opened.session)
        block.append_tokens(range(ROWS), b"sampler")
        block.publish_commit(1, ROWS, b"hidden")
        block.release()
    os.close(worker)
    return opened, frames


def make_saved(client: Client, name: str = "long") -> None:
    """A saved session of `ROWS` rows that is not in memory."""
    opened, frames = make_held(client, name)
    client.save_session(name)
    for frame in frames:
        os.pwrite(extents[frame >> 32], OLD, (frame & 0xFFFFFFFF) * STRIDE)
    client.close_session(opened.session, 1)


daemon_blocks: dict[int, int] = {}
extents: dict[int, int] = {}
"""Descriptors by number; a daemon names each extent once to a lease."""


def table(client: Client, opened: SessionOpened) -> tuple[tuple[int, ...], set[int]]:
    """Frames and absent pages, as a holder reads them."""
    fd = daemon_blocks.get(opened.session)
    if fd is None:
        fd = daemon_blocks[opened.session] = client.claim(opened.daemon_block)
    _, entries = read_daemon_block(os.pread(fd, opened.daemon_block.nbytes, 0))
    return split_entries(entries)


@pytest.fixture(autouse=True)
def close_descriptors() -> Iterator[None]:
    yield
    forget_descriptors()


def forget_descriptors() -> None:
    """They are of a daemon, or a client, that has ended."""
    for kept in (daemon_blocks, extents):
        while kept:
            os.close(kept.popitem()[1])


class Holder:
    """A session that was opened without waiting for its pages; ``again``: under the daemon before this one."""

    def __init__(self, client: Client, name: str = "long", *, again: bool = False) -> None:
        self.client = client
        if again:
            self.opened = client.reattach_session(name)
        else:
            self.opened = client.open_session(name, fingerprint=FINGERPRINT, encoding="q8g64", lazy=True)
        extents.update((extent.number, client.claim(extent.memory)) for extent in self.opened.extents)

    def fetch(self, first: int, pages: int = 1) -> None:
        self.client.fetch_pages(self.opened.session, self.opened.generation, first, pages)

    @property
    def absent(self) -> set[int]:
        return table(self.client, self.opened)[1]

    def page(self, page: int) -> bytes:
        frame = table(self.client, self.opened)[0][page]
        return os.pread(extents[frame >> 32], STRIDE, (frame & 0xFFFFFFFF) * STRIDE)

    def let_go(self, *, close: bool = True) -> None:
        verb = self.client.close_session if close else self.client.detach_session
        verb(self.opened.session, self.opened.generation)


def restore(client: Client, name: str = "long", *, lazy: bool = True) -> None:
    client.restore_session(name, fingerprint=FINGERPRINT, encoding="q8g64", lazy=lazy)


def session(daemon: DaemonProcess, name: str = "long") -> SessionStats:
    [found] = [each for each in daemon.stat().sessions if each.name == name]
    return found


def until_whole(daemon: DaemonProcess) -> None:
    deadline = time.monotonic() + FOREVER
    while session(daemon).absent_pages:
        assert time.monotonic() < deadline, "the pages never came"
        time.sleep(0.01)


def kvd(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvd", arguments[0], "--run-dir", str(run_dir), *arguments[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean_environment())
