"""Trials with the released SGLang, on a CPU: ``python -m tests.engines.sglang_trials NAME…``; without names, all.

In an environment that has SGLang's package and what it imports, and this checkout on PYTHONPATH. A model runs for
``engines`` only; for the others, what SGLang's cache modules import is enough.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import enum
import hashlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compute.block_store import BlockStore
from tests.blackbox.daemon_process import DaemonProcess
from tests.engines import sglang_stand_in
from tests.engines.sglang_engine import (
    DEADLINE_S,
    PAGE,
    Controller,
    fill,
    indices_of,
    llama,
    mha,
    mla,
    publish,
    read,
    sparse,
)
from tests.engines.sglang_world import config, hashes, weights

LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def interface() -> None:
    """What the tests without SGLang stand on is what is released."""
    from sglang.srt.mem_cache import hicache_storage
    from sglang.srt.observability.metrics_collector import StorageMetrics

    released: list[Any] = [getattr(hicache_storage, name, None) for name in vars(sglang_stand_in)]
    pairs = [(ours, theirs) for ours, theirs in zip(vars(sglang_stand_in).values(), released, strict=True) if theirs]
    pairs = [pair for pair in pairs if inspect.isclass(pair[0]) and pair[0] is not pair[1]]
    pairs.append((sglang_stand_in.StorageMetrics, StorageMetrics))
    for ours, theirs in pairs:
        if dataclasses.is_dataclass(ours):
            assert _fields(ours) == _fields(theirs), ours
        elif issubclass(ours, enum.Enum):
            assert {each.name: each.value for each in ours}.items() <= {
                each.name: each.value for each in theirs
            }.items()
        else:
            for name, method in vars(ours).items():
                if inspect.isfunction(method):
                    assert list(inspect.signature(method).parameters) == _parameters(theirs, name), name
            assert ours.__abstractmethods__ == theirs.__abstractmethods__
    _say(f"{len(pairs)} classes of {_version()} are as the stand-in has them")


def page_hashes() -> None:
    """They are a chain of SHA-256 over token ids, the same in every process, begun by adapter and cache salt."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str, storage_namespace_seed

    tokens = list(range(1000, 1000 + 4 * PAGE))
    expected, before = [], b""
    for start in range(0, len(tokens), PAGE):
        page = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + PAGE])
        before = hashlib.sha256(before + page).digest()
        expected.append(before.hex())
    assert get_storage_hash_str(tokens, None, page_size=PAGE) == expected
    seeds = {storage_namespace_seed(*parts) for parts in [(None, None), ("lora", None), (None, "lora"), ("", "lora")]}
    assert len(seeds) == 4
    assert get_storage_hash_str(tokens, storage_namespace_seed("lora", None), page_size=PAGE) != expected
    program = f"from sglang.srt.mem_cache.utils import *; print(get_storage_hash_str({tokens}, None, page_size={PAGE}))"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert done.stdout.strip().endswith(str(expected)), done.stderr
    _say("hashes of pages are the same in every process")


def pools() -> None:
    """Pages of SGLang's own pools come back byte for byte through the storage that its own factory makes."""
    with _node() as (daemon, model):
        publish(model)
        for layout in (*LAYOUTS, "page_head"):
            _check_pool(daemon, layout, mha)
        for layout in LAYOUTS:
            _check_pool(daemon, layout, mla, is_mla_model=True)
        for layout in LAYOUTS[1:]:
            _check_sparse_attention(daemon, layout)
        _check_refused(daemon)
    _say("pages of all layouts and kinds came back")


def controller() -> None:
    """SGLang's cache controller stores and prefetches with its own threads, beside a daemon that is killed."""
    with _node() as (daemon, model):
        publish(model)
        _check_controllers(daemon, lambda: [mha("page_first")])
        _check_controllers(daemon, lambda: list(sparse("page_first_direct")))
        first, second = (Controller(daemon.run_dir, [mha("page_first")]) for _ in range(2))
        tokens = list(range(900, 900 + 10 * PAGE))
        content = first.backup(tokens)
        assert second.prefetch(tokens) == content
        daemon.process.kill()
        daemon.process.wait()
        assert second.prefetch(tokens) == []
        first.backup(tokens[::-1])
        with DaemonProcess(daemon.run_dir, drain_timeout_s="0") as restarted:
            restarted.wait_ready()
            deadline = time.monotonic() + DEADLINE_S
            while (found := second.prefetch(tokens)) != content:
                assert found == []
                assert time.monotonic() < deadline
            assert first.prefetch(tokens[::-1]) == []
            again = first.backup(tokens[::-1])
            assert second.prefetch(tokens[::-1]) == again != content
            for each in (first, second):
                each.close()
            assert restarted.stat().ledger == "balanced"
    _say("the controller stored, prefetched, missed while the daemon was gone, and prefetched again")


