"""What a reload changes: of the settings that were read again, those that a running daemon can take up.

The others stay as they are until the next start. Which are which is said where the settings are (`kvd.config`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from kvd.config import KEYS, RESIZABLE, Config, Key, with_value

RESTART = "it needs a restart"


@dataclass(frozen=True)
class Reload:
    """The outcome of reading all settings again. ``config`` is in force afterwards, but for the limits of tiers.

    ``words`` has, by dotted name, what was in force and what was read, as a file would have them, of every setting that
    is different; ``refused`` why it stays; ``limits`` are those that tiers are yet to be given.
    """

    config: Config
    words: Mapping[str, tuple[str, str]]
    refused: Mapping[str, str]
    limits: Sequence[str]


def merge(running: Config, wanted: Config, read: Config) -> Reload:
    """``running`` with those settings of ``wanted`` that may change. ``read`` is what was read before ``wanted``.

    A limit of a tier that differs from the one in force only because an operator changed that is no change.
    """
    differing = [key for key in KEYS.values() if _differs(key, running, wanted, read)]
    config = running
    for key in differing:
        if key.reloadable and key.dotted not in RESIZABLE:
            config = with_value(config, key, key.value_in(wanted), "")
    origins = {
        dotted: (wanted if key.reloadable and dotted not in RESIZABLE else running).origins.get(dotted, "default")
        for dotted, key in KEYS.items()
    }
    return Reload(
        config=replace(config, origins=MappingProxyType(origins)),
        words={key.dotted: (_word(key, running), _word(key, wanted)) for key in differing},
        refused={key.dotted: RESTART for key in differing if not key.reloadable},
        limits=[key.dotted for key in differing if key.dotted in RESIZABLE],
    )


def taken_up(read: Config, running: Config) -> Config:
    """``running``, with the limits of tiers as they were read."""
    for dotted in RESIZABLE:
        running = with_value(running, KEYS[dotted], KEYS[dotted].value_in(read), "")
    return running


def _differs(key: Key, running: Config, wanted: Config, read: Config) -> bool:
    value = key.value_in(wanted)
    if key.dotted in RESIZABLE and value == key.value_in(read):
        return False
    return bool(value != key.value_in(running))


def _word(key: Key, config: Config) -> str:
    return key.kind.render(key.value_in(config))
