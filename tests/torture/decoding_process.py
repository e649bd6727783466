"""Workers that decode and die: a server forks one after the other, so that none pays for starting an interpreter.

Run as ``python -m tests.torture.decoding_process RUN_DIR SETUP``. Each line on standard input, a JSON object with the
fields of `Order`, is one worker. It prints ``pid N``, ``t TOKEN`` for each token as a client would be shown it,
``done``, and, when the worker has ended, ``end STATUS``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import compute.history
from compute.client import Client
from compute.copyback import Copyback
from compute.decode.matrices import WeightType
from compute.decode.step import DecodeStep
from compute.device_cpu import CpuDevice
from compute.histories import HistorySettings
from compute.history import History
from compute.session import HostSession
from compute.worker import Worker
from kvd.run_dir import LOCK_FILE
from protocol.errors import DaemonUnavailable
from protocol.layout import PAGE_TOKENS, Q8G64
from protocol.model import DEMO, ModelConfig
from protocol.session_state import WorkerBlock
from tests.torture.content import content_digest

CONFIG = replace(DEMO, num_hidden_layers=3, hidden_size=64, index_topk=16, index_n_heads=2, n_routed_experts=2)
SEED = 11
RING_PAGES = 3
CHUNK = 96
WORD_POINTS = {64: "token count", 72: "commit sequence", 80: "logical rows"}
"""The words of a worker block by index, and what a kill beside their store is called."""

POINTS = (
    "opened",
    "before extending",
    "after extending",
    "before restoring",
    "step",
    "append",
    "finish",
    "submit",
    "mid copy",
    "copied",
    "amid a record",
    "token ids written",
    *(f"{when} {word}" for word in WORD_POINTS.values() for when in ("before", "after")),
)
"""Where a worker can kill itself."""


@dataclass(frozen=True)
class Setup:
    """What workers compute, and on what; ``daemon`` are settings of the daemon that they need."""

    device: str
    config: ModelConfig
    hot_rows: int
    points: tuple[str, ...]
    dtype: WeightType | None = None
    daemon: dict[str, str] = field(default_factory=dict)


RECORDED = replace(DEMO, index_topk=64)
RECORDED_POINTS = (*(point for point in POINTS if point != "mid copy"), "replaying", "before settling")
"""Of workers that decode by recorded steps; "replaying" is amid several of them."""
SETUPS = {
    "cpu": Setup("cpu", CONFIG, 64, POINTS),
    "cpu recorded": Setup("cpu", RECORDED, 256, RECORDED_POINTS, "bf16", {"vram_capacity": "256MiB"}),
    "cuda": Setup(
        "cuda",
        RECORDED,
        256,
        RECORDED_POINTS,
        "bf16",
        {"device": "cuda", "host_capacity": "512MiB", "host_extent": "32MiB", "vram_capacity": "4GiB"},
    ),
}


@dataclass(frozen=True)
class Order:
    """One worker: decode the session up to ``total`` tokens in all, from a prompt of ``prompt`` tokens, and close it.

    It kills itself when it comes to ``point`` for the ``nth`` time, or its daemon if ``kills_daemon``. Before it closes
    the session, it saves it if ``save``, and cuts ``rewrite`` rows off and decodes them again.
    """

    session: str
    prompt: int
    total: int
    resume: bool = False
    point: str = ""
    nth: int = 1
    daemon_wait_s: float = 0.0
    rewrite: int = 0
    save: bool = False
    kills_daemon: bool = False

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def prompt_tokens(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, CONFIG.vocab_size, (length,), generator=generator).tolist()


class Killer:
    """Ends a process by SIGKILL at one point: ``victim`` gives its pid, this one's by default."""

    def __init__(self, point: str, nth: int, victim: Callable[[], int] = os.getpid) -> None:
        self._point = point
        self._left = nth
        self._victim = victim

    def at(self, point: str) -> None:
        if point and point == self._point:
            self._left -= 1
            if not self._left:
                os.kill(self._victim(), signal.SIGKILL)

    def is_next(self, point: str) -> bool:
        return point == self._point and self._left == 1

    def around(self, owner: object, name: str, *, before: str = "", after: str = "") -> None:
        """Pass points before and after each call of a method."""
        method: Callable[..., Any] = getattr(owner, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            self.at(before)
            result = method(*args, **options)
            self.at(after)
            return result

        setattr(owner, name, wrapped)

    def install(self) -> None:
        """Wrap what a worker does at its points."""
        self.around(HostSession, "__init__", after="opened")
        self.around(Client, "extend_session", before="before extending", after="after extending")
        self.around(Worker, "step", before="step")
        self.around(History, "append", before="append")
        self.around(History, "finish", before="finish")
        self.around(Copyback, "submit", before="submit")
        self.around(Copyback, "_finish", before="copied")
        self.around(DecodeStep, "replay", after="replaying")
        self.around(History, "settle", before="before settling")
        self._wrap_block()
        self._wrap_copies()
        restore = History.restore

        def poisoned(history: History, tokens: int, source: History | None = None) -> None:
            self.at("before restoring")
            poison_uncommitted(history)
            restore(history, tokens, source)

        setattr(History, "restore", poisoned)  # noqa: B010 - a test double

    def _wrap_block(self) -> None:
        create = WorkerBlock.__init__

        def wrapped(block: WorkerBlock, *args: Any) -> None:
            create(block, *args)
            for name, store in (("_words", self._store_word), ("_bytes", self._store_bytes), ("_log", self._store_ids)):
                setattr(block, name, _Stores(getattr(block, name), store))

        setattr(WorkerBlock, "__init__", wrapped)  # noqa: B010 - a test double

    def _store_word(self, view: memoryview, key: Any, value: Any) -> None:
        name = WORD_POINTS.get(key, "")
        self.at(f"before {name}")
        view[key] = value
        self.at(f"after {name}")

    def _store_bytes(self, view: memoryview, key: Any, value: Any) -> None:
        if self.is_next("amid a record"):
            view[key.start : key.start + len(value) // 2] = value[: len(value) // 2]
        self.at("amid a record")
        view[key] = value

    def _store_ids(self, view: memoryview, key: Any, value: Any) -> None:
        view[key] = value
        self.at("token ids written")

    def _wrap_copies(self) -> None:
        start = CpuDevice.start_copy

        def wrapped(device: CpuDevice, destination: torch.Tensor, source: torch.Tensor) -> Any:
            if self.is_next("mid copy"):
                ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.numel() // 2)
            self.at("mid copy")
            return start(device, destination, source)

        setattr(CpuDevice, "start_copy", wrapped)  # noqa: B010 - a test double


class _Stores:
    """A view whose stores go through a function."""

    def __init__(self, view: memoryview, store: Callable[[memoryview, Any, Any], None]) -> None:
        self._view = view
        self._store = store

    def __getitem__(self, key: Any) -> Any:
        return self._view[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._store(self._view, key, value)

    def release(self) -> None:
        self._view.release()


def poison_uncommitted(history: History) -> None:
    """Overwrite whatever the session's pages hold beyond the commit record: it must never be seen."""
    session = history.session
    assert session is not None
    page_format, committed = history.format, session.committed_rows
    keys = page_format.encoding.keys
    for number in range(committed // PAGE_TOKENS, session.page_count):
        page = session.page(number)
        first = max(0, committed - number * PAGE_TOKENS)
        for index, group in enumerate(page_format.groups):
            row = page_format.encoding.rows.row_bytes * (group.end - group.first_layer)
            start = page_format.group_offset(index)
            page[start + first * row : start + PAGE_TOKENS * row] = 0xFF
            start = page_format.keys_offset(index)
            page[start + first * 128 : start + PAGE_TOKENS * 128] = 0xFF
            scales = start + keys.scales_offset
            page[scales + first * 4 : scales + PAGE_TOKENS * 4] = 0xFF
        page[page_format.hidden_offset : page_format.hidden_offset + 4 * page_format.hidden_size] = 0xFF


def decode(run_dir: Path, setup: Setup, order: Order) -> None:
    """What one worker does. Tokens that a worker before it has acknowledged are printed first, as a client's are."""
    Killer(order.point, order.nth, partial(daemon_pid, run_dir) if order.kills_daemon else os.getpid).install()
    compute.history.EXTEND_PAGES = 1
    with Worker(
        run_dir, setup.device, setup.config, Q8G64, seed=SEED, dtype=setup.dtype, daemon_wait_s=order.daemon_wait_s
    ) as worker:
        settings = HistorySettings("offloaded", order.total, setup.hot_rows, RING_PAGES, order.session)
        if order.resume:
            history, tokens = worker.take_over(settings)
        else:
            history, tokens = worker.history(settings), prompt_tokens(order.prompt)
            assert history.session is not None
            history.session.state.append_tokens(tokens)
        for token in tokens[order.prompt :]:
            say(f"t {token}")
        if len(tokens) < order.total:
            hidden = worker.prefill(history, tokens[history.length :], CHUNK)
            for token in worker.decode(history, hidden, order.total - len(tokens)):
                say(f"t {token}")
        if order.save:
            say(f"saved {save(worker, history, run_dir)}")
        if order.rewrite:
            rewrite(worker, history, order.rewrite)
        history.close()
    say("done")


def save(worker: Worker, history: History, run_dir: Path) -> str:
    """Have the session saved, by whichever daemon lives; returns the digest of what was acknowledged."""
    session = history.session
    assert session is not None
    history.barrier()
    while True:
        digest = content_digest(run_dir, session.number)
        try:
            worker.client.save_session(session.name)
        except DaemonUnavailable as error:
            session.attachment.daemon_lost(error)
        else:
            return digest


def daemon_pid(run_dir: Path) -> int:
    return int((run_dir / LOCK_FILE).read_text())


def rewrite(worker: Worker, history: History, rows: int) -> None:
    """Cut the last rows off, and check that the same tokens come again."""
    assert history.session is not None
    state = history.session.state
    tokens = state.tokens()
    history.barrier()
    history.truncate(len(tokens) - rows)
    history.rewind()
    hidden = worker.prefill(history, [tokens[history.length]], CHUNK)
    again = list(worker.decode(history, hidden, rows))
    if again != tokens[-rows:]:
        raise AssertionError(f"{again} came again for {tokens[-rows:]}")


def say(line: str) -> None:
    """One write, so that a kill leaves the line whole or not there."""
    os.write(1, line.encode() + b"\n")


def main() -> None:
    run_dir, setup = Path(sys.argv[1]), SETUPS[sys.argv[2]]
    while line := sys.stdin.readline():
        order = Order(**json.loads(line))
        pid = os.fork()
        if not pid:
            try:
                decode(run_dir, setup, order)
            except BaseException as error:  # noqa: BLE001 - the parent reads what it was
                say(f"error {type(error).__name__}: {error}")
                os._exit(1)
            os._exit(0)
        say(f"pid {pid}")
        _, status = os.waitpid(pid, 0)
        say(f"end {status}")


if __name__ == "__main__":
    main()
