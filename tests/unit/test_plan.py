"""``kvd plan`` against figures written out here; none of them comes from the code."""

from __future__ import annotations

import argparse
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.commands import plan
from kvd.planning.footprint import Footprint, Slabs
from protocol.errors import InvalidValue
from protocol.layout import F32, Q8G64
from protocol.model import DEEPSEEK_V3_2, DEMO, GLM_5_3

MIB, GIB = 2**20, 2**30
MILLION = 1_048_576

PAYLOAD_TABLE = """\
object                                                           payload
50,000 tokens, one layer, one replica                         31.281 MiB
50,000 tokens, 78 layers, two replicas                         4.765 GiB
2,048 selected rows, one layer, one replica                  1.28125 MiB
32,768 hot rows, one layer, one replica                         20.5 MiB
1,048,576 tokens, 78 layers, two replicas                      99.94 GiB
fifteen of those                                            1,499.06 GiB
fifteen hot caches of 32,768 rows, 78 layers, two replicas     46.85 GiB
"""


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    plan.add_parser(parser.add_subparsers(required=True))
    return plan.run(parser.parse_args(["plan", *words]))


def run_json(capsys, *words: str) -> dict:
    assert run(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def glm(tokens: int = MILLION, hot_rows: int = 32_768, drafts: int = 3, ring_pages: int = 4) -> Footprint:
    return Footprint(GLM_5_3, Q8G64, tokens, hot_rows, drafts, ring_pages)


def committed(footprint: Footprint) -> dict[str, int]:
    return {part.purpose: part.committed_bytes for part in footprint.parts}


class TestPayloadTable:
    def test_printed(self, capsys) -> None:
        assert run("--table") == 0
        assert capsys.readouterr().out == PAYLOAD_TABLE

    def test_bytes(self) -> None:
        assert [size for _, size, _ in plan.payload_table()] == [
            50_000 * 656,
            50_000 * 656 * 156,
            2_048 * 656,
            32_768 * 656,
            MILLION * 656 * 156,
            MILLION * 656 * 156 * 15,
            32_768 * 656 * 156 * 15,
        ]

    def test_json(self, capsys) -> None:
        table = run_json(capsys, "--table")
        assert table["schema"] == 1
        assert table["rows"][2] == {"object": "2,048 selected rows, one layer, one replica", "payload_bytes": 1_343_488}


class TestFootprint:
    def test_a_million_tokens_with_mtp(self) -> None:
        footprint = glm()
        assert footprint.pages == 16_384
        assert committed(footprint)["pages"] == 16_384 * 3_530_752
        assert round(committed(footprint)["pages"] / GIB, 1) == 53.9
        assert footprint.position_table_bytes == 88 * MIB
        assert committed(footprint)["hot_cache"] == 1_620 * MIB  # 79 × 20.5 MiB = 1,619.5
        assert footprint.slot_table_bytes == 22 * (32_768 * 8 + 48)
        assert footprint.address_table_bytes == 16_384 * 8 * 23
        assert committed(footprint)["tables"] == 98 * MIB  # 88 + 5.501 in one allocation, 2.875 in another
        assert committed(footprint)["ring"] == 14 * MIB  # 4 × 3,530,752 = 13.47 MiB
        # 16,384 × 22 blocks of 8,448 bytes are 2,904 MiB: 64 slabs of 2 MiB, 32 of 4, 22 of 6, 16 of 8 and so on
        assert footprint.key_slabs(1) == Slabs(305, 2_936 * MIB)
        assert committed(footprint)["index_keys"] == 2_936 * MIB

    def test_a_million_tokens_without_mtp(self) -> None:
        assert glm(drafts=0).position_table_bytes == 84 * MIB

    def test_thirty_sessions_of_a_million_tokens(self) -> None:
        pages = 30 * committed(glm())["pages"]
        assert round(pages / GIB) == 1_616
        assert glm().host_bytes(30) == pages + 30 * glm().session_state_bytes

    def test_session_state(self) -> None:
        """Daemon block: a page and two copies. Worker block: 4 bytes a token, and two commit records."""
        page_table = 4_096 + 2 * (4_096 + 16_384 * 8)
        log_offset = 4_096 + 2 * (40 + 6_144 * 4 + 24)  # records are multiples of 64 bytes
        assert log_offset % 4_096 == 128
        assert glm().session_state_bytes == page_table + log_offset + 4_096 - 128 + 4 * MILLION

    def test_one_layer(self) -> None:
        layers = {part.purpose: part.layer_bytes for part in glm(tokens=50_000).parts}
        assert layers["pages"] == 782 * 64 * 656  # the last page is not full
        assert layers["hot_cache"] == 20.5 * MIB
        assert layers["index_keys"] == 782 * 8_448
        assert layers["tables"] is layers["ring"] is layers["session_state"] is None

    def test_deepseek(self) -> None:
        footprint = Footprint(DEEPSEEK_V3_2, Q8G64, 163_840, 32_768, 0, 4)
        page = 61 * (64 * 656 + 8_448) + 7_168 * 4
        assert committed(footprint)["pages"] == 2_560 * (page + -page % 4_096)
        assert 1 < footprint.key_slabs(1).nbytes / (2_560 * 61 * 8_448) < 1 + 1 / 64 + 1 / 248

    def test_unquantised_rows(self) -> None:
        footprint = Footprint(DEMO, F32, 64, 256, 0, 1)
        page = 7 * 64 * 2_304 + 4 * 64 * 128 * 4 + 128 * 4
        assert committed(footprint)["pages"] == page + -page % 4_096
        assert footprint.key_slabs(1).count == 1  # 64 blocks of 32 KiB in a slab
        assert Footprint(DEMO, F32, 64 * 17, 256, 0, 1).key_slabs(1).count == 2

    def test_sessions_share_slabs_of_index_keys(self) -> None:
        footprint = Footprint(DEMO, Q8G64, 64, 256, 0, 1)
        assert [footprint.key_slabs(sessions).count for sessions in (1, 62, 63)] == [1, 1, 2]  # four blocks each

    @given(st.integers(1, MILLION), st.integers(8_192, 100_000), st.integers(0, 2**44))
    def test_what_fits_fits_and_one_more_does_not(self, tokens, hot_rows, limit) -> None:
        footprint = glm(tokens, hot_rows)
        host, vram = footprint.sessions_in_host(limit), footprint.sessions_in_vram(limit)
        assert footprint.host_bytes(host) <= limit < footprint.host_bytes(host + 1)
        assert footprint.vram_bytes(vram) <= limit < footprint.vram_bytes(vram + 1)

    @given(st.integers(1, MILLION), st.integers(8_192, 100_000), st.integers(1, 64))
    def test_vram_is_committed_in_granules_of_2_mib_and_covers_what_is_requested(self, tokens, hot_rows, ring) -> None:
        for part in glm(tokens, hot_rows, ring_pages=ring).parts:
            spare = part.committed_bytes - part.requested_bytes
            if part.tier == "host":
                assert spare == 0
            else:
                assert part.committed_bytes % (2 * MIB) == 0
                # of slabs, the last one is a 64th at most, and all have an end of less than a block
                keys = max(2 * MIB, part.requested_bytes // 64) + 8_448 * 305
                most = {"index_keys": keys, "tables": 4 * MIB}.get(part.purpose, 2 * MIB)  # tables are two allocations
                assert 0 <= spare < most

    @pytest.mark.parametrize(
        ("model", "tokens", "hot_rows", "drafts", "ring_pages", "message"),
        [
            (GLM_5_3, 0, 32_768, 0, 4, "tokens is 0; allowed: 1 to 1048576"),
            (GLM_5_3, -64, 32_768, 0, 4, "tokens is -64"),
            (GLM_5_3, MILLION + 1, 32_768, 0, 4, "tokens is 1048577; allowed: 1 to 1048576, the model's context"),
            (DEEPSEEK_V3_2, 163_841, 32_768, 0, 4, "allowed: 1 to 163840"),
            (GLM_5_3, 64, 2_047, 0, 4, "hot rows is 2047; allowed: at least 2048"),
            (GLM_5_3, 64, 8_191, 3, 4, "hot rows is 8191; allowed: at least 8192: 4 query rows of 2048"),
            (DEMO, 64, 8_192, 1, 4, "MTP drafts is 1; allowed: 0"),
            (GLM_5_3, 64, 8_192, -1, 4, "MTP drafts is -1"),
            (GLM_5_3, 64, 8_192, 0, 0, "ring pages is 0; allowed: at least 1"),
        ],
    )
    def test_what_cannot_be_is_refused(self, model, tokens, hot_rows, drafts, ring_pages, message) -> None:
        with pytest.raises(InvalidValue, match=message):
            Footprint(model, Q8G64, tokens, hot_rows, drafts, ring_pages)


class TestCommand:
    def test_vram_runs_out_first(self, capsys) -> None:
        assert run("--mtp", "--host-bytes", "1.6TiB", "--vram-bytes", "60GiB") == 0
        out = capsys.readouterr().out
        # 1,638.4 GiB over 53.88; 61,440 MiB over 1,620 + 98 + 28 + 2,936
        assert "that fit: 13; VRAM runs out first (host RAM holds 30, VRAM holds 13)." in out

    def test_host_ram_runs_out_first(self, capsys) -> None:
        fit = run_json(capsys, "--mtp", "--host-bytes", "1 TiB", "--vram-bytes", "1 TiB")
        assert fit["sessions_that_fit"] == {"host": 19, "vram": 225}  # 1,048,576 MiB over 4,652.8
        assert fit["runs_out_first"] == "host"

    def test_both_run_out_together(self, capsys) -> None:
        assert run("--host-bytes", "54GiB", "--vram-bytes", "5GiB") == 0
        assert "that fit: 1; both run out together" in capsys.readouterr().out

    def test_nothing_fits(self, capsys) -> None:
        assert run("--host-bytes", "50GiB", "--vram-bytes", "5GiB") == 0
        assert "that fit: 0; host RAM runs out first" in capsys.readouterr().out

    def test_one_limit(self, capsys) -> None:
        assert run("--host-bytes", "1TiB") == 0
        assert "host RAM holds 19; no limit was given for the other tier" in capsys.readouterr().out

    def test_no_limit(self, capsys) -> None:
        fit = run_json(capsys)
        assert fit["sessions_that_fit"] == {"host": None, "vram": None}
        assert fit["runs_out_first"] is None
        assert run() == 0
        assert "give --host-bytes, --vram-bytes, or both" in capsys.readouterr().out

    def test_replicas_share_the_host_copy_and_have_their_own_vram(self, capsys) -> None:
        one, two = run_json(capsys, "--sessions", "15"), run_json(capsys, "--sessions", "15", "--replicas", "2")
        assert two["host_committed_bytes"] == one["host_committed_bytes"]
        assert two["vram_committed_bytes_per_gpu"] == one["vram_committed_bytes_per_gpu"]
        assert two["vram_committed_bytes"] == 2 * one["vram_committed_bytes"]

    def test_json(self, capsys) -> None:
        answer = run_json(capsys, "--mtp", "2", "--tokens", "1,000", "--hot-rows", "6144", "--ring-pages", "2")
        assert answer["schema"] == 1
        assert (answer["tokens"], answer["pages"], answer["query_rows"]) == (1_000, 16, 3)
        assert (answer["layers"], answer["index_groups"]) == (79, 22)
        assert (answer["page_payload_bytes"], answer["page_stride_bytes"]) == (3_527_168, 3_530_752)
        assert [(part["tier"], part["purpose"]) for part in answer["one_session"]] == [
            ("host", "pages"),
            ("host", "session_state"),
            ("vram", "hot_cache"),
            ("vram", "tables"),
            ("vram", "ring"),
            ("vram", "index_keys"),
        ]

    def test_the_table_names_every_part(self, capsys) -> None:
        assert run("--mtp") == 0
        lines = capsys.readouterr().out.splitlines()
        assert "79 layers in 22 index groups" in lines[0]
        assert any("pages" in line and "53.88 GiB" in line for line in lines)
        assert any("hot_cache" in line and "20.5 MiB" in line for line in lines)
        assert sum(line.startswith(("host RAM  ", "VRAM  ")) for line in lines) == 6

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--tokens", "0"), "--tokens is '0'"),
            (("--tokens", "many"), "--tokens is 'many'; allowed: a whole number"),
            (("--tokens", "9" * 400), "--tokens is"),
            (("--hot-rows", "-1"), "--hot-rows is '-1'"),
            (("--sessions", "0"), "--sessions is '0'"),
            (("--replicas", "0"), "--replicas is '0'"),
            (("--mtp", "17"), "--mtp is '17'; allowed: 0 to 16"),
            (("--ring-pages", "0"), "--ring-pages is '0'"),
            (("--host-bytes", "lots"), "--host-bytes is 'lots'"),
            (("--vram-bytes", "-1GiB"), "--vram-bytes is '-1GiB'"),
            (("--encoding", "int4"), "encoding is 'int4'"),
            (("--model", "nowhere/config.json"), "model is 'nowhere/config.json'"),
            (("--model", "/dev/null"), "model config file is '/dev/null'"),
        ],
    )
    def test_a_bad_argument_is_named(self, words, message) -> None:
        option, value = words
        with pytest.raises(InvalidValue, match=message):
            run(f"{option}={value}")
