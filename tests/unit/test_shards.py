"""Shards of weights put together are the whole; layers are cut into stages of whole groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compute.decode.matrices import WeightType
from compute.decode.shards import shard_config
from compute.decode.weights import DecodeWeights, DenseWeights, LayerWeights, MoeWeights, random_weights_on
from compute.kernels.reference_linear import dequantise
from compute.parallel.grid import Place
from compute.parallel.stages import cut_layers
from protocol.errors import InvalidValue
from protocol.layout import Q8G64
from protocol.model import DEMO, GLM_5_3

CONFIG = replace(
    DEMO,
    num_hidden_layers=4,
    n_routed_experts=2,
    intermediate_size=512,
    moe_intermediate_size=256,
    num_attention_heads=8,
    num_nextn_predict_layers=1,
)


def shards(count: int, kind: WeightType, config=CONFIG) -> list[DecodeWeights]:
    return [random_weights_on(config, 1, kind, "cpu", mtp=True, shard=(number, count)) for number in range(count)]


def mlp_of(layer: LayerWeights) -> DenseWeights:
    """The dense MLP, or the shared expert."""
    mlp = layer.feed_forward
    return mlp.shared if isinstance(mlp, MoeWeights) else mlp


@pytest.mark.parametrize(("kind", "count"), [("bf16", 2), ("bf16", 4), ("fp8", 2)])
def test_shards_put_together_are_the_whole(kind: WeightType, count: int) -> None:
    whole, parts = random_weights_on(CONFIG, 1, kind, "cpu", mtp=True), shards(count, kind)
    assert whole.head is not None
    assert whole.mtp is not None
    for number in range(4):
        layer, cut = whole.layer(number), [part.layer(number) for part in parts]
        for name, dimension in (("absorb_key", 0), ("absorb_value", 0), ("output", 1)):
            joined = torch.cat([dequantise(getattr(part, name)) for part in cut], dimension)
            assert torch.equal(joined, dequantise(getattr(layer, name))), name
        rows = 8 * CONFIG.qk_head_dim
        queries = torch.cat([dequantise(part.from_latent)[: rows // count] for part in cut])
        assert torch.equal(queries, dequantise(layer.from_latent)[:rows])
        assert all(torch.equal(dequantise(part.from_hidden), dequantise(layer.from_hidden)) for part in cut)
        first, *others = (mlp_of(part) for part in (layer, *cut))
        assert torch.equal(torch.cat([dequantise(mlp.down) for mlp in others], 1), dequantise(first.down))
        gates = torch.cat([dequantise(mlp.gate_up).chunk(2)[0] for mlp in others])
        assert torch.equal(gates, dequantise(first.gate_up).chunk(2)[0])
    assert torch.equal(torch.cat([part.head.values for part in parts if part.head]), whole.head.values)
    assert all(torch.equal(dequantise(part.mtp.combine), dequantise(whole.mtp.combine)) for part in parts if part.mtp)


def test_what_does_not_divide_is_refused() -> None:
    refused: list[tuple[int, WeightType, str]] = [
        (3, "bf16", "num_attention_heads"),
        (4, "fp8", "moe_intermediate_size"),
        (16, "bf16", "num_attention_heads"),
    ]
    for count, kind, name in refused:
        with pytest.raises(InvalidValue, match=name):
            shard_config(CONFIG, count, kind)
    assert shard_config(GLM_5_3, 8, "fp8").num_attention_heads == 8


def test_stages_are_whole_groups_and_as_even_as_these_allow() -> None:
    groups = GLM_5_3.index_groups()
    assert cut_layers(groups, 1) == [(0, 78)]
    assert cut_layers(groups, 2) == [(0, 38), (38, 78)]
    assert cut_layers(groups, 3) == [(0, 26), (26, 50), (50, 78)]
    assert len(cut_layers(groups, 21)) == 21
    for stages in range(1, 22):
        cut = cut_layers(groups, stages)
        assert [first for first, _ in cut[1:]] == [end for _, end in cut[:-1]]
        for first, end in cut:
            assert GLM_5_3.page_format(Q8G64, first_layer=first, end_layer=end).groups[0].first_layer == first
    for stages in (0, 22):
        with pytest.raises(InvalidValue, match="pipeline stages"):
            cut_layers(groups, stages)


def test_a_stage_has_the_pages_of_its_layers_only() -> None:
    first, last = (GLM_5_3.page_format(Q8G64, first_layer=a, end_layer=b, mtp=True) for a, b in ((0, 38), (38, 78)))
    whole = GLM_5_3.page_format(Q8G64, mtp=True)
    assert (first.hidden_size, last.hidden_size) == (0, 6144)
    assert first.rows_bytes + last.rows_bytes == whole.rows_bytes
    assert first.payload_bytes + last.payload_bytes == whole.payload_bytes
    assert (last.layer_index(38), last.layer_index(78), whole.layer_index(78)) == (0, 40, 78)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "4 ranks under torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "ranks started by torchrun is 2"),
        ({"WORLD_SIZE": "four", "RANK": "0"}, "4 ranks under torchrun"),
        ({"WORLD_SIZE": "4", "RANK": "4"}, "rank is 4"),
    ],
)
def test_an_environment_that_is_not_torchruns(environment: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        Place.of_environment(2, 2, environment)


def test_places_on_the_grid() -> None:
    places = [
        Place.of_environment(2, 2, {"WORLD_SIZE": "4", "RANK": str(rank), "LOCAL_RANK": str(rank % 2)})
        for rank in range(4)
    ]
    assert [(place.stage, place.shard, place.is_last_stage) for place in places] == [
        (0, 0, False),
        (0, 1, False),
        (1, 0, True),
        (1, 1, True),
    ]
    assert [place.device("cuda") for place in places] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert [place.device("cpu") for place in places] == ["cpu"] * 4
