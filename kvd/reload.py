"""What a reload changes: of the settings that were read again, those that a running daemon can take up.

The others stay as they are until the next start. Which are which is said where the settings are (`kvd.config`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvd.config import KEYS, Config, Key


@dataclass(frozen=True)
class Reload:
    """The outcome of reading all settings again. ``config`` is in force afterwards.

    ``changed`` and ``refused`` map dotted names to ``old → new``, both as a file would have them.
    """

    config: Config
    changed: Mapping[str, str]
    refused: Mapping[str, str]


def merge(running: Config, wanted: Config) -> Reload:
    """``running`` with those settings of ``wanted`` that may change."""
    differing = [key for key in KEYS.values() if key.value_in(running) != key.value_in(wanted)]
    config = running
    for key in differing:
        if key.reloadable:
            config = _with(config, key, key.value_in(wanted))
    origins = {
        dotted: (wanted if key.reloadable else running).origins.get(dotted, "default") for dotted, key in KEYS.items()
    }
    words = {key.dotted: _difference(key, running, wanted) for key in differing}
    return Reload(
        config=dataclasses.replace(config, origins=MappingProxyType(origins)),
        changed={dotted: text for dotted, text in words.items() if KEYS[dotted].reloadable},
        refused={dotted: text for dotted, text in words.items() if not KEYS[dotted].reloadable},
    )


def _with(config: Config, key: Key, value: Any) -> Config:
    if not key.section:
        return dataclasses.replace(config, **{key.name: value})
    section = dataclasses.replace(getattr(config, key.section), **{key.name: value})
    return dataclasses.replace(config, **{key.section: section})


def _difference(key: Key, running: Config, wanted: Config) -> str:
    return f"{key.kind.render(key.value_in(running))} → {key.kind.render(key.value_in(wanted))}"
