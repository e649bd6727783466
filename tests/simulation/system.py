"""The operating system as the simulated daemon meets it: calls that fail, a death amid any call, and virtual time.

The daemon's modules get stand-ins for ``os``, ``posix_ipc``, ``time``, ``secrets`` and thread pools. Everything else is
real: segments, files, mappings, descriptors. Outside an `armed` block every call goes through.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import posix_ipc

import kvd.sessions.inheritance
from kvd.tiers.disk import StateDirectory
from kvd.tiers.mapping import SharedMapping
from protocol.errors import OsFailure, OutOfCapacity

FAILING = {
    "pwrite": errno.ENOSPC,
    "preadv": errno.EIO,
    "ftruncate": errno.ENOSPC,
    "posix_fallocate": errno.ENOSPC,
    "memfd_create": errno.ENOMEM,
    "copy_file_range": errno.EIO,
    "fsync": errno.EIO,
    "rename": errno.EIO,
    "create": errno.ENOSPC,
    "shm_open": errno.EMFILE,
    "mmap": errno.ENOMEM,
    "populate": errno.EFAULT,
}
"""Calls that can be made to fail, and with what."""


class Killed(BaseException):
    """The daemon is dead: no call of its does anything any more."""


class System:
    """Counts the daemon's calls. ``fired`` is how many were made to fail in the last `armed` block.

    ``unsafe`` lists what a power failure could have undone although the daemon took it for done.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now_ns = 1_000_000_000
        self.dead = False
        self.fired = 0
        self.unsafe: list[str] = []
        self._failing = ""
        self._nth = 0
        self._persistent = False
        self._kill_in = 0
        self._unsynced: dict[int, str] = {}
        self._renamed: set[int] = set()

    @contextmanager
    def armed(self, failing: str = "", nth: int = 1, *, persistent: bool = False, kill_in: int = 0) -> Iterator[None]:
        """Have the nth call of this kind fail, and all later ones if ``persistent``; or a death at call ``kill_in``."""
        self._failing, self._nth, self._persistent, self._kill_in = failing, nth, persistent, kill_in
        self.fired = 0
        try:
            yield
        finally:
            self._failing, self._kill_in = "", 0

    def enter(self, call: str, torn: Callable[[], object] | None = None) -> None:
        """Before each call that changes anything. ``torn`` does a part of it, if the daemon dies amid the call."""
        if self.dead:
            raise Killed
        if self._kill_in:
            self._kill_in -= 1
            if not self._kill_in:
                self.dead = True
                if torn is not None:
                    torn()
                raise Killed
        if call == self._failing:
            self._nth -= 1
            if self._nth == 0 or (self._persistent and self._nth < 0):
                self.fired += 1
                raise OSError(FAILING[call], os.strerror(FAILING[call]))

    def tick(self) -> int:
        """Virtual time in ns, which goes on with every look at it."""
        self.now_ns += 1000
        return self.now_ns

    # What is safe from a power failure

    def written(self, fd: int) -> None:
        if fd in self._unsynced:
            self._unsynced[fd] = "written"

    def created(self, fd: int) -> None:
        self._unsynced[fd] = "written"

    def synced(self, fd: int) -> None:
        if fd in self._unsynced:
            self._unsynced[fd] = "safe"
        self._renamed.discard(fd)

    def renamed(self, directory: int) -> None:
        if "written" in self._unsynced.values():
            self.unsafe.append("a file got its name before its bytes were synced")
        self._renamed.add(directory)

    def closed(self, fd: int) -> None:
        self._unsynced.pop(fd, None)

    def require_safe(self) -> None:
        """Raise unless all that was renamed is synced."""
        if self._renamed:
            self.unsafe.append("a file's name was taken for safe before its directory was synced")
        problems, self.unsafe = self.unsafe, []
        self._renamed.clear()
        assert not problems, problems

    def forget_unsafe(self) -> None:
        """What failed was not taken for safe."""
        self.unsafe.clear()
        self._renamed.clear()

    def lost(self) -> None:
        """The daemon is dead, and has no descriptors."""
        self._unsynced.clear()
        self._renamed.clear()
        self.dead = False


