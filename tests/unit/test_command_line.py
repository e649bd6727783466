"""How commands end: with the status of what went wrong, and without a traceback when nobody reads their output."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

from protocol.command_line import INTERRUPTED, UNREAD, run_command
from protocol.errors import OsFailure
from tests.blackbox.daemon_process import clean_environment

COMMANDS = {
    "kvd.cli": ["--help", "print-config", "plan --table", "check-config"],
    "kvd.commands.stat": ["--help"],
    "compute.cli": ["generate --help"],
    "compute.demo": ["--help"],
    "benchmarks.cli": ["--help"],
}


def run_unread(module: str, arguments: str) -> subprocess.CompletedProcess[bytes]:
    """The command, its standard output a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    code = f"from {module} import main; raise SystemExit(main())"
    try:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments.split()],
            stdout=writing,
            stderr=subprocess.PIPE,
            env=clean_environment(),
            check=False,
        )
    finally:
        os.close(writing)


@pytest.mark.parametrize(("module", "arguments"), [(m, a) for m, each in COMMANDS.items() for a in each])
def test_output_that_nobody_reads_is_no_fault(module: str, arguments: str) -> None:
    ended = run_unread(module, arguments)
    assert ended.stderr == b""
    assert ended.returncode in ((UNREAD, 0) if "--help" in arguments else (UNREAD,))  # argparse passes over it


@pytest.mark.parametrize("module", COMMANDS)
def test_wrong_arguments_have_one_status(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the demo has a handler of its own
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module).main(["--no-such-flag"])
    assert ended.value.code == 64


def test_errors_and_interruptions_are_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> int:
        raise OsFailure("no room for 5 bytes")

    def interrupted() -> int:
        raise KeyboardInterrupt

    assert run_command("it", lambda: 3) == 3
    assert run_command("it", refused) == 71
    assert capsys.readouterr().err == "it: no room for 5 bytes\n"
    assert run_command("it", interrupted) == INTERRUPTED == 130
