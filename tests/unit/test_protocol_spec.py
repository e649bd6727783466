"""SPEC.md against the program: each message and field, each error code, and the offsets of every table."""

from __future__ import annotations

import itertools
import re
import struct
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
import xxhash

from protocol import errors, handles, lease_report, messages, session_state, stats
from protocol.codec import CONTROL_LIMIT, HANDLE_LIMIT
from protocol.layout import ENCODINGS, Q8G64
from protocol.model import GLM_5_3
from protocol.session_state import COUNTER_NAMES, SAMPLER_BYTES, SessionHeader, WorkerBlock, WorkerBlockLayout

SPEC = (Path(messages.__file__).parent / "SPEC.md").read_text()

STRUCTURES = {
    cls.__name__: cls
    for cls in (
        *(
            handles.LeaseRef,
            handles.SharedMemory,
            handles.DeviceMemory,
            handles.Extent,
            messages.DeviceInfo,
            messages.SavedSession,
            messages.SettingChange,
        ),
        *(
            stats.NodeStats,
            stats.TierStats,
            stats.PurposeStats,
            stats.LeaseStats,
            stats.SessionStats,
            stats.StallStats,
            stats.BlockStats,
        ),
    )
}
MESSAGES = {
    cls.__struct_config__.tag: cls
    for union in (messages.Request, messages.Reply, messages.HandleRequest, messages.HandleReply)
    for cls in get_args(union)
}


def table(title: str) -> list[list[str]]:
    """The cells of the table below heading ``title``, code quotes removed, without its head."""
    section = (
        SPEC.split(f"\n#### {title}\n", 1)[1] if f"\n#### {title}\n" in SPEC else SPEC.split(f"\n## {title}\n", 1)[1]
    )
    lines = itertools.dropwhile(lambda line: not line.startswith("|"), section.splitlines())
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows][2:]


def type_word(hint: Any) -> str:
    """How SPEC.md writes a field's type."""
    if hint == dict[str, errors.Fact]:
        return "map of str to int, float, str, bool, nil or list of str"
    if get_origin(hint) is list:
        return f"list of {type_word(get_args(hint)[0])}"
    if get_origin(hint) is Literal:
        return "str"
    assert get_origin(hint) not in (Union, UnionType), hint
    return hint.__name__


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_the_version_is_the_programs():
    assert f"# The kvd protocol, version {messages.PROTOCOL_MAJOR}.{messages.PROTOCOL_MINOR}\n" in SPEC
    assert f"at most 1 MiB ({CONTROL_LIMIT:,})" in SPEC
    assert f"at most {HANDLE_LIMIT:,} |" in SPEC
    assert f"`schema` ({stats.STATS_SCHEMA})" in SPEC


def test_every_message_and_structure_is_described_and_no_other():
    described = re.findall(r"^#### `(\w+)`$", SPEC, re.MULTILINE)
    assert sorted(described) == sorted([*MESSAGES, *STRUCTURES])


@pytest.mark.parametrize("name", [*MESSAGES, *STRUCTURES])
def test_fields_and_their_types(name):
    cls = MESSAGES.get(name) or STRUCTURES[name]
    hints = get_type_hints(cls)
    fields = [[field.name, type_word(hints[field.name])] for field in msgspec.structs.fields(cls)]
    assert [row[:2] for row in table(f"`{name}`")] == fields


def test_purposes_are_listed():
    (meaning,) = (row[2] for row in table("`allocate_device`") if row[0] == "purpose")
    assert re.findall(r"\w+", meaning.split(" (", 1)[0].replace(" or ", " ")) == list(get_args(handles.DevicePurpose))


def all_errors(cls: type[errors.KvdError]) -> list[type[errors.KvdError]]:
    """Those of the protocol: a server has errors of its own, which do not cross the wire."""
    found = [cls, *(found for sub in cls.__subclasses__() for found in all_errors(sub))]
    return [each for each in found if each.__module__ == errors.__name__]


def test_every_error_code_with_its_exit_status():
    listed = [(row[0], int(row[1])) for row in table("6. Errors")]
    assert listed == [(cls.code, cls.exit_status) for cls in all_errors(errors.KvdError)]


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidValue("pages", -1, "at least 1"),
        errors.MessageTooLarge(5000, 4096),
        errors.UnsupportedVersion("2.0", "1.0"),
        errors.Replayed(3, 3),
        errors.StaleGeneration("notes", 1, 2),
        errors.StateVersion(1, 2),
        errors.CopybackLag("notes", 65, 64),
        errors.OutOfCapacity("host", 10, 5, 20, ["notes"]),
        errors.TierInUse("host", 10, 15, ["notes"]),
    ],
    ids=lambda error: error.code,
)
def test_facts_of_an_error(error):
    (facts,) = (row[2] for row in table("6. Errors") if row[0] == error.code)
    assert re.findall(r"\w+", facts) == list(error.facts)
    again = errors.error_from(error.code, error.message, error.facts)
    assert (type(again), str(again), again.facts) == (type(error), str(error), error.facts)