def engines() -> None:
    """Engines find what one stored that was killed, beside a daemon that is killed too, and give the same outputs."""
    with _node() as (daemon, model):
        folder = Path(model).parent
        model, other = llama(folder / "llama", 1), llama(folder / "other", 2)
        prompts = [list(range(100, 300)), [*range(100, 260), *range(20)]]
        outputs, stored = _answers(model, daemon, prompts, kill=True)
        assert stored == [0, 0]
        assert _answers(model, daemon, prompts) == (outputs, [192, 16])
        others, stored = _answers(other, daemon, prompts)
        assert stored == [0, 0]
        assert others != outputs
        daemon.process.kill()
        daemon.process.wait()
        assert _answers(model, daemon, prompts) == (outputs, [0, 0])
        with DaemonProcess(daemon.run_dir, drain_timeout_s="0") as restarted:
            restarted.wait_ready()
            assert _answers(model, restarted, prompts) == (outputs, [192, 16])
            _corrupt(restarted, prompts[0])
            changed, stored = _answers(model, restarted, prompts)
            assert stored == [192, 16]
            assert changed[0] != outputs[0]
    _say("engines found each other's prefixes; outputs were equal, and others where the pages were spoilt")


# The parts of a trial


@contextmanager
def _node() -> Iterator[tuple[DaemonProcess, str]]:
    """A daemon, and a folder with a checkpoint."""
    folder = Path(tempfile.mkdtemp(prefix="kvd-sglang-"))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    try:
        with DaemonProcess(folder / "run", drain_timeout_s="0") as daemon:
            yield daemon.wait_ready(), weights(folder / "model")
    finally:
        shutil.rmtree(folder)


