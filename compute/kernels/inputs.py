"""What a layer's attention takes of its joint projections, into tensors of the caller: norms, rotations, cuts.

`compute.kernels.reference_inputs` defines the arithmetic. Two launches: one behind the projections of the hidden state,
one behind those of the query's latent. A row's result depends on nothing but its own inputs. ``kernels`` chooses the
implementation by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from compute.kernels import reference_inputs
from compute.kernels.choice import KernelsName
from compute.kernels.triton_products import FEW_ROWS
from compute.kernels.triton_support import await_kernel_before, launch_options
from protocol.errors import InvalidValue
from protocol.layout import INDEX_DIM, LATENT_DIM, ROPE_DIM

_HEADS = 8
_HEADS_OF_MANY = 32
"""Heads that one program rotates, of few rows and of many."""

_LATENT_DIM = tl.constexpr(LATENT_DIM)
_ROPE_DIM = tl.constexpr(ROPE_DIM)
_INDEX_DIM = tl.constexpr(INDEX_DIM)
_EPS = tl.constexpr(reference_inputs.LATENT_EPS)


@dataclass(frozen=True)
class Angles:
    """Of the rows' positions: float32 [M, 32] each, contiguous."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class IndexerRows:
    """What the first layer of an index group makes of the hidden states beside its rows."""

    norm: tuple[Tensor, Tensor]
    """Weight and bias, float32 [128], of the keys' LayerNorm"""
    interleaved: bool
    """How the indexer pairs the dimensions that it rotates"""
    keys: Tensor
    """Written: float32 [M, 128]"""
    weights: Tensor
    """Written: float32 [M, heads], times heads ** -0.5"""


def hidden_inputs(
    projected: Tensor,
    starts: tuple[int, ...],
    norms: tuple[Tensor, Tensor],
    angles: Angles,
    query_latent: Tensor,
    latent: Tensor,
    rope: Tensor,
    indexer: IndexerRows | None,
    kernels: KernelsName,
) -> None:
    """Cut ``projected`` float32 [M, N], the joint projection of the hidden states, whose parts begin at ``starts``.

    ``query_latent`` bfloat16 [M, q] becomes the norm of the first part; ``latent`` float32 [M, 512] and ``rope``
    float32 [M, 64] the norm and the rotation of the second; ``norms`` are the weights of both. With an ``indexer``
    there are two more parts, its keys and head weights. All are contiguous.
    """
    rows, width = projected.shape
    query_width = query_latent.shape[1]
    _check("projection of the hidden states", projected, (rows, width), torch.float32)
    _check("query latent", query_latent, (rows, query_width), torch.bfloat16)
    _check("latent", latent, (rows, LATENT_DIM), torch.float32)
    _check("rope", rope, (rows, ROPE_DIM), torch.float32)
    if len(starts) != (4 if indexer else 2):
        raise InvalidValue("parts of the projection", len(starts), "2, or 4 with an indexer")
    if kernels == "reference":
        query_latent.copy_(reference_inputs.latents(projected[:, :query_width].contiguous(), norms[0]))
        row = projected[:, starts[1] : starts[1] + LATENT_DIM + ROPE_DIM]
        for out, value in zip(
            (latent, rope), reference_inputs.row_inputs(row, norms[1], angles.cos, angles.sin), strict=True
        ):
            out.copy_(value)
        if indexer:
            part = projected[:, starts[2] : starts[2] + INDEX_DIM]
            made = reference_inputs.keys(part, indexer.norm, angles.cos, angles.sin, interleaved=indexer.interleaved)
            indexer.keys.copy_(made)
            heads = indexer.weights.shape[1]
            torch.mul(projected[:, starts[3] : starts[3] + heads], heads**-0.5, out=indexer.weights)
        return
    index = indexer or IndexerRows((latent, latent), True, latent, latent)
    heads = index.weights.shape[1]
    _hidden_kernel[(3 if indexer else 2, rows)](
        projected,
        *norms,
        *index.norm,
        angles.cos,
        angles.sin,
        query_latent,
        latent,
        rope,
        index.keys,
        index.weights,
        width,
        starts[1],
        starts[2] if indexer else 0,
        starts[3] if indexer else 0,
        heads**-0.5,
        QUERY=query_width,
        QUERY_BLOCK=triton.next_power_of_2(query_width),
        HEADS=heads,
        HEADS_BLOCK=triton.next_power_of_2(heads),
        INTERLEAVED=index.interleaved,
        num_warps=4,
        **launch_options(),
    )


