"""Which engines of SGLang share pages: those whose bytes are the same, and no other. And which are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import InvalidValue
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.test_worker_death import wait_until
from tests.engines.sglang_stand_in import (
    Context,
    HostPool,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    StorageMetrics,
    installed,
)
from tests.engines.sglang_world import Engines, Rank, config, engines, hashes, weights

KEYS = hashes(4)


@pytest.fixture(autouse=True)
def _memory_of_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def world(daemon: DaemonProcess, tmp_path: Path) -> Iterator[Engines]:
    with engines(daemon.run_dir, tmp_path / "model") as world:
        yield world


def _set(name: str, value: object) -> Callable[[Context], None]:
    return lambda context: setattr(context.model, name, value)


def _backend(context: Context) -> None:
    context.exec.kernel.attention_backend = "fa3"


def _weights(context: Context) -> None:
    weights(Path(context.model.model_path), b"others")


def _config(context: Context) -> None:
    Path(context.model.model_path, "config.json").write_text('{"num_hidden_layers": 4}')


def _scales(context: Context) -> None:
    path = Path(context.model.model_path, "scales.json")
    path.write_text("{}")
    context.model.quantization_param_path = str(path)


class TestModels:
    @pytest.mark.parametrize(
        "change",
        [
            _weights,
            _config,
            _scales,
            _backend,
            _set("dtype", "float16"),
            _set("kv_cache_dtype", "fp8_e5m2"),
            _set("quantization", "fp8"),
            _set("json_model_override_args", '{"rope_theta": 1}'),
            _set("context_length", 4096),
            _set("load_format", "dummy"),
        ],
        ids=lambda change: getattr(change, "__name__", ""),
    )
    def test_another_model_has_no_hit(self, world: Engines, change: Callable[[Context], None]) -> None:
        first = world.rank()
        first.put(KEYS, range(4))
        change(world.context)
        second = world.rank()
        assert second.found(KEYS) == 0
        assert second.get(KEYS, range(4)) == [False] * 4
        assert first.found(KEYS) == 4

    def test_the_same_files_elsewhere_are_the_same_model(self, world: Engines, tmp_path: Path) -> None:
        world.rank().put(KEYS, range(4))
        world.context.model.model_path = weights(tmp_path / "elsewhere")
        Path(world.context.model.model_path, "config.json").write_text('{ "num_hidden_layers":3 }\n')
        assert world.rank().found(KEYS) == 4

    def test_an_identity_stands_for_the_files(self, world: Engines) -> None:
        named = world.rank(extra={"model_identity": "release 1"})
        named.put(KEYS, range(4))
        assert world.rank().found(KEYS) == 0
        world.context.model.model_path = "s3://bucket/model"
        assert world.rank(extra={"model_identity": "release 1"}).found(KEYS) == 4
        assert world.rank(extra={"model_identity": "release 2"}).found(KEYS) == 0
        with pytest.raises(InvalidValue, match=r"model_path is 's3://bucket/model'.*model_identity"):
            world.rank()

    def test_dummy_weights_are_known_by_their_seed(self, world: Engines) -> None:
        world.context.model.load_format = "dummy"
        world.rank().put(KEYS, range(4))
        assert world.rank().found(KEYS) == 4
        world.context.device.random_seed = 2
        assert world.rank().found(KEYS) == 0

    @pytest.mark.parametrize(
        ("layout", "pool"),
        [
            ("page_first_direct", {}),
            ("layer_first", {}),
            ("page_first", {"page_size": 16}),
            ("page_first", {"layers": 6, "page_size": 4}),
            ("page_first", {"dtype": torch.float16}),
        ],
    )
    def test_another_form_of_pages_has_no_hit(self, world: Engines, layout: str, pool: dict[str, Any]) -> None:
        first, second = world.rank(pool={"width": 256}), world.rank(layout, pool={"width": 256, **pool})
        first.put(KEYS, range(4))
        assert second.found(KEYS) == 0
        assert second.get(KEYS, range(4)) == [False] * 4


class TestRanks:
    def test_each_has_its_own_shard(self, world: Engines) -> None:
        ranks = [world.rank(tp_rank=rank, tp_size=2) for rank in range(2)]
        ranks[0].put(KEYS, range(4))
        assert [rank.found(KEYS) for rank in ranks] == [4, 0]
        ranks[1].put(KEYS[:2], range(2), seed=100)
        assert ranks[1].get(KEYS, range(20, 24)) == [True, True, False, False]
        assert ranks[1].read([20, 21]) == ranks[1].read([0, 1])
        assert ranks[0].get(KEYS, range(20, 24)) == [True] * 4
        assert ranks[0].read(range(20, 24)) == ranks[0].read(range(4)) != ranks[1].read(range(20, 24))

    @pytest.mark.parametrize("facts", [{"tp_size": 4}, {"pp_size": 2}, {"pp_rank": 1, "pp_size": 2}, {"tp_rank": 1}])
    def test_another_place_or_number_of_places_has_no_hit(self, world: Engines, facts: dict[str, Any]) -> None:
        first, second = world.rank(tp_size=2), world.rank(**{"tp_size": 2, **facts})
        first.put(KEYS, range(4))
        assert second.found(KEYS) == 0

    def test_replicas_of_one_latent_cache_have_one_copy_that_the_first_writes(
        self, world: Engines, daemon: DaemonProcess
    ) -> None:
        ranks = [
            world.rank(tp_rank=rank, tp_size=2, is_mla_model=True, pool={"width": 256}, dp_rank=rank)
            for rank in range(2)
        ]
        assert ranks[1].put(KEYS, range(4)) == [True] * 4
        assert [rank.found(KEYS) for rank in ranks] == [0, 0]
        ranks[0].put(KEYS, range(4))
        assert ranks[1].found(KEYS) == 4
        ranks[1].pool.fill(20, 5)
        assert ranks[1].get(KEYS, range(20, 24)) == [True] * 4
        assert ranks[1].read(range(20, 24)) == ranks[0].read(range(4))
        assert [(space.stored, space.published) for space in daemon.stat().blocks] == [(4, 4)]
        assert world.rank(tp_size=1, is_mla_model=True, pool={"width": 256}).found(KEYS) == 4


class TestPoolsOfHybrids:
    @pytest.fixture
    def rank(self, world: Engines) -> Rank:
        """Of a model with sparse attention, whose pages have index keys beside them."""
        rank = world.rank(is_mla_model=True, pool={"width": 256})
        rank.storage.register_mem_host_pool_v2(HostPool(is_mla=True, width=128, layers=8), PoolName.INDEXER)
        return rank

    def _transfer(self, rank: Rank, keys: list[str], pages: list[int]) -> PoolTransfer:
        pool = rank.storage.registered_pools[PoolName.INDEXER]
        return PoolTransfer(PoolName.INDEXER, host_indices=pool.indices(pages), keys=keys)

    def test_a_page_is_found_where_all_pools_have_it(self, rank: Rank) -> None:
        pool = rank.storage.registered_pools[PoolName.INDEXER]
        rank.put(KEYS, range(4))
        asked = [PoolTransfer(PoolName.INDEXER, keys=KEYS)]
        assert rank.storage.batch_exists_v2(KEYS, asked).kv_hit_pages == 0
        for page in range(3):
            pool.fill(page, 50 + page)
        assert rank.storage.batch_set_v2([self._transfer(rank, KEYS[:3], [0, 1, 2])]) == {"indexer": [True] * 3}
        result = rank.storage.batch_exists_v2(KEYS, asked)
        assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (3, {"kv": 4, "indexer": 3})
        loaded = rank.storage.batch_get_v2([self._transfer(rank, KEYS, [10, 11, 12, 13])])
        assert loaded == {PoolName.INDEXER: [True] * 3 + [False]}
        assert [pool.read(page) for page in (10, 11, 12)] == [pool.read(page) for page in (0, 1, 2)]
        assert rank.found(KEYS) == 4

    def test_only_pools_that_are_pages_of_tokens_are_taken(self, rank: Rank) -> None:
        with pytest.raises(InvalidValue, match="host pool is 'mamba'; allowed: kv or indexer"):
            rank.storage.register_mem_host_pool_v2(HostPool(), PoolName.MAMBA)
        with pytest.raises(InvalidValue, match="hit policy is 'trailing_pages'; allowed: 'all_pages'"):
            rank.storage.batch_exists_v2(
                KEYS, [PoolTransfer(PoolName.INDEXER, hit_policy=PoolHitPolicy.TRAILING_PAGES)]
            )


class TestTheWhole:
    def test_what_is_cleared_is_not_found_and_what_comes_later_is_the_engines_own(self, world: Engines) -> None:
        cleared, other = world.rank(), world.rank()
        cleared.put(KEYS, range(4))
        assert cleared.storage.clear()
        assert cleared.found(KEYS) == 0
        assert cleared.get(KEYS, range(20, 24)) == [False] * 4
        cleared.put(hashes(2, "later"), range(2), seed=100)
        assert cleared.get(hashes(2, "later"), [20, 21]) == [True, True]
        assert cleared.read([20, 21]) == cleared.read([0, 1])
        assert other.found(hashes(2, "later")) == 0
        assert other.found(KEYS) == 4

    def test_a_pool_that_is_registered_afterwards_is_cleared_too(self, world: Engines) -> None:
        rank, other = world.rank(), world.rank()
        rank.put(KEYS, range(4))
        rank.storage.clear()
        again = Rank(rank.storage, HostPool())
        assert again.found(KEYS) == 0
        again.put(KEYS[:1], [0], seed=100)
        assert again.get(KEYS, range(20, 24)) == [True] + [False] * 3
        assert again.read([20]) == again.read([0]) != other.read([0])
        assert other.found(KEYS) == 4

    def test_ranks_with_one_copy_store_nothing_after_it(self, world: Engines) -> None:
        """Each would find only what it stores itself, and only one of them stores."""
        ranks = [world.rank(tp_rank=rank, tp_size=2, is_mla_model=True, pool={"width": 256}) for rank in range(2)]
        ranks[0].put(KEYS, range(4))
        for rank in ranks:
            rank.storage.clear()
        assert ranks[0].put(hashes(2, "later"), range(2)) == [False, False]
        assert [rank.found(keys) for rank in ranks for keys in (KEYS, hashes(2, "later"))] == [0] * 4
        assert ranks[1].get(KEYS, range(4)) == [False] * 4

    def test_stats_are_of_what_moved_since_they_were_taken(self, world: Engines) -> None:
        rank = world.rank()
        rank.put(KEYS, range(4))
        rank.put(KEYS[:2], range(2))  # nothing is written
        rank.get(hashes(6), range(20, 26))
        stats = rank.storage.get_stats()
        assert isinstance(stats, StorageMetrics)
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([4], [4])
        assert all(rate > 0 for rate in stats.backup_bandwidth + stats.prefetch_bandwidth)
        assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
        assert rank.storage.get_stats() == StorageMetrics()
        assert world.rank(enable_storage_metrics=False).storage.get_stats() is None

    def test_one_page_is_looked_for(self, world: Engines) -> None:
        rank = world.rank()
        rank.put(KEYS[:1], [0])
        assert [rank.storage.exists(key) for key in KEYS[:2]] == [True, False]

    def test_after_its_end_it_finds_nothing(self, world: Engines, daemon: DaemonProcess) -> None:
        rank = world.rank()
        rank.put(KEYS, range(4))
        rank.storage.close()
        assert rank.found(KEYS) == 0
        assert rank.put(KEYS, range(4)) == [False] * 4
        wait_until(daemon, lambda stats: all(lease.state == "quarantined" for lease in stats.leases))


class TestRefusals:
    """At the start, before a daemon is asked for."""

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            ({"interface_v1": 0}, "interface_v1 is 0; allowed: 1"),
            ({"rundir": "/run/kvd"}, "extra_config is 'rundir'; allowed: one of .*run_dir"),
            ({"run_dir": 5}, "run_dir is 5; allowed: a value like"),
            ({"timeout_s": "1"}, "timeout_s is '1'"),
            ({"timeout_s": True}, "timeout_s is True"),
            ({"timeout_s": 0.0}, "timeout_s is 0.0; allowed: more than 0 seconds"),
            ({"timeout_s": float("nan")}, "timeout_s is nan"),
            ({"retry_s": float("inf")}, "retry_s is inf"),
            ({"retry_s": 5.0, "longest_retry_s": 1.0}, "longest_retry_s is 1.0; allowed: at least retry_s, 5"),
        ],
    )
    def test_settings(self, run_dir: Path, tmp_path: Path, extra: dict[str, Any], message: str) -> None:
        with engines(run_dir, tmp_path / "model") as world, pytest.raises(InvalidValue, match=message):
            world.rank(extra=extra)

    @pytest.mark.parametrize(
        ("facts", "message"),
        [({"attn_cp_size": 2}, "attn_cp_size is 2; allowed: 1"), ({"dcp_size": 2}, "dcp_size is 2; allowed: 1")],
    )
    def test_places(self, run_dir: Path, tmp_path: Path, facts: dict[str, Any], message: str) -> None:
        with engines(run_dir, tmp_path / "model") as world, pytest.raises(InvalidValue, match=message):
            world.rank(**facts)

    def test_drafts(self, run_dir: Path, tmp_path: Path) -> None:
        with engines(run_dir, tmp_path / "model") as world:
            world.context.spec.speculative_algorithm = "EAGLE"
            with pytest.raises(InvalidValue, match="speculative_algorithm is 'EAGLE'; allowed: none"):
                world.rank()

    @pytest.mark.parametrize("version", ["0.5.22", "0.5.9.post1", "0.4.30", "0.0.0.dev0"])
    def test_versions_whose_hashes_leave_something_out(self, run_dir: Path, tmp_path: Path, version: str) -> None:
        context = Context(weights(tmp_path / "model"))
        context.version = version
        with installed(context) as storage, pytest.raises(InvalidValue, match=f"version of SGLang is '{version}'"):
            storage(config(run_dir), {})

    @pytest.mark.parametrize("version", ["0.5.23", "0.5.24.dev3+g1234567", "0.6.0rc1", "1.0"])
    def test_later_versions_are_taken(self, run_dir: Path, tmp_path: Path, version: str) -> None:
        context = Context(weights(tmp_path / "model"))
        context.version = version
        with installed(context) as storage:
            storage(config(run_dir), {}).close()

    def test_layouts_whose_pages_have_no_addresses(self, run_dir: Path, tmp_path: Path) -> None:
        with engines(run_dir, tmp_path / "model") as world:
            with pytest.raises(InvalidValue, match=r"hicache_mem_layout is 'page_unified'; .*Unsupported layout"):
                world.rank("page_unified")
            with pytest.raises(InvalidValue, match=r"bytes of a page is 768; allowed: at least 4096, by .*--page-size"):
                world.rank(pool={"page_size": 1, "width": 64})

    def test_a_model_without_weights(self, run_dir: Path, tmp_path: Path) -> None:
        with engines(run_dir, tmp_path / "model") as world:
            (tmp_path / "model" / "model.safetensors").unlink()
            with pytest.raises(InvalidValue, match=r"weights is .*safetensors"):
                world.rank()