def test_only_errors_with_facts_of_their_own_list_them():
    constructed = {cls.code for cls in all_errors(errors.KvdError)[1:] if "__init__" in vars(cls)}
    assert {row[0] for row in table("6. Errors") if row[2]} == constructed


def test_an_unknown_code_is_still_an_error():
    error = errors.error_from("from_the_future", "something", {"a": 1})
    assert (type(error), error.facts) == (errors.KvdError, {"a": 1})


HEADER = SessionHeader(
    epoch=0x0101010101010101,
    session=0x0202020202020202,
    generation=0x0303030303030303,
    uid=0x01020304,
    holder_pid=0x05060708,
    holder_start=0x1122334455667788,
    page_bytes=3_527_168,
    page_stride=3_530_752,
    extent_bytes=1 << 30,
    token_capacity=1000,
    page_count=16,
    commit_bytes=24_576,
    encoding="q8g64",
    fingerprint=bytes(range(1, 33)),
    name="é" * 64,
)


def test_daemon_block_offsets():
    frames = [session_state.pack_frame(3, index) for index in range(16)]
    block = session_state.pack_daemon_copy(HEADER, frames)
    expected = bytearray(4096 + 8 * 16)
    values: dict[str, Any] = {name: getattr(HEADER, name) for name in HEADER.__dataclass_fields__}
    values |= {"magic": b"KVDSESSN", "version": 2, "table_offset": 4096, "reserved": b"", "checksum": 0}
    values |= {"encoding": b"q8g64", "name": HEADER.name.encode()}
    end = 0
    for offset, nbytes, field, _ in table("daemon copy")[:-1]:
        assert int(offset) == end, field
        end += int(nbytes)
        value = values.pop(field)
        data = value.to_bytes(int(nbytes), "little") if isinstance(value, int) else value
        expected[int(offset) : int(offset) + len(data)] = data
    assert not values
    assert table("daemon copy")[-1][:3] == ["4096", "8 each", "page_table"]
    expected[4096:] = struct.pack("<16Q", *(3 << 32 | index for index in range(16)))
    expected[16:24] = xxhash.xxh3_64_intdigest(bytes(expected)).to_bytes(8, "little")
    assert block == bytes(expected)
    assert HEADER.copy_bytes == 8192


def test_worker_block_offsets():
    layout = WorkerBlockLayout(token_capacity=1000, commit_bytes=30)
    buffer = bytearray(layout.block_bytes)
    buffer[:56] = layout.pack_header(5)
    block = WorkerBlock(memoryview(buffer), layout, 5)
    block.append_tokens([11, -12], b"sampler")
    block.logical_rows = 77
    block.publish_commit(4, 64, b"payload")
    block.publish_counters(range(101, 107))

    at = {field: offset for offset, _, field, _ in table("worker block")}
    size = {field: nbytes for _, nbytes, field, _ in table("worker block")}
    record_at = {field: int(offset) for offset, _, field, _ in table("record")}
    stride = 128
    log_offset = 8192
    assert (stride, log_offset) == (layout.record_stride, layout.log_offset)

    def word(offset: int | str) -> int:
        return int.from_bytes(buffer[int(offset) : int(offset) + 8], "little")

    def record(start: int) -> tuple[int, int, int, bytes]:
        payload = bytes(buffer[start + 40 : start + 40 + word(start + record_at["size"])])
        digest = xxhash.xxh3_64_intdigest(bytes(buffer[start : start + 32]) + payload)
        assert word(start + record_at["checksum"]) == digest
        return word(start + record_at["sequence"]), word(start + record_at["generation"]), word(start + 16), payload

    assert bytes(buffer[:8]) == b"KVDWORKR"
    fixed = [word(at[field]) for field in ("session", "token_capacity", "commit_bytes", "log_offset")]
    assert fixed == [5, 1000, 30, log_offset]
    assert [word(at[field]) for field in ("token_count", "commit_sequence", "logical_rows")] == [2, 1, 77]
    assert [word(int(at["counters"]) + 8 * index) for index in range(len(COUNTER_NAMES))] == list(range(101, 107))
    assert record(int(at["commit_records"]) + stride) == (1, 4, 64, b"payload")
    sampler = [int(at["sampler_records"]) + index * number(size["sampler_records"].split()[0]) for index in (0, 1)]
    assert (1, 0, 2, b"sampler") in [record(start) for start in sampler if word(start)]
    assert struct.unpack_from("<2i", buffer, log_offset) == (11, -12)
    assert layout.block_bytes == log_offset + 4096
    assert f"(at most {SAMPLER_BYTES:,})" in SPEC


