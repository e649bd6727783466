"""How every command reads its arguments, and how it ends: with the exit status of what went wrong, never a traceback
for what is nobody's fault."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from protocol.errors import EXIT_USAGE, KvdError

INTERRUPTED = 128 + signal.SIGINT
UNREAD = 128 + signal.SIGPIPE
"""Exit status of a command whose output nobody reads any more: that of a program which the signal ends."""


class Parser(argparse.ArgumentParser):
    """Keeps an epilog as it is written, takes no abbreviated flags, and exits with 64 when the arguments are wrong."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def run_command(name: str, act: Callable[[], int]) -> int:
    """The exit status of ``act``, or that of the error, the interruption or the closed pipe that ended it."""
    try:
        try:
            return act()
        finally:
            sys.stdout.flush()  # here, where a closed pipe can be caught
    except KvdError as error:
        with suppress(BrokenPipeError):
            sys.stderr.write(f"{name}: {error.message}\n")
        return error.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # What is still in the buffer goes nowhere when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stdout.fileno())
        return UNREAD
