"""The disk tier: one directory of saved files, which only the daemon's uid may enter, and a limit to their bytes.

Names are data: whatever one is, it leads to a regular file in this directory or nowhere. Files appear whole, under
their name, or not at all. What is in them is known to `kvd.saved.file`. Every method may be called from any thread.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import heapq
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import (
    DaemonRunning,
    InvalidValue,
    OsFailure,
    OutOfCapacity,
    SavedRefused,
    SessionBusy,
    TierInUse,
    UnknownSaved,
)

DISK_TIER = "disk"
MOST_FILES = 4096
"""Saved files at the same time; the least recently used goes for one more."""

NAMED_FILES = 8
"""Files that an error names, at most."""

SAVED, SPILLED = "kvd", "spilled"
"""Kinds of files, by the ends of their names. Only saved ones are removed to make room."""

_NAME = re.compile(r"[0-9]{1,10}-[A-Za-z0-9._-]{1,64}\.(kvd|spilled)")
_BLOCKS_NAME = re.compile(r"[0-9]{1,10}-[0-9a-f]{32}\.blocks")
_TEMPORARY = re.compile(r"\.saving-[0-9]+")

_SYS_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x02, 0x04, 0x08
_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    """The kernel's ``struct open_how``."""

    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


@dataclass(frozen=True)
class SavedEntry:
    """A saved file: its size, and when it was last written or restored, in ns since 1970."""

    name: str
    nbytes: int
    used_ns: int


@dataclass(eq=False)
class Pin:
    """Keeps the file called ``name``. ``is_replaced`` once another one has that name."""

    name: str
    is_replaced: bool = False


