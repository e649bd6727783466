"""What trials with the real engine are run against: a daemon of their own, and outputs that are compared."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.vllm_engine import Made
from tests.blackbox.daemon_process import DaemonProcess

NEW = 8
"""Tokens that are made of a prompt."""
MODELS = Path(tempfile.gettempdir()) / "kvd-test-models"


class Differs(AssertionError):
    """An engine with kvd made other tokens than one without."""


def say(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


@contextmanager
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvd-test-", dir="/tmp") as path:
        yield Path(path) / "run"


def start_daemon(run_dir: Path, **settings: str) -> DaemonProcess:
    run_dir.mkdir(mode=0o700, exist_ok=True)
    sizes = {"host_capacity": "256MiB", "host_extent": "16MiB", "drain_timeout_s": "0"}
    daemon = DaemonProcess(run_dir, **{**sizes, **settings})
    until(lambda: answers(daemon) or daemon.process.poll() is not None, 300)
    assert daemon.process.poll() is None, daemon.log
    return daemon


def answers(daemon: DaemonProcess) -> bool:
    try:
        daemon.stat()
    except Exception:  # noqa: BLE001 - whatever it is that is missing yet
        return False
    return True


def until(true: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s")
        time.sleep(0.02)


def compare(made: Sequence[Made], expected: Sequence[Made], what: str) -> int:
    """The tokens that were not computed; raises `Differs` for other output."""
    bad = [index for index, (one, right) in enumerate(zip(made, expected, strict=True)) if one.tokens != right.tokens]
    if bad:
        raise Differs(f"{what}: {len(bad)} of {len(made)} differ, first {bad[0]}: {made[bad[0]]}, {expected[bad[0]]}")
    return sum(one.cached for one in made)
