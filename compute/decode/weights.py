"""The weights of the fast decoder, on its device: fused projections, and ``kv_b_proj`` in absorbed form.

They are read-only and belong to the process: steps, batches and sessions share them. Where their values come from is a
`Source`: a seed (`compute.decode.random_source`) or safetensors files (`compute.decode.checkpoint`).

Each part of a fused projection begins at a multiple of 128 rows, with zero rows in between, so that the block scales of
a published FP8 checkpoint stay those of its tensors. ``indexer.weights_proj``, which such checkpoints keep in bfloat16,
is quantised with the projection that it is fused into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from compute.decode.checkpoint import CheckpointSource, Progress
from compute.decode.matrices import WeightType, empty_matrix, rows_of
from compute.decode.random_source import RandomSource
from compute.decode.shards import ShardSource, shard_config
from compute.kernels.experts import Experts
from compute.kernels.matrix import BLOCK, Matrix
from compute.kernels.reference_linear import dequantise
from compute.model.weights import layer_shapes
from protocol.errors import InvalidValue
from protocol.layout import LATENT_DIM, round_up
from protocol.model import ModelConfig

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class DenseWeights:
    """``down(silu(gate(x)) * up(x))``."""

    gate_up: Matrix
    """[2 I, H]: all rows of gate, then all of up"""
    down: Matrix
    """[H, I]"""


@dataclass(frozen=True)
class MoeWeights:
    """Routed experts and the shared one."""

    router: Matrix
    """bfloat16 [E, H]"""
    bias: Tensor
    """float32 [E]: ``e_score_correction_bias``, for the choice only"""
    experts: Experts
    shared: DenseWeights


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Norm weights are float32."""

    input_norm: Tensor
    middle_norm: Tensor
    query_norm: Tensor
    """[q_lora_rank]"""
    row_norm: Tensor
    """[512]"""
    key_norm: tuple[Tensor, Tensor] | None
    """Weight and bias [128] of the index keys' LayerNorm, where the layer has an indexer"""
    from_hidden: Matrix
    """[N, H]: q_a, kv_a and, with an indexer, wk and weights_proj"""
    hidden_columns: tuple[int, ...]
    """Where the output of each of them begins"""
    from_latent: Matrix
    """[N, q_lora_rank]: q_b (each head's nope, then rope) and, with an indexer, wq_b"""
    latent_columns: tuple[int, ...]
    absorb_key: Matrix
    """bfloat16 [heads, 512, nope]: a head's nope query times this, transposed, is its query of latents"""
    absorb_value: Matrix
    """bfloat16 [heads, v, 512]"""
    output: Matrix
    """[H, heads * v]"""
    feed_forward: DenseWeights | MoeWeights


@dataclass(frozen=True)
class MtpWeights:
    """The layer that drafts, number ``num_hidden_layers``. Its embedding and head are the main model's."""

    embedding_norm: Tensor
    """``enorm``, float32 [H]"""
    hidden_norm: Tensor
    """``hnorm``, float32 [H]"""
    combine: Matrix
    """``eh_proj`` [H, 2 H]: of the embedding, then of the hidden"""
    layer: LayerWeights
    norm: Tensor
    """``shared_head.norm``, float32 [H]"""


@dataclass(frozen=True)
class DecodeWeights:
    """Layers ``first_layer`` to ``end_layer - 1`` of a model, with what stands before the first and behind the last."""

    config: ModelConfig
    kind: WeightType
    first_layer: int
    layers: tuple[LayerWeights, ...]
    embedding: Tensor | None
    """bfloat16 [V, H], of a range that begins with the first layer, or has MTP"""
    norm: Tensor | None
    """float32 [H], of a range that ends with the last layer"""
    head: Matrix | None
    """bfloat16 [V, H], like ``norm``, or a shard's rows of it"""
    mtp: MtpWeights | None
    split: Split | None = None
    """Where these are one shard of several: how results become one. ``config`` is then the shard's."""

    @property
    def end_layer(self) -> int:
        return self.first_layer + len(self.layers)

    def layer(self, number: int) -> LayerWeights:
        """The layer of this number in the model."""
        return self.layers[number - self.first_layer]


