"""``kvd plan`` says what a worker then really takes."""

from __future__ import annotations

from dataclasses import replace

from compute.histories import HistorySettings
from compute.worker import Worker
from kvd.planning.footprint import Footprint
from protocol.layout import Q8G64
from protocol.model import DEMO
from tests.blackbox.daemon_process import DaemonProcess

CONFIG = replace(DEMO, index_topk=64)
TOKENS, HOT_ROWS, RING_PAGES = 300, 2_000, 4


def test_committed_bytes_are_those_of_the_plan(daemon: DaemonProcess) -> None:
    plan = Footprint(CONFIG, Q8G64, TOKENS, HOT_ROWS, drafts=0, ring_pages=RING_PAGES)
    with Worker(daemon.run_dir, "cpu", CONFIG, Q8G64, seed=1) as worker:
        history = worker.history(HistorySettings("offloaded", TOKENS, HOT_ROWS, RING_PAGES, "planned"))
        worker.prefill(history, list(range(100)) * 3, 100)
        history.barrier()
        purposes = [purpose for tier in daemon.stat().tiers for purpose in tier.purposes]
        history.close()
    committed = {purpose.purpose: purpose.committed for purpose in purposes if purpose.purpose != "unassigned"}
    assert {name: size for name, size in committed.items() if size} == {
        part.purpose: part.committed_bytes for part in plan.parts
    }
