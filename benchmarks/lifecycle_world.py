"""What the lifecycle bench runs against: daemons of its own, and sessions whose rows are whatever memory has."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from compute.attach import Attachment
from compute.client import Client
from compute.device import Device
from compute.history import History
from compute.hot_cache import HotCaches
from compute.index_keys import KeyBlocks
from compute.session import HostSession
from protocol.errors import DaemonUnavailable
from protocol.layout import PAGE_TOKENS, PageFormat, round_up
from protocol.messages import SessionOpened
from protocol.model import GLM_5_3
from protocol.session_state import WorkerBlock, WorkerBlockLayout

PRINT = bytes(32)
RING_PAGES = 8


class Daemon:
    """``kvd run`` in ``folder``, started by `start` and ended by `stop` or `kill`."""

    def __init__(self, folder: Path, device: Device, host_bytes: int, *, vram: str = "1GiB") -> None:
        kind = "cpu" if device.torch_device.type == "cpu" else "cuda"
        self.run_dir, self.state_dir = folder / "run", folder / "state"
        self.run_dir.mkdir(mode=0o700)
        gib = -(-host_bytes // (1 << 30))
        command = [sys.executable, "-m", "kvd", "run", "--run-dir", str(self.run_dir), "--device", kind]
        command += ["--host-capacity", f"{gib}GiB", "--vram-capacity", vram, "--disk-state-dir", str(self.state_dir)]
        self._command = [*command, "--drain-timeout-s", "0", "--log-level", "error"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Client:
        """Returns a client when it answers."""
        self._process = subprocess.Popen(self._command)
        while True:
            try:
                return Client(self.run_dir, name="kvd-bench lifecycle")
            except DaemonUnavailable:
                if self._process.poll() is not None:
                    raise
                time.sleep(0.002)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


@contextmanager
def daemon(device: Device, host_bytes: int, directory: Path, *, vram: str = "1GiB") -> Iterator[tuple[Client, Daemon]]:
    """A client of a daemon that saves in a folder of its own in ``directory``."""
    with daemon_folder(device, host_bytes, directory, vram=vram) as process, process.start() as client:
        yield client, process


@contextmanager
def daemon_folder(device: Device, host_bytes: int, directory: Path, *, vram: str = "1GiB") -> Iterator[Daemon]:
    """A daemon that is not started yet."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-", dir=directory) as folder:
        process = Daemon(Path(folder), device, host_bytes, vram=vram)
        try:
            yield process
        finally:
            process.stop()


def filled_history(attachment: Attachment, page_format: PageFormat, name: str, tokens: int) -> History:
    """A history of as many rows, whose pages have been copied to host RAM."""
    session = HostSession.create(
        attachment,
        name,
        page_format,
        fingerprint=PRINT,
        token_capacity=tokens,
        commit_bytes=4 * page_format.hidden_size,
    )
    history = history_of(attachment, page_format, session)
    step = (RING_PAGES - 1) * PAGE_TOKENS
    for start in range(0, tokens, step):
        count = min(step, tokens - start)
        session.state.append_tokens(range(start, start + count))
        positions = history.begin(count, cached=False)
        history.finish(positions, torch.zeros(count, page_format.hidden_size, device=positions.device))
    history.barrier()
    return history


def history_of(attachment: Attachment, page_format: PageFormat, session: HostSession, *, hot_rows: int = 0) -> History:
    """A history over ``session``, with hot caches if it is to decode."""
    caches = None
    if hot_rows:
        caches = HotCaches(
            attachment,
            page_format,
            slots=hot_rows,
            max_tokens=round_up(session.token_capacity, PAGE_TOKENS),
            topk=GLM_5_3.index_topk,
            session=session.number,
        )
    return History(
        attachment,
        page_format,
        KeyBlocks(attachment, page_format),
        session,
        max_tokens=session.token_capacity,
        topk=GLM_5_3.index_topk,
        ring_pages=RING_PAGES,
        caches=caches,
        session=session,
    )


def stored_session(client: Client, name: str, page_bytes: int, tokens: int) -> SessionOpened:
    """A session that ``client`` holds, with as many tokens acknowledged and rows committed as it may have."""
    opened = client.create_session(
        name, fingerprint=PRINT, encoding="q8g64", page_bytes=page_bytes, token_capacity=tokens
    )
    client.extend_session(opened.session, opened.generation, -(-tokens // PAGE_TOKENS))
    fd = client.claim(opened.worker_block)
    with mmap.mmap(fd, opened.worker_block.nbytes) as mapped:
        block = WorkerBlock(memoryview(mapped), WorkerBlockLayout(tokens, 0), opened.session)
        block.append_tokens(range(tokens))
        block.publish_commit(opened.generation, tokens)
        block.release()
    os.close(fd)
    return opened
