"""Every kernel touches only what it was given: small launches of odd sizes under `tests.kernels.bounds`.

Results are the other tests' business.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import compute.kernels
from compute.kernels import reference_linear
from compute.kernels.addresses import MANY_MISSES, row_addresses
from compute.kernels.append import append_keys, append_rows
from compute.kernels.attention import SparseAttention
from compute.kernels.blend import blend
from compute.kernels.descriptors import FIELDS, describe
from compute.kernels.experts import Experts, experts, route
from compute.kernels.fetch import fetch
from compute.kernels.half_rows import HALF_ROW_DIMS, fill_half_rows
from compute.kernels.hidden import store_hidden
from compute.kernels.index_score import index_scores
from compute.kernels.inputs import Angles, IndexerRows, hidden_inputs, query_inputs
from compute.kernels.linear import Workspace, head_linear, linear
from compute.kernels.matrix import Matrix
from compute.kernels.norms import add_rms_norm, rms_norm, silu_mul
from compute.kernels.panels import fill_panels, panel_rows
from compute.kernels.planar import planar_blocks, planar_rows
from compute.kernels.positions import begin_step
from compute.kernels.resolve import RoundBuffers, resolve
from compute.kernels.state import GroupCache
from compute.kernels.topk import TopK
from compute.kernels.triton_many_experts import sorted_pairs
from compute.kernels.triton_support import INTERPRETED
from protocol.layout import FP8_DS_MLA, PAGE_TOKENS, Q8G64, Encoding, PageFormat
from protocol.model import DEMO
from tests.kernels.pages import DEVICE, ENCODINGS, GROUPS, Pages

pytestmark = [
    pytest.mark.xdist_group("bounds"),
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter; `make sanitize` looks at a GPU's accesses"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # by numpy, of what nobody wrote
]
if INTERPRETED:
    from tests.kernels.bounds import GUARD, Bounds, InterpreterError

PAGES, RING_FIRST = 4, 2 * PAGE_TOKENS
LENGTH = PAGES * PAGE_TOKENS  # to the last position of the last page
NOT_INTERPRETED = {"split_kernel"}
"""Gluon."""
RAN: set[str] = set()


@pytest.fixture(autouse=True)
def _bounds() -> Iterator[None]:
    with Bounds() as bounds:
        yield
    RAN.update(bounds.kernels)


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _session(encoding: Encoding = Q8G64, *, hidden_size: int = 0, seed: int = 0) -> Pages:
    page_format = PageFormat(encoding, GROUPS, hidden_size=hidden_size)
    return Pages.random(page_format, PAGES, length=LENGTH, ring_first=RING_FIRST, ring_pages=2, seed=seed)


def _records(pages: Pages, group: int, cache: GroupCache | None = None, peer: Pages | None = None) -> Tensor:
    """Of a session, and of an idle place behind it."""
    record = describe(
        pages.page_map,
        group,
        cache,
        peer_ring_base=peer.page_map.ring_base if peer else 0,
        peer_key_block_address=peer.page_map.key_block_address if peer else None,
    )
    return torch.stack([record, torch.zeros(FIELDS, dtype=torch.int64)])


EDGES = torch.tensor([[0, RING_FIRST - 1, RING_FIRST, LENGTH - 1, LENGTH, -1, 2**40]]).repeat(2, 1)
"""First and last positions of home and ring; those that are outside the map; and all of them in an idle place."""


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: encoding.name)
@pytest.mark.parametrize("group", [0, 1])
def test_append(encoding: Encoding, group: int) -> None:
    pages, peer = _session(encoding), _session(encoding, seed=1)
    cache = pages.cache(group, 3)
    cache.table[EDGES[0, :3]] = torch.tensor([0, 2, 1], dtype=torch.int32)
    records, n = _records(pages, group, cache, peer), EDGES.shape[1]
    append_keys(records, pages.page_map.format, group, EDGES, _normal(2, n, 128))
    for layer in {0, GROUPS[group].layers - 1}:
        append_rows(records, pages.page_map.format, group, layer, EDGES, _normal(2, n, 512), _normal(2, n, 64))


@pytest.mark.parametrize("size", [1, 48, 65])
def test_hidden_states(size: int) -> None:
    pages = _session(hidden_size=size)
    peer = _session(hidden_size=size, seed=1)
    positions = torch.tensor([[63, LENGTH - 1, LENGTH + 63, -1, 62]]).repeat(2, 1)
    store_hidden(_records(pages, 0, peer=peer), pages.page_map.format, positions, _normal(2, 5, size))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_begins(rows: int) -> None:
    lengths, accepted = torch.tensor([LENGTH - rows - 1, 5]), torch.tensor([1, 0])
    positions, seen = torch.zeros((2, rows), dtype=torch.int64), torch.zeros((2, rows), dtype=torch.int64)
    pages = _session()
    begin_step(_records(pages, 1), accepted, lengths, positions, seen)
    assert positions[0, -1] == LENGTH - 1


def _selection(rows: int, k: int) -> Tensor:
    """Of a session and an idle place: as many as there are, the rest -1 or outside."""
    chosen = torch.full((2, rows, k), -1, dtype=torch.int32)
    for row in range(rows):
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(row))[: k - 3].sort().values
        chosen[0, row, : len(order)] = order.int()
    chosen[0, :, -2:] = torch.tensor([LENGTH, 2**31 - 1], dtype=torch.int32)
    chosen[1] = chosen[0]
    return chosen


@pytest.mark.parametrize(("rows", "k", "slots"), [(1, 7, 7), (3, 90, 270)])
def test_a_round_of_the_cache(rows: int, k: int, slots: int) -> None:
    """Twice: misses, then hits. Before each, the look-up that copies what is missing, and those that do not."""
    pages = _session()
    page_format, cache = pages.page_map.format, pages.cache(1, slots)
    records, selection = _records(pages, 1, cache), _selection(rows, k)
    buffers, addresses = RoundBuffers.empty(2, rows, k, DEVICE), torch.zeros((2, rows, k), dtype=torch.int64)
    staging = torch.empty((2, rows, k, Q8G64.rows.row_bytes), dtype=torch.uint8)
    row_addresses(records, page_format, 1, selection, addresses)
    for turn in range(2):
        cache.control[2] = 0 if turn else MANY_MISSES * rows + 1
        row_addresses(records, page_format, 1, selection, addresses, cached=True, staging=staging)
        row_addresses(records, page_format, 1, selection, addresses, cached=True)
        cache.control[0] = slots - 1
        resolve(records, page_format, 1, selection, buffers)
        fetch(buffers, page_format.group_row_bytes(1))
    assert int(buffers.misses[0]) == 0


def test_a_round_of_more_than_a_window_of_slots() -> None:
    rows, k = 4, 513
    pages = _session()
    cache, buffers = pages.cache(1, rows * k), RoundBuffers.empty(2, rows, k, DEVICE)
    cache.control[0] = rows * k - 1
    resolve(_records(pages, 1, cache), pages.page_map.format, 1, _selection(rows, k), buffers)
    assert int(buffers.misses[0]) == RING_FIRST


@pytest.mark.parametrize(("rows", "last"), [(3, -1), (3, 0), (1, 64), (3, LENGTH - 1)])
def test_index_scores(rows: int, last: int) -> None:
    pages = _session()
    records = _records(pages, 1)
    query, weights = _normal(2, rows, 32, 128).bfloat16(), _normal(2, rows, 32)
    positions = torch.full((2, rows), -1)
    positions[0] = last - torch.arange(rows)
    maxima = TopK(2 * rows, LENGTH, 5, DEVICE).maxima if rows > 1 else None
    index_scores(records, query, weights, positions, torch.empty(2, rows, LENGTH), maxima)


@pytest.mark.parametrize(("capacity", "k"), [(64, 1), (65, 80), (1400, 513), (4200, 33)])
def test_selection(capacity: int, k: int) -> None:
    """Lengths from nothing to all; scores that differ, and that are all equal and do not fit into one tile."""
    lengths = torch.tensor([0, 1, capacity - 1, capacity])
    top = TopK(len(lengths), capacity, k, DEVICE)
    scores = _normal(len(lengths), top.capacity)
    scores[2] = 1.0
    top.select(scores, lengths, torch.empty((len(lengths), k), dtype=torch.int32))


@pytest.mark.parametrize(("encoding", "heads", "k"), [(Q8G64, 1, 129), (FP8_DS_MLA, 65, 1)])
def test_attention(encoding: Encoding, heads: int, k: int) -> None:
    """With room for two of three query rows, one of which has nothing selected."""
    pages = _session(encoding)
    selection = _selection(3, k + 3)[0, :, :k].contiguous()
    selection[1] = -1
    addresses = torch.zeros((3, k), dtype=torch.int64)
    row_addresses(_records(pages, 1)[:1], pages.page_map.format, 1, selection[None], addresses[None])
    query, rope, out = _normal(3, heads, 512), _normal(3, heads, 64), torch.empty(3, heads, 512)
    SparseAttention(2, heads, k, DEVICE, encoding=encoding).attend(addresses, 3, query.half(), rope.half(), 0.1, out)


@pytest.mark.parametrize("room", [1, LENGTH, LENGTH + 1])
def test_rows_as_halves(room: int) -> None:
    """Of a session, and of an idle place."""
    pages = _session()
    for record in _records(pages, 1):
        fill_half_rows(record, pages.page_map.format, 1, 3, torch.empty((room, HALF_ROW_DIMS), dtype=torch.float16))


def test_planar_export() -> None:
    pages, k = _session(), 43
    addresses = torch.zeros((3, k), dtype=torch.int64)
    row_addresses(_records(pages, 1)[:1], pages.page_map.format, 1, _selection(3, k)[:1], addresses[None])
    blocks = torch.empty((planar_blocks(3, k), PAGE_TOKENS, 656), dtype=torch.uint8)
    planar_rows(addresses, 3 * 656, blocks, torch.empty((3, k), dtype=torch.int32))


@pytest.mark.parametrize(("rows", "heads", "index_heads"), [(3, 1, 1), (3, 5, 6), (65, 5, 6)])
def test_inputs_of_attention(rows: int, heads: int, index_heads: int) -> None:
    query, nope = 96, 40
    hidden = _normal(rows, 128 + 640 + 128 + index_heads)
    latent = _normal(rows, heads * (nope + 64) + index_heads * 128).bfloat16()
    angles = Angles(_normal(rows, 32), _normal(rows, 32))
    for interleaved in (True, False):
        index = IndexerRows((_normal(128), _normal(128)), interleaved, _normal(rows, 128), _normal(rows, index_heads))
        made = (torch.empty(rows, query, dtype=torch.bfloat16), torch.empty(rows, 512), torch.empty(rows, 64))
        norms = (_normal(query), _normal(512))
        hidden_inputs(hidden, (0, 128, 768, 896), norms, angles, *made, index, "triton")
        hidden_inputs(hidden, (0, 128), norms, angles, *made, None, "triton")
        ropes = torch.empty(rows, heads, 64, dtype=torch.bfloat16)
        index_query = torch.empty(rows, index_heads, 128, dtype=torch.bfloat16)
        start = heads * (nope + 64)
        query_inputs(latent, start, nope, angles, ropes, index_query, "triton", interleaved=interleaved)
        query_inputs(latent, start, nope, angles, ropes, None, "triton", interleaved=interleaved)


def test_blended_queries() -> None:
    rows, heads = 3, 5
    state = _normal(2, rows + 1, heads * 129)
    query, weights = _normal(2, rows, heads, 128).bfloat16(), _normal(2, rows, heads)
    blend(state, query, weights, torch.tensor([0, rows]), 0.9, kernels="triton")


@pytest.mark.parametrize("columns", [1, 200, 1025])
def test_norms_and_gates(columns: int) -> None:
    x, delta, weight = _normal(3, columns), _normal(3, columns), _normal(columns)
    add_rms_norm(x, delta, weight, 1e-5, torch.empty(3, columns), kernels="triton")
    wide = _normal(3, columns + 5)
    rms_norm(wide[:, 5:], weight, 1e-5, torch.empty(3, columns + 7)[:, :columns], kernels="triton")
    silu_mul(_normal(3, 2 * columns), torch.empty(3, columns, dtype=torch.bfloat16), kernels="triton")
    many, normed = _normal(65, columns), torch.empty(65, columns)
    add_rms_norm(many, many.clone(), weight, 1e-5, normed, kernels="triton")


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize(("n", "k", "rows"), [(1, 144, 1), (130, 640, 3), (65, 256, 65), (70, 1040, 66)])
def test_products(e4m3: bool, n: int, k: int, rows: int) -> None:
    workspace = Workspace(rows, DEVICE, kernels="triton", nbytes=1 << 20)
    out = torch.empty(rows, n + 3)[:, :n]
    linear(_normal(rows, k + 8).bfloat16()[:, 8:], _matrix(e4m3, n, k), out, workspace)


@pytest.mark.parametrize(("rows", "k"), [(1, 128), (9, 384)])
def test_panels(rows: int, k: int) -> None:
    """Of rows as they are, and of those that sorted pairs name."""
    x, order = _normal(rows, k + 8)[:, 8:], torch.randperm(2 * rows, dtype=torch.int32)
    for count, pairs in ((rows, None), (2 * rows, order)):
        fill_panels(x, torch.empty(panel_rows(count) * k, dtype=torch.bfloat16), pairs, 2)


@pytest.mark.parametrize(("rows", "n", "k"), [(3, 40, 80), (65, 40, 80), (130, 260, 64)])
def test_products_of_heads(rows: int, n: int, k: int) -> None:
    workspace = Workspace(rows, DEVICE, kernels="triton", nbytes=1 << 20)
    head_linear(_normal(rows, 2, k), _matrix(False, 2, n, k), torch.empty(rows, 2, n), workspace)


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize(("count", "rows", "with_shared"), [(3, 3, True), (5, 1, False), (3, 66, True)])
def test_mixtures_of_experts(e4m3: bool, count: int, rows: int, with_shared: bool) -> None:
    hidden, inner, choices = 144, 64, 2
    routed = Experts(_matrix(e4m3, count, 2 * inner, hidden), _matrix(e4m3, count, hidden, inner))
    chosen = torch.tensor([0, count - 1], dtype=torch.int32).repeat(rows, 1)
    weights, x = torch.rand(rows, choices), _normal(rows, hidden).bfloat16()
    workspace = Workspace(rows, DEVICE, kernels="triton", nbytes=1 << 20)
    shared = (routed.gate_up[0], routed.down[0]) if with_shared else None
    experts(x, chosen, weights, routed, shared, torch.empty(rows, hidden), workspace)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rows", [1, 345])
def test_sorted_pairs(rows: int, shared: bool) -> None:
    """In one part, and in two."""
    sorted_pairs(torch.tensor([0, 1, 4], dtype=torch.int32).repeat(rows, 1), 5, shared)


def test_routing() -> None:
    count = DEMO.n_routed_experts
    route(_normal(3, count), _normal(count), DEMO, kernels="triton")


def _matrix(e4m3: bool, *shape: int) -> Matrix:
    return reference_linear.quantise(_normal(*shape)) if e4m3 else Matrix(_normal(*shape).bfloat16())


def test_no_kernel_is_left_out() -> None:
    """Runs after the others."""
    every: set[str] = set()
    for module in pkgutil.iter_modules(compute.kernels.__path__, "compute.kernels."):
        for name, kernel in vars(importlib.import_module(module.name)).items():
            if name.endswith("_kernel") and hasattr(kernel, "__getitem__") and not name.startswith("__"):
                every.add(name)
    assert every - RAN == NOT_INTERPRETED


# What the tool is for: each of these kernels is wrong, and each is found.


@triton.jit
def _copy_one_more(source, target, n, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    value = tl.load(source + lane, mask=lane < n, other=0)
    tl.store(target + lane, value, mask=lane < n + 1)


@triton.jit
def _follow(addresses, out, offset):
    address = tl.load(addresses)
    tl.store(out, tl.load((address + offset).to(tl.pointer_type(tl.int32))))


@triton.jit
def _count_at(counts, at):
    tl.atomic_add(counts + at, 1)


@triton.jit
def _claim_alignment(source, out):
    lane = tl.arange(0, 4)
    tl.store(out + lane, tl.load(tl.multiple_of(source + lane, 16)))


def test_a_lane_behind_the_end_is_named() -> None:
    source, target = torch.arange(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    message = (
        r"_copy_one_more, program .*test_bounds.py:\d+ in _copy_one_more: store of 4 bytes at 0x\w+, lane \(5,\): "
        r"0 bytes after the end of argument target int32 \[5\]"
    )
    with pytest.raises(InterpreterError, match=message):
        _copy_one_more[(1,)](source, target, 5, SIZE=8)
    assert target.tolist() == [0] * 5, "found before it was done"
    _copy_one_more[(1,)](source, torch.zeros(6, dtype=torch.int32), 5, SIZE=8)


def test_a_view_is_no_more_than_the_view() -> None:
    whole = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(InterpreterError, match="0 bytes after the end of argument target"):
        _copy_one_more[(1,)](torch.zeros(5, dtype=torch.int32), whole[:5], 5, SIZE=8)


@pytest.mark.parametrize(("offset", "found"), [(-4, "4 bytes before"), (32, "0 bytes after the end"), (28, "")])
def test_memory_is_given_by_its_address(offset: int, found: str) -> None:
    memory, out = torch.arange(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    addresses = torch.tensor([memory.data_ptr()])
    if found:
        with pytest.raises(InterpreterError, match=f"load of 4 bytes .*{found}.*int32 .8."):
            _follow[(1,)](addresses, out, offset)
    else:
        _follow[(1,)](addresses, out, offset)
        assert out.item() == 7


def test_an_address_that_nobody_gave_is_out_of_bounds() -> None:
    """Though the tensor exists; what the number means is said nowhere."""
    memory, out = torch.arange(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    before = torch.tensor([memory.data_ptr() - 4 * GUARD])
    with pytest.raises(InterpreterError, match="load of 4 bytes"):
        _follow[(1,)](before, out, 4 * GUARD)


def test_an_atomic_and_a_misaligned_access_are_found() -> None:
    counts = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(InterpreterError, match=r"atomic of 4 bytes .*4 bytes before argument counts"):
        _count_at[(1,)](counts, -1)
    memory = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(InterpreterError, match="not aligned"):
        _follow[(1,)](torch.tensor([memory.data_ptr() + 2]), torch.zeros(1, dtype=torch.int32), 0)


def test_a_wrong_hint_to_the_compiler_is_found() -> None:
    source, out = torch.zeros(9, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    _claim_alignment[(1,)](source, out)
    with pytest.raises(InterpreterError, match=r"divisibility of .16. does not hold along dimension 0"):
        _claim_alignment[(1,)](source[1:], out)
