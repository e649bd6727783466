"""What ``--hicache-storage-backend-extra-config`` may set for kvd; docs/sglang.md has the same list."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compute.integrations.settings import settings_from
from protocol.errors import InvalidValue

OPTION = "hicache_storage_backend_extra_config"
_OF_SGLANG = frozenset(("backend_name", "module_path", "class_name", "interface_v1"))
"""Names in the same option that SGLang reads, and leaves there."""


@dataclass(frozen=True)
class Settings:
    """Settings of the storage backend. Times are in seconds."""

    run_dir: str = "/run/kvd"
    """Where the node's daemon has its sockets."""
    timeout_s: float = 1.0
    """Longest that one of SGLang's storage threads waits for an answer; no step waits for those threads."""
    retry_s: float = 1.0
    """How long the daemon is left alone after it did not answer; doubles with each failure."""
    longest_retry_s: float = 30.0
    """Where that doubling ends."""
    model_identity: str = ""
    """What the weights are known by instead of the hash of their files."""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """Raises `InvalidValue` for a name that is neither one of these nor SGLang's, or a value out of its range."""
        if not extra.get("interface_v1"):
            # Without it SGLang copies each page once more, through tensors of its own.
            raise InvalidValue("interface_v1", extra.get("interface_v1"), f"1, in {OPTION}")
        own = {name: value for name, value in extra.items() if name not in _OF_SGLANG}
        settings = settings_from(cls, own, OPTION)
        for name in ("timeout_s", "retry_s", "longest_retry_s"):
            if not 0 < getattr(settings, name) < math.inf:
                raise InvalidValue(name, getattr(settings, name), "more than 0 seconds")
        if settings.longest_retry_s < settings.retry_s:
            raise InvalidValue("longest_retry_s", settings.longest_retry_s, f"at least retry_s, {settings.retry_s:g}")
        return settings
