"""`KvdStorage`: what SGLang's cache controller calls, of which one object lives with each rank's scheduler."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from compute.integrations.sglang.connection import Availability
from compute.integrations.sglang.model import POOLS, check_supported, model_fingerprint, space_fingerprint
from compute.integrations.sglang.pages import HostPool, Pages
from compute.integrations.sglang.settings import OPTION, Settings
from compute.integrations.sglang.space import PageSpace
from protocol.errors import InvalidValue

_log = logging.getLogger("sglang.kvd")


class KvdStorage(HiCacheStorage):
    """Prefixes of any model with full attention, in the node's kvd, where they outlive the engine.

    Raises `InvalidValue` at the start for settings and engines that are not supported. Afterwards nothing that becomes
    of kvd is an error of the engine's: pages are not found, not loaded or not stored, and SGLang is told which.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self._config = storage_config
        self._settings = Settings.of(storage_config.extra_config or {})
        check_supported(storage_config)
        self._model = model_fingerprint(self._settings)
        self._availability = Availability(self._settings)
        self._salt = b""
        self._spaces: dict[str, PageSpace] = {}
        self._pools: dict[str, HostPool] = {}
        # Ranks with the same bytes have one copy of them.
        self._writes = not storage_config.is_mla_model or storage_config.tp_rank == 0
        self._ended = False

    # Pools of host memory

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, "kv")

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool, str(host_pool_name))

    def _register(self, pool: HostPool, name: str) -> None:
        if name not in POOLS:
            raise InvalidValue("host pool", name, f"{' or '.join(POOLS)}: the pages of a prefix do not restore others")
        if self._pools.get(name) is pool:
            return
        pages = Pages(pool)
        fingerprint = space_fingerprint(self._model, self._config, name, pages.facts)
        if name in self._spaces:
            self._spaces[name].close()
        self._spaces[name] = PageSpace(pages, fingerprint, self._settings, self._availability)
        self._spaces[name].set_apart(self._salt)
        self._pools[name] = pool

    # Pages of key-value caches

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._find("kv", keys, _before(extra_info))

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._load("kv", keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._store("kv", keys, host_indices, _before(extra_info))

    def exists(self, key: str) -> bool:
        return self._find("kv", [key]) == 1

    # Pages of several pools

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        pages = self._find("kv", keys, _before(extra_info))
        found = {"kv": pages}
        for transfer in pool_transfers or []:
            if transfer.hit_policy != PoolHitPolicy.ALL_PAGES:
                raise InvalidValue("hit policy", transfer.hit_policy.value, repr(PoolHitPolicy.ALL_PAGES.value))
            found[str(transfer.name)] = self._find(str(transfer.name), keys[:pages])
        return PoolTransferResult(min(found.values()), found)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {
            transfer.name: self._load(str(transfer.name), transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        before = _before(extra_info)
        return {
            transfer.name: self._store(str(transfer.name), transfer.keys or [], transfer.host_indices, before)
            for transfer in transfers
        }

    def _find(self, pool: str, keys: Sequence[str], before: Sequence[str] = ()) -> int:
        return 0 if self._ended else self._spaces[pool].find(keys, before)

    def _load(self, pool: str, keys: Sequence[str], indices: Any) -> list[bool]:
        return [False] * len(keys) if self._ended else self._spaces[pool].load(keys, indices)

    def _store(self, pool: str, keys: Sequence[str], indices: Any, before: Sequence[str]) -> list[bool]:
        if not self._writes:  # the first rank has the same bytes, and stores them
            return [True] * len(keys)
        return [False] * len(keys) if self._ended else self._spaces[pool].store(keys, indices, before)

    # Single tensors: what SGLang calls without interface_v1, which is refused at the start

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> NoReturn:
        raise NotImplementedError(f"kvd has pages of host memory only: set interface_v1 in {OPTION}")

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> NoReturn:
        raise NotImplementedError(f"kvd has pages of host memory only: set interface_v1 in {OPTION}")

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> NoReturn:
        raise NotImplementedError(f"kvd has pages of host memory only: set interface_v1 in {OPTION}")

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> NoReturn:
        raise NotImplementedError(f"kvd has pages of host memory only: set interface_v1 in {OPTION}")

    # The whole

    def clear(self) -> bool:
        """The weights may be others from now on, of which nothing is known: nothing stored before is found by this
        engine any more, and nothing that it stores by any other. The pages that it leaves go when room is needed.
        """
        if self._config.is_mla_model and self._config.tp_size > 1:
            # The ranks share their pages, and have no way here to agree on another name for them.
            _log.warning("kvd is not used any more by this engine, which was told to clear its storage")
            self._ended = True
            return True
        self._salt = os.urandom(16)
        for space in self._spaces.values():
            space.set_apart(self._salt)
        return True

    def get_stats(self) -> StorageMetrics | None:
        if not self._config.enable_storage_metrics:
            return None
        stats = StorageMetrics()
        for space in self._spaces.values():
            for transfers, pages, rates in (
                (space.loaded, stats.prefetch_pgs, stats.prefetch_bandwidth),
                (space.stored, stats.backup_pgs, stats.backup_bandwidth),
            ):
                taken = transfers.take()
                pages.extend(taken[0])
                rates.extend(taken[1])
        return stats

    def close(self) -> None:
        """End the leases. No call may be in progress; later ones find nothing."""
        for space in self._spaces.values():
            space.close()


def _before(extra_info: HiCacheStorageExtraInfo | None) -> Sequence[str]:
    """The pages that come before, where SGLang is told to say them (``hicache_storage_pass_prefix_keys``)."""
    return (extra_info.prefix_keys if extra_info is not None else None) or ()
