"""What sessions cost beside decoding: barrier, save, restore, fork, takeover, and a daemon that is started again.

Runs against daemons of its own. The rows of the sessions are not computed: pages are whatever their memory has, and the
figures do not depend on it. Saving and restoring are measured in turns with ``dd``: on disk with a plain write (with
fsync) and a plain read (the page cache dropped) of as many bytes in the same directory, on tmpfs with a plain copy into
a fresh file. ``benchmarks.lifecycle_deaths`` has takeover and restart.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks import lifecycle_deaths
from benchmarks.lifecycle_world import (
    PRINT,
    daemon,
    filled_history,
    history_of,
    stored_session,
)
from benchmarks.report import Report, Row
from benchmarks.timing import median, timed
from compute.attach import Attachment
from compute.client import Client
from compute.device import Device, open_device
from compute.session import HostSession
from protocol.layout import PAGE_TOKENS, Q8G64, PageFormat
from protocol.messages import SessionOpened
from protocol.model import GLM_5_3

FORK_TOKENS = 1 << 20
SOURCES = 5
ROUNDS = 3


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``kvd-bench lifecycle``."""
    parser.add_argument("--device", default="cuda", help="cpu or cuda (default %(default)s)")
    parser.add_argument("--layers", type=int, default=78, help="layers of GLM-5.3 in a page (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=50_000, help="tokens of the session (default %(default)s)")
    parser.add_argument("--gib", type=int, default=8, help="host RAM of the restart (default %(default)s)")
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
    if arguments.only in "takeover":
        rows += lifecycle_deaths.takeover(device, page_format, arguments.tokens)
    if arguments.only in "restart":
        rows += lifecycle_deaths.restart(device, page_format, arguments.gib)
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


def _copies(device: Device, page_format: PageFormat, tokens: int, directory: Path, where: str) -> Iterator[Row]:
    """Barrier (on disk only), save and restore of one session."""
    pages = -(-tokens // PAGE_TOKENS)
    # Room for the session, and for what its history asks ahead of need.
    with (
        daemon(device, (pages + 64) * page_format.stride, directory) as (client, process),
        Attachment(client, device) as attachment,
    ):
        state_dir = process.state_dir
        history = filled_history(attachment, page_format, "bench", tokens)
        if where == "disk":
            label = f"barrier of {tokens:,} tokens, idle"
            yield Row(
                label, 1e3 * median(lambda: history.barrier(torch.zeros(page_format.hidden_size))), "ms", goal=5.0
            )
        save_s, write_s, restore_s, read_s = [], [], [], []
        nbytes = 0
        for _ in range(ROUNDS):
            path = state_dir.parent / "plain"
            save_s.append(timed(lambda: client.save_session("bench")))
            [saved] = state_dir.glob("*.kvd")
            nbytes = saved.stat().st_size
            if where == "disk":
                write_s.append(timed(partial(_plain_write, path, nbytes)))
                _drop_from_cache(path)
                read_s.append(timed(partial(_plain_read, path)))
            else:
                write_s.append(timed(partial(_plain_copy, saved, path)))
                read_s.append(write_s[-1])
            path.unlink()
            history.close()
            _drop_from_cache(saved)
            restore_s.append(
                timed(lambda: client.restore_session("bench", fingerprint=PRINT, encoding=page_format.encoding.name))
            )
            session = HostSession.open(attachment, "bench", page_format, fingerprint=PRINT)
            history = history_of(attachment, page_format, session)
        history.close()
        _drop_from_cache(saved)
        opened: list[SessionOpened] = []
        open_s = timed(lambda: opened.append(_open_lazily(client, page_format)))
        client.close_session(opened[0].session, opened[0].generation)
    share = 0.8 if where == "disk" else 0.6
    for what, ours, plain in (("save", save_s, write_s), ("restore", restore_s, read_s)):
        rate, floor = (nbytes / statistics.median(times) / 1e9 for times in (ours, plain))
        yield Row(f"{what} {nbytes / 1e9:.2f} GB, {where}", rate, "GB/s", floor=floor, goal=share * floor)
    yield Row(f"restore --lazy {nbytes / 1e9:.2f} GB, {where}: open", 1e3 * open_s, "ms")


def _open_lazily(client: Client, page_format: PageFormat) -> SessionOpened:
    """A session that is there before its pages are."""
    encoding = page_format.encoding.name
    client.restore_session("bench", fingerprint=PRINT, encoding=encoding, lazy=True)
    return client.open_session("bench", fingerprint=PRINT, encoding=encoding, lazy=True)


def _fork(device: Device) -> Iterator[Row]:
    """Fork of a session of 1M tokens with pages of 4 KiB: its cost is in counting pages, not in their bytes."""
    pages = FORK_TOKENS // PAGE_TOKENS
    first: list[float] = []
    later: list[float] = []
    with daemon(device, (pages + 8) * 4096, Path("/dev/shm")) as (client, _):
        for source in range(SOURCES):
            opened = stored_session(client, f"source-{source}", 4096, FORK_TOKENS)
            for index in range(4):
                started = time.perf_counter()
                fork = client.fork_session(opened.session, opened.generation, FORK_TOKENS, f"fork-{index}")
                (later if index else first).append(time.perf_counter() - started)
                client.close_session(fork.session, fork.generation)
            client.close_session(opened.session, opened.generation)
    yield Row("fork of 1M tokens, the first of its source", 1e3 * statistics.median(first), "ms", goal=5.0)
    yield Row("fork of 1M tokens", 1e3 * statistics.median(later), "ms", goal=5.0)


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