def test_report_block_offsets():
    rows = {field: (int(offset), nbytes) for offset, nbytes, field, _ in table("report block")}
    data = bytearray(lease_report.REPORT_BYTES)
    data[:16] = lease_report.pack_report_header()
    writer = lease_report.ReportWriter(memoryview(data))
    writer.memory("GPU-1", 1000, 2000)
    for nanoseconds in [7_000_000] * 17 + [300_000_000]:
        writer.gap(nanoseconds)

    def word(field: str, index: int = 0) -> int:
        at = rows[field][0] + 8 * index
        return int.from_bytes(data[at : at + 8], "little")

    assert data[rows["magic"][0] :][:8] == b"KVDREPRT"
    assert word("version") == lease_report.REPORT_VERSION
    assert data[rows["device"][0] :][: int(rows["device"][1])].rstrip(b"\0") == b"GPU-1"
    assert (word("torch_reserved"), word("context")) == (1001, 2001)
    assert (word("gap_sum"), word("gap_longest"), word("stalls")) == (17 * 7_000_000 + 300_000_000, 300_000_000, 1)
    (meaning,) = (row[3] for row in table("report block") if row[2] == "buckets")
    bounds = re.findall(
        r"\d+",
        meaning.split("at most")[1]
        .split("ms")[0]
        .replace("1,000", "1000")
        .replace("2,000", "2000")
        .replace("5,000", "5000"),
    )
    assert tuple(map(int, bounds)) == lease_report.GAP_BOUNDS_MS
    assert [word("buckets", index) for index in range(len(bounds) + 1)] == [0, 0, 0, 17, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert word("latest", 1) == 300_000_000
    assert rows["latest"][0] + 16 * lease_report.STALLS_KEPT <= lease_report.REPORT_BYTES


@pytest.mark.parametrize(("column", "mtp"), [(1, False), (2, True)])
def test_the_page_of_glm_5_3(column, mtp):
    page = GLM_5_3.page_format(Q8G64, mtp=mtp)
    for row in table("page offsets"):
        part, text = row[0], row[column]
        if match := re.match(r"rows of group (\d+), layers? (\d+)(?:\u2013(\d+))?", part):
            group = int(match[1])
            if group >= len(page.groups):
                assert text == ""
                continue
            last = int(match[3] or match[2])
            assert (page.groups[group].first_layer, page.groups[group].end) == (int(match[2]), last + 1)
            expected = page.group_offset(group)
        elif match := re.match(r"key block of group (\d+)", part):
            expected = page.keys_offset(int(match[1]))
        else:
            expected = {"hidden": page.hidden_offset, "payload": page.payload_bytes, "stride": page.stride}[part]
        assert int(text) == expected, part


def test_encodings():
    rows = {row[0]: row[1:] for row in table("rows")}
    keys = {row[0]: row[1:] for row in table("keys")}
    assert set(rows) == set(keys) == set(ENCODINGS)
    short = {"e4m3": "float8_e4m3fn"}
    for name, encoding in ENCODINGS.items():
        layout, (latent, scales, rope, row_bytes) = encoding.rows, rows[name]
        kind = latent.removeprefix("0: ")
        assert short.get(kind, kind) == layout.latent_dtype
        assert rope == f"{layout.rope_offset}: {layout.rope_dtype}"
        assert int(row_bytes) == layout.row_bytes
        if layout.scale_count:
            each = f"{layout.scale_count} {layout.scale_dtype}, one per {layout.scale_group} latent values"
            assert scales == f"{layout.scales_offset}: {each}"
        else:
            assert scales == "none"
        block, (values, key_scales, block_bytes) = encoding.keys, keys[name]
        word = values.removeprefix("0: ").split(",")[0]
        assert short.get(word, word) == block.value_dtype
        assert int(block_bytes) == block.block_bytes
        assert key_scales.startswith(f"{block.scales_offset}: float32") if block.has_scales else key_scales == "none"