class _Os:
    """``os`` for the daemon."""

    def __init__(self, system: System) -> None:
        self._system = system

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        # A death leaves whole pages of what was being written.
        part = self._system.chance.randrange(0, max(len(data), 1), 4096)
        self._system.enter("pwrite", lambda: os.pwrite(fd, data[:part], offset))
        self._system.written(fd)
        return os.pwrite(fd, data, offset)

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        self._system.enter("preadv")
        return os.preadv(fd, buffers, offset)

    def copy_file_range(self, source: int, target: int, count: int, *offsets: int) -> int:
        self._system.enter("copy_file_range")
        return os.copy_file_range(source, target, count, *offsets)

    def ftruncate(self, fd: int, nbytes: int) -> None:
        self._system.enter("ftruncate")
        os.ftruncate(fd, nbytes)

    def posix_fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._system.enter("posix_fallocate")
        os.posix_fallocate(fd, offset, nbytes)

    def memfd_create(self, name: str, flags: int) -> int:
        self._system.enter("memfd_create")
        return os.memfd_create(name, flags)

    def fsync(self, fd: int) -> None:
        self._system.enter("fsync")
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            os.utime(fd, ns=(self._system.now_ns, self._system.tick()))
        os.fsync(fd)
        self._system.synced(fd)

    def rename(self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        self._system.enter("rename")
        os.rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        self._system.renamed(dst_dir_fd)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        self._system.enter("unlink")
        os.unlink(name, dir_fd=dir_fd)

    def utime(self, fd: int) -> None:
        self._system.enter("utime")
        os.utime(fd, ns=(self._system.now_ns, self._system.tick()))

    def close(self, fd: int) -> None:
        os.close(fd)
        self._system.closed(fd)


class _PosixIpc:
    def __init__(self, system: System) -> None:
        self._system = system

    def __getattr__(self, name: str) -> Any:
        return getattr(posix_ipc, name)

    def SharedMemory(self, *arguments: Any, **options: Any) -> Any:  # noqa: N802 - its name
        self._system.enter("shm_open")
        return posix_ipc.SharedMemory(*arguments, **options)

    def unlink_shared_memory(self, name: str) -> None:
        self._system.enter("shm_unlink")
        posix_ipc.unlink_shared_memory(name)


class _Time:
    def __init__(self, system: System) -> None:
        self._system = system

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return self._system.tick() / 1e9


class _Secrets:
    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.randbits = chance.getrandbits
        self.randbelow = chance.randrange


class InlinePool:
    """A thread pool whose work is done when it is submitted."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        pass

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments))
        except Exception as error:  # noqa: BLE001 - as a pool does
            future.set_exception(error)
        return future

    def shutdown(self, **_options: Any) -> None:
        pass

    def __enter__(self) -> InlinePool:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class StepPool(InlinePool):
    """The jobs' pool: what is submitted waits until `run_next` is called."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        self.waiting: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((work, future))
        return future

    def run_next(self, index: int) -> None:
        """Do one step, in any order."""
        work, future = self.waiting.pop(index)
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - as a pool does
            future.set_exception(error)
        else:
            future.set_result(result)

    def shutdown(self, **_options: Any) -> None:
        for _, future in self.waiting:
            future.cancel()
        self.waiting.clear()


@contextmanager
def installed(system: System, seed: int, living: Callable[..., Any]) -> Iterator[None]:
    """Have the daemon's modules meet ``system``; ``living`` looks processes up."""
    undo: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    stand_ins = {
        "os": _Os(system),
        "posix_ipc": _PosixIpc(system),
        "time": _Time(system),
        "secrets": _Secrets(seed),
        "ThreadPoolExecutor": InlinePool,
    }
    real = {"os": os, "posix_ipc": posix_ipc, "time": time, "secrets": sys.modules["secrets"]}
    for name, module in list(sys.modules.items()):
        if not name.startswith("kvd."):
            continue
        for attribute, stand_in in stand_ins.items():
            present = module.__dict__.get(attribute)
            if present is not None and (attribute == "ThreadPoolExecutor" or present is real[attribute]):
                put(module, attribute, StepPool if name == "kvd.saved.jobs" and stand_in is InlinePool else stand_in)
    put(kvd.sessions.inheritance, "living_process", living)
    put(SharedMapping, "__init__", _failing_mapping(system, SharedMapping.__init__))
    put(SharedMapping, "populate", _failing_populate(system, SharedMapping.populate))
    put(StateDirectory, "_openat2", _failing_creation(system, StateDirectory._openat2))
    try:
        yield
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)


def _failing_mapping(system: System, real: Any) -> Any:
    def mapping(self: SharedMapping, fd: int, nbytes: int) -> None:
        try:
            system.enter("mmap")
        except OSError as error:
            raise OsFailure(f"mapping: {error.strerror}") from error
        real(self, fd, nbytes)

    return mapping


def _failing_populate(system: System, real: Any) -> Any:
    def populate(self: SharedMapping, offset: int, nbytes: int) -> None:
        try:
            system.enter("populate")
        except OSError as error:
            raise OutOfCapacity("simulated host", nbytes, 0, nbytes) from error
        real(self, offset, nbytes)

    return populate


def _failing_creation(system: System, real: Any) -> Any:
    def openat2(self: StateDirectory, name: str, flags: int, mode: int = 0) -> int:
        creates = flags & os.O_CREAT
        if creates:
            system.enter("create")
        fd: int = real(self, name, flags, mode)
        if creates:
            system.created(fd)
        return fd

    return openat2