def query_inputs(
    projected: Tensor,
    index_start: int,
    nope: int,
    angles: Angles,
    query_rope: Tensor,
    index_query: Tensor | None,
    kernels: KernelsName,
    *,
    interleaved: bool,
) -> None:
    """Rotate ``projected`` bfloat16 [M, N], the joint projection of the query's latent.

    Its heads of ``nope`` + 64 columns come first; ``query_rope`` bfloat16 [M, heads, 64] becomes the rotation of the
    last 64 of each. From ``index_start`` on come the heads of ``index_query`` bfloat16 [M, heads, 128], if there is
    one, of which the first 64 columns are rotated, as ``interleaved`` says. All are contiguous.
    """
    rows, width = projected.shape
    heads = query_rope.shape[1]
    _check("projection of the query's latent", projected, (rows, width), torch.bfloat16)
    _check("query's rope", query_rope, (rows, heads, ROPE_DIM), torch.bfloat16)
    if kernels == "reference":
        cos, sin = angles.cos[:, None], angles.sin[:, None]
        query = projected[:, : heads * (nope + ROPE_DIM)].unflatten(1, (heads, -1))[..., nope:]
        query_rope.copy_(reference_inputs.rotate(query, cos, sin, interleaved=True))
        if index_query is not None:
            index_heads = index_query.shape[1]
            part = projected[:, index_start : index_start + index_heads * INDEX_DIM].unflatten(1, (index_heads, -1))
            rotated = reference_inputs.rotate(part[..., :ROPE_DIM], cos, sin, interleaved=interleaved)
            index_query[..., :ROPE_DIM] = rotated
            index_query[..., ROPE_DIM:] = part[..., ROPE_DIM:]
        return
    index_heads = 0 if index_query is None else index_query.shape[1]
    many = rows > FEW_ROWS
    together = _HEADS_OF_MANY if many else _HEADS
    blocks = triton.cdiv(heads, together)
    kernel = _many_query_kernel if many else _query_kernel
    kernel[(blocks + triton.cdiv(index_heads, together), rows)](
        projected,
        angles.cos,
        angles.sin,
        query_rope,
        query_rope if index_query is None else index_query,
        width,
        index_start,
        heads,
        index_heads,
        nope,
        blocks,
        BLOCK=together,
        INTERLEAVED=interleaved,
        num_warps=4 if many else 2,
        **launch_options(),
    )


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise InvalidValue(name, f"{tensor.dtype} {tuple(tensor.shape)}", f"contiguous {dtype} {shape}")


