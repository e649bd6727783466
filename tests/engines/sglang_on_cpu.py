"""An engine of SGLang on any CPU, with HiCache: ``python -m tests.engines.sglang_on_cpu FOLDER RUN_DIR PROMPTS``.

SGLang has HiCache's copies between VRAM and host memory for GPUs only, and rotary embedding for CPUs in a package that
is not released. Here are stand-ins for these two, in torch; all else is as released: scheduler, radix cache, cache
controller, host memory, model. Prints a line of JSON for each prompt (its output, and how many of its tokens came from
the storage), and ends with its standard input.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

PAGE = 8


def _rotary_embedding(
    positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool = True
) -> None:
    """In place, on the halves of each head's rotated part."""
    assert is_neox
    cos, sin = cos_sin_cache.index_select(0, positions.flatten()).float()[:, None].chunk(2, dim=-1)
    size = cos.shape[-1]
    for rows in (query, key):
        heads = rows.view(positions.numel(), -1, head_size)
        first, second = heads[..., :size].float(), heads[..., size : 2 * size].float()
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        heads[..., : 2 * size] = turned.to(rows.dtype)


def _load_layer(
    pool: Any, _: Any, host: Any, device: Any, layer: int, io_backend: str, *, is_draft: bool = False
) -> None:
    pool.device_k_buffers[layer][device] = pool.k_buffer[host, layer]
    pool.device_v_buffers[layer][device] = pool.v_buffer[host, layer]


def _back_up(pool: Any, _: Any, host: Any, device: Any, io_backend: str) -> None:
    for layer in range(pool.layer_num):
        pool.k_buffer[host, layer] = pool.device_k_buffers[layer][device]
        pool.v_buffer[host, layer] = pool.device_v_buffers[layer][device]


def install() -> None:
    """Put the stand-ins where SGLang looks for what they stand for; in each of its processes."""
    ops = ModuleType("vllm._custom_ops")
    ops.__dict__["rotary_embedding"] = _rotary_embedding
    sys.modules.update({"vllm": ModuleType("vllm"), "vllm._custom_ops": ops})
    from sglang.srt.mem_cache.pool_host import common, mha

    common._cuda_host_register = lambda *_: None
    mha.MHATokenToKVPoolHost.load_to_device_per_layer = _load_layer
    mha.MHATokenToKVPoolHost.backup_from_device_all_layer = _back_up


def main() -> None:
    import sglang

    from tests.engines.sglang_world import config

    folder, run_dir, prompts = sys.argv[1:]
    extra = {**(config(Path(run_dir)).extra_config or {}), "prefetch_threshold": PAGE}
    engine = sglang.Engine(
        model_path=folder,
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        page_size=PAGE,
        mem_fraction_static=0.3,
        max_total_tokens=4096,
        max_running_requests=4,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        enable_hierarchical_cache=True,
        enable_cache_report=True,
        hicache_mem_layout="page_first",
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps(extra),
        hicache_storage_prefetch_policy="wait_complete",
    )
    for prompt in json.loads(prompts):
        done = engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 8, "temperature": 0})
        details = done["meta_info"]["cached_tokens_details"] or {}
        line = {"output": done["output_ids"], "from_storage": details.get("storage", 0)}
        sys.stdout.write(f"{json.dumps(line)}\n")
        sys.stdout.flush()
    sys.stdin.read()
    engine.shutdown()


if __name__ in ("__main__", "__mp_main__"):
    install()
if __name__ == "__main__":
    main()
