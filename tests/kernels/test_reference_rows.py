"""Rows: the bytes of an encoding against arithmetic by hand, and where they are written."""

from __future__ import annotations

import struct
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from compute.kernels import reference
from protocol.errors import InvalidValue
from protocol.layout import F32, FP8_DS_MLA, LATENT_DIM, Q8G64, ROPE_DIM, Encoding
from protocol.model import GLM_5_3
from tests.kernels.pages import DEVICE, Pages, assert_same_bytes, format_of

INT32 = torch.iinfo(torch.int32)


def bfloat16(value: float) -> float:
    """Rounded to the nearest bfloat16, ties to even, on the bits of a float32."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    bits += 0x7FFF + (bits >> 16 & 1)
    rounded: float = struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0]
    return rounded


def float32(value: Fraction | float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", float(value)))[0]
    return rounded


def q8g64_by_hand(latent: list[float], rope: list[float]) -> bytes:
    """One row in exact arithmetic, rounded where the definition rounds."""
    quantised, scales = b"", b""
    for start in range(0, LATENT_DIM, 64):
        group = latent[start : start + 64]
        scale = bfloat16(float32(Fraction(max(abs(value) for value in group)) / 127))
        for value in group:
            level = round(float32(Fraction(value) / Fraction(scale))) if scale else 0  # Python rounds half to even
            quantised += struct.pack("<b", max(-127, min(127, level)))
        scales += struct.pack("<f", scale)[2:]
    return quantised + scales + b"".join(struct.pack("<f", bfloat16(value))[2:] for value in rope)


E4M3 = sorted(
    (
        (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6,
        exponent << 3 | mantissa,
    )
    for exponent in range(16)
    for mantissa in range(8)
    if (exponent, mantissa) != (15, 7)  # NaN
)
"""Every finite value from 0 up, with its bits: 4 of exponent, biased by 7, and 3 of mantissa; no infinities."""


def e4m3(value: float) -> int:
    """Bits of the nearest value, ties to the even one."""
    _, bits = min(E4M3, key=lambda known: (abs(known[0] - abs(value)), known[1] & 1))  # such differences are exact
    return bits | (0x80 if str(value).startswith("-") else 0)


def fp8_ds_mla_by_hand(latent: list[float], rope: list[float]) -> bytes:
    """One row as FlashMLA documents it: 512 e4m3, 4 float32 scales, 64 bfloat16."""
    quantised, scales = b"", b""
    for start in range(0, LATENT_DIM, 128):
        group = latent[start : start + 128]
        scale = float32(Fraction(max(abs(value) for value in group)) / 448)
        quantised += bytes(e4m3(float32(Fraction(value) / Fraction(scale)) if scale else 0.0) for value in group)
        scales += struct.pack("<f", scale)
    return quantised + scales + b"".join(struct.pack("<f", bfloat16(value))[2:] for value in rope)


def random_rows(count: int, seed: int = 0, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(count, LATENT_DIM, generator=generator) * spread
    return latent.to(DEVICE), torch.randn(count, ROPE_DIM, generator=generator).to(DEVICE)


@pytest.mark.parametrize("spread", [1.0, 1e-3, 3e37, 1e-38, 1e-41])
def test_q8g64_is_the_bytes_worked_out_by_hand(spread: float) -> None:
    latent, rope = random_rows(3, 1, spread)
    latent[0, :64] = 0.0
    latent[1, 64:128] = torch.arange(-32, 32, device=DEVICE) / 32 * spread  # halves of a step: ties
    rows = reference.encode_rows(latent, rope, Q8G64.rows)
    for row, values, angles in zip(rows, latent.tolist(), rope.tolist(), strict=True):
        assert bytes(row.tolist()) == q8g64_by_hand(values, angles)


@pytest.mark.parametrize("spread", [1.0, 1e-3, 3e37, 1e-38])
def test_fp8_ds_mla_is_flash_mla_s_row_byte_for_byte(spread: float) -> None:
    latent, rope = random_rows(2, 1, spread)
    latent[0, :128] = 0.0
    latent[1, 128:256] = torch.arange(-64, 64, device=DEVICE) / 64 * spread  # between two values: ties
    rows = reference.encode_rows(latent, rope, FP8_DS_MLA.rows)
    for row, values, angles in zip(rows, latent.tolist(), rope.tolist(), strict=True):
        got, expected = bytes(row.tolist()), fp8_ds_mla_by_hand(values, angles)
        assert got[512:] == expected[512:]
        # The sign of a zero is nobody's business.
        assert all(a == b or (a | b) == 0x80 for a, b in zip(got[:512], expected[:512], strict=True))


def test_fp8_ds_mla_reads_as_its_documents_say() -> None:
    """From bytes put together here: value × scale of its 128."""
    row = bytes([0x38] * 128 + [0xB8] * 128 + [0x7E] * 128 + [0x01] * 128)  # 1, -1, 448, 2**-9
    row += struct.pack("<4f", 2.0, 0.5, 1.0, 1024.0) + struct.pack("<64H", *[0x3F80] * 64)
    rows = torch.frombuffer(bytearray(row), dtype=torch.uint8)[None].to(DEVICE)
    latent, rope = reference.decode_rows(rows, FP8_DS_MLA.rows)
    assert latent.view(4, 128).unique(dim=1).flatten().tolist() == [2.0, -0.5, 448.0, 2.0]
    assert bool((rope == 1).all())


def test_q8g64_round_trip_is_within_half_a_step_of_each_group() -> None:
    latent, rope = random_rows(200, 2)
    latent *= torch.logspace(-6, 6, 200, device=DEVICE)[:, None]
    got_latent, got_rope = reference.decode_rows(reference.encode_rows(latent, rope, Q8G64.rows), Q8G64.rows)
    largest = latent.view(200, 8, 64).abs().amax(2, keepdim=True)
    error = (got_latent - latent).view(200, 8, 64).abs()
    # Half a step of amax / 127; and the scale in bfloat16 may be 2**-9 too small, which the largest value cannot reach.
    assert bool((error <= largest * (0.5 / 127 + 2**-8)).all())
    assert bool(((got_rope - rope).abs() <= rope.abs() * 2**-8).all())


def test_f32_round_trip_is_exact() -> None:
    latent, rope = random_rows(7, 3)
    got_latent, got_rope = reference.decode_rows(reference.encode_rows(latent, rope, F32.rows), F32.rows)
    assert torch.equal(got_latent, latent)
    assert torch.equal(got_rope, rope)


@pytest.mark.parametrize("encoding", [Q8G64, FP8_DS_MLA, F32], ids=lambda encoding: encoding.name)
def test_zero_rows_are_zero_bytes(encoding: Encoding) -> None:
    rows = reference.encode_rows(torch.zeros(2, 512, device=DEVICE), torch.zeros(2, 64, device=DEVICE), encoding.rows)
    assert rows.shape == (2, encoding.rows.row_bytes)
    assert not rows.any()


@pytest.mark.parametrize("encoding", [Q8G64, FP8_DS_MLA, F32], ids=lambda encoding: encoding.name)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", [0, 1])
def test_nan_and_infinity_are_refused(encoding: Encoding, bad: float, part: int) -> None:
    both = random_rows(4, 4)
    both[part][2, -1] = bad
    with pytest.raises(InvalidValue, match="NaN or infinite"):
        reference.encode_rows(*both, encoding.rows)


def test_a_rope_value_that_rounds_to_infinity_is_refused() -> None:
    latent, rope = random_rows(1, 5)
    rope[0, 0] = 3.4e38
    with pytest.raises(InvalidValue, match="q8g64"):
        reference.encode_rows(latent, rope, Q8G64.rows)
    assert reference.encode_rows(latent, rope, F32.rows).shape == (1, 2304)


def test_misshapen_rows_are_refused() -> None:
    with pytest.raises(InvalidValue, match="latent and rope"):
        reference.encode_rows(torch.zeros(2, 511), torch.zeros(2, 64), Q8G64.rows)
    with pytest.raises(InvalidValue, match="latent and rope"):
        reference.encode_rows(torch.zeros(2, 512), torch.zeros(1, 64), Q8G64.rows)


@pytest.mark.parametrize("encoding", [Q8G64, FP8_DS_MLA, F32], ids=lambda encoding: encoding.name)
def test_rows_are_written_to_their_home_or_into_the_ring_and_nowhere_else(encoding: Encoding) -> None:
    form = format_of(encoding)
    pages = Pages.random(form, 8, length=400, ring_first=256, ring_pages=4)
    positions = torch.tensor([399, 0, 255, 256, 70, 320], device=DEVICE)
    latent, rope = random_rows(6, 6)
    expected = pages.snapshot()
    for position, row in zip(positions.tolist(), reference.encode_rows(latent, rope, encoding.rows), strict=True):
        page, token = divmod(position, 64)
        if position >= 256:
            tensor, first = expected[1], page % 4 * form.stride
        else:
            tensor, first = expected[0], int(pages.page_map.page_address[page]) - pages.home.data_ptr()
        at = first + form.row_offset(1, token, 2)
        tensor[at : at + len(row)] = row
    reference.append_rows(pages.memory, pages.page_map, 1, 2, positions, latent, rope)
    assert_same_bytes(pages.snapshot(), expected)


def test_positions_outside_the_map_are_refused_and_nothing_is_written() -> None:
    pages = Pages.random(format_of(), 4, length=256)
    before = pages.snapshot()
    for bad in (-1, 256, INT32.max, -(2**62), 2**62):
        positions = torch.tensor([3, bad], device=DEVICE)
        with pytest.raises(InvalidValue, match=str(bad)):
            reference.append_rows(pages.memory, pages.page_map, 0, 0, positions, *random_rows(2))
    assert_same_bytes(pages.snapshot(), before)


def test_addresses_of_entries_that_are_no_position_of_the_history_are_zero() -> None:
    pages = Pages.random(format_of(), 4, length=100)
    selection = [INT32.min, -2, -1, 99, 100, 255, 256, INT32.max]
    got = reference.row_addresses(pages.page_map, 1, torch.tensor([selection], dtype=torch.int32, device=DEVICE))
    last = int(pages.page_map.page_address[1]) + pages.page_map.format.row_offset(1, 35)
    assert got.tolist() == [[0, 0, 0, last, 0, 0, 0, 0]]


def test_case_08_each_of_78_layers_reads_its_own_rows() -> None:
    form = GLM_5_3.page_format(Q8G64)
    pages = Pages.random(form, 2, length=128)
    positions = torch.tensor([5, 64, 127], device=DEVICE)
    for layer in range(78):
        group = form.group_of_layer(layer)
        latent = torch.full((3, 512), float(layer + 1), device=DEVICE)
        rope = torch.full((3, 64), float(layer), device=DEVICE)
        in_group = layer - form.groups[group].first_layer
        reference.append_rows(pages.memory, pages.page_map, group, in_group, positions, latent, rope)
    for layer in range(78):
        group = form.group_of_layer(layer)
        in_group = layer - form.groups[group].first_layer
        cache = pages.cache(group, 8)
        memory = reference.Memory(pages.home, cache.rows.view(-1))
        selection = positions.int()[None]
        decided = reference.resolve(cache, pages.page_map, group, selection)
        reference.fetch(memory, cache, pages.page_map, group, decided)
        for addresses in (reference.row_addresses(pages.page_map, group, selection), decided.addresses):
            first = addresses + in_group * form.encoding.rows.row_bytes
            latent, rope = reference.decode_rows(memory.read(first, 656), form.encoding.rows)
            torch.testing.assert_close(latent, torch.full_like(latent, layer + 1), rtol=2**-8, atol=0)
            assert bool((rope == layer).all())
