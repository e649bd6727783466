"""What ``kv_connector_extra_config`` may set; docs/vllm.md has the same list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compute.integrations.settings import settings_from
from protocol.errors import InvalidValue


@dataclass(frozen=True)
class Settings:
    """Settings of the connector. Times are in seconds."""

    run_dir: str = "/run/kvd"
    """Where the node's daemon has its sockets."""
    lookup_timeout_s: float = 0.1
    """Longest that the scheduler waits for an answer, each time that a request is to be scheduled anew."""
    transfer_timeout_s: float = 2.0
    """Longest that the copying thread waits for an answer; no step waits for that thread."""
    load_timeout_s: float = 5.0
    """Longest that a load waits for its turn before the request computes its prompt instead."""
    retry_s: float = 1.0
    """How long the daemon is left alone after it did not answer; doubles with each failure."""
    longest_retry_s: float = 30.0
    """Where that doubling ends."""
    pending_share: float = 0.25
    """Most of the engine's blocks that may be kept from reuse because their save is not done."""
    least_load_tokens: int = 1
    """Prefixes that are shorter are computed, not loaded."""
    save_decoded: bool = True
    """Whether blocks with sampled tokens are saved too, or those of prompts only."""
    model_identity: str = ""
    """What the weights are known by instead of the hash of their files."""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """Raises `InvalidValue` for a name that is none of these, or a value out of its range."""
        settings = settings_from(cls, extra, "kv_connector_extra_config")
        for name in ("lookup_timeout_s", "transfer_timeout_s", "load_timeout_s", "retry_s"):
            if not getattr(settings, name) > 0:
                raise InvalidValue(name, getattr(settings, name), "more than 0 seconds")
        if settings.longest_retry_s < settings.retry_s:
            raise InvalidValue("longest_retry_s", settings.longest_retry_s, f"at least retry_s, {settings.retry_s:g}")
        if not 0 < settings.pending_share <= 1:
            raise InvalidValue("pending_share", settings.pending_share, "more than 0, at most 1")
        if settings.least_load_tokens < 1:
            raise InvalidValue("least_load_tokens", settings.least_load_tokens, "at least 1")
        return settings
