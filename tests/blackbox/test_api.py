"""The stable interface for engines: its examples as they are documented, and what they leave out."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import compute.api
from compute.api import API_VERSION, Node, Session
from protocol.errors import FingerprintMismatch, InvalidValue, SessionBusy
from protocol.model import DEMO
from tests.blackbox.daemon_process import DaemonProcess

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
WEIGHTS = bytes(range(32))

pytestmark = pytest.mark.leaks_per_module


@pytest.fixture(scope="module")
def node_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    sizes: dict[str, str] = {"host_capacity": "64MiB", "host_extent": "16MiB", "vram_capacity": "512MiB"}
    disk = {"disk_state_dir": str(tmp_path_factory.mktemp("state") / "state"), "disk_capacity": "64MiB"}
    with DaemonProcess(tmp_path_factory.mktemp("node") / "run", drain_timeout_s="0", **sizes, **disk) as process:
        yield process.wait_ready().run_dir
        stats = process.stat()
        assert (stats.ledger, stats.sessions) == ("balanced", [])


@pytest.fixture
def node(node_dir: Path) -> Iterator[Node]:
    with Node(node_dir, "cpu") as opened:
        yield opened


def session(node: Node, name: str = "one", **settings: Any) -> Session:
    return node.session(name, DEMO, WEIGHTS, **{"max_tokens": 1024, "hot_rows": 4096} | settings)


def fill(opened: Session, count: int, seed: int = 1) -> torch.Tensor:
    """Append ``count`` rows of random values; returns the latents of the last layer."""
    generator = torch.Generator().manual_seed(seed)
    positions = opened.begin(count)
    latent = torch.empty(0)
    for group, index in enumerate(opened.format.groups):
        opened.append_index_keys(group, positions, torch.randn(count, 128, generator=generator))
        for layer in range(index.first_layer, index.end):
            latent = torch.randn(count, 512, generator=generator)
            opened.append(layer, positions, latent, torch.randn(count, 64, generator=generator))
    opened.finish(positions)
    return latent


@pytest.mark.parametrize(
    ("example", "said"),
    [
        ("bytes_in_bytes_out.py", "the same bytes: True"),
        ("own_attention.py", "outputs equal: True"),
        ("blocks.py", "found before they are published: 0\nfound afterwards: 4 of 6\nthe same bytes: True"),
    ],
)
def test_an_example_does_what_it_says(node_dir: Path, example: str, said: str) -> None:
    command = [sys.executable, str(EXAMPLES / example), str(node_dir)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES.parents[1], env=_environment())
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    if example == "own_attention.py":
        misses = [int(count) for count in re.findall(r"'misses': (\d+)", done.stdout)]
        assert misses[0] == 0 < misses[1], "a row was fetched, or it shows nothing"


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": str(EXAMPLES.parents[1]), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}


def test_a_session_goes_on_under_another_lease(node_dir: Path) -> None:
    with Node(node_dir, "cpu") as node:
        opened = session(node)
        fill(opened, 130)
        opened.log_tokens([7, 8, 9])
        assert opened.commit() == opened.committed == opened.length == 130
        before = opened.read(1, opened.addresses(1, torch.arange(130)))
        with Node(node_dir, "cpu") as other, pytest.raises(SessionBusy):
            session(other)
        opened.close()
    with Node(node_dir, "cpu") as node:
        opened = session(node)
        assert (opened.length, opened.tokens()) == (130, [7, 8, 9])
        assert torch.equal(opened.read(1, opened.addresses(1, torch.arange(130))), before)
        assert opened.save() > 100_000
        opened.truncate(64)
        assert (opened.length, opened.committed) == (64, 64)
        opened.close(keep=False)


def test_resolved_rows_are_the_rows(node: Node) -> None:
    opened = session(node)
    for seed in range(5):
        fill(opened, 200, seed)
    opened.begin(1)
    selection = torch.tensor([[0, 5, 63, 64, 700, 1000, -1, -1]], dtype=torch.int32)
    for group in range(len(opened.format.groups)):
        addresses = opened.resolve(group, selection)
        assert addresses[0, 6:].tolist() == [0, 0]
        expected = opened.read(group, opened.addresses(group, selection[0, :5].long()))
        assert torch.equal(opened.read(group, addresses[0, :5]), expected)
    assert opened.stats()["misses"] > 0
    opened.close(keep=False)


def test_whatever_speaks_dlpack_is_taken(node: Node) -> None:
    opened = session(node)
    positions = opened.begin(3)
    rows = np.random.default_rng(1).standard_normal((3, 576), dtype=np.float32)
    opened.append(0, positions.numpy(), rows[:, :512].copy(), rows[:, 512:].copy())
    read = opened.read(0, opened.addresses(0, np.arange(3)))[:, 0, :512].contiguous().view(torch.int8)
    assert bool((read[:, rows[:, :512].argmax(1)].abs() == 127).any())
    table = np.from_dlpack(opened.page_table)
    assert table.dtype == np.int64
    assert table[0] == opened.page_table[0] != 0
    opened.close(keep=False)


def test_tables_say_where_pages_are(node: Node) -> None:
    opened = session(node, ring_pages=3)
    for seed in range(4):
        fill(opened, 100, seed)
    first, length = opened.window.tolist()
    address, pages = opened.ring
    assert (length, pages, first) == (400, 3, (400 // 64 - 2) * 64)
    offset = opened.format.row_offset(1, 5)
    old, new = opened.addresses(1, torch.tensor([5, 389])).tolist()
    assert old == opened.page_table[0] + offset
    assert new == address + 389 // 64 % 3 * opened.format.stride + opened.format.row_offset(1, 389 % 64)
    opened.close(keep=False)


def test_other_weights_are_refused(node: Node) -> None:
    session(node).close()
    with pytest.raises(FingerprintMismatch):
        node.session("one", DEMO, bytes(32), max_tokens=1024)
    session(node).close(keep=False)


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (lambda node: node.session("x", DEMO, b"short", max_tokens=64), "fingerprint"),
        (lambda node: node.session("x", {"vocab_size": 3}, WEIGHTS, max_tokens=64), "model config"),
        (lambda node: node.session("x", Path("/nowhere"), WEIGHTS, max_tokens=64), "model config"),
        (lambda node: node.session("x", DEMO, WEIGHTS, max_tokens=64, encoding="x"), "encoding"),
        (lambda node: node.session("x", DEMO, WEIGHTS, max_tokens=64, hot_rows=8), "slots|hot"),
    ],
)
def test_bad_sessions(node: Node, act: Any, named: str) -> None:
    with pytest.raises(InvalidValue, match=named):
        act(node)
    assert node.stats().sessions == []


def test_bad_rows(node: Node) -> None:
    opened = session(node, mode="resident")
    positions = opened.begin(2)
    with pytest.raises(InvalidValue, match="encoded rows"):
        opened.append_encoded(0, positions, torch.zeros(2, 7, 656, dtype=torch.uint8))
    with pytest.raises(InvalidValue, match="rows of the history"):
        opened.begin(4000)
    with pytest.raises(InvalidValue, match="resident"):
        opened.save()
    assert opened.committed == 0
    opened.close()


def test_the_document_has_every_name() -> None:
    text = (EXAMPLES.parent / "integrating.md").read_text()
    public = [
        f"{kind.__name__}.{name}"
        for kind in (Node, Session)
        for name, member in inspect.getmembers(kind)
        if not name.startswith("_") and (callable(member) or isinstance(member, property))
    ]
    missing = [name for name in public if f"`{name.split('.')[1]}" not in text]
    assert not missing
    assert API_VERSION in text
    assert re.fullmatch(r"\d+\.\d+\.\d+", API_VERSION)
    assert compute.api.__doc__
