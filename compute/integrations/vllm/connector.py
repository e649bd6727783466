"""`KvdConnector`: what vLLM calls, of which one object lives with its scheduler and one in each of its workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from compute.block_store import BlockStore
from compute.integrations.vllm.chain import Chain
from compute.integrations.vllm.copies import Copies, CpuCopies, CudaCopies
from compute.integrations.vllm.lookups import Lookups
from compute.integrations.vllm.model import Adapters, check_supported, space_of
from compute.integrations.vllm.plan import Space, Step
from compute.integrations.vllm.regions import regions_of
from compute.integrations.vllm.scheduling import Scheduling
from compute.integrations.vllm.settings import Settings
from compute.integrations.vllm.stats import KvdPromMetrics, KvdStats
from compute.integrations.vllm.transfers import Results, Transfers
from protocol.errors import InvalidValue

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

IDLE_WAIT_S = 0.005
"""How long a step that computes nothing waits for transfers: it is repeated until they have ended."""


@dataclass
class KvdMetadata(KVConnectorMetadata):
    step: Step


@dataclass
class KvdHandshake(KVConnectorHandshakeMetadata):
    space: Space


@dataclass
class KvdSaved(KVConnectorWorkerMetadata):
    """How many workers are done with each save."""

    done: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KvdSaved)
        for number, count in other.done.items():
            self.done[number] = self.done.get(number, 0) + count
        return self


class KvdConnector(KVConnectorBase_V1):
    """Prefixes of any model with full attention, in the node's kvd, where they outlive the engine.

    Raises `InvalidValue` at the start for settings and models that are not supported. Afterwards nothing that becomes
    of kvd is an error of the engine's.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = Settings.of(transfer.kv_connector_extra_config or {})
        check_supported(vllm_config, kv_cache_config)
        # What fails to load is computed: a cache that fails requests would be worse than none.
        transfer.kv_load_failure_policy = "recompute"
        self._stats = KvdStats()
        self._block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._scheduling: Scheduling | None = None
        self._lookups: Lookups | None = None
        self._block_pool: BlockPool | None = None
        self._transfers: Transfers | None = None
        self._space: Space | None = None
        self._results = Results()
        self._spaces: list[Space] = []
        self._salt = b""
        self._adapters = Adapters()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def shutdown(self) -> None:
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None
        if self._lookups is not None:
            self._lookups.close()
            self._lookups = None

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        cache = self._kv_cache_config
        bases = {
            name: tensor.untyped_storage().data_ptr() for name, tensor in kv_caches.items() if hasattr(tensor, "device")
        }
        regions = regions_of(cache.kv_cache_tensors, bases, cache.num_blocks)
        device = next(iter(kv_caches.values())).device
        if device.type not in ("cpu", "cuda"):
            raise InvalidValue("device of the KV cache", device.type, "cpu or cuda")
        rank = get_tensor_model_parallel_rank()
        self._space = space = space_of(self._vllm_config, cache, regions, rank, self._settings)
        copies: Copies = CpuCopies(regions) if device.type == "cpu" else CudaCopies(regions, device)
        self._transfers = Transfers(
            partial(
                BlockStore,
                self._settings.run_dir,
                fingerprint=space.fingerprint,
                block_bytes=space.block_bytes,
                name="vllm-worker",
                timeout_s=self._settings.transfer_timeout_s,
            ),
            copies,
            space.block_bytes,
            self._settings,
            writes=rank % cache.kv_tp_replicas == 0,
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return KvdHandshake(self._space) if self._space is not None else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._transfers is not None:
            for load in self._step.loads:
                self._transfers.load(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        """Saves begin behind the step's work; their blocks are kept from reuse, so that nothing waits here."""
        if self._transfers is not None:
            for save in self._step.saves:
                self._transfers.save(save)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._transfers is None:
            return None, None
        idle = self.has_connector_metadata() and self._step.idle
        self._results = results = self._transfers.take_results(IDLE_WAIT_S if idle else 0.0)
        for name, by in results.counts.items():
            self._stats.count(name, by)
        for name in ("load_seconds", "save_seconds"):
            for seconds in getattr(results, name):
                self._stats.took(name, seconds)
        return None, results.loads or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._results.failed_blocks

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return KvdSaved(dict.fromkeys(self._results.saves, 1)) if self._results.saves else None

    @property
    def _step(self) -> Step:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvdMetadata)
        return metadata.step

    # The scheduler's side

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        spaces = self._spaces = [
            handshake.space for handshake in metadata.values() if isinstance(handshake, KvdHandshake)
        ]
        settings, role = self._settings, self._kv_transfer_config
        self._lookups = Lookups(spaces, settings, self._stats.count, self._stats.took)
        self._scheduling = Scheduling(
            self._block_tokens,
            self._lookups.find,
            self._chain,
            workers=self._vllm_config.parallel_config.world_size,
            pending_share=settings.pending_share,
            least_load_tokens=settings.least_load_tokens,
            save_decoded=settings.save_decoded,
            loads=role.is_kv_consumer,
            saves=role.is_kv_producer,
        )
        if self._block_pool is not None:
            self._scheduling.engine_blocks = _PoolBlocks(self._block_pool)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._block_pool = gpu_block_pool
        if self._scheduling is not None:
            self._scheduling.engine_blocks = _PoolBlocks(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduling is None or request.skip_reading_prefix_cache:
            return 0, False
        tokens = self._scheduling.match(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduling is not None and num_external_tokens > 0:
            self._stats.count("hit_tokens", num_external_tokens)
            self._scheduling.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        scheduling, manager = self._scheduling, self._kv_cache_manager
        if scheduling is None or manager is None:
            return KvdMetadata(Step())
        return KvdMetadata(
            scheduling.step(
                scheduler_output.num_scheduled_tokens, lambda request_id: manager.get_block_ids(request_id)[0]
            )
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduling is None:
            return
        self._scheduling.loads_ended(
            connector_output.finished_recving or (), set(connector_output.invalid_block_ids or ())
        )
        saved = connector_output.kv_connector_worker_meta
        if isinstance(saved, KvdSaved):
            self._scheduling.saves_ended(saved.done)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks that are being saved are kept by their reference counts: the request's own may go."""
        if self._scheduling is not None:
            self._scheduling.finished(request.request_id)
        return False, None

    def reset_cache(self) -> bool | None:
        """The weights may be others from now on, of which nothing is known: nothing stored before is found by this
        engine any more, and nothing that it stores by any other.
        """
        self._salt = os.urandom(16)
        if self._scheduling is not None:
            self._scheduling.forget()
        return True

    def has_pending_push_work(self) -> bool:
        return self._scheduling is not None and self._scheduling.pending_saves

    def has_pending_block_frees(self) -> bool:
        return self._scheduling is not None and self._scheduling.pending_saves

    def _chain(self, request: Request) -> Chain:
        """A request's keys: what the engine's own prefix cache tells apart, and adapters by what is in them."""

        def extra(first: int, end: int) -> object:
            keys, _ = generate_block_hash_extra_keys(request, first, end, 0)
            return keys

        salt = self._salt + self._adapters.identity(request.lora_request).encode()
        return Chain(self._spaces[0].model, self._block_tokens, extra, salt)

    # Figures

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._stats.is_empty():
            return None
        taken = KvdStats(data=self._stats.data)
        self._stats.reset()
        return taken

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KvdStats(data=data) if data else KvdStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return KvdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class _PoolBlocks:
    """The engine's pool: a block with one more reference is not given to another request."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.count = pool.num_gpu_blocks

    def keep(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def give_back(self, blocks: Sequence[int]) -> None:
        # The first of them is what the pool gives away first: the end of a prefix is worth less than its beginning.
        self._pool.free_blocks(self._pool.blocks[block] for block in reversed(blocks))
