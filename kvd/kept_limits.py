"""Limits of tiers that were changed in a running daemon, as a file of its run directory.

It is there as long as the shared memory that it is about: through a daemon that is killed, not one that is stopped, and
not a boot. A setting that says something else than when the limit was changed is newer, and wins.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from kvd import config as settings
from kvd.config import KEYS, MOST_EXTENTS, RESIZABLE, Config
from kvd.logs import Log
from protocol.errors import ConfigError

FILE = "limits.json"
ORIGIN = "changed while running"


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    """By key: what the settings said, and what is in force. ``slots`` is `HostRam.slots`."""

    limits: dict[str, tuple[int, int]]
    slots: int


class KeptLimits:
    """The file in ``run_dir``, which nobody but the daemon may write."""

    def __init__(self, run_dir: Path, log: Log) -> None:
        self._path = run_dir / FILE
        self._log = log

    def apply(self, read: Config) -> tuple[Config, int]:
        """``read`` with the limits that were kept, and the slots of the host tier; 0 where nothing was kept of it."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_Kept)
        except FileNotFoundError:
            return read, 0
        except (OSError, msgspec.DecodeError) as error:
            self._log.warning(
                "kept limits not read: the settings are in force", path=str(self._path), reason=str(error)
            )
            return read, 0
        same = {key: now for key, (was, now) in kept.limits.items() if key in RESIZABLE and _value(read, key) == was}
        config = read
        try:
            for key, nbytes in same.items():
                config = settings.with_value(config, KEYS[key], nbytes, ORIGIN)
            config = settings.check(config)
        except (ConfigError, ValueError) as error:
            self._log.warning("kept limits do not fit the settings, which are in force", reason=str(error))
            return read, 0
        changed = {key: nbytes for key, nbytes in same.items() if nbytes != _value(read, key)}
        if changed:
            self._log.info("limits that were changed while running are in force", **changed)
        return config, min(kept.slots, MOST_EXTENTS) if "host.capacity" in same else 0

    def keep(self, read: Config, running: Config, slots: int) -> None:
        """Write what is in force. If that fails, a daemon started after a kill has the settings' limits."""
        kept = _Kept({key: (_value(read, key), _value(running, key)) for key in RESIZABLE}, slots)
        temporary = self._path.with_suffix(".new")
        try:
            temporary.write_bytes(msgspec.json.encode(kept))
            os.replace(temporary, self._path)
        except OSError as error:
            self._log.warning("limits not kept", path=str(self._path), reason=error.strerror)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def _value(config: Config, key: str) -> int:
    value: int = KEYS[key].value_in(config)
    return value
