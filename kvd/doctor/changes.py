"""Changing settings of the host so that the original values can always be put back.

The record is on disk before anything changes, and is only ever replaced as a whole. Whatever is interrupted, and
however often: `Changes.restore` finds a record that names the original of everything that was changed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvd.doctor.settings import Setting
from protocol.errors import KvdError, OsFailure, PermissionRefused

STATE_DIRECTORY = Path("/var/lib/kvd-doctor")
RECORD = "originals.json"


class Original(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value that a setting had, and those that may have been written over it since."""

    original: str
    applied: list[str]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    settings: dict[str, Original]


@dataclass(frozen=True)
class Outcome:
    """What was done to one setting: ``changed``, ``restored``, ``kept`` as it is, or ``failed``; and why."""

    setting: str
    done: str
    detail: str


class Changes:
    """Changes to ``settings``, recorded in ``directory``, which is made if it is not there.

    Raises `PermissionRefused` where this user may not, and `OsFailure` for a record that cannot be read or written.
    """

    def __init__(self, settings: Mapping[str, Setting], directory: Path = STATE_DIRECTORY) -> None:
        self._settings = settings
        self._directory = directory
        self._path = directory / RECORD

    def recorded(self) -> dict[str, Original]:
        """What is recorded now; empty if nothing was changed."""
        try:
            record = msgspec.json.decode(self._path.read_bytes(), type=_Record)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            raise OsFailure(f"record of original settings {self._path}: {error}", path=str(self._path)) from error
        if record.version != 1 or not record.settings.keys() <= self._settings.keys():
            raise OsFailure(f"record of original settings {self._path} is of another version", path=str(self._path))
        return record.settings

    def apply(self, wanted: Mapping[str, str]) -> list[Outcome]:
        """Give settings the values that are wanted. A setting that cannot be changed does not keep the others."""
        with self._locked():
            record = self.recorded()
            values = {name: self._settings[name].read() for name in wanted}
            todo = {name: value for name, value in wanted.items() if values[name] != value}
            for name, value in todo.items():
                record[name] = _extended(record.get(name), values[name], value)
            if todo:
                self._save(record)
            outcomes = [Outcome(name, "kept", f"is {wanted[name]} already") for name in wanted.keys() - todo.keys()]
            return outcomes + [self._write(name, value, "changed") for name, value in todo.items()]

    def restore(self) -> list[Outcome]:
        """Put original values back. What somebody else has set since stays as it is."""
        with self._locked():
            record = self.recorded()
            outcomes = [self._restore(name, entry) for name, entry in record.items()]
            failed = {outcome.setting for outcome in outcomes if outcome.done == "failed"}
            self._save({name: entry for name, entry in record.items() if name in failed})
            return outcomes

    def _restore(self, name: str, entry: Original) -> Outcome:
        value = self._settings[name].read()
        if value == entry.original:
            return Outcome(name, "kept", f"is {value}, as it was")
        if value not in entry.applied:
            return Outcome(name, "kept", f"is {value}: somebody has set it since; it was {entry.original}")
        return self._write(name, entry.original, "restored")

    def _write(self, name: str, value: str, done: str) -> Outcome:
        setting = self._settings[name]
        try:
            before = setting.read()
            setting.write(value)
            after = setting.read()
        except KvdError as error:
            return Outcome(name, "failed", error.message)
        if after != value:
            return Outcome(name, "failed", f"is {after} after {value} was written")
        return Outcome(name, done, f"{before} → {value}")

    def _save(self, record: Mapping[str, Original]) -> None:
        """Have the record on disk, whole, before this returns; without one where there is nothing in it."""
        try:
            if record:
                temporary = self._path.with_suffix(".new")
                with temporary.open("wb") as file:
                    file.write(msgspec.json.format(msgspec.json.encode(_Record(1, dict(record)))))
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self._path)
            else:
                self._path.unlink(missing_ok=True)
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise OsFailure(f"record of original settings {self._path}: {error}", path=str(self._path)) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One at a time."""
        try:
            self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            lock = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except PermissionError as error:
            raise PermissionRefused(f"{self._directory}: {error.strerror}; settings of the host are root's") from error
        except OSError as error:
            raise OsFailure(f"{self._directory}: {error.strerror}", path=str(self._directory)) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _extended(known: Original | None, value: str, wanted: str) -> Original:
    """The record of a setting that is ``value`` and will be ``wanted``.

    A value that was not written by us is an original, also where an older one is known: somebody set it since.
    """
    if known is None or value not in known.applied:
        return Original(value, [wanted])
    return Original(known.original, [*(old for old in known.applied if old != wanted), wanted])
