"""The recorded step: offloaded against resident bit for bit, while pages fill, leave the ring, and are copied back."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from compute.copyback import Copyback
from compute.kernels import reference
from compute.kernels.kernel_set import ReferenceKernels
from compute.kernels.state import LENGTH, NO_RING, RING_FIRST, GroupCache, PageMap
from compute.step import OVERLAPS, AttentionStep, Model, Overlap, StepShape, _no_collection
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS, PageFormat
from protocol.model import GLM_5_3
from tests.kernels.pages import DEVICE, assert_inverse, format_of

HEADS, INDEX_HEADS, SCALE = 3, 32, 0.05


def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)


class Session:
    """``tokens`` rows of history and room for more: resident, or offloaded to host RAM with a ring and small caches."""

    def __init__(
        self, page_format: PageFormat, tokens: int, pages: int, *, slots: int = 0, ring_pages: int = 2, seed: int = 0
    ) -> None:
        self.format, self.tokens, self.ring_pages = page_format, tokens, ring_pages
        self.offloaded = slots > 0
        stride, groups = page_format.stride, len(page_format.groups)
        block = page_format.encoding.keys.block_bytes
        on_host = self.offloaded and DEVICE.type == "cuda"
        self.home = torch.zeros(pages * stride, dtype=torch.uint8, device="cpu" if on_host else DEVICE)
        self.home = self.home.pin_memory() if on_host else self.home
        self.ring = torch.zeros(ring_pages * stride, dtype=torch.uint8, device=DEVICE)
        self.key_blocks = torch.zeros(groups * pages * block, dtype=torch.uint8, device=DEVICE)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
        self.frame = order.tolist()
        blocks = torch.arange(groups * pages, device=DEVICE).view(groups, pages)
        self.map = PageMap(
            page_address=(self.home.data_ptr() + order * stride).to(DEVICE),
            key_block_address=self.key_blocks.data_ptr() + blocks * block,
            window=torch.tensor([NO_RING, tokens], device=DEVICE),
            ring_base=self.ring.data_ptr(),
            ring_pages=ring_pages,
            format=page_format,
        )
        self.caches: list[GroupCache] = []
        for group in range(groups) if self.offloaded else ():
            layers, row_bytes = page_format.groups[group].layers, page_format.encoding.rows.row_bytes
            rows = torch.full((slots, layers, row_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)  # NaN
            self.caches.append(GroupCache.empty(rows, pages * PAGE_TOKENS))
        self.ring_first_page = tokens // PAGE_TOKENS

    @property
    def memory(self) -> reference.Memory:
        return reference.Memory(self.home, self.ring, self.key_blocks)

    def fill(self, latent: Tensor, rope: Tensor, keys: Tensor) -> None:
        """Store ``latent`` [layers, tokens, 512] and so on, keys [groups, tokens, 128]; the last page in the ring."""
        if self.offloaded:
            self.map.window[RING_FIRST] = self.ring_first_page * PAGE_TOKENS
        kernels = ReferenceKernels(self.memory, self.map, [], 1)
        positions = torch.arange(self.tokens, device=DEVICE)
        for group, layers in enumerate(self.format.groups):
            kernels.append_keys(group, positions, keys[group])
            for layer in range(layers.layers):
                at = layers.first_layer + layer
                kernels.append(group, layer, positions, latent[at], rope[at])

    def page(self, page: int) -> Tensor:
        start = self.frame[page] * self.format.stride
        return self.home[start : start + self.format.stride]

    def ring_page(self, page: int) -> Tensor:
        start = page % self.ring_pages * self.format.stride
        return self.ring[start : start + self.format.stride]


def _step(
    page_format: PageFormat,
    sessions: list[Session],
    *,
    rows: int = 1,
    topk: int = 64,
    overlap: Overlap = "branch",
    seed: int = 0,
) -> AttentionStep:
    """A step with random inputs, the same for the same ``seed``, and ``sessions`` in its places."""
    tokens = max(session.map.max_tokens for session in sessions)
    shape = StepShape(len(sessions), rows, topk, HEADS, INDEX_HEADS, SCALE, tokens)
    step = AttentionStep(page_format, shape, DEVICE, cached=sessions[0].offloaded, overlap=overlap)
    _new_inputs(step, seed)
    for place, session in enumerate(sessions):
        step.join(place, session.map, session.caches, session.tokens)
    return step


def _new_inputs(step: AttentionStep, seed: int) -> None:
    for number, tensor in enumerate(vars(step.inputs).values()):
        tensor.copy_(_normal(tuple(tensor.shape), 100 * seed + number))


def _fill(sessions: list[Session], seed: int = 0) -> None:
    first = sessions[0]
    layers, groups, tokens = first.format.layer_count, len(first.format.groups), first.tokens
    values = (_normal((layers, tokens, 512), seed), _normal((layers, tokens, 64), seed + 1))
    for session in sessions:
        session.fill(*values, _normal((groups, tokens, 128), seed + 2))


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_offloaded_gives_the_bits_of_resident(overlap: Overlap) -> None:
    page_format = format_of()
    resident, offloaded = Session(page_format, 130, 4), Session(page_format, 130, 4, slots=70, seed=1)
    _fill([resident, offloaded])
    steps = [_step(page_format, [resident]), _step(page_format, [offloaded], overlap=overlap)]
    for turn in range(2):
        for step in steps:
            _new_inputs(step, turn)
            step.replay()
            step.accepted[0] = 1
        assert torch.equal(_bits(steps[0].out), _bits(steps[1].out))
    assert steps[0].lengths.tolist() == steps[1].lengths.tolist() == [131]
    assert offloaded.map.window[LENGTH] == 132
    hits, misses, ring_hits, _ = torch.stack([cache.counters for cache in offloaded.caches]).sum(0).tolist()
    assert min(hits, misses, ring_hits) > 0
    for cache in offloaded.caches:
        assert_inverse(cache)


@pytest.mark.parametrize("slots", [0, 200])
def test_another_query_attends_to_what_a_row_selected(slots: int) -> None:
    """Behind the step, with a row's own query, it gives the row's own bits."""
    page_format = format_of()
    session = Session(page_format, 130, 4, slots=slots)
    _fill([session])
    step = _step(page_format, [session], rows=3, overlap="serial")
    step.replay()
    layer = page_format.groups[-1].end - 1
    out = torch.zeros_like(step.out[layer, :, 0])

    def attend(query_of: int, row: int) -> Tensor:
        query = step.inputs.query_latent[layer, :, query_of], step.inputs.query_rope[layer, :, query_of]
        step.attend_again(layer, torch.tensor([row], device=DEVICE), query, out)
        return _bits(out)

    for row in (2, 0):
        assert torch.equal(attend(row, row), _bits(step.out[layer, :, row]))
    assert not torch.equal(attend(0, 1), _bits(step.out[layer, :, 0]))


def test_a_step_against_the_reference() -> None:
    page_format = format_of()
    session, twin = Session(page_format, 130, 4, slots=70), Session(page_format, 130, 4)
    _fill([session, twin])
    step = _step(page_format, [session])
    step.replay()
    twin.map.window[LENGTH] = 131
    kernels = ReferenceKernels(twin.memory, twin.map, [], 64)
    positions, inputs = torch.tensor([130], device=DEVICE), step.inputs
    for group, layers in enumerate(page_format.groups):
        kernels.append_keys(group, positions, inputs.index_keys[group, 0])
        selection = kernels.select(group, inputs.index_query[group, 0], inputs.index_weights[group, 0], positions)
        addresses = kernels.in_place(group, selection)
        for layer in range(layers.layers):
            at = layers.first_layer + layer
            kernels.append(group, layer, positions, inputs.latent[at, 0], inputs.rope[at, 0])
            query = (inputs.query_latent[at, 0].float(), inputs.query_rope[at, 0].float())
            expected = kernels.attend(addresses, layer, *query, SCALE)
            assert float((step.out[at, 0] - expected).norm() / expected.norm()) < 2e-3


def test_case_12_sessions_accept_different_numbers_of_drafts() -> None:
    page_format = PageFormat(format_of().encoding, format_of().groups[:1])
    together, alone = ([Session(page_format, 100, 4, slots=300, seed=s) for s in range(3)] for _ in range(2))
    for seed in range(3):
        _fill([together[seed], alone[seed]], seed)
    batch = _step(page_format, together, rows=4)
    single = [_step(page_format, [session], rows=4) for session in alone]
    for turn, accepted in enumerate(([1, 2, 4], [0, 0, 0])):
        _new_inputs(batch, turn)
        batch.replay()
        for place, step in enumerate(single):
            for mine, theirs in zip(vars(step.inputs).values(), vars(batch.inputs).values(), strict=True):
                mine.copy_(theirs[:, place : place + 1])
            step.replay()
            assert torch.equal(_bits(step.out[:, 0]), _bits(batch.out[:, place]))
            step.accepted[0] = accepted[place]
        batch.accepted.copy_(torch.tensor(accepted))
    assert batch.lengths.tolist() == [101, 102, 104]
    assert [int(session.map.window[LENGTH]) for session in together] == [105, 106, 108]


def test_an_idle_place_is_left_alone() -> None:
    page_format = PageFormat(format_of().encoding, format_of().groups[:1])
    sessions = [Session(page_format, 70, 2, slots=70) for _ in range(2)]
    for session in sessions:
        _fill([session])
    step = _step(page_format, sessions)
    step.leave(0)
    left = (sessions[0].home, sessions[0].ring, sessions[0].key_blocks, sessions[0].caches[0].table)
    before = [tensor.clone() for tensor in left]
    step.replay()
    assert not bool(step.out[:, 0].any())
    assert bool(step.out[:, 1].any())
    assert all(torch.equal(*pair) for pair in zip(before, left, strict=True))


def test_sessions_that_do_not_fit_are_refused() -> None:
    page_format = format_of()
    step = _step(page_format, [Session(page_format, 10, 1)])
    with pytest.raises(InvalidValue, match="positions of a session"):
        step.join(0, Session(page_format, 10, 2).map, [], 10)
    session = Session(page_format, 10, 1, slots=64)
    with pytest.raises(InvalidValue, match="hot caches of a session"):
        step.join(0, session.map, session.caches, 10)
    step.leave(0)
    with pytest.raises(InvalidValue, match="sessions of a step"):
        step.replay()


def test_nothing_is_collected_while_a_step_is_recorded() -> None:
    """And afterwards it is again, also where that failed."""

    def fail() -> None:
        with _no_collection():
            assert not gc.isenabled()
            raise OverflowError

    with pytest.raises(OverflowError):
        fail()
    assert gc.isenabled()


# On a GPU: recorded, and replayed thousands of times


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_case_04_ten_thousand_replays_with_copyback_on_another_stream(overlap: Overlap) -> None:
    from compute.device_cuda import CudaDevice

    replays = 1_000 if overlap == "serial" else 10_000
    page_format, start, patterns = format_of(), 345, 97
    pages = (start + replays) // PAGE_TOKENS + 1
    resident, offloaded = Session(page_format, start, pages), Session(page_format, start, pages, slots=128, seed=1)
    _fill([resident, offloaded])
    steps = [_step(page_format, [resident]), _step(page_format, [offloaded], overlap=overlap)]
    layers = page_format.layer_count
    latents = _normal((patterns, layers, 1, 1, 512), 7).bfloat16()
    ropes = _normal((patterns, layers, 1, 1, 64), 8).bfloat16()
    keys = _normal((patterns, 2, 1, 1, 128), 9).bfloat16()
    queries = _normal((patterns, 2, 1, 1, INDEX_HEADS, 128), 10).bfloat16()
    device = CudaDevice(0)
    published: list[int] = []
    copyback = Copyback(device, published.append)
    copyback.restart(offloaded.ring_first_page)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for step in steps:
        step.replay()  # compiles and records; the rows of this step are written again
    for turn in range(replays):
        position = start + turn
        page = position // PAGE_TOKENS
        if page - offloaded.ring_pages + 1 > offloaded.ring_first_page:
            offloaded.ring_first_page = page - offloaded.ring_pages + 1
            copyback.wait_through(offloaded.ring_first_page)
            offloaded.map.window[RING_FIRST] = offloaded.ring_first_page * PAGE_TOKENS
        for step in steps:
            step.inputs.latent.copy_(latents[position % patterns])
            step.inputs.rope.copy_(ropes[position % patterns])
            step.inputs.index_keys.copy_(keys[position % patterns])
            step.inputs.index_query.copy_(queries[turn % patterns])
            step.replay()
            if turn == 0:
                step.accepted[0] = 1
        wrong += (_bits(steps[0].out) != _bits(steps[1].out)).sum()
        if (position + 1) % PAGE_TOKENS == 0:
            copyback.submit(page, offloaded.page(page), offloaded.ring_page(page))
        copyback.poll()
    copyback.wait_through(copyback.submitted_pages)
    torch.cuda.synchronize()
    assert int(wrong) == 0
    assert steps[1].lengths.tolist() == [start + replays - 1]
    full = (start + replays) // PAGE_TOKENS
    assert published[-1] == copyback.committed_pages == full
    encoded = reference.encode_rows(
        latents.view(-1, 512).float(), ropes.view(-1, 64).float(), page_format.encoding.rows
    )
    encoded = encoded.view(patterns, layers, -1).cpu()
    for page in range(start // PAGE_TOKENS + 1, full):
        at = torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) % patterns
        for group, index_group in enumerate(page_format.groups):
            first, nbytes = page_format.group_offset(group), page_format.group_row_bytes(group)
            stored = offloaded.page(page)[first : first + PAGE_TOKENS * nbytes].view(
                PAGE_TOKENS, index_group.layers, -1
            )
            assert torch.equal(stored, encoded[at, index_group.first_layer : index_group.end]), f"page {page}"
    for cache in offloaded.caches:
        assert int(cache.counters[1]) > 10 * 128  # rows were evicted, and read back from host RAM, many times over
        assert_inverse(cache)
    offloaded.caches[1].rows[:, 2, :4] ^= 0x40  # the comparison can fail
    for step in steps:
        step.accepted[0] = 0
        step.replay()
    assert not torch.equal(_bits(steps[0].out), _bits(steps[1].out))
    device.close()


@pytest.mark.gpu
def test_case_08_each_layer_reads_its_own_rows() -> None:
    page_format = PageFormat(format_of().encoding, GLM_5_3.index_groups(), GLM_5_3.hidden_size)
    session = Session(page_format, 130, 4, slots=128)
    layers = page_format.layer_count
    marks = torch.arange(1.0, layers + 1, device=DEVICE)
    session.fill(
        marks[:, None, None].expand(layers, 130, 512).contiguous(),
        _normal((layers, 130, 64), 0),
        _normal((len(page_format.groups), 130, 128), 1),
    )
    step = _step(page_format, [session])
    step.inputs.latent.copy_(marks[:, None, None, None].expand_as(step.inputs.latent))
    for _ in range(3):
        step.replay()
        rounded = step.out.round()
        assert torch.equal(rounded, marks[:, None, None, None, None].expand_as(rounded))


class KeepOne(Model):
    """Keeps one row of each session that there is, as a greedy sampler does."""

    def __init__(self) -> None:
        self.step: AttentionStep | None = None

    def end(self, batch: int) -> None:
        assert self.step is not None
        self.step.accepted[:batch] = (self.step.positions[:batch, 0] >= 0).long()


@pytest.mark.gpu
def test_recording_a_larger_batch_changes_no_session_that_decodes() -> None:
    page_format, model = format_of(), KeepOne()
    sessions = [Session(page_format, 100, 4), Session(page_format, 70, 4, seed=1)]
    _fill(sessions[:1])
    _fill(sessions[1:])
    shape = StepShape(2, 1, 64, HEADS, INDEX_HEADS, SCALE, sessions[0].map.max_tokens)
    model.step = step = AttentionStep(page_format, shape, DEVICE, cached=False, model=model)
    for place, session in enumerate(sessions):
        step.join(place, session.map, session.caches, session.tokens)
        for _ in range(3):
            step.replay()
    assert step.lengths.tolist() == [105, 72]
    assert step.positions.flatten().tolist() == [105, 72]
    step.close()


@pytest.mark.gpu
@pytest.mark.parametrize("length", [4095, 4096, 4097])
def test_case_10_as_many_rows_as_slots(length: int) -> None:
    page_format = format_of()
    resident, offloaded = Session(page_format, length, 66), Session(page_format, length, 66, slots=4096, seed=1)
    _fill([resident, offloaded])
    steps = [_step(page_format, [session], topk=2048) for session in (resident, offloaded)]
    for turn in range(4):
        for step in steps:
            _new_inputs(step, turn)
            step.replay()
        assert torch.equal(_bits(steps[0].out), _bits(steps[1].out))


@pytest.mark.gpu
def test_every_batch_size_gives_the_bits_of_a_session_alone() -> None:
    page_format = format_of()
    sessions = [Session(page_format, 200 + 7 * s, 6, slots=300, seed=s) for s in range(16)]
    for seed, session in enumerate(sessions):
        _fill([session], seed)
    batch = _step(page_format, sessions, rows=4)
    single = _step(page_format, sessions[:1], rows=4)
    for place in range(16):
        batch.leave(place)
    for size in (1, 2, 3, 5, 16):
        for place in range(size):
            batch.join(place, sessions[place].map, sessions[place].caches, sessions[place].tokens)
        batch.replay()
        for place in range(size):
            single.join(0, sessions[place].map, sessions[place].caches, sessions[place].tokens)
            for mine, theirs in zip(vars(single.inputs).values(), vars(batch.inputs).values(), strict=True):
                mine.copy_(theirs[:, place : place + 1])
            single.replay()
            assert torch.equal(_bits(single.out[:, 0]), _bits(batch.out[:, place])), f"place {place} of {size}"
