"""Append against its reference: the same bytes in the same places, and not one byte anywhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compute.kernels import reference
from compute.kernels.append import append_keys, append_rows
from compute.kernels.descriptors import FIELDS, describe
from protocol.errors import InvalidValue
from protocol.layout import F32, Q8G64, Encoding
from tests.kernels.pages import DEVICE, ENCODINGS, Pages, assert_same_bytes, format_of

RING_FIRST, LENGTH = 12 * 64, 14 * 64 + 7
POSITIONS = [[0, 63, 64, 65], [RING_FIRST - 1, RING_FIRST, LENGTH - 2, LENGTH - 1], [5, -1, -1, -1]]


def _pages(encoding: Encoding, seed: int) -> Pages:
    return Pages.random(format_of(encoding), 16, length=LENGTH, ring_first=RING_FIRST, seed=seed)


def _hard_values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Ordinary rows, and rows that are all zero, tiny, huge, on rounding ties, or half zero."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    rows = values.view(-1, shape[-1])
    rows[1] = 0
    rows[2] *= 1e-40 if dtype == torch.float32 else 1e-33  # Triton's interpreter misreads subnormal bfloat16
    rows[3] *= 1e30
    ties = torch.arange(shape[-1]) % 64 + 0.5
    rows[4] = ties * torch.where(torch.arange(shape[-1]) % 2 == 0, 1.0, -1.0)
    rows[4, ::64] = 127.0  # so that the scale is 1
    rows[5, : shape[-1] // 2] = 0
    return values.to(dtype).to(DEVICE)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda e: e.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("group", "layer"), [(0, 0), (1, 0), (1, 3)])
def test_rows_are_the_references_bytes(encoding: Encoding, dtype: torch.dtype, group: int, layer: int) -> None:
    sessions = [_pages(encoding, seed) for seed in range(3)]
    before = [pages.snapshot() for pages in sessions]
    positions = torch.tensor(POSITIONS, device=DEVICE)
    latent, rope = _hard_values(3, 4, 512, dtype=dtype), _hard_values(3, 4, 64, dtype=dtype)
    records = torch.stack([describe(pages.page_map, group) for pages in sessions]).to(DEVICE)
    append_rows(records, format_of(encoding), group, layer, positions, latent, rope)
    for index, pages in enumerate(sessions):
        actual = pages.snapshot()
        pages.restore(before[index])
        real = positions[index] >= 0
        reference.append_rows(
            pages.memory, pages.page_map, group, layer, positions[index][real], latent[index][real], rope[index][real]
        )
        assert_same_bytes(actual, pages.snapshot())


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda e: e.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_are_the_references_bytes(encoding: Encoding, dtype: torch.dtype) -> None:
    sessions = [_pages(encoding, seed) for seed in range(3)]
    before = [pages.snapshot() for pages in sessions]
    positions = torch.tensor(POSITIONS, device=DEVICE)
    keys = _hard_values(3, 4, 128, dtype=dtype)
    records = torch.stack([describe(pages.page_map, 1) for pages in sessions]).to(DEVICE)
    append_keys(records, format_of(encoding), 1, positions, keys)
    for index, pages in enumerate(sessions):
        actual = pages.snapshot()
        pages.restore(before[index])
        real = positions[index] >= 0
        reference.append_keys(pages.memory, pages.page_map, 1, positions[index][real], keys[index][real])
        assert_same_bytes(actual, pages.snapshot())


def test_every_e4m3_value_and_every_midpoint_rounds_as_in_torch() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    values = codes[codes.isfinite()].unique()
    midpoints = (values[1:] + values[:-1]) / 2
    hard = torch.cat([values, midpoints, midpoints.nextafter(values[1:]), midpoints.nextafter(values[:-1])])
    keys = torch.zeros(16, 128)
    keys[:, 0] = 448.0  # the scale is 1
    keys.view(-1)[torch.arange(hard.numel()) // 127 * 128 + torch.arange(hard.numel()) % 127 + 1] = hard
    pages = Pages.random(format_of(), 1, length=16)
    record = describe(pages.page_map, 0)[None].to(DEVICE)
    append_keys(record, format_of(), 0, torch.arange(16, device=DEVICE)[None], keys[None].to(DEVICE))
    block = pages.memory.read(pages.page_map.key_block_address[0, :1], Q8G64.keys.block_bytes)
    stored, scales = reference.decode_key_block(block, Q8G64.keys)
    assert torch.equal(stored[0, :16].cpu(), keys.to(torch.float8_e4m3fn).float())
    assert bool((scales[0, :16] == 1).all())


def test_a_peers_ring_and_key_block_get_the_same_bytes() -> None:
    page_format = format_of()
    ours, peers = _pages(Q8G64, 0), _pages(Q8G64, 1)
    record = describe(
        ours.page_map,
        1,
        peer_ring_base=peers.page_map.ring_base,
        peer_key_block_address=peers.page_map.key_block_address,
    )[None].to(DEVICE)
    positions = torch.tensor([[RING_FIRST - 1, RING_FIRST, LENGTH - 1]], device=DEVICE)
    latent, rope, keys = _hard_values(1, 6, 512)[:, :3], _hard_values(1, 6, 64)[:, :3], _hard_values(1, 6, 128)[:, :3]
    expected = _pages(Q8G64, 1)
    append_rows(record, page_format, 1, 2, positions, latent.contiguous(), rope.contiguous())
    append_keys(record, page_format, 1, positions, keys.contiguous())
    in_ring = positions[0, 1:]
    reference.append_rows(expected.memory, expected.page_map, 1, 2, in_ring, latent[0, 1:], rope[0, 1:])
    reference.append_keys(expected.memory, expected.page_map, 1, in_ring, keys[0, 1:])
    assert_same_bytes([peers.home, peers.ring], [_pages(Q8G64, 1).home, expected.ring])
    own_blocks = ours.page_map.key_block_address[1, positions[0] // 64]
    peer_blocks = peers.page_map.key_block_address[1, positions[0] // 64]
    token = positions[0] % 64
    for offset, nbytes in ((token * 128, 128), (Q8G64.keys.scales_offset + token * 4, 4)):
        assert torch.equal(
            ours.memory.read(own_blocks + offset, nbytes), peers.memory.read(peer_blocks + offset, nbytes)
        )


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_peer_on_another_gpu_gets_the_same_bytes() -> None:
    ours = _pages(Q8G64, 0)
    before = ours.ring.clone()
    ring, key_blocks = ours.ring.to("cuda:1"), ours.key_blocks.to("cuda:1")  # also lets each reach the other's memory
    peer_blocks = ours.page_map.key_block_address - ours.key_blocks.data_ptr() + key_blocks.data_ptr()
    record = describe(ours.page_map, 1, peer_ring_base=ring.data_ptr(), peer_key_block_address=peer_blocks)
    positions = torch.arange(RING_FIRST, LENGTH, device=DEVICE)[None]
    latent, rope, keys = (torch.randn((*positions.shape, width), device=DEVICE) for width in (512, 64, 128))
    append_keys(record[None].to(DEVICE), format_of(), 1, positions, keys)
    for layer in range(4):
        append_rows(record[None].to(DEVICE), format_of(), 1, layer, positions, latent, rope)
    torch.cuda.synchronize()
    assert not torch.equal(ours.ring, before)
    assert torch.equal(ring.to(DEVICE), ours.ring)
    assert torch.equal(key_blocks.to(DEVICE), ours.key_blocks)


def test_the_anchor_layer_forgets_what_it_writes() -> None:
    pages = _pages(Q8G64, 0)
    caches = [pages.cache(1, 64) for _ in range(2)]
    for cache in caches:
        held = torch.arange(64, device=DEVICE) * 13  # positions in slots
        cache.table[held] = torch.arange(64, device=DEVICE, dtype=torch.int32)
        cache.slot_position.copy_(held)
    record = describe(pages.page_map, 1, caches[0])[None].to(DEVICE)
    positions = torch.tensor([[13 * 5, 13 * 5 + 1, 13 * 63, -1]], device=DEVICE)
    latent, rope = torch.zeros(1, 4, 512, device=DEVICE), torch.zeros(1, 4, 64, device=DEVICE)
    append_rows(record, format_of(), 1, 1, positions, latent, rope)
    assert torch.equal(caches[0].table, caches[1].table), "only the anchor layer forgets"
    append_rows(record, format_of(), 1, 0, positions, latent, rope)
    reference.forget(caches[1], positions[0, :3])
    assert torch.equal(caches[0].table, caches[1].table)
    assert torch.equal(caches[0].slot_position, caches[1].slot_position)


@pytest.mark.parametrize("position", [-1, -(2**63), 16 * 64, 2**31, 2**63 - 1])
def test_a_position_outside_the_map_is_not_written(position: int) -> None:
    pages = _pages(Q8G64, 0)
    before = pages.snapshot()
    record = describe(pages.page_map, 0)[None].to(DEVICE)
    positions = torch.tensor([[position]], device=DEVICE)
    append_rows(
        record, format_of(), 0, 0, positions, torch.ones(1, 1, 512, device=DEVICE), torch.ones(1, 1, 64, device=DEVICE)
    )
    append_keys(record, format_of(), 0, positions, torch.ones(1, 1, 128, device=DEVICE))
    assert_same_bytes(pages.snapshot(), before)


def test_an_idle_place_of_the_batch_does_nothing() -> None:
    records = torch.zeros(2, FIELDS, dtype=torch.int64, device=DEVICE)
    positions = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
    latent, rope = torch.ones(2, 1, 512, device=DEVICE), torch.ones(2, 1, 64, device=DEVICE)
    append_rows(records, format_of(), 0, 0, positions, latent, rope)
    append_keys(records, format_of(), 0, positions, torch.ones(2, 1, 128, device=DEVICE))


def test_a_rows_bytes_do_not_depend_on_its_place() -> None:
    latent, rope = _hard_values(1, 8, 512), _hard_values(1, 8, 64)
    together, alone = (Pages.random(format_of(F32), 1, length=8) for _ in range(2))
    append_rows(
        describe(together.page_map, 1)[None].to(DEVICE),
        format_of(F32),
        1,
        0,
        torch.arange(8, device=DEVICE)[None],
        latent,
        rope,
    )
    for row in range(8):
        append_rows(
            describe(alone.page_map, 1)[None].to(DEVICE),
            format_of(F32),
            1,
            0,
            torch.tensor([[row]], device=DEVICE),
            latent[:, row : row + 1].contiguous(),
            rope[:, row : row + 1].contiguous(),
        )
    assert_same_bytes(together.snapshot(), alone.snapshot())


@pytest.mark.parametrize(
    ("latent", "rope"),
    [
        (torch.zeros(1, 2, 511), torch.zeros(1, 2, 64)),
        (torch.zeros(1, 2, 512), torch.zeros(1, 1, 64)),
        (torch.zeros(1, 2, 512, dtype=torch.float16), torch.zeros(1, 2, 64)),
        (torch.zeros(1, 2, 1024)[..., ::2], torch.zeros(1, 2, 64)),
    ],
)
def test_a_tensor_of_another_kind_is_refused(latent: Tensor, rope: Tensor) -> None:
    with pytest.raises(InvalidValue, match="latent and rope"):
        append_rows(torch.zeros(1, FIELDS), format_of(), 0, 0, torch.zeros(1, 2, dtype=torch.int64), latent, rope)
