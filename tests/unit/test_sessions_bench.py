"""``kvd-bench sessions``: what it draws, puts in the place of selections and refuses; and all of it, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cli import main
from benchmarks.drawn_selections import _choose_kernel
from benchmarks.locality import Locality
from benchmarks.plan_check import steps_of
from benchmarks.random_pages import randomise
from benchmarks.report import Report, Row
from compute.kernels import reference
from protocol.errors import InvalidValue
from protocol.layout import Q8G64
from protocol.model import DEMO
from tests.kernels.pages import DEVICE

CPU = torch.device("cpu")
CONFIG = replace(DEMO, index_topk=32, hidden_size=64, index_n_heads=8, n_routed_experts=4, num_hidden_layers=3)
CONFIG = replace(CONFIG, vocab_size=4096)


def simulated_misses(selections: torch.Tensor, cached: torch.Tensor) -> list[int]:
    """Of each step, of a cache whose cursor takes one slot after the other, as it does where none is stamped."""
    slots = cached.tolist()
    held, cursor, misses = set(slots), 0, []
    for selection in selections.tolist():
        missed = [position for position in selection if position not in held]
        stamped = set(selection)
        for position in missed:
            while slots[cursor] in stamped:
                cursor = (cursor + 1) % len(slots)
            held.discard(slots[cursor])
            held.add(position)
            slots[cursor] = position
            cursor = (cursor + 1) % len(slots)
        misses.append(len(missed))
    return misses


@pytest.mark.parametrize("percent", [0, 5, 25, 100])
def test_drawn_selections_miss_what_they_are_said_to(percent) -> None:
    locality = Locality(groups=2, topk=64, slots=512, working_set=256, steps=30)
    selections, cached = locality.draw(3000, 1, percent, CPU)
    assert selections.shape == (30, 2, 1, 64)
    assert selections.dtype == torch.int32
    assert bool((selections.diff(dim=-1) > 0).all()), "ascending, each once"
    for group in range(2):
        misses = simulated_misses(selections[:, group, 0], cached[group])
        # A slot of the working set that a step has selected is passed over, so a few more may be missed.
        assert abs(sum(misses) / 30 - round(0.64 * percent)) < 0.5


def test_query_rows_share_most_of_what_is_drawn() -> None:
    locality = Locality(groups=1, topk=64, slots=512, working_set=400, steps=2)
    selections, _ = locality.draw(3000, 4, 10, CPU)
    rows = [set(row.tolist()) for row in selections[0, 0]]
    assert len(set.intersection(*rows)) == round(0.9 * 64)


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(InvalidValue, match="positions to select from is 1000; allowed: at least 1176"):
        Locality(groups=1, topk=64, slots=512, working_set=256, steps=20).draw(1000, 1, 72, CPU)
    with pytest.raises(InvalidValue, match="working set is 1024; allowed: 64 to 512, the hot rows"):
        Locality(groups=1, topk=64, slots=512, working_set=1024, steps=1)


def test_the_kernel_puts_drawn_selections_into_their_places() -> None:
    """By session and position; an idle place and a row that nothing was drawn for are left as they are."""
    sessions, steps, groups, k = 3, 4, 2, 1500
    drawn = torch.arange(sessions * steps * groups * k, dtype=torch.int32, device=DEVICE)
    drawn = drawn.view(sessions, steps, groups, k)
    first = torch.tensor([100, 200, 300], device=DEVICE)
    address = torch.tensor([drawn.data_ptr(), first.data_ptr(), steps, groups], device=DEVICE)
    places = torch.tensor([2, 0, -1, 1, 0], device=DEVICE)
    positions = torch.tensor([[301], [103], [5], [-1], [104]], device=DEVICE)
    selection = torch.full((5, 1, k), -7, dtype=torch.int32, device=DEVICE)
    _choose_kernel[(2, 5)](address, places, positions, selection, 1, k, OVERLAPPED=False)
    assert torch.equal(selection[0, 0], drawn[2, 1, 1])
    assert torch.equal(selection[1, 0], drawn[0, 3, 1])
    assert bool((selection[2:] == -7).all())


def test_random_pages_hold_finite_rows_that_differ() -> None:
    page_format = CONFIG.page_format(Q8G64)
    pages = torch.zeros((3, page_format.stride), dtype=torch.uint8)
    randomise(pages, page_format, torch.Generator().manual_seed(1))
    again = torch.zeros_like(pages)
    randomise(again, page_format, torch.Generator().manual_seed(1))
    assert torch.equal(pages, again)
    rows = pages[:, : page_format.rows_bytes].reshape(-1, Q8G64.rows.row_bytes)
    latent, rope = reference.decode_rows(rows, Q8G64.rows)
    assert bool(torch.isfinite(latent).all())
    assert bool(torch.isfinite(rope).all())
    assert 0.1 < float(latent.abs().mean()) < 2
    assert len(torch.unique(latent[:, :8], dim=0)) == len(rows)
    hidden = pages[:, page_format.hidden_offset :][:, : 4 * page_format.hidden_size].view(torch.float32)
    assert hidden.shape == (3, 64)
    assert bool(torch.isfinite(hidden).all())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--sessions 17", "--sessions is 17; allowed: 1 to 16"),
        ("--apart --tensor-parallel 2", "ranks where modes are measured one after the other is 2; allowed: 1"),
        ("--steps 1", "--steps is 1; allowed: 2 to 4096"),
        ("--tokens 100", "--tokens is 100; allowed: a multiple of 64, at least 384"),
        ("--layers 5", "--layers is 5; allowed: the end of an index group"),
        ("--misses 101", "--misses is [101.0]; allowed: 0 to 100"),
        ("--working-set 40000", "working set is 40000; allowed: 2048 to 32768, the hot rows"),
        ("--experts 7", "routed experts is 7"),
        ("--only nothing", "--only is 'nothing'"),
    ],
)
def test_what_cannot_run_is_refused_at_once(options: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sessions", "--device", "cpu", *options.split()]) == 64
    assert said in capfd.readouterr().err


def test_the_plan_is_compared_with_its_steps() -> None:
    name = "15 sessions of 1,048,576 tokens, 5 % miss"
    rows = [
        Row(f"{name}: misses, measured", 4.9, "% of selections"),
        Row(f"{name}: resident, a step", 5000, "µs"),
        Row(f"{name}: offloaded, a step", 5200, "µs"),
        Row(f"{name}: offloaded, a step as kvd plan expects it", 5100, "µs"),
    ]
    settings = {"layers": 10, "experts": 8, "dtype": "fp8", "rows at the start": [1_000_000, 1_000_064]}
    resident, offloaded = steps_of(Report("sessions", "NVIDIA H200", settings, rows))
    assert (resident.us, resident.cached, offloaded.us, offloaded.cached) == (5000, False, 5200, True)
    assert offloaded.batch.sessions == 15
    assert offloaded.batch.tokens == 1_000_032
    assert offloaded.batch.misses == pytest.approx(0.049)


def bench(tmp_path: Path, options: str, *, sessions: int = 2, launcher: str = "") -> dict[str, Any]:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(asdict(CONFIG)))
    command = f"--device cpu --model {model} --experts 4 --dtype bf16 --hot-rows 96 --working-set 64 --json"
    command += f" --sessions {sessions} {options}"
    done = subprocess.run(
        [sys.executable, "-m", *launcher.split(), "benchmarks.cli", "sessions", *command.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    written: dict[str, Any] = json.loads(done.stdout)
    return written


def values_of(written: dict[str, Any]) -> dict[str, float]:
    return {row["case"]: row["value"] for row in written["rows"]}


@pytest.mark.slow
def test_drawn_sessions_on_a_cpu(tmp_path: Path) -> None:
    """In turns, at two rates of misses: each session as it is alone, and memory as planned."""
    written = bench(tmp_path, "--tokens 512 --steps 3 --pairs 2 --misses 0 10")
    values, met = values_of(written), {row["case"]: row["met"] for row in written["rows"]}
    assert written["settings"]["order"] == "passes of both modes in turns"
    assert written["settings"]["selections"].startswith("synthetic")
    for percent in (0, 10):
        name = f"2 sessions of 512 tokens, {percent} % miss"
        assert values[f"{name}: outputs equal to the session resident and alone"] == 2
        assert values[f"{name}: outputs equal to the resident batch, all passes"] == 2
        assert values[f"{name}: distinct tokens"] > 8
    assert values["2 sessions of 512 tokens, 0 % miss: misses, measured"] == 0
    assert values["2 sessions of 512 tokens, 10 % miss: misses, measured"] == pytest.approx(100 * 3 / 32)
    assert values["2 sessions of 512 tokens, 10 % miss: one cached row of one session, corrupted, change it alone"] == 1
    fetched = 2 * 3 * sum(656 * group.layers for group in CONFIG.index_groups()) / 2**20
    assert values["2 sessions of 512 tokens, 10 % miss: fetched from host RAM"] == pytest.approx(fetched)
    assert {case for case, is_met in met.items() if case.startswith("memory") and is_met is False} == set()


@pytest.mark.slow
def test_real_sessions_on_a_cpu(tmp_path: Path) -> None:
    """Prompts of two lengths are read; a batch of both, offloaded, and each alone: the same tokens, bit for bit."""
    written = bench(
        tmp_path, "--tokens 384 --steps 4 --pairs 1 --selections real --chunk 64 --ring-pages 2 --alone-only"
    )
    name, values = "2 sessions of 384 tokens, real selections", values_of(written)
    assert written["settings"]["rows at the start"] == [306, 230]
    assert written["settings"]["order"] == "one mode after the other"
    assert values[f"{name}: outputs equal to the session resident and alone"] == 2
    assert values[f"{name}: misses, measured"] > 0
    assert values[f"{name}: all cached rows of a group of one session, corrupted, change it alone"] == 1
    assert f"{name}, pass 1: resident" not in values


@pytest.mark.slow
def test_a_session_on_two_ranks(tmp_path: Path) -> None:
    """One host copy of the pages, a hot cache on each rank; rank 0 alone reports."""
    written = bench(
        tmp_path,
        "--tokens 512 --steps 3 --pairs 1 --misses 10 --tensor-parallel 2",
        sessions=1,
        launcher="torch.distributed.run --standalone --nproc-per-node 2 -m",
    )
    name, values = "1 sessions of 512 tokens, 10 % miss", values_of(written)
    assert written["settings"]["ranks"] == 2
    for what in (
        "outputs equal to the session resident and alone",
        "outputs equal to the resident batch, all passes",
        "all ranks have the same outputs",
        "one cached row of one session, corrupted, change it alone",
    ):
        assert values[f"{name}: {what}"] == 1
    assert {row["case"] for row in written["rows"] if row["case"].startswith("memory") and row["met"] is False} == set()
    assert f"{name}: offloaded, a step as kvd plan expects it" not in values
