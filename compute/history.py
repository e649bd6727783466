"""The history of one session, as the decoder sees it: rows are appended, selected from, and attended to.

Resident and offloaded are one code path. They differ in where a page is at home, and in what turns a selection into
addresses: the page table, or a round of the hot cache. Attention gets addresses in selection order either way, so the
outputs are bit-equal.

    resident    pages in VRAM, written in place
    offloaded   pages in host RAM; new rows are written to a ring of pages in VRAM, copied back page by page

Invariants of the ring: every position from ``ring_first`` on is read and written there; a page leaves the ring only
when it is committed; the last page of the history is always in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compute.arena import Arena, Piece
from compute.attach import Attachment, DeviceBuffer
from compute.copyback import Copyback
from compute.homes import Home
from compute.hot_cache import HotCaches
from compute.index_keys import KeyBlocks, KeyTable
from compute.kernels.choice import KernelsName, default_kernels, make_kernels
from compute.kernels.kernel_set import KernelSet
from compute.kernels.state import LENGTH, NO_RING, RING_FIRST, PageMap, PageRun
from compute.negative_control import NegativeControl
from compute.session import HostSession
from compute.warming import Warming
from protocol.errors import CopybackLag, InvalidValue
from protocol.layout import PAGE_TOKENS, PageFormat, round_up
from protocol.session_state import COUNTER_NAMES

EXTEND_PAGES = 16
"""Pages asked of the daemon at a time, ahead of need."""


class History:
    """One session's history on one device: resident, or with a ``session``, ``caches`` and a ring, offloaded."""

    def __init__(
        self,
        attachment: Attachment,
        page_format: PageFormat,
        keys: KeyBlocks,
        home: Home,
        *,
        max_tokens: int,
        topk: int,
        ring_pages: int,
        caches: HotCaches | None,
        session: HostSession | None,
        kernels: KernelsName | None = None,
    ) -> None:
        self.format = page_format
        self.max_tokens = round_up(max_tokens, PAGE_TOKENS)
        self.topk = topk
        self.caches = caches
        self.session = session
        self.selections = 0
        self._counted_before = session.state.counters if session else {}
        self._attachment = attachment
        self._home = home
        self._runs_at_home: list[PageRun] = []
        self._length = 0
        self._use_cache = self._decodes_next = False
        self._control = NegativeControl(page_format, caches)
        number = session.account if session else 0
        pages = self.max_tokens // PAGE_TOKENS
        shapes = (pages,), (len(page_format.groups), pages), (2,)
        self._tables = Arena(attachment, "tables", [Piece(shape, torch.int64) for shape in shapes], number)
        self._ring: DeviceBuffer | None = None
        self._ring_pages = ring_pages
        self._ring_first_page = 0
        if session:
            try:
                self._ring = attachment.allocate(ring_pages * page_format.stride, "ring", number)
            except BaseException:
                self._tables.free()
                raise
        page_address, key_block_address, window = self._tables.tensors
        window[RING_FIRST] = 0 if self._ring else NO_RING
        self.map = PageMap(
            page_address,
            key_block_address,
            window,
            self._ring.address if self._ring else 0,
            ring_pages if self._ring else 1,
            page_format,
        )
        groups = caches.groups if caches else []
        name = kernels or default_kernels(attachment.device.torch_device.type)
        try:
            self.kernels: KernelSet = make_kernels(name, attachment.memory, self.map, groups, topk)
        except BaseException:
            if self._ring:
                self._ring.free()
            self._tables.free()
            raise
        self._warming = Warming(caches, self.kernels)
        self._keys = KeyTable(keys, key_block_address)
        self._mapped_pages = 0
        self._closed = False
        self.copyback = (session.copyback if session else Copyback)(attachment.device, self._publish)

    # What the decoder calls

    @property
    def length(self) -> int:
        """Rows of the history, committed or not."""
        return self._length

    def begin(self, tokens: int, *, cached: bool, decodes_next: bool = False) -> Tensor:
        """Make room for ``tokens`` new rows; returns their positions, int64 [tokens].

        ``cached`` says that selections are to be read through the hot cache (decoding) rather than in place
        (prefilling, whose query rows would pin more slots than there are), ``decodes_next`` that this is the last pass
        before decoding: the hot cache is warmed beside it. Raises `InvalidValue` past the session's limit,
        `OutOfCapacity` where a tier is full; then nothing has changed but that pages may have been added.
        """
        self.warm() if cached else self._warming.join()
        first, end = self._length, self._length + tokens
        self._make_room(first, tokens)
        self._set_length(end)
        self._use_cache = cached and self.caches is not None
        self._decodes_next = decodes_next
        if self.session and not cached:
            self._runs_at_home = self.session.page_runs(self._ring_first_page)
        return torch.arange(first, end, device=self._attachment.device.torch_device)

    def append(self, layer: int, positions: Tensor, latent: Tensor, rope: Tensor) -> None:
        """Store the rows of ``layer``: latent [n, 512], rope [n, 64]."""
        group = self.format.group_of_layer(layer)
        self.kernels.append(group, layer - self.format.groups[group].first_layer, positions, latent, rope)

    def append_keys(self, group: int, positions: Tensor, keys: Tensor) -> None:
        """Store index keys [n, 128] of ``group``."""
        self.kernels.append_keys(group, positions, keys)

    def select(self, group: int, query: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        """The selection of each query row: int32 [n, topk], ascending, -1 last."""
        selection = self.kernels.select(group, query, weights, positions)
        if not self._use_cache:
            self._warming.keep(group, selection)
            if self._decodes_next:
                self._warming.begin(group, self._ring_first_page * PAGE_TOKENS)
        return selection

    def addresses(self, group: int, selection: Tensor) -> Tensor:
        """Absolute addresses of the selected group rows: int64 [n, topk], 0 where nothing is selected."""
        self.selections += selection.shape[0]
        if not self._use_cache or self.caches is None:
            # More reads than there are rows at home: each of these is better brought over once.
            if 0 < self._ring_first_page * PAGE_TOKENS < selection.numel():
                return self.kernels.streamed(group, selection, self._runs_at_home, length=self._length)
            return self.kernels.in_place(group, selection, length=self._length)
        addresses = self.kernels.round(group, selection)
        self._control.strike(group)
        return addresses

    def attend(self, layer: int, addresses: Tensor, query_latent: Tensor, query_rope: Tensor, scale: float) -> Tensor:
        """Attention output in the latent space: float32 [n, heads, 512]."""
        in_group = layer - self.format.groups[self.format.group_of_layer(layer)].first_layer
        return self.kernels.attend(addresses, in_group, query_latent, query_rope, scale)

    def finish(self, positions: Tensor, hidden: Tensor) -> None:
        """End a step: the rows of all layers are stored. ``hidden`` [n, hidden size] is after the final norm.

        Stores the hidden of every page's last token, where the model's last layer is, starts the copyback of pages that
        are full, and publishes what earlier copies have completed.
        """
        self.kernels.end_pass()
        first, end = self._length - positions.shape[0], self._length
        for page in range(first // PAGE_TOKENS, end // PAGE_TOKENS) if self.format.hidden_size else ():
            last = (page + 1) * PAGE_TOKENS - 1
            self.store_hidden(page, hidden[last - first])
        self._copy_back(first, end)

    # What recorded steps need, which count rows, write them and select from them without the host

    def store_hidden(self, page: int, hidden: Tensor) -> None:
        """Store the hidden [hidden size] of the last token of ``page``, which is being written, in the page."""
        start = self.format.hidden_offset
        space = self.page(page)[start : start + 4 * self.format.hidden_size]
        space.view(torch.float32).copy_(hidden)

    def prepare(self, rows: int) -> None:
        """Make room for ``rows`` rows behind the settled ones, for steps that are enqueued from now on.

        Raises what `begin` raises.
        """
        self.warm()
        self._make_room(self._length, rows)
        self._use_cache = self.caches is not None

    def reserve(self, rows: int) -> None:
        """Have pages for ``rows`` more, as far as the session may grow, so that steps wait for nobody at a page's end.

        Raises `OutOfCapacity`.
        """
        self._add_pages(-(-min(self._length + rows, self.max_tokens) // PAGE_TOKENS))

    def settle(self, end: int) -> None:
        """Take rows below ``end`` as they are, hiddens included: no step will write them again. Copies full pages."""
        if self._closed:  # a reader of its tokens ends after it
            return
        first, self._length = self._length, end
        self.selections += (end - first) * len(self.format.groups)
        self._control.strike()
        self._copy_back(first, end)

    def settled(self) -> None:
        """No step is enqueued any more: what lies behind the settled rows does not count."""
        if not self._closed:
            self._set_length(self._length)

    # What the worker calls

    def warm(self) -> None:
        """Decoding begins with a warm cache: what was not fetched beside the last pass is fetched now."""
        self.kernels.release()
        self._warming.finish(self._ring_first_page * PAGE_TOKENS)

    def barrier(self, hidden: Tensor | None = None) -> None:
        """Return when every row of every group is committed. ``hidden`` [hidden size] is the last row's.

        A page is copied with the rows of all groups, so there is one count for all. Raises `CopybackLag` where a full
        page was not copied; then nothing more is committed than was.
        """
        if self.session is None:
            return
        full_pages, partial = divmod(self._length, PAGE_TOKENS)
        self.copyback.wait_through(self.copyback.submitted_pages)
        if self.copyback.committed_pages < full_pages:
            raise CopybackLag(self.session.name, self._length, self.copyback.committed_pages * PAGE_TOKENS)
        if partial:
            self.copyback.copy_partial(self._home.page(full_pages), self.page(full_pages))
        payload = hidden.float().cpu().numpy().tobytes() if hidden is not None and self.format.hidden_size else b""
        self.session.publish_commit(self._length, payload)
        self._publish_counters(self.session, self.caches.counters() if self.caches else {})
        if self.session.committed_rows != self.session.state.logical_rows:
            raise CopybackLag(self.session.name, self.session.state.logical_rows, self.session.committed_rows)

    def truncate(self, tokens: int, *, logged: int | None = None) -> None:
        """Forget all rows from ``tokens`` on. Their old values can never be read again.

        The commit record keeps its payload, the hidden of its last row, unless that row goes. The hidden of a page's
        last row is in the page as well. With ``logged``, a session's log keeps so many tokens, else one for each row.
        """
        if not 0 <= tokens <= self._length:
            raise InvalidValue("rows to keep", tokens, f"0 to {self._length}")
        self.copyback.wait_through(self.copyback.submitted_pages)
        self._attachment.device.synchronize()
        self._home.truncate(tokens, logged=logged)
        self._warming.forget()
        self.kernels.release()  # pages at home may change now
        # The pages that are written next are the session's own from now on, if they were shared.
        for page in range(max(tokens - 1, 0) // PAGE_TOKENS, round_up(tokens, PAGE_TOKENS) // PAGE_TOKENS):
            self.map.page_address[page] = self._home.page_address(page)
            self._keys.own(page)
        self._place(tokens, ring_holds_from=self._ring_first_page)

    def trim(self) -> None:
        """Give back the pages that no row is in yet, and their key blocks: what `reserve` took and nobody needed."""
        if self.session is None:
            return
        pages = round_up(max(self._length, self.session.committed_rows), PAGE_TOKENS) // PAGE_TOKENS
        if self.session.page_count <= pages:
            return
        self.copyback.wait_through(self.copyback.submitted_pages)
        self._attachment.device.synchronize()
        self.session.trim(pages)
        self._keys.truncate(pages)
        self._mapped_pages = min(self._mapped_pages, pages)

    def restore(self, tokens: int, source: History | None = None) -> None:
        """Start at the first ``tokens`` rows of a session that was opened: index keys are copied back to VRAM.

        With ``source``, a history of this worker that begins with the same rows, its keys are shared instead, as its
        pages are.
        """
        if source is not None:
            self._keys.share(source._keys, max(tokens - 1, 0) // PAGE_TOKENS)
        shared = len(self._keys)
        self._add_pages(self._home.page_count)
        self._keys.load(self._home, range(shared, round_up(tokens, PAGE_TOKENS) // PAGE_TOKENS))
        self._place(tokens, ring_holds_from=self.max_tokens)

    def rewind(self) -> None:
        """Have the last row computed again, for its hidden. The session's tokens, commit and pages stay as they are."""
        self.copyback.wait_through(self.copyback.submitted_pages)
        self._place(self._length - 1, ring_holds_from=self._ring_first_page)

    def counters(self) -> dict[str, int]:
        """Selections, hits, misses, ring hits, copybacks. Waits for the device: not for the token path."""
        counted = self.caches.counters() if self.caches else dict.fromkeys(("hits", "misses", "ring_hits"), 0)
        return {"selections": self.selections, "copybacks": self.copyback.copies, **counted}

    def close(self, *, keep: bool = False) -> None:
        """Give all VRAM back, and the pages too unless ``keep`` leaves the session stored for another worker."""
        self._closed = True
        self.copyback.wait_through(self.copyback.submitted_pages)
        self._attachment.device.synchronize()
        self._keys.truncate(0)
        if self.caches:
            self.caches.free()
        if self._ring:
            self._ring.free()
        self._tables.free()
        if keep and self.session:
            self.session.detach()
        else:
            self._home.close()

    def corrupt_next_fetch(self) -> None:
        """Make the next row that is fetched wrong in its slot, once."""
        self._control.armed = True

    def _make_room(self, first: int, rows: int) -> None:
        end = first + rows
        if rows < 1 or end > self.max_tokens:
            raise InvalidValue("rows of the history", end, f"more than {first}, at most {self.max_tokens}")
        if self._ring and (end - 1) // PAGE_TOKENS - first // PAGE_TOKENS >= self._ring_pages:
            limit = (self._ring_pages - 1) * PAGE_TOKENS
            raise InvalidValue("rows appended at once", rows, f"at most {limit}: they must fit the ring")
        self._add_pages(round_up(end, PAGE_TOKENS) // PAGE_TOKENS)
        self._advance_ring((end - 1) // PAGE_TOKENS)

    def _copy_back(self, first: int, end: int) -> None:
        """Start the copies of the pages that rows ``first`` to ``end - 1`` filled; publish what is done."""
        for page in range(first // PAGE_TOKENS, end // PAGE_TOKENS):
            if self._ring:
                self.copyback.submit(page, self._home.page(page), self.page(page))
        if self.session:
            self.session.state.logical_rows = end
            if first // PAGE_TOKENS < end // PAGE_TOKENS:
                self._publish_counters(self.session, self.caches.recent_counters() if self.caches else {})
        self.copyback.poll()

    def _publish_counters(self, session: HostSession, cached: dict[str, int]) -> None:
        counted = {"selections": self.selections, "copybacks": self.copyback.copies, **cached}
        session.state.publish_counters([self._counted_before[name] + counted.get(name, 0) for name in COUNTER_NAMES])

    # Pages

    def _add_pages(self, pages: int) -> None:
        """Have homes and key blocks for the first ``pages`` pages."""
        if self._home.page_count < pages:
            ahead = min(self.max_tokens // PAGE_TOKENS, round_up(pages, EXTEND_PAGES))
            self._home.extend(ahead - self._home.page_count)
        self._keys.extend(pages)
        new = range(self._mapped_pages, pages)
        if new:
            self.map.page_address[new.start : pages] = torch.tensor([self._home.page_address(page) for page in new])
            self._mapped_pages = pages

    def _advance_ring(self, last_page: int) -> None:
        """Let ``last_page`` into the ring; the pages that leave it are committed first."""
        first = max(self._ring_first_page, last_page - self._ring_pages + 1)
        if not self._ring or first == self._ring_first_page:
            return
        self.copyback.wait_through(first)
        self._ring_first_page = first
        self.map.window[RING_FIRST] = first * PAGE_TOKENS

    def _place(self, tokens: int, *, ring_holds_from: int) -> None:
        """Have ``tokens`` stored rows. The ring has the pages from ``ring_holds_from`` on, and the one written next."""
        pages = round_up(tokens, PAGE_TOKENS) // PAGE_TOKENS
        self._keys.truncate(pages)
        self._mapped_pages = min(self._mapped_pages, pages)
        self._set_length(tokens)
        if self.session:
            self.session.state.logical_rows = tokens  # a holder before this one may have had more
        if not self._ring:
            return
        next_page = tokens // PAGE_TOKENS
        if next_page < ring_holds_from:
            self._ring_first_page = next_page
            self.map.window[RING_FIRST] = next_page * PAGE_TOKENS
            if tokens % PAGE_TOKENS:
                self._attachment.device.start_copy(self.page(next_page), self._home.page(next_page)).wait()
        self.copyback.restart(next_page)

    def page(self, page: int) -> Tensor:
        """uint8 [stride] where ``page`` is read and written: in the ring, or at home."""
        if not self._ring or page < self._ring_first_page:
            return self._home.page(page)
        start = page % self._ring_pages * self.format.stride
        return self._ring.tensor[start : start + self.format.stride]

    def _set_length(self, tokens: int) -> None:
        self._length = tokens
        self.map.window[LENGTH] = tokens

    def _publish(self, pages: int) -> None:
        if self.session:
            self.session.publish_commit(pages * PAGE_TOKENS)
