"""What a checkpoint is known by, and where an engine's blocks lie."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from compute.integrations.checkpoint import identity_of_folder
from compute.integrations.vllm.copies import pieces
from compute.integrations.vllm.regions import MOST_PITCH, Region, block_bytes, regions_of, runs_of
from protocol.errors import InvalidValue


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(b"first")
    (folder / "b.safetensors").write_bytes(b"second")
    (folder / "config.json").write_text("{}")
    return folder


def test_equal_files_anywhere_are_one_checkpoint_and_others_are_not(folder: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory.json"
    identity = identity_of_folder(folder, memory)
    assert identity_of_folder(folder, memory) == identity
    (folder / "tokenizer.json").write_text("changed")
    (folder / "pytorch_model.bin").write_bytes(b"another copy of the same")
    assert identity_of_folder(folder, memory) == identity
    moved = folder.rename(tmp_path / "elsewhere")
    assert identity_of_folder(moved, memory) == identity
    (moved / "b.safetensors").write_bytes(b"Second")  # of the same size
    assert identity_of_folder(moved, memory) != identity
    (moved / "b.safetensors").rename(moved / "c.safetensors")
    (moved / "c.safetensors").write_bytes(b"second")
    assert identity_of_folder(moved, memory) != identity


def test_unchanged_files_are_read_once(folder: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory.json"
    identity = identity_of_folder(folder, memory)
    status = (folder / "a.safetensors").stat()
    with (folder / "a.safetensors").open("r+b") as opened:
        opened.write(b"FIRST")
    os.utime(folder / "a.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert identity_of_folder(folder, memory) == identity  # it could not be told from the one that was read
    memory.write_text("not what it was")
    assert identity_of_folder(folder, memory) != identity


def test_a_file_that_the_hub_has_named_by_its_hash_is_not_read(tmp_path: Path) -> None:
    content = b"large"
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    blob = blobs / hashlib.sha256(content).hexdigest()
    blob.write_bytes(content)
    (snapshot / "a.safetensors").symlink_to(blob)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "a.safetensors").write_bytes(content)
    memory = tmp_path / "memory.json"
    assert identity_of_folder(snapshot, memory) == identity_of_folder(plain, memory)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="weights"):
        identity_of_folder(tmp_path, tmp_path / "memory.json")


@dataclass
class _Placement:
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0


def test_layers_that_lie_one_behind_the_other_are_a_region_each() -> None:
    regions = regions_of([_Placement(["a", "b"], 640, 64, 128)], {"a": 1000, "b": 1000}, 10)
    assert regions == [Region(1128, 64, 64), Region(1768, 64, 64)]
    assert list(pieces(regions, [3, 0], [5000, 9000])) == [
        (1128 + 3 * 64, 5000, 64),
        (1768 + 3 * 64, 5064, 64),
        (1128, 9000, 64),
        (1768, 9064, 64),
    ]


def test_heads_that_lie_one_behind_the_other_are_a_region_each() -> None:
    assert len(regions_of([_Placement(["a", "b"], 1280, 64)], {"a": 0, "b": 0}, 10)) == 4


def test_blocks_that_have_all_layers_are_one_region() -> None:
    packed = [_Placement(["a", "b"], 64, 192), _Placement(["c"], 64, 192, 128)]
    regions = regions_of(packed, dict.fromkeys("abc", 4096), 10)
    assert regions == [Region(4096, 192, 192)]
    assert block_bytes(regions) == 192


def test_layers_of_different_sizes() -> None:
    placements = [_Placement(["a"], 640, 64), _Placement(["keys"], 320, 32, 640)]
    assert [region.nbytes for region in regions_of(placements, {"a": 0, "keys": 0}, 10)] == [64, 32]


def test_another_placement_is_refused() -> None:
    with pytest.raises(ValueError, match="no multiple"):
        regions_of([_Placement(["a", "b"], 700, 64)], {"a": 0}, 10)


MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("regions", "counts"),
    [
        ([Region(4096 + 640 * layer, 64, 64) for layer in range(5)], [5]),
        ([Region(4096 + 3 * GIB * layer, 1 << 16, 1 << 16) for layer in range(4)], [4]),  # further than a pitch goes
        ([Region(4096 + 1000 * layer, 64, 64) for layer in range(3)], [3]),  # apart by no whole blocks
        ([Region(4096 + 3000 * MIB * layer + 8 * layer, 64, 64) for layer in range(3)], [1, 1, 1]),  # and too far
        ([Region(address, 64, 64) for address in (640, 1280, 1920, 2000, 8000, 14000)], [3, 3]),
        ([Region(1280, 64, 64), Region(640, 64, 64)], [1, 1]),  # backwards
        ([Region(0, 64, 64), Region(640, 32, 32), Region(960, 32, 32)], [1, 2]),
        ([Region(0, 64, 64), Region(640, 128, 64)], [1, 1]),
        ([Region(0, 64, 64), Region(0, 64, 64)], [1, 1]),
        ([], []),
    ],
)
def test_runs_are_all_pieces_in_their_order(regions: list[Region], counts: list[int]) -> None:
    runs = runs_of(regions)
    assert [run.count for run in runs] == counts
    copied = [
        (run.region.address + index * run.pitch * run.rows, run.region.stride, run.offset + index * run.region.nbytes)
        for run in runs
        for index in range(run.count)
    ]
    offsets = [sum(region.nbytes for region in regions[:index]) for index in range(len(regions))]
    assert copied == [(region.address, region.stride, offset) for region, offset in zip(regions, offsets, strict=True)]
    assert all(run.region.nbytes <= run.pitch <= MOST_PITCH and run.rows > 0 for run in runs)
