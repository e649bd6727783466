"""What ranks do in tests: each function is run by every rank, and returns what JSON can say."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import compute.decode.decoder
import compute.decode.mtp
import compute.decode.weights
import compute.parallel.stages  # noqa: F401 - imported before ranks are forked
from compute import cli
from compute.device import Copy
from compute.histories import HistorySettings
from compute.history import History
from compute.parallel.grid import Grid, Place
from compute.parallel.splitting import Split
from compute.parallel.worker import ParallelWorker
from compute.worker import Worker
from protocol.errors import KvdError, OsFailure
from protocol.layout import PAGE_TOKENS, Q8G64
from protocol.messages import Saved
from protocol.model import DEMO

CONFIG = replace(DEMO, index_topk=64, index_n_heads=8, n_routed_experts=4, num_hidden_layers=5, index_topk_freq=2)
"""Four index groups: layers 0, 1, 2 with 3, and 4; the last two layers have experts."""
HOT_ROWS = 128
"""Two rows of drafts beside the one that is known would not fit: those that draft have more."""
TIMEOUT_S = 30.0

Say = Callable[[Any], None]


def prompt(length: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def settings(name: str, mode: Any = "offloaded", *, hot_rows: int = HOT_ROWS) -> HistorySettings:
    return HistorySettings(mode, 512, hot_rows, 2, name)


def alone(rank: int, say: Say, *, run_dir: str, length: int, count: int, mtp: int = 0) -> list[int]:
    """The tokens of one process."""
    config = replace(CONFIG, num_nextn_predict_layers=1 if mtp else 0)
    with Worker(Path(run_dir), "cpu", config, Q8G64, seed=3, dtype="bf16", mtp=mtp) as worker:
        history = worker.history(settings("alone", "resident"))
        output = list(worker.decode(history, worker.prefill(history, prompt(length), 64), count))
        history.close()
    return output


@contextmanager
def rank_of(
    rank: int,
    run_dirs: list[str],
    *,
    tensor: int = 1,
    pipeline: int = 1,
    timeout_s: float = TIMEOUT_S,
    mtp: int = 0,
    interface: str = "",
) -> Iterator[ParallelWorker]:
    """The worker of this rank; its daemon is that of ``run_dirs`` which its stage has."""
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    place = Place.of_environment(tensor, pipeline, os.environ)
    config = replace(CONFIG, num_nextn_predict_layers=1 if mtp else 0)
    run_dir = Path(run_dirs[place.stage % len(run_dirs)])
    with (
        Grid(place, device="cpu", timeout_s=timeout_s, start_timeout_s=60.0) as grid,
        ParallelWorker(run_dir, "cpu", config, Q8G64, grid, seed=3, dtype="bf16", mtp=mtp) as worker,
    ):
        yield worker


def written(worker: ParallelWorker, history: History, length: int, count: int) -> list[int]:
    """The tokens after a prompt, all logged."""
    assert history.session is not None
    history.session.state.append_tokens(prompt(length))
    return list(worker.decode(history, worker.prefill(history, prompt(length), 64), count))


def refusal(act: Callable[[], Any]) -> str:
    """The code of the error that ``act`` ends on."""
    try:
        act()
    except KvdError as error:
        return f"{error.code}: {error.message}"
    return "none"


def decodes(
    rank: int, say: Say, *, run_dirs: list[str], length: int, count: int, resident: bool = False, **shape: Any
) -> dict[str, Any]:
    """Offloaded, and if asked resident."""
    plain = None
    with rank_of(rank, run_dirs, **shape) as worker:
        if resident:
            first = worker.history(settings("resident", "resident"))
            plain = list(worker.decode(first, worker.prefill(first, prompt(length), 64), count))
            worker.end(first)
        history = worker.history(settings("offloaded", hot_rows=4 * HOT_ROWS if shape.get("mtp") else HOT_ROWS))
        output = written(worker, history, length, count)
        worker.barrier(history)
        assert history.session is not None
        committed, counters = history.session.committed_rows, history.counters()
        host = next(tier for tier in worker.stat().tiers if tier.tier == "host")
        pages = sum(purpose.requested for purpose in host.purposes if purpose.purpose == "pages")
        layers = worker.format.layer_count
        worker.end(history)
    return {
        "resident": plain,
        "offloaded": output,
        "committed": committed,
        "counters": counters,
        "pages": pages,
        "layers": layers,
    }


def lives(rank: int, say: Say, *, run_dirs: list[str], length: int, count: int, **shape: Any) -> dict[str, Any]:
    """A session's whole life. Each of the outputs is to be that of one process; half of it comes after each step."""
    half, outputs = count // 2, {}
    with rank_of(rank, run_dirs, **shape) as worker:

        def rest(history: History, tokens: list[int]) -> list[int]:
            hidden = worker.prefill(history, tokens[history.length :], 64)
            return tokens[length:] + list(worker.decode(history, hidden, length + count - len(tokens)))

        history = worker.history(settings("life"))
        begun = written(worker, history, length, half)
        worker.barrier(history)
        fork = worker.fork(history, settings("fork"))
        worker.end(history, keep=True)
        outputs["forked"] = rest(fork, prompt(length) + begun)
        worker.end(fork)
        history, tokens = worker.take_over(settings("life"))
        saved = worker.save(history)
        outputs["taken over"] = rest(history, tokens)
        worker.end(history)
        worker.restore("life")
        history, tokens = worker.take_over(settings("life"))
        outputs["restored"] = rest(history, tokens)
        history.truncate(70)
        outputs["truncated"] = rest(history, prompt(length))
        worker.end(history)
        rows = [each.rows for each in saved]
    return {"outputs": outputs, "saved rows": rows}