def _storage(daemon: DaemonProcess, pool: Any, **facts: Any) -> Any:
    """As SGLang's controller makes it."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    given = HiCacheStorageConfig(**vars(config(daemon.run_dir, **facts)))
    storage = StorageBackendFactory.create_backend("dynamic", given, pool)
    storage.register_mem_pool_host(pool)
    return storage


def _check_pool(daemon: DaemonProcess, layout: str, make: Callable[[str], Any], **facts: Any) -> None:
    keys = hashes(6, f"{layout} {facts}")
    before, after, other = make(layout), make(layout), make(layout)
    writer, reader = _storage(daemon, before, **facts), _storage(daemon, after, **facts)
    stranger = _storage(daemon, other, extra={"model_identity": "another"}, **facts)
    fill(before, range(6), 10)
    assert writer.batch_set_v1(keys, indices_of(before, range(6))) == [True] * 6
    assert reader.batch_exists([*keys, *hashes(1, "none")]) == 6
    untouched = read(after, range(10))
    assert reader.batch_get_v1([*keys, *hashes(1, "none")], indices_of(after, range(10, 17))) == [True] * 6 + [False]
    assert read(after, range(10, 16)) == read(before, range(6))
    assert len(set(read(after, range(10, 16)))) == 6
    assert read(after, range(10)) == untouched
    assert stranger.batch_exists(keys) == 0
    assert stranger.batch_get_v1(keys, indices_of(other, range(6))) == [False] * 6
    stats = reader.get_stats()
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([6], [])
    for storage in (writer, reader, stranger):
        storage.close()


def _check_sparse_attention(daemon: DaemonProcess, layout: str) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    keys = hashes(3, f"sparse {layout}")
    (rows, index), (more_rows, more_index) = sparse(layout), sparse(layout)
    storages = []
    for kv, indexer in ((rows, index), (more_rows, more_index)):
        storage = _storage(daemon, kv, is_mla_model=True)
        storage.register_mem_host_pool_v2(kv, PoolName.KV)
        storage.register_mem_host_pool_v2(indexer, PoolName.INDEXER)
        storage.on_host_pools_registered()
        storages.append(storage)
    writer, reader = storages
    fill(rows, range(3), 20)
    fill(index, range(3), 30)
    writer.batch_set_v1(keys, indices_of(rows, range(3)))
    asked = [PoolTransfer(PoolName.INDEXER, keys=keys)]
    assert reader.batch_exists_v2(keys, asked).kv_hit_pages == 0
    stored = PoolTransfer(PoolName.INDEXER, host_indices=indices_of(index, range(3)), keys=keys)
    assert writer.batch_set_v2([stored]) == {PoolName.INDEXER: [True] * 3}
    assert reader.batch_exists_v2(keys, asked).kv_hit_pages == 3
    wanted = PoolTransfer(PoolName.INDEXER, host_indices=indices_of(more_index, [2, 0, 1]), keys=keys)
    assert reader.batch_get_v2([wanted]) == {PoolName.INDEXER: [True] * 3}
    assert reader.batch_get_v1(keys, indices_of(more_rows, [2, 0, 1])) == [True] * 3
    assert read(more_rows, [2, 0, 1]) == read(rows, range(3))
    assert read(more_index, [2, 0, 1]) == read(index, range(3))
    for storage in storages:
        storage.close()


def _check_refused(daemon: DaemonProcess) -> None:
    """Sparse attention in a layout whose index keys have no addresses, and a setting that is none."""
    rows, index = sparse("layer_first")
    storage = _storage(daemon, rows, is_mla_model=True)
    assert "layout is 'layer_first'" in _refusal(lambda: storage.register_mem_host_pool_v2(index, "indexer"))
    assert "host pool is 'mamba'" in _refusal(lambda: storage.register_mem_host_pool_v2(index, "mamba"))
    assert "extra_config is 'folder'" in _refusal(lambda: _storage(daemon, rows, extra={"folder": "x"}))
    storage.close()


def _check_controllers(daemon: DaemonProcess, make: Callable[[], list[Any]]) -> None:
    """One engine's pages are another's, as far as both read the same."""
    first, second = Controller(daemon.run_dir, make()), Controller(daemon.run_dir, make())
    page = first.page
    tokens, others = list(range(500, 500 + 6 * page)), [7] * page
    content = first.backup(tokens)
    assert first.prefetch(tokens) == content
    assert second.prefetch(tokens + others) == content
    assert second.prefetch(tokens[: 4 * page] + others) == content[:4]
    assert second.prefetch(others * 4) == []
    for each in (first, second):
        each.close()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _answers(
    model: str, daemon: DaemonProcess, prompts: list[list[int]], *, kill: bool = False
) -> tuple[list[list[int]], list[int]]:
    """Of an engine in a process of its own, to each prompt: its output, and how many tokens came from the storage.

    With ``kill`` it is killed, with all of its processes, when its pages are stored.
    """
    command = [sys.executable, "-m", "tests.engines.sglang_on_cpu", model, str(daemon.run_dir), json.dumps(prompts)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            answers: list[dict[str, Any]] = []
            while len(answers) < len(prompts):
                line = process.stdout.readline()
                assert line, "the engine ended"
                if line.startswith("{"):
                    answers.append(json.loads(line))
            if kill:
                deadline = time.monotonic() + DEADLINE_S
                while sum(space.published for space in daemon.stat().blocks) < 28:  # full pages of both prompts
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            else:
                process.stdin.close()
                process.wait(DEADLINE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return [answer["output"] for answer in answers], [answer["from_storage"] for answer in answers]


def _corrupt(daemon: DaemonProcess, prompt: list[int]) -> None:
    """Spoil the stored pages of a prompt, as nobody should."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    keys = [bytes.fromhex(each) for each in get_storage_hash_str(prompt, None, page_size=PAGE)]
    for space in daemon.stat().blocks:
        fingerprint = bytes.fromhex(space.fingerprint)
        nbytes = space.block_bytes
        with (
            BlockStore(daemon.run_dir, fingerprint=fingerprint, block_bytes=nbytes) as store,
            store.pin(keys) as pinned,
        ):
            for address in pinned.addresses:
                ctypes.memset(address, 0x3C, nbytes)


def _refusal(call: Callable[[], object]) -> str:
    """What a call is refused with."""
    from protocol.errors import InvalidValue

    try:
        call()
    except InvalidValue as error:
        return str(error)
    return "nothing"


def _fields(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _members(cls: type[enum.Enum]) -> set[tuple[str, object]]:
    return {(each.name, each.value) for each in cls}


def _parameters(cls: type, name: str) -> list[str]:
    return list(inspect.signature(getattr(cls, name)).parameters)


def _version() -> str:
    from sglang.version import __version__

    return f"SGLang {__version__}"


TRIALS: dict[str, Callable[[], None]] = {
    "interface": interface,
    "hashes": page_hashes,
    "pools": pools,
    "controller": controller,
    "engines": engines,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*TRIALS, []], metavar="NAME", help=", ".join(TRIALS))
    for name in parser.parse_args().names or TRIALS:
        TRIALS[name]()


if __name__ == "__main__":
    main()
