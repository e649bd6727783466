"""The stable interface for authors of engines: histories in kvd, and what is needed to attend to them.

An engine brings its model and its kernels; kvd keeps the rows. `Node` is a lease on the node's daemon for one device,
`Session` a history in it. All tensors are torch tensors on that device: they speak DLPack and
``__cuda_array_interface__``, and whatever speaks DLPack is taken for them. Errors are those of `protocol.errors`.

`API_VERSION` follows semantic versioning, apart from the version of the package: what is here, as documented, stays
within a major version. What is to go is announced by a `DeprecationWarning` for at least one minor version.
docs/integrating.md has worked examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from compute.attach import Attachment
from compute.client import Client
from compute.device import open_device
from compute.histories import Histories, HistorySettings, Mode
from compute.history import History
from compute.kernels.choice import KernelsName
from compute.kernels.reference_cache import forget
from compute.session import HostSession
from protocol.errors import InvalidValue, UnknownSession
from protocol.layout import PageFormat, encoding_named
from protocol.model import ModelConfig
from protocol.stats import NodeStats

API_VERSION = "1.0.0"

FINGERPRINT_BYTES = 32


class Node:
    """A lease on the daemon whose sockets are in ``run_dir``, for ``device`` (``cpu``, ``cuda`` or ``cuda:N``).

    Raises `DaemonUnavailable` or `NoDevice` where one is missing. When it is closed, or its process dies, VRAM goes
    back and sessions stay stored at their committed rows.
    """

    def __init__(self, run_dir: Path | str = "/run/kvd", device: str = "cuda:0", *, name: str = "engine") -> None:
        self._sessions: list[Session] = []
        with ExitStack() as undo:
            self._device = open_device(device)
            undo.callback(self._device.close)
            self._client = undo.enter_context(Client(Path(run_dir), name=name))
            self._attachment = undo.enter_context(Attachment(self._client, self._device))
            undo.callback(self._close_sessions)
            self._close = undo.pop_all()

    def session(
        self,
        name: str,
        model: ModelConfig | Mapping[str, Any] | Path,
        fingerprint: bytes,
        *,
        max_tokens: int,
        encoding: str = "q8g64",
        mode: Mode = "offloaded",
        hot_rows: int = 32768,
        ring_pages: int = 8,
        kernels: KernelsName | None = None,
    ) -> Session:
        """The stored session called ``name`` at its committed rows, or a new one with room for ``max_tokens``.

        ``model`` is a parsed ``config.json``, or the path of one; ``fingerprint`` is 32 bytes that differ where weights
        differ: sessions of another model are refused (`FingerprintMismatch`). ``mode`` "resident" keeps pages in VRAM,
        and nothing is stored. ``hot_rows`` are the slots of each index group's cache, ``ring_pages`` the newest pages
        of 64 tokens, which stay in VRAM. Raises `OutOfCapacity` where a tier is full, `SessionBusy` where another
        lease holds it.
        """
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise InvalidValue("fingerprint", f"{len(fingerprint)} bytes", f"{FINGERPRINT_BYTES} bytes")
        if isinstance(model, Path):
            config = ModelConfig.from_file(model)
        else:
            config = model if isinstance(model, ModelConfig) else ModelConfig.from_dict(dict(model))
        histories = Histories(self._attachment, config, encoding_named(encoding), fingerprint)
        settings = HistorySettings(mode, max_tokens, hot_rows, ring_pages, name, kernels)
        history = None
        if mode == "offloaded":
            with suppress(UnknownSession):
                history = histories.stored_history(settings)
        opened = Session(histories, history or histories.history(settings))
        self._sessions.append(opened)
        return opened

    def stats(self) -> NodeStats:
        """What the daemon holds, for whom: requested, committed and capacity of every tier."""
        return self._client.stat()

    def close(self) -> None:
        """Give all VRAM back and end the lease. Sessions that are open stay stored at their committed rows."""
        self._close.close()

    def _close_sessions(self) -> None:
        with ExitStack() as all_of_them:
            for session in self._sessions:
                all_of_them.callback(session.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Session:
    """A history: rows of all layers of consecutive tokens. Made by `Node.session`.

    A step: `begin`, then for every layer `append`, for every index group `append_index_keys` and `resolve`, attend, and
    `finish` when the rows of all layers are there. Nothing in it waits for the device or asks the daemon, but that
    `begin` does so now and then for pages to come.
    """

    def __init__(self, histories: Histories, history: History) -> None:
        self._keep = histories  # the key blocks are its
        self._history = history
        self._hidden_size = histories.config.hidden_size
        self._closed = False

    # Where things are

    @property
    def format(self) -> PageFormat:
        """Offsets of rows, keys and hidden states in a page: protocol/SPEC.md, "Pages"."""
        return self._history.format

    @property
    def length(self) -> int:
        """Rows of the history."""
        return self._history.length

    @property
    def committed(self) -> int:
        """Rows that are in host RAM and would survive this process. 0 for a resident session."""
        return self._history.session.committed_rows if self._history.session else 0

    @property
    def page_table(self) -> Tensor:
        """int64 [pages]: absolute address of each page at home, in registered host RAM or, resident, in VRAM.

        The same tensor as long as the session is open; entries are filled as pages come. Pages from ``window[0]`` on
        are read in the ring instead.
        """
        return self._history.map.page_address

    @property
    def key_block_table(self) -> Tensor:
        """int64 [groups, pages]: address of each page's index keys in VRAM: 64 × 128 values, then 64 float32 scales."""
        return self._history.map.key_block_address

    @property
    def window(self) -> Tensor:
        """int64 [2]: the first position that is read in the ring, and the length."""
        return self._history.map.window

    @property
    def ring(self) -> tuple[int, int]:
        """Address of the ring, 0 for none, and its pages: page p is at address + (p mod pages) × ``format.stride``."""
        return self._history.map.ring_base, self._history.map.ring_pages

    # A step

    def begin(self, tokens: int, *, cached: bool = True) -> Tensor:
        """Make room for ``tokens`` new rows; returns their positions, int64 [tokens].

        ``cached`` says that this step resolves through the hot cache; its selections together must fit that. Long
        prefills rather read in place: ``cached=False``. Raises `OutOfCapacity` where a tier is full.
        """
        return self._history.begin(tokens, cached=cached)

    def append(self, layer: int, positions: Any, latent: Any, rope: Any) -> None:
        """Encode and store one layer's rows: positions int64 [n], latent [n, 512], rope [n, 64]."""
        self._history.append(layer, _tensor(positions), _tensor(latent), _tensor(rope))

    def append_encoded(self, group: int, positions: Any, rows: Any) -> None:
        """Store rows that are encoded already: uint8 [n, layers of the group, row bytes], byte for byte.

        Through torch, and it waits for the device: for imports, not for the token path.
        """
        positions, rows = _tensor(positions), _tensor(rows)
        index, history = self.format.groups[group], self._history
        expected = (len(positions), index.layers, self.format.encoding.rows.row_bytes)
        if rows.dtype != torch.uint8 or rows.shape != expected:
            raise InvalidValue("encoded rows", f"{rows.dtype} {tuple(rows.shape)}", f"uint8 {expected}")
        if history.caches:
            forget(history.caches.groups[group], positions)
        self._keep.attachment.memory.write(self.addresses(group, positions), rows.flatten(1))

    def append_index_keys(self, group: int, positions: Any, keys: Any) -> None:
        """Quantise and store a group's index keys: [n, 128]."""
        self._history.append_keys(group, _tensor(positions), _tensor(keys))

    def select(self, group: int, query: Any, weights: Any, positions: Any) -> Tensor:
        """The exact selection of index queries [n, heads, 128] with head weights float32 [n, heads]: int32 [n, k].

        For engines that have none of their own. The head weights carry the factor ``heads ** -0.5``.
        """
        return self._history.select(group, _tensor(query), _tensor(weights), _tensor(positions))

    def resolve(self, group: int, selection: Any) -> Tensor:
        """Where the selected group rows are, fetched where they were missed: int64 [n, k] for int32 [n, k].

        A selection has positions, and -1 for no row, whose address is 0. At an address lie the rows of all layers of
        the group, one after the other, and stay until the next `resolve` of the group. Layer l's row is at address +
        (l − first layer of the group) × row bytes.
        """
        return self._history.addresses(group, _tensor(selection))

    def attend(self, layer: int, addresses: Tensor, query_latent: Any, query_rope: Any, scale: float) -> Tensor:
        """Sparse MLA over resolved rows, float32 [n, heads, 512], of queries [n, heads, 512] and [n, heads, 64].

        For engines that have no kernel that reads rows by address.
        """
        return self._history.attend(layer, addresses, _tensor(query_latent), _tensor(query_rope), scale)

    def finish(self, positions: Any, hidden: Any = None) -> None:
        """End a step: full pages start their way to host RAM, what has arrived is published as committed.

        ``hidden`` [n, hidden size], after the final norm, is stored with each page's last token, zeros without it.
        """
        positions = _tensor(positions)
        if hidden is None:
            hidden = torch.zeros((len(positions), self._hidden_size), device=positions.device)
        self._history.finish(positions, _tensor(hidden))

    # Bytes

    def addresses(self, group: int, positions: Any) -> Tensor:
        """Where group rows are at home or in the ring, int64 of the shape of ``positions``; not through the cache."""
        positions = _tensor(positions)
        found = self._history.kernels.in_place(group, positions.reshape(1, -1).int())
        return found.reshape(positions.shape)

    def read(self, group: int, addresses: Tensor) -> Tensor:
        """The encoded rows at ``addresses`` [...]: uint8 [..., layers of the group, row bytes]; zeros at address 0.

        Waits for the device: for checks and exports, not for the token path.
        """
        layers, nbytes = self.format.groups[group].layers, self.format.encoding.rows.row_bytes
        rows = self._keep.attachment.memory.read(addresses, layers * nbytes)
        return rows.view(*addresses.shape, layers, nbytes)

    # Its life

    def log_tokens(self, tokens: list[int]) -> None:
        """Log token ids, before a client sees them: what a worker that takes over goes on from."""
        if self._history.session:
            self._history.session.state.append_tokens(tokens)

    def tokens(self) -> list[int]:
        """All logged token ids."""
        return self._history.session.state.tokens() if self._history.session else []

    def commit(self) -> int:
        """Return, with the count, when every row is committed; raises `CopybackLag` where one is not."""
        self._history.barrier()
        return self.committed

    def truncate(self, tokens: int) -> None:
        """Forget all rows from ``tokens`` on."""
        self._history.truncate(tokens)

    def stats(self) -> dict[str, int]:
        """Counts of selections, hits, misses, ring hits and copybacks. Waits for the device."""
        return self._history.counters()

    def save(self) -> int:
        """Write the session to the daemon's disk tier, after `commit`; returns the bytes of the file."""
        self.commit()
        session = self._stored()
        return session.attachment.client.save_session(session.name).nbytes

    def close(self, *, keep: bool = True) -> None:
        """Give its VRAM back; once is enough. With ``keep`` the session stays stored, at its committed rows."""
        if not self._closed:
            self._closed = True
            self._history.close(keep=keep)

    def _stored(self) -> HostSession:
        if self._history.session is None:
            raise InvalidValue("session", "resident", "an offloaded one: this one is in VRAM only")
        return self._history.session


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else from_dlpack(value)
