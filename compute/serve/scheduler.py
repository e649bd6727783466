"""Continuous batching: one thread reads prompts in pieces and decodes all sessions together, a step at a time.

    queued -> reading -> ready -> decoding -> done

A turn is a piece of one prompt and a step of all that decode. The piece is as long as the bound on the gap between
tokens allows. Requests are admitted in the order in which they came, each with all the memory that it may need; of
those being read, the one that has had the least time goes next, so that a short prompt is not held up by a long one,
nor a long one by many short ones. A request's tokens are those that it would get alone.

The worker is used by the thread in `run` only; what may be called from any thread says so. On several ranks each runs
one (`compute.serve.ranks`); requests are submitted to rank 0's.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from compute.decode.sampler import choose_one
from compute.parallel.worker import ParallelWorker
from compute.serve.errors import QueueTimeout, ShuttingDown
from compute.serve.gaps import Gaps, Stopwatch
from compute.serve.inbox import Inbox
from compute.serve.jobs import Job, Offered, SchedulerSettings, Status, StepOffered
from compute.serve.places import Places, Seat, rows_behind
from compute.serve.ranks import SharedInbox
from compute.serve.requests import Decoded, Failed, Finished, FinishReason, Queued, Reading, Request, Sink
from compute.serve.sessions import Sessions
from compute.serve.tuning import ChunkTuner, StepTuner
from compute.worker import Worker
from protocol.errors import DaemonUnavailable, InvalidValue, KvdError, OutOfCapacity, PeerLost
from protocol.layout import PAGE_TOKENS, round_up

MOST_IDLE_WAIT_S = 1.0
RETRY_S = 0.5
"""Seconds after which a request that did not fit is tried again, unless something was freed before."""


class Scheduler:
    """Serves requests on ``worker``, which has a fast decoder and is this thread's alone once `run` begins."""

    def __init__(self, worker: Worker, settings: SchedulerSettings) -> None:
        most = max(settings.depths)
        if most > worker.mtp:
            raise InvalidValue("MTP depth", most, f"at most {worker.mtp}, that of the worker")
        self.settings, self._worker = settings, worker
        self._with_daemon = worker.attachment.with_daemon
        self._inbox = SharedInbox(worker) if isinstance(worker, ParallelWorker) else Inbox()
        self._now = self._inbox.now
        batch = min(settings.batch or settings.running, settings.running)
        slack = rows_behind(most)
        self.places = Places(worker, batch, round_up(settings.context + slack, PAGE_TOKENS), settings.depths)
        self.sessions = Sessions(worker, settings.of_sessions(slack), self._now)
        self.steps = StepTuner(settings.depths, batch, limit=settings.batch)
        self.chunks = ChunkTuner(settings.gap_s, settings.chunk)
        self.gaps = Gaps()
        self._numbers = itertools.count(1)
        self._unended: dict[int, Job] = {}
        """Every request that was taken and has not been told its last event, by number."""
        self._ending: deque[tuple[str, Future[None]]] = deque()
        self._waiting: deque[Job] = deque()
        self._reading: list[Job] = []
        self._ready: deque[Job] = deque()
        self._decoding: dict[Seat, Job] = {}
        self._piece: Stopwatch | None = None
        self._blocked = ""
        self._full_until = 0.0
        self._counted = {"steps": 0, "tokens": 0, "seats": 0}
        self._step_s = 0.0

    # From any thread

    def submit(self, request: Request, sink: Sink) -> int:
        """Take a request; returns its number. Raises `QueueFull`, `ShuttingDown`, or `InvalidValue` for its tokens."""
        request.check(self._worker.config.vocab_size)
        job = Job(next(self._numbers), request, sink, time.monotonic())
        free = max(self.settings.running - self._admitted, 0)
        self._inbox.put(job, waiting=len(self._waiting), limit=self.settings.queue + free)
        return job.number

    def cancel(self, number: int) -> None:
        """End a request as soon as can be; one that has ended already stays as it is."""
        self._inbox.cancel(number)

    def end_session(self, name: str) -> Future[None]:
        """End the session ``name`` and give its memory back. Fails with `SessionBusy` or `UnknownSession`."""
        return self._inbox.end_session(name)

    def stop(self) -> None:
        """Have `run` return."""
        self._inbox.stop()

    def status(self) -> Status:
        """How things are. Each part is copied at one moment, not all at the same."""
        stages = (self._waiting, self._reading, self._ready, self._decoding.values())
        waiting, reading, ready, decoding = (list(jobs) for jobs in stages)
        requests = [(job.number, "queued", place, 0, 0) for place, job in enumerate(waiting, 1)]
        requests += [(job.number, "reading", job.read, len(job.unread), 0) for job in reading]
        for state, jobs in (("ready", ready), ("decoding", decoding)):
            requests += [(job.number, state, len(job.unread), len(job.unread), job.output) for job in jobs]
        counted = self._counted
        return Status(
            queued=len(waiting),
            reading=len(reading),
            ready=len(ready),
            decoding=len(decoding),
            idle_sessions=len(self.sessions.idle),
            depth=self.places.depth,
            batch_limit=self.steps.limit(),
            steps=counted["steps"],
            tokens=counted["tokens"],
            accepted_per_step=counted["tokens"] / max(counted["seats"], 1),
            gap_p50_s=self.gaps.quantile(0.5),
            gap_p99_s=self.gaps.quantile(0.99),
            longest_gap_s=self.gaps.longest,
            rates=self.steps.rates(),
            waiting_for=self._blocked,
            requests=requests,
        )

    # The scheduler's own thread

    def run(self) -> None:
        """Serve until `stop`. Raises what makes it impossible to go on; by then every request has been told."""
        try:
            while self._inbox.wait(MOST_IDLE_WAIT_S, busy=self._busy):
                self.turn()
        except BaseException as error:
            self._give_up(error)
            raise
        self._give_up(None)

    def turn(self) -> None:
        """Take what has come, read a piece of a prompt, and decode a step."""
        self._take_in()
        self._admit()
        self._read_piece()
        self._decode()
        if self.sessions.expire():
            self._full_until = 0.0

    @property
    def _busy(self) -> bool:
        return bool(self._waiting or self._admitted)

    @property
    def _admitted(self) -> int:
        return len(self._reading) + len(self._ready) + len(self._decoding)

    def _take_in(self) -> None:
        asked = self._inbox.take()
        self._ending.extend(asked.sessions)
        self._unended.update((job.number, job) for job in asked.jobs)
        while self._ending:
            self._end_session(*self._ending[0])
            self._ending.popleft()
        for job in asked.jobs:
            try:
                self._with_daemon(partial(self.sessions.check, job.request))
            except (DaemonUnavailable, PeerLost):
                raise
            except KvdError as error:
                self._end(job, Failed(error))
            else:
                self._waiting.append(job)
        for number in sorted(asked.cancelled):
            if number in self._unended:
                self._cancel(self._unended[number])
        now = self._now()
        for place, job in enumerate(list(self._waiting), 1):
            if now - job.arrived > self.settings.queue_s:
                self._leave_queue(job)
                reason = self._blocked or "others run"
                self._end(job, Failed(QueueTimeout(now - job.arrived, self.settings.queue_s, place, reason)))

    def _end_session(self, name: str, ended: Future[None]) -> None:
        if not self._worker.shared(ended.set_running_or_notify_cancel(), bool):
            return
        try:
            self._with_daemon(partial(self.sessions.end, name))
        except (DaemonUnavailable, PeerLost):
            raise
        except KvdError as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)
            self._full_until = 0.0

    def _admit(self) -> None:
        """Open the session of who waited longest, if there is room: one in a turn, as nobody decodes meanwhile."""
        waits, opened = self._now() < self._full_until, False
        self._blocked = self._blocked if waits else ""
        while self._waiting and not waits:
            if self._admitted >= self.settings.running:
                self._blocked = f"{self._admitted} requests run, which is the limit"
                break
            if opened:
                return  # the others' turn comes
            job = self._waiting[0]
            try:
                job.opened = self._with_daemon(partial(self.sessions.open, job.request))
            except (DaemonUnavailable, PeerLost):
                raise
            except KvdError as error:
                if isinstance(error, OutOfCapacity) and self._admitted:  # there will be room when one of them ends
                    self._blocked, self._full_until = error.message, self._now() + RETRY_S
                    break
                self._leave_queue(job)
                self._end(job, Failed(error))
                continue
            self._leave_queue(job)
            job.prompt, job.unread, job.admitted = job.opened.tokens, job.opened.unread(), time.monotonic()
            job.turn = min((other.turn for other in self._reading), default=0.0)
            self._reading.append(job)
            opened = True
        for place, job in enumerate(self._waiting, 1):
            job.tell(Queued(place, self._blocked))

    def _leave_queue(self, job: Job) -> None:
        self._waiting.remove(job)
        self._full_until = 0.0  # somebody else may be the first, who fits

    def _read_piece(self) -> None:
        """Read on in the prompt that has had the least time."""
        if self._piece is not None:
            self._measure_piece(wait=False)
        if not self._reading:
            return
        job = min(self._reading, key=lambda each: each.turn)
        length = self.chunks.tokens(decoding=bool(self._decoding), step_s=self._step_s)
        piece = job.unread[job.read : job.read + length]
        assert job.opened is not None
        watch = Stopwatch(self._worker.device.torch_device, len(piece), job)
        try:
            last = job.read + len(piece) == len(job.unread)
            hidden = self._worker.step(job.opened.history, piece, cached=False, decodes_next=last)[-1]
        except (DaemonUnavailable, PeerLost):
            raise
        except KvdError as error:
            self._reading.remove(job)
            self._let_go(job)
            self._end(job, Failed(error))
            return
        watch.stop()
        if self._piece is not None:
            self._measure_piece(wait=True)
        self._piece = watch
        job.read += len(piece)
        job.tell(Reading(job.read, len(job.unread), job.opened.cached))
        if job.read == len(job.unread):
            self._measure_piece(wait=True)
            self._reading.remove(job)
            self._begin(job, hidden)

    def _measure_piece(self, *, wait: bool) -> None:
        watch = self._piece
        assert watch is not None
        seconds = self._worker.shared(watch.seconds(wait=wait), float | None)
        if seconds is None:
            return
        self.chunks.measured(watch.tokens, seconds)
        assert isinstance(watch.of, Job)
        watch.of.turn += seconds
        self._piece = None

    def _begin(self, job: Job, hidden: Tensor) -> None:
        """The prompt is read: its first token, then a place."""
        assert job.opened is not None
        history, request = job.opened.history, job.request
        token = choose_one(self._worker.decoder.logits(hidden[None])[0], history.length, request.sampling)
        self._worker.attachment.warmed_up()
        job.first_token = job.last_token = time.monotonic()
        job.seat = Seat(history, hidden, token, request.sampling, job.opened.max_tokens)
        job.seat.remaining -= 1
        kept, reason = self._worker.shared(job.offer([token]), Offered)
        job.opened.log(kept)
        self._deliver(job, kept)
        if reason is None:
            self._ready.append(job)
        else:
            self._finish(job, reason)

    def _decode(self) -> None:
        self._seat_ready()
        while self.places.under_way < self.places.ahead and self.places.enqueue():
            pass
        if not self.places.under_way:
            return
        self._read_step()
        wanted = self.steps.depth(max(len(self._decoding), 1))
        if self.places.seats and (wanted != self.places.depth or self.places.sparse()):
            while self.places.under_way:
                self._read_step()
            if self.places.seats:
                self.places.rearrange(wanted)

    def _seat_ready(self) -> None:
        limit = self.steps.limit(len(self._decoding) + len(self._ready))
        while self._ready and len(self._decoding) < limit:
            job = self._ready.popleft()
            assert job.seat is not None
            if not self.places.seats and not self.places.under_way:
                self.places.rearrange(self.steps.depth(len(self._ready) + 1))
            self.places.join(job.seat)
            self._decoding[job.seat] = job

    def _read_step(self) -> None:
        step = self.places.read()
        offered = [self._decoding[seat].offer(tokens) for seat, tokens in step.tokens]
        offered, seconds = self._worker.shared((offered, step.seconds), StepOffered)
        count = 0
        for (seat, _), (kept, reason) in zip(step.tokens, offered, strict=True):
            job = self._decoding[seat]
            job.steps += 1
            assert job.opened is not None
            count += len(kept)
            job.opened.log(kept)  # first: settled rows may be committed at once, and each needs its token
            self.places.settle(seat, kept)
            self._deliver(job, kept)
            if reason is not None:
                self._finish(job, reason)
        self._counted["steps"] += 1
        self._counted["tokens"] += count
        self._counted["seats"] += len(step.tokens)
        if step.tokens:
            self._step_s = seconds
            self.steps.measured(step.depth, len(step.tokens), step.verified, seconds)

    def _deliver(self, job: Job, tokens: list[int]) -> None:
        """Tell of ``tokens``, which are acknowledged."""
        now = time.monotonic()
        if job.output:
            self.gaps.add(now - job.last_token)
            self._worker.report_gap(int(1e9 * (now - job.last_token)))
        job.last_token = now
        job.output += len(tokens)
        job.sink.emit(Decoded(tokens))

    def _finish(self, job: Job, reason: FinishReason) -> None:
        """End a request that has been admitted; its session stays open for a while."""
        assert job.opened is not None
        if job.seat in self._decoding:
            self.places.leave(job.seat)
            del self._decoding[job.seat]
        usage = job.usage()
        self._let_go(job)
        self._end(job, Finished(reason, usage))

    def _let_go(self, job: Job) -> None:
        """The session of a request that has been admitted answers it no more."""
        assert job.opened is not None
        hidden = job.seat.hidden if job.seat is not None else None
        self.sessions.done(job.opened, answered=job.output > 0, hidden=hidden)
        self._full_until = 0.0

    def _end(self, job: Job, last: Finished | Failed) -> None:
        del self._unended[job.number]
        job.sink.emit(last)

    def _cancel(self, job: Job) -> None:
        if job.opened is None:
            self._leave_queue(job)
            self._end(job, Finished("cancelled", job.usage()))
            return
        for those in (self._reading, self._ready):
            if job in those:
                those.remove(job)
        self._finish(job, "cancelled")

    def _give_up(self, error: BaseException | None) -> None:
        """Tell every request that nothing more comes; without an ``error``, leave sessions as they should be."""
        self._inbox.stop()
        asked = self._inbox.take()
        told = error if isinstance(error, Exception) else ShuttingDown()
        for _, ended in (*self._ending, *asked.sessions):
            if ended.running() or ended.set_running_or_notify_cancel():
                ended.set_exception(told)
        for job in (*asked.jobs, *self._unended.values()):
            job.sink.emit(Failed(told))
        admitted = [*self._reading, *self._ready, *self._decoding.values()]
        if error is None:
            while self.places.under_way:
                self.places.read()
            for job in admitted:
                if job.seat in self._decoding:
                    self.places.leave(job.seat)
                self._let_go(job)
            self.sessions.close()
        for those in (self._ending, self._unended, self._waiting, self._reading, self._ready, self._decoding):
            those.clear()
