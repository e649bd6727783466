"""What sessions cost beside decoding: barrier, save, restore, fork.

Runs against daemons of its own. The rows of the sessions are not computed: pages are whatever their memory has, and the
figures do not depend on it. Saving and restoring are measured in turns with ``dd``: on disk with a plain write (with
fsync) and a plain read (the page cache dropped) of as many bytes in the same directory, on tmpfs with a plain copy into
a fresh file.
"""

from __future__ import annotations

import argparse
import mmap
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.report import Report, Row
from compute.attach import Attachment
from compute.client import Client
from compute.device import Device, open_device
from compute.history import History
from compute.index_keys import KeyBlocks
from compute.session import HostSession
from protocol.errors import DaemonUnavailable
from protocol.layout import PAGE_TOKENS, Q8G64, PageFormat
from protocol.messages import SessionOpened
from protocol.model import GLM_5_3
from protocol.session_state import WorkerBlock, WorkerBlockLayout

FORK_TOKENS = 1 << 20
RING_PAGES = 8
PRINT = bytes(32)
ROUNDS = 3


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``kvd-bench lifecycle``."""
    parser.add_argument("--device", default="cuda", help="cpu or cuda (default %(default)s)")
    parser.add_argument("--layers", type=int, default=78, help="layers of GLM-5.3 in a page (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=50_000, help="tokens of the session (default %(default)s)")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="where to save (default %(default)s)")


def run(arguments: argparse.Namespace) -> Report:
    """All cases, or those that ``--only`` names."""
    page_format = replace(GLM_5_3, num_hidden_layers=arguments.layers).page_format(Q8G64)
    device = open_device(arguments.device)
    rows: list[Row] = []
    if arguments.only in "barrier save restore disk":
        rows += _copies(device, page_format, arguments.tokens, arguments.directory, "disk")
    if arguments.only in "save restore tmpfs":
        rows += _copies(device, page_format, arguments.tokens, Path("/dev/shm"), "tmpfs")
    if arguments.only in "fork":
        rows += _fork(device)
    name = torch.cuda.get_device_name() if arguments.device != "cpu" else platform.processor() or platform.machine()
    settings = {
        "device": arguments.device,
        "layers": arguments.layers,
        "page_stride": page_format.stride,
        "tokens": arguments.tokens,
        "directory": str(arguments.directory),
        "rounds": ROUNDS,
        "cpus": len(os.sched_getaffinity(0)),
    }
    return Report("lifecycle", name, settings, rows)


@contextmanager
def _daemon(device: Device, host_bytes: int, directory: Path) -> Iterator[tuple[Client, Path]]:
    """A client of a daemon, and the directory that it saves in."""
    kind = "cpu" if device.torch_device.type == "cpu" else "cuda"
    gib = -(-host_bytes // (1 << 30))
    with tempfile.TemporaryDirectory(prefix="kvd-bench-", dir=directory) as folder:
        run_dir, state_dir = Path(folder) / "run", Path(folder) / "state"
        run_dir.mkdir(mode=0o700)
        command = [sys.executable, "-m", "kvd", "run", "--run-dir", str(run_dir), "--device", kind]
        command += ["--host-capacity", f"{gib}GiB", "--vram-capacity", "1GiB", "--disk-state-dir", str(state_dir)]
        daemon = subprocess.Popen([*command, "--drain-timeout-s", "0", "--log-level", "warning"])
        try:
            with _client(run_dir, daemon) as client:
                yield client, state_dir
        finally:
            daemon.terminate()
            daemon.wait()


def _client(run_dir: Path, daemon: subprocess.Popen[bytes]) -> Client:
    while True:
        try:
            return Client(run_dir, name="kvd-bench lifecycle")
        except DaemonUnavailable:
            if daemon.poll() is not None:
                raise
            time.sleep(0.01)


def _copies(device: Device, page_format: PageFormat, tokens: int, directory: Path, where: str) -> Iterator[Row]:
    """Barrier (on disk only), save and restore of one session."""
    pages = -(-tokens // PAGE_TOKENS)
    # Room for the session, and for what its history asks ahead of need.
    with (
        _daemon(device, (pages + 64) * page_format.stride, directory) as (client, state_dir),
        Attachment(client, device) as attachment,
    ):
        history = _history(attachment, page_format, tokens)
        if where == "disk":
            label = f"barrier of {tokens:,} tokens, idle"
            yield Row(
                label, 1e3 * _median(lambda: history.barrier(torch.zeros(page_format.hidden_size))), "ms", goal=5.0
            )
        save_s, write_s, restore_s, read_s = [], [], [], []
        nbytes = 0
        for _ in range(ROUNDS):
            path = state_dir.parent / "plain"
            save_s.append(_timed(lambda: client.save_session("bench")))
            [saved] = state_dir.glob("*.kvd")
            nbytes = saved.stat().st_size
            if where == "disk":
                write_s.append(_timed(partial(_plain_write, path, nbytes)))
                _drop_from_cache(path)
                read_s.append(_timed(partial(_plain_read, path)))
            else:
                write_s.append(_timed(partial(_plain_copy, saved, path)))
                read_s.append(write_s[-1])
            path.unlink()
            history.close()
            _drop_from_cache(saved)
            restore_s.append(
                _timed(lambda: client.restore_session("bench", fingerprint=PRINT, encoding=page_format.encoding.name))
            )
            session = HostSession.open(attachment, "bench", page_format, fingerprint=PRINT)
            history = _history_of(attachment, page_format, session)
        history.close()
    share = 0.8 if where == "disk" else 0.6
    for what, ours, plain in (("save", save_s, write_s), ("restore", restore_s, read_s)):
        rate, floor = (nbytes / statistics.median(times) / 1e9 for times in (ours, plain))
        yield Row(f"{what} {nbytes / 1e9:.2f} GB, {where}", rate, "GB/s", floor=floor, goal=share * floor)


def _history(attachment: Attachment, page_format: PageFormat, tokens: int) -> History:
    """A history of as many rows, whose pages have been copied to host RAM."""
    session = HostSession.create(
        attachment,
        "bench",
        page_format,
        fingerprint=PRINT,
        token_capacity=tokens,
        commit_bytes=4 * page_format.hidden_size,
    )
    history = _history_of(attachment, page_format, session)
    step = (RING_PAGES - 1) * PAGE_TOKENS
    for start in range(0, tokens, step):
        count = min(step, tokens - start)
        session.state.append_tokens(range(start, start + count))
        positions = history.begin(count, cached=False)
        history.finish(positions, torch.zeros(count, page_format.hidden_size, device=positions.device))
    history.barrier()
    return history


def _history_of(attachment: Attachment, page_format: PageFormat, session: HostSession) -> History:
    return History(
        attachment,
        page_format,
        KeyBlocks(attachment, page_format),
        session,
        max_tokens=session.token_capacity,
        topk=GLM_5_3.index_topk,
        ring_pages=RING_PAGES,
        caches=None,
        session=session,
    )


def _fork(device: Device) -> Iterator[Row]:
    """Fork of a session of 1M tokens with pages of 4 KiB: its cost is in counting pages, not in their bytes."""
    with _daemon(device, FORK_TOKENS // PAGE_TOKENS * 4096, Path("/dev/shm")) as (client, _):
        opened = client.create_session(
            "source", fingerprint=PRINT, encoding="q8g64", page_bytes=4096, token_capacity=FORK_TOKENS
        )
        client.extend_session(opened.session, opened.generation, FORK_TOKENS // PAGE_TOKENS)
        _commit_all(client, opened)
        times = []
        for index in range(10):
            started = time.perf_counter()
            fork = client.fork_session(opened.session, opened.generation, FORK_TOKENS, f"fork-{index}")
            times.append(time.perf_counter() - started)
            client.close_session(fork.session, fork.generation)
    yield Row("fork of 1M tokens, first", 1e3 * times[0], "ms")
    yield Row("fork of 1M tokens, median", 1e3 * statistics.median(times), "ms", goal=5.0)


def _commit_all(client: Client, opened: SessionOpened) -> None:
    """Acknowledge and commit as many tokens as the session may have."""
    fd = client.claim(opened.worker_block)
    with mmap.mmap(fd, opened.worker_block.nbytes) as mapped:
        block = WorkerBlock(memoryview(mapped), WorkerBlockLayout(FORK_TOKENS, 0), opened.session)
        block.append_tokens(range(FORK_TOKENS))
        block.publish_commit(opened.generation, FORK_TOKENS)
        block.release()
    os.close(fd)


def _plain_write(path: Path, nbytes: int) -> None:
    """Write as many bytes with ``dd``, until they are on disk."""
    mib = -(-nbytes // (1 << 20))
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=4M", f"count={mib // 4 + 1}", "conv=fsync", "status=none"]
    subprocess.run(command, check=True)


def _plain_copy(source: Path, target: Path) -> None:
    subprocess.run(["dd", f"if={source}", f"of={target}", "bs=4M", "status=none"], check=True)


def _plain_read(path: Path) -> None:
    subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=4M", "status=none"], check=True)


def _drop_from_cache(path: Path) -> None:
    """Have the next reading of the file come from the disk. Does nothing on tmpfs."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def _median(act: Callable[[], object], runs: int = 20) -> float:
    """Seconds of one run."""
    return statistics.median(_timed(act) for _ in range(runs))
