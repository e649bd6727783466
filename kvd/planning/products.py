"""The matrix products of a decode step, as far as their sizes go: `kvd plan` asks how many bytes they read.

Shapes are those of ``compute.decode.weights``, which fuses projections and keeps ``kv_b_proj`` in absorbed form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocol.model import ModelConfig

WeightType = Literal["fp8", "bf16"]
WEIGHT_TYPES: tuple[WeightType, ...] = ("fp8", "bf16")

_BYTES = {"fp8": 1 + 4 / 128**2, "bf16": 2.0}  # a float32 scale for each 128 × 128 values


@dataclass(frozen=True)
class Product:
    """A weight of ``values`` values that every row is multiplied with, and ``experts`` of ``expert_values`` each.

    A row takes ``taken`` of the experts, whichever.
    """

    kind: WeightType
    values: int
    experts: int = 0
    expert_values: int = 0
    taken: int = 0

    @property
    def launches(self) -> int:
        """Experts take two: gate and up, then down."""
        return 2 if self.experts else 1

    @property
    def nbytes(self) -> float:
        """Bytes in VRAM."""
        return (self.values + self.experts * self.expert_values) * _BYTES[self.kind]

    def read_bytes(self, rows: float) -> float:
        """Bytes that ``rows`` rows read; experts that none of them is expected to take left out."""
        wanted = self.experts * (1 - (1 - self.taken / self.experts) ** rows) if self.experts else 0.0
        return (self.values + wanted * self.expert_values) * _BYTES[self.kind]

    def operations(self, rows: float) -> float:
        """Multiplications and additions of ``rows`` rows."""
        return 2 * rows * (self.values + self.taken * self.expert_values)


def layer_products(config: ModelConfig, layer: int, kind: WeightType) -> list[Product]:
    """Of decoder layer ``layer``, in order; the MTP layer is the one behind the last."""
    hidden, heads, latent, indexer = config.hidden_size, config.num_attention_heads, config.kv_lora_rank, 0
    from_hidden = config.q_lora_rank + latent + config.qk_rope_head_dim
    from_latent = heads * config.qk_head_dim
    if config.has_indexer(layer):
        from_hidden += config.index_head_dim + config.index_n_heads
        indexer = config.index_n_heads * config.index_head_dim
    products = [
        Product(kind, from_hidden * hidden),
        Product(kind, (from_latent + indexer) * config.q_lora_rank),
        Product("bf16", heads * latent * config.qk_nope_head_dim),
        Product("bf16", heads * latent * config.v_head_dim),
        Product(kind, hidden * heads * config.v_head_dim),
    ]
    if layer < config.first_k_dense_replace:
        inner = hidden * config.intermediate_size
        return [*products, Product(kind, 2 * inner), Product(kind, inner)]
    expert = 3 * hidden * config.moe_intermediate_size
    shared = config.n_shared_experts * expert
    experts = Product(kind, shared, config.n_routed_experts, expert, config.num_experts_per_tok)
    return [*products, Product("bf16", config.n_routed_experts * hidden), experts]


def head_product(config: ModelConfig) -> Product:
    """From the final norm to the logits."""
    return Product("bf16", config.vocab_size * config.hidden_size)


def draft_product(config: ModelConfig, kind: WeightType) -> Product:
    """What the MTP layer has beside a decoder layer: embedding and hidden into one."""
    return Product(kind, 2 * config.hidden_size**2)


def weight_bytes(config: ModelConfig, kind: WeightType, layers: range, *, drafts: bool) -> float:
    """Bytes in VRAM of decoder layers ``layers``, with embedding and head at the ends, and the MTP layer behind."""
    last = config.num_hidden_layers
    every = [product for layer in layers for product in layer_products(config, layer, kind)]
    ends = (layers.start == 0) + (layers.stop == last)
    if drafts and layers.stop == last:
        every += [*layer_products(config, last, kind), draft_product(config, kind)]
        ends += layers.start != 0  # drafting embeds tokens
    return sum(product.nbytes for product in every) + ends * head_product(config).nbytes
