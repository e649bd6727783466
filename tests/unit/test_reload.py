"""Which settings a running daemon takes up, and that the watchdog hears of balanced books only."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import pytest

from kvd import logs
from kvd.config import KEYS, Config, LimitsConfig, LogConfig, with_value
from kvd.daemon import Daemon
from kvd.reload import RESTART, merge, taken_up


def test_what_may_change_changes_and_the_rest_stays() -> None:
    running = dataclasses.replace(Config(), origins=MappingProxyType(dict.fromkeys(KEYS, "default")))
    wanted = dataclasses.replace(
        running,
        device="cpu",
        drain_timeout_s=5.0,
        limits=LimitsConfig(max_leases=7),
        log=LogConfig(format="json", level="debug"),
        origins=MappingProxyType(dict.fromkeys(KEYS, "a file")),
    )
    outcome = merge(running, wanted, running)
    assert outcome.config == dataclasses.replace(
        running, drain_timeout_s=5.0, limits=wanted.limits, log=LogConfig(level="debug")
    )
    assert outcome.words == {
        "device": ('"cuda"', '"cpu"'),
        "drain_timeout_s": ("30.0", "5.0"),
        "limits.max_leases": ("256", "7"),
        "log.format": ('"auto"', '"json"'),
        "log.level": ('"info"', '"debug"'),
    }
    assert outcome.refused == {"device": RESTART, "log.format": RESTART}
    assert outcome.limits == []
    assert outcome.config.origins["limits.max_leases"] == "a file"
    assert outcome.config.origins["device"] == "default"


def test_settings_that_stay_the_same_are_neither_changed_nor_refused() -> None:
    outcome = merge(Config(), Config(), Config())
    assert (outcome.config, dict(outcome.words), dict(outcome.refused), outcome.limits) == (Config(), {}, {}, [])


def test_a_limit_that_an_operator_changed_stays_until_the_setting_changes() -> None:
    read = Config()
    running = with_value(read, KEYS["host.capacity"], 4 << 30, "kvd admin resize")
    assert merge(running, read, read).limits == []
    assert merge(running, with_value(read, KEYS["host.capacity"], 8 << 30, "a file"), read).limits == ["host.capacity"]
    same = with_value(read, KEYS["host.capacity"], 4 << 30, "a file")
    assert merge(running, same, read).limits == [], "it is so already"
    assert taken_up(read, running).host.capacity == read.host.capacity


class Recorder:
    """Stands in for the node and for the service manager."""

    def __init__(self, *verdicts: str) -> None:
        self.verdicts = list(verdicts)
        self.sent: list[str] = []

    def check(self) -> str:
        return self.verdicts.pop(0)

    def send(self, *lines: str) -> None:
        self.sent += lines


def test_the_watchdog_hears_of_balanced_books_only(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder("balanced", "host: 2 + 2 really taken != committed 5", "balanced")
    daemon = Daemon(Config(), logs.configure(LogConfig()), reread=Config)
    monkeypatch.setattr(daemon, "_node", recorder, raising=False)
    monkeypatch.setattr(daemon, "_notifier", recorder)
    daemon._check()
    daemon._check()
    assert recorder.sent == ["WATCHDOG=1"]
    daemon._check()
    assert recorder.sent == ["WATCHDOG=1", "WATCHDOG=1"]
    for end in (daemon._wake_read, daemon._wake_write):
        end.close()


def test_the_level_of_the_log_changes_for_loggers_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    log = logs.configure(LogConfig(format="json", level="warning"))
    log.info("first")
    log.warning("second")
    logs.set_level("debug")
    log.debug("third")
    logs.set_level("error")
    log.warning("fourth")
    try:
        raise ValueError
    except ValueError:
        log.exception("fifth")
    words = capsys.readouterr().err
    assert [word for word in ("first", "second", "third", "fourth", "fifth") if word in words] == [
        "second",
        "third",
        "fifth",
    ]


def test_a_long_allocation_is_not_taken_for_a_hung_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extents that change hands are populated while the daemon serves: it goes on looking at the books."""
    recorder = Recorder(*["balanced"] * 5)
    daemon = Daemon(Config(), logs.configure(LogConfig()), reread=Config)
    monkeypatch.setattr(daemon, "_node", recorder, raising=False)
    monkeypatch.setattr(daemon, "_notifier", recorder)
    monkeypatch.setattr(daemon, "_serving", True)
    monkeypatch.setattr(daemon, "_stopping", True)  # what is under way is finished
    clock = [daemon._last_check]
    monkeypatch.setattr("kvd.daemon.time.monotonic", lambda: clock[0])
    for _ in range(10):
        clock[0] += 0.4
        daemon._populated(1, 2)
    assert recorder.sent == ["WATCHDOG=1"] * 3
    for end in (daemon._wake_read, daemon._wake_write):
        end.close()
