"""The splits of sparse attention on GPUs of compute capability 9.0, in Gluon; `compute.kernels.attention` launches it.

A split of 128 keys is two tiles of 64, each with a place in shared memory. A tile's rows are fetched into registers and
stored there as float16; the matrix unit reads them there, to multiply them with the queries and to add them up by their
weights. It works on one tile while the other is converted. A multiprocessor holds one program, so each one asks for the
rows of the program that will follow it to be in the L2 cache by then.

Weights are relative to the largest score so far and rounded to float16: what the first tile added up to is scaled when
the second has a larger score. Sums are float32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from protocol.layout import Q8G64

WARPS = 8
HEADS = gl.constexpr(64)
TILE = gl.constexpr(64)
"""Keys of a tile; a split has two."""

_HALF_ROW = gl.constexpr(Q8G64.rows.row_bytes // 2)
_SCALES_OFFSET = gl.constexpr(Q8G64.rows.scales_offset)
_ROPE_OFFSET = gl.constexpr(Q8G64.rows.rope_offset)

_VALUES = gl.constexpr(gl.BlockedLayout([1, 8, 16], [8, 1, 4], [8, 1, 1], [2, 1, 0]))
"""[keys, 8 groups, 64]: four threads have a key, each of them a quarter of every group."""
_SCALES = gl.constexpr(gl.SliceLayout(2, _VALUES.value))
_KEYS = gl.constexpr(gl.SliceLayout(1, _SCALES.value))
_ROPE = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [8, 1], [1, 0]))
_LINES = gl.constexpr(gl.BlockedLayout([1, 1], [16, 2], [8, 1], [1, 0]))
_QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
_ROPE_QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
"""[heads, keys]."""
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
"""[heads, 512]."""
_STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [0, 128], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [0, 256]],
        block_bases=[],
        shape=[64, 512],
    )
)
"""`_SUMS` with the dimensions in operand order: eight of a thread lie side by side."""
_OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_LIST = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def split_kernel(  # type: ignore[no-untyped-def]
    addresses,
    query_latent,
    query_rope,
    partial,
    softmax,
    heads,
    k,
    layer_offset,
    scale,
    ahead,
    OVERLAPPED: gl.constexpr,
):
    """A split of one query row and 64 heads; what it stores is `attention._split_kernel`'s.

    ``ahead`` is how many programs there are at a time.
    """
    split = gl.program_id(0)
    first_head = gl.program_id(1) * HEADS
    row = gl.program_id(2).to(gl.int64)
    query = gl.allocate_shared_memory(gl.float16, [HEADS, 512], _OPERAND)
    rope_query = gl.allocate_shared_memory(gl.float16, [HEADS, 64], _OPERAND)
    weights = gl.allocate_shared_memory(gl.float16, [HEADS, TILE], _OPERAND)
    tile0 = _allocate_tile()
    tile1 = _allocate_tile()
    if OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()
    selected = addresses + row * k
    start0 = _starts(selected, split * (2 * TILE), k, layer_offset)
    start1 = _starts(selected, split * (2 * TILE) + TILE, k, layer_offset)
    later_start = _later_starts(addresses, ahead, k, layer_offset)
    rope_query_values = _load_query(query_rope + row * heads * 64, first_head, heads, 64, _ROPE_QUERY)
    query_values = _load_query(query_latent + row * heads * 512, first_head, heads, 512, _QUERY)
    fetched = _fetch(start0)
    rope_query.store(rope_query_values)
    query.store(query_values)
    _stage(fetched, start0, tile0)
    fetched = _fetch(start1)
    fence_async_shared()
    scores = _start_scores(query, rope_query, tile0)
    _prefetch(later_start)
    _stage(fetched, start1, tile1)
    scaled, top = _scaled(warpgroup_mma_wait(0, deps=(scores,)), tile0, scale)
    shares = gl.exp2(scaled - _finite(top)[:, None])
    weights.store(shares.to(gl.float16))
    fence_async_shared()
    sums = gl.full([HEADS, 512], 0.0, gl.float32, layout=_SUMS)
    sums = warpgroup_mma(weights, tile0[0], sums, use_acc=False, is_async=True)
    scores = _start_scores(query, rope_query, tile1)
    total = _thread_sums(shares)

    sums = warpgroup_mma_wait(2, deps=(sums,))
    scaled, tile_top = _scaled(warpgroup_mma_wait(0, deps=(scores,)), tile1, scale)
    new_top = gl.maximum(top, tile_top)
    kept = gl.exp2(top - _finite(new_top))
    shares = gl.exp2(scaled - _finite(new_top)[:, None])
    weights.store(shares.to(gl.float16))
    fence_async_shared()
    sums = sums * _as_rows_of(kept, sums)[:, None]
    sums = warpgroup_mma(weights, tile1[0], sums, is_async=True)
    total = total * _as_rows_of(kept, total)[:, None, None] + _thread_sums(shares)
    total = gl.convert_layout(gl.sum(gl.sum(total, 2), 1), gl.SliceLayout(1, _SCORES))
    sums = warpgroup_mma_wait(0, deps=(sums,))
    first_entry = (row * gl.num_programs(0) + split) * heads
    _store_split(partial, softmax, first_entry, first_head, heads, sums, new_top, total)
    # The matrix unit reads beside the program: nothing else may be given these places before.
    for place in gl.static_range(3):
        tile0[place]._keep_alive()
        tile1[place]._keep_alive()
    query._keep_alive()
    rope_query._keep_alive()
    weights._keep_alive()


@gluon.jit
def _allocate_tile():  # type: ignore[no-untyped-def]
    """Latents and ropes of a tile, and 0 or minus infinity for each key, which is added to its scores."""
    latent = gl.allocate_shared_memory(gl.float16, [TILE, 512], _OPERAND)
    rope = gl.allocate_shared_memory(gl.float16, [TILE, 64], _OPERAND)
    bias = gl.allocate_shared_memory(gl.float32, [TILE], _LIST)
    return latent, rope, bias


@gluon.jit
def _load_query(query, first_head, heads, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """float16 [64 heads, ``WIDTH``]; 0 for heads that there are not."""
    head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, LAYOUT))
    at = head[:, None] * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.load(query + at, mask=(head < heads)[:, None], other=0.0).to(gl.float16)


@gluon.jit
def _starts(selected, first, k, layer_offset):  # type: ignore[no-untyped-def]
    """Addresses of the layer's rows of a tile's keys, 0 where empty."""
    key = first + gl.arange(0, TILE, layout=_KEYS)
    start = gl.load(selected + key, mask=key < k, other=0)
    return gl.where(start != 0, start + layer_offset, 0)


@gluon.jit
def _later_starts(addresses, ahead, k, layer_offset):  # type: ignore[no-untyped-def]
    """Addresses of the layer's rows of the program that comes ``ahead`` programs after this one, 0 where empty."""
    splits = gl.num_programs(0)
    program = (gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)) * splits + gl.program_id(0) + ahead
    row = program // (splits * gl.num_programs(1))
    key = program % splits * (2 * TILE) + gl.arange(0, 2 * TILE, layout=gl.SliceLayout(1, _LINES))
    start = gl.load(addresses + row.to(gl.int64) * k + key, mask=(key < k) & (row < gl.num_programs(2)), other=0)
    return gl.where(start != 0, start + layer_offset, 0)


