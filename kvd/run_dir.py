"""The run directory: its lock, which keeps a second daemon away, and the paths of its sockets."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from pathlib import Path

from kvd.config import Config
from kvd.operators import group_named
from protocol.errors import DaemonRunning, OsFailure

LOCK_FILE = "kvd.lock"


class RunDir:
    """The run directory, locked by this process from construction to `close`.

    Raises `DaemonRunning` if another process holds the lock, and `OsFailure` if the directory cannot be made or
    written, or if something that is not a socket lies where a socket belongs; that is never removed.
    """

    def __init__(self, config: Config) -> None:
        self._path = Path(config.run_dir)
        self._sockets = (config.control_socket, config.handle_socket)
        self._mode = config.socket.mode
        self._gid = _gid_of(config)
        try:
            self._path.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._lock = os.open(self._path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise _failure(f"run directory {self._path}", error) from error
        try:
            self._take_lock()
            self._remove_stale_sockets()
        except BaseException:
            os.close(self._lock)
            raise

    def publish(self, path: Path) -> None:
        """Give a socket that was just bound its group and mode. Until then nobody else may connect: see `hidden`."""
        try:
            os.chown(path, -1, self._gid)
            path.chmod(self._mode)
        except OSError as error:
            raise _failure(f"socket {path}", error) from error

    def close(self) -> None:
        """Remove the sockets, then let go of the lock. The lock's file stays: to remove it would let two daemons in."""
        for path in self._sockets:
            path.unlink(missing_ok=True)
        os.close(self._lock)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            raise DaemonRunning(
                f"a daemon (process {pid or 'unknown'}) runs in {self._path}", run_dir=str(self._path), pid=pid
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _remove_stale_sockets(self) -> None:
        """Remove what a daemon that died left behind. Only the holder of the lock may."""
        for path in self._sockets:
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                continue
            if not stat.S_ISSOCK(mode):
                raise OsFailure(f"{path} is in the way: it is not a socket, and is left as it is", path=str(path))
            path.unlink()


def shm_prefix(run_dir: str | Path) -> str:
    """What the names of all shared memory of the daemon in ``run_dir`` begin with."""
    return f"/kvd-{hashlib.sha256(os.fsencode(os.path.realpath(run_dir))).hexdigest()[:12]}"


def _gid_of(config: Config) -> int:
    return group_named(config, "socket.group").gr_gid if config.socket.group else os.getegid()


def _failure(what: str, error: OSError) -> OsFailure:
    return OsFailure(f"{what}: {error.strerror}", what=what, errno=error.errno)
