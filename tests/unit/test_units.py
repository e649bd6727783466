from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.units import MAX_BYTES, format_bytes, parse_bytes, parse_count
from protocol.errors import InvalidValue


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
        ("12 B", 12),
        ("1KiB", 1024),
        ("64 MiB", 67_108_864),
        ("128GiB", 137_438_953_472),
        ("1.5tib", 1_649_267_441_664),
        ("10 GB", 10_000_000_000),
        ("1kB", 1000),
        (" 0.5 KiB ", 512),
        ("0.3 KiB", 307),
        ("9223372036854775807", MAX_BYTES),
    ],
)
def test_sizes(text, size) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "-1", "-1GiB", "+1", "1e9", "nan", "inf", "0x10", "1,5GiB", "1.GiB", ".5GiB", "1 G", "1 GiB GiB",
     "1PiB", "٣", "1\x00", "9" * 5000, "9223372036854775808", "8388608TiB", -1, MAX_BYTES + 1, True],
)  # fmt: skip
def test_what_is_no_size_is_refused_by_name(text) -> None:
    with pytest.raises(InvalidValue, match="capacity is") as error:
        parse_bytes(text, "capacity")
    assert error.value.facts["what"] == "capacity"


def test_limits_of_a_size() -> None:
    assert parse_bytes("2MiB", low=2 << 20, high=2 << 20) == 2 << 20
    with pytest.raises(InvalidValue, match="allowed: 10 to 20 bytes"):
        parse_bytes("21", low=10, high=20)
    with pytest.raises(InvalidValue, match="allowed: 10 to 20 bytes"):
        parse_bytes(9, low=10, high=20)


@given(st.integers(0, MAX_BYTES))
def test_plain_numbers_come_back_exactly(size) -> None:
    assert parse_bytes(str(size)) == parse_bytes(f"{size}B") == size


@pytest.mark.parametrize(
    ("size", "decimals", "text"),
    [
        (0, 2, "0 B"),
        (1023, 2, "1023 B"),
        (1024, 2, "1 KiB"),
        (2 << 20, 2, "2 MiB"),
        (21_495_808, 2, "20.5 MiB"),
        (1_343_488, 5, "1.28125 MiB"),
        (57_847_840_768, 1, "53.9 GiB"),
        (1_649_267_441_664, 2, "1,536 GiB"),
        (1_609_607_675_904, 0, "1,499 GiB"),
        (-1536, 2, "-1.5 KiB"),
        (100 << 30, 0, "100 GiB"),
    ],
)
def test_sizes_in_words(size, decimals, text) -> None:
    assert format_bytes(size, decimals) == text


@given(st.integers(0, 10**15))
def test_words_are_read_back_within_their_decimals(size) -> None:
    text = format_bytes(size).replace(",", "")
    unit = {"B": 0, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[text.split()[1]]
    assert abs(parse_bytes(text) - size) <= unit * 0.005 + 1


@pytest.mark.parametrize(("text", "count"), [("0", 0), ("1048576", 2**20), ("1_048_576", 2**20), ("1,048,576", 2**20)])
def test_counts(text, count) -> None:
    assert parse_count(text, "tokens") == count


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", "1e3", "1__0", "_1", "1,", "one", "٣", "0x1", "9" * 5000])
def test_what_is_no_count_is_refused_by_name(text) -> None:
    with pytest.raises(InvalidValue, match="tokens is"):
        parse_count(text, "tokens")


@pytest.mark.parametrize("text", ["0", "11"])
def test_limits_of_a_count(text) -> None:
    with pytest.raises(InvalidValue, match=f"sessions is '{text}'; allowed: 1 to 10"):
        parse_count(text, "sessions", low=1, high=10)
