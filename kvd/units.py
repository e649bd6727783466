"""Numbers as people write them: ``128GiB``, ``1,499.06 GiB``, ``1_048_576``."""

from __future__ import annotations

import re
from decimal import Decimal

from protocol.errors import InvalidValue

MAX_BYTES = 2**63 - 1
"""The largest size that is accepted: what fits in a signed 64-bit integer."""

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"(\d{1,19}(?:\.\d{1,9})?)\s*([A-Za-z]*)", re.ASCII)
_COUNT = re.compile(r"\d+(?:[_,]\d+)*", re.ASCII)


def parse_bytes(text: str | int, what: str = "size", *, low: int = 0, high: int = MAX_BYTES) -> int:
    """Bytes of ``"128GiB"``, ``"1.5 TiB"``, ``"64 MB"``, ``"4096"`` or ``4096``; a fraction of a byte is cut.

    Upper or lower case does not matter; KiB, MiB, GiB and TiB are powers of 1024, kB, MB, GB and TB of 1000. Raises
    `InvalidValue`, naming ``what``, for anything else and for values outside ``low`` to ``high``.
    """
    allowed = f"{low} to {high} bytes, with an optional unit: KiB, MiB, GiB, TiB, kB, MB, GB, TB"
    if isinstance(text, bool):
        raise InvalidValue(what, text, allowed)
    if isinstance(text, int):
        size = text
    else:
        match = _SIZE.fullmatch(text.strip())
        if match is None or match[2].lower() not in _UNITS:
            raise InvalidValue(what, text, allowed)
        size = int(Decimal(match[1]) * _UNITS[match[2].lower()])
    if not low <= size <= high:
        raise InvalidValue(what, text, allowed)
    return size


def parse_count(text: str, what: str, *, low: int = 0, high: int = 2**31 - 1) -> int:
    """A whole number such as ``"1048576"``, ``"1_048_576"`` or ``"1,048,576"``.

    Raises `InvalidValue`, naming ``what``, for anything else and for values outside ``low`` to ``high``.
    """
    if _COUNT.fullmatch(text) is None or len(text) > 40:
        raise InvalidValue(what, text, f"a whole number, {low} to {high}")
    count = int(text.replace("_", "").replace(",", ""))
    if not low <= count <= high:
        raise InvalidValue(what, text, f"{low} to {high}")
    return count


def format_bytes(size: int, decimals: int = 2) -> str:
    """``size`` in the largest of B, KiB, MiB and GiB that it fills, with at most ``decimals`` decimals.

    GiB is the largest unit, so that the figures of one node's tiers can be compared at a glance.
    """
    if size < 0:
        return "-" + format_bytes(-size, decimals)
    if size < 2**10:
        return f"{size} B"
    unit = next(unit for unit in ("gib", "mib", "kib") if size >= _UNITS[unit])
    number = f"{size / _UNITS[unit]:,.{decimals}f}"
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return f"{number} {unit[0].upper()}iB"
