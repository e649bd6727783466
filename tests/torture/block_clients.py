"""Clients of the block store that are killed at any moment, and now and then their daemon: ``python -m`` this file.

Several processes put and get chains at once. The bytes of a block are those of its key, so whoever finds one that is
not whole, or another's, says so by its exit status. After every death of a client nothing that it wrote or pinned is
left, and everybody else goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from compute.block_store import BlockStore
from protocol.errors import DaemonUnavailable, OutOfCapacity
from tests.blackbox.daemon_process import DaemonProcess
from tests.trials import report

FINGERPRINT = bytes(range(32))
BLOCK = 20_000
NAMES = 40
LONGEST = 120
CLIENTS = 3
WRONG = 7
"""Exit status of a client that found wrong bytes."""


def keys_of(name: int, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {index}".encode()).digest() for index in range(count)]


def content(key: bytes) -> bytes:
    return key * (BLOCK // 32)


def client(run_dir: Path, seed: int) -> NoReturn:
    """A forked process that puts and gets until it is killed."""
    rng = random.Random(seed)
    status = 1
    try:
        store = connected(run_dir)
        while True:
            try:
                act(store, rng)
            except OutOfCapacity:
                continue
            except DaemonUnavailable:
                reconnect(store)
    except AssertionError as error:
        sys.stderr.write(f"client {os.getpid()}: {error}\n")
        status = WRONG
    except BaseException as error:  # noqa: BLE001 - it is a process, and says how it ended
        sys.stderr.write(f"client {os.getpid()}: {error!r}\n")
    finally:
        os._exit(status)


def connected(run_dir: Path) -> BlockStore:
    while True:
        with suppress(DaemonUnavailable):
            return BlockStore(run_dir, fingerprint=FINGERPRINT, block_bytes=BLOCK, timeout_s=60)
        time.sleep(0.01)


def reconnect(store: BlockStore) -> None:
    while True:
        with suppress(DaemonUnavailable):
            store.reconnect()
            return
        time.sleep(0.01)


def act(store: BlockStore, rng: random.Random) -> None:
    keys = keys_of(rng.randrange(NAMES), rng.randrange(1, LONGEST))
    if rng.random() < 0.5:
        with store.reserve(keys) as reservation:
            for key, view in zip(reservation.keys, reservation.views, strict=True):
                view[: len(content(key))] = content(key)
            if rng.random() < 0.8:
                reservation.publish(reservation.keys[: rng.randrange(len(reservation.keys) + 1)])
        return
    with store.pin(keys) as pinned:
        for key, view in zip(keys, pinned.views, strict=False):
            assert bytes(view[: len(content(key))]) == content(key), "a block has bytes that are not its own"


class Trial:
    def __init__(self, folder: Path, seed: int) -> None:
        self._rng = random.Random(seed)
        self._run_dir = folder
        self._clients: set[int] = set()
        self._daemon = self._start()
        self.deaths = self.daemons = self.stored = 0

    def round(self, *, kill_daemon: bool) -> None:
        """One death, or that of the daemon and then one."""
        while len(self._clients) < CLIENTS:
            seed = self._rng.getrandbits(64)
            pid = os.fork()
            if pid == 0:
                client(self._run_dir, seed)
            self._clients.add(pid)
        time.sleep(self._rng.uniform(0.02, 0.12))
        if kill_daemon:
            self._daemon.process.kill()
            self._daemon.process.wait()
            self._daemon = self._start()
            self.daemons += 1
            time.sleep(self._rng.uniform(0, 0.2))
        self._kill(self._rng.choice(sorted(self._clients)))
        self.deaths += 1

    def check(self) -> None:
        """With nobody there, nothing is in use."""
        for pid in list(self._clients):
            self._kill(pid)
        deadline = time.monotonic() + 60
        while (stats := self._daemon.stat()).leases:
            assert time.monotonic() < deadline, f"leases of dead processes: {stats.leases}"
            time.sleep(0.01)
        assert stats.ledger == "balanced"
        assert all(space.pinned == space.writing == 0 for space in stats.blocks), stats.blocks
        self.stored = sum(space.stored for space in stats.blocks)

    def end(self) -> None:
        for pid in list(self._clients):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self._daemon.__exit__(None, None, None)

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        self._clients.remove(pid)
        assert os.WIFSIGNALED(status), f"client {pid} ended by itself with {os.waitstatus_to_exitcode(status)}"

    def _start(self) -> DaemonProcess:
        # Less room than all chains take, so that blocks are evicted.
        sizes = {"host_capacity": "32MiB", "host_extent": "4MiB", "drain_timeout_s": "0"}
        return DaemonProcess(self._run_dir, **sizes).wait_ready()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deaths", type=int, default=1000, help="clients that are killed (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvd-torture-", dir="/tmp") as folder:
        trial = Trial(Path(folder), arguments.seed)
        try:
            for number in range(1, arguments.deaths + 1):
                trial.round(kill_daemon=not number % 20)
                if not number % 25:
                    trial.check()
            trial.check()
        finally:
            trial.end()
        report("clients of the block store killed", trial.deaths, daemons_killed=trial.daemons, stored=trial.stored)
    return 0


if __name__ == "__main__":
    sys.exit(main())
