"""``kvd run``: start, serve, take up changed settings, drain, leave nothing behind."""

from __future__ import annotations

import gc
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import zmq

from kvd import __version__, logs
from kvd.config import Config
from kvd.handle_socket import HandleSocket
from kvd.kept_limits import KeptLimits
from kvd.logs import Log
from kvd.loop import Loop
from kvd.metrics.stall_watch import StallWatch
from kvd.node import BALANCED, Node
from kvd.notify import Notifier
from kvd.run_dir import RunDir, shm_prefix
from kvd.server import ControlServer
from protocol.errors import ConfigError, OsFailure
from protocol.messages import Reply

if TYPE_CHECKING:
    from kvd.metrics.server import MetricsServer

CHECK_INTERVAL_S = 1.0
PROGRESS_INTERVAL_S = 2.0
STEP_TIMEOUT_S = 30.0
"""How long a step of starting or stopping may go without a sign of progress."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Interrupted(Exception):
    """A signal to stop came before the daemon was ready."""


class Daemon:
    """One run of the daemon. `run` returns when it has drained; then no socket and no shared memory of it is left.

    ``reread`` reads all settings again, from where ``config`` came from.
    """

    def __init__(self, config: Config, log: Log, reread: Callable[[], Config]) -> None:
        self._config = config
        self._reread = reread
        self._log = log
        self._notifier = Notifier()
        self._loop = Loop(log)
        self._drain_until = 0.0
        self._wake_read, self._wake_write = socket.socketpair()
        self._metrics: MetricsServer | None = None
        self._last_progress = self._last_check = time.monotonic()
        self._stopping = self._reload_wanted = self._drain_wanted = self._save_wanted = False
        self._saving = self._serving = self._reloading = False
        self._hurried_by = 0

    def run(self) -> None:
        """Serve until a signal to stop, then drain. Raises the typed error of whatever keeps it from starting.

        Raises `SystemExit` with 128 + the number of a second signal, which ends it without waiting for leases.
        """
        try:
            self._serve()
        except _Interrupted:
            self._log.info("stopped before it was ready")
        if self._hurried_by:
            raise SystemExit(128 + self._hurried_by)

    def _serve(self) -> None:
        with ExitStack() as cleanup:
            self._watch_signals(cleanup)
            run_dir = RunDir(self._config)
            cleanup.callback(run_dir.close)
            prefix = shm_prefix(self._config.run_dir)
            self._kept = KeptLimits(Path(self._config.run_dir), self._log)
            self._config, slots = self._kept.apply(read := self._config)
            _raise_file_limit(self._config)
            self._open_metrics(run_dir, cleanup)
            self._node = Node(self._config, prefix, self._log, self._populated, slots)
            cleanup.callback(self._close_node)
            self._watch_settings(read)
            old_umask = os.umask(0o177)  # nobody else may connect before a socket has its group and mode
            try:
                self._open_sockets(cleanup)
            finally:
                os.umask(old_umask)
            run_dir.publish(self._config.handle_socket)
            run_dir.publish(self._config.control_socket)
            self._ready()
            self._loop.run()
            self._log.info("stopped", sessions=len(self._node.sessions), leases=len(self._node.leases))

    def _watch_settings(self, read: Config) -> None:
        """Take up what changes. ``read`` is what the settings say, without the limits that were kept."""
        live = self._node.live
        live.read = read
        live.require = _raise_file_limit

        def changed(config: Config) -> None:
            self._config = config
            logs.set_level(config.log.level)
            self._node.limit(config)
            self._server.listener.files_needed = config.files_needed
            self._kept.keep(live.read, config, self._node.host.slots)

        live.changed = changed

    def _open_metrics(self, run_dir: RunDir, cleanup: ExitStack) -> None:
        """Probes are answered from here on, metrics as soon as the loop runs."""
        address = self._config.metrics.listen
        if not address:
            return
        try:
            from kvd.metrics.server import MetricsServer
        except ImportError as error:
            raise ConfigError(f"metrics.listen needs the extra metrics: {error}", key="metrics.listen") from error
        old_umask = os.umask(0o177)
        try:
            self._metrics = MetricsServer(address, self._loop, self._log)
        finally:
            os.umask(old_umask)
        cleanup.callback(self._metrics.close)
        if self._metrics.path is not None:
            run_dir.publish(self._metrics.path)

    def _open_sockets(self, cleanup: ExitStack) -> None:
        config, loop, node = self._config, self._loop, self._node
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        cleanup.callback(context.term)
        self._handles = HandleSocket(config.handle_socket, loop, node, self._log)
        cleanup.callback(self._handles.close)
        self._server = ControlServer(
            config.control_socket, config.handle_socket, context, loop, node, config.files_needed, self._log
        )
        cleanup.callback(self._server.close)
        loop.watch(node.jobs.wake, node.jobs.resume)
        node.drain = self._drain
        loop.every(CHECK_INTERVAL_S, self._tick)
        watch = StallWatch() if config.stall_watch.interval_s else None
        node.gaps.watch = watch
        if watch is not None:
            loop.every(config.stall_watch.interval_s, watch.look)
        if self._metrics is not None:
            self._metrics.open(node, watch)

    def _ready(self) -> None:
        gc.collect()
        gc.freeze()  # what is there now stays: no later collection holds up the loop to look at it
        host, vram = self._config.host, self._config.vram
        self._log.info(
            "ready",
            version=__version__,
            run_dir=self._config.run_dir,
            device=[device.device for device in self._node.devices()],
            host_capacity=host.capacity,
            vram_capacity=vram.capacity,
            pid=os.getpid(),
        )
        self._serving = True
        self._notifier.send("READY=1", "STATUS=serving")

    def _close_node(self) -> None:
        """Give everything back. What an earlier run left stays for the next one if this one came to nothing."""
        if self._serving or not (len(self._node.sessions) or self._node.spaces.blocks):
            self._node.close()
            self._kept.remove()
        else:
            sessions, blocks = len(self._node.sessions), self._node.spaces.blocks
            self._log.warning("not started: what an earlier run left stays", sessions=sessions, blocks=blocks)

    def _populated(self, done: int, total: int) -> None:
        """Progress of taking host RAM, in the log; and while starting, the place where a signal to stop ends it."""
        if self._serving:
            if time.monotonic() - self._last_check >= CHECK_INTERVAL_S:
                self._check()
            return
        if self._stopping:
            raise _Interrupted
        now = time.monotonic()
        if now - self._last_progress >= PROGRESS_INTERVAL_S or done == total:
            self._last_progress = now
            self._log.info("taking host RAM", done_bytes=done, total_bytes=total, percent=100 * done // total)
            self._notifier.extend_timeout(STEP_TIMEOUT_S, f"STATUS=taking host RAM: {100 * done // total} %")

    def _tick(self) -> None:
        self._check()
        self._handles.drop_idle()
        if self._reloading:
            self._notifier.extend_timeout(STEP_TIMEOUT_S, "STATUS=reloading")
        if self._node.draining:
            self._notifier.extend_timeout(STEP_TIMEOUT_S, f"STATUS=draining: {len(self._node.leases)} leases")
            self._stop_if_drained()

    def _check(self) -> None:
        """Look at the books; the watchdog of the service manager hears of it only while they add up."""
        self._last_check = time.monotonic()
        if self._node.check() == BALANCED:
            self._notifier.send("WATCHDOG=1")

    # Signals

    def _watch_signals(self, cleanup: ExitStack) -> None:
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        previous = signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        cleanup.callback(self._wake_read.close)
        cleanup.callback(self._wake_write.close)
        cleanup.callback(signal.set_wakeup_fd, previous)
        for number in _SIGNALS:
            cleanup.callback(signal.signal, number, signal.signal(number, self._signalled))
        self._loop.watch(self._wake_read.fileno(), self._woken)

    def _signalled(self, number: int, _: FrameType | None) -> None:
        """Hang-up: read the settings again. First signal to stop: drain. Second: do not wait for the leases.

        It only notes what is wanted: to raise here would leave a change of the books half done.
        """
        if number == signal.SIGHUP:
            self._reload_wanted = True
        elif self._stopping:
            self._hurried_by = number
        else:
            self._stopping = self._drain_wanted = True

    def _woken(self) -> None:
        """A signal came while the loop was waiting."""
        self._wake_read.recv(64)
        if self._hurried_by:
            self._loop.stop()
            return
        if self._reload_wanted:
            self._reload_wanted = False
            self._reload()
        if self._drain_wanted:
            self._drain_wanted = False
            self._drain()

    def _reload(self) -> None:
        """Have the settings read again; one reading at a time. Memory that they ask for may take a while."""
        if self._reloading:
            self._reload_wanted = True
            return
        self._reloading = True
        self._notifier.reloading()
        self._node.jobs.start(self._node.live.reload(self._reread), self._reloaded)

    def _reloaded(self, outcome: Reply | Exception) -> None:
        self._reloading = False
        if isinstance(outcome, Exception):
            self._log.error("reload failed", exc_info=outcome)
        self._notifier.send("READY=1", "STATUS=draining" if self._node.draining else "STATUS=serving")
        if self._reload_wanted:
            self._reload_wanted = False
            self._reload()

    def _drain(self, save: bool = False) -> None:
        """Take no new work and wait for the leases; with ``save``, then have all sessions on disk before the end."""
        self._save_wanted = save
        self._node.draining, self._node.drain_failure = True, ""
        self._drain_until = time.monotonic() + self._config.drain_timeout_s
        self._log.info(
            "draining",
            leases=len(self._node.leases),
            sessions=len(self._node.sessions),
            timeout_s=self._config.drain_timeout_s,
        )
        self._notifier.send("STOPPING=1", f"STATUS=draining: {len(self._node.leases)} leases")
        self._stop_if_drained()

    def _stop_if_drained(self) -> None:
        left = len(self._node.leases)
        if (not left and self._drain_until < math.inf) or time.monotonic() >= self._drain_until:
            if left:
                self._log.warning("leases did not end in time", leases=left)
            if not self._save_wanted:
                self._loop.stop()
            elif not self._saving:
                self._saving = True
                self._node.jobs.start(self._node.hibernate(), self._hibernated)

    def _hibernated(self, outcome: Reply | Exception) -> None:
        """All sessions are on disk, or the daemon stays: what is in memory is all there is of the others."""
        self._saving = False
        if isinstance(outcome, Exception):
            self._drain_until = math.inf
            self._node.drain_failure = str(outcome)
            self._log.error("not stopped: drain again when there is room, or stop it by a signal", reason=str(outcome))
        else:
            self._loop.stop()


def _raise_file_limit(config: Config) -> None:
    """Room for every descriptor that the limits allow: libzmq ends the process when it can open no more."""
    needed = config.files_needed
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise OsFailure(
            f"the settings need {needed} file descriptors; the hard limit of this process is {hard} (LimitNOFILE)",
            needed=needed,
            limit=hard,
        )
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
