"""Memory by address: every byte comes from the range that holds it, and nothing outside a range is touched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compute.kernels import reference
from compute.kernels.state import CURSOR, NO_RING, GroupCache, PageMap
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS, Q8G64, IndexGroup, PageFormat

INT64 = torch.iinfo(torch.int64)


def noise(nbytes: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_reads_from_several_ranges_and_zeros_from_address_zero() -> None:
    first, second = noise(4096, 1), noise(2048, 2)
    memory = reference.Memory(first, second)
    offsets = ((first, 0), (second, 1392), (first, 4096 - 656), (second, 16))
    addresses = [tensor.data_ptr() + offset for tensor, offset in offsets]
    got = memory.read(torch.tensor([*addresses, 0]).view(5, 1), 656)
    assert got.shape == (5, 1, 656)
    for row, (tensor, offset) in zip(got[:, 0], offsets, strict=False):
        assert torch.equal(row, tensor[offset : offset + 656])
    assert not got[4].any()


@pytest.mark.parametrize("ranges", [1, 2])
def test_writes_what_was_given_and_nothing_else(ranges: int) -> None:
    tensors = [noise(4096, seed) for seed in range(ranges)]
    expected = [tensor.clone() for tensor in tensors]
    data = noise(3 * 48, 9).view(3, 48)
    places = [(0, 4096 - 48), (ranges - 1, 0), (0, 64)]
    for row, (index, offset) in zip(data, places, strict=True):
        expected[index][offset : offset + 48] = row
    reference.Memory(*tensors).write(torch.tensor([tensors[i].data_ptr() + offset for i, offset in places]), data)
    for tensor, right in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, right)


def test_an_address_outside_every_range_is_refused_and_nothing_is_written() -> None:
    tensor = noise(4096, 1)
    before = tensor.clone()
    memory = reference.Memory(tensor)
    base = tensor.data_ptr()
    for bad in (
        base - 16,
        base + 4096 - 12,
        base + 4096,
        base + 2,
        -1,
        -base,
        16,
        INT64.min,
        INT64.max,
        INT64.max - 15,
    ):
        with pytest.raises(InvalidValue, match=str(bad)):
            memory.read(torch.tensor([base, bad]), 16)
        with pytest.raises(InvalidValue, match=str(bad)):
            memory.write(torch.tensor([base, bad]), torch.zeros(2, 16, dtype=torch.uint8))
    with pytest.raises(InvalidValue, match="is 0;"):
        memory.write(torch.tensor([base, 0]), torch.zeros(2, 16, dtype=torch.uint8))
    assert torch.equal(tensor, before)


def test_no_addresses_and_no_ranges() -> None:
    memory = reference.Memory()
    assert memory.read(torch.empty(0, 3, dtype=torch.int64), 16).shape == (0, 3, 16)
    assert not memory.read(torch.zeros(2, dtype=torch.int64), 16).any()
    with pytest.raises(InvalidValue, match="4096"):
        memory.read(torch.tensor([4096]), 16)


def test_ranges_may_be_named_otherwise_removed_and_never_overlap() -> None:
    tensor = noise(4096, 1)
    memory = reference.Memory()
    assert memory.add(tensor, 1 << 40) == 1 << 40
    assert torch.equal(memory.read(torch.tensor([(1 << 40) + 32]), 16)[0], tensor[32:48])
    for base in (1 << 40, (1 << 40) + 4080, (1 << 40) - 4080):
        with pytest.raises(InvalidValue, match="range of addresses"):
            memory.add(noise(4096, 2), base)
    memory.add(noise(4096, 2), (1 << 40) + 4096)
    memory.remove(1 << 40)
    with pytest.raises(InvalidValue):
        memory.read(torch.tensor([1 << 40]), 16)
    with pytest.raises(InvalidValue, match="first address"):
        memory.remove(1 << 40)


def test_tensors_and_arguments_that_do_not_fit_are_refused() -> None:
    memory = reference.Memory()
    for tensor in (torch.zeros(64), torch.zeros(64, dtype=torch.uint8)[::2], torch.zeros(4, 16, dtype=torch.uint8)):
        with pytest.raises(InvalidValue, match="tensor behind"):
            memory.add(tensor)
    for base, nbytes in ((8, 64), (0, 64), (-16, 64), (16, 0), (16, 63)):
        with pytest.raises(InvalidValue, match="range of addresses"):
            memory.add(torch.zeros(nbytes, dtype=torch.uint8), base)
    tensor = noise(64, 1)
    memory.add(tensor)
    for nbytes in (0, -4, 6):
        with pytest.raises(InvalidValue, match="bytes to read"):
            memory.read(torch.tensor([tensor.data_ptr()]), nbytes)
    with pytest.raises(InvalidValue, match="dtype"):
        memory.read(torch.tensor([16], dtype=torch.int32), 16)


@pytest.fixture
def untouched(tmp_path: Path) -> Tensor:
    """5 GiB of addresses over a sparse file: only what a test writes ever takes memory."""
    return torch.from_file(str(tmp_path / "sparse"), shared=True, size=5 << 30, dtype=torch.uint8)


def test_case_19_a_row_beyond_two_to_the_31(untouched: Tensor) -> None:
    position = 3_273_604
    form = PageFormat(Q8G64, (IndexGroup(0, 1),))
    pages = position // PAGE_TOKENS + 1
    base = untouched.data_ptr()
    page_map = PageMap(
        page_address=base + torch.arange(pages) * form.stride,
        key_block_address=torch.zeros(1, pages, dtype=torch.int64),
        window=torch.tensor([NO_RING, position + 1]),
        ring_base=0,
        ring_pages=1,
        format=form,
    )
    memory = reference.Memory(untouched)
    latent, rope = torch.linspace(-3, 3, 512)[None], torch.linspace(0, 1, 64)[None]
    reference.append_rows(memory, page_map, 0, 0, torch.tensor([position]), latent, rope)
    row = reference.encode_rows(latent, rope, Q8G64.rows)
    selection = torch.tensor([[position - 1, position]], dtype=torch.int32)
    addresses = reference.row_addresses(page_map, 0, selection)
    assert int(addresses[0, 1]) - base > 2**31
    assert torch.equal(memory.read(addresses, 656)[0], torch.cat((torch.zeros_like(row), row)))

    slots = position + 1  # and the row at 3,273,604 x 656 B of a hot cache
    rows = untouched[pages * form.stride :][: slots * 656].view(slots, 1, 656)
    cache = GroupCache.empty(rows, position + 1)
    cache.control[CURSOR] = position
    decided = reference.resolve(cache, page_map, 0, selection[:, 1:])
    assert decided.miss_slot.tolist() == [position]
    assert int(decided.addresses) == rows.data_ptr() + position * 656
    reference.fetch(memory, cache, page_map, 0, decided)
    assert torch.equal(memory.read(decided.addresses, 656)[0], row)
