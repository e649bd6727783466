"""A compute worker: one process with a model on one device, a lease on the node's daemon, and histories.

`Worker` makes histories and decodes; the command line around it is in ``compute.cli``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from compute.attach import Attachment
from compute.client import Client
from compute.decode.matrices import WeightType
from compute.device import open_device
from compute.fingerprint import file_identity, fingerprint, seed_identity
from compute.histories import MAX_DRAFTS, Histories
from compute.history import History
from compute.kernels.choice import KernelsName
from compute.model.decoder import Decoder
from compute.model.weights import load_weights, random_weights
from compute.recovery import Recovery
from protocol.errors import InvalidValue
from protocol.layout import Encoding
from protocol.messages import Saved
from protocol.model import ModelConfig
from protocol.stats import NodeStats

if TYPE_CHECKING:  # else imported where they are used: the reference decoder needs no triton
    from compute.decode.decoder import FastDecoder
    from compute.decode.draft_layer import DraftRows
    from compute.decode.mtp import Speculation
    from compute.decode.step import DecodeStep
    from compute.decode.weights import DecodeWeights

Progress = Callable[[int, int], None]
_T = TypeVar("_T")

WARM_AFTER = 3
"""Tokens after which what a step needs of the device is there."""
TOGETHER_NS = 50_000
"""Tokens with less than this between them are of one step."""


class Worker(Histories):
    """A model, a device and a lease. Raises `NoDevice`, `DaemonUnavailable` or `InvalidValue` where one is missing.

    Weights come from ``weights`` (a safetensors file or folder), else they are random, from ``seed``. With a ``dtype``
    the model is `compute.decode`, whose weights are of that type, else the float32 reference; without one the device
    decides: bf16 on a GPU, unless ``kernels`` are the reference, and float32 on a CPU. ``rows`` is the most that the
    former prefills at a time, and ``mtp`` how many tokens it drafts for each step.

    When the daemon goes away, calls that need it raise `DaemonUnavailable` after ``daemon_wait_s`` without another one.

    This one has the whole model; `compute.parallel.worker` has a part of it on each rank.
    """

    reports = True
    """Whether this process says what comes of its work: one of several ranks does."""
    _layers: tuple[int, int] | None = None
    """The first layer and the end of those that are here, if not all are."""
    _part = b""
    """What the rows of a part of a model depend on, beside the model."""

    def __init__(
        self,
        run_dir: Path,
        device: str,
        config: ModelConfig,
        encoding: Encoding,
        *,
        seed: int = 0,
        weights: Path | None = None,
        dtype: WeightType | None = None,
        kernels: KernelsName | None = None,
        rows: int = 256,
        mtp: int = 0,
        daemon_wait_s: float = 0.0,
    ) -> None:
        self.device = open_device(device)
        self.last_hidden: Tensor | None = None
        """Hidden [hidden size] of the row that was appended last; None where nobody kept it."""
        self._step: DecodeStep | Speculation | None = None
        self._recorded: WeakSet[DecodeStep | Speculation] = WeakSet()
        self._reader: Generator[int, None, None] | None = None
        """Who has the one place of ``_step``, or had it last."""
        self._mtp = mtp
        self._draft_rows: DraftRows | None = None
        self.kernels = kernels
        target = self.device.torch_device
        if dtype is None and target.type == "cuda" and kernels != "reference":
            dtype = "bf16"
        if not 0 <= mtp <= (MAX_DRAFTS if dtype else 0):
            raise InvalidValue("MTP depth", mtp, f"0 to {MAX_DRAFTS}, and 0 with the float32 reference")
        identity = file_identity(weights) if weights else seed_identity(seed)
        self.decoder: Decoder | FastDecoder
        if dtype is None:
            loaded = load_weights(config, weights) if weights else random_weights(config, seed)
            self.decoder = Decoder(config, loaded, encoding, device=target)
        else:
            from compute.decode.weights import load_weights_on, random_weights_on

            # Random weights of one seed differ by kind of device, and the rows of one model by the type of its weights.
            identity += f", {dtype}".encode() if weights else f", {dtype} on {target.type}".encode()
            load = partial(load_weights_on, path=weights) if weights else partial(random_weights_on, seed=seed)
            loaded_on = partial(load, config=config, kind=dtype, device=target, mtp=mtp > 0)
            self.decoder = self._fast_decoder(config, loaded_on, rows)
            if mtp:
                from compute.decode.draft_layer import DraftRows

                self._draft_rows = DraftRows(self.decoder)
        self.client = Client(run_dir, name=f"kvd-worker {device}")
        try:
            attachment = Attachment(self.client, self.device)
        except BaseException:
            self.client.close()
            raise
        if daemon_wait_s:
            attachment.on_loss = Recovery(attachment, daemon_wait_s)
        self.model = fingerprint(config, encoding, identity)
        """The fingerprint of the whole model; `fingerprint` is that of the part that is here."""
        part = fingerprint(config, encoding, identity + self._part)
        super().__init__(attachment, config, encoding, part, drafts=mtp, layers=self._layers)

    def prefill(self, history: History, tokens: Sequence[int], chunk: int, progress: Progress | None = None) -> Tensor:
        """Append ``tokens``; returns the hidden [hidden size] of the last one. ``progress`` gets (done, total)."""
        if not tokens:
            raise InvalidValue("tokens to prefill", 0, "at least 1")
        hidden = torch.empty(0)
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            hidden = self.step(history, part, cached=False, decodes_next=start + chunk >= len(tokens))
            if progress:
                progress(start + len(part), len(tokens))
        self.attachment.warmed_up()
        return hidden[-1]

    def decode(self, history: History, hidden: Tensor, count: int) -> Iterator[int]:
        """Yield ``count`` tokens, greedily, from the hidden [hidden size] of the history's last row on.

        A token is logged before it is yielded; its row is appended when the next one is asked for. Where steps are
        recorded, a reader of tokens gives its place up to the next one: it raises `InvalidValue` if it is asked again.
        """
        asked = 0
        for produced, token in enumerate(self._decode(history, hidden, count)):
            if history.session:
                history.session.state.append_tokens([token])
            if produced:
                self.report_gap(time.monotonic_ns() - asked)
            if produced == WARM_AFTER:
                self.attachment.warmed_up()
            yield token
            asked = time.monotonic_ns()

    @property
    def mtp(self) -> int:
        """The most tokens drafted for a step."""
        return self._mtp

    def steps(self, places: int, depth: int, max_tokens: int, *, cached: bool = True) -> DecodeStep | Speculation:
        """Recorded steps of up to ``places`` sessions, none of them longer than ``max_tokens``, with ``depth`` drafts.

        Those of a worker with drafts keep up the MTP layer's rows at a depth of 0 too. Raises `InvalidValue` for the
        float32 reference, which has none.
        """
        from compute.decode.decoder import FastDecoder
        from compute.decode.mtp import Speculation
        from compute.decode.step import DecodeStep

        if not isinstance(self.decoder, FastDecoder):
            raise InvalidValue("decoder of recorded steps", "the float32 reference", "one with a dtype")
        of_model = (self.decoder.weights, self.format, self.device.torch_device)
        made: DecodeStep | Speculation
        if self._mtp:
            made = Speculation(
                *of_model, places=places, depth=depth, max_tokens=max_tokens, cached=cached, kernels=self.kernels
            )
        else:
            made = DecodeStep(*of_model, places=places, max_tokens=max_tokens, cached=cached, kernels=self.kernels)
        self._recorded.add(made)
        return made

    def report_gap(self, nanoseconds: int) -> None:
        """Tell the daemon how long a token took; those that come together, drafts of one step, are one gap."""
        report = self.client.report
        if report is not None and nanoseconds > TOGETHER_NS:
            report.gap(nanoseconds)

    def _decode(self, history: History, hidden: Tensor, count: int) -> Iterator[int]:
        token = self._first_token(hidden)
        yield token
        if not isinstance(self.decoder, Decoder):
            yield from self._decode_by_steps(history, hidden, token, count - 1)
            return
        for _ in range(count - 1):
            hidden = self.step(history, [token], cached=True)[-1]
            token = int(self.decoder.logits(hidden[None])[0].argmax())
            yield token

    def _decode_by_steps(self, history: History, hidden: Tensor, token: int, count: int) -> Iterator[int]:
        """Recorded steps of one session, with drafts or without; those for the last history are kept."""
        from compute.decode import generate, mtp

        cached, most = history.caches is not None, history.max_tokens
        step = self._step
        if step is None or (step.cached, step.max_tokens) != (cached, most):
            step = self._step = self.steps(1, self._mtp, most, cached=cached)
        if not count:
            return
        self.last_hidden = None  # that of the last row is known at the end: steps run ahead
        if self._reader is not None:
            self._reader.close()
        reader = self._reader = (
            mtp.generate(step, history, hidden, token, count)
            if isinstance(step, mtp.Speculation)
            else generate.generate(step, history, token, count)
        )
        yield from reader
        if self._reader is not reader:
            raise InvalidValue("reader of a worker's tokens", "one of two", "the one that began last")
        if not isinstance(step, mtp.Speculation):
            self.last_hidden = step.hidden[0, 0].clone()

    def _fast_decoder(self, config: ModelConfig, load: Callable[..., DecodeWeights], rows: int) -> FastDecoder:  # noqa: ARG002
        """``load`` makes the weights, of all layers or of a part of them."""
        from compute.decode.decoder import FastDecoder

        return FastDecoder(load(), self.device.torch_device, rows=rows, kernels=self.kernels)

    def _first_token(self, hidden: Tensor) -> int:
        """The most likely token behind the row of ``hidden`` [H]."""
        return int(self.decoder.logits(hidden[None])[0].argmax())

    @torch.inference_mode()
    def step(self, history: History, tokens: Sequence[int], *, cached: bool, decodes_next: bool = False) -> Tensor:
        """Append one token or several and run the model over them: hidden float32 [n, hidden size].

        ``cached`` and ``decodes_next`` are `History.begin`'s.
        """
        positions = history.begin(len(tokens), cached=cached, decodes_next=decodes_next)
        ids = torch.tensor(tokens, dtype=torch.int64)  # on the host, so that looking at them waits for nothing
        hidden = self.decoder.forward(ids, positions, history)
        if self._draft_rows is not None:
            self._draft_rows.append(history, positions, ids.to(positions.device, non_blocking=True), hidden)
        history.finish(positions, hidden)
        self.last_hidden = hidden[-1]
        return hidden

    def barrier(self, history: History) -> None:
        """Return when every row of ``history``, whose last row is the last that was appended, is committed."""
        self.commit(history, self.last_hidden)

    def commit(self, history: History, hidden: Tensor | None) -> None:
        """Return when every row of ``history`` is committed; ``hidden`` [hidden size] is the last one's, if known."""
        history.barrier(hidden)

    def end(self, history: History, *, keep: bool = False) -> None:
        """Give its memory back; with ``keep`` the session stays stored."""
        history.close(keep=keep)

    def save(self, history: History) -> list[Saved]:
        """Write the session of ``history`` to disk, up to its last row."""
        if history.session is None:
            raise InvalidValue("history to save", "resident", "an offloaded one")
        self.barrier(history)
        return [self.client.save_session(history.session.name)]

    def restore(self, name: str) -> None:
        """Have what was saved as ``name`` be a stored session."""
        encoding = self.format.encoding.name
        self.client.restore_session(self._name(name), fingerprint=self.fingerprint, encoding=encoding)

    def end_stored(self, name: str) -> None:
        """End a session that nobody holds. Raises `UnknownSession`, or `SessionBusy` where somebody does."""
        self._opened(name).close()

    def together(self, act: Callable[[], _T]) -> _T:
        """What ``act`` gives; where there are several ranks, once it has gone well on all, else one's error on all."""
        return act()

    def shared(self, value: _T, kind: Any) -> _T:  # noqa: ARG002
        """``value``, which is a ``kind``; where there are several ranks, rank 0's."""
        return value

    def stat(self) -> NodeStats:
        """The daemon's statistics."""
        return self.attachment.with_daemon(self.client.stat)

    def prompt_tokens(self, tokens: Sequence[int]) -> list[int]:
        """``tokens``, or the BOS token where there are none."""
        return list(tokens) or [self.config.bos_token_id]

    def close(self) -> None:
        """Unmap everything and end the lease."""
        self._give_up_steps()
        self.attachment.close()
        self.client.close()
        self.device.close()

    def _give_up_steps(self) -> None:
        for made in self._recorded:
            made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
