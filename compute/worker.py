"""A compute worker: one process with a model on one device, a lease on the node's daemon, and histories.

`Worker` makes histories and decodes; the command line around it is in ``compute.cli``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch
from torch import Tensor

from compute.attach import Attachment
from compute.client import Client
from compute.device import open_device
from compute.fingerprint import file_identity, fingerprint, seed_identity
from compute.history import History
from compute.homes import ResidentPages
from compute.hot_cache import HotCaches
from compute.index_keys import KeyBlocks
from compute.kernels.choice import KernelsName
from compute.model.decoder import Decoder
from compute.model.weights import load_weights, random_weights
from compute.recovery import Recovery
from compute.session import HostSession
from protocol.errors import DaemonUnavailable, InvalidValue, SessionDamaged
from protocol.layout import PAGE_TOKENS, Encoding, round_up
from protocol.model import ModelConfig
from protocol.prefix import chain_start, extend_chain
from protocol.stats import NodeStats

Mode = Literal["resident", "offloaded"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class HistorySettings:
    """How a history is kept. ``hot_rows`` and ``ring_pages`` serve the offloaded mode only.

    Without ``kernels``, the device decides which.
    """

    mode: Mode
    max_tokens: int
    hot_rows: int = 32768
    ring_pages: int = 8
    name: str = "default"
    kernels: KernelsName | None = None


class Worker:
    """A model, a device and a lease. Raises `NoDevice`, `DaemonUnavailable` or `InvalidValue` where one is missing.

    Weights come from ``weights`` (a safetensors file or folder), else they are random, from ``seed``. When the daemon
    goes away, calls that need it raise `DaemonUnavailable` after ``daemon_wait_s`` without another one.
    """

    def __init__(
        self,
        run_dir: Path,
        device: str,
        config: ModelConfig,
        encoding: Encoding,
        *,
        seed: int = 0,
        weights: Path | None = None,
        daemon_wait_s: float = 0.0,
    ) -> None:
        self.config = config
        self.device = open_device(device)
        identity = file_identity(weights) if weights else seed_identity(seed)
        self.fingerprint = fingerprint(config, encoding, identity)
        loaded = load_weights(config, weights) if weights else random_weights(config, seed)
        self.decoder = Decoder(config, loaded, encoding, device=self.device.torch_device)
        self.format = config.page_format(encoding)
        self.client = Client(run_dir, name=f"kvd-worker {device}")
        try:
            self.attachment = Attachment(self.client, self.device)
        except BaseException:
            self.client.close()
            raise
        if daemon_wait_s:
            self.attachment.on_loss = Recovery(self.attachment, daemon_wait_s)
        self._keys = KeyBlocks(self.attachment, self.format)

    def history(self, settings: HistorySettings) -> History:
        """A new, empty history."""
        session = None
        if settings.mode == "offloaded":
            session = HostSession.create(
                self.attachment,
                settings.name,
                self.format,
                fingerprint=self.fingerprint,
                token_capacity=settings.max_tokens,
                commit_bytes=4 * self.config.hidden_size,
            )
        return self._history(settings, session)

    def stored_history(self, settings: HistorySettings) -> History:
        """The history of a stored session, at its committed rows; it may grow to what the session was made for."""
        session = HostSession.open(self.attachment, settings.name, self.format, fingerprint=self.fingerprint)
        return self._restored(session, settings)

    def take_over(self, settings: HistorySettings) -> tuple[History, list[int]]:
        """Go on where a worker ended, in whatever way: the stored history, and all acknowledged tokens.

        The history has the committed rows at most, and one row less than there are tokens. The caller appends the
        tokens from ``history.length`` on (`prefill`), which gives the hidden that decoding goes on from; none of them
        is sampled again. Raises what `stored_history` raises, and `SessionDamaged` if rows are committed that no
        acknowledged token belongs to.
        """
        history = self.stored_history(settings)
        assert history.session is not None
        tokens = history.session.state.tokens()
        if history.length > len(tokens):
            history.close(keep=True)
            raise SessionDamaged(
                f"session {settings.name!r} has {history.length} committed rows and {len(tokens)} tokens",
                session=history.session.number,
            )
        if tokens and history.length == len(tokens):
            history.rewind()
        return history, tokens

    def fork(self, source: History, settings: HistorySettings, rows: int | None = None) -> History:
        """A history that begins with the first ``rows`` rows of ``source``, by default with all; they share pages.

        ``source`` is offloaded and at its barrier.
        """
        assert source.session is not None, "a resident history has no pages to share"
        kept = source.length if rows is None else rows
        return self._restored(source.session.fork(kept, settings.name), settings)

    def fork_prefix(self, settings: HistorySettings, tokens: Sequence[int]) -> History | None:
        """A history that begins as ``tokens`` do, as far as a stored or held session of this uid has their pages.

        At least one token is left to be appended by the caller. None where no session has the first page.
        """
        encoding = self.format.encoding.name
        packed = array("i", tokens[: max(len(tokens) - 1, 0)]).tobytes()
        digests = extend_chain(chain_start(self.fingerprint, encoding), packed)
        found = self.client.find_prefix(fingerprint=self.fingerprint, encoding=encoding, digests=digests)
        if not found.pages:
            return None
        rows = found.pages * PAGE_TOKENS
        session = HostSession.fork_of(
            self.attachment, found.session, found.generation, rows, settings.name, self.format
        )
        return self._restored(session, settings)

    def prefill(self, history: History, tokens: Sequence[int], chunk: int, progress: Progress | None = None) -> Tensor:
        """Append ``tokens``; returns the hidden [hidden size] of the last one. ``progress`` gets (done, total)."""
        if not tokens:
            raise InvalidValue("tokens to prefill", 0, "at least 1")
        hidden = torch.empty(0)
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            hidden = self.step(history, part, cached=False)
            if progress:
                progress(start + len(part), len(tokens))
        return hidden[-1]

    def decode(self, history: History, hidden: Tensor, count: int) -> Iterator[int]:
        """Yield ``count`` tokens, greedily, from the hidden [hidden size] of the history's last row on.

        A token is logged before it is yielded; its row is appended when the next one is asked for.
        """
        for produced in range(count):
            token = int(self.decoder.logits(hidden[None])[0].argmax())
            if history.session:
                history.session.state.append_tokens([token])
            yield token
            if produced + 1 < count:
                hidden = self.step(history, [token], cached=True)[-1]

    @torch.inference_mode()
    def step(self, history: History, tokens: Sequence[int], *, cached: bool) -> Tensor:
        """Append one token or several and run the model over them: hidden float32 [n, hidden size]."""
        positions = history.begin(len(tokens), cached=cached)
        ids = torch.tensor(tokens, dtype=torch.int64, device=positions.device)
        hidden = self.decoder.forward(ids, positions, history)
        history.finish(positions, hidden)
        return hidden

    def stat(self) -> NodeStats:
        """The daemon's statistics."""
        try:
            return self.client.stat()
        except DaemonUnavailable as error:
            self.attachment.daemon_lost(error)
        return self.client.stat()

    def prompt_tokens(self, tokens: Sequence[int]) -> list[int]:
        """``tokens``, or the BOS token where there are none."""
        return list(tokens) or [self.config.bos_token_id]

    def close(self) -> None:
        """Unmap everything and end the lease."""
        self.attachment.close()
        self.client.close()
        self.device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _restored(self, session: HostSession, settings: HistorySettings) -> History:
        """The history of a session that this worker holds, at its committed rows."""
        history = self._history(replace(settings, max_tokens=session.token_capacity), session, new=False)
        history.restore(session.committed_rows)
        return history

    def _history(self, settings: HistorySettings, session: HostSession | None, *, new: bool = True) -> History:
        with ExitStack() as undo:
            caches = None
            if session:
                undo.callback(session.close if new else session.detach)
                caches = HotCaches(
                    self.attachment,
                    self.format,
                    slots=settings.hot_rows,
                    max_tokens=round_up(settings.max_tokens, PAGE_TOKENS),
                    topk=self.config.index_topk,
                    session=session.number,
                )
                undo.callback(caches.free)
            history = History(
                self.attachment,
                self.format,
                self._keys,
                session or ResidentPages(self.attachment, self.format),
                max_tokens=settings.max_tokens,
                topk=self.config.index_topk,
                ring_pages=settings.ring_pages,
                caches=caches,
                session=session,
                kernels=settings.kernels,
            )
            undo.pop_all()
        return history
