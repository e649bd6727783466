"""The page format against sums written out here, without the code's own constants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InvalidValue
from protocol.layout import (
    ENCODINGS,
    F32,
    FP8_DS_MLA,
    PAGE_TOKENS,
    Q8G64,
    IndexGroup,
    PageFormat,
    encoding_named,
    group_layers,
    round_up,
)
from protocol.model import DEEPSEEK_V3_2, DEMO, GLM_5_3, ModelConfig, model_named

GLM_INDEXERS = [0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74]
GLM_GROUPS = [(0, 1), (1, 1), *((first, 4) for first in GLM_INDEXERS[2:])]


def page_of(*layers_per_group: int, hidden_size: int = 0, encoding: str = "q8g64") -> PageFormat:
    groups, first = [], 0
    for layers in layers_per_group:
        groups.append(IndexGroup(first, layers))
        first += layers
    return PageFormat(encoding_named(encoding), tuple(groups), hidden_size)


class TestEncodings:
    def test_q8g64_row(self) -> None:
        rows = Q8G64.rows
        latent, scales, rope = 512 * 1, 8 * 2, 64 * 2
        assert rows.scales_offset == latent
        assert rows.rope_offset == latent + scales
        assert rows.row_bytes == latent + scales + rope == 656
        assert (rows.scale_count, rows.scale_group) == (8, 64)

    def test_fp8_ds_mla_row(self) -> None:
        rows = FP8_DS_MLA.rows
        latent, scales, rope = 512 * 1, 4 * 4, 64 * 2
        assert (rows.scales_offset, rows.rope_offset) == (latent, latent + scales)
        assert rows.row_bytes == latent + scales + rope == Q8G64.rows.row_bytes, "equal sizes, not equal formats"
        assert (rows.scale_count, rows.scale_group) == (4, 128)

    def test_f32_row(self) -> None:
        assert F32.rows.rope_offset == 512 * 4
        assert F32.rows.row_bytes == (512 + 64) * 4
        assert F32.rows.scale_count == 0

    def test_key_blocks(self) -> None:
        assert Q8G64.keys.scales_offset == 64 * 128 == 8192
        assert Q8G64.keys.block_bytes == 64 * 132 == 8448
        assert F32.keys.block_bytes == 64 * 128 * 4

    @pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=lambda encoding: encoding.name)
    def test_every_row_and_block_is_a_multiple_of_16_bytes(self, encoding) -> None:
        assert encoding.rows.row_bytes % 16 == 0
        assert encoding.rows.scales_offset % 16 == 0
        assert encoding.rows.rope_offset % 16 == 0
        assert encoding.keys.block_bytes % 16 == 0

    def test_unknown_encoding_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(InvalidValue, match="'fp8'; allowed: one of f32, fp8_ds_mla, q8g64"):
            encoding_named("fp8")


class TestIndexGroups:
    def test_glm_5_3(self) -> None:
        groups = GLM_5_3.index_groups()
        assert [group.anchor for group in groups] == GLM_INDEXERS
        assert [(group.first_layer, group.layers) for group in groups] == GLM_GROUPS
        assert groups[-1].end == 78
        assert sum(group.layers for group in groups) == 78

    def test_glm_mtp_layer_is_a_group_of_its_own_and_last(self) -> None:
        groups = GLM_5_3.page_format(Q8G64, mtp=True).groups
        assert len(groups) == 22
        assert groups[-1] == IndexGroup(78, 1)
        assert groups[:-1] == GLM_5_3.index_groups()

    def test_deepseek_v3_2_has_an_indexer_in_every_layer(self) -> None:
        assert DEEPSEEK_V3_2.index_groups() == tuple(IndexGroup(layer, 1) for layer in range(61))

    def test_demo(self) -> None:
        assert DEMO.index_groups() == (IndexGroup(0, 1), IndexGroup(1, 1), IndexGroup(2, 4), IndexGroup(6, 1))

    def test_a_part_of_the_layers_begins_at_an_indexer(self) -> None:
        assert GLM_5_3.index_groups(38, 44) == (IndexGroup(38, 4), IndexGroup(42, 2))
        with pytest.raises(InvalidValue, match="first layer of a worker is 39"):
            GLM_5_3.index_groups(39, 44)

    @pytest.mark.parametrize(("indexers", "layers"), [([], range(4)), ([0], []), ([], [])])
    def test_no_indexer_or_no_layer_is_refused(self, indexers, layers) -> None:
        with pytest.raises(InvalidValue, match="first layer of a worker"):
            group_layers(indexers, layers)

    @given(st.sets(st.integers(0, 60), max_size=30))
    def test_groups_cover_every_layer_once_and_only_anchors_have_indexers(self, others) -> None:
        indexers = sorted(others | {0})
        groups = group_layers(indexers, range(61))
        assert [layer for group in groups for layer in range(group.first_layer, group.end)] == list(range(61))
        assert [group.anchor for group in groups] == indexers


class TestGoldenSizes:
    def test_glm_5_3_without_mtp(self) -> None:
        page = GLM_5_3.page_format(Q8G64)
        assert page.layer_count == 78
        assert page.rows_bytes == 78 * 64 * 656 == 3_274_752
        assert page.keys_bytes == 21 * 8_448
        assert page.payload_bytes == 3_274_752 + 21 * 8_448 + 6_144 * 4

    def test_glm_5_3_with_everything(self) -> None:
        page = GLM_5_3.page_format(Q8G64, mtp=True)
        assert page.layer_count == 79
        assert page.payload_bytes == 79 * 64 * 656 + 22 * 8_448 + 6_144 * 4 == 3_527_168
        assert page.stride == 862 * 4_096 == 3_530_752

    def test_a_million_tokens_and_thirty_times_that(self) -> None:
        pages = 1_048_576 // 64
        stride = GLM_5_3.page_format(Q8G64, mtp=True).stride
        assert round(pages * stride / 2**30, 1) == 53.9
        assert round(30 * pages * stride / 2**30) == 1_616

    def test_248_key_blocks_fill_a_slab_of_2_mib(self) -> None:
        assert (2 << 20) // Q8G64.keys.block_bytes == 248

    def test_one_miss_of_a_group_of_four_reads_2624_bytes_at_once(self) -> None:
        assert GLM_5_3.page_format(Q8G64).group_row_bytes(2) == 4 * 656 == 2_624

    def test_case_19_a_row_beyond_two_gib_has_its_own_address(self) -> None:
        """Row 3,273,604 of 656 bytes lies past 2³¹: in pages of one layer, at page 51,150, token 4."""
        row = 3_273_604
        page = page_of(1)
        assert page.group_offset(0) + row * 656 > 2**31
        assert divmod(row, 64) == (51_150, 4)
        assert (row // 64) * page.stride + page.row_offset(0, row % 64) == 51_150 * 53_248 + 4 * 656 == 2_723_637_824


class TestOffsets:
    def test_rows_of_one_token_lie_side_by_side_in_a_group(self) -> None:
        page = page_of(1, 4, 2)
        assert page.row_offset(1, 0) == 64 * 656
        assert page.row_offset(1, 0, 3) - page.row_offset(1, 0, 2) == 656
        assert page.row_offset(1, 5) - page.row_offset(1, 4) == 4 * 656
        assert page.row_offset(2, 63, 1) == 64 * 656 + 64 * 4 * 656 + (63 * 2 + 1) * 656

    def test_keys_follow_the_rows_and_the_hidden_follows_the_keys(self) -> None:
        page = page_of(1, 4, hidden_size=100)
        assert page.keys_offset(0) == 5 * 64 * 656
        assert page.keys_offset(1) == 5 * 64 * 656 + 8_448
        assert page.hidden_offset == 5 * 64 * 656 + 2 * 8_448
        assert page.payload_bytes == page.hidden_offset + 400

    @given(
        st.lists(st.integers(1, 6), min_size=1, max_size=8),
        st.sampled_from(sorted(ENCODINGS)),
        st.integers(0, 300),
    )
    def test_everything_in_a_page_is_disjoint_and_fills_the_payload(self, layers, encoding, hidden_size) -> None:
        page = page_of(*layers, hidden_size=hidden_size, encoding=encoding)
        row, block = page.encoding.rows.row_bytes, page.encoding.keys.block_bytes
        pieces = [
            (page.row_offset(group, token, layer), row)
            for group, count in enumerate(layers)
            for token in range(PAGE_TOKENS)
            for layer in range(count)
        ]
        pieces += [(page.keys_offset(group), block) for group in range(len(layers))]
        pieces.append((page.hidden_offset, 4 * hidden_size))
        at = 0
        for offset, size in sorted(pieces):
            assert offset == at
            at += size
        assert page.payload_bytes == at
        assert page.stride % 4_096 == 0
        assert 0 <= page.stride - at < 4_096

    def test_every_row_starts_on_16_bytes(self) -> None:
        page = GLM_5_3.page_format(Q8G64, mtp=True)
        assert all(page.row_offset(group, token) % 16 == 0 for group in range(22) for token in range(64))
        assert all(page.keys_offset(group) % 16 == 0 for group in range(22))
        assert page.hidden_offset % 16 == 0

    def test_group_of_layer(self) -> None:
        page = GLM_5_3.page_format(Q8G64)
        assert [page.group_of_layer(layer) for layer in (0, 1, 2, 5, 6, 77)] == [0, 1, 2, 2, 3, 20]
        with pytest.raises(InvalidValue, match="layer is 78"):
            page.group_of_layer(78)

    def test_a_page_without_groups_or_with_overlapping_ones_is_refused(self) -> None:
        with pytest.raises(InvalidValue, match="index groups is 0"):
            PageFormat(Q8G64, ())
        with pytest.raises(InvalidValue, match="first layer is 3; allowed: at least 4"):
            PageFormat(Q8G64, (IndexGroup(0, 4), IndexGroup(3, 1)))

    @given(st.integers(0, 2**40), st.integers(1, 2**21))
    def test_round_up(self, value, multiple) -> None:
        rounded = round_up(value, multiple)
        assert rounded % multiple == 0
        assert value <= rounded < value + multiple


class TestModelConfig:
    def test_softmax_scales(self) -> None:
        assert GLM_5_3.softmax_scale == 256**-0.5
        assert DEEPSEEK_V3_2.softmax_scale == pytest.approx(192**-0.5 * (0.1 * 3.6888794541139363 + 1) ** 2, rel=1e-12)

    def test_a_preset_and_its_config_file_are_the_same(self, tmp_path) -> None:
        """The file has the fields as ``transformers`` writes them, with others that decide nothing here."""
        path = tmp_path / "config.json"
        path.write_text(
            """{"model_type": "glm_moe_dsa", "head_dim": 192, "vocab_size": 154880, "hidden_size": 6144,
            "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 78,
            "num_attention_heads": 64, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
            "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "q_lora_rank": 2048, "kv_lora_rank": 512,
            "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "index_n_heads": 32,
            "index_head_dim": 128, "index_topk": 2048, "index_topk_freq": 4, "index_skip_topk_offset": 3,
            "num_nextn_predict_layers": 1, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-05,
            "rope_parameters": {"rope_theta": 8000000.0, "rope_type": "default"}}"""
        )
        assert model_named(str(path)) == model_named(str(tmp_path)) == GLM_5_3

    def test_another_shape_of_rows_is_refused(self) -> None:
        with pytest.raises(InvalidValue, match="kv_lora_rank is 256; allowed: 512"):
            ModelConfig.from_dict({**vars(DEMO), "kv_lora_rank": 256})

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"vocab_size": 10}'])
    def test_a_file_that_is_no_config_is_refused(self, tmp_path, text) -> None:
        path = tmp_path / "config.json"
        path.write_text(text)
        with pytest.raises(InvalidValue, match="model config"):
            model_named(str(path))

    def test_an_unknown_name_is_refused_with_the_presets(self) -> None:
        with pytest.raises(InvalidValue, match=r"model is 'gpt'; allowed: one of glm-5\.3, deepseek-v3\.2, demo"):
            model_named("gpt")
