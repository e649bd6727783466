"""What one setting is: how its value is written in a file, a variable or a flag, and what it may be.

The settings themselves, and where their values come from, are in `kvd.config`.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from kvd.units import parse_bytes
from protocol.errors import ConfigError, InvalidValue

SOCKET_PATH_LIMIT = 107
"""Bytes of a UNIX socket's path: ``sun_path`` is 108 with its terminating zero."""

_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


class Kind(Protocol):
    """A type of settings. ``allowed`` says in words what values there are."""

    @property
    def allowed(self) -> str: ...

    def parse(self, value: object) -> Any:
        """The value as a file, a variable or a flag gave it; raises `ValueError` or `InvalidValue` if refused."""

    def render(self, value: Any) -> str:
        """The value as TOML; `parse` reads it back."""


@dataclass(frozen=True)
class Size:
    """Bytes: an integer, or a string with a unit such as ``"16GiB"``; a multiple of ``multiple``."""

    least: int
    multiple: int = 1
    most: int = (1 << 63) - 1

    @property
    def allowed(self) -> str:
        step = f", a multiple of {exact_size(self.multiple)}" if self.multiple > 1 else ""
        most = f", at most {exact_size(self.most)}" if self.most < (1 << 63) - 1 else ""
        return f'bytes, at least {exact_size(self.least)}{most}{step}, such as "16GiB"'

    def parse(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        nbytes = value if isinstance(value, int) else parse_bytes(value)
        if not self.least <= nbytes <= self.most or nbytes % self.multiple:
            raise ValueError
        return nbytes

    def render(self, value: int) -> str:
        return f'"{exact_size(value)}"'


@dataclass(frozen=True)
class Number:
    """An integer from ``least`` to ``most``; or, with ``real``, any number between them."""

    least: int
    most: int
    real: bool = False

    @property
    def allowed(self) -> str:
        return f"{'a number' if self.real else 'an integer'} of {self.least} to {self.most}"

    def parse(self, value: object) -> int | float:
        if isinstance(value, str):
            value = float(value) if self.real else int(value)
        if isinstance(value, bool) or not isinstance(value, (int, float) if self.real else int):
            raise ValueError
        if not self.least <= value <= self.most:
            raise ValueError
        return float(value) if self.real else value

    def render(self, value: float) -> str:
        return str(value)


@dataclass(frozen=True)
class Word:
    """One of ``words``."""

    words: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return "one of " + ", ".join(self.words)

    def parse(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise ValueError
        return value

    def render(self, value: str) -> str:
        return json.dumps(value)


@dataclass(frozen=True)
class Text:
    """A string that matches ``pattern`` as a whole; ``allowed`` says the same in words."""

    pattern: str
    allowed: str

    def parse(self, value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value):
            raise ValueError
        return value

    def render(self, value: str) -> str:
        return json.dumps(value)


UNIX = "unix:"
"""What the address of a UNIX socket begins with."""


@dataclass(frozen=True)
class LocalAddress:
    """Where to listen on this host: nowhere, at a UNIX socket, or at a port of a loopback address."""

    allowed: ClassVar[str] = (
        'an empty string, "unix:" and an absolute path of at most 107 bytes, or a loopback address and a port such as '
        '"127.0.0.1:9345" or "[::1]:9345"'
    )

    def parse(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError
        if value.startswith(UNIX):
            path = value.removeprefix(UNIX)
            if not path.startswith("/") or len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
                raise ValueError
        elif value:
            host, _, port = value.rpartition(":")
            if not re.fullmatch("[1-9][0-9]{0,4}", port) or int(port) > 65535:
                raise ValueError
            if not ipaddress.ip_address(host[1:-1] if host.startswith("[") else host).is_loopback:
                raise ValueError
        return value

    def render(self, value: str) -> str:
        return json.dumps(value)


@dataclass(frozen=True)
class FileMode:
    """Permission bits, written as a string of octal digits."""

    allowed: ClassVar[str] = 'a string of octal digits, "0600" to "0666", without execute bits'

    def parse(self, value: object) -> int:
        if not isinstance(value, str) or not re.fullmatch("0?6[0246][0246]", value):
            raise ValueError
        return int(value, 8)

    def render(self, value: int) -> str:
        return f'"{value:04o}"'


def setting(kind: Kind, default: object, doc: str, *, reloadable: bool = False) -> Any:
    """A dataclass field that is a setting; ``default`` is written as in a file.

    A ``reloadable`` one may change while the daemon runs.
    """
    metadata = {"kind": kind, "doc": doc, "reloadable": reloadable}
    return dataclasses.field(default=kind.parse(default), metadata=metadata)


def parse_setting(kind: Kind, key: str, value: object, origin: str) -> Any:
    """The setting's value; raises `ConfigError` naming the key, the value, what is allowed, and the origin."""
    try:
        return kind.parse(value)
    except (ValueError, InvalidValue):
        raise ConfigError(
            f"{origin}: {key} is {value!r}; allowed: {kind.allowed}", key=key, value=str(value), origin=origin
        ) from None


def exact_size(nbytes: int) -> str:
    """``nbytes`` in the largest binary unit that divides it."""
    for unit, size in _UNITS:
        if nbytes and nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return f"{nbytes}B"
