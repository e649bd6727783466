"""Settings that an engine passes on from its user: a name or a kind of value that is not known is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from protocol.errors import InvalidValue

_SettingsT = TypeVar("_SettingsT")


def settings_from(cls: type[_SettingsT], given: Mapping[str, Any], where: str) -> _SettingsT:
    """A ``cls``, a dataclass whose fields all have defaults, of what is ``given`` in the engine's option ``where``.

    Raises `InvalidValue` for a name that is no field, or a value of another type than the field's default.
    """
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in known:
            raise InvalidValue(where, name, f"one of {', '.join(sorted(known))}")
        default = known[name].default
        assert default is not MISSING
        wanted = (int, float) if isinstance(default, float) else (type(default),)
        if not isinstance(value, wanted) or (isinstance(value, bool) and not isinstance(default, bool)):
            raise InvalidValue(name, value, f"a value like {default!r}")
    return cls(**given)
