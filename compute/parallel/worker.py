"""A worker that is one rank of several: its part of a model on its device, its part of every history on its node.

All ranks make the same calls in the same order, and get the same tokens. What is done to a session is done on all ranks
or on none: rank 0's log of tokens counts, and an error of one rank is raised on all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from compute.decode.matrices import WeightType
from compute.histories import HistorySettings
from compute.history import History
from compute.homes import ResidentPages
from compute.kernels.choice import KernelsName
from compute.parallel.grid import Grid
from compute.parallel.sessions import TeamPages, TeamSession, reconcile, share_log, standings
from compute.parallel.team import Team
from compute.parallel.views import view
from compute.session import HostSession
from compute.worker import Worker
from protocol.errors import InvalidValue, PeerLost
from protocol.layout import Encoding
from protocol.messages import PrefixFound, Saved
from protocol.model import ModelConfig

if TYPE_CHECKING:
    from compute.decode.decoder import FastDecoder
    from compute.decode.mtp import Speculation
    from compute.decode.step import DecodeStep
    from compute.decode.weights import DecodeWeights

_T = TypeVar("_T")


class ParallelWorker(Worker):
    """The rank of ``grid``; all ranks are given the same model, encoding, seed or weights, type and rows.

    Raises what `Worker` raises, on all ranks if on one, and `PeerLost` when another rank dies or is silent for longer
    than the grid's time-out. After that this one is of no more use than to be closed.
    """

    def __init__(
        self,
        run_dir: Path,
        device: str,
        config: ModelConfig,
        encoding: Encoding,
        grid: Grid,
        *,
        seed: int = 0,
        weights: Path | None = None,
        dtype: WeightType | None,
        kernels: KernelsName | None = None,
        rows: int = 256,
        mtp: int = 0,
    ) -> None:
        from compute.parallel.stages import Stage, cut_layers

        place = grid.place
        if dtype is None:
            raise InvalidValue("dtype of a model on several ranks", None, "bf16 or fp8: the reference has one process")
        if mtp and place.pipeline > 1:
            raise InvalidValue("MTP depth with pipeline stages", mtp, "0")
        self.grid, self.team = grid, Team(grid.control, place.tensor)
        self.reports = place.rank == 0
        self._stage = Stage(grid.stages) if place.pipeline > 1 else None
        first, end = self._layers = cut_layers(config.index_groups(), place.pipeline)[place.stage]
        self._part = b""
        if place.pipeline > 1:
            self._part += b", layers %d to %d" % (first, end - 1)
        if place.tensor > 1:
            self._part += b", %d shards" % place.tensor

        def start() -> None:
            try:
                super(ParallelWorker, self).__init__(
                    run_dir,
                    device,
                    config,
                    encoding,
                    seed=seed,
                    weights=weights,
                    dtype=dtype,
                    kernels=kernels,
                    rows=rows,
                    mtp=mtp,
                )
            finally:
                grid.wait_for_all()  # the others' weights may take minutes longer

        self.team.together(start, lambda _: self.close())
        try:
            self.team.agree({"model": self.model.hex(), "rows of a pass": str(rows), "MTP depth": str(mtp)})
        except BaseException:
            self.close()
            raise

    _session_type = TeamSession

    # The model

    def _fast_decoder(self, config: ModelConfig, load: Callable[..., DecodeWeights], rows: int) -> FastDecoder:
        from compute.decode.decoder import FastDecoder
        from compute.parallel.splitting import Split
        from compute.parallel.stages import StageDecoder

        place, device = self.grid.place, self.device.torch_device
        first, end = self._layers or (0, config.num_hidden_layers)
        weights = load(first_layer=first, end_layer=end, shard=(place.shard, place.tensor))
        if place.tensor > 1:
            weights = replace(weights, split=Split(self.grid.shards, config, device))
        if self._stage is None:
            return FastDecoder(weights, device, rows=rows, kernels=self.kernels)
        return StageDecoder(weights, device, self._stage, rows=rows, kernels=self.kernels)

    def steps(self, places: int, depth: int, max_tokens: int, *, cached: bool = True) -> DecodeStep | Speculation:
        """As `Worker.steps`; on several stages without drafts."""
        from compute.decode.step import DecodeStep
        from compute.parallel.stages import StageStep

        made: DecodeStep | Speculation
        if self._stage is None:
            made = super().steps(places, depth, max_tokens, cached=cached)
            step = made if isinstance(made, DecodeStep) else made.step
        else:
            made = step = StageStep(
                self.decoder.weights,  # type: ignore[union-attr]
                self.format,
                self.device.torch_device,
                self._stage,
                places=places,
                max_tokens=max_tokens,
                cached=cached,
                kernels=self.kernels,
            )
            self._recorded.add(made)
        step.wait_until = self.grid.wait_for_step
        return made

    def _first_token(self, hidden: Tensor) -> int:
        token = super()._first_token(hidden) if self.grid.place.is_last_stage else 0
        return self.team.share(token, int, self.grid.place.world - 1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, PeerLost):
            self.grid.abort(self._give_up_steps)  # else a collective that never ends would hold up the closing
        super().__exit__(kind, error, at)

    # Histories: each step on all ranks or on none

    def commit(self, history: History, hidden: Tensor | None) -> None:
        """Return when every row is committed on every stage: by the owners, and then by those who view that."""
        for owners in (True, False):
            self._in_turn(owners, lambda: super(ParallelWorker, self).commit(history, hidden))

    def end(self, history: History, *, keep: bool = False) -> None:
        """Give its memory back on all ranks. Nobody begins before every daemon has answered and every page is at home,
        which those who view it wait for; nor an owner before these.
        """

        def settle() -> None:
            if self.team.is_owner:
                history.copyback.wait_through(history.copyback.submitted_pages)
            self.client.stat()

        self.team.together(settle)
        for owners in (False, True):
            self._in_turn(owners, lambda: history.close(keep=keep))

    def end_stored(self, name: str) -> None:
        """As `Worker.end_stored`, on every stage."""
        self.team.together(lambda: self._if_owner(lambda: super(ParallelWorker, self)._opened(name).close()))

    def together(self, act: Callable[[], _T]) -> _T:
        return self.team.together(act)

    def shared(self, value: _T, kind: Any) -> _T:
        shared: _T = self.team.share(value if self.reports else None, kind)
        return shared

    def save(self, history: History) -> list[Saved]:
        """Write every stage's part to the disk of its node; what was written, stage by stage.

        Where that fails, or a rank is lost, files of both times may be left, and no file is damaged: `restore` and
        `take_over` go back to what they have in common.
        """
        self.barrier(history)  # on all stages, before one of them writes
        session = history.session
        if session is None:
            raise InvalidValue("history to save", "resident", "an offloaded one")
        saved = self.team.patiently(lambda: self._if_owner(lambda: self.client.save_session(session.name)))
        every = self.team.exchange([saved] if saved else [], list[Saved])
        return [each for of_rank in every for each in of_rank]

    def restore(self, name: str) -> None:
        """Have what was saved as ``name`` be a stored session on every stage, or on none."""

        def give_up(_: object) -> None:
            self._if_owner(lambda: super(ParallelWorker, self)._opened(name).close())

        self.team.patiently(lambda: self._if_owner(lambda: super(ParallelWorker, self).restore(name)), give_up)

    def _require_one_process(self, what: str) -> None:
        raise InvalidValue(f"ranks of {what}", self.grid.place.world, "1: with several, open, fork or make a session")

    def _require_one_stage(self, what: str) -> None:
        stages = self.grid.place.pipeline
        if stages > 1:
            raise InvalidValue(f"pipeline stages of {what}", stages, "1: with several, open, fork or make a session")

    def _name(self, name: str) -> str:
        """What the session is called on this stage's daemon, which may be another stage's too."""
        return f"{name}.stage{self.grid.place.stage}" if self.grid.place.pipeline > 1 else name

    def _together(self, act: Callable[[], _T], undo: Callable[[_T], Any]) -> _T:
        return self.team.together(act, undo)

    def _in_turn(self, owners: bool, act: Callable[[], None]) -> None:
        """Have the stages' owners do it, or all others."""
        self.team.together(lambda: act() if self.team.is_owner == owners else None)

    def _if_owner(self, act: Callable[[], _T]) -> _T | None:
        return act() if self.team.is_owner else None

    def _created(self, settings: HistorySettings) -> HostSession:
        return self._shared(settings.name, lambda: self._session(settings), HostSession.close)

    def _opened(self, name: str) -> HostSession:
        return self._shared(name, lambda: super(ParallelWorker, self)._opened(name), HostSession.detach, opened=True)

    def _forked(self, source: HostSession, rows: int, name: str) -> HostSession:
        return self._shared(name, lambda: super(ParallelWorker, self)._forked(source, rows, name), HostSession.close)

    def _found_prefix(self, digests: list[bytes]) -> PrefixFound:
        found = self.team.together(lambda: self._if_owner(lambda: super(ParallelWorker, self)._found_prefix(digests)))
        return self.shared(found, PrefixFound)  # type: ignore[return-value]

    def _forked_prefix(self, found: PrefixFound, name: str) -> HostSession:
        return self._shared(name, lambda: super(ParallelWorker, self)._forked_prefix(found, name), HostSession.close)

    def _shared(
        self,
        name: str,
        hold: Callable[[], HostSession],
        give_up: Callable[[HostSession], None],
        *,
        opened: bool = False,
    ) -> HostSession:
        """The session that each stage's owner holds, on all ranks of the stage."""
        held = self.team.together(lambda: self._if_owner(hold), lambda had: give_up(had) if had else None)
        try:
            if opened:
                reconcile(self.team, held)
            found, tokens = standings(self.team, held), share_log(self.team, held)

            def have() -> HostSession:
                if held is not None:
                    return held
                owned = found[self.team.owner]
                return view(self.attachment, owned, self.format, self._name(name), tokens)

            session = self.team.together(have, lambda had: None if held else had.close())
        except BaseException:
            if held is not None:
                give_up(held)
            raise
        assert isinstance(session, TeamSession)
        session.join(self.team, min(owned.pages for owned in found if owned.number))
        return session

    def _pages(self) -> ResidentPages:
        return TeamPages(self.attachment, self.format, self.team)
