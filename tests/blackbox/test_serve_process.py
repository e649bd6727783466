"""``kvd-worker serve`` as a process: signals, sockets, keys, and a daemon that goes away."""

from __future__ import annotations

import http.client
import json
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from compute.cli import main
from compute.serve.places import Places
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.scheduling import CONFIG
from tests.blackbox.server_process import Server
from tests.leaks import orphans_expected


def test_a_session_is_gone_on_with_by_another_server_and_by_generate(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first is ended amid an answer: what it has sent is in the history, as are the rows behind it."""
    path, key = tmp_path / "http.sock", tmp_path / "key"
    key.write_text("secret\n")
    options = ("--listen", f"unix:{path}", "--api-key-file", str(key), "--idle", "0", "--shutdown-timeout", "1")
    for prompt, most in ((b"abc", 900), (b"def", 100)):  # together they have room, however fast it decodes
        server = Server.start(daemon.run_dir, tmp_path, *options).ready()
        assert path.stat().st_mode & 0o7777 == 0o600
        body = {"prompt": list(prompt), "max_tokens": most, "stream": True, "session": "talk", "temperature": 0}
        with ExitStack() as connections:
            refused = connections.enter_context(asked(path, body))
            assert refused.status == 401
            reply = connections.enter_context(asked(path, body, authorization="Bearer secret"))
            assert next(line for line in reply if line.startswith(b"data: {"))
            assert server.end() == 0
        [session] = daemon.stat().sessions
        assert (session.name, session.state) == ("talk", "stored")
        assert session.tokens == session.committed_rows + 1
    capsys.readouterr()
    command = ["generate", "--run-dir", str(daemon.run_dir), "--model", str(tmp_path / "config.json")]
    model = ["--dtype", "bf16", "--mtp", "1", "--hot-rows", "256", "--session", "talk", "--continue", "--tokens", "3"]
    assert main([*command, *model, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["prompt_tokens"] == session.tokens
    assert report["generated_tokens"] == 3


@contextmanager
def asked(path: Path, body: dict[str, Any], **headers: str) -> Iterator[http.client.HTTPResponse]:
    """The reply of the server at the UNIX socket ``path``."""
    connection = http.client.HTTPConnection("localhost", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    with closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
        yield connection.getresponse()


def test_signals_before_the_server_listens_to_them_end_it(
    daemon: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While steps are recorded, and when it is about to serve."""
    model = tmp_path / "config.json"
    model.write_text(json.dumps(asdict(CONFIG)))
    command = ["serve", "--run-dir", str(daemon.run_dir), "--model", str(model), "--listen", "127.0.0.1:0"]
    record, run, seen = Places.record, uvicorn.Server.run, []

    def interrupted_record(places: Places) -> None:
        record(places)
        signal.raise_signal(signal.SIGTERM)

    def interrupted_run(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        signal.raise_signal(signal.SIGTERM)
        assert server.should_exit, "it would serve for ever"
        run(server, sockets)
        seen.append(server)

    unharmed = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("SIGTERM would have killed it"))
    try:
        with monkeypatch.context() as patched:
            patched.setattr(Places, "record", interrupted_record)
            with pytest.raises(SystemExit) as caught:
                main(command)
            assert caught.value.code == 0
        monkeypatch.setattr(uvicorn.Server, "run", interrupted_run)
        assert main(command) == 0
        assert len(seen) == 1
    finally:
        signal.signal(signal.SIGTERM, unharmed)


def test_a_server_whose_daemon_does_not_come_back_says_so_and_ends(run_dir: Path) -> None:
    with orphans_expected(), ExitStack() as stack:
        sizes = {"vram_capacity": "256MiB", "drain_timeout_s": "0"}
        daemon = stack.enter_context(DaemonProcess(run_dir, **sizes)).wait_ready()
        started = Server.start(run_dir, run_dir, "--daemon-timeout", "0")
        stack.callback(started.process.wait)
        stack.callback(started.process.kill)
        started.ready()
        daemon.process.kill()
        daemon.process.wait()
        status, reply = started.ask("POST", "/v1/completions", b'{"prompt": "x", "max_tokens": 3}')
        assert (status, reply["error"]["code"], reply["error"]["type"]) == (503, "daemon_unavailable", "server_error")
        assert started.process.wait(60) == 69
        assert "DaemonUnavailable: the lease's connection" in started.log.read_text()
        stack.enter_context(DaemonProcess(run_dir, **sizes)).wait_ready()  # it ends what that one left
