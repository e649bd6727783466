"""The arithmetic of decoder layers on rows, between the kernels that keep and read a history.

    project   norm, projections, rotations: what attention and the index take of a layer (`LayerInputs`)
    feed      the attended values through ``o_proj``, then the dense MLP or the experts
    finish    the final norm

The residual stream, sums and norms are float32; what goes into a product is bfloat16. All scratch is made once, so that
recorded graphs keep its addresses, and nothing here waits for the device. A row's result depends on nothing but its own
inputs: not on the number of rows, nor on its place among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compute.decode.weights import DecodeWeights, DenseWeights, LayerWeights, MoeWeights
from compute.kernels import tiles
from compute.kernels.choice import KernelsName, default_kernels
from compute.kernels.experts import experts, route
from compute.kernels.inputs import Angles, IndexerRows, hidden_inputs, query_inputs
from compute.kernels.linear import Workspace, head_linear, linear
from compute.kernels.matrix import Matrix
from compute.kernels.norms import add_rms_norm, silu_mul
from compute.model.rope import Rope
from protocol.errors import InvalidValue
from protocol.layout import LATENT_DIM, ROPE_DIM
from protocol.model import ModelConfig


@dataclass(frozen=True)
class LayerInputs:
    """Where a layer's inputs of M rows are written: contiguous, as `compute.step.StepInputs` has them."""

    latent: Tensor
    rope: Tensor
    query_latent: Tensor
    query_rope: Tensor
    index_keys: Tensor
    """This and what follows are written by layers with an indexer only."""
    index_query: Tensor
    index_weights: Tensor

    @classmethod
    def empty(cls, config: ModelConfig, rows: int, device: torch.device) -> LayerInputs:
        heads, index_heads, index_dim = config.num_attention_heads, config.index_n_heads, config.index_head_dim

        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((rows, *sizes), dtype=dtype, device=device)

        return cls(
            latent=empty(LATENT_DIM),
            rope=empty(ROPE_DIM),
            query_latent=empty(heads, LATENT_DIM, dtype=torch.bfloat16),
            query_rope=empty(heads, ROPE_DIM, dtype=torch.bfloat16),
            index_keys=empty(index_dim),
            index_query=empty(index_heads, index_dim, dtype=torch.bfloat16),
            index_weights=empty(index_heads),
        )

    def first(self, rows: int) -> LayerInputs:
        """The first ``rows`` rows."""
        return LayerInputs(*(tensor[:rows] for tensor in vars(self).values()))


LEAST_SCRATCH_BYTES, MOST_SCRATCH_BYTES = 256 << 20, 544 << 20
"""For products: as much as the experts of a pass want, up to what those of 2,048 rows of GLM-5.3 do."""


