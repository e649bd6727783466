"""Metrics of a real daemon over HTTP: exact, documented, and all that the dashboard and the alerts ask for."""

from __future__ import annotations

import contextlib
import http.client
import json
import mmap
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Sample

from compute.block_store import BlockStore
from compute.client import Client
from kvd.metrics.exporter import WORKER_COUNTERS
from protocol.errors import KvdError, OutOfCapacity
from protocol.session_state import COUNTER_NAMES, WorkerBlock, WorkerBlockLayout
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.raw import FINGERPRINT
from tests.blackbox.worker_process import COMMIT_BYTES, TOKEN_CAPACITY, WorkerProcess, publish

ROOT = Path(__file__).parents[2]
STALE_S = 2.0
"""How old what workers publish may be: a second until the daemon looks, and a second that a snapshot lives."""


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("kvd", timeout=20)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


def get(run_dir: Path, page: str, **headers: str) -> tuple[int, str]:
    """Status and body of a page, asked over the socket ``metrics.sock``."""
    connection = UnixConnection(run_dir / "metrics.sock")
    try:
        connection.request("GET", page, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def scrape(run_dir: Path) -> list[Sample]:
    """All samples, of a snapshot taken after this call."""
    time.sleep(STALE_S + 0.05)
    status, text = get(run_dir, "/metrics")
    assert status == 200
    return [sample for family in parse_text(text) for sample in family.samples]


def value(samples: list[Sample], metric: str, **labels: str) -> float:
    """The value of the one sample of the metric that has the labels."""
    [found] = [s.value for s in samples if s.name == metric and labels.items() <= s.labels.items()]
    return found


@pytest.fixture
def daemon(run_dir: Path) -> Iterator[DaemonProcess]:
    settings = {"metrics_listen": f"unix:{run_dir}/metrics.sock", "disk_state_dir": str(run_dir / "state")}
    with DaemonProcess(run_dir, drain_timeout_s="0", stall_watch_interval_s="0.1", **settings) as process:
        yield process.wait_ready()
        if process.process.poll() is None:
            assert process.stat().ledger == "balanced"
            assert process.stop() == 0
        assert '"exception"' not in process.log
        assert not (run_dir / "metrics.sock").exists()


def publish_counters(client: Client, name: str, counters: list[int]) -> tuple[int, int]:
    """Make a session with one committed row whose worker publishes ``counters``; returns its number and generation."""
    opened = client.create_session(
        name,
        fingerprint=FINGERPRINT,
        encoding="q8g64",
        page_bytes=4096,
        token_capacity=TOKEN_CAPACITY,
        commit_bytes=COMMIT_BYTES,
    )
    client.extend_session(opened.session, opened.generation, 1)
    fd = client.claim(opened.worker_block)
    publish(os.dup(fd), opened, tokens=3, rows=1)
    mapped = mmap.mmap(fd, opened.worker_block.nbytes)
    os.close(fd)
    block = WorkerBlock(memoryview(mapped), WorkerBlockLayout(TOKEN_CAPACITY, COMMIT_BYTES), opened.session)
    block.publish_counters(counters)
    block.release()
    mapped.close()
    return opened.session, opened.generation


def test_case_07_seven_restores_and_123_misses_read_seven_and_123(daemon: DaemonProcess) -> None:
    with Client(daemon.run_dir) as client:
        session, generation = publish_counters(client, "one", [400, 200, 123, 77, 1, 5])
        publish_counters(client, "two", [40, 40, 0, 0, 0, 0])
        client.detach_session(session, generation)
        client.save_session("one")
        for _ in range(7):
            opened = client.open_session("one", fingerprint=FINGERPRINT, encoding="q8g64")
            client.close_session(opened.session, opened.generation)
            client.restore_session("one", fingerprint=FINGERPRINT, encoding="q8g64")
        with pytest.raises(KvdError):
            client.restore_session("one", fingerprint=FINGERPRINT, encoding="q8g64")
        samples = scrape(daemon.run_dir)
    assert value(samples, "kvd_requests_total", verb="restore_session", outcome="done") == 7
    assert value(samples, "kvd_requests_total", verb="restore_session", outcome="session_exists") == 1
    assert value(samples, "kvd_requests_total", verb="save_session", outcome="done") == 1
    assert value(samples, "kvd_requests_total", verb="close_session", outcome="done") == 7
    assert value(samples, "kvd_cache_misses_total") == 123
    assert value(samples, "kvd_rows_selected_total") == 440
    assert value(samples, "kvd_cache_hits_total") == 240
    assert value(samples, "kvd_ring_hits_total") == 77
    assert value(samples, "kvd_page_copybacks_total") == 1
    assert value(samples, "kvd_duplicate_misses_total") == 5
    [two] = [s.labels for s in samples if s.name == "kvd_session_info" and s.labels["name"] == "two"]
    assert (two["uid"], two["state"]) == (str(os.getuid()), "held")
    assert value(samples, "kvd_session_cache_misses_total", session=two["session"]) == 0
    assert value(samples, "kvd_session_rows_selected_total", session=two["session"]) == 40


def test_totals_keep_what_ended_sessions_had(daemon: DaemonProcess) -> None:
    with Client(daemon.run_dir) as client:
        for number in range(3):
            session, generation = publish_counters(client, f"s{number}", [10, 1, 2, 3, 4, 5])
            client.close_session(session, generation)
        publish_counters(client, "last", [1, 1, 1, 1, 1, 1])
        assert value(scrape(daemon.run_dir), "kvd_rows_selected_total") == 31
    samples = scrape(daemon.run_dir)
    assert value(samples, "kvd_rows_selected_total") == 31
    # This process lives, and may have its extents mapped still.
    assert value(samples, "kvd_leases_opened_total") == value(samples, "kvd_leases_quarantined_total") == 1
    assert value(samples, "kvd_leases_ended_total") == 0
    assert value(samples, "kvd_leases", state="quarantined") == 1


def test_metrics_and_kvd_stat_agree(daemon: DaemonProcess) -> None:
    with WorkerProcess(daemon.run_dir, "committed") as worker, Client(daemon.run_dir) as client:
        client.allocate_device("cpu", 3 << 20, "hot_cache")
        samples, stats = scrape(daemon.run_dir), daemon.stat()
        for tier in stats.tiers:
            for what in (
                "requested",
                "committed",
                "reserved",
                "quarantined",
                "capacity",
                "peak_requested",
                "peak_committed",
            ):
                assert value(samples, f"kvd_tier_{what}_bytes", tier=tier.tier) == getattr(tier, what)
            for part in tier.purposes:
                labels = {"tier": tier.tier, "purpose": part.purpose}
                assert value(samples, "kvd_purpose_requested_bytes", **labels) == part.requested
                assert value(samples, "kvd_purpose_committed_bytes", **labels) == part.committed
        [session] = stats.sessions
        number = str(session.session)
        assert value(samples, "kvd_session_info", session=number, name="victim", state="held") == 1
        assert value(samples, "kvd_session_tokens", session=number) == session.tokens == 160
        assert value(samples, "kvd_session_committed_rows", session=number) == 150
        assert value(samples, "kvd_session_committed_bytes", session=number) == session.committed > 0
        assert value(samples, "kvd_leases", state="live") == 2
        assert value(samples, "kvd_sessions", state="held") == 1
        assert value(samples, "kvd_info", version=stats.daemon_version, epoch=str(stats.epoch)) == 1
        assert value(samples, "kvd_ledger_balanced") == value(samples, "kvd_serving") == 1
        assert value(samples, "process_open_fds") > len(daemon.segments)
        worker.kill()


def test_every_counter_of_workers_has_a_metric() -> None:
    assert tuple(WORKER_COUNTERS) == COUNTER_NAMES


def test_probes(daemon: DaemonProcess) -> None:
    assert get(daemon.run_dir, "/healthz") == (200, "ledger balanced\n")
    assert get(daemon.run_dir, "/readyz") == (200, "serving\n")
    assert get(daemon.run_dir, "/readyz?verbose") == (200, "serving\n")
    status, text = get(daemon.run_dir, "/elsewhere")
    assert (status, "/metrics, /healthz, /readyz" in text) == (404, True)
    connection = UnixConnection(daemon.run_dir / "metrics.sock")
    connection.request("POST", "/metrics")
    assert connection.getresponse().status == 501
    connection.close()


def test_probes_while_draining(run_dir: Path) -> None:
    with DaemonProcess(run_dir, metrics_listen=f"unix:{run_dir}/metrics.sock") as process:
        process.wait_ready()
        with WorkerProcess(run_dir, "committed"):
            process.process.send_signal(signal.SIGTERM)
            while not process.stat().draining:
                time.sleep(0.01)
            time.sleep(STALE_S)
            assert get(run_dir, "/readyz") == (503, "draining\n")
            assert get(run_dir, "/healthz") == (200, "ledger balanced\n")
        assert process.wait() == 0


def test_probes_before_it_serves(run_dir: Path) -> None:
    settings = {"host_capacity": "1GiB", "host_extent": "8MiB", "metrics_listen": f"unix:{run_dir}/metrics.sock"}
    with DaemonProcess(run_dir, drain_timeout_s="0", **settings) as process:
        listening = False
        while not listening:  # the socket's file is there a moment before anybody listens at it
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                assert get(run_dir, "/healthz") == (200, "starting\n")
                listening = True
        assert get(run_dir, "/readyz") == (503, "starting: host RAM is being taken\n")
        assert get(run_dir, "/metrics")[0] == 503
        process.wait_ready()
        assert get(run_dir, "/readyz") == (200, "serving\n")
        assert process.stop() == 0


def test_a_port_of_loopback(run_dir: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with DaemonProcess(run_dir, metrics_listen=f"127.0.0.1:{port}", drain_timeout_s="0") as process:
        process.wait_ready()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        families = list(parse_text(response.read().decode()))
        connection.close()
        assert {"kvd_requests", "kvd_tier_committed_bytes", "process_open_fds"} <= {family.name for family in families}
        with DaemonProcess(run_dir / "second", metrics_listen=f"127.0.0.1:{port}") as second:
            assert second.wait() == 71
            assert f"metrics.listen 127.0.0.1:{port}: Address already in use" in second.log
        assert process.stop() == 0


def test_sockets_in_the_way(run_dir: Path) -> None:
    path = run_dir / "metrics.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with DaemonProcess(run_dir, metrics_listen=f"unix:{path}", drain_timeout_s="0") as process:
        assert get(process.wait_ready().run_dir, "/readyz")[0] == 200, "what nobody listens at is replaced"
        assert path.stat().st_mode & 0o7777 == 0o660
        with DaemonProcess(run_dir / "second", metrics_listen=f"unix:{path}") as second:
            assert second.wait() == 71
        assert get(run_dir, "/readyz")[0] == 200
        assert process.stop() == 0
    path.write_text("precious")
    with DaemonProcess(run_dir, metrics_listen=f"unix:{path}") as process:
        assert process.wait() == 71
    assert path.read_text() == "precious"


def test_clients_that_hang_hold_up_neither_the_loop_nor_others(daemon: DaemonProcess) -> None:
    with ExitStack() as connections:
        for _ in range(40):
            client = connections.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(str(daemon.run_dir / "metrics.sock"))
            with contextlib.suppress(BrokenPipeError):  # one too many: it is closed already
                client.send(b"GET /met")
        assert daemon.stat().ledger == "balanced"
        assert len(os.listdir(f"/proc/{daemon.process.pid}/fd")) < 100, "most of them were closed at once"
    deadline = time.monotonic() + 10
    while True:
        try:
            status, _ = get(daemon.run_dir, "/readyz")
            break
        except (http.client.HTTPException, OSError):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert status == 200


def test_blocks_are_counted_exactly(daemon: DaemonProcess) -> None:
    keys = [number.to_bytes(32, "little") for number in range(7)]
    with BlockStore(daemon.run_dir, fingerprint=bytes(32), block_bytes=8192, timeout_s=20) as store:
        with store.reserve(keys[:5]) as reserved:
            reserved.publish(keys[:4])
        assert store.find(keys) == 4
        with store.pin(keys), store.reserve(keys[5:6]):
            samples = scrape(daemon.run_dir)
    for state, count in {"stored": 4, "pinned": 4, "writing": 1, "on_disk": 0}.items():
        assert value(samples, "kvd_blocks", state=state) == count
    counts = {"looked_up": 7, "found": 4, "loaded": 4, "published": 4, "abandoned": 1, "evicted": 0}
    for what, count in counts.items():
        assert value(samples, f"kvd_blocks_{what}_total") == count
    assert value(samples, "kvd_block_reservations_refused_total") == 0


def test_snapshots_are_shared_by_those_who_ask_at_once(daemon: DaemonProcess) -> None:
    uptimes = {get(daemon.run_dir, "/metrics")[1].partition("\nkvd_uptime_seconds ")[2].split()[0] for _ in range(20)}
    assert len(uptimes) <= 3


# Documents


@pytest.fixture
def busy(daemon: DaemonProcess) -> Iterator[list[Sample]]:
    """Samples of a daemon that has seen something of everything."""
    with WorkerProcess(daemon.run_dir, "committed"), Client(daemon.run_dir) as client:
        publish_counters(client, "one", [1, 1, 1, 1, 1, 1])
        with pytest.raises(OutOfCapacity):
            client.allocate_device("cpu", 1 << 40, "ring")
        yield scrape(daemon.run_dir)


def documented() -> dict[str, tuple[str, set[str]]]:
    """Type and labels of each metric of the table in the documentation."""
    text = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(kvd_\w+)` \| (\w+) \|([^|]*)\|", text, re.MULTILINE)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def test_documentation_has_every_metric_with_its_type_and_labels(daemon: DaemonProcess, busy: list[Sample]) -> None:
    table = documented()
    found: dict[str, set[str]] = {sample.name: set(sample.labels) for sample in busy if sample.name.startswith("kvd_")}
    text = get(daemon.run_dir, "/metrics")[1]
    kinds = dict(re.findall(r"^# TYPE (kvd_\w+) (\w+)", text, re.MULTILINE))
    assert set(table) == set(kinds)
    for name, (kind, labels) in table.items():
        assert kinds[name] == kind
        assert found.get(name, labels) == labels, name


def queries() -> list[Any]:
    """Every expression of the dashboard and of the alert rules."""
    dashboard = json.loads((ROOT / "docs/grafana/kvd.json").read_text())
    rules = yaml.safe_load((ROOT / "docs/grafana/kvd-alerts.yaml").read_text())
    panels = [
        pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]
    return panels + [pytest.param(r["expr"], id=r["alert"]) for group in rules["groups"] for r in group["rules"]]


SELECTOR = re.compile(r"\b((?:kvd|process)_\w+)(?:\{([^}]*)\})?(\[[^]]+\])?")
MATCHER = re.compile(r'(\w+)(=~|!=|=)"([^"]*)"')
OF_PROMETHEUS = {"instance", "job"}


@pytest.fixture(scope="module")
def exported() -> Iterator[list[Sample]]:
    """The output of one exporter, for all queries."""
    run_dir = Path(tempfile.mkdtemp(prefix="kvd-test-", dir="/tmp"))
    with DaemonProcess(run_dir, metrics_listen=f"unix:{run_dir}/metrics.sock", drain_timeout_s="0") as process:
        process.wait_ready()
        with WorkerProcess(run_dir, "committed"), Client(run_dir) as client:
            with pytest.raises(OutOfCapacity):
                client.allocate_device("cpu", 1 << 40, "ring")
            assert client.report is not None
            client.report.memory("cpu", 0, 0)
            yield scrape(run_dir)
        assert process.stop() == 0
    shutil.rmtree(run_dir)


@pytest.mark.parametrize("expression", queries())
def test_every_query_finds_what_it_asks_for(exported: list[Sample], expression: str) -> None:
    """Each selector matches samples of the real exporter, counters are asked for rates and gauges are not."""
    selectors = SELECTOR.findall(expression)
    assert selectors
    for name, matchers, window in selectors:
        matching = [sample for sample in exported if sample.name == name]
        for label, operator, wanted in MATCHER.findall(matchers):
            if label in OF_PROMETHEUS:
                continue
            assert all(label in sample.labels for sample in matching), f"{name} has no label {label}"
            tests = {
                "=": lambda text, wanted=wanted: text == wanted,
                "!=": lambda text, wanted=wanted: text != wanted,
                "=~": lambda text, wanted=wanted: re.fullmatch(wanted, text) is not None,
            }
            matching = [sample for sample in matching if tests[operator](sample.labels[label])]
        assert matching, f"{name}{{{matchers}}} finds nothing"
        needs_window = name.endswith(("_total", "_bucket")) or f"deriv({name}" in expression
        assert bool(window) == needs_window, f"{name}: a counter is only good as a rate, a gauge is not one"
    labels = {label for sample in exported for label in sample.labels if sample.name in {s[0] for s in selectors}}
    for grouping in re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", expression):
        assert set(re.split(r", *", grouping)) <= labels | OF_PROMETHEUS
