"""What a model's blocks depend on beside their tokens, and which models are refused.

Everything here is said of one worker: the hash over it is the fingerprint of its space. A fact too many costs hits, one
too few would give another model's blocks: what is not known to be harmless is in it.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec, iter_layer_specs

from compute.integrations.checkpoint import folder_of, identity_of_folder
from compute.integrations.vllm.plan import Space
from compute.integrations.vllm.regions import Region, block_bytes
from compute.integrations.vllm.settings import Settings
from protocol.block_keys import fingerprint
from protocol.errors import InvalidValue

FORMAT = 1
"""Of what a block holds: its pieces in the order of the layers."""
_KEPT = (FullAttentionSpec, MLAAttentionSpec)
_WITHOUT_CONTEXT = ("CPU_MLA",)
"""Backends that compute a prompt from its first token or not at all: behind loaded tokens they compute nonsense."""
_NOT_OF_THE_WEIGHTS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")
_LENGTH_DEPENDENT = ("longrope", "dynamic")
"""Kinds of RoPE whose angles depend on the longest length that the engine is set to."""


def check_supported(config: VllmConfig, cache: KVCacheConfig) -> None:
    """Raises `InvalidValue` by name for what the blocks of a prefix alone do not restore."""
    groups = cache.kv_cache_groups
    if len(groups) != 1:
        kinds = sorted({type(spec).__name__ for group in groups for spec in iter_layer_specs(group.kv_cache_spec)})
        raise InvalidValue(
            "groups of layers with caches of their own", f"{len(groups)}: {', '.join(kinds)}", "one, of full attention"
        )
    for spec in iter_layer_specs(groups[0].kv_cache_spec):
        if type(spec) not in _KEPT:
            names = " or ".join(kind.__name__ for kind in _KEPT)
            raise InvalidValue("kind of KV cache", type(spec).__name__, names)
    if config.speculative_config is not None:
        raise InvalidValue("speculative decoding", config.speculative_config.method, "none: drafts are not saved")
    if getattr(config.cache_config, "calculate_kv_scales", False):  # of some releases
        raise InvalidValue("calculate_kv_scales", True, "off: scales that depend on the first batch are not saved")
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise InvalidValue(name, getattr(parallel, name), "1")


def space_of(config: VllmConfig, cache: KVCacheConfig, regions: list[Region], rank: int, settings: Settings) -> Space:
    """The space of the worker that is ``rank`` in its tensor parallel group. Reads the checkpoint's files once."""
    model = fingerprint(_model_facts(config, settings))
    replicas = cache.kv_tp_replicas
    parallel = config.parallel_config
    layers = cache.kv_cache_groups[0].layer_names
    backends = get_layers_from_vllm_config(config, AttentionLayerBase, layers)
    for layer in backends.values():
        if (backend := layer.get_attn_backend().get_name()) in _WITHOUT_CONTEXT:
            raise InvalidValue("attention backend", backend, "one that can begin a prompt behind tokens in its cache")
    mine = {
        "format": FORMAT,
        "model": model,
        "shard": rank // replicas,
        "shards": parallel.tensor_parallel_size // replicas,
        "pipeline": parallel.pipeline_parallel_size,
        "layers": " ".join(layers),
        "layout": str(cache.kv_cache_layout),
        "pieces": " ".join(str(region.nbytes) for region in regions),
        "specs": " ".join(sorted({repr(spec) for spec in iter_layer_specs(cache.kv_cache_groups[0].kv_cache_spec)})),
        "backends": " ".join(
            f"{layer.get_attn_backend().get_name()} {getattr(layer, 'isa', '')}" for layer in backends.values()
        ),
    }
    return Space(model, fingerprint(mine), block_bytes(regions))


def _model_facts(config: VllmConfig, settings: Settings) -> dict[str, str | int | bytes]:
    model, cache = config.model_config, config.cache_config
    described = {key: value for key, value in model.hf_config.to_dict().items() if key not in _NOT_OF_THE_WEIGHTS}
    text = json.dumps(described, sort_keys=True, default=str)
    return {
        "config": text,
        "weights": _weights(config, settings),
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "cache dtype": str(cache.cache_dtype),
        "block tokens": cache.block_size,
        "length": model.max_model_len if any(kind in text for kind in _LENGTH_DEPENDENT) else 0,
    }


def _weights(config: VllmConfig, settings: Settings) -> str:
    if settings.model_identity:
        return f"identity {settings.model_identity}"
    model, load = config.model_config, config.load_config
    if str(load.load_format) == "dummy":
        return f"dummy, seed {model.seed}, torch {torch.__version__}"
    try:
        return f"files {identity_of_folder(folder_of(model.model, model.revision))}"
    except (OSError, ValueError) as error:
        raise InvalidValue(
            "model", model.model, f"a folder, or one in the hub's cache ({error}); or set model_identity"
        ) from None


class Adapters:
    """What LoRA adapters are known by: name, path, and what is in their files when they are first used.

    One whose files cannot be read here is known to this process alone: nothing of it is shared.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, str], str] = {}

    def identity(self, request: Any) -> str:
        """Of a request's ``LoRARequest``; empty for None."""
        if request is None:
            return ""
        key = (request.lora_int_id, request.lora_name, request.lora_path)
        if key not in self._known or getattr(request, "load_inplace", False):
            try:
                files = identity_of_folder(folder_of(request.lora_path))
            except (OSError, ValueError, InvalidValue, ImportError):
                files = f"unread {os.urandom(16).hex()}"
            self._known[key] = f"{request.lora_name} {request.lora_path} {files}"
        return self._known[key]