class Layers:
    """Scratch for up to ``rows`` rows of one stream, and the layers' arithmetic on them.

    Calls of one pass belong together: `begin`, then `project` and `feed` layer after layer, then `finish`.
    """

    def __init__(
        self, config: ModelConfig, weights: DecodeWeights, rows: int, device: torch.device, kernels: KernelsName | None
    ) -> None:
        self.config, self.weights, self.rows = config, weights, rows
        self.kernels = kernels or default_kernels(device.type)
        of_row = (config.num_experts_per_tok + 1) * (config.moe_intermediate_size // 2 + config.hidden_size) * 4
        nbytes = min(max(rows * of_row, LEAST_SCRATCH_BYTES), MOST_SCRATCH_BYTES)
        self.workspace = Workspace(rows, device, kernels=self.kernels, nbytes=nbytes)
        self._split = weights.split.for_rows(rows) if weights.split else None
        self._rope = Rope(config, device)
        self._angles: Angles | None = None

        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((rows, *sizes), dtype=dtype, device=device)

        def widest(*found: int) -> int:
            return max(found, default=1)

        hidden, every = config.hidden_size, [*weights.layers, *([weights.mtp.layer] if weights.mtp else [])]
        dense = [layer.feed_forward for layer in every if isinstance(layer.feed_forward, DenseWeights)]
        self.residual = empty(hidden)
        """float32 [rows, hidden]"""
        self._delta = empty(hidden)
        self._pending: Tensor | None = None
        self._normed = empty(hidden, dtype=torch.bfloat16)
        self._from_hidden = torch.empty(rows * widest(*(layer.from_hidden.shape[0] for layer in every)), device=device)
        self._query_latent = empty(config.q_lora_rank, dtype=torch.bfloat16)
        width = widest(*(layer.from_latent.shape[0] for layer in every))
        self._from_latent = torch.empty(rows * width, dtype=torch.bfloat16, device=device)
        self._values = empty(config.num_attention_heads, config.v_head_dim, dtype=torch.bfloat16)
        inner = widest(*(part.down.shape[1] for part in dense))
        self._gate_up = torch.empty(rows * 2 * inner, device=device)
        self._gated = torch.empty(rows * inner, dtype=torch.bfloat16, device=device)
        self._router = empty(config.n_routed_experts)
        taken = config.num_experts_per_tok
        self._chosen = (empty(taken, dtype=torch.int32), empty(taken))

    def begin(self, embedded: Tensor, positions: Tensor) -> None:
        """Start a pass from ``embedded`` [M, hidden], float32 or bfloat16, rotated by ``positions`` int64 [M]."""
        count = len(embedded)
        if not 0 < count <= self.rows:
            raise InvalidValue("rows of a pass", count, f"1 to {self.rows}")
        self.residual[:count].copy_(embedded)
        self._pending = None
        cos, sin = self._rope.tables(tiles.pad_rows(positions))
        self._angles = Angles(cos[:count], sin[:count])

    def project(self, layer: LayerWeights, inputs: LayerInputs) -> None:
        """Write ``inputs`` of ``layer`` but its latent queries, for as many rows as they have."""
        assert self._angles is not None, "project before begin"
        config, count = self.config, len(inputs.latent)
        normed = self._normed[:count]
        self._add_norm(layer.input_norm, normed)
        projected = _rows(self._from_hidden, count, layer.from_hidden)
        linear(normed, layer.from_hidden, projected, self.workspace)
        indexer = None
        if layer.key_norm is not None:
            interleaved = config.indexer_rope_interleaved
            indexer = IndexerRows(layer.key_norm, interleaved, inputs.index_keys, inputs.index_weights)
        query_latent = self._query_latent[:count]
        hidden_inputs(
            projected,
            layer.hidden_columns,
            (layer.query_norm, layer.row_norm),
            self._angles,
            query_latent,
            inputs.latent,
            inputs.rope,
            indexer,
            self.kernels,
        )
        queries = _rows(self._from_latent, count, layer.from_latent)
        linear(query_latent, layer.from_latent, queries, self.workspace)
        query_inputs(
            queries,
            layer.latent_columns[-1],
            config.qk_nope_head_dim,
            self._angles,
            inputs.query_rope,
            inputs.index_query if indexer else None,
            self.kernels,
            interleaved=config.indexer_rope_interleaved,
        )

    def absorb(self, layer: LayerWeights, inputs: LayerInputs) -> None:
        """Write the latent queries of ``layer``, which was projected last."""
        config = self.config
        queries = _rows(self._from_latent, len(inputs.latent), layer.from_latent)
        heads = queries[:, : config.num_attention_heads * config.qk_head_dim].unflatten(1, (-1, config.qk_head_dim))
        nope = heads[..., : config.qk_nope_head_dim]
        head_linear(nope, layer.absorb_key, inputs.query_latent, self.workspace)

    def feed(self, layer: LayerWeights, attended: Tensor) -> None:
        """Go on from ``attended`` float32 [M, heads, 512], the attention output of ``layer`` in the latent space."""
        count = len(attended)
        values, delta = self._values[:count], self._delta[:count]
        head_linear(attended, layer.absorb_value, values, self.workspace)
        linear(values.flatten(1), layer.output, delta, self.workspace)
        self._add_shards(delta)
        self._pending = delta
        normed = self._normed[:count]
        self._add_norm(layer.middle_norm, normed)
        if isinstance(layer.feed_forward, MoeWeights):
            self._mixture(layer.feed_forward, normed, delta)
        else:
            self._dense(layer.feed_forward, normed, delta)
        self._add_shards(delta)
        self._pending = delta

    def finish(self, norm: Tensor, hidden: Tensor) -> None:
        """Write the final norm of all rows to ``hidden`` float32 [M, hidden]."""
        self._add_norm(norm, hidden)

    def unnormed(self, out: Tensor) -> None:
        """Write the residual stream of all rows, of a range without the last layer, to ``out`` float32 [M, hidden]."""
        residual = self.residual[: len(out)]
        torch.add(residual, self._pending, out=out) if self._pending is not None else out.copy_(residual)

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """``hidden`` float32 [M, hidden] -> ``out`` float32 [M, vocabulary], of any rows in any order."""
        head = self.weights.head
        assert head is not None, "the head is with the last layer"
        normed = self._normed[: len(hidden)]
        normed.copy_(hidden)
        if self._split is None:
            linear(normed, head, out, self.workspace)
            return
        self._split.logits(out, lambda rows, own: linear(normed[rows], head, own, self.workspace))

    def _add_shards(self, part: Tensor) -> None:
        """What other shards have computed of the same rows is added."""
        if self._split is not None:
            self._split.add(part)

    def _add_norm(self, norm: Tensor, out: Tensor) -> None:
        residual = self.residual[: len(out)]
        add_rms_norm(residual, self._pending, norm, self.config.rms_norm_eps, out, kernels=self.kernels)
        self._pending = None

    def _dense(self, weights: DenseWeights, x: Tensor, out: Tensor) -> None:
        gate_up = _rows(self._gate_up, len(x), weights.gate_up)
        linear(x, weights.gate_up, gate_up, self.workspace)
        gated = self._gated[: len(x) * weights.down.shape[1]].view(len(x), -1)
        silu_mul(gate_up, gated, kernels=self.kernels)
        linear(gated, weights.down, out, self.workspace)

    def _mixture(self, weights: MoeWeights, x: Tensor, out: Tensor) -> None:
        logits = self._router[: len(x)]
        linear(x, weights.router, logits, self.workspace)
        chosen = (self._chosen[0][: len(x)], self._chosen[1][: len(x)])
        route(logits, weights.bias, self.config, chosen, kernels=self.kernels)
        shared = (weights.shared.gate_up, weights.shared.down)
        experts(x, *chosen, weights.experts, shared, out, self.workspace)


def _rows(scratch: Tensor, count: int, weight: Matrix) -> Tensor:
    """The first [count, N] of ``scratch``, contiguous."""
    return scratch[: count * weight.shape[0]].view(count, -1)
