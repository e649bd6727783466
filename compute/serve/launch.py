"""The server around a worker, from its arguments to its exit status."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn

from compute.model_arguments import chunk_of, hot_rows_of, model_options, ring_pages_of
from compute.parallel.command import is_parallel, open_grid, open_worker
from compute.parallel.grid import Place
from compute.serve.http import Service, application
from compute.serve.jobs import SchedulerSettings
from compute.serve.scheduler import Scheduler
from compute.serve.text import CheckpointText, NumberText, Text, text_of
from compute.serve.warm_up import warm_up
from compute.worker import Worker
from protocol.errors import EXIT_INTERNAL, InvalidValue, KvdError, OsFailure
from protocol.layout import encoding_named
from protocol.model import PRESETS, ModelConfig, model_named
from protocol.unix_socket import remove_stale

DEPTHS = (0, 1, 3)
"""Drafts to choose among where nobody says how many."""


def serve(arguments: argparse.Namespace) -> int:
    """Run ``kvd-worker serve`` until a signal, or until it cannot go on."""
    with _at_sigterm(_end):
        return _serve(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    config = model_named(arguments.model)
    key = _api_key(arguments.api_key_file)
    text = _text(arguments, config.vocab_size)
    settings = _settings(arguments, config)
    for name, seconds in (("shutdown", arguments.shutdown_timeout), ("daemon", arguments.daemon_timeout)):
        if not seconds >= 0:
            raise InvalidValue(f"--{name}-timeout", seconds, "at least 0")
    follows = is_parallel(arguments) and Place.of_environment(arguments.tensor_parallel, 1, os.environ).rank > 0
    if follows:
        with _deaf(), _worker(arguments, config, settings) as worker:
            scheduler = Scheduler(worker, settings)
            warm_up(worker, scheduler)
            scheduler.run()
        return 0
    listening = _listen(arguments.listen)
    with listening, _worker(arguments, config, settings) as worker:
        scheduler = Scheduler(worker, settings)
        warm_up(worker, scheduler)
        name = arguments.model_name or Path(arguments.model).name
        service = Service(scheduler, text, name, settings.context, worker.fingerprint.hex()[:16], key)
        server = uvicorn.Server(
            uvicorn.Config(
                application(service),
                log_level="warning",
                lifespan="off",
                timeout_graceful_shutdown=arguments.shutdown_timeout,
                server_header=False,
            )
        )
        runner = _Runner(scheduler, service, server)
        # The server listens to signals once it runs. One that comes before ends it too, and it raises those that ended
        # it again when it has.
        with _at_sigterm(server.handle_exit):
            sys.stderr.write(f"kvd-worker: {name} on {_address(listening)}\n")
            runner.start()
            try:
                server.run(sockets=[listening])
            finally:
                scheduler.stop()
                runner.join()
        return runner.exit_status


@contextmanager
def _worker(arguments: argparse.Namespace, config: ModelConfig, settings: SchedulerSettings) -> Iterator[Worker]:
    """This process's, which may be one of several ranks."""
    encoding = encoding_named(arguments.encoding)
    options = model_options(arguments, rows=settings.chunk, mtp=max(settings.depths))
    if is_parallel(arguments):
        with (
            open_grid(arguments, {"settings": settings}) as grid,
            open_worker(arguments, config, encoding, grid, **options) as ranked,
        ):
            yield ranked
        return
    with Worker(
        arguments.run_dir,
        arguments.device,
        config,
        encoding,
        dtype=arguments.dtype or "bf16",
        daemon_wait_s=arguments.daemon_timeout,
        **options,
    ) as worker:
        yield worker


@contextmanager
def _deaf() -> Iterator[None]:
    """What ends a server ends all of its ranks' processes: those that follow wait until rank 0 says so."""
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@contextmanager
def _at_sigterm(act: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, act)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(_: int, __: FrameType | None) -> None:
    """Nothing is served yet: let go of what there is."""
    raise SystemExit(0)


class _Runner(threading.Thread):
    """The scheduler's thread. When the scheduler cannot go on, the server ends too."""

    def __init__(self, scheduler: Scheduler, service: Service, server: uvicorn.Server) -> None:
        super().__init__(name="kvd-scheduler")
        self._scheduler, self._service, self._server = scheduler, service, server
        self.exit_status = 0

    def run(self) -> None:
        try:
            self._scheduler.run()
        except BaseException as error:  # noqa: BLE001
            self.exit_status = error.exit_status if isinstance(error, KvdError) else EXIT_INTERNAL
            self._service.failure = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"kvd-worker: {self._service.failure}\n")
        self._server.should_exit = True


def _settings(arguments: argparse.Namespace, config: ModelConfig) -> SchedulerSettings:
    depths = _depths(arguments.mtp, config.num_nextn_predict_layers > 0)
    chunk = chunk_of(arguments)
    return SchedulerSettings(
        context=arguments.context,
        hot_rows=hot_rows_of(arguments, config, max(depths)),
        ring_pages=ring_pages_of(arguments, chunk),
        chunk=chunk,
        gap_s=arguments.token_gap,
        running=arguments.running,
        batch=None if arguments.batch == "auto" else _number("--batch", arguments.batch),
        depths=depths,
        queue=arguments.queue,
        queue_s=arguments.queue_timeout,
        idle_s=arguments.idle,
        default_output=arguments.output_tokens,
    )


def _depths(given: str, has_layer: bool) -> tuple[int, ...]:
    if given == "auto":
        return DEPTHS if has_layer else (0,)
    depth = _number("--mtp", given)
    if depth and not has_layer:
        raise InvalidValue("--mtp", depth, "0: the model has no MTP layer")
    return (depth,)


def _number(name: str, given: str) -> int:
    try:
        return int(given)
    except ValueError:
        raise InvalidValue(name, given, "a number, or auto") from None


def _text(arguments: argparse.Namespace, vocabulary: int) -> Text:
    """The tokenizer that was named, or the one beside the model."""
    if arguments.tokenizer == Path("none"):
        return NumberText()
    if arguments.tokenizer is not None:
        return CheckpointText(arguments.tokenizer)
    model = [] if arguments.model in PRESETS else [Path(arguments.model)]
    given = [*([arguments.weights] if arguments.weights else []), *model]
    return text_of([path if path.is_dir() else path.parent for path in given], vocabulary)


def _api_key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue("--api-key-file", str(path), f"a readable file ({error})") from None
    if not key:
        raise InvalidValue("--api-key-file", str(path), "a file with a key in it")
    return key


def _listen(address: str) -> socket.socket:
    """A socket that listens; raises `InvalidValue`, or `OsFailure` where the system refuses it."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        listening = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)  # for the owner alone
        try:
            remove_stale(Path(path))
            listening.bind(path)
        except OSError as error:
            listening.close()
            raise OsFailure(f"--listen {address}: {error.strerror or error}", address=address) from None
        finally:
            os.umask(before)
    else:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise InvalidValue("--listen", address, "HOST:PORT or unix:PATH")
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
            listening = socket.socket(found[0], found[1])
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(found[4])
        except OSError as error:
            raise OsFailure(f"--listen {address}: {error.strerror or error}", address=address) from None
    listening.listen(128)
    return listening


def _address(listening: socket.socket) -> str:
    """Where clients find it: with the port that the system chose for port 0."""
    name = listening.getsockname()
    return f"unix:{name}" if listening.family == socket.AF_UNIX else f"http://{name[0]}:{name[1]}"