@gluon.jit
def _prefetch(start):  # type: ignore[no-untyped-def]
    """Have the rows at ``start`` brought into the L2 cache; each of two threads asks for four lines of a row."""
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, _LINES)) * _HALF_ROW
    gl.inline_asm_elementwise(
        """
        { .reg .pred filled;
          setp.ge.u64 filled, $1, 4096;
          @filled prefetch.global.L2 [$1];
          @filled prefetch.global.L2 [$1 + 109];
          @filled prefetch.global.L2 [$1 + 218];
          @filled prefetch.global.L2 [$1 + 327]; // $0
        }
        """,
        "=r,l",
        [start[:, None] + half[None, :]],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _fetch(start):  # type: ignore[no-untyped-def]
    """Of the rows at ``start``: values [keys, 8 groups, 64], scales [keys, 8 groups], ropes [keys, 64]."""
    filled = start != 0
    group = gl.arange(0, 8, layout=gl.SliceLayout(0, _SCALES))
    dim = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, _VALUES)))
    scales = (start + _SCALES_OFFSET).to(gl.pointer_type(gl.bfloat16))[:, None] + group[None, :]
    scales = gl.load(gl.multiple_of(scales, [1, 16]), mask=filled[:, None], other=0.0)
    groups = start.to(gl.pointer_type(gl.int8))[:, None] + (group * 64)[None, :]
    values = gl.multiple_of(groups, [1, 64])[:, :, None] + dim[None, None, :]
    values = gl.load(gl.multiple_of(values, [1, 1, 16]), mask=filled[:, None, None], other=0)
    start = gl.convert_layout(start, gl.SliceLayout(1, _ROPE), assert_trivial=True)
    dim = gl.arange(0, 64, layout=gl.SliceLayout(0, _ROPE))
    ropes = (start + _ROPE_OFFSET).to(gl.pointer_type(gl.bfloat16))[:, None] + dim[None, :]
    ropes = gl.load(gl.multiple_of(ropes, [1, 16]), mask=(start != 0)[:, None], other=0.0)
    return values, scales, ropes


