"""SGLang's own pools of host memory and cache controller, made on a CPU as its engine makes them on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from tests.engines.sglang_world import config

PAGE = 8
"""Tokens of a page."""
TOKENS = 1024
"""Of a pool, at least."""
DEADLINE_S = 60.0


def publish(model: str) -> None:
    """Have the configuration of an engine of one rank in this process."""
    from sglang.srt.mem_cache.pool_host import base
    from sglang.srt.runtime_context import get_context, get_parallel
    from sglang.srt.server_args import ServerArgs

    get_context().set_server_args(ServerArgs(model_path=model, device="cpu"))
    get_parallel().override_permanently(tp_rank=0, pp_rank=0, attn_dcp_rank=0)
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def mha(layout: str) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device = MHATokenToKVPool(TOKENS, PAGE, torch.bfloat16, 2, 64, 3, "cpu", enable_memory_saver=False)
    info = device.get_device_pool_infos()[0].buffer_info
    sizes = {"device_capacity_tokens": TOKENS, "start_layer": 0, "end_layer": 3}
    pool = MHATokenToKVPoolHost(info, 1.0, 0, PAGE, layout, pin_memory=False, **sizes)
    pool.kept = device
    return pool


def mla(layout: str, page: int = PAGE, device: Any = None) -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    device = device or MLATokenToKVPool(TOKENS, page, torch.bfloat16, 512, 64, 3, "cpu", enable_memory_saver=False)
    info = device.get_device_pool_infos()[0].buffer_info
    sizes = {"device_capacity_tokens": TOKENS, "start_layer": 0, "end_layer": 3, "target_layer_num": 3}
    pool = MLATokenToKVPoolHost(info, 1.0, 0, page, layout, pin_memory=False, **sizes)
    pool.kept = device
    return pool


def sparse(layout: str) -> tuple[Any, Any]:
    """Latent rows, and the index keys beside them."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl

    sizes = {"enable_memory_saver": False, "kv_cache_dim": 576}
    device = DSATokenToKVPool(TOKENS, 64, 512, torch.bfloat16, 64, 3, "cpu", 128, **sizes)
    rows = mla(layout, 64, device)
    return rows, DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device), rows, pin_memory=False)


def indices_of(pool: Any, pages: Sequence[int]) -> torch.Tensor:
    size = pool.page_size
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


def fill(pool: Any, pages: Sequence[int], seed: int) -> None:
    for page in pages:
        flat = pool.get_data_page(page * pool.page_size)
        random = torch.rand(flat.shape, generator=torch.Generator().manual_seed(seed + page)) * 100
        pool.set_from_flat_data_page(page * pool.page_size, random.to(flat.dtype))


def read(pool: Any, pages: Sequence[int]) -> list[bytes]:
    return [pool.get_data_page(page * pool.page_size).view(torch.uint8).numpy().tobytes() for page in pages]


def llama(folder: Path, seed: int) -> str:
    """A small model of random weights, whose outputs depend on its prompts; returns its path."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, vocab_size=1000, **sizes))
    for parameter in model.parameters():
        parameter.data.mul_(8)
    model.save_pretrained(folder)
    return str(folder)


class Controller:
    """SGLang's cache controller of one rank, on the CPU, with its threads; this object does as its radix cache does.

    ``pools`` are the KV pool and, with sparse attention, the pool of index keys.
    """

    def __init__(self, run_dir: Path, pools: list[Any]) -> None:
        from sglang.srt.mem_cache.hicache_storage import PoolName
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
        from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry

        self._pools = pools
        self.page: int = pools[0].page_size
        names = (PoolName.KV, PoolName.INDEXER)[: len(pools)]
        self._names = names[1:]
        placed = zip(names, pools, strict=True)
        group = HostPoolGroup([PoolEntry(name, pool, None, int, name == PoolName.KV) for name, pool in placed])

        class Allocator:
            def get_kvcache(self) -> Any:
                return pools[0].kept

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        self._controller = HybridCacheController(
            Allocator(),
            group,
            self.page,
            torch.distributed.new_group([0], backend="gloo"),
            threading.Event(),
            storage_backend="dynamic",
            storage_backend_extra_config=config(run_dir).extra_config,
            model_name="model",
        )

    def backup(self, tokens: list[int]) -> list[bytes]:
        """Store the pages of a text, filled with bytes that the text gives; returns them."""
        indices = self._pools[0].alloc(len(tokens))
        pages = self._pages(indices)
        self._fill(pages, sum(place * token for place, token in enumerate(tokens)))
        content = self._read(pages)
        self._controller.write_storage(
            indices, tokens, hash_value=self._hashes(tokens), extra_pools=self._transfers() or None
        )
        self._controller.ack_backup_queue.get(timeout=DEADLINE_S)
        self._fill(pages, 0)  # what is read back does not lie here any more
        self._pools[0].free(indices)
        assert len(content) == len(tokens) // self.page
        return content

    def prefetch(self, tokens: list[int]) -> list[bytes]:
        """The pages of a text that come from the storage."""
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

        handle = CacheRequestHandle("request", 0)
        self._controller.prefetch(handle, tokens, extra_pools=self._transfers() or None)
        operation = self._controller.prefetch_hit_queue.get(timeout=DEADLINE_S)
        if not operation.hash_value:
            return []
        operation.host_indices = self._pools[0].alloc(len(operation.hash_value) * self.page)
        self._controller.prefetch_buffer.put(operation)
        completed = 0
        while True:
            ack = self._controller.ack_prefetch_queue.get(timeout=DEADLINE_S)
            completed = max(completed, ack.completed_tokens or 0)
            if ack.completed_req:
                break
        content = self._read(self._pages(operation.host_indices[:completed]))
        self._pools[0].free(operation.host_indices)
        return content

    def close(self) -> None:
        self._controller.detach_storage_backend()

    def _transfers(self) -> list[Any]:
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

        return [PoolTransfer(name, indices_from_pool=PoolName.KV) for name in self._names]

    def _pages(self, indices: torch.Tensor) -> list[int]:
        return [int(index) // self.page for index in indices[:: self.page]]

    def _fill(self, pages: list[int], seed: int) -> None:
        for number, pool in enumerate(self._pools):
            fill(pool, pages, seed + 1000 * number)

    def _read(self, pages: list[int]) -> list[bytes]:
        return [b"".join(of_pools) for of_pools in zip(*(read(pool, pages) for pool in self._pools), strict=True)]

    def _hashes(self, tokens: list[int]) -> list[str]:
        found: list[str] = self._controller.get_hash_str(tokens, None, page_size=self.page)
        return found
