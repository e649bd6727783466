"""Ranks of an SGLang engine, each with host memory of its own and its storage in a daemon's kvd."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.engines.sglang_stand_in import Context, HiCacheStorageConfig, HostPool, PoolName, installed

PAGES = 32


def hashes(count: int, name: str = "text") -> list[str]:
    """SGLang's hashes of the pages of a text: a chain of SHA-256."""
    chain = [hashlib.sha256(name.encode()).hexdigest()]
    while len(chain) < count:
        chain.append(hashlib.sha256(chain[-1].encode()).hexdigest())
    return chain


def config(run_dir: Path, *, extra: dict[str, Any] | None = None, **facts: Any) -> HiCacheStorageConfig:
    """What SGLang gives the first rank of one, unless ``facts`` say otherwise."""
    given = {
        "backend_name": "kvd",
        "module_path": "compute.integrations.sglang",
        "class_name": "KvdStorage",
        "interface_v1": 1,
        "run_dir": str(run_dir),
        "timeout_s": 20.0,
        "retry_s": 0.05,
        "longest_retry_s": 0.1,
    }
    usual = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": "model",
    }
    return HiCacheStorageConfig(**{**usual, **facts, "extra_config": {**given, **(extra or {})}})


class Rank:
    """A rank whose host memory and storage a test uses as SGLang's cache controller does."""

    def __init__(self, storage: Any, pool: Any) -> None:
        self.storage = storage
        self.pool = pool
        storage.register_mem_pool_host(pool)
        storage.register_mem_host_pool_v2(pool, PoolName.KV)
        storage.on_host_pools_registered()

    def put(self, keys: Sequence[str], pages: Sequence[int], seed: int = 0) -> list[bool]:
        """Fill these pages and store them."""
        for page in pages:
            self.pool.fill(page, seed + page)
        result: list[bool] = self.storage.batch_set_v1(list(keys), self.pool.indices(list(pages)))
        return result

    def get(self, keys: Sequence[str], pages: Sequence[int]) -> list[bool]:
        """Load to these pages."""
        result: list[bool] = self.storage.batch_get_v1(list(keys), self.pool.indices(list(pages)))
        return result

    def found(self, keys: Sequence[str]) -> int:
        count: int = self.storage.batch_exists(list(keys))
        return count

    def read(self, pages: Sequence[int]) -> list[bytes]:
        return [self.pool.read(page) for page in pages]


class Engines:
    """Engines on one node and one model, with the stand-in for SGLang; ``context`` is what SGLang publishes."""

    def __init__(self, run_dir: Path, storage: type, context: Context, stack: ExitStack) -> None:
        self.run_dir = run_dir
        self.context = context
        self._storage = storage
        self._stack = stack

    def rank(
        self,
        layout: str = "page_first",
        *,
        pool: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        **facts: Any,
    ) -> Rank:
        """A rank of an engine; ``extra`` are settings, ``facts`` are of its place in the engine."""
        given = config(self.run_dir, extra=extra, **facts)
        storage = self._storage(given, {})
        self._stack.callback(storage.close)
        return Rank(storage, HostPool(layout, is_mla=given.is_mla_model, pages=PAGES, **(pool or {})))


@contextmanager
def engines(run_dir: Path, folder: Path) -> Iterator[Engines]:
    """Engines of a model whose files are made in ``folder``."""
    weights(folder)
    context = Context(str(folder))
    with ExitStack() as stack, installed(context) as storage:
        yield Engines(run_dir, storage, context, stack)


def weights(folder: Path, content: bytes = b"weights") -> str:
    """A checkpoint in ``folder``; returns its path."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text('{"num_hidden_layers": 3}')
    return str(folder)
