"""Serves metrics and probes over HTTP, on loopback or a UNIX socket, in threads of its own.

A scrape asks the loop for a snapshot, at most once a second however many ask; turning it into text happens here. So a
scrape costs the loop less than one ``kvd-stat``, and a client that hangs costs it nothing.

| path | 200 | 503 |
|---|---|---|
| ``/metrics`` | the metrics, as Prometheus text | not serving yet, or the loop gives no answer |
| ``/healthz`` | starting, or the loop answers and the books add up | otherwise |
| ``/readyz`` | the daemon takes new work | starting, draining, or not healthy |
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from kvd.logs import Log
from kvd.loop import Loop
from kvd.metrics.exporter import Snapshot, families, session_text, take_snapshot
from kvd.metrics.stall_watch import StallWatch
from kvd.node import BALANCED, Node
from kvd.settings import UNIX
from protocol.errors import OsFailure
from protocol.unix_socket import remove_stale

FRESH_S = 1.0
"""A snapshot that is younger is not taken again."""
ANSWER_TIMEOUT_S = 5.0
"""How long the loop may take to answer."""
CLIENT_TIMEOUT_S = 5.0
"""How long a client may take to ask, and to take its answer."""
MOST_CLIENTS = 8
"""Connections at the same time; more are closed at once, so that they cannot use up the daemon's descriptors."""


class Unavailable(Exception):
    """There is no snapshot to be had; the message says why."""


class Exchange:
    """Where threads get snapshots from the loop, which takes them when it is woken."""

    def __init__(self) -> None:
        self._wake, self._wakes = socket.socketpair()
        self._wake.setblocking(False)
        self._wakes.setblocking(False)
        self._changed = threading.Condition()
        self._latest: Snapshot | None = None
        self._taken_at = 0.0
        self._take: Callable[[], Snapshot] | None = None

    @property
    def wake(self) -> int:
        """The descriptor for the loop to watch, with `answer`."""
        return self._wake.fileno()

    def open(self, take: Callable[[], Snapshot]) -> None:
        """The loop runs from now on, and takes snapshots with ``take``."""
        self._take = take

    def answer(self) -> None:
        """In the loop: take a snapshot for those who wait."""
        self._wake.recv(4096)
        if self._take is None:
            return
        snapshot = self._take()
        with self._changed:
            self._latest, self._taken_at = snapshot, time.monotonic()
            self._changed.notify_all()

    def snapshot(self) -> Snapshot:
        """In any thread: a fresh snapshot. Raises `Unavailable` before the loop runs, or if it does not answer."""
        if not self.is_open:
            raise Unavailable("starting: host RAM is being taken")
        with self._changed:
            if not self._is_fresh():
                with suppress(BlockingIOError):  # it has been woken often enough
                    self._wakes.send(b"\0")
                self._changed.wait_for(self._is_fresh, ANSWER_TIMEOUT_S)
            if self._latest is None or not self._is_fresh():
                raise Unavailable(f"the loop has given no answer for {ANSWER_TIMEOUT_S:g} s")
            return self._latest

    @property
    def is_open(self) -> bool:
        return self._take is not None

    def close(self) -> None:
        self._wake.close()
        self._wakes.close()

    def _is_fresh(self) -> bool:
        return self._latest is not None and time.monotonic() - self._taken_at < FRESH_S


class MetricsServer:
    """Listens at ``address``, as ``metrics.listen`` has it, until `close`. Raises `OsFailure` if that is not free.

    ``path`` is the UNIX socket's, None for another.
    """

    def __init__(self, address: str, loop: Loop, log: Log) -> None:
        self._exchange = Exchange()
        try:
            self._server = _Server(address, self._exchange, log)
        except OSError as error:
            self._exchange.close()
            raise OsFailure(f"metrics.listen {address}: {error.strerror or error}", address=address) from error
        loop.watch(self._exchange.wake, self._exchange.answer)
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.1], name="metrics", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path | None:
        return self._server.path

    def open(self, node: Node, stall_watch: StallWatch | None) -> None:
        """The loop is about to run: there is something to serve."""
        self._exchange.open(partial(take_snapshot, node, stall_watch))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._exchange.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: str, exchange: Exchange, log: Log) -> None:
        self.exchange = exchange
        self.path: Path | None = None
        self._log = log
        self._slots = threading.BoundedSemaphore(MOST_CLIENTS)
        where: Any
        if address.startswith(UNIX):
            self.address_family = socket.AF_UNIX
            path = Path(address.removeprefix(UNIX))
            remove_stale(path)
            where = str(path)
        else:
            host, _, port = address.rpartition(":")
            host = host.strip("[]")
            self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            where = (host, int(port))
        super().__init__(where, _Handler)
        if self.address_family == socket.AF_UNIX:
            self.path = Path(where)

    def server_bind(self) -> None:
        """Without looking up the host's name, which can take long and is not needed."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """A client that went away, or did not ask in time, is nobody's fault."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self._log.error("metrics request failed", exc_info=error)

    def server_close(self) -> None:
        super().server_close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_TIMEOUT_S

    def do_GET(self) -> None:
        answers = {"/metrics": self._metrics, "/healthz": self._health, "/readyz": self._readiness}
        answer = answers.get(self.path.partition("?")[0])
        if answer is None:
            self._send(HTTPStatus.NOT_FOUND, f"no such page; there is {', '.join(answers)}\n")
            return
        try:
            answer()
        except Unavailable as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n")

    def _metrics(self) -> None:
        snapshot = self.server.exchange.snapshot()
        registry = CollectorRegistry()
        registry.register(_Families(snapshot))
        ProcessCollector(registry=registry)
        text = generate_latest(registry) + session_text(snapshot.stats.sessions).encode()
        self._send(HTTPStatus.OK, text, CONTENT_TYPE_PLAIN_0_0_4)

    def _health(self) -> None:
        if not self.server.exchange.is_open:
            self._send(HTTPStatus.OK, "starting\n")
            return
        ledger = self.server.exchange.snapshot().stats.ledger
        status = HTTPStatus.OK if ledger == BALANCED else HTTPStatus.SERVICE_UNAVAILABLE
        self._send(status, f"ledger {ledger}\n")

    def _readiness(self) -> None:
        stats = self.server.exchange.snapshot().stats
        if stats.draining or stats.ledger != BALANCED:
            raise Unavailable("draining" if stats.draining else f"ledger {stats.ledger}")
        self._send(HTTPStatus.OK, "serving\n")

    def _send(self, status: HTTPStatus, body: str | bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Scrapes are not worth a line each."""

    def address_string(self) -> str:
        return "local"


class _Families(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> list[Metric]:
        return list(families(self._snapshot))
