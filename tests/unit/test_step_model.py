"""The step model against the kept results that its figures are from, and in cases that can be worked out by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.cli import main
from benchmarks.plan_check import products_date, steps_of
from benchmarks.report import RESULTS, Report, Row, load
from compute.decode.random_source import RandomSource
from compute.decode.weights import MoeWeights, build_weights, range_shapes
from compute.step import BATCH_SIZES
from kvd.planning.products import Product, WeightType, layer_products, weight_bytes
from kvd.planning.step_model import Batch, Rates, StepModel, measured
from protocol.layout import Q8G64
from protocol.model import DEEPSEEK_V3_2, DEMO, GLM_5_3, ModelConfig

H200 = Rates(measured()["hbm_read"], measured()["bus_read"])
CUT = GLM_5_3.with_experts(8)
KERNELS = {row.case: row.value for name in measured()["kernels"] for row in load(RESULTS / name).rows}
EXPERTS = Product("fp8", 3 * 6144 * 2048, 8, 3 * 6144 * 2048, 8)


def model(config: ModelConfig = CUT, kind: WeightType = "fp8", rates: Rates = H200, **options) -> StepModel:
    return StepModel(config, Q8G64, kind, rates, **options)


def rows_text(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_products_are_those_that_were_measured(kind, rows) -> None:
    """Within 15 %, but for the few smallest, which take less than a launch is said to."""
    found = re.compile(rf"product, .* \[(\d+), (\d+)\], {kind}: {rows_text(rows)}")
    checked = 0
    for case, us in KERNELS.items():
        if (match := found.fullmatch(case)) and us > 9 and "absorbed" not in case:
            time = model()._product(Product(kind, int(match[1]) * int(match[2])), rows)
            assert time.total == pytest.approx(us, rel=0.15), case
            checked += 1
    experts = Product(kind, EXPERTS.values, 8, EXPERTS.expert_values, 8)
    us = KERNELS[f"experts, 8 and the shared one, {kind}: {rows_text(rows)}"]
    assert model()._product(experts, rows).total == pytest.approx(us, rel=0.1)
    assert checked >= 5


def test_products_of_many_rows_take_as_long_as_their_operations() -> None:
    us = KERNELS["experts, 8 and the shared one, fp8: 2,048 rows"]
    time = model()._product(EXPERTS, 2048)
    assert time.total == pytest.approx(us, rel=0.1)
    assert time.compute > 20 * time.hbm


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("history", "tokens"), [("50K", 51_200), ("128K", 131_072), ("1M", 1_048_576)])
def test_scores_and_selection_are_those_that_were_measured(drafts, history, tokens) -> None:
    us = KERNELS[f"index score + top-2,048: {history}, {rows_text(1 + drafts)}"]
    group = model(cached=False)._group(Batch(1, tokens, drafts), 4)
    assert group.total == pytest.approx(us, rel=0.18)


@pytest.mark.parametrize("rows", [1, 4, 16, 64, 256, 1024])
def test_attention_is_what_was_measured(rows) -> None:
    us = KERNELS[f"attention, 64 heads, 2,048 keys: {rows:,} row{'s' if rows > 1 else ''}"]
    assert model()._attention(rows).total == pytest.approx(us, rel=0.01)


def test_attention_of_more_heads_is_that_of_more_rows() -> None:
    us = KERNELS["attention, 128 heads, 2,048 keys: 16 rows"]
    assert model(DEEPSEEK_V3_2)._attention(16).total == pytest.approx(us, rel=0.1)
    assert model(DEEPSEEK_V3_2, tensor=2)._attention(16).total == pytest.approx(model()._attention(16).total)


def test_rates_are_those_of_the_result() -> None:
    assert measured()["hbm_read"] == pytest.approx(1e9 * KERNELS["floor: HBM read"], rel=0.001)
    assert measured()["bus_read"] == pytest.approx(1e9 * KERNELS["floor: copy engine, host to device"], rel=0.001)


def test_a_worker_is_what_was_measured() -> None:
    pairs = load(RESULTS / "pairs-NVIDIA-H200-2026-11-30T041036.json")
    (taken,) = [row.value for row in pairs.rows if row.case == "prompt: VRAM taken at most"]
    weights = weight_bytes(CUT, "fp8", range(CUT.num_hidden_layers), drafts=True) / 2**30
    worker = measured()["worker"]
    assert taken - weights <= worker["vram"] / 2**30 <= taken - weights + 1
    assert worker["decode_batch"] == BATCH_SIZES[-1]
    assert measured()["drafts"]["kept"] == pytest.approx(665 / 1077, abs=0.005)


@pytest.mark.parametrize(("percent", "drafts"), [(0, 0), (1, 0), (5, 0), (0, 3), (1, 3), (5, 3)])
def test_what_a_hot_cache_adds_is_what_was_measured(percent, drafts) -> None:
    """Between nothing but attention, as there: so 1.2 µs is close."""
    step = load(RESULTS / "step-NVIDIA-H200-2026-11-30T041243.json")
    values = {row.case: row.value for row in step.rows}
    added = values[f"51,200 tokens, {1 + drafts} query rows, {percent} % miss: offloaded, branch, added per group"]
    misses = round(2048 * percent / 100) / 2048
    look_up = model()._look_up(Batch(1, 51_200, drafts, misses), 4)
    assert look_up.total == pytest.approx(added, abs=1.2)


def test_steps_of_many_sessions_are_those_that_were_measured() -> None:
    reports = [load(path) for path in RESULTS.glob("sessions-NVIDIA-H200-*.json")]
    reports = [report for report in reports if report.date >= products_date()]
    assert reports
    for report in reports:
        config = GLM_5_3.with_layers(report.settings["layers"]).with_experts(report.settings["experts"])
        for step in steps_of(report):
            expected = model(config, cached=step.cached).step(step.batch).total
            assert expected == pytest.approx(step.us, rel=0.05), step.case


def test_missed_rows_are_those_of_a_run() -> None:
    pairs = load(RESULTS / "pairs-NVIDIA-H200-2026-11-30T041036.json")
    values = {row.case: row.value for row in pairs.rows}
    for drafts in (0, 3):
        misses = values[f"about1, MTP={drafts}: misses, mean of groups"] / 100
        layers = CUT.num_hidden_layers + bool(drafts)
        fetched = model()._missed(Batch(1, 50_135, drafts, misses)) * layers * Q8G64.rows.row_bytes / 2**20
        assert fetched == pytest.approx(values[f"about1, MTP={drafts}: fetched from host RAM"], rel=0.01)


def test_weights_are_those_that_a_step_reads() -> None:
    decode = load(RESULTS / "decode-NVIDIA-H200-2026-11-30T041425.json")
    read = 1e9 * next(row.value for row in decode.rows if row.case.endswith("weights read"))
    embedding = 2 * GLM_5_3.vocab_size * GLM_5_3.hidden_size
    assert weight_bytes(CUT, "fp8", range(78), drafts=False) - embedding == pytest.approx(read, rel=0.001)


@pytest.mark.parametrize("drafts", [False, True])
def test_weights_are_those_of_the_decoder(drafts) -> None:
    """Those of the small model, made for real; norms are not counted."""
    config = replace(DEMO, num_nextn_predict_layers=1)
    source = RandomSource(0, range_shapes(config, 0, 7, drafts), torch.device("cpu"))
    weights = build_weights(config, source, "bf16", torch.device("cpu"), mtp=drafts)
    matrices = [*weights.layers, *([weights.mtp.layer] if weights.mtp else [])]
    assert weights.embedding is not None
    assert weights.head is not None
    total = weights.embedding.nbytes + weights.head.nbytes + (weights.mtp.combine.nbytes if weights.mtp else 0)
    for layer in matrices:
        feed = layer.feed_forward
        parts = [layer.from_hidden, layer.from_latent, layer.absorb_key, layer.absorb_value, layer.output]
        if isinstance(feed, MoeWeights):
            parts += [feed.router, feed.shared.gate_up, feed.shared.down, feed.experts.gate_up, feed.experts.down]
        else:
            parts += [feed.gate_up, feed.down]
        total += sum(part.nbytes for part in parts)
    planned = weight_bytes(config, "bf16", range(7), drafts=drafts)
    assert planned == pytest.approx(total, rel=0.15), "rows between parts of a fused projection are not counted"
    assert planned <= total


def test_stages_have_the_weights_of_the_whole() -> None:
    whole = weight_bytes(CUT, "fp8", range(78), drafts=False)
    parts = [weight_bytes(CUT, "fp8", part, drafts=False) for part in (range(38), range(38, 78))]
    assert sum(parts) == pytest.approx(whole)


def test_a_step_of_two_stages_takes_as_long_as_that_of_one() -> None:
    batch = Batch(4, 100_000, 0, 0.01)
    whole = model().step(batch)
    parts = [model(layers=part).step(batch) for part in (range(38), range(38, 78))]
    assert sum(part.total for part in parts) == pytest.approx(whole.total, rel=0.001)
    assert sum(part.bus_busy for part in parts) == pytest.approx(whole.bus_busy)


def test_more_of_anything_takes_longer() -> None:
    base = model().step(Batch(4, 100_000, 0, 0.01)).total
    for batch in (Batch(5, 100_000, 0, 0.01), Batch(4, 200_000, 0, 0.01), Batch(4, 100_000, 1, 0.01)):
        assert model().step(batch).total > base
    assert model().step(Batch(4, 100_000, 0, 0.3)).total > base
    assert model(cached=False).step(Batch(4, 100_000, 0, 0.3)).total < base
    slow = Rates(H200.hbm_read / 2, H200.bus_read)
    assert model(rates=slow).step(Batch(4, 100_000)).hbm == pytest.approx(2 * model().step(Batch(4, 100_000)).hbm)


def test_ranks_share_weights_and_not_keys() -> None:
    batch = Batch(1, 1_048_576)
    one, four = model().step(batch), model(tensor=4).step(batch)
    keys = 21 * 132 * 1_048_576 / H200.hbm_read * 1e6
    assert four.hbm - keys == pytest.approx((one.hbm - keys) / 4, rel=0.01)
    assert one.joins == 0
    assert four.joins == 78 * 2 * measured()["assumed"]["join_us"]


def test_a_row_takes_few_of_many_experts() -> None:
    experts = layer_products(GLM_5_3, 70, "fp8")[-1]
    one = experts.read_bytes(1)
    assert one == pytest.approx(9 * 3 * 6144 * 2048 * (1 + 4 / 16384))
    assert 15 * one < experts.read_bytes(1e6) < 29 * one  # 256 and the shared one
    assert experts.nbytes == pytest.approx(experts.read_bytes(1e6))


class TestBench:
    def test_the_plan_is_close_to_every_kept_result(self, capsys) -> None:
        assert main(["plan", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        judged = [row for row in report["rows"] if row["met"] is not None]
        assert len(judged) >= 5
        assert all(row["met"] for row in judged)

    def test_other_results_are_refused(self, tmp_path: Path, capsys) -> None:
        other = Report("pairs", "card", {}, [Row("a", 1, "µs")], "abc", "2026-01-01T00:00:00").save(tmp_path)
        assert main(["plan", str(other)]) == 64
        assert "one of decode, pairs, sessions on NVIDIA H200" in capsys.readouterr().err
