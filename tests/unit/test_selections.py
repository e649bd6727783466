"""Traces of selections: recorded by position, measured, replayed, and refused where they are none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from compute.decode.locality import Blend
from compute.decode.selections import BINS, Recorder, Trace
from compute.kernels.state import NO_RING, GroupCache, PageMap
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS
from tests.kernels.pages import format_of

CPU = torch.device("cpu")
GROUPS, TOPK = 2, 4


def selection(*rows: list[int]) -> Tensor:
    return torch.tensor([rows], dtype=torch.int32)


def recorder_of(tokens: int = 4, **more: object) -> Recorder:
    return Recorder(GROUPS, TOPK, first_position=10, tokens=tokens, device=CPU, **more)  # type: ignore[arg-type]


def at(*positions: int) -> Tensor:
    return torch.tensor([positions])


def test_a_row_is_recorded_as_it_was_computed_last() -> None:
    recorder = recorder_of()
    for positions, rows in (
        ([9, 10], ([1, 2, 3, 4], [0, 1, 9, 10])),  # position 9 is before the first
        ([10, 11], ([0, 2, 9, 10], [5, 6, 7, 11])),  # 10 again: its draft was rejected
        ([13, 14], ([3, -1, -1, -1], [1, 2, 3, 4])),  # 14 is past the last
    ):
        for group in range(GROUPS):
            recorder(at(*positions), group, selection(*rows) + group * (selection(*rows) >= 0).int())
    trace = recorder.trace()
    assert trace.first_position == 10
    assert trace.selections[:, 0].tolist() == [[0, 2, 9, 10], [5, 6, 7, 11], [-1] * 4, [3, -1, -1, -1]]
    assert trace.selections[1, 1].tolist() == [6, 7, 8, 12]


def test_misses_are_counted_where_they_lie() -> None:
    pages = BINS * 2 // PAGE_TOKENS
    page_format = format_of()
    caches = [
        GroupCache.empty(torch.zeros(8, group.layers, 656, dtype=torch.uint8), pages * PAGE_TOKENS)
        for group in page_format.groups
    ]
    caches[0].table[100] = 3
    window = torch.tensor([7000, 8000])
    nothing = torch.zeros(pages, dtype=torch.int64)
    page_map = PageMap(nothing, nothing.repeat(2, 1), window, 0, 1, page_format)
    recorder = recorder_of(page_map=page_map, caches=caches)
    recorder(at(10, 11), 0, selection([100, 800, 1600, 7900], [-1, -1, -1, -1]))  # a hit, two misses, the ring
    assert recorder.missed_percentiles(8000)[0] == pytest.approx([0.1, 0.2], abs=0.001)
    assert recorder.missed_percentiles(8000)[1] == []
    window[0] = NO_RING
    recorder(at(10, 11), 1, selection([100, 7900, -1, -1], [-1, -1, -1, -1]))
    assert recorder.missed_percentiles(8000)[1] == pytest.approx([0.0125, 0.9875], abs=0.001)


def test_overlap_of_consecutive_tokens() -> None:
    rows = [[[0, 1, 2, 3]] * 2, [[0, 1, 2, 4], [0, 1, 2, 3]], [[4, 5, -1, -1], [6, 7, 8, 9]], [[4, 5, -1, -1]] * 2]
    trace = Trace(torch.tensor(rows, dtype=torch.int32), 20)
    first = (3 / 4 + 1 / 2 + 2 / 2) / 3
    assert trace.overlaps() == pytest.approx([first, (1 + 0 + 0) / 3])


def test_a_trace_is_written_read_and_replayed(tmp_path: Path) -> None:
    recorder = recorder_of()
    recorder(at(10, 11), 0, selection([0, 1, 9, 10], [2, 3, -1, -1]))
    path = tmp_path / "trace.safetensors"
    recorder.trace().save(path)
    read = Trace.load(path, GROUPS, TOPK)
    assert torch.equal(read.selections, recorder.trace().selections)
    made = selection([4, 5, 6, 7], [8, 9, 10, 11])
    read.replay(CPU)(at(11, 14), 0, made)  # 14 is past the trace
    assert made.tolist() == [[[2, 3, -1, -1], [8, 9, 10, 11]]]


def stored(path: Path, tensor: Tensor, **metadata: str) -> Path:
    save_file({"selections": tensor}, path, {"format": "kvd-selections-1", "first_position": "3"} | metadata)
    return path


@pytest.mark.parametrize(
    ("rows", "metadata", "said"),
    [
        ([[[0, 1, 2, 3]] * 2], {"format": "other"}, "metadata"),
        ([[[0, 1, 2, 3]] * 2], {"first_position": "-1"}, "metadata"),
        ([[[0, 1, 2, 3]] * 3], {}, r"int32 \[tokens, 2, 4\]"),
        ([[[0, 1, 2]] * 2], {}, r"int32 \[tokens, 2, 4\]"),
        ([[[0, 1, 2, 4]] * 2], {}, "selection of position 3"),  # of the future
        ([[[0, 2, 1, 3]] * 2], {}, "selection of position 3"),
        ([[[0, 0, 1, 2]] * 2], {}, "selection of position 3"),
        ([[[-2, 0, 1, 2]] * 2], {}, "selection of position 3"),
        ([[[0, -1, 1, 2]] * 2], {}, "selection of position 3"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, rows: list, metadata: dict[str, str], said: str) -> None:
    path = stored(tmp_path / "trace", torch.tensor(rows, dtype=torch.int32), **metadata)
    with pytest.raises(InvalidValue, match=said):
        Trace.load(path, GROUPS, TOPK)


def test_what_is_no_file_of_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pickle").write_bytes(b"\x80\x04K\x01.")
    save_file({"other": torch.zeros(1)}, tmp_path / "other")
    for name in ("pickle", "absent", "other"):
        with pytest.raises(InvalidValue, match="safetensors file with selections"):
            Trace.load(tmp_path / name, GROUPS, TOPK)
    with pytest.raises(InvalidValue, match=r"int32 \[tokens"):
        Trace.load(stored(tmp_path / "floats", torch.zeros(1, GROUPS, TOPK)), GROUPS, TOPK)


def test_a_blend_is_a_correlation() -> None:
    for keep in (-0.1, 1.0, float("nan")):
        with pytest.raises(InvalidValue, match="blend is"):
            Blend(keep)
