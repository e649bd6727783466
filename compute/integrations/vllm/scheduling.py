"""The scheduler's side: which blocks of a request are stored, which to load into its blocks, which to save.

No engine's types are imported here; a request is anything that has the attributes of `Request`. It never waits for the
daemon longer than one time-out, and takes no answer for "nothing stored".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from compute.integrations.vllm.chain import Chain
from compute.integrations.vllm.plan import Load, Save, Step


class Request(Protocol):
    """What is asked of the engine's request."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...


class EngineBlocks(Protocol):
    """The engine's blocks, as far as they are kept from reuse while they are being saved."""

    count: int

    def keep(self, blocks: Sequence[int]) -> None: ...

    def give_back(self, blocks: Sequence[int]) -> None: ...


@dataclass
class _Tracked:
    """``stored`` blocks from the first on are in the store, or on their way; ``local`` were in the engine's cache.

    ``found`` is what the store has said since the request was last scheduled; None where it was not asked.
    """

    request: Request
    chain: Chain
    stored: int = 0
    found: int | None = None
    local: int = 0
    loading: list[int] = field(default_factory=list)
    may_load: bool = True


class Scheduling:
    """State of all requests of an engine. Called by the engine's scheduler, from one thread.

    ``find`` says how many of the first keys are stored, or None where the daemon does not answer. ``workers`` is how
    many report on each save.
    """

    def __init__(
        self,
        block_tokens: int,
        find: Callable[[Sequence[bytes]], int | None],
        chain: Callable[[Request], Chain],
        *,
        workers: int = 1,
        pending_share: float = 1.0,
        least_load_tokens: int = 1,
        save_decoded: bool = True,
        loads: bool = True,
        saves: bool = True,
    ) -> None:
        self._block_tokens = block_tokens
        self._find = find
        self._chain = chain
        self._workers = workers
        self._pending_share = pending_share
        self._least_load_tokens = least_load_tokens
        self._save_decoded = save_decoded
        self._loads, self._saves = loads, saves
        self._requests: dict[str, _Tracked] = {}
        self._new_loads: list[Load] = []
        self._pending: dict[int, tuple[list[int], int]] = {}
        self._pending_blocks = 0
        self._number = 0
        self.engine_blocks: EngineBlocks | None = None

    @property
    def pending_saves(self) -> bool:
        """Whether blocks are kept from reuse."""
        return bool(self._pending)

    def match(self, request: Request, computed: int) -> int:
        """How many tokens behind the first ``computed`` can be loaded. At least the last token is computed.

        Asks the store in any case: what is asked for counts as used there. Of a request that waits for room it is asked
        at each step, and asks the store once.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = self._requests[request.request_id] = _Tracked(request, self._chain(request))
        size = self._block_tokens
        tracked.local = computed // size
        keys = tracked.chain.extend(request.all_token_ids, request.num_tokens - 1)
        if tracked.found is None:
            tracked.found = self._find(keys) if keys else 0
            if tracked.found is None:
                return 0
            tracked.stored = tracked.found
        tokens = (tracked.found - tracked.local) * size
        return tokens if self._loads and tracked.may_load and tokens >= self._least_load_tokens else 0

    def allocated(self, request: Request, blocks: Sequence[int], tokens: int) -> None:
        """The engine has made room: ``blocks`` are all of the request's; ``tokens`` of them are to be loaded."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tokens == 0:
            return
        first, count = tracked.local, tokens // self._block_tokens
        tracked.loading = list(blocks[first : first + count])
        self._new_loads.append(Load(request.request_id, tracked.loading, tracked.chain.keys[first : first + count]))

    def step(self, scheduled: Mapping[str, int], blocks_of: Callable[[str], Sequence[int]]) -> Step:
        """What this step is to load and to save. ``scheduled`` has the tokens that it computes for each request."""
        step = Step(loads=self._new_loads, idle=not scheduled)
        self._new_loads = []
        for request_id, tokens in scheduled.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.found = None
                if self._saves:
                    self._save(tracked, tokens, blocks_of, step.saves)
        return step

    def _save(
        self, tracked: _Tracked, tokens: int, blocks_of: Callable[[str], Sequence[int]], saves: list[Save]
    ) -> None:
        request = tracked.request
        # Where steps overlap, tokens are computed whose ids are not known yet: they are saved when they are.
        known = request.num_tokens if self._save_decoded else request.num_prompt_tokens
        full = min(request.num_computed_tokens + tokens, known) // self._block_tokens
        first = tracked.stored
        if full <= first or self.engine_blocks is None:
            return
        room = max(1, int(self.engine_blocks.count * self._pending_share)) - self._pending_blocks
        count = min(full - first, room)  # what has no room now is looked at again in the request's next step
        if count <= 0:
            return
        keys = tracked.chain.extend(request.all_token_ids, full * self._block_tokens)[first : first + count]
        blocks = list(blocks_of(request.request_id)[first : first + count])
        self._number += 1
        self.engine_blocks.keep(blocks)
        self._pending[self._number] = (blocks, self._workers)
        self._pending_blocks += count
        tracked.stored = first + count
        saves.append(Save(self._number, blocks, keys))

    def loads_ended(self, requests: Iterable[str], failed_blocks: set[int]) -> None:
        """Loads of these requests have ended, and of these blocks have failed, which the engine computes.

        A request whose load failed is not given another: what failed might go on to.
        """
        if failed_blocks:
            for tracked in self._requests.values():
                bad = [index for index, block in enumerate(tracked.loading) if block in failed_blocks]
                if bad:
                    tracked.may_load = False
                    tracked.stored = min(tracked.stored, tracked.local + bad[0])
        for request_id in requests:
            if request_id in self._requests:
                self._requests[request_id].loading = []

    def saves_ended(self, reports: Mapping[int, int]) -> None:
        """So many more workers are done with each of these saves."""
        for number, count in reports.items():
            blocks, missing = self._pending[number]
            if missing > count:
                self._pending[number] = (blocks, missing - count)
                continue
            del self._pending[number]
            self._pending_blocks -= len(blocks)
            if self.engine_blocks is not None:
                self.engine_blocks.give_back(blocks)

    def forget(self) -> None:
        """Go on as with new requests: no more is saved of those that are computed, and no keys are kept."""
        self._requests.clear()

    def finished(self, request_id: str) -> None:
        """The request has ended, however. A load that is under way goes on: its blocks are the engine's until then."""
        self._requests.pop(request_id, None)
