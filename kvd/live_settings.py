"""The settings of a running daemon: read again when it is told to, or changed by an operator, limit by limit.

What the files say is taken up when it has changed since it was last read; so a limit that an operator has set stays
until the setting itself changes, or the daemon is stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

from kvd import config as settings
from kvd import reload
from kvd.config import KEYS, RESIZABLE, Config
from kvd.logs import Log
from kvd.resizing import Resizing
from kvd.saved.jobs import Job, Step
from kvd.settings import parse_setting
from protocol.errors import InvalidValue, KvdError
from protocol.messages import Done, ReloadReported, Resized, SettingChange

OPERATOR = "kvd admin resize"
"""Where a limit comes from that an operator has set, as `Config.origins` has it."""


class LiveSettings:
    """``config`` is in force. The callbacks are set by whoever runs the loop."""

    def __init__(self, config: Config, resizing: Resizing, log: Log) -> None:
        self.config = config
        self.read = config
        """What was last read and taken up: of a limit that was refused, still the one before."""
        self.require: Callable[[Config], None] = lambda _: None
        """Raises if this process cannot have such settings."""
        self.changed: Callable[[Config], None] = lambda _: None
        """Takes up ``config``."""
        self._resizing = resizing
        self._log = log
        self._report = ReloadReported(0, 0.0, "", [])

    def report(self, seq: int) -> ReloadReported:
        """What came of the latest reading."""
        last = self._report
        return ReloadReported(seq, last.time_s, last.error, last.changes)

    def resize(self, seq: int, key: str, nbytes: int) -> Job:
        """Give the tier of the setting ``key`` another limit; raises `ConfigError` and what `Resizing` raises."""
        if key not in RESIZABLE:
            raise InvalidValue("setting of a tier's limit", key[:64], f"one of {', '.join(RESIZABLE)}")
        setting = KEYS[key]
        value = parse_setting(setting.kind, key, nbytes, OPERATOR)
        before: int = setting.value_in(self.config)
        yield from self._resize(key, value, OPERATOR, is_read=False)
        self._log.warning("tier resized", key=key, before=before, after=value)
        return Resized(seq, key, before, value)

    def reload(self, reread: Callable[[], Config]) -> Job:
        """Read the settings again and take up what may change. If anything is wrong with them, nothing changes."""
        try:
            wanted = reread()
            outcome = reload.merge(self.config, wanted, self.read)
            self.require(outcome.config)
        except KvdError as error:
            self._report = ReloadReported(0, time.time(), error.message, [])
            self._log.error("reload failed: the settings stay as they were", code=error.code, reason=error.message)
            return Done(0)
        self.read = reload.taken_up(self.read, outcome.config)
        self._take_up(outcome.config)
        refused = dict(outcome.refused)
        for key in outcome.limits:
            value = KEYS[key].value_in(wanted)
            try:
                yield from self._resize(key, value, wanted.origins.get(key, "default"), is_read=True)
            except KvdError as error:
                refused[key] = error.message
        changed = {key: words for key, words in outcome.words.items() if key not in refused}
        self._log.info("settings reloaded", changed={key: " → ".join(words) for key, words in changed.items()})
        if refused:
            told = {key: f"{' → '.join(outcome.words[key])}: {reason}" for key, reason in refused.items()}
            self._log.warning("settings that stay as they were", refused=told)
        changes = [SettingChange(key, *words, refused.get(key, "")) for key, words in outcome.words.items()]
        self._report = ReloadReported(0, time.time(), "", changes)
        return Done(0)

    def _resize(self, key: str, value: int, origin: str, *, is_read: bool) -> Generator[Step, Any, None]:
        """Change the tier, then what is said to be in force; and what was read, if that says so."""
        wanted = settings.check(settings.with_value(self.config, KEYS[key], value, origin))
        self.require(wanted)
        if value != KEYS[key].value_in(self.config):
            yield from self._resizing.change(self.config, wanted, key)
        if is_read:
            self.read = settings.with_value(self.read, KEYS[key], value, "")
        # What else has changed meanwhile stays changed.
        self._take_up(settings.with_value(self.config, KEYS[key], value, origin))

    def _take_up(self, config: Config) -> None:
        self.config = config
        self.changed(config)