@gluon.jit
def _stage(fetched, start, tile):  # type: ignore[no-untyped-def]
    """Store what was fetched as float16 in shared memory."""
    values, scales, ropes = fetched
    scales, _ = gl.broadcast(scales.to(gl.float16)[:, :, None], values)
    tile[0].store(gl.reshape(_scaled_halves(values, scales), [TILE, 512]))
    tile[1].store(ropes.to(gl.float16))
    tile[2].store(gl.where(start != 0, 0.0, -float("inf")))


@gluon.jit
def _scaled_halves(values, scales):  # type: ignore[no-untyped-def]
    """As `compute.kernels.ptx.scaled_halves`."""
    return gl.inline_asm_elementwise(
        """
        { .reg .b32 bytes, low, high, bias;
          mov.b32 bias, 0x64806480;
          xor.b32 bytes, $2, 0x80808080;
          prmt.b32 low, bytes, 0x64646464, 0x4140;
          prmt.b32 high, bytes, 0x64646464, 0x4342;
          sub.f16x2 low, low, bias;
          sub.f16x2 high, high, bias;
          mul.f16x2 $0, low, $3;
          mul.f16x2 $1, high, $4; }
        """,
        "=r,=r,r,r,r",
        [values, scales],
        dtype=gl.float16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _start_scores(query, rope_query, tile):  # type: ignore[no-untyped-def]
    scores = gl.full([HEADS, TILE], 0.0, gl.float32, layout=_SCORES)
    scores = warpgroup_mma(rope_query, tile[1].permute((1, 0)), scores, use_acc=False, is_async=True)
    return warpgroup_mma(query, tile[0].permute((1, 0)), scores, is_async=True)


@gluon.jit
def _scaled(scores, tile, scale):  # type: ignore[no-untyped-def]
    """Scores in units of the exponent, and the largest of each head."""
    scores = scores * scale + tile[2].load(gl.SliceLayout(0, _SCORES))[None, :]
    return scores, gl.max(scores, 1)


@gluon.jit
def _finite(top):  # type: ignore[no-untyped-def]
    return gl.where(top > -float("inf"), top, 0.0)


@gluon.jit
def _thread_sums(shares):  # type: ignore[no-untyped-def]
    """[heads, keys] as [heads, 2, 4]: what one thread has is added up."""
    return gl.sum(gl.sum(gl.reshape(shares, [HEADS, 2, 4, 4, 2]), 4), 2)


@gluon.jit
def _as_rows_of(values, other):  # type: ignore[no-untyped-def]
    """A value of each head, where the threads have the rows of ``other``; no value leaves its thread."""
    parent: gl.constexpr = other.type.layout if len(other.shape) == 2 else gl.SliceLayout(2, other.type.layout)
    layout: gl.constexpr = gl.SliceLayout(1, parent)
    return gl.convert_layout(values, layout, assert_trivial=True)


@gluon.jit
def _store_split(partial, softmax, first_entry, first_head, heads, sums, top, total):  # type: ignore[no-untyped-def]
    whole = 1.0 / gl.where(total > 0.0, total, 1.0)
    results = (sums * _as_rows_of(whole, sums)[:, None]).to(gl.float16)
    results = gl.permute(gl.reshape(results, [HEADS, 8, 4, 8, 2]), [0, 1, 3, 2, 4])
    results = gl.convert_layout(gl.reshape(results, [HEADS, 512]), _STORED)
    head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, _STORED))
    at = (first_entry + head)[:, None] * 512 + gl.arange(0, 512, layout=gl.SliceLayout(0, _STORED))[None, :]
    gl.store(partial + at, results, mask=(head < heads)[:, None])
    head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, _SCORES))
    gl.store(softmax + (first_entry + head) * 2, top, mask=head < heads)
    gl.store(softmax + (first_entry + head) * 2 + 1, total, mask=head < heads)