class StateDirectory:
    """The directory at ``path``, made if it is not there, and locked: one daemon uses it at a time.

    ``capacity`` limits the bytes of all files in it. Raises `DaemonRunning` where another has it, `OsFailure` where it
    cannot be used or others may enter it.
    """

    def __init__(self, path: Path, capacity: int) -> None:
        self.path = path
        self.capacity = capacity
        self._lock = threading.Lock()
        self._expected: dict[str, int] = {}
        self._pins: set[Pin] = set()
        self._temporaries = 0
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise OsFailure(f"state directory {path}: {error.strerror}", path=str(path)) from error
        try:
            self._take()
        except BaseException:
            os.close(self._fd)
            raise

    def resize(self, capacity: int) -> None:
        """Another limit, in bytes. Raises `TierInUse`, naming the largest files, below what there is."""
        with self._lock:
            sizes = {entry.name: entry.nbytes for entry in self.entries()} | self._expected
            held = sum(sizes.values())
            if capacity < held:
                largest = heapq.nlargest(NAMED_FILES, sizes.items(), key=lambda item: item[1])
                raise TierInUse(DISK_TIER, capacity, held, [f"{name}: {nbytes} bytes" for name, nbytes in largest])
            self.capacity = capacity

    def close(self) -> None:
        os.close(self._fd)

    def open(self, name: str) -> int:
        """A descriptor of the saved file to read; the caller closes it.

        Raises `UnknownSaved` where there is none, `SavedRefused` for what is no regular file with one name of ours.
        """
        _require_name(name)
        try:
            # Without waiting: somebody may have put a FIFO there.
            fd = self._openat2(name, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise UnknownSaved(f"there is no saved file {name}", name=name) from None
            if error.errno in (errno.ELOOP, errno.EXDEV, errno.ENXIO):
                raise SavedRefused(name, "it is not a regular file") from None
            raise OsFailure(f"opening saved file {name}: {error.strerror}", name=name, errno=error.errno) from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
                raise SavedRefused(name, "it is not a regular file of the daemon's uid with one name")
        except BaseException:
            os.close(fd)
            raise
        return fd

    @contextmanager
    def replace(self, name: str, nbytes: int) -> Iterator[int]:
        """A descriptor to write the ``nbytes`` of file ``name`` to. At the end of the block the file takes its name.

        Until then, and if anything fails, what had the name before stays as it was. Makes room first: the least
        recently used files go. Raises `OutOfCapacity` or `OsFailure`.
        """
        _require_name(name)
        with self._lock:
            self._make_room(name, nbytes)
            self._expected[name] = nbytes
            self._temporaries += 1
            temporary = f".saving-{self._temporaries}"
        try:
            fd = self._openat2(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                yield fd
                os.fsync(fd)
                with self._lock:
                    os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
                    for pin in self._pins:
                        pin.is_replaced |= pin.name == name
                os.fsync(self._fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise OsFailure(f"writing saved file {name}: {error.strerror}", name=name, errno=error.errno) from error
        finally:
            with suppress(OSError):  # after the rename there is none
                os.unlink(temporary, dir_fd=self._fd)
            with self._lock:
                del self._expected[name]

    def pin(self, name: str) -> Pin:
        """Keep the file, whatever room is needed, until `unpin`: pages are still to be read from it."""
        pin = Pin(name)
        with self._lock:
            self._pins.add(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        with self._lock:
            self._pins.remove(pin)

    def is_pinned(self, name: str) -> bool:
        with self._lock:
            return any(pin.name == name for pin in self._pins)

    def remove_pinned(self, pin: Pin) -> None:
        """Remove the file that was pinned; one that has its name by now stays. Raises `OsFailure`."""
        try:
            with self._lock:
                if pin.is_replaced:
                    return
                os.unlink(pin.name, dir_fd=self._fd)
            os.fsync(self._fd)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _not_removed(pin.name, error) from error

    def remove(self, name: str) -> None:
        """Remove a saved file. Raises `UnknownSaved`, `SessionBusy` for one that is pinned, or `OsFailure`."""
        _require_name(name)
        if any(pin.name == name for pin in list(self._pins)):
            raise SessionBusy(f"saved file {name} is still being restored from", name=name)
        try:
            os.unlink(name, dir_fd=self._fd)
            os.fsync(self._fd)
        except FileNotFoundError:
            raise UnknownSaved(f"there is no saved file {name}", name=name) from None
        except OSError as error:
            raise _not_removed(name, error) from error

    def touch(self, fd: int) -> None:
        """Count the file as used now. One that cannot be marked goes the sooner, and that is all."""
        with suppress(OSError):
            os.utime(fd)

    def open_blocks(self, name: str) -> int:
        """A descriptor of a file of blocks (`kvd.blocks.spill_file`), made if it is not there; the caller closes it.

        Raises `SavedRefused`, `OsFailure`.
        """
        if not _BLOCKS_NAME.fullmatch(name):
            raise InvalidValue("name of a file of blocks", name[:128], f"what matches {_BLOCKS_NAME.pattern}")
        try:
            fd = self._openat2(name, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise OsFailure(f"opening {name}: {error.strerror}", name=name, errno=error.errno) from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
            os.close(fd)
            raise SavedRefused(name, "it is not a regular file of the daemon's uid with one name")
        return fd

    def remove_blocks(self, name: str) -> None:
        """Remove a file of blocks. Its disk space is free when its descriptor is closed."""
        with suppress(OSError):
            os.unlink(name, dir_fd=self._fd)

    def files_of_blocks(self) -> list[str]:
        """Their names, the one that was written longest ago first. Raises `OsFailure`."""
        try:
            names = [name for name in os.listdir(self._fd) if _BLOCKS_NAME.fullmatch(name)]
            return sorted(names, key=lambda name: os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mtime_ns)
        except OSError as error:
            raise OsFailure(f"state directory {self.path}: {error.strerror}", path=str(self.path)) from error

    def entries(self) -> list[SavedEntry]:
        """The saved files, least recently used first; anything else there is passed over. Raises `OsFailure`."""
        found = []
        try:
            for name in os.listdir(self._fd):
                with suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                    if _NAME.fullmatch(name) and stat.S_ISREG(status.st_mode):
                        found.append(SavedEntry(name, status.st_size, status.st_mtime_ns))
        except OSError as error:
            raise OsFailure(f"state directory {self.path}: {error.strerror}", path=str(self.path)) from error
        return sorted(found, key=lambda entry: (entry.used_ns, entry.name))

    def _make_room(self, name: str, nbytes: int) -> None:
        """Remove least recently used files until ``nbytes`` for ``name`` fit, beside the files being written."""
        if name in self._expected:
            raise InvalidValue("saved file", name, "one that is not being written")
        others = [entry for entry in self.entries() if entry.name != name and entry.name not in self._expected]
        pinned = {pin.name for pin in self._pins}
        kept = {entry for entry in others if entry.name.endswith(SPILLED) or entry.name in pinned}
        fixed = sum(self._expected.values()) + sum(entry.nbytes for entry in kept)
        others = [entry for entry in others if entry not in kept]
        if nbytes > self.capacity - fixed:
            raise OutOfCapacity(DISK_TIER, nbytes, self.capacity - fixed, self.capacity, list(self._expected))
        used = fixed + sum(entry.nbytes for entry in others)
        count = len(others) + len(self._expected)
        for entry in others:
            if used + nbytes <= self.capacity and count < MOST_FILES:
                return
            with suppress(UnknownSaved):
                self.remove(entry.name)
            used -= entry.nbytes
            count -= 1

    def _take(self) -> None:
        """Lock the directory, check who may enter it, and remove what a dead daemon was writing."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DaemonRunning(f"another daemon uses the state directory {self.path}", path=str(self.path)) from None
        status = os.fstat(self._fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise OsFailure(
                f"state directory {self.path} has owner {status.st_uid} and mode {stat.S_IMODE(status.st_mode):04o}; "
                f"needed: owner {os.geteuid()}, mode 0700",
                path=str(self.path),
            )
        for left in os.listdir(self._fd):
            if _TEMPORARY.fullmatch(left):
                os.unlink(left, dir_fd=self._fd)

    def _openat2(self, name: str, flags: int, mode: int = 0) -> int:
        """Open ``name`` in the directory, never through a link and never outside it. Raises `OSError`.

        A kernel without ``openat2`` refuses (ENOSYS): there is no weaker way around it.
        """
        resolve = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
        how = _OpenHow(flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, resolve)
        arguments = ctypes.c_int(self._fd), ctypes.c_char_p(os.fsencode(name)), ctypes.byref(how)
        fd: int = _libc.syscall(ctypes.c_long(_SYS_OPENAT2), *arguments, ctypes.c_size_t(ctypes.sizeof(how)))
        if fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return fd


def _not_removed(name: str, error: OSError) -> OsFailure:
    return OsFailure(f"removing saved file {name}: {error.strerror}", name=name, errno=error.errno)


def file_name(uid: int, session: str, kind: str = SAVED) -> str:
    """The name of the file that a session of ``uid`` is in."""
    return f"{uid}-{session}.{kind}"


def session_of_file(name: str) -> tuple[int, str, str]:
    """The uid, the session and the kind that a file's name stands for."""
    start, _, kind = name.rpartition(".")
    uid, _, session = start.partition("-")
    return int(uid), session, kind


def _require_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidValue("name of a saved file", name[:128], f"what matches {_NAME.pattern}")