class SplitRows(Protocol):
    """How the shards' results of up to some number of rows become one (`compute.parallel.splitting`)."""

    def add(self, part: Tensor) -> None:
        """Have ``part`` float32 [M, hidden] be the sum of all shards' parts."""

    def logits(self, out: Tensor, product: Callable[[slice, Tensor], None]) -> None:
        """Fill ``out`` float32 [M, vocabulary] with all shards' shares.

        ``product`` makes this one's of some of the rows at a time, float32 [rows, vocabulary / shards].
        """


class Split(Protocol):
    """The shards of a model."""

    def for_rows(self, rows: int) -> SplitRows:
        """With scratch for passes of up to ``rows`` rows."""


class Source(Protocol):
    """Gives tensors by the names of ``transformers``."""

    def vector(self, name: str) -> Tensor:
        """float32 on the device."""

    def matrix(self, name: str, out: Matrix) -> None:
        """Write a matrix to ``out`` [N, K], in the type that it has."""


def build_weights(
    config: ModelConfig,
    source: Source,
    kind: WeightType,
    device: torch.device,
    *,
    first_layer: int = 0,
    end_layer: int | None = None,
    mtp: bool = False,
    shard: tuple[int, int] = (0, 1),
) -> DecodeWeights:
    """Take every tensor of a layer range from ``source``, layer by layer, or one shard of so many of it.

    Raises what ``source`` raises, and `InvalidValue` for shards that the model cannot be cut into.
    """
    end = config.num_hidden_layers if end_layer is None else end_layer
    number, shards = shard
    if shards > 1:
        source = ShardSource(source, range_shapes(config, first_layer, end, mtp), number, shards)
        config = shard_config(config, shards, kind)
    builder = _Builder(config, source, kind, device)
    vocabulary = (config.vocab_size, config.hidden_size)
    last = end == config.num_hidden_layers
    has_embedding = first_layer == 0 or mtp
    return DecodeWeights(
        config=config,
        kind=kind,
        first_layer=first_layer,
        embedding=builder.plain("model.embed_tokens.weight", vocabulary).values if has_embedding else None,
        layers=tuple(builder.layer(layer) for layer in range(first_layer, end)),
        norm=source.vector("model.norm.weight") if last else None,
        head=builder.plain("lm_head.weight", (config.vocab_size // shards, config.hidden_size)) if last else None,
        mtp=builder.mtp() if mtp else None,
    )


def range_shapes(config: ModelConfig, first_layer: int, end_layer: int, mtp: bool) -> Shapes:
    """Every tensor that `build_weights` asks for, by name. Raises `InvalidValue` for a range that is none."""
    layers = config.num_hidden_layers
    if not 0 <= first_layer < end_layer <= layers:
        raise InvalidValue("layers", f"{first_layer} to {end_layer}", f"a range within 0 to {layers}")
    if mtp and (end_layer != layers or config.num_nextn_predict_layers < 1):
        raise InvalidValue("MTP layers", config.num_nextn_predict_layers, f"1, behind layer {layers - 1}")
    hidden, shapes = config.hidden_size, Shapes()
    if first_layer == 0 or mtp:
        shapes["model.embed_tokens.weight"] = (config.vocab_size, hidden)
    for layer in [*range(first_layer, end_layer), *([layers] if mtp else [])]:
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(config, layer).items()}
    if end_layer == layers:
        shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (config.vocab_size, hidden)}
    if mtp:
        shapes |= {f"model.layers.{layers}.{name}": shape for name, shape in _mtp_shapes(config).items()}
    return shapes


