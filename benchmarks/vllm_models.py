"""Small models with random weights, as checkpoints whose outputs differ from token to token, and prompts for them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

VOCABULARY = 1024
KINDS = ("llama", "qwen", "mla")
BLOCK_TOKENS = {"llama": (32, 128), "qwen": (32, 128), "mla": (32, 128)}
"""What vLLM's attention on a CPU takes: multiples of 32. MLA is refused where there is no AMX."""


def make_checkpoint(folder: Path, kind: str, seed: int = 1) -> Path:
    """A checkpoint of ``kind`` in float32, made once."""
    path = folder / f"{kind}-{seed}"
    if path.exists():
        return path
    import torch
    import transformers as hf

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 32768,
        "initializer_range": 0.2,  # at 0.02 every output is one repeated token
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    if kind == "llama":
        model: Any = hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=4, head_dim=32, **common))
    elif kind == "qwen":
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(num_key_value_heads=2, head_dim=32, **common))
    else:
        mla: dict[str, Any] = {
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 4,
            "moe_intermediate_size": 64,
        }
        model = hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**mla, **common))
    part = path.with_suffix(".part")
    model.to(torch.float32).save_pretrained(part)
    part.rename(path)
    return path


Prompt = list[int]


def tokens(rng: random.Random, count: int) -> Prompt:
    return [rng.randrange(2, VOCABULARY) for _ in range(count)]


def family(seed: int, count: int, *, prefixes: int = 8, longest: int = 400) -> list[Prompt]:
    """``count`` prompts that share prefixes as conversations do: with one of a few, or with another prompt."""
    rng = random.Random(seed)
    starts = [tokens(rng, rng.randrange(40, longest)) for _ in range(prefixes)]
    prompts: list[Prompt] = []
    for _ in range(count):
        start = rng.choice(prompts) if prompts and rng.random() < 0.2 else rng.choice(starts)
        prompts.append(start[:longest] + tokens(rng, rng.randrange(1, 60)))
    return prompts
