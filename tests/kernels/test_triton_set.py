"""The Triton kernels of one session against the reference set, on two sessions with the same bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compute.kernels import reference
from compute.kernels.addresses import MANY_MISSES, row_addresses
from compute.kernels.attention import hopper_programs
from compute.kernels.choice import default_kernels, make_kernels
from compute.kernels.descriptors import FIELDS, describe
from compute.kernels.kernel_set import KernelSet, ReferenceKernels
from compute.kernels.state import MISSES, NO_RING
from compute.kernels.triton_set import TritonKernels
from protocol.errors import InvalidValue
from protocol.layout import F32, FP8_DS_MLA, PAGE_TOKENS, Q8G64, Encoding
from tests.kernels.pages import DEVICE, Pages, assert_same_bytes, format_of

GROUP, K, HEADS, INDEX_HEADS = 1, 64, 3, 32
PAGES, RING_FIRST, LENGTH = 6, 4 * 64, 345
SLOTS = 300


def _normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def _append(kernels: KernelSet, positions: Tensor, *, seed: int) -> None:
    n = len(positions)
    for layer in range(4):
        latent, rope = _normal(n, 512, seed=seed + layer), _normal(n, 64, seed=seed + layer)
        kernels.append(GROUP, layer, positions, latent, rope)
    kernels.append_keys(GROUP, positions, _normal(n, 128, seed=seed))


class Twins:
    """One history in the Triton set's session and in the reference's, with caches or without."""

    def __init__(self, *, cached: bool = True, encoding: Encoding = Q8G64) -> None:
        self.sessions = [
            Pages.random(format_of(encoding), PAGES, length=LENGTH, ring_first=RING_FIRST) for _ in range(2)
        ]
        self.caches = [[p.cache(group, SLOTS) for group in range(2)] if cached else [] for p in self.sessions]
        ours, theirs = self.sessions
        self.triton = TritonKernels(ours.page_map, self.caches[0], K)
        self.reference = ReferenceKernels(theirs.memory, theirs.page_map, self.caches[1], K)
        self.fill()

    def sets(self) -> tuple[KernelSet, KernelSet]:
        return self.triton, self.reference

    def fill(self) -> None:
        """Rows and keys of the whole history, in both, encoded by the reference."""
        for pages in self.sessions:
            pages.key_blocks.zero_()  # in the interpreter numpy would warn of what unused keys score
            kernels = ReferenceKernels(pages.memory, pages.page_map, [], K)
            _append(kernels, torch.arange(LENGTH, device=DEVICE), seed=0)

    def append(self, positions: Tensor, *, seed: int) -> None:
        for kernels in self.sets():
            _append(kernels, positions, seed=seed)

    def select(self, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """The positions, and both selections."""
        positions = torch.arange(LENGTH - count, LENGTH, device=DEVICE)
        query = _normal(count, INDEX_HEADS, 128, seed=seed, dtype=torch.bfloat16)
        weights = _normal(count, INDEX_HEADS, seed=seed)
        ours, theirs = (kernels.select(GROUP, query, weights, positions) for kernels in self.sets())
        return positions, ours, theirs


@pytest.mark.parametrize("encoding", [Q8G64, FP8_DS_MLA], ids=lambda encoding: encoding.name)
def test_appended_bytes_are_the_references(encoding: Encoding) -> None:
    twins = Twins(encoding=encoding)
    twins.append(torch.tensor([0, 63, 255, 256, 344], device=DEVICE), seed=1)
    left, right = twins.sessions
    for ours, theirs in ((left.ring, right.ring), (left.home, right.home), (left.key_blocks, right.key_blocks)):
        assert_same_bytes([ours], [theirs])


def test_append_forgets_in_the_cache() -> None:
    twins = Twins()
    for cache in (twins.caches[0][GROUP], twins.caches[1][GROUP]):
        cache.table[100:104] = torch.arange(4, dtype=torch.int32, device=DEVICE)
        cache.slot_position[:4] = torch.arange(100, 104, dtype=torch.int32, device=DEVICE)
    twins.append(torch.tensor([101, 103], device=DEVICE), seed=7)
    ours, theirs = (caches[GROUP] for caches in twins.caches)
    assert ours.table[100:104].tolist() == [0, -1, 2, -1]
    assert torch.equal(ours.table, theirs.table)
    assert torch.equal(ours.slot_position, theirs.slot_position)


@pytest.mark.parametrize(
    ("count", "encoding"),
    [(1, Q8G64), (4, Q8G64), (6, Q8G64), (4, FP8_DS_MLA)],
    ids=lambda value: getattr(value, "name", value),
)
def test_select_read_and_attend(count: int, encoding: Encoding) -> None:
    twins = Twins(encoding=encoding)
    positions, ours, theirs = twins.select(count, seed=count)
    assert torch.equal(ours, theirs)
    for selection, position in zip(ours, positions, strict=True):
        assert int(selection.max()) <= int(position)
    addresses = [kernels.in_place(GROUP, ours) for kernels in twins.sets()]
    nbytes = twins.caches[0][GROUP].group_row_bytes
    truth = twins.sessions[0].memory.read(addresses[0], nbytes)
    assert torch.equal(truth, twins.sessions[1].memory.read(addresses[1], nbytes))
    latent, rope = _normal(count, HEADS, 512, seed=1), _normal(count, HEADS, 64, seed=2)
    got, expected = (
        kernels.attend(address, 2, latent, rope, 0.05) for kernels, address in zip(twins.sets(), addresses, strict=True)
    )
    assert float((got - expected).norm() / expected.norm()) < 2e-3
    if count <= 4:  # a decode step: the same rows through the cache, and the same bits
        cached = twins.triton.round(GROUP, ours)
        memory = reference.Memory(twins.sessions[0].home, twins.sessions[0].ring, twins.caches[0][GROUP].rows.view(-1))
        assert torch.equal(memory.read(cached, nbytes), truth)
        assert torch.equal(twins.triton.attend(cached, 2, latent, rope, 0.05), got)


def test_a_query_row_is_the_same_alone_and_among_many() -> None:
    twins = Twins(cached=False)
    positions = torch.arange(LENGTH - 6, LENGTH, device=DEVICE)
    query = _normal(6, INDEX_HEADS, 128, seed=3, dtype=torch.bfloat16)
    weights, latent, rope = (
        _normal(6, INDEX_HEADS, seed=3),
        _normal(6, HEADS, 512, seed=3),
        _normal(6, HEADS, 64, seed=4),
    )
    kernels = twins.triton
    together = kernels.select(GROUP, query, weights, positions)
    attended = kernels.attend(kernels.in_place(GROUP, together), 0, latent, rope, 0.05)
    for row in (0, 3, 4, 5):
        one = slice(row, row + 1)
        alone = kernels.select(GROUP, query[one], weights[one], positions[one])
        assert torch.equal(alone, together[one])
        assert torch.equal(
            kernels.attend(kernels.in_place(GROUP, alone), 0, latent[one], rope[one], 0.05), attended[one]
        )


@pytest.mark.parametrize("streamed", [False, True])
def test_a_pass_attends_with_the_bits_of_any_other(streamed: bool) -> None:
    """With as many query rows as a pass has, rows are float16 beforehand where a GPU can use that; not with one row."""
    twins, count = Twins(cached=False), 18
    _, selection, _ = twins.select(count, seed=5)
    kernels, home = twins.triton, twins.sessions[0].at_home(RING_FIRST // PAGE_TOKENS)
    addresses = (
        kernels.streamed(GROUP, selection, home, length=LENGTH)
        if streamed
        else kernels.in_place(GROUP, selection, length=LENGTH)
    )
    latent, rope = _normal(count, HEADS, 512, seed=1).bfloat16(), _normal(count, HEADS, 64, seed=2).bfloat16()
    for layer in range(4):
        many = kernels.attend(addresses, layer, latent, rope, 0.1)
        assert torch.equal(many, kernels.attend(addresses.clone(), layer, latent, rope, 0.1)), "not those of the pass"
        one = slice(count - 1, count)
        assert torch.equal(many[one], kernels.attend(addresses[one], layer, latent[one], rope[one], 0.1))
    on_hopper = hopper_programs(DEVICE) > 0
    assert (kernels._halved is not None) == on_hopper
    kernels.end_pass()
    assert kernels._halved is None


def test_case_09_a_history_of_five_rows() -> None:
    twins = Twins()
    for pages in twins.sessions:
        pages.page_map.window.copy_(torch.tensor([0, 5]))
    query, weights = _normal(1, INDEX_HEADS, 128, seed=9, dtype=torch.bfloat16), _normal(1, INDEX_HEADS, seed=9)
    selection = twins.triton.select(GROUP, query, weights, torch.tensor([4], device=DEVICE))
    assert selection.tolist() == [[0, 1, 2, 3, 4, *[-1] * (K - 5)]]
    assert (twins.triton.round(GROUP, selection) == 0).tolist() == [[*[False] * 5, *[True] * (K - 5)]]


@pytest.mark.parametrize("ring_first", [0, 130, NO_RING])
def test_addresses_in_place_and_looked_up(ring_first: int) -> None:
    pages = Pages.random(format_of(), PAGES, length=300, ring_first=ring_first)
    cache = pages.cache(GROUP, SLOTS)
    cached = torch.tensor([3, 64, 129, 140, 299])
    cache.table[cached.to(DEVICE)] = torch.arange(5, dtype=torch.int32, device=DEVICE)
    extremes = [-(2**31), -65, -2, -1, 0, 3, 63, 64, 129, 130, 140, 299, 300, 383, 384, 2**31 - 1]
    selection = torch.tensor(extremes, dtype=torch.int32, device=DEVICE).repeat(2, 2, 20).contiguous()
    records = torch.stack([describe(pages.page_map, GROUP, cache), torch.zeros(FIELDS, dtype=torch.int64)]).to(DEVICE)
    addresses = torch.full(selection.shape, 123456, device=DEVICE)
    row_addresses(records, format_of(), GROUP, selection, addresses)
    expected = reference.row_addresses(pages.page_map, GROUP, selection[0])
    assert torch.equal(addresses[0], expected)
    assert not bool(addresses[1].any())
    row_addresses(records, format_of(), GROUP, selection, addresses, cached=True)
    for slot, position in enumerate(cached.tolist()):
        if position < ring_first:
            expected[selection[0] == position] = cache.rows[slot].data_ptr()
    assert torch.equal(addresses[0], expected)
    assert not bool(addresses[1].any())


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("ring_first", [130, NO_RING])
def test_of_many_misses_each_row_is_copied_once(rows: int, ring_first: int) -> None:
    """Rows share positions, all or none; some are short, one is empty."""
    length, slots, k = 4 * PAGE_TOKENS + 1, 40, 150
    pages = Pages.random(format_of(), 5, length=length, ring_first=ring_first)
    cache = pages.cache(GROUP, slots)
    generator = torch.Generator().manual_seed(rows)
    cached = torch.randperm(length, generator=generator)[:slots].to(DEVICE)
    cache.table[cached] = torch.arange(slots, dtype=torch.int32, device=DEVICE)
    selection = torch.full((2, rows, k), -1, dtype=torch.int32, device=DEVICE)
    for row, count in zip(range(rows), (k, k, k - 70, 0), strict=False):
        drawn = torch.randperm(length, generator=generator)[:count].sort()[0]
        selection[0, row, :count] = (selection[0, 0] if row == 1 else drawn)[:count]
    selection[1] = selection[0]
    records = torch.stack([describe(pages.page_map, GROUP, cache), torch.zeros(FIELDS, dtype=torch.int64)]).to(DEVICE)
    in_place, addresses = torch.zeros_like(selection).long(), torch.zeros_like(selection).long()
    row_addresses(records, format_of(), GROUP, selection, in_place, cached=True)
    assert not bool(in_place[1].any())

    row_bytes = Q8G64.rows.row_bytes
    staging = torch.full((*selection.shape, row_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    cache.control[MISSES] = MANY_MISSES * rows
    row_addresses(records, format_of(), GROUP, selection, addresses, cached=True, staging=staging)
    assert torch.equal(addresses, in_place)
    cache.control[MISSES] += 1
    row_addresses(records, format_of(), GROUP, selection, addresses, cached=True, staging=staging)
    flat = selection[0].flatten().long()
    missed = (flat >= 0) & (flat < ring_first) & ~torch.isin(flat, cached)
    first = (flat[None, :] == flat[:, None]).int().argmax(dim=1)  # the first of all places with this position
    expected = torch.where(missed, staging.data_ptr() + first * row_bytes, in_place[0].flatten())
    assert bool(missed.any())
    assert torch.equal(addresses[0].flatten(), expected)
    copied = torch.zeros_like(missed)
    copied[first[missed]] = True
    truth = pages.memory.read(in_place[0].flatten()[copied], row_bytes)
    assert torch.equal(staging[0].flatten(0, 1)[copied], truth)
    assert bool((staging[0].flatten(0, 1)[~copied] == 0xFF).all())
    assert bool((staging[1] == 0xFF).all())
    assert not bool(addresses[1].any())
    with pytest.raises(InvalidValue, match="staging"):
        row_addresses(records, format_of(), GROUP, selection, addresses, cached=True, staging=staging[:, :, :5])


def test_more_than_a_cache_can_pin_is_refused() -> None:
    twins = Twins()
    with pytest.raises(InvalidValue, match=f"at most the {SLOTS} slots"):
        twins.triton.round(GROUP, torch.zeros((5, K), dtype=torch.int32, device=DEVICE))


def test_another_encoding_is_refused() -> None:
    pages = Pages.random(format_of(F32), 1, length=3)
    with pytest.raises(InvalidValue, match="encoding of the Triton kernels is 'f32'"):
        make_kernels("triton", pages.memory, pages.page_map, [], K)


def test_the_default_is_by_device() -> None:
    assert [default_kernels(kind) for kind in ("cpu", "cuda")] == ["reference", "triton"]