def refused(rank: int, say: Say, *, run_dirs: list[str], **shape: Any) -> dict[str, str]:
    """What fails on one stage fails on all, and leaves nothing."""
    with rank_of(rank, run_dirs, **shape) as worker:
        found = {
            "create": refusal(lambda: worker.history(settings("taken"))),
            "open": refusal(lambda: worker.take_over(settings("nobody"))),
            "restore": refusal(lambda: worker.restore("nobody")),
            "prefix": refusal(lambda: worker.fork_prefix(settings("prefix"), prompt(100))),
            "resident copy": refusal(lambda: worker.resident_copy(settings("nobody"))),
        }
        history = worker.history(settings("full"))
        found["store"] = refusal(lambda: worker.store(history, settings("stored"), [], torch.empty(0)))
        found["fork"] = refusal(lambda: worker.fork(history, settings("taken")))
        found["extend"] = refusal(lambda: worker.prefill(history, prompt(64), 64))
        worker.end(history)
    return found


def differs(rank: int, say: Say, *, run_dirs: list[str]) -> None:
    """Ranks that were started with different models."""
    place = Place.of_environment(1, 2, os.environ)
    with Grid(place, device="cpu", timeout_s=TIMEOUT_S, start_timeout_s=60.0) as grid:
        ParallelWorker(Path(run_dirs[rank]), "cpu", CONFIG, Q8G64, grid, seed=rank, dtype="bf16").close()


def begins(rank: int, say: Say, *, run_dirs: list[str], name: str, length: int, count: int, **shape: Any) -> None:
    """Decodes and says how far it is."""
    with rank_of(rank, run_dirs, **shape) as worker:
        history = worker.history(settings(name))
        assert history.session is not None
        history.session.state.append_tokens(prompt(length))
        for number, _ in enumerate(worker.decode(history, worker.prefill(history, prompt(length), 64), count)):
            say(number)
        worker.end(history, keep=True)


def begins_and_saves(
    rank: int,
    say: Say,
    *,
    run_dirs: list[str],
    name: str,
    length: int,
    count: int,
    dies: int = -1,
    until: str = "",
    **shape: Any,
) -> None:
    """Saves, decodes on, and saves again, once there is a file ``until``; rank ``dies`` dies before it has begun."""
    with rank_of(rank, run_dirs, **shape) as worker:
        history = worker.history(settings(name))
        output = written(worker, history, length, count)
        worker.save(history)
        hidden = worker.step(history, output[-1:], cached=True)[-1]
        list(worker.decode(history, hidden, count))
        save = worker.client.save_session

        def slow(name: str, **options: Any) -> Saved:
            say("saving")
            while until and not Path(until).exists():
                time.sleep(0.01)
            if rank == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            return save(name, **options)

        worker.client.save_session = slow  # type: ignore[method-assign]
        worker.save(history)


def goes_on(
    rank: int,
    say: Say,
    *,
    run_dirs: list[str],
    name: str,
    length: int,
    count: int,
    restored: bool = False,
    **shape: Any,
) -> dict[str, Any]:
    """Takes over, and decodes to ``count`` tokens behind the prompt."""
    with rank_of(rank, run_dirs, **shape) as worker:
        if restored:
            worker.restore(name)
        history, tokens = worker.take_over(settings(name))
        rows = history.length
        hidden = worker.prefill(history, tokens[rows:], 64)
        rest = list(worker.decode(history, hidden, max(length + count - len(tokens), 1)))
        worker.end(history)
    return {"rows": rows, "logged": len(tokens), "output": (tokens[length:] + rest)[:count]}


class LateCopy:
    """A copy that is done only for those who wait for it."""

    def __init__(self, copy: Copy) -> None:
        self.wait = copy.wait

    def done(self) -> bool:
        return False


def cannot_commit(rank: int, say: Say, *, run_dirs: list[str], **shape: Any) -> None:
    """Rank 0 owns a session whose last page cannot be copied."""
    with rank_of(rank, run_dirs, **shape) as worker:
        history = worker.history(settings("stuck"))
        written(worker, history, 70, 2)
        if rank == 0:

            def fail(home: Tensor, ring_page: Tensor) -> None:
                raise OsFailure("the copy failed")

            history.copyback.copy_partial = fail  # type: ignore[method-assign]
        worker.barrier(history)


