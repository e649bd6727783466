"""What of a model decides the size of its history: the fields of a Hugging Face ``config.json``.

Field names are those of ``transformers`` (``glm_moe_dsa``, ``deepseek_v32``). The decoder itself is in
``compute.model``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from protocol.errors import InvalidValue
from protocol.layout import INDEX_DIM, LATENT_DIM, ROPE_DIM, Encoding, IndexGroup, PageFormat, group_layers


@dataclass(frozen=True)
class ModelConfig:
    """A sparse-attention decoder: MLA with a DSA indexer, dense first layers, then mixture-of-experts layers.

    ``rope_scaling`` is empty or a yarn description with the keys of ``transformers``.
    ``indexer_rope_interleaved`` is True for GLM, False (half-split) for DeepSeek-V3.2.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_shared_experts: int
    n_routed_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    routed_scaling_factor: float
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 1
    num_nextn_predict_layers: int = 0
    max_position_embeddings: int = 1048576
    rms_norm_eps: float = 1e-5
    rope_theta: float = 8e6
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    indexer_rope_interleaved: bool = True
    norm_topk_prob: bool = True
    n_group: int = 1
    topk_group: int = 1
    initializer_range: float = 0.02
    bos_token_id: int = 0

    def __post_init__(self) -> None:
        for name, needed in (
            ("kv_lora_rank", LATENT_DIM),
            ("qk_rope_head_dim", ROPE_DIM),
            ("index_head_dim", INDEX_DIM),
        ):
            if getattr(self, name) != needed:
                raise InvalidValue(f"model config's {name}", getattr(self, name), str(needed))
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "index_topk",
            "index_n_heads",
        ):
            if getattr(self, name) < 1:
                raise InvalidValue(f"model config's {name}", getattr(self, name), "at least 1")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """``qk_head_dim ** -0.5``, times the square of yarn's attention factor where there is one."""
        scale = math.sqrt(1.0 / self.qk_head_dim)
        factor = float(self.rope_scaling.get("factor", 1.0))
        mscale_all_dim = float(self.rope_scaling.get("mscale_all_dim", 0.0))
        if factor > 1.0 and mscale_all_dim:
            scale *= (0.1 * mscale_all_dim * math.log(factor) + 1.0) ** 2
        return scale

    def has_indexer(self, layer: int) -> bool:
        """Whether ``layer`` chooses its own selection (the MTP layers always do)."""
        if layer >= self.num_hidden_layers or self.index_topk_freq <= 1:
            return True
        return max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0

    def index_groups(self, first_layer: int = 0, end_layer: int | None = None) -> tuple[IndexGroup, ...]:
        """Index groups of layers ``first_layer`` to ``end_layer - 1`` (all main layers by default, without MTP)."""
        layers = range(first_layer, self.num_hidden_layers if end_layer is None else end_layer)
        return group_layers([layer for layer in layers if self.has_indexer(layer)], layers)

    def page_format(
        self, encoding: Encoding, *, mtp: bool = False, first_layer: int = 0, end_layer: int | None = None
    ) -> PageFormat:
        """The page of a worker that has layers ``first_layer`` to ``end_layer - 1``, by default all of them.

        With ``mtp``, and the last layer, the MTP layers are the last groups.
        """
        end = self.num_hidden_layers if end_layer is None else end_layer
        last = end == self.num_hidden_layers
        drafting = self.num_nextn_predict_layers if mtp and last else 0
        groups = self.index_groups(first_layer, end + drafting)
        return PageFormat(encoding, groups, self.hidden_size if last else 0)

    def with_layers(self, layers: int) -> ModelConfig:
        """The same model cut after ``layers`` layers. Raises `InvalidValue` where there are fewer, or none is left."""
        if not 1 <= layers <= self.num_hidden_layers:
            raise InvalidValue("layers", layers, f"1 to {self.num_hidden_layers}")
        return replace(self, num_hidden_layers=layers)

    def with_experts(self, experts: int) -> ModelConfig:
        """The same model with ``experts`` routed experts per layer.

        Raises `InvalidValue` for fewer than a token chooses, or for a number that its expert groups cannot share.
        """
        if experts < self.num_experts_per_tok:
            raise InvalidValue("routed experts", experts, f"at least the {self.num_experts_per_tok} that a token uses")
        if self.n_group > 1 and (experts % self.n_group or experts // self.n_group < 2):
            raise InvalidValue("routed experts", experts, f"a multiple of {self.n_group} groups, two or more in each")
        return replace(self, n_routed_experts=experts)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        """From a parsed ``config.json``; keys that decide nothing here are passed over.

        Raises `InvalidValue` for a missing field, or for a model without sparse attention.
        """
        values = dict(raw)
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        if "rope_theta" in rope:
            values["rope_theta"] = rope["rope_theta"]
        kind = rope.get("rope_type", rope.get("type", "default"))
        values["rope_scaling"] = dict(rope) if kind != "default" else {}
        if values.get("model_type") == "deepseek_v32":
            values.setdefault("indexer_rope_interleaved", False)
        if values.get("bos_token_id") is None:
            values["bos_token_id"] = 0
        known = {item.name for item in fields(cls)}
        chosen = {name: value for name, value in values.items() if name in known and value is not None}
        try:
            return cls(**chosen)
        except TypeError as error:
            raise InvalidValue(
                "model config", str(error), "every field of a glm_moe_dsa or deepseek_v32 config"
            ) from None

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """From a ``config.json`` file; raises `InvalidValue` if it cannot be read or parsed."""
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InvalidValue("model config file", str(path), f"a readable JSON object ({error})") from None
        if not isinstance(raw, dict):
            raise InvalidValue("model config file", str(path), "a JSON object")
        return cls.from_dict(raw)


GLM_5_3 = ModelConfig(
    vocab_size=154880,
    hidden_size=6144,
    intermediate_size=12288,
    moe_intermediate_size=2048,
    num_hidden_layers=78,
    num_attention_heads=64,
    n_shared_experts=1,
    n_routed_experts=256,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    routed_scaling_factor=2.5,
    q_lora_rank=2048,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=2048,
    index_topk_freq=4,
    index_skip_topk_offset=3,
    num_nextn_predict_layers=1,
)
"""GLM-5.3: 78 layers in 21 index groups, and one MTP layer."""

DEEPSEEK_V3_2 = ModelConfig(
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    num_attention_heads=128,
    n_shared_experts=1,
    n_routed_experts=256,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    routed_scaling_factor=2.5,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=2048,
    num_nextn_predict_layers=1,
    max_position_embeddings=163840,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
    indexer_rope_interleaved=False,
    n_group=8,
    topk_group=4,
)
"""DeepSeek-V3.2: 61 layers, each its own index group, and one MTP layer."""

DEMO = ModelConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=64,
    num_hidden_layers=7,
    num_attention_heads=4,
    n_shared_experts=1,
    n_routed_experts=8,
    num_experts_per_tok=2,
    first_k_dense_replace=3,
    routed_scaling_factor=2.5,
    q_lora_rank=64,
    kv_lora_rank=512,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=32,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=256,
    index_topk_freq=4,
    index_skip_topk_offset=3,
    initializer_range=0.2,
)
"""A model of GLM's structure that a laptop decodes: 7 layers in 4 index groups, random weights, tokens are bytes."""

PRESETS = {"glm-5.3": GLM_5_3, "deepseek-v3.2": DEEPSEEK_V3_2, "demo": DEMO}


def model_named(name_or_path: str) -> ModelConfig:
    """A preset by name, else the ``config.json`` at that path (or in that folder)."""
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    path = Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise InvalidValue("model", name_or_path, f"one of {', '.join(PRESETS)}, or the path of a config.json")
    return ModelConfig.from_file(path)
