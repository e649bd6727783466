"""Sparse attention against exact arithmetic over the decoded rows, and what may not be read."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from compute.kernels import reference
from compute.kernels.attention import KEYS, SparseAttention
from protocol.errors import InvalidValue
from protocol.layout import F32, FP8_DS_MLA, Q8G64, Encoding
from tests.kernels.pages import DEVICE
from tests.kernels.products import needs_hopper
from tests.kernels.test_half_rows import halves_of

LAYERS = 3
STRIDE = LAYERS * Q8G64.rows.row_bytes
SCALE = 256**-0.5
ON_HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)
RELATIVE_ERROR = 2e-3
"""Bound on the norm of the error against float64, relative to that of the output: products of float16 values."""


class Rows:
    """Group rows of three layers; whatever is not a row is NaN in every dtype."""

    def __init__(self, count: int, encoding: Encoding = Q8G64) -> None:
        self.layout = encoding.rows
        generator = torch.Generator().manual_seed(0)
        latent = torch.randn((count * LAYERS, 512), generator=generator)
        latent[::7] *= 30
        latent[3] = 0
        latent[5, :448] = 0
        rope = torch.randn((count * LAYERS, 64), generator=generator)
        self.memory = torch.full((2 * count + 1, STRIDE), 0xFF, dtype=torch.uint8)
        self.memory[1::2] = reference.encode_rows(latent, rope, self.layout).view(count, STRIDE)
        self.memory = self.memory.to(DEVICE)
        self.count = count

    def addresses(self, numbers: Tensor) -> Tensor:
        """Address of each numbered group row; 0 for -1."""
        return torch.where(numbers < 0, 0, self.memory.data_ptr() + (2 * numbers + 1) * STRIDE).to(DEVICE)

    def exact(self, numbers: Tensor, layer: int, latent_query: Tensor, rope_query: Tensor) -> Tensor:
        """float64 output [heads, 512] of one query row over the rows ``numbers`` [k]."""
        rows = self.memory[1::2][numbers[numbers >= 0].to(DEVICE)].unflatten(1, (LAYERS, -1))[:, layer].contiguous()
        latent, rope = (part.double() for part in reference.decode_rows(rows, self.layout))
        scores = (latent_query.double() @ latent.T + rope_query.double() @ rope.T) * SCALE
        return torch.softmax(scores, 1) @ latent


def _numbers(shape: tuple[int, int], count: int, seed: int = 3) -> Tensor:
    return torch.randint(0, count, shape, generator=torch.Generator().manual_seed(seed))


def _queries(rows: int, heads: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    latent, rope = (torch.randn((rows, heads, width), generator=generator) for width in (512, 64))
    return (latent * 0.3).to(dtype).to(DEVICE), rope.to(dtype).to(DEVICE)


@dataclass(frozen=True)
class Attend:
    """One kernel over rows of one encoding."""

    encoding: Encoding
    portable: bool

    def __call__(
        self, addresses: Tensor, layer: int, latent_query: Tensor, rope_query: Tensor, *, scratch_rows: int = 0
    ) -> Tensor:
        rows, heads, _ = latent_query.shape
        shape = (scratch_rows or rows, heads, addresses.shape[1])
        attention = SparseAttention(*shape, DEVICE, encoding=self.encoding, portable=self.portable)
        out = torch.full((rows, heads, 512), float("nan"), device=DEVICE)
        attention.attend(addresses, layer, latent_query, rope_query, SCALE, out)
        return out


KERNELS = {"portable": Attend(Q8G64, portable=True), "fp8_ds_mla": Attend(FP8_DS_MLA, portable=True)}
if ON_HOPPER:
    KERNELS["hopper"] = Attend(Q8G64, portable=False)


@pytest.fixture(params=KERNELS)
def attend(request: pytest.FixtureRequest) -> Attend:
    """Each kernel that this machine can run."""
    return KERNELS[request.param]


@pytest.mark.parametrize(("heads", "k"), [(16, 1), (64, KEYS - 1), (64, KEYS), (80, KEYS + 1), (128, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_error_stays_within_its_bound(attend: Attend, heads: int, k: int, dtype: torch.dtype) -> None:
    rows = Rows(50, attend.encoding)
    numbers = _numbers((2, k), rows.count)
    numbers[1, ::3] = -1
    query = _queries(2, heads, dtype)
    actual = attend(rows.addresses(numbers), 1, *query)
    for row in range(2):
        if k == 1 and row == 1:
            assert bool((actual[row] == 0).all())
            continue
        exact = rows.exact(numbers[row], 1, query[0][row], query[1][row])
        error = float((actual[row].double() - exact).norm() / exact.norm())
        assert error < RELATIVE_ERROR, f"row {row}: {error:.1e}"


def test_every_layer_of_the_group_reads_its_own_rows(attend: Attend) -> None:
    rows = Rows(40, attend.encoding)
    numbers = _numbers((1, 90), rows.count)
    query = _queries(1, 64)
    for layer in range(LAYERS):
        exact = rows.exact(numbers[0], layer, query[0][0], query[1][0])
        actual = attend(rows.addresses(numbers), layer, *query)[0]
        assert (actual.double() - exact).norm() < RELATIVE_ERROR * exact.norm()


def test_rows_without_a_selection_are_zero(attend: Attend) -> None:
    """Nothing selected at all, in one split only, and one row in the last place."""
    rows = Rows(20, attend.encoding)
    numbers = torch.full((3, 2 * KEYS), -1)
    numbers[1, :KEYS] = _numbers((1, KEYS), rows.count)
    numbers[2, -1] = 7
    query = _queries(3, 64)
    actual = attend(rows.addresses(numbers), 0, *query)
    assert bool((actual[0] == 0).all())
    for row in (1, 2):
        exact = rows.exact(numbers[row], 0, query[0][row], query[1][row])
        assert (actual[row].double() - exact).norm() < RELATIVE_ERROR * exact.norm()


def test_one_key_that_outweighs_all_others(attend: Attend) -> None:
    rows = Rows(60, attend.encoding)
    numbers = torch.arange(60)[None]
    latent_query, rope_query = _queries(1, 64)
    chosen = rows.memory[1::2][30].view(LAYERS, -1)[1:2]
    latent, _ = reference.decode_rows(chosen, rows.layout)
    latent_query = (latent * 40).expand(64, 512)[None].bfloat16().contiguous()
    actual = attend(rows.addresses(numbers), 1, latent_query, rope_query)[0]
    exact = rows.exact(numbers[0], 1, latent_query[0], rope_query[0])
    assert (actual.double() - exact).norm() < RELATIVE_ERROR * exact.norm()


def test_a_row_alone_in_a_batch_and_at_any_place(attend: Attend) -> None:
    rows = Rows(70, attend.encoding)
    numbers = _numbers((4, 200), rows.count)
    numbers[2, 50:] = -1
    query = _queries(4, 16)
    together = attend(rows.addresses(numbers), 1, *query)
    order = [2, 0, 3, 1]
    mixed = attend(rows.addresses(numbers[order]), 1, *(part[order].contiguous() for part in query))
    assert torch.equal(mixed, together[order])
    for row in range(4):
        alone = attend(rows.addresses(numbers[row : row + 1]), 1, *(part[row : row + 1] for part in query))
        assert torch.equal(alone[0], together[row])


def test_more_rows_than_there_is_scratch_memory_for(attend: Attend) -> None:
    rows = Rows(70, attend.encoding)
    numbers = _numbers((5, 40), rows.count)
    query = _queries(5, 16)
    together = attend(rows.addresses(numbers), 1, *query)
    assert torch.equal(attend(rows.addresses(numbers), 1, *query, scratch_rows=2), together)


def test_resident_and_cached_rows_give_the_same_bits(attend: Attend) -> None:
    """The same bytes at other addresses."""
    rows, copies = Rows(70, attend.encoding), Rows(70, attend.encoding)
    numbers = _numbers((2, 150), rows.count)
    query = _queries(2, 16)
    assert torch.equal(attend(rows.addresses(numbers), 2, *query), attend(copies.addresses(numbers), 2, *query))


@needs_hopper
@pytest.mark.parametrize(("heads", "k", "dtype"), [(64, 2048, torch.bfloat16), (16, 300, torch.float32)])
def test_rows_as_halves_give_the_same_bits(heads: int, k: int, dtype: torch.dtype) -> None:
    """With room for some of the query rows; twice."""
    rows, query = Rows(500), _queries(70, heads, dtype)
    numbers = _numbers((70, k), rows.count)
    numbers[:, ::3] = -1
    numbers[1] = -1
    numbers[2, : k - 1] = -1
    halves = halves_of(rows.memory[1::2].unflatten(1, (LAYERS, -1))[:, 1])
    attention = SparseAttention(40, heads, k, DEVICE)
    expected, actual = (torch.full((70, heads, 512), torch.nan, device=DEVICE) for _ in range(2))
    attention.attend(rows.addresses(numbers), 1, *query, SCALE, expected)
    for _ in range(2):
        attention.attend_halves(numbers.int().to(DEVICE), halves, *query, SCALE, actual)
        assert torch.equal(actual, expected)
        actual.fill_(torch.nan)


def test_halves_of_another_type_are_refused() -> None:
    query, out = _queries(1, 16), torch.empty((1, 16, 512), device=DEVICE)
    selection = torch.zeros((1, 8), dtype=torch.int32, device=DEVICE)
    halves = torch.zeros((4, 576), dtype=torch.float16, device=DEVICE)
    attention = SparseAttention(1, 16, 8, DEVICE)
    for numbers, rows in ((selection.long(), halves), (selection, halves.float()), (selection, halves[:, ::2])):
        with pytest.raises(InvalidValue, match="selection and halves"):
            attention.attend_halves(numbers, rows, *query, SCALE, out)


def test_another_encoding_is_refused() -> None:
    with pytest.raises(InvalidValue, match="f32"):
        SparseAttention(2, 64, 128, DEVICE, encoding=F32)


def test_wrong_shapes_are_refused() -> None:
    attention = SparseAttention(2, 64, 128, DEVICE)
    addresses = torch.zeros(2, 128, dtype=torch.int64, device=DEVICE)
    latent, rope = _queries(2, 64)
    out = torch.empty(2, 64, 512, device=DEVICE)
    with pytest.raises(InvalidValue, match="addresses"):
        attention.attend(addresses[:, :64], 0, latent, rope, SCALE, out)
    with pytest.raises(InvalidValue, match="selection"):
        attention.attend_halves(addresses[:, :64].int(), latent, latent, rope, SCALE, out)
    with pytest.raises(InvalidValue, match="query or output"):
        attention.attend(addresses, 0, latent[:, :32].contiguous(), rope, SCALE, out)
    with pytest.raises(InvalidValue, match="query or output"):
        attention.attend(addresses[:1], 0, latent, rope, SCALE, out)


@pytest.mark.gpu
@pytest.mark.parametrize("query_rows", [1, 4, 16])
def test_rows_spread_over_five_gibibytes(attend: Attend, query_rows: int) -> None:
    """Rows lie more than 2**31 bytes apart, and all memory around them is NaN."""
    rows = Rows(3000, attend.encoding)
    memory = torch.full(((5 << 30) // 8,), -1, dtype=torch.int64, device=DEVICE).view(torch.uint8)
    step = memory.numel() // rows.count // 16 * 16
    spread = memory.as_strided((rows.count, STRIDE), (step, 1))
    spread.copy_(rows.memory[1::2])
    numbers = _numbers((query_rows, 2048), rows.count)
    query = _queries(query_rows, 64)
    actual = attend(memory.data_ptr() + numbers.to(DEVICE) * step, 1, *query)
    assert torch.equal(actual, attend(rows.addresses(numbers), 1, *query))
    for row in range(query_rows):
        exact = rows.exact(numbers[row], 1, query[0][row], query[1][row])
        error = float((actual[row].double() - exact).norm() / exact.norm())
        assert error < RELATIVE_ERROR, f"row {row}: {error:.1e}"
        alone = attend(rows.addresses(numbers[row : row + 1]), 1, *(part[row : row + 1] for part in query))
        assert torch.equal(alone[0], actual[row])
