"""The connector's scheduler side, without an engine: which blocks are loaded, saved, kept, and when they are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from compute.integrations.outage import Outage
from compute.integrations.vllm.chain import Chain
from compute.integrations.vllm.plan import Step
from compute.integrations.vllm.scheduling import Request, Scheduling
from compute.integrations.vllm.settings import Settings
from protocol.errors import InvalidValue

MODEL = b"m" * 32
SIZE = 4


@dataclass
class _Request:
    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    salt: bytes = b""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass
class _Blocks:
    count: int = 100
    kept: list[int] = field(default_factory=list)

    def keep(self, blocks: Sequence[int]) -> None:
        self.kept += blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.kept.remove(block)


def _chain(request: Request) -> Chain:
    assert isinstance(request, _Request)
    return Chain(MODEL, SIZE, lambda first, end: None, request.salt)


@dataclass
class _World:
    """A scheduler, and a store that is a set of keys; None is a daemon that does not answer."""

    stored: set[bytes] | None = field(default_factory=set)
    looked_up: int = 0
    blocks: _Blocks = field(default_factory=_Blocks)
    workers: int = 1
    options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduling = Scheduling(
            SIZE,
            self._find,
            _chain,
            workers=self.workers,
            **self.options,
        )
        self.scheduling.engine_blocks = self.blocks

    def _find(self, keys: Sequence[bytes]) -> int | None:
        self.looked_up += 1
        if self.stored is None:
            return None
        return next((index for index, key in enumerate(keys) if key not in self.stored), len(keys))

    def run(self, request: _Request, tokens: int, table: Sequence[int]) -> Step:
        """One step that computes ``tokens`` of the request, whose blocks are ``table``."""
        step = self.scheduling.step({request.request_id: tokens} if tokens else {}, lambda _: table)
        request.num_computed_tokens += tokens
        return step

    def save_all(self, request: _Request) -> None:
        """Compute its prompt, and have all of it stored."""
        assert self.scheduling.match(request, 0) == 0
        step = self.run(request, request.num_tokens, range(50))
        assert self.stored is not None
        for save in step.saves:
            self.stored.update(save.keys)
            self.scheduling.saves_ended({save.number: 1})


def _tokens(count: int) -> list[int]:
    return list(range(count))


def test_a_stored_prefix_is_loaded_into_the_blocks_behind_the_engines_own() -> None:
    world = _World()
    world.save_all(_Request("a", _tokens(20)))
    again = _Request("b", _tokens(20))
    assert world.scheduling.match(again, 8) == 8  # of five blocks two are the engine's, and the last token is computed
    world.scheduling.allocated(again, [10, 11, 12, 13, 14], 8)
    step = world.run(again, 0, [])
    assert [load.blocks for load in step.loads] == [[12, 13]]
    assert step.idle
    assert not world.run(again, 0, []).loads


def test_the_last_token_is_always_computed() -> None:
    world = _World()
    world.save_all(_Request("a", _tokens(8)))
    assert world.scheduling.match(_Request("b", _tokens(8)), 0) == 4
    assert world.scheduling.match(_Request("c", _tokens(9)), 0) == 8
    assert world.scheduling.match(_Request("d", [1]), 0) == 0


def test_other_tokens_or_another_salt_find_nothing() -> None:
    world = _World()
    world.save_all(_Request("a", _tokens(20)))
    assert world.scheduling.match(_Request("b", [7, *_tokens(20)[1:]]), 0) == 0
    assert world.scheduling.match(_Request("c", _tokens(20), salt=b"s"), 0) == 0
    assert world.scheduling.match(_Request("d", [*_tokens(10), *_tokens(10)]), 0) == 8


def test_chunks_and_decoded_tokens_are_saved_once_when_their_blocks_are_full() -> None:
    world = _World()
    request = _Request("a", _tokens(10))
    world.scheduling.match(request, 0)
    table = [20, 21, 22, 23]
    assert [save.blocks for save in world.run(request, 6, table).saves] == [[20]]
    assert [save.blocks for save in world.run(request, 4, table).saves] == [[21]]
    request.all_token_ids.append(10)
    assert not world.run(request, 1, table).saves
    request.all_token_ids.append(11)
    assert [save.blocks for save in world.run(request, 1, table).saves] == [[22]]
    assert world.blocks.kept == [20, 21, 22]


def test_a_block_of_tokens_that_are_not_known_yet_waits() -> None:
    """As where the engine schedules a step before it has the tokens of the one before."""
    world = _World()
    request = _Request("a", _tokens(3))
    world.scheduling.match(request, 0)
    world.run(request, 3, [5])
    assert not world.run(request, 1, [5]).saves  # computes a token that is still being sampled
    request.all_token_ids.append(3)
    assert [save.blocks for save in world.run(request, 1, [5, 6]).saves] == [[5]]


def test_only_prompts_are_saved_if_asked_for() -> None:
    world = _World(options={"save_decoded": False})
    request = _Request("a", _tokens(6))
    world.scheduling.match(request, 0)
    assert len(world.run(request, 6, range(9)).saves) == 1
    request.all_token_ids += [1, 2, 3, 4]
    assert not world.run(request, 4, range(9)).saves


def test_blocks_are_kept_until_every_worker_is_done() -> None:
    world = _World(workers=2)
    request = _Request("a", _tokens(8))
    world.scheduling.match(request, 0)
    (save,) = world.run(request, 8, [3, 4]).saves
    world.scheduling.finished("a")
    world.scheduling.saves_ended({save.number: 1})
    assert world.blocks.kept == [3, 4]
    assert world.scheduling.pending_saves
    world.scheduling.saves_ended({save.number: 1})
    assert not world.blocks.kept
    assert not world.scheduling.pending_saves


def test_no_more_blocks_are_kept_than_allowed_and_the_rest_comes_later() -> None:
    world = _World(blocks=_Blocks(count=8), options={"pending_share": 0.25})
    request = _Request("a", _tokens(16))
    world.scheduling.match(request, 0)
    (save,) = world.run(request, 16, [1, 2, 3, 4]).saves
    assert save.blocks == [1, 2]
    request.all_token_ids.append(0)
    assert not world.run(request, 1, [1, 2, 3, 4, 5]).saves
    world.scheduling.saves_ended({save.number: 1})
    request.all_token_ids.append(0)
    assert [save.blocks for save in world.run(request, 1, [1, 2, 3, 4, 5]).saves] == [[3, 4]]


def test_what_failed_to_load_is_saved_when_it_is_computed_and_not_loaded_again() -> None:
    world = _World()
    world.save_all(_Request("a", _tokens(20)))
    again = _Request("b", _tokens(20))
    assert world.scheduling.match(again, 0) == 16
    world.scheduling.allocated(again, [10, 11, 12, 13, 14], 16)
    world.run(again, 0, [])
    world.scheduling.loads_ended(["b"], {12, 13})
    again.num_computed_tokens = 8
    (save,) = world.run(again, 12, [10, 11, 12, 13, 14]).saves
    assert save.blocks == [12, 13, 14]
    assert world.scheduling.match(again, 0) == 0  # were it preempted now


def test_a_failure_that_one_worker_reports_before_the_others_are_done_counts() -> None:
    world = _World(workers=2)
    world.stored = set(Chain(MODEL, SIZE, lambda first, end: None).extend(_tokens(20), 20))
    again = _Request("b", _tokens(20))
    assert world.scheduling.match(again, 0) == 16
    world.scheduling.allocated(again, [10, 11, 12, 13, 14], 16)
    world.run(again, 0, [])
    world.scheduling.loads_ended([], {11})
    world.scheduling.loads_ended(["b"], set())
    again.num_computed_tokens = 4
    assert world.run(again, 16, [10, 11, 12, 13, 14]).saves[0].blocks == [11, 12, 13, 14]


def test_a_preempted_request_is_looked_up_anew() -> None:
    world = _World()
    request = _Request("a", _tokens(12))
    world.save_all(request)
    request.all_token_ids += [1, 2]
    request.num_computed_tokens = 0
    assert world.scheduling.match(request, 0) == 12
    assert world.stored is not None
    world.run(request, 2, range(4))
    world.stored.clear()
    request.num_computed_tokens = 0
    assert world.scheduling.match(request, 0) == 0
    assert world.run(request, 14, range(4)).saves[0].blocks == [0, 1, 2]


def test_a_request_that_waits_for_room_is_looked_up_once() -> None:
    world = _World()
    world.save_all(_Request("a", _tokens(20)))
    waiting, before = _Request("b", _tokens(20)), world.looked_up
    assert [world.scheduling.match(waiting, 0) for _ in range(5)] == [16] * 5
    assert world.scheduling.match(waiting, 8) == 8  # the engine's own cache has some of it by now
    assert world.looked_up == before + 1
    world.stored = None
    silent = _Request("c", _tokens(20))
    assert [world.scheduling.match(silent, 0) for _ in range(2)] == [0, 0]
    world.stored = set()
    assert world.scheduling.match(silent, 0) == 0
    assert world.looked_up == before + 4, "a question without an answer is asked again"


def test_no_answer_is_no_hit() -> None:
    world = _World(stored=None)
    request = _Request("a", _tokens(20))
    assert world.scheduling.match(request, 0) == 0
    assert len(world.run(request, 20, range(5)).saves) == 1  # the worker's side knows what to do with it


def test_after_a_reset_requests_are_as_new_and_what_is_pending_ends_as_usual() -> None:
    world = _World()
    request = _Request("a", _tokens(12))
    world.scheduling.match(request, 0)
    (save,) = world.run(request, 8, [1, 2, 3]).saves
    world.scheduling.forget()
    assert not world.run(request, 4, [1, 2, 3]).saves
    world.scheduling.saves_ended({save.number: 1})
    world.scheduling.loads_ended(["a"], {1})
    assert not world.blocks.kept


def test_roles() -> None:
    writer, reader = _World(options={"loads": False}), _World(options={"saves": False})
    writer.save_all(_Request("a", _tokens(20)))
    assert writer.stored
    assert writer.scheduling.match(_Request("b", _tokens(20)), 0) == 0
    reader.stored = writer.stored
    request = _Request("b", _tokens(24))
    assert reader.scheduling.match(request, 0) == 20
    assert not reader.run(request, 24, range(6)).saves


def test_a_chain_in_parts_is_the_chain_at_once() -> None:
    extra = {8: ("mm", "image", -2)}
    parts = Chain(MODEL, SIZE, lambda first, end: extra.get(first))
    parts.extend(_tokens(30), 7)
    parts.extend(_tokens(30), 21)
    whole = Chain(MODEL, SIZE, lambda first, end: extra.get(first)).extend(_tokens(30), 21)
    assert parts.keys == whole
    assert len(whole) == 5
    plain = Chain(MODEL, SIZE, lambda first, end: None).extend(_tokens(30), 21)
    assert plain[:2] == whole[:2]
    assert not set(plain[2:]) & set(whole[2:])
    assert not set(Chain(b"n" * 32, SIZE, lambda first, end: None).extend(_tokens(30), 21)) & set(plain)


def test_an_outage_doubles_and_ends() -> None:
    now = [0.0]
    outage = Outage(1.0, 5.0, lambda: now[0])
    assert outage.is_over
    waits = []
    for _ in range(4):
        outage.failed()
        waits.append(outage.left_s)
        now[0] += outage.left_s
        assert outage.is_over
    assert waits == [1.0, 2.0, 4.0, 5.0]
    outage.answered()
    assert not outage.lasts


@pytest.mark.parametrize(
    ("extra", "names"),
    [
        ({"run_dri": "/run/kvd"}, "run_dri"),
        ({"lookup_timeout_s": "1"}, "lookup_timeout_s"),
        ({"lookup_timeout_s": 0}, "lookup_timeout_s"),
        ({"save_decoded": 1}, "save_decoded"),
        ({"least_load_tokens": True}, "least_load_tokens"),
        ({"pending_share": 1.5}, "pending_share"),
        ({"retry_s": 60.0}, "longest_retry_s"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(extra: dict, names: str) -> None:
    with pytest.raises(InvalidValue, match=names):
        Settings.of(extra)


def test_settings() -> None:
    assert Settings.of({}) == Settings()
    assert Settings.of({"transfer_timeout_s": 3, "run_dir": "/tmp/x"}).transfer_timeout_s == 3
