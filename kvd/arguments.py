"""The parser of command lines that all commands of this package share."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from protocol.errors import EXIT_USAGE


class Parser(argparse.ArgumentParser):
    """Keeps an epilog as it is written, takes no abbreviated flags, and exits with 64 when the arguments are wrong."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")
