"""As much of SGLang as the storage backend meets, for tests without it. `test_sglang` holds it against the package.

`HostPool` lays its pages out as SGLang's pools of host memory do.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

SGLANG = "0.5.23"
MODULES = (
    "sglang",
    "sglang.version",
    "sglang.srt",
    "sglang.srt.runtime_context",
    "sglang.srt.mem_cache",
    "sglang.srt.mem_cache.hicache_storage",
    "sglang.srt.observability",
    "sglang.srt.observability.metrics_collector",
)
OURS = ("compute.integrations.sglang.model", "compute.integrations.sglang.storage")
"""Modules that import SGLang's."""


# sglang.srt.mem_cache.hicache_storage


@dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None


@dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


class PoolName(str, Enum):  # noqa: UP042 - as SGLang has it: its str() is the value
    KV = "kv"
    MAMBA = "mamba"
    INDEXER = "indexer"

    def __str__(self) -> str:
        return self.value


class PoolHitPolicy(str, Enum):  # noqa: UP042
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: torch.Tensor | None = None
    device_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[Any] | None = None
    indices_from_pool: PoolName | None = None
    block_pages: int = 0
    group_pages: int = 0


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if not hasattr(self, "registered_pools"):
            self.registered_pools: dict[Any, Any] = {}
        self.registered_pools[host_pool_name] = host_pool

    def on_host_pools_registered(self) -> None:
        return

    def batch_exists_v2(self, keys: Any, pool_transfers: Any = None, extra_info: Any = None) -> PoolTransferResult:
        raise NotImplementedError

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        raise NotImplementedError

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        raise NotImplementedError

    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> list[bool]:
        raise NotImplementedError

    def batch_set_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> list[bool]:
        raise NotImplementedError

    @abstractmethod
    def get(self, key: Any, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def set(self, key: Any, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_set(self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> Any:
        pass

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    def batch_exists(self, keys: Any, extra_info: Any = None) -> int:
        raise NotImplementedError

    def clear(self) -> Any:
        return None

    def get_stats(self) -> Any:
        return None


# sglang.srt.observability.metrics_collector


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


# sglang.srt.mem_cache.pool_host


class HostPool:
    """Host memory for ``pages`` pages: of keys and values of heads (MHA), or of one latent row (MLA)."""

    def __init__(
        self,
        layout: str = "page_first",
        *,
        is_mla: bool = False,
        page_size: int = 8,
        layers: int = 3,
        pages: int = 32,
        width: int = 128,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.layout, self.page_size, self.dtype = layout, page_size, dtype
        self.start_layer, self.end_layer = 0, layers
        self.size = pages * page_size
        self._layers, self._width = layers, width
        self._kinds = 1 if is_mla else 2
        shapes = {"layer_first": (layers, self.size, width), "page_first": (self.size, layers, width)}
        shape = shapes.get(layout, (pages, layers, page_size, width))
        self._buffer = torch.zeros((self._kinds, *shape), dtype=dtype)

    def fill(self, page: int, seed: int) -> None:
        """Give a page bytes of its own."""
        random = torch.Generator().manual_seed(seed)
        view = self._view(page)
        view.copy_(torch.rand(view.shape, generator=random).to(self.dtype))

    def read(self, page: int) -> bytes:
        """The bytes of a page, in an order of this pool's."""
        return self._view(page).contiguous().view(torch.uint8).numpy().tobytes()

    def indices(self, pages: list[int]) -> torch.Tensor:
        """Of the tokens of these pages, as SGLang gives them."""
        return torch.cat([torch.arange(page * self.page_size, (page + 1) * self.page_size) for page in pages])

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        assert len(indices) % self.page_size == 0
        if self.layout not in ("layer_first", "page_first", "page_first_direct"):
            raise ValueError(f"Unsupported layout: {self.layout}")
        row = self._width * self.dtype.itemsize
        kind = self._layers * self.size * row
        layers = self._layers if self.layout == "layer_first" else 1
        starts = [
            self._buffer.data_ptr() + index * (row if self.layout == "layer_first" else self._layers * row)
            for index in indices.tolist()[:: self.page_size]
        ]
        addresses = [
            start + layer * self.size * row + each * kind
            for start in starts
            for layer in range(layers)
            for each in range(self._kinds)
        ]
        return addresses, [self.page_size * row * (self._layers // layers)] * len(addresses)

    def _view(self, page: int) -> torch.Tensor:
        tokens = slice(page * self.page_size, (page + 1) * self.page_size)
        if self.layout == "layer_first":
            return self._buffer[:, :, tokens]
        return self._buffer[:, tokens] if self.layout == "page_first" else self._buffer[:, page]


# What is set of the engine


class Context:
    """What SGLang publishes of its configuration; ``model_path`` is a folder of weights."""

    def __init__(self, model_path: str) -> None:
        self.version = SGLANG
        self.model = SimpleNamespace(
            model_path=model_path,
            revision=None,
            load_format="auto",
            model_loader_extra_config="{}",
            context_length=None,
            model_impl="auto",
            json_model_override_args="{}",
            dtype="auto",
            quantization=None,
            quantization_param_path=None,
            modelopt_quant=None,
            rl_quant_profile=None,
            kv_cache_dtype="auto",
            qsa_indexer_dtype=None,
        )
        self.device = SimpleNamespace(random_seed=1)
        self.spec = SimpleNamespace(speculative_algorithm=None)
        kernel = SimpleNamespace(
            attention_backend="torch_native", prefill_attention_backend=None, decode_attention_backend=None
        )
        self.exec = SimpleNamespace(kernel=kernel)


@contextmanager
def installed(context: Context) -> Iterator[type]:
    """The storage backend's class on this stand-in for SGLang, whether SGLang is installed or not."""
    modules = {name: ModuleType(name) for name in MODULES}
    modules["sglang.version"].__dict__["__version__"] = context.version
    modules["sglang.srt.runtime_context"].__dict__.update(
        get_model=lambda: context.model,
        get_device=lambda: context.device,
        get_spec=lambda: context.spec,
        get_exec=lambda: context.exec,
    )
    modules["sglang.srt.mem_cache.hicache_storage"].__dict__.update(globals())
    modules["sglang.srt.observability.metrics_collector"].__dict__["StorageMetrics"] = StorageMetrics
    before = {name: sys.modules.pop(name, None) for name in (*MODULES, *OURS)}
    sys.modules.update(modules)
    try:
        from compute.integrations.sglang.storage import KvdStorage

        yield KvdStorage
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
