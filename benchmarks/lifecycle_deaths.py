"""What a death costs: a session taken over from a dead worker, and a daemon that is started again."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.lifecycle_world import PRINT, Daemon, daemon, daemon_folder, history_of, stored_session
from benchmarks.report import Row
from benchmarks.timing import timed
from compute.attach import Attachment
from compute.client import Client
from compute.device import Device
from compute.history import History
from compute.session import HostSession
from protocol.layout import PAGE_TOKENS, Q8G64, PageFormat
from protocol.model import GLM_5_3

GIB = 1 << 30
SHM = Path("/dev/shm")
ROUNDS = 5
HOT_ROWS = 32_768
WARM_UP = replace(GLM_5_3, num_hidden_layers=3).page_format(Q8G64)


def takeover(device: Device, page_format: PageFormat, tokens: int) -> Iterator[Row]:
    """From a death that has been seen to a history that can decode: its extents mapped, its index keys in VRAM.

    The worker has taken over a session of another page size before: its kernels are loaded. The first time the extents
    are mapped and registered too; later ones find them mapped, as a worker does that has other sessions in them.
    Computing the rows that were not committed again, at most a page of them, is the model's.
    """
    host_bytes = GIB + (-(-tokens // PAGE_TOKENS) + 64) * page_format.stride
    hot_rows = HOT_ROWS if device.torch_device.type == "cuda" else 2048
    seconds = []
    with (
        daemon(device, host_bytes, SHM, vram="8GiB") as (client, process),
        Attachment(client, device) as attachment,
    ):
        _let_die(client, process, WARM_UP, 200)
        _take_over(attachment, WARM_UP, hot_rows).close()
        for _ in range(ROUNDS):
            _let_die(client, process, page_format, tokens)
            taken: list[History] = []
            seconds.append(timed(lambda: taken.append(_take_over(attachment, page_format, hot_rows))))  # noqa: B023
            taken[0].close()
    yield Row(f"takeover of {tokens:,} tokens, extents not mapped yet", seconds[0], "s", goal=1.0)
    yield Row(f"takeover of {tokens:,} tokens", statistics.median(seconds[1:]), "s", goal=1.0)


def _let_die(client: Client, process: Daemon, page_format: PageFormat, tokens: int) -> None:
    """Have a worker hold the session and kill it; returns when the daemon has seen that."""
    arguments = [str(process.run_dir), str(page_format.payload_bytes), str(tokens)]
    victim = subprocess.Popen([sys.executable, "-m", "benchmarks.lifecycle_deaths", *arguments], stdout=subprocess.PIPE)
    assert victim.stdout is not None
    with victim.stdout:
        assert victim.stdout.readline() == b"holding\n"
    victim.kill()
    victim.wait()
    while len(client.stat().leases) > 1:
        time.sleep(0.001)


def _take_over(attachment: Attachment, page_format: PageFormat, hot_rows: int) -> History:
    session = HostSession.open(attachment, "victim", page_format, fingerprint=PRINT)
    history = history_of(attachment, page_format, session, hot_rows=hot_rows)
    history.restore(session.committed_rows)
    attachment.device.synchronize()
    return history


def restart(device: Device, page_format: PageFormat, gib: int) -> Iterator[Row]:
    """A daemon killed with its host tier full of extents and a session in it, and the next one until it answers."""
    seconds = []
    with daemon_folder(device, gib * GIB, SHM) as process:
        started = time.perf_counter()
        client = process.start()
        first = time.perf_counter() - started
        pages = min(gib * GIB // 2 // page_format.stride, 4096)
        held = stored_session(client, "kept", page_format.payload_bytes, pages * PAGE_TOKENS)
        client.detach_session(held.session, held.generation)
        before = _books(client)
        client.close()
        for _ in range(ROUNDS):
            process.kill()
            started = time.perf_counter()
            client = process.start()
            seconds.append(time.perf_counter() - started)
            if _books(client) != before:
                raise AssertionError(f"taken up: {_books(client)}; left: {before}")
            client.close()
    name = f"restart of a daemon, {gib} GiB of host RAM"
    yield Row(f"{name} made anew", first, "s")
    yield Row(f"{name} and {pages:,} pages taken up", statistics.median(seconds), "s", goal=2.0 if gib <= 8 else 5.0)


def _books(client: Client) -> tuple[object, ...]:
    stats = client.stat()
    [host] = [tier for tier in stats.tiers if tier.tier == "host"]
    return host.committed, [(session.name, session.committed_rows, session.pages) for session in stats.sessions]


def _hold() -> None:
    """A worker that is to be killed: it holds a session of committed rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("page_bytes", type=int)
    parser.add_argument("tokens", type=int)
    parsed = parser.parse_args()
    with Client(parsed.run_dir, name="victim") as client:
        stored_session(client, "victim", parsed.page_bytes, parsed.tokens)
        sys.stdout.write("holding\n")
        sys.stdout.flush()
        time.sleep(600)


if __name__ == "__main__":
    _hold()
