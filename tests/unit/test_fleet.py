"""``kvd plan --fleet``: nodes, mixes and layouts against figures that are worked out here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.commands import plan as command
from kvd.planning.fleet import MOST_SESSIONS, STEP, Layout, Unit, Workload, _stages, plan
from kvd.planning.footprint import Footprint
from kvd.planning.mix import SessionKind, fullest_share, in_proportion, parse_mix
from kvd.planning.nodes import node_named, node_types
from protocol.errors import InvalidValue
from protocol.layout import Q8G64
from protocol.model import GLM_5_3

GIB = 2**30
MILLION = 1_048_576
TEN = GLM_5_3.with_layers(10).with_experts(8)
CUT = GLM_5_3.with_experts(8)


def workload(mix: str, model=GLM_5_3, **changes) -> Workload:
    given_ = {"hot_rows": 32_768, "ring_pages": 8, "drafts": 0, "misses": 0.01, "kept": 0.62, "least_rate": 10.0}
    return Workload(model, Q8G64, "fp8", parse_mix(mix), **{**given_, **changes})


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(required=True))
    return command.run(parser.parse_args(["plan", *words]))


def run_json(capsys, *words: str) -> dict:
    assert run("--fleet", *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


class TestMix:
    def test_kinds(self) -> None:
        assert parse_mix("200x50K/20,15x1M,3x64") == (
            SessionKind(MILLION, 15, 15),
            SessionKind(51_200, 200, 20),
            SessionKind(64, 3, 3),
        )
        assert parse_mix("7x100_000/0") == (SessionKind(100_000, 7, 0),)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "--mix is ''; allowed: SESSIONSxTOKENS"),
            ("15", "--mix is '15'"),
            ("15x1G", "--mix is '15x1G'"),
            ("15x1M,", "--mix is ''"),
            ("0x1M", "sessions of --mix 0x1M is '0'; allowed: 1 to 1000000"),
            ("1x0", "tokens of --mix 1x0 is '0'"),
            ("5x1K/6", "decoding of --mix 5x1K/6 is '6'; allowed: 0 to 5"),
            ("1x9999999999999", "tokens of --mix 1x9999999999999"),
        ],
    )
    def test_what_is_none_is_refused(self, text, message) -> None:
        with pytest.raises(InvalidValue, match=message):
            parse_mix(text)

    @given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 9)), min_size=1, max_size=4), st.integers(0, 3000))
    def test_proportions_add_up(self, kinds, sessions) -> None:
        mix = tuple(SessionKind(64 * (i + 1), stored, -(-stored // part)) for i, (stored, part) in enumerate(kinds))
        share = in_proportion(mix, sessions)
        assert sum(kind.stored for kind in share) == sessions
        total = sum(kind.stored for kind in mix)
        for kind, part in zip(mix, share, strict=True):
            assert abs(part.stored - sessions * kind.stored / total) <= 1
            assert 0 <= part.decoding <= part.stored
        for parts in (1, 3):
            for kind, part in zip(mix, fullest_share(mix, parts), strict=True):
                assert part.stored == -(-kind.stored // parts)


class TestNodes:
    def test_those_known_have_all_there_is_to_know(self) -> None:
        types = node_types()
        assert types["h200"].host_for_kvd == 120 * GIB
        assert types["h200"].vram == 139 * GIB
        assert all(node.about and node.source for node in types.values())
        assert {name for name, node in types.items() if node.source.startswith("measured")} == {"h200", "h200-x2"}

    def test_changes(self) -> None:
        node = node_named("hgx-h200,gpus=4,host=1TiB,reserved=0,bus_read=27e9,compute=0.5")
        assert (node.gpus, node.host_for_kvd, node.rates.bus_read, node.rates.compute) == (4, 1024 * GIB, 27e9, 0.5)

    def test_a_changed_node_is_not_measured(self) -> None:
        assert not node_named("h200,host=1TiB").source.startswith("measured")

    def test_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "nodes.toml"
        file.write_text('[old]\ngpus = 8\nvram = "48GiB"\nhost = "1TiB"\nhbm_read = 864e9\nbus_read = 25e9\n')
        node = node_named("old,gpus=4", file)
        assert (node.gpus, node.vram, node.reserved) == (4, 48 * GIB, 8 * GIB)
        assert "h200" in node_types(file)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[a", "file of nodes is"),
            ("a = 1", "a in .* is 1; allowed: a table"),
            ("[a]\ngpus = 1", "node a of .* is 'without vram'"),
            ('[a]\ngpus=1\nvram="1GiB"\nhost="1GiB"\nhbm_read=1\nbus_read=0', "bus_read of node a is 0"),
            ('[a]\ngpus=1\nvram="1GiB"\nhost="1GiB"\nhbm_read=1\nbus_read="x"', "bus_read of node a is 'x'"),
            ('[a]\ngpus=0\nvram="1GiB"\nhost="1GiB"\nhbm_read=1\nbus_read=1', "gpus of node a is 0"),
            ('[a]\ngpus=1\nvram="lots"\nhost="1GiB"\nhbm_read=1\nbus_read=1', "vram of node a is 'lots'"),
            ('[a]\ngpus=1\nvram="1GiB"\nhost="1GiB"\nhbm_read=1\nbus_read=1\nram=1', "key of node a in .* is 'ram'"),
        ],
    )
    def test_a_file_that_is_wrong(self, tmp_path: Path, text, message) -> None:
        file = tmp_path / "nodes.toml"
        file.write_text(text)
        with pytest.raises(InvalidValue, match=message):
            node_types(file)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("h100", "node is 'h100'; allowed: one of h200, h200-x2, hgx-h200"),
            ("h200,ram=1TiB", "change of node h200 is 'ram=1TiB'; allowed: KEY=VALUE with one of gpus, vram"),
            ("h200,host", "change of node h200 is 'host'"),
            ("h200,source=me", "change of node h200 is 'source=me'"),
            ("h200,gpus=1.5", "gpus of node h200 is 1.5"),
            ("h200,gpus=many", "gpus of node h200 is 'many'"),
            ("h200,compute=nan", "compute of node h200 is nan"),
            ("h200,host=-1", "host of node h200 is '-1'"),
        ],
    )
    def test_a_node_that_is_none(self, text, message) -> None:
        with pytest.raises(InvalidValue, match=message):
            node_named(text)


class TestUnit:
    def test_memory_of_one_gpu_is_the_footprint_and_the_weights(self) -> None:
        unit = Unit(workload("15x1M", TEN), node_named("h200"), Layout(1, 1))
        kinds = parse_mix("15x1M")
        footprint = Footprint(TEN, Q8G64, MILLION, 32_768, 0, 8)
        assert unit.host_bytes(kinds) == footprint.host_bytes(15)
        stage = unit.stages[0]
        assert sum(stage.session_vram(kinds).values()) == footprint.vram_bytes(15)
        # two groups of four layers, streamed by an append
        assert stage.append_stream == 2 * MILLION * 4 * 656
        assert unit.vram_bytes(kinds) == footprint.vram_bytes(15) + stage.weights + 8 * GIB + stage.append_stream

    def test_stages_share_pages_and_keys(self) -> None:
        whole = Unit(workload("4x1M", CUT), node_named("hgx-h200"), Layout(1, 1))
        parts = Unit(workload("4x1M", CUT), node_named("hgx-h200"), Layout(1, 4))
        kinds = parse_mix("4x1M")
        assert [len(stage.layers) for stage in parts.stages] == [18, 20, 20, 20]
        assert parts.replicas == 2
        assert whole.replicas == 8
        # each stage's pages end at a multiple of 4 KiB, and each has state blocks of its own
        assert parts.host_bytes(kinds) == pytest.approx(whole.host_bytes(kinds), rel=0.004)
        keys = [stage.session_vram(kinds)["index_keys"] for stage in parts.stages]
        assert sum(keys) == pytest.approx(whole.stages[0].session_vram(kinds)["index_keys"], rel=0.01)

    def test_ranks_have_caches_and_keys_of_their_own_and_one_host_copy(self) -> None:
        kinds = parse_mix("4x1M")
        one = Unit(workload("4x1M", CUT), node_named("hgx-h200"), Layout(1, 1))
        eight = Unit(workload("4x1M", CUT), node_named("hgx-h200"), Layout(8, 1))
        assert eight.host_bytes(kinds) == one.host_bytes(kinds)
        assert eight.stages[0].session_vram(kinds) == one.stages[0].session_vram(kinds)
        assert eight.stages[0].weights == one.stages[0].weights / 8

    def test_a_replica_on_several_nodes(self) -> None:
        unit = Unit(workload("1x1M"), node_named("h200-x2"), Layout(2, 4))
        assert (unit.replicas, unit.nodes) == (1, 4)
        whole = Unit(workload("1x1M"), node_named("hgx-h200"), Layout(8, 1))
        assert unit.host_bytes(parse_mix("1x1M")) < whole.host_bytes(parse_mix("1x1M")) / 3

    def test_sessions_beyond_a_step_take_turns(self) -> None:
        unit = Unit(workload("32x64K", CUT), node_named("h200"), Layout(1, 1))
        half, full = parse_mix("16x64K"), parse_mix("32x64K")
        assert unit.batch(full) == (unit.batch(half)[0], 2.0)
        assert unit.rate(full) == pytest.approx(unit.rate(half) / 2)
        assert unit.rate(parse_mix("16x64K/0")) == 0

    def test_stages_are_whole_groups(self) -> None:
        ends = {group.end for group in GLM_5_3.index_groups()}
        for count in range(1, len(ends) + 1):
            stages = _stages(GLM_5_3, count)
            assert stages[0].start == 0
            assert all(stage.stop in ends and len(stage) for stage in stages)
            assert [stage.start for stage in stages[1:]] == [stage.stop for stage in stages[:-1]]
            assert stages[-1].stop == 78

    @settings(max_examples=10)
    @given(st.integers(1, 60), st.integers(64, MILLION), st.sampled_from([0, 3]))
    def test_what_is_held_fits_and_one_more_does_not(self, sessions, tokens, drafts) -> None:
        unit = Unit(workload(f"{sessions}x{tokens}", CUT, drafts=drafts), node_named("h200"), Layout(1, 1))
        uses = {use.resource: use for use in unit.uses(parse_mix(f"{sessions}x{tokens}"))}
        deciding = [uses[name].holds for name in ("host RAM", "VRAM", STEP)]
        holds = min(MOST_SESSIONS if holds is None else holds for holds in deciding)
        assert unit.fits(in_proportion(unit.workload.mix, holds))
        assert not unit.fits(in_proportion(unit.workload.mix, holds + 1))


class TestPlan:
    def test_fifteen_sessions_of_ten_layers_on_one_gpu(self) -> None:
        found = plan(workload("15x1M", TEN), node_named("h200"))
        assert (found.nodes, found.unit.layout) == (1, Layout(1, 1))
        # a page of layers 0 to 9: 64 × 10 × 656 + 4 × 8,448 + 4 × 6,144, in 4 KiB; 16,384 of them, and state blocks
        host = 15 * 16_384 * 479_232
        uses = {use.resource: use for use in found.uses}
        assert uses["host RAM"].used == pytest.approx(host, rel=0.001)
        assert uses["host RAM"].holds == 120 * GIB * 15 // round(uses["host RAM"].used) == 16
        assert found.first_out.resource == "host RAM"
        assert found.total_rate == pytest.approx(15 * found.rate)

    def test_the_fewest_nodes(self) -> None:
        for mix in ("30x1M", "100x1M,2000x50K/100"):
            found = plan(workload(mix), node_named("hgx-h200"))
            assert found.unit.fits(found.fullest)
            if found.units > 1:
                assert not found.unit.fits(fullest_share(found.unit.workload.mix, found.units - 1))

    def test_a_slower_rate_needs_fewer_nodes(self) -> None:
        nodes = [plan(workload("200x1M", least_rate=rate), node_named("hgx-h200")).nodes for rate in (1.0, 20.0)]
        assert nodes[0] < nodes[1]

    def test_index_keys_end_vram_first(self, capsys) -> None:
        answer = run_json(capsys, "--node", "hgx-h200", "--mix", "200x1M", "--least-rate", "1", "--tensor", "8")
        assert answer["runs_out_first"] == "VRAM"
        keys = answer["vram_of_fullest_gpu"].pop("index_keys")
        assert keys > max(size for name, size in answer["vram_of_fullest_gpu"].items() if name != "weights")
        assert run("--fleet", "--node", "hgx-h200", "--mix", "200x1M", "--least-rate", "1", "--tensor", "8") == 0
        assert "VRAM ends first, most of the sessions' part is index_keys" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("mix", "node", "options", "message"),
        [
            ("1x1M", "h200", {"tensor": 1, "pipeline": 1}, "of VRAM on each GPU for one session of each kind"),
            ("1x1M", "h200,host=9GiB", {}, "of host RAM beside what is reserved"),
            ("1x1M", "h200", {"tensor": 2}, "--tensor is 2; allowed: 1 to 1, the GPUs of a h200"),
            ("1x1M", "hgx-h200", {"tensor": 3}, "--tensor is 3; allowed: a divisor of 64 heads and 256 experts"),
            ("1x1M", "hgx-h200", {"pipeline": 22}, "--pipeline is 22; allowed: 1 to 21, the index groups"),
        ],
    )
    def test_what_cannot_be_is_refused(self, mix, node, options, message) -> None:
        with pytest.raises(InvalidValue, match=message):
            plan(workload(mix), node_named(node), **options)

    def test_too_fast_a_rate_is_refused_with_the_one_there_is(self) -> None:
        with pytest.raises(InvalidValue, match=r"--least-rate \d+ at most") as caught:
            plan(workload("1x1M", least_rate=1e5), node_named("hgx-h200"))
        assert caught.value.exit_status == 64


class TestCommand:
    def test_text(self, capsys) -> None:
        assert run("--fleet", "--layers", "10", "--experts", "8", "--mix", "15x1M") == 0
        out = capsys.readouterr().out
        assert "Nodes: 1; at most 15 sessions on a node, which would hold 16: host RAM ends first." in out
        for resource in ("host RAM", "VRAM", "PCIe", "HBM", "compute", "step time"):
            assert sum(line.startswith(f"{resource} ") for line in out.splitlines()) >= 1
        assert "tokens/s a session" in out
        assert "Not measured" not in out

    def test_what_is_not_measured_is_said(self, capsys) -> None:
        assert run("--fleet", "--node", "hgx-h200", "--tensor", "8", "--mix", "2x1M") == 0
        out = capsys.readouterr().out
        assert "Not measured: the figures of hgx-h200" in out
        assert "joins of tensor-parallel ranks" in out

    def test_sessions_and_tokens_are_a_mix_of_one_kind(self, capsys) -> None:
        words = ("--experts", "8", "--layers", "10")
        answer = run_json(capsys, *words, "--sessions", "3", "--tokens", "102,400")
        assert answer["mix"] == [{"tokens": 102_400, "stored": 3, "decoding": 3}]
        assert answer == run_json(capsys, *words, "--mix", "3x100K")
        assert run_json(capsys, *words)["mix"] == [{"tokens": MILLION, "stored": 1, "decoding": 1}]

    def test_json(self, capsys) -> None:
        answer = run_json(capsys, "--experts", "8", "--mix", "5x128K/3", "--mtp", "--misses", "2.5")
        assert (answer["schema"], answer["query_rows"], answer["misses_percent"]) == (1, 4, 2.5)
        step = answer["step"]
        parts = ("launches_us", "hbm_us", "compute_us", "bus_us", "joins_us")
        assert step["us"] == pytest.approx(sum(step[part] for part in parts))
        assert step["sessions"] == 3
        assert answer["tokens_per_s"] == pytest.approx(3 * 2.86e6 / step["us"])
        assert [use["resource"] for use in answer["resources"]] == [
            "host RAM",
            "VRAM",
            "PCIe",
            "HBM",
            "compute",
            "step time",
        ]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--mix=1x1M",), "--mix is '1x1M'; allowed: a value with --fleet only"),
            (("--least-rate=3",), "--least-rate is '3'; allowed: a value with --fleet only"),
            (("--fleet", "--mix=1x1M", "--sessions=2"), "--sessions or --tokens is 'given'"),
            (("--fleet", "--host-bytes=1TiB"), "--host-bytes is '1TiB'; allowed: nothing with --fleet: see --node"),
            (("--fleet", "--misses=101"), "--misses is '101'; allowed: 0 to 100"),
            (("--fleet", "--misses=x"), "--misses is 'x'; allowed: a number"),
            (("--fleet", "--misses=nan"), "--misses is 'nan'"),
            (("--fleet", "--least-rate=0"), "--least-rate is '0'"),
            (("--fleet", "--dtype=int4"), "--dtype is 'int4'; allowed: one of fp8, bf16"),
            (("--fleet", "--mix=1x2M"), "tokens is 2097152; allowed: 1 to 1048576"),
            (("--fleet", "--tensor=0"), "--tensor is '0'"),
            (("--fleet", "--hot-rows=100"), "hot rows is 100"),
            (("--fleet", "--nodes=/nowhere"), "file of nodes is '/nowhere'"),
            (("--layers=5",), "--layers is 5; allowed: the end of an index group: 1, 2, 6"),
            (("--experts=3",), "routed experts is 3; allowed: at least the 8"),
        ],
    )
    def test_a_bad_argument_is_named(self, words, message) -> None:
        with pytest.raises(InvalidValue, match=message):
            run(*words)
