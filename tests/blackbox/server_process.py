"""``kvd-worker serve`` with the small model, as a process."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import openai

from tests.blackbox.daemon_process import clean_environment
from tests.blackbox.scheduling import CONFIG

START_S = 120.0


@dataclass
class Server:
    """A server process, and the log that its standard error goes to."""

    process: subprocess.Popen[bytes]
    log: Path
    run_dir: Path
    url: str = ""

    @classmethod
    def start(cls, run_dir: Path, folder: Path, *arguments: str) -> Server:
        model, log = folder / "config.json", folder / "server.log"
        model.write_text(json.dumps(asdict(CONFIG)))
        command = [sys.executable, "-m", "compute.cli", "serve", "--run-dir", str(run_dir), "--model", str(model)]
        options = ["--model-name", "small", "--listen", "127.0.0.1:0", "--context", "1024", "--hot-rows", "256"]
        environment = clean_environment() | {"OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, *options, "--chunk", "64", *arguments], stderr=output, env=environment
            )
        return cls(process, log, run_dir)

    def ready(self) -> Server:
        deadline = time.monotonic() + START_S
        while not (found := re.search(r"small on (\S+)", self.log.read_text())):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, "no server"
            time.sleep(0.05)
        self.url = found.group(1)
        return self

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def ask(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and parsed body, over a connection of its own."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)
        connection.request(method, path, body, headers or {})
        reply = connection.getresponse()
        data = reply.read()
        connection.close()
        return reply.status, json.loads(data)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)
