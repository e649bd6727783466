"""The node's state as statistics: what is made anew for each question, and what only when the books have changed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvd import logs
from kvd.alloc.ledger import Account
from kvd.config import Config, HostConfig, LogConfig, VramConfig
from kvd.node import BALANCED, Node
from kvd.stats import node_stats

MIB = 1 << 20


@pytest.fixture
def node() -> Iterator[Node]:
    log = logs.configure(LogConfig(level="error"))
    config = Config(device="cpu", host=HostConfig(capacity=4 * MIB, extent=2 * MIB), vram=VramConfig(capacity=8 * MIB))
    made = Node(config, f"/kvd-stats-{os.getpid()}", log, lambda done, total: None)
    yield made
    made.close()


def test_tiers_are_made_anew_when_the_books_have_changed(node: Node) -> None:
    first, second = node_stats(node), node_stats(node)
    assert first.tiers is second.tiers
    allocation = node.vram.allocate(Account("vram:cpu", 0, 0, "tables"), 5, temporary=False)
    [tier] = [tier for tier in node_stats(node).tiers if tier.tier == "vram:cpu"]
    assert (tier.requested, tier.committed) == (5, 2 * MIB)
    node.vram.free(allocation.handle)
    [tier] = [tier for tier in node_stats(node).tiers if tier.tier == "vram:cpu"]
    assert (tier.requested, tier.committed, tier.peak_requested) == (0, 0, 5)
    node.ledger.resize_tier("vram:cpu", 6 * MIB)
    assert {tier.tier: tier.capacity for tier in node_stats(node).tiers}["vram:cpu"] == 6 * MIB


def test_books_are_added_up_when_they_have_changed_and_by_every_check(node: Node) -> None:
    assert node_stats(node).ledger == BALANCED
    total = node.ledger._tiers["host"].total
    total.committed += 1  # behind the ledger's back
    try:
        assert node_stats(node).ledger == BALANCED, "nothing says that there is anything to add up"
        node.ledger.resize_tier("vram:cpu", 6 * MIB)
        assert "committed of all accounts 4194304 != committed of the tier 4194305" in node_stats(node).ledger
    finally:
        total.committed -= 1
    assert node_stats(node).ledger != BALANCED
    assert node.check() == node_stats(node).ledger == BALANCED
