"""A shard of a model's weights, for tensor parallelism: which tensors are cut, and how.

    heads              rows of q_b_proj and kv_b_proj, columns of o_proj
    MLPs and experts   rows of gate_proj and up_proj, columns of down_proj: every expert is on every shard, in part
    lm_head            rows: a share of the vocabulary
    all else           whole on every shard: projections to the latents, the indexer, norms, the router, the embedding

How the shards' results become one is in ``compute.parallel.splitting``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compute.decode.matrices import WeightType, empty_matrix
from compute.kernels.matrix import BLOCK, Matrix
from protocol.errors import InvalidValue
from protocol.model import ModelConfig

if TYPE_CHECKING:
    from compute.decode.weights import Shapes, Source

_BY_ROWS = ("q_b_proj.weight", "kv_b_proj.weight", "gate_proj.weight", "up_proj.weight", "lm_head.weight")
_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")


def shard_config(config: ModelConfig, shards: int, kind: WeightType) -> ModelConfig:
    """The model as one shard computes it: fewer heads, narrower MLPs, the same hidden size and vocabulary.

    Raises `InvalidValue` for a number of shards that does not divide what is cut, FP8 weights into whole blocks.
    """
    heads, values = config.num_attention_heads, config.v_head_dim
    unit = BLOCK if kind == "fp8" else 1
    for name, size, block in (
        ("num_attention_heads", heads, 1),
        ("vocab_size", config.vocab_size, 1),
        ("intermediate_size", config.intermediate_size, unit),
        ("moe_intermediate_size", config.moe_intermediate_size, unit),
        ("rows of q_b_proj", heads * config.qk_head_dim, unit),
        ("rows of kv_b_proj", heads * (config.qk_nope_head_dim + values), unit),
        ("columns of o_proj", heads * values, unit),
    ):
        if size % (shards * block):
            blocks = f" of whole blocks of {block}" if block > 1 else ""
            raise InvalidValue(f"model's {name}", size, f"a multiple of {shards * block}, for {shards} shards{blocks}")
    return replace(
        config,
        num_attention_heads=heads // shards,
        intermediate_size=config.intermediate_size // shards,
        moe_intermediate_size=config.moe_intermediate_size // shards,
    )


class ShardSource:
    """A `compute.decode.weights.Source`: shard ``shard`` of ``shards`` of what ``source`` has, in ``shapes``.

    A tensor is taken whole, in the type asked for, and then cut: its values are those of the whole one.
    """

    def __init__(self, source: Source, shapes: Shapes, shard: int, shards: int) -> None:
        self._source, self._shapes = source, shapes
        self._shard, self._shards = shard, shards

    def vector(self, name: str) -> Tensor:
        return self._source.vector(name)

    def matrix(self, name: str, out: Matrix) -> None:
        dimension = 0 if name.endswith(_BY_ROWS) else 1 if name.endswith(_BY_COLUMNS) else None
        if dimension is None:
            self._source.matrix(name, out)
            return
        whole = empty_matrix(self._shapes[name], "bf16" if out.scales is None else "fp8", out.values.device)
        self._source.matrix(name, whole)
        out.values.copy_(self._part(whole.values, dimension))
        if out.scales is not None and whole.scales is not None:
            out.scales.copy_(self._part(whole.scales, dimension))

    def _part(self, whole: Tensor, dimension: int) -> Tensor:
        return torch.chunk(whole, self._shards, dimension)[self._shard]
