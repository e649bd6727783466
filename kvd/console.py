"""The console that commands print tables on."""

from __future__ import annotations

import sys

from rich.console import Console


class _Console(Console):
    """Leaves a closed pipe to `protocol.command_line.run_command`."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def output_console(width: int | None = None) -> Console:
    """Standard output: as wide as the terminal, or ``width`` columns (80 by default) where it is none."""
    return _Console(width=None if sys.stdout.isatty() else width, highlight=False)
