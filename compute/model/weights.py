"""The tensors of a model: their names and shapes, and where they come from.

Names are those of ``transformers`` and of the published checkpoints. They are made from a seed or read from
safetensors files, and nothing else: a file is untrusted, and unpickling one would run it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from protocol.errors import InvalidValue
from protocol.model import ModelConfig

Weights = Mapping[str, Tensor]
"""Float32 tensors by name."""

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_READABLE = ("F32", "BF16", "F16")


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the main model, by name, in the order of the layers."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        for name, shape in layer_shapes(config, layer).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def layer_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of one decoder layer, by its name within the layer."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_a_proj.weight": (config.q_lora_rank, hidden),
        "self_attn.q_a_layernorm.weight": (config.q_lora_rank,),
        "self_attn.q_b_proj.weight": (heads * config.qk_head_dim, config.q_lora_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (config.kv_lora_rank + config.qk_rope_head_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (config.kv_lora_rank,),
        "self_attn.kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        "self_attn.o_proj.weight": (hidden, heads * config.v_head_dim),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.has_indexer(layer):
        shapes |= {
            "self_attn.indexer.wq_b.weight": (config.index_n_heads * config.index_head_dim, config.q_lora_rank),
            "self_attn.indexer.wk.weight": (config.index_head_dim, hidden),
            "self_attn.indexer.k_norm.weight": (config.index_head_dim,),
            "self_attn.indexer.k_norm.bias": (config.index_head_dim,),
            "self_attn.indexer.weights_proj.weight": (config.index_n_heads, hidden),
        }
    if layer < config.first_k_dense_replace:
        return shapes | _mlp_shapes("mlp", hidden, config.intermediate_size)
    shapes["mlp.gate.weight"] = (config.n_routed_experts, hidden)
    shapes["mlp.gate.e_score_correction_bias"] = (config.n_routed_experts,)
    for expert in range(config.n_routed_experts):
        shapes |= _mlp_shapes(f"mlp.experts.{expert}", hidden, config.moe_intermediate_size)
    return shapes | _mlp_shapes("mlp.shared_experts", hidden, config.moe_intermediate_size * config.n_shared_experts)


def random_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Weights of standard deviation ``initializer_range``, norms of 1, biases of 0: the same bits on every machine.

    A tensor depends on the seed and its own name only. Values are sums of four uniform integers, nearly normal, because
    a machine's logarithm and cosine decide the last bits of what a normal generator gives.
    """
    return {name: _random(name, shape, seed, config.initializer_range) for name, shape in tensor_shapes(config).items()}


def load_weights(config: ModelConfig, path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, or a folder with one or with an index of several, as float32.

    Tensors that the model does not have are passed over. Raises `InvalidValue` naming the first tensor that is missing,
    misshapen or of an unreadable dtype, or the file that cannot be read.
    """
    weights: dict[str, Tensor] = {}
    wanted = tensor_shapes(config)
    for file in safetensors_files(path):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dictionary, and not iterable
                    if name in wanted:
                        _check(name, opened.get_slice(name).get_shape(), opened.get_slice(name).get_dtype(), wanted)
                        weights[name] = opened.get_tensor(name).float()
        except (OSError, SafetensorError) as error:
            raise InvalidValue("weights file", str(file), f"a readable safetensors file ({error})") from None
    for name, shape in wanted.items():
        if name not in weights:
            raise InvalidValue(f"tensor {name} in {path}", "missing", f"shape {list(shape)}")
    return weights


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _random(name: str, shape: tuple[int, ...], seed: int, deviation: float) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    uniform = torch.randint(-(2**15), 2**15, (4, *shape), dtype=torch.int16, generator=generator)
    total = uniform.sum(0, dtype=torch.int32).float() + 2.0  # exact; the mean of each is -0.5
    return total.mul_(deviation * 0.75**0.5 / 2**15)  # a uniform integer's deviation is 2**16 / sqrt(12)


def safetensors_files(path: Path) -> list[Path]:
    """The safetensors files at ``path``; an index may only name files that lie beside it."""
    if not path.is_dir():
        return [path]
    index = path / INDEX_FILE
    if not index.exists():
        return [path / SINGLE_FILE]
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidValue("weights index", str(index), f"JSON with a weight_map ({error!r})") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise InvalidValue(f"file name in {index}", name, "the name of a safetensors file in the same folder")
    return [path / name for name in sorted(names)]


def _check(name: str, shape: list[int], dtype: str, wanted: dict[str, tuple[int, ...]]) -> None:
    if tuple(shape) != wanted[name]:
        raise InvalidValue(f"shape of tensor {name}", str(list(shape)), str(list(wanted[name])))
    if dtype not in _READABLE:
        raise InvalidValue(f"dtype of tensor {name}", dtype, ", ".join(_READABLE))
