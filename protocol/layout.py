"""Where every byte of a page lies.

A *page* holds 64 tokens of everything that a worker's layers must remember. Its format is the same in VRAM, in host
RAM and on disk, so that a copy between tiers is one copy and a saved page is the page.

    for each index group, in order     rows[64][layers in group][row bytes]
    for each index group, in order     keys of its indexer, block-planar: 64 keys, then 64 scales
    on the worker of the last layer    float32 hidden[hidden size], after the final norm, of the page's 64th token
    padding                            up to a multiple of 4 KiB: the stride

This module knows encodings, index groups and offsets. How a row is encoded is in ``compute.kernels.reference``; what a
model looks like is in ``protocol.model``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from protocol.errors import InvalidValue

PAGE_TOKENS = 64
LEAST_SLAB_BYTES, MOST_SLAB_BYTES = 2 << 20, 32 << 20
"""Tokens in a page, and in a block of index keys."""

PAGE_ALIGNMENT = 4096
"""A page's stride is a multiple of this many bytes."""

LATENT_DIM = 512
ROPE_DIM = 64
INDEX_DIM = 128


@dataclass(frozen=True)
class RowLayout:
    """One token's MLA row in one layer: ``latent`` values, their scales, then ``rope`` values.

    Offsets and sizes are in bytes. ``scale_count`` is 0 where the latent is not quantised.
    """

    name: str
    latent_dtype: str
    scale_dtype: str
    scale_count: int
    rope_dtype: str
    scales_offset: int
    rope_offset: int
    row_bytes: int

    @property
    def scale_group(self) -> int:
        """Latent values that share one scale."""
        return LATENT_DIM // self.scale_count if self.scale_count else LATENT_DIM


@dataclass(frozen=True)
class KeyLayout:
    """64 index keys, block-planar: ``values[64][128]``, then ``scales[64]`` at ``scales_offset`` if there are any."""

    name: str
    value_dtype: str
    has_scales: bool
    scales_offset: int
    block_bytes: int


@dataclass(frozen=True)
class Encoding:
    """The encoding of a page's rows and index keys. Its name travels with every session and saved page."""

    name: str
    rows: RowLayout
    keys: KeyLayout


_E4M3_KEYS = KeyLayout("e4m3", "float8_e4m3fn", True, PAGE_TOKENS * INDEX_DIM, PAGE_TOKENS * (INDEX_DIM + 4))
_F32_KEYS = KeyLayout("f32", "float32", False, PAGE_TOKENS * INDEX_DIM * 4, PAGE_TOKENS * INDEX_DIM * 4)

Q8G64 = Encoding("q8g64", RowLayout("q8g64", "int8", "bfloat16", 8, "bfloat16", 512, 528, 656), _E4M3_KEYS)
"""int8 latent with one bfloat16 scale per 64 values, bfloat16 rope: 656 bytes. Keys in e4m3 with a float32 scale."""

FP8_DS_MLA = Encoding(
    "fp8_ds_mla", RowLayout("fp8_ds_mla", "float8_e4m3fn", "float32", 4, "bfloat16", 512, 528, 656), _E4M3_KEYS
)
"""The row of FlashMLA and vLLM: e4m3 latent with one float32 scale per 128 values, bfloat16 rope: 656 bytes too."""

F32 = Encoding("f32", RowLayout("f32", "float32", "float32", 0, "float32", 2048, 2048, 2304), _F32_KEYS)
"""Nothing quantised: for agreement with other implementations, not for service."""

ENCODINGS = {encoding.name: encoding for encoding in (Q8G64, FP8_DS_MLA, F32)}


def encoding_named(name: str) -> Encoding:
    """The encoding called ``name``; raises `InvalidValue` for any other word."""
    try:
        return ENCODINGS[name]
    except KeyError:
        raise InvalidValue("encoding", name, f"one of {', '.join(sorted(ENCODINGS))}") from None


@dataclass(frozen=True)
class IndexGroup:
    """Consecutive layers that attend to one selection; the first of them, the anchor, has the indexer."""

    first_layer: int
    layers: int

    @property
    def anchor(self) -> int:
        return self.first_layer

    @property
    def end(self) -> int:
        """One past the group's last layer."""
        return self.first_layer + self.layers


