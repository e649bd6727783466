"""The log on standard error: for people on a terminal, one JSON object a line elsewhere."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog

from kvd.config import LogConfig

Log = structlog.stdlib.BoundLogger


class _Threshold:
    """Drops what is less severe than the level in force, which may change while loggers are in use."""

    level = logging.INFO

    def __call__(self, _: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        if logging.getLevelNamesMapping()[method.upper()] < self.level:
            raise structlog.DropEvent
        return event


_threshold = _Threshold()


class _StandardError:
    """Standard error that may be gone, or on a full disk: what cannot be written is lost, and nothing else is."""

    def write(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()


def configure(config: LogConfig) -> Log:
    """Set the log up, once; returns its root."""
    console = config.format == "console" or (config.format == "auto" and sys.stderr.isatty())
    set_level(config.level)
    processors: list[structlog.typing.Processor] = [
        _threshold,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
    ]
    if console:
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
        processors.append(renderer)
    else:
        # Without the values of variables: among them is what people said to a model.
        traceback = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        processors += [structlog.processors.ExceptionRenderer(traceback), structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _StandardError())),
        cache_logger_on_first_use=True,
    )
    log: Log = structlog.get_logger()
    return log


def set_level(level: str) -> None:
    """Log ``level`` and what is more severe from now on."""
    _threshold.level = logging.getLevelNamesMapping()[level.upper()]
