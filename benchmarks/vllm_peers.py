"""What else keeps prefixes for vLLM: its own connectors, and LMCache, each with what it needs beside the engine.

Which of them can be used with a CPU is not written here. Each is started, and what it says then is what is reported.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.vllm_engine import SHARED_MEMORY, EngineError, Setup

HOST_BYTES = 1 << 30
"""What each may take of the RAM, kvd too."""
START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Peer:
    """One that kvd is compared with. ``beside`` runs for as long as its engines, one after the other, do."""

    name: str
    setup: Setup
    beside: AbstractContextManager[object] = field(default_factory=nullcontext)


def peers(setup: Setup, folder: Path) -> list[Peer]:
    """All of them, with the engine's settings of ``setup``; files are kept in ``folder``."""

    def alone(name: str, connector: str, **settings: Any) -> Peer:
        return Peer(name, _with(setup, connector, settings))

    files = [{"type": "fs", "root_dir": str(folder / "tier")}]
    disk = {"lmcache.local_disk": f"file://{folder}/disk/", "lmcache.max_local_disk_size": 4.0}
    in_engine = _with(setup, "LMCacheConnectorV1", disk | {"lmcache.max_local_cpu_size": HOST_BYTES / (1 << 30)})
    in_engine.check = _check_lmcache
    example = alone("example connector", "ExampleConnector", shared_storage_path=str(folder))
    example.setup.chunk = None  # It takes whole prompts only: with chunks it ends in an error of its own.
    tiers = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": files}
    return [
        example,
        alone("vLLM's offloading", "OffloadingConnector", cpu_bytes_to_use=HOST_BYTES),
        alone("vLLM's offloading, to files", "OffloadingConnector", cpu_bytes_to_use=HOST_BYTES, **tiers),
        alone("vLLM's simple offloading", "SimpleCPUOffloadConnector", cpu_bytes_to_use=HOST_BYTES),
        Peer("LMCache in the engine, on disk", in_engine),
        _lmcache("LMCache, the engine copies", setup, folder, "engine_driven"),
        _lmcache("LMCache, its server copies", setup, folder, "lmcache_driven"),
    ]


def _with(setup: Setup, connector: str, settings: dict[str, Any]) -> Setup:
    transfer = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": settings}
    return replace(setup, transfer=transfer)


def _check_lmcache() -> None:
    """LMCache goes on without itself where it cannot start, with a wait of seconds for each request."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    manager = get_kv_transfer_group()._lmcache_engine._manager
    if not manager.is_healthy():
        raise EngineError(manager._init_failed_reason)


def _lmcache(name: str, setup: Setup, folder: Path, mode: str) -> Peer:
    server = LmcacheServer(folder / f"lmcache-{mode}.log", mode)
    settings = {
        "lmcache.mp.host": "tcp://127.0.0.1",
        "lmcache.mp.port": server.port,
        "lmcache.mp.mp_transfer_mode": mode,
    }
    return Peer(name, _with(setup, "LMCacheMPConnector", settings), server)


class LmcacheServer:
    """LMCache's server: a process that outlives the engines. Its memory is taken at the start, its metrics are off."""

    def __init__(self, log: Path, mode: str) -> None:
        self.port, self._http_port = _free_port(), _free_port()
        self._log = log
        self._pool = f"kvd-bench-{os.getpid()}" if mode == "engine_driven" else ""
        self._options = {
            "host": "127.0.0.1",
            "port": self.port,
            "http-port": self._http_port,
            "l1-size-gb": HOST_BYTES / (1 << 30),
            "eviction-policy": "LRU",
            "supported-transfer-mode": mode,
            "shm-name": self._pool,
        }

    def __enter__(self) -> LmcacheServer:
        options = [f"--{name}={value}" for name, value in self._options.items()]
        command = [sys.executable, "-m", "lmcache.cli.main", "server", "--no-l1-use-lazy", "--disable-observability"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
        try:
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _wait(self) -> None:
        """Until it answers, which it does over HTTP last."""
        give_up = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._http_port), 1).close()
                return
            except ConnectionRefusedError:
                time.sleep(0.1)
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise EngineError(self._log.read_text())

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._pool:
            (SHARED_MEMORY / f"lmcache_l1_pool_{self._pool}").unlink(missing_ok=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port