def random_weights_on(
    config: ModelConfig,
    seed: int,
    kind: WeightType,
    device: torch.device | str,
    *,
    first_layer: int = 0,
    end_layer: int | None = None,
    mtp: bool = False,
    shard: tuple[int, int] = (0, 1),
) -> DecodeWeights:
    """Seeded random weights, made on ``device``: the same bits for the same seed, type and kind of device.

    A tensor depends on the seed and its own name only. All of GLM-5.3 with 8 experts a layer takes seconds on a GPU.
    """
    end = config.num_hidden_layers if end_layer is None else end_layer
    shapes = range_shapes(config, first_layer, end, mtp)
    source = RandomSource(seed, shapes, torch.device(device))
    return build_weights(
        config, source, kind, torch.device(device), first_layer=first_layer, end_layer=end, mtp=mtp, shard=shard
    )


def load_weights_on(
    config: ModelConfig,
    path: Path,
    kind: WeightType,
    device: torch.device | str,
    *,
    first_layer: int = 0,
    end_layer: int | None = None,
    mtp: bool = False,
    shard: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
) -> DecodeWeights:
    """Weights of a safetensors file, or of a folder with one or with an index of several.

    FP8 tensors come with their ``weight_scale_inv`` and stay as they are where ``kind`` is fp8; other tensors are
    quantised then. All names, shapes and types are checked before the first byte is read: raises `InvalidValue` naming
    the first tensor that is missing, misshapen or of another type, or the file that cannot be read.
    """
    end = config.num_hidden_layers if end_layer is None else end_layer
    shapes = range_shapes(config, first_layer, end, mtp)
    with CheckpointSource(path, shapes, torch.device(device), progress) as source:
        return build_weights(
            config, source, kind, torch.device(device), first_layer=first_layer, end_layer=end, mtp=mtp, shard=shard
        )


