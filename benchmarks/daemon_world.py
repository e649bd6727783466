"""A daemon for benches, and clients that ask it without more than a socket each."""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from compute.client import Client
from protocol import codec
from protocol.errors import DaemonUnavailable
from protocol.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, Hello, Stat


class Daemon:
    """``kvd run`` on the device ``cpu``, with ``settings`` as flags; ``started`` is when its process was made."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.run_dir = folder / "run"
        self.run_dir.mkdir(mode=0o700)
        flags = {
            "run-dir": str(self.run_dir),
            "device": "cpu",
            "drain-timeout-s": "0",
            "log-level": "warning",
            "metrics-listen": f"unix:{self.run_dir}/metrics.sock",
            **settings,
        }
        command = [sys.executable, "-m", "kvd", "run"]
        self.started = time.perf_counter()
        self.process = subprocess.Popen([*command, *(part for name in flags for part in (f"--{name}", flags[name]))])

    def client(self, name: str = "kvd-bench") -> Client:
        """A client, as soon as the daemon answers."""
        while True:
            try:
                return Client(self.run_dir, name=name)
            except DaemonUnavailable:
                if self.process.poll() is not None:
                    raise
                time.sleep(0.002)

    def resident_bytes(self) -> int:
        """``RssAnon`` and ``RssFile`` of its process: all but shared memory."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return sum(1024 * int(kib) for kib in re.findall(r"^Rss(?:Anon|File):\s+(\d+) kB$", text, re.MULTILINE))

    def cpu_seconds(self) -> float:
        """CPU time that its process has used, all threads: what it costs, whatever else runs on the machine."""
        text = Path(f"/proc/{self.process.pid}/stat").read_text()
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def scrape(self) -> tuple[float, int]:
        """Seconds that ``/metrics`` takes, and its bytes."""
        connection = http.client.HTTPConnection("kvd", timeout=30)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.run_dir / "metrics.sock"))
        started = time.perf_counter()
        connection.request("GET", "/metrics")
        text = connection.getresponse().read()
        taken = time.perf_counter() - started
        connection.close()
        return taken, len(text)


@contextmanager
def daemon(**settings: str) -> Iterator[Daemon]:
    """A `Daemon`, stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        running = Daemon(Path(folder), **settings)
        try:
            yield running
        finally:
            running.process.terminate()
            running.process.wait()


class Askers:
    """Connections of the control socket, each of which has said hello."""

    def __init__(self, run_dir: Path, count: int) -> None:
        self._context = zmq.Context()
        self.sockets = []
        self._seq = [1] * count
        for _ in range(count):
            connection = self._context.socket(zmq.DEALER)
            connection.setsockopt(zmq.LINGER, 0)
            connection.connect(f"ipc://{run_dir}/kvd.sock")
            connection.send(codec.encode(Hello(1, PROTOCOL_MAJOR, PROTOCOL_MINOR, "kvd-bench")))
            self.sockets.append(connection)
        for connection in self.sockets:
            connection.recv()
        self.ask(0)
        self.reply_bytes = len(self.sockets[0].recv())
        """Size of an answer."""

    def ask(self, index: int) -> None:
        """Send a `Stat` on connection ``index``."""
        self._seq[index] += 1
        self.sockets[index].send(codec.encode(Stat(self._seq[index])))

    def round_trip(self, index: int) -> float:
        """Seconds until a `Stat` on connection ``index`` is answered, nobody else asking."""
        started = time.perf_counter()
        self.ask(index)
        self.sockets[index].recv()
        return time.perf_counter() - started

    def close(self) -> None:
        for connection in self.sockets:
            connection.close()
        self._context.term()


class Echo:
    """A process that answers every message with as many bytes as it is told: what ZeroMQ itself takes."""

    def __init__(self, reply_bytes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvd-bench-")
        path = f"ipc://{self._folder.name}/echo"
        self._process = subprocess.Popen([sys.executable, "-c", _ECHO, path, str(reply_bytes)])
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(path)
        self.round_trip()

    def round_trip(self) -> float:
        """Seconds until a message is answered."""
        started = time.perf_counter()
        self._socket.send(b"x" * 20)
        self._socket.recv()
        return time.perf_counter() - started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()
        self._context.term()
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()


_ECHO = """
import sys, zmq
router = zmq.Context().socket(zmq.ROUTER)
router.bind(sys.argv[1])
answer = bytes(int(sys.argv[2]))
poller = zmq.Poller()
poller.register(router, zmq.POLLIN)
while poller.poll():
    identity, _ = router.recv_multipart()
    router.send_multipart([identity, answer])
"""