def fresh(
    rank: int,
    say: Say,
    *,
    run_dirs: list[str],
    name: str,
    length: int,
    count: int,
    late: bool = False,
    **shape: Any,
) -> list[int]:
    """A new session's tokens; with ``late``, no copy of a page is done before it is waited for."""
    with rank_of(rank, run_dirs, **shape) as worker:
        if late:
            start = worker.device.start_copy
            worker.device.start_copy = lambda *ends: LateCopy(start(*ends))  # type: ignore[method-assign]
        history = worker.history(settings(name))
        output = written(worker, history, length, count)
        worker.end(history)
    return output


def commands(rank: int, say: Say, *, arguments: list[list[str]]) -> Any:
    """What ``kvd-worker`` reports, or None where it does not, with the ``arguments`` of this rank."""
    parsed = cli.parser().parse_args([*arguments[rank], "--json"])
    with redirect_stdout(StringIO()) as printed, redirect_stderr(StringIO()):
        parsed.run(parsed)
    return json.loads(printed.getvalue() or "null")


def asks_until_refused(rank: int, say: Say, *, run_dirs: list[str], **shape: Any) -> None:
    """Says that it has a session, and asks its daemon, which goes away."""
    with rank_of(rank, run_dirs, **shape) as worker:
        worker.history(settings("asks"))
        say("begun")
        while True:
            worker.team.together(worker.client.stat)


def copies(rank: int, say: Say, *, run_dirs: list[str], length: int, count: int, **shape: Any) -> dict[str, Any]:
    """What is decoded, resident and offloaded, and digests of what is selected and of the rows."""
    with rank_of(rank, run_dirs, **shape) as worker:
        resident = worker.history(settings("resident", "resident"))
        plain = list(worker.decode(resident, worker.prefill(resident, prompt(length), 64), count))
        worker.end(resident)
        history = worker.history(settings("copies"))
        selections, select = hashlib.sha256(), history.kernels.select

        def observed(*arguments: Any) -> Tensor:
            selection = select(*arguments)
            selections.update(selection.numpy().tobytes())
            return selection

        history.kernels.select = observed  # type: ignore[method-assign, assignment]
        output = written(worker, history, length, count)
        worker.barrier(history)
        rows = hashlib.sha256()
        for page in range(-(-history.length // PAGE_TOKENS)):
            rows.update(history.page(page)[: worker.format.hidden_offset].numpy().tobytes())
        stats = worker.stat()
        host = next(tier for tier in stats.tiers if tier.tier == "host")
        counters = history.counters()
        worker.end(history)
    return {
        "resident": plain,
        "offloaded": output,
        "selections": selections.hexdigest(),
        "rows": rows.hexdigest(),
        "copybacks": counters.pop("copybacks"),
        "counters": counters,
        "sessions": len(stats.sessions),
        "host bytes": host.requested,
    }


def adds(rank: int, say: Say) -> dict[str, Any]:
    """The sum of all ranks' parts, and the logits side by side."""
    rows, shards = 130, int(os.environ["WORLD_SIZE"])
    config = replace(CONFIG, vocab_size=6, hidden_size=256)
    parts = [torch.randn(rows, 256, generator=torch.Generator().manual_seed(number)) for number in range(shards)]
    expected = torch.arange(rows * 6.0).view(rows, 6)
    at_a_time = []

    def product(some: slice, own: Tensor) -> None:
        own.copy_(expected[some, 2 * rank : 2 * rank + 2])
        at_a_time.append(len(own))

    with Grid(Place.of_environment(shards, 1, os.environ), device="cpu", timeout_s=TIMEOUT_S) as grid:
        split = Split(grid.shards, config, torch.device("cpu")).for_rows(rows)
        whole = parts[rank].clone()
        split.add(whole)
        single = parts[rank][3:4].clone()
        split.add(single)
        joined = torch.zeros(rows, 6)
        split.logits(joined, product)
    return {
        "in order": torch.equal(whole, (parts[0] + parts[1]) + parts[2]),
        "rows alone": torch.equal(single[0], whole[3]),
        "logits": torch.equal(joined, expected),
        "rows at a time": at_a_time,
    }


def scratch(rank: int, say: Say) -> list[int]:
    """Elements that are kept for passes of few rows and of many, of a model whose sums are of one column."""
    config = replace(CONFIG, hidden_size=1)
    with Grid(Place.of_environment(2, 1, os.environ), device="cpu", timeout_s=TIMEOUT_S) as grid:
        split = Split(grid.shards, config, torch.device("cpu"))
        kept = [[one for one in vars(split.for_rows(rows)).values() if isinstance(one, Tensor)] for rows in (64, 4096)]
    return [sum(one.numel() for one in found) - 2 * rows for found, rows in zip(kept, (64, 4096), strict=True)]
