"""The fast decoder's weights by the names of ``transformers``, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from compute.decode.matrices import rows_of
from compute.decode.weights import DenseWeights, LayerWeights, MoeWeights
from compute.kernels.matrix import Matrix
from compute.kernels.reference_linear import dequantise
from protocol.model import ModelConfig


def parts_of(config: ModelConfig, layer: LayerWeights) -> dict[str, Tensor]:
    """A layer's tensors under their names, in float32, taken out of the fused ones."""
    nope, heads = config.qk_nope_head_dim, config.num_attention_heads
    absorbed = (
        torch.cat((layer.absorb_key.values.transpose(1, 2), layer.absorb_value.values), dim=1).float().flatten(0, 1)
    )
    assert absorbed.shape[0] == heads * (nope + config.v_head_dim)
    out = {
        "input_layernorm.weight": layer.input_norm,
        "post_attention_layernorm.weight": layer.middle_norm,
        "self_attn.q_a_layernorm.weight": layer.query_norm,
        "self_attn.kv_a_layernorm.weight": layer.row_norm,
        "self_attn.kv_b_proj.weight": absorbed,
        "self_attn.o_proj.weight": dequantise(layer.output),
    }
    fused = {
        "self_attn.q_a_proj.weight": (layer.from_hidden, layer.hidden_columns[0], config.q_lora_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (layer.from_hidden, layer.hidden_columns[1], 576),
        "self_attn.q_b_proj.weight": (layer.from_latent, layer.latent_columns[0], heads * config.qk_head_dim),
    }
    if layer.key_norm is not None:
        indexer = "self_attn.indexer"
        out |= {f"{indexer}.k_norm.weight": layer.key_norm[0], f"{indexer}.k_norm.bias": layer.key_norm[1]}
        fused |= {
            f"{indexer}.wk.weight": (layer.from_hidden, layer.hidden_columns[2], 128),
            f"{indexer}.weights_proj.weight": (layer.from_hidden, layer.hidden_columns[3], config.index_n_heads),
            f"{indexer}.wq_b.weight": (layer.from_latent, layer.latent_columns[1], config.index_n_heads * 128),
        }
    out |= {name: dequantise(rows_of(matrix, first, count)) for name, (matrix, first, count) in fused.items()}
    feed_forward = layer.feed_forward
    if isinstance(feed_forward, DenseWeights):
        return out | mlp_parts("mlp", feed_forward.gate_up, feed_forward.down)
    assert isinstance(feed_forward, MoeWeights)
    experts = feed_forward.experts
    for expert in range(config.n_routed_experts):
        out |= mlp_parts(f"mlp.experts.{expert}", experts.gate_up[expert], experts.down[expert])
    out["mlp.gate.weight"] = dequantise(feed_forward.router)
    out["mlp.gate.e_score_correction_bias"] = feed_forward.bias
    return out | mlp_parts("mlp.shared_experts", feed_forward.shared.gate_up, feed_forward.shared.down)


def mlp_parts(prefix: str, gate_up: Matrix, down: Matrix) -> dict[str, Tensor]:
    gate, up = dequantise(gate_up).chunk(2)
    return {
        f"{prefix}.gate_proj.weight": gate,
        f"{prefix}.up_proj.weight": up,
        f"{prefix}.down_proj.weight": dequantise(down),
    }