class _Builder:
    def __init__(self, config: ModelConfig, source: Source, kind: WeightType, device: torch.device) -> None:
        self._config, self._source, self._kind, self._device = config, source, kind, device
        if kind == "fp8":
            for name in ("intermediate_size", "moe_intermediate_size"):
                if getattr(config, name) % BLOCK:
                    raise InvalidValue(f"{name} with FP8 weights", getattr(config, name), f"a multiple of {BLOCK}")

    def plain(self, name: str, shape: tuple[int, ...]) -> Matrix:
        """A matrix that is bfloat16 whatever the others are."""
        matrix = empty_matrix(shape, "bf16", self._device)
        self._source.matrix(name, matrix)
        return matrix

    def layer(self, layer: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{layer}."
        shapes = {f"{prefix}{name}": shape for name, shape in layer_shapes(config, layer).items()}

        def vector(name: str) -> Tensor:
            return self._source.vector(prefix + name)

        indexer = config.has_indexer(layer)
        hidden_parts = ["self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"]
        latent_parts = ["self_attn.q_b_proj.weight"]
        if indexer:
            hidden_parts += ["self_attn.indexer.wk.weight", "self_attn.indexer.weights_proj.weight"]
            latent_parts.append("self_attn.indexer.wq_b.weight")
        from_hidden, hidden_columns = self._fused(shapes, [prefix + name for name in hidden_parts])
        from_latent, latent_columns = self._fused(shapes, [prefix + name for name in latent_parts])
        absorb_key, absorb_value = self._absorbed(prefix + "self_attn.kv_b_proj.weight", shapes)
        norm = "self_attn.indexer.k_norm"
        return LayerWeights(
            input_norm=vector("input_layernorm.weight"),
            middle_norm=vector("post_attention_layernorm.weight"),
            query_norm=vector("self_attn.q_a_layernorm.weight"),
            row_norm=vector("self_attn.kv_a_layernorm.weight"),
            key_norm=(vector(f"{norm}.weight"), vector(f"{norm}.bias")) if indexer else None,
            from_hidden=from_hidden,
            hidden_columns=hidden_columns,
            from_latent=from_latent,
            latent_columns=latent_columns,
            absorb_key=absorb_key,
            absorb_value=absorb_value,
            output=self._fused(shapes, [prefix + "self_attn.o_proj.weight"])[0],
            feed_forward=self._feed_forward(layer, prefix, shapes),
        )

    def mtp(self) -> MtpWeights:
        config = self._config
        prefix = f"model.layers.{config.num_hidden_layers}."
        shapes = {f"{prefix}{name}": shape for name, shape in _mtp_shapes(config).items()}

        def vector(name: str) -> Tensor:
            return self._source.vector(prefix + name)

        return MtpWeights(
            embedding_norm=vector("enorm.weight"),
            hidden_norm=vector("hnorm.weight"),
            combine=self._fused(shapes, [f"{prefix}eh_proj.weight"])[0],
            layer=self.layer(config.num_hidden_layers),
            norm=vector("shared_head.norm.weight"),
        )

    def _fused(self, shapes: Shapes, names: Sequence[str]) -> tuple[Matrix, tuple[int, ...]]:
        """One matrix of several, each from a multiple of 128 rows on, and their first rows."""
        starts, end = [], 0
        for name in names:
            starts.append(round_up(end, BLOCK))
            end = starts[-1] + shapes[name][0]
        matrix = empty_matrix((end, shapes[names[0]][1]), self._kind, self._device)
        for name, start in zip(names, starts, strict=True):
            self._source.matrix(name, rows_of(matrix, start, shapes[name][0]))
        return matrix, tuple(starts)

    def _absorbed(self, name: str, shapes: Shapes) -> tuple[Matrix, Matrix]:
        config = self._config
        whole = empty_matrix(shapes[name], self._kind, self._device)
        self._source.matrix(name, whole)
        heads = dequantise(whole).bfloat16().view(config.num_attention_heads, -1, LATENT_DIM)
        nope = config.qk_nope_head_dim
        return Matrix(heads[:, :nope].transpose(1, 2).contiguous()), Matrix(heads[:, nope:].contiguous())

    def _feed_forward(self, layer: int, prefix: str, shapes: Shapes) -> DenseWeights | MoeWeights:
        config, hidden = self._config, self._config.hidden_size
        if layer < config.first_k_dense_replace:
            return self._mlp(f"{prefix}mlp", shapes)
        count, inner = config.n_routed_experts, config.moe_intermediate_size
        gate_up = empty_matrix((count, 2 * inner, hidden), self._kind, self._device)
        down = empty_matrix((count, hidden, inner), self._kind, self._device)
        for expert in range(count):
            self._fill_mlp(f"{prefix}mlp.experts.{expert}", shapes, gate_up[expert], down[expert])
        router, bias = f"{prefix}mlp.gate.weight", f"{prefix}mlp.gate.e_score_correction_bias"
        return MoeWeights(
            router=self.plain(router, shapes[router]),
            bias=self._source.vector(bias),
            experts=Experts(gate_up, down),
            shared=self._mlp(f"{prefix}mlp.shared_experts", shapes),
        )

    def _mlp(self, prefix: str, shapes: Shapes) -> DenseWeights:
        inner, hidden = shapes[f"{prefix}.gate_proj.weight"]
        gate_up = empty_matrix((2 * inner, hidden), self._kind, self._device)
        down = empty_matrix((hidden, inner), self._kind, self._device)
        self._fill_mlp(prefix, shapes, gate_up, down)
        return DenseWeights(gate_up, down)

    def _fill_mlp(self, prefix: str, shapes: Shapes, gate_up: Matrix, down: Matrix) -> None:
        gate, up = f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"
        inner = shapes[gate][0]
        self._source.matrix(gate, rows_of(gate_up, 0, inner))
        self._source.matrix(up, rows_of(gate_up, inner, inner))
        self._source.matrix(f"{prefix}.down_proj.weight", down)


def _mtp_shapes(config: ModelConfig) -> Shapes:
    """What the MTP layer has beside a decoder layer's tensors."""
    hidden = (config.hidden_size,)
    return {
        "eh_proj.weight": (config.hidden_size, 2 * config.hidden_size),
        "enorm.weight": hidden,
        "hnorm.weight": hidden,
        "shared_head.norm.weight": hidden,
    }
