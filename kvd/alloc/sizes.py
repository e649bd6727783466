"""The check that every size and count passes before anything is done with it."""

from __future__ import annotations

from protocol.errors import InvalidValue

LARGEST_SIZE = 2**60
"""Bytes: more than any tier has, and few enough that sums and roundings stay within 64 bits."""


def require_size(what: str, value: int, least: int = 1, most: int = LARGEST_SIZE) -> int:
    """``value``, which must be an integer of ``least`` to ``most``; raises `InvalidValue` otherwise."""
    if type(value) is not int or not least <= value <= most:
        raise InvalidValue(what, value, f"an integer of {least} to {most}")
    return value


def require_multiple(what: str, value: int, unit: int, most: int = LARGEST_SIZE) -> int:
    """``value``, which must be a multiple of ``unit``, not 0 and at most ``most``; raises `InvalidValue` otherwise."""
    if require_size(what, value, unit, most) % unit:
        raise InvalidValue(what, value, f"a multiple of {unit}")
    return value