@triton.jit
def _rotated(x, cos, sin, first, heads, stride, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """64 columns of ``BLOCK`` heads, which are ``stride`` apart: the firsts and seconds of pairs, and their columns."""
    pair = tl.arange(0, 32)
    head = tl.arange(0, BLOCK)
    a_at = pair * 2 if INTERLEAVED else pair
    b_at = a_at + (1 if INTERLEAVED else 32)
    present = (first + head < heads)[:, None]
    c, s = tl.load(cos + pair)[None, :], tl.load(sin + pair)[None, :]
    a = tl.load(x + head[:, None] * stride + a_at[None, :], mask=present, other=0.0).to(tl.float32)
    b = tl.load(x + head[:, None] * stride + b_at[None, :], mask=present, other=0.0).to(tl.float32)
    return a * c - b * s, b * c + a * s, a_at, b_at


@triton.jit
def _hidden_kernel(  # type: ignore[no-untyped-def]
    projected,
    query_norm,
    row_norm,
    key_norm,
    key_bias,
    cos,
    sin,
    query_latent,
    latent,
    rope,
    keys,
    weights,
    width,
    row_start,
    key_start,
    weights_start,
    weight_factor,
    QUERY: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    await_kernel_before(OVERLAPPED)
    projected += row * width
    cos += row * (_ROPE_DIM // 2)
    sin += row * (_ROPE_DIM // 2)
    if part == 0:
        _norm_query(projected, query_norm, query_latent + row * QUERY, QUERY, QUERY_BLOCK)
    elif part == 1:
        _norm_row(projected + row_start, row_norm, cos, sin, latent + row * _LATENT_DIM, rope + row * _ROPE_DIM)
    else:
        _norm_key(projected + key_start, key_norm, key_bias, cos, sin, keys + row * _INDEX_DIM, INTERLEAVED)
        head = tl.arange(0, HEADS_BLOCK)
        factor = tl.load(projected + weights_start + head, mask=head < HEADS, other=0.0)
        tl.store(weights + row * HEADS + head, factor * weight_factor, mask=head < HEADS)


@triton.jit
def _norm_query(projected, norm, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.arange(0, BLOCK)
    present = column < SIZE
    x = tl.load(projected + column, mask=present, other=0.0)
    x = x * tl.rsqrt(tl.sum(x * x) / SIZE + _EPS) * tl.load(norm + column, mask=present, other=0.0)
    tl.store(out + column, x.to(tl.bfloat16), mask=present)


@triton.jit
def _norm_row(projected, norm, cos, sin, latent, rope):  # type: ignore[no-untyped-def]
    column = tl.arange(0, _LATENT_DIM)
    x = tl.load(projected + column)
    x = x * tl.rsqrt(tl.sum(x * x) / _LATENT_DIM + _EPS) * tl.load(norm + column)
    tl.store(latent + column, x)
    pair = tl.arange(0, 32)
    a, b = tl.load(projected + _LATENT_DIM + pair * 2), tl.load(projected + _LATENT_DIM + pair * 2 + 1)
    c, s = tl.load(cos + pair), tl.load(sin + pair)
    tl.store(rope + pair * 2, a * c - b * s)
    tl.store(rope + pair * 2 + 1, b * c + a * s)


@triton.jit
def _norm_key(projected, norm, bias, cos, sin, keys, INTERLEAVED: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.arange(0, _INDEX_DIM)
    x = tl.load(projected + column)
    mean = tl.sum(x) / _INDEX_DIM
    scale = tl.rsqrt(tl.sum((x - mean) * (x - mean)) / _INDEX_DIM + _EPS)
    # The other of each pair is normed again rather than exchanged between threads.
    other = column ^ 1 if INTERLEAVED else column ^ 32
    partner = tl.load(projected + other)
    x = (x - mean) * scale * tl.load(norm + column) + tl.load(bias + column)
    partner = (partner - mean) * scale * tl.load(norm + other) + tl.load(bias + other)
    pair = (column // 2 if INTERLEAVED else column) % 32
    c, s = tl.load(cos + pair), tl.load(sin + pair)
    second = (column % 2 == 1) if INTERLEAVED else (column >= 32)
    turned = tl.where(second, x * c + partner * s, x * c - partner * s)
    tl.store(keys + column, tl.where(column < _ROPE_DIM, turned, x))


@triton.jit
def _query_kernel(  # type: ignore[no-untyped-def]
    projected,
    cos,
    sin,
    query_rope,
    index_query,
    width,
    index_start,
    heads,
    index_heads,
    nope,
    blocks,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, BLOCK)
    await_kernel_before(OVERLAPPED)
    projected += row * width
    cos += row * (_ROPE_DIM // 2)
    sin += row * (_ROPE_DIM // 2)
    if tl.program_id(0) < blocks:
        first = tl.program_id(0) * BLOCK
        stride = nope + _ROPE_DIM
        x = projected + first * stride + nope
        a, b, a_at, b_at = _rotated(x, cos, sin, first, heads, stride, True, BLOCK)
        out = query_rope + (row * heads + first + head[:, None]) * _ROPE_DIM
        present = (first + head < heads)[:, None]
        tl.store(out + a_at[None, :], a.to(tl.bfloat16), mask=present)
        tl.store(out + b_at[None, :], b.to(tl.bfloat16), mask=present)
    else:
        first = (tl.program_id(0) - blocks) * BLOCK
        x = projected + index_start + first * _INDEX_DIM
        a, b, a_at, b_at = _rotated(x, cos, sin, first, index_heads, _INDEX_DIM, INTERLEAVED, BLOCK)
        out = index_query + (row * index_heads + first + head[:, None]) * _INDEX_DIM
        present = (first + head < index_heads)[:, None]
        tl.store(out + a_at[None, :], a.to(tl.bfloat16), mask=present)
        tl.store(out + b_at[None, :], b.to(tl.bfloat16), mask=present)
        rest = _ROPE_DIM + tl.arange(0, _INDEX_DIM - _ROPE_DIM)[None, :]
        tl.store(out + rest, tl.load(x + head[:, None] * _INDEX_DIM + rest, mask=present), mask=present)


@triton.jit
def _many_query_kernel(  # type: ignore[no-untyped-def]
    projected, cos, sin, query_rope, index_query, width, index_start, heads, index_heads, nope, blocks,
    BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """As `_query_kernel`. Its accesses, of every other column, are what takes time where there are many rows; these are
    of columns as they lie.
    """
    row = tl.program_id(1).to(tl.int64)
    await_kernel_before(OVERLAPPED)
    projected += row * width
    cos += row * (_ROPE_DIM // 2)
    sin += row * (_ROPE_DIM // 2)
    if tl.program_id(0) < blocks:
        first = tl.program_id(0) * BLOCK
        stride = nope + _ROPE_DIM
        out = query_rope + (row * heads + first) * _ROPE_DIM
        _rotate(projected + first * stride + nope, cos, sin, out, heads - first, stride, _ROPE_DIM, True, BLOCK)
    else:
        first = (tl.program_id(0) - blocks) * BLOCK
        x = projected + index_start + first * _INDEX_DIM
        out = index_query + (row * index_heads + first) * _INDEX_DIM
        _rotate(x, cos, sin, out, index_heads - first, _INDEX_DIM, _INDEX_DIM, INTERLEAVED, BLOCK)
        head = tl.arange(0, BLOCK)[:, None]
        rest = head * _INDEX_DIM + _ROPE_DIM + tl.arange(0, _INDEX_DIM - _ROPE_DIM)[None, :]
        present = head < index_heads - first
        tl.store(out + rest, tl.load(x + rest, mask=present), mask=present)


@triton.jit
def _rotate(x, cos, sin, out, heads, stride, SIZE: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """64 columns of ``BLOCK`` heads, ``stride`` apart in ``x`` and ``SIZE`` in ``out``; pairs part in registers."""
    pair = tl.arange(0, 32)[None, :]
    head = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, _ROPE_DIM)[None, :]
    c, s = tl.load(cos + pair), tl.load(sin + pair)
    values = tl.load(x + head * stride + column, mask=head < heads, other=0.0).to(tl.float32)
    if INTERLEAVED:
        a, b = tl.split(tl.reshape(values, [BLOCK, 32, 2]))
    else:
        a, b = tl.split(tl.permute(tl.reshape(values, [BLOCK, 2, 32]), [0, 2, 1]))
    c, s = tl.broadcast_to(c, a.shape), tl.broadcast_to(s, a.shape)
    # Which product is rounded would be the compiler's choice: these are what it makes of `_query_kernel`.
    turned = tl.join(tl.fma(a, c, -(b * s)).to(tl.bfloat16), tl.fma(a, s, b * c).to(tl.bfloat16))
    if not INTERLEAVED:
        turned = tl.permute(turned, [0, 2, 1])
    tl.store(out + head * SIZE + column, tl.reshape(turned, [BLOCK, _ROPE_DIM]), mask=head < heads)
