"""Sparse absorbed MLA attention: query rows against selected rows, read where they lie.

The definition is `compute.kernels.reference.attend`. The selected keys of a query row are cut into splits of `KEYS`;
one program does one split for 64 heads, softmax included, and a second launch joins the splits in their order. Splits
and tiles depend on k alone, so a query row's bits depend on nothing but its own inputs. On GPUs of compute capability
9.0 `compute.kernels.attention_hopper` does the splits, and with the same bits `compute.kernels.attention_rows`, of rows
of one layer that are float16 already; elsewhere the kernel in this file does, whose bits differ.

Products are of float16 values, summed in float32: a latent is int8 times scale, rounded once; query and rope are
rounded to float16; so are the softmax weights within a split, and the splits' results. The error against exact
arithmetic is some 5e-4 of the output's norm, 1e-3 where few keys dominate. Queries, latents and ropes must be within
float16's range, 65,504.

Here, as in `compute.kernels.index_score`, a row's bytes go from memory straight into the registers of the matrix unit,
keys and dimensions in operand order; the same registers are then stored for the second product. Splits are kept with
their dimensions in that order, and put right as they are joined.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from compute.kernels.attention_hopper import WARPS, split_kernel
from compute.kernels.attention_rows import attend_splits
from compute.kernels.ptx import PTX, halves_of_e4m3, scaled_halves
from compute.kernels.triton_support import await_kernel_before, launch_options
from protocol.errors import InvalidValue
from protocol.layout import FP8_DS_MLA, LATENT_DIM, Q8G64, ROPE_DIM, Encoding

KEYS = 128
"""Selected keys of one split."""
HEADS = 64
"""Heads of one program, the rows of a matrix instruction; fewer heads are padded."""

_JOINED_DIMS = 256
_ROWS = Q8G64.rows
_SCALES_OFFSET = tl.constexpr(_ROWS.scales_offset)
_ROPE_OFFSET = tl.constexpr(_ROWS.rope_offset)


class SparseAttention:
    """Attention of query rows with ``heads`` heads over ``k`` selected rows each, encoded as `Q8G64` or `FP8_DS_MLA`.

    Made once, with scratch memory for ``rows`` query rows: more of them are done in parts of that many. Recorded graphs
    keep its address; one stream's layers use it in turn. ``portable`` is for tests of the kernel that runs anywhere.
    """

    def __init__(
        self,
        rows: int,
        heads: int,
        k: int,
        device: torch.device,
        *,
        encoding: Encoding = Q8G64,
        portable: bool = False,
    ) -> None:
        """Raises `InvalidValue` for another encoding."""
        if encoding not in (Q8G64, FP8_DS_MLA):
            raise InvalidValue("encoding of sparse attention", encoding.name, f"{Q8G64.name} or {FP8_DS_MLA.name}")
        self.rows, self.heads, self.k = rows, heads, k
        self._splits = triton.cdiv(k, KEYS)
        self._partial = torch.empty((rows, self._splits, heads, LATENT_DIM), dtype=torch.float16, device=device)
        self._softmax = torch.empty((rows, self._splits, heads, 2), device=device)
        self._e4m3 = encoding == FP8_DS_MLA
        self._hopper_programs = 0 if portable or self._e4m3 else hopper_programs(device)

    def attend(
        self,
        addresses: Tensor,
        layer_in_group: int,
        query_latent: Tensor,
        query_rope: Tensor,
        scale: float,
        out: Tensor,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Write the output in the latent space to ``out``, float32 [n, heads, 512], for any n > 0 query rows.

        ``addresses`` int64 [n, k] are of group rows, 0 where empty; ``query_latent`` [n, heads, 512] and ``query_rope``
        [n, heads, 64] are bfloat16, float16 or float32. A query row without any selected row gives 0. All tensors are
        contiguous. ``meanwhile`` enqueues what goes beside the last launch on another stream. Raises `InvalidValue` for
        shapes that do not fit.
        """
        for part in self._parts("addresses", addresses, query_latent, query_rope, out):
            self._split(addresses[part], layer_in_group, query_latent[part], query_rope[part], scale)
            if part.stop >= len(addresses):
                meanwhile()
            self._join(out[part])

    def attend_halves(
        self,
        selection: Tensor,
        halves: Tensor,
        query_latent: Tensor,
        query_rope: Tensor,
        scale: float,
        out: Tensor,
    ) -> None:
        """Like `attend`, and with its bits, where there are `hopper_programs`; for many query rows of `Q8G64`.

        ``selection`` int32 [n, k] has numbers of rows of ``halves``, of `compute.kernels.half_rows`; -1 where empty.
        Raises `InvalidValue` for shapes or types that do not fit.
        """
        if selection.dtype != torch.int32 or halves.dtype != torch.float16 or not halves.is_contiguous():
            raise InvalidValue("selection and halves", (selection.dtype, halves.dtype), "int32, contiguous float16")
        for part in self._parts("selection", selection, query_latent, query_rope, out):
            query = query_latent[part], query_rope[part]
            splits = self._partial, self._softmax
            attend_splits(selection[part], halves, *query, *splits, scale * math.log2(math.e), self._hopper_programs)
            self._join(out[part])

    def _parts(self, name: str, selected: Tensor, query_latent: Tensor, query_rope: Tensor, out: Tensor) -> list[slice]:
        count = selected.shape[0]
        if not count or selected.shape[1] != self.k or not selected.is_contiguous():
            raise InvalidValue(name, tuple(selected.shape), f"contiguous [n > 0, {self.k}]")
        for tensor, width in ((query_latent, LATENT_DIM), (query_rope, ROPE_DIM), (out, LATENT_DIM)):
            if tensor.shape != (count, self.heads, width) or not tensor.is_contiguous():
                raise InvalidValue(
                    "query or output", tuple(tensor.shape), f"contiguous [{count}, {self.heads}, {width}]"
                )
        return [slice(start, start + self.rows) for start in range(0, count, self.rows)]

    def _split(
        self, addresses: Tensor, layer_in_group: int, query_latent: Tensor, query_rope: Tensor, scale: float
    ) -> None:
        grid = (self._splits, triton.cdiv(self.heads, HEADS), addresses.shape[0])
        tensors = (addresses, query_latent, query_rope, self._partial, self._softmax)
        layer_offset, scale = layer_in_group * _ROWS.row_bytes, scale * math.log2(math.e)
        arguments = (*tensors, self.heads, self.k, layer_offset, scale)
        if self._hopper_programs:
            split_kernel[grid](*arguments, self._hopper_programs, num_warps=WARPS, **launch_options())
        else:
            _split_kernel[grid](
                *arguments, HEADS=HEADS, KEYS=KEYS, E4M3=self._e4m3, PTX=PTX, num_warps=8, **launch_options()
            )

    def _join(self, out: Tensor) -> None:
        _join_kernel[(LATENT_DIM // _JOINED_DIMS, self.heads, out.shape[0])](
            self._partial,
            self._softmax,
            out,
            self.heads,
            SPLITS=self._splits,
            DIMS=_JOINED_DIMS,
            num_warps=2,
            **launch_options(),
        )


@functools.cache
def hopper_programs(device: torch.device) -> int:
    """Programs of `attention_hopper` that ``device`` holds at a time; 0 where that does not run."""
    if not PTX or device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _key_operand(g0, g1, KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two groups [KEYS, 64 dims] as one [KEYS, 128], keys and dims in operand order: no value leaves its thread."""
    joined = tl.reshape(tl.join(g0, g1), [2, KEYS // 16, 8, 4, 8, 2, 2])
    return tl.reshape(tl.permute(joined, [1, 0, 2, 6, 4, 3, 5]), [KEYS, 128])


@triton.jit
def _query_operand(query, HEADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[HEADS, 128 dims] as [128, HEADS], dims in operand order."""
    query = tl.permute(tl.reshape(query, [HEADS, 2, 4, 8, 2]), [0, 1, 3, 2, 4])
    return tl.trans(tl.reshape(query, [HEADS, 128]))


@triton.jit
def _split_kernel(  # type: ignore[no-untyped-def]
    addresses,
    query_latent,
    query_rope,
    partial,
    softmax,
    heads,
    k,
    layer_offset,
    scale,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    E4M3: tl.constexpr,
    PTX: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One split. All loads come first, so that all are under way together."""
    split = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row = tl.program_id(2).to(tl.int64)
    present = (head < heads)[:, None]
    dim = tl.arange(0, 64)
    wide = tl.arange(0, 128)
    n = tl.arange(0, KEYS)
    loaded = split * KEYS + n
    key = split * KEYS + n // 16 * 8 + n // 8 % 2 * (KEYS // 2) + n % 8  # of each operand row
    await_kernel_before(OVERLAPPED)
    start = tl.load(addresses + row * k + loaded, mask=loaded < k, other=0)
    key_start = tl.load(addresses + row * k + key, mask=key < k, other=0)
    at_head = row * heads + head[:, None]
    rope_query = tl.load(query_rope + at_head * 64 + dim[None, :], mask=present, other=0.0)
    queries = tl.tuple(())
    for c in tl.static_range(4):
        queries += (tl.load(query_latent + at_head * 512 + c * 128 + wide[None, :], mask=present, other=0.0),)
    filled = start != 0
    start += layer_offset
    values = tl.multiple_of(start.to(tl.pointer_type(tl.int8))[:, None] + dim[None, :], [1, 16])
    scales = (start + _SCALES_OFFSET).to(tl.pointer_type(tl.float32 if E4M3 else tl.bfloat16))
    groups = tl.tuple(())
    group_scales = tl.tuple(())
    for g in tl.static_range(8):
        group = tl.multiple_of(values + g * 64, [1, 16])
        groups += (tl.load(group, mask=filled[:, None], other=0),)
        at = g // 2 if E4M3 else g  # a scale is of 128 values or of 64
        group_scales += (tl.load(scales + at, mask=filled, other=0.0).to(tl.float16),)
    valid = key_start != 0
    ropes = (key_start + layer_offset + _ROPE_OFFSET).to(tl.pointer_type(tl.bfloat16))[:, None] + dim[None, :]
    rope = tl.load(tl.multiple_of(ropes, [1, 16]), mask=valid[:, None], other=0.0)

    dots = tl.dot(rope.to(tl.float16), tl.trans(rope_query.to(tl.float16)))  # [KEYS, HEADS]
    latents = tl.tuple(())
    for c in tl.static_range(4):
        halves = tl.tuple(())
        for g in tl.static_range(2):
            scale_of_group = tl.broadcast_to(group_scales[2 * c + g][:, None], [KEYS, 64])
            if E4M3:
                halves += (halves_of_e4m3(groups[2 * c + g], PTX) * scale_of_group,)
            else:
                halves += (scaled_halves(groups[2 * c + g], scale_of_group, PTX),)
        latent = _key_operand(halves[0], halves[1], KEYS)
        dots = tl.dot(latent, _query_operand(queries[c].to(tl.float16), HEADS), dots)
        latents += (latent,)
    dots = tl.where(valid[:, None], dots * scale, -float("inf"))
    top = tl.max(dots, 0)
    weights = tl.exp2(dots - tl.where(top > -float("inf"), top, 0.0)[None, :])
    total = tl.sum(weights, 0)
    weights = weights * (1.0 / tl.where(total > 0.0, total, 1.0))[None, :]
    weights = tl.trans(weights.to(tl.float16))  # [HEADS, KEYS]
    splits = tl.num_programs(0)
    at_head = (row * splits + split) * heads + head[:, None]
    for c in tl.static_range(4):
        result = tl.dot(weights, latents[c]).to(tl.float16)
        tl.store(partial + at_head * 512 + c * 128 + wide[None, :], result, mask=present)
    at_head = (row * splits + split) * heads + head
    tl.store(softmax + at_head * 2, top, mask=head < heads)
    tl.store(softmax + at_head * 2 + 1, total, mask=head < heads)


@triton.jit
def _join_kernel(  # type: ignore[no-untyped-def]
    partial,
    softmax,
    out,
    heads,
    SPLITS: tl.constexpr,
    DIMS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Some dimensions of one head: the mean of the splits, first to last, weighted by their shares of the softmax."""
    n = tl.program_id(0) * DIMS + tl.arange(0, DIMS)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    dim = n // 64 * 64 + n // 2 % 4 * 16 + n // 8 % 8 * 2 + n % 2  # of operand column n
    await_kernel_before(OVERLAPPED)
    first = row * SPLITS * heads + head
    tops = tl.tuple(())
    totals = tl.tuple(())
    results = tl.tuple(())
    best = -float("inf")
    for split in tl.static_range(SPLITS):
        at = first + split * heads
        tops += (tl.load(softmax + at * 2),)
        totals += (tl.load(softmax + at * 2 + 1),)
        results += (tl.load(partial + at * 512 + n),)
        best = tl.maximum(best, tops[split])
    best = tl.where(best > -float("inf"), best, 0.0)
    total = 0.0
    mean = tl.zeros([DIMS], tl.float32)
    for split in tl.static_range(SPLITS):
        weight = tl.exp2(tops[split] - best) * totals[split]
        total += weight
        mean += weight * results[split].to(tl.float32)
    tl.store(out + (row * heads + head) * 512 + dim, mean / tl.where(total > 0.0, total, 1.0))