def next_slab_bytes(held: int) -> int:
    """Size of a worker's next slab of index keys, in bytes, where it holds ``held`` bytes of them.

    A 64th of those, so that little is spare; from 2 MiB, the least that a driver gives, to 32 MiB. Each slab is a
    handle and a mapping: fifteen sessions of a million tokens would have 20,000 of the smallest.
    """
    return min(MOST_SLAB_BYTES, max(LEAST_SLAB_BYTES, held // 64 // LEAST_SLAB_BYTES * LEAST_SLAB_BYTES))


def round_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class PageFormat:
    """The offsets, in bytes, of everything in a page.

    ``hidden_size`` is 0 on a worker that does not have the model's last layer.
    """

    encoding: Encoding
    groups: tuple[IndexGroup, ...]
    hidden_size: int = 0

    def __post_init__(self) -> None:
        if not self.groups:
            raise InvalidValue("index groups", 0, "at least one")
        for before, after in zip(self.groups, self.groups[1:], strict=False):
            if before.end > after.first_layer:
                raise InvalidValue("index group's first layer", after.first_layer, f"at least {before.end}")

    @cached_property
    def _row_offsets(self) -> tuple[int, ...]:
        offsets, at = [], 0
        for group in self.groups:
            offsets.append(at)
            at += PAGE_TOKENS * group.layers * self.encoding.rows.row_bytes
        return (*offsets, at)

    @property
    def layer_count(self) -> int:
        return sum(group.layers for group in self.groups)

    @property
    def rows_bytes(self) -> int:
        """Bytes of all rows of the page; also where the index keys begin."""
        return self._row_offsets[-1]

    @property
    def keys_bytes(self) -> int:
        """Bytes of all index keys of the page."""
        return len(self.groups) * self.encoding.keys.block_bytes

    @property
    def hidden_offset(self) -> int:
        return self.rows_bytes + self.keys_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of the page without its padding."""
        return self.hidden_offset + 4 * self.hidden_size

    @property
    def stride(self) -> int:
        """Bytes from one page to the next."""
        return round_up(self.payload_bytes, PAGE_ALIGNMENT)

    def group_row_bytes(self, group: int) -> int:
        """Bytes of one token's rows in all layers of ``group``: what one miss reads."""
        return self.groups[group].layers * self.encoding.rows.row_bytes

    def group_offset(self, group: int) -> int:
        """Offset of ``rows[64][layers][row bytes]`` of ``group``."""
        return self._row_offsets[group]

    def row_offset(self, group: int, token: int, layer_in_group: int = 0) -> int:
        """Offset of one row; ``token`` counts from the page's first."""
        return (
            self._row_offsets[group]
            + token * self.group_row_bytes(group)
            + layer_in_group * self.encoding.rows.row_bytes
        )

    def keys_offset(self, group: int) -> int:
        """Offset of the block of index keys of ``group``."""
        return self.rows_bytes + group * self.encoding.keys.block_bytes

    def layer_index(self, layer: int) -> int:
        """Place of ``layer`` among the page's layers, of which the first is not always the model's."""
        return layer - self.groups[0].first_layer

    def group_of_layer(self, layer: int) -> int:
        """Index of the group that ``layer`` belongs to; raises `InvalidValue` if it belongs to none."""
        for index, group in enumerate(self.groups):
            if group.first_layer <= layer < group.end:
                return index
        raise InvalidValue("layer", layer, "a layer of one of the page's index groups")


def group_layers(indexer_layers: Sequence[int], layers: Sequence[int]) -> tuple[IndexGroup, ...]:
    """Cut ``layers`` (consecutive numbers) into index groups, one from each layer of ``indexer_layers``.

    Raises `InvalidValue` if the first layer has no indexer: its selection would be on another worker.
    """
    anchors = [layer for layer in layers if layer in set(indexer_layers)]
    if not anchors or anchors[0] != layers[0]:
        raise InvalidValue("first layer of a worker", layers[0] if layers else None, "a layer with an indexer")
    ends = [*anchors[1:], layers[-1] + 1]
    return tuple(IndexGroup(first, end - first) for first, end in zip(anchors, ends, strict=True))
