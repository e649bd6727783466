"""What the ranks of one process group say to each other, with a time-out, and an error that says who asked for what.

A dead process is seen at once, by the end of its connections or by its `Lifeline`; a cut link when nothing has come for
``timeout_s``. After `PeerLost` the group is of no more use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compute.parallel.lifeline import GRACE_S
from protocol.errors import PeerLost

_FRAME = 1024
"""Bytes of a message that go in one exchange: what is longer needs a second one."""
_LENGTH = 8

# Its name in torch 2.13; the other one warns there, and is the only one before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Peers:
    """The processes of ``ranks``, this one included. Not for use by several threads at once.

    ``lost`` comes to the rank that is the first to be gone.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], timeout_s: float, lost: Future[int]) -> None:
        self.ranks = tuple(ranks)
        self.timeout_s = timeout_s
        self._group, self._lost = group, lost
        # gloo cannot be told to stop waiting, so another thread waits with it; a GPU's collectives are only enqueued.
        waits = dist.get_backend(group) != "nccl"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvd-peers") if waits else None
        self._own = dist.get_rank()
        self.index = self.ranks.index(self._own)
        """This process's place among ``ranks``."""

    def __len__(self) -> int:
        return len(self.ranks)

    # Tensors; of a GPU they are enqueued on the current stream

    def all_gather(self, part: Tensor, out: Tensor) -> None:
        """``part`` of every process, in their order, into ``out`` [len(self), *part.shape]; both contiguous."""
        self._ask("an all-gather", lambda: _all_gather(out.view(-1), part.view(-1), group=self._group))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Have ``tensor`` be what it is in the process at place ``source``."""
        self._ask("a broadcast", lambda: dist.broadcast(tensor, self.ranks[source], group=self._group))

    def send(self, tensor: Tensor, to: int) -> None:
        """Send to the process at place ``to``."""
        rank = self.ranks[to]
        self._ask(f"sending to rank {rank}", lambda: dist.send(tensor, rank, group=self._group))

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill ``tensor`` with what the process at place ``source`` sends."""
        rank = self.ranks[source]
        self._ask(f"receiving from rank {rank}", lambda: dist.recv(tensor, rank, group=self._group))

    def abort(self) -> None:
        """End collectives of a GPU that a lost peer keeps from ending; gloo's end by themselves."""
        if dist.get_backend(self._group) == "nccl":
            self._group.abort()

    def close(self) -> None:
        """Nothing more is asked. A call that still waits does so until its time-out, and then ends its thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    # Messages; for groups whose tensors are in host memory

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all processes, in their order."""

        def gathered(size: int) -> Tensor:
            frames = torch.zeros((len(self), size), dtype=torch.uint8)
            self.all_gather(_framed(message, size), frames)
            return frames

        frames = gathered(_FRAME)
        longest = _LENGTH + max(_length_of(frame) for frame in frames)
        if longest > _FRAME:
            frames = gathered(longest)
        return [_message_of(frame) for frame in frames]

    def share(self, message: bytes, source: int = 0) -> bytes:
        """The message of the process at place ``source``; of the others' nothing is looked at."""

        def shared(size: int) -> Tensor:
            frame = _framed(message, size)
            self.broadcast(frame, source)
            return frame

        frame = shared(_FRAME)
        length = _LENGTH + _length_of(frame)
        return _message_of(frame if length <= _FRAME else shared(length))

    def _ask(self, what: str, call: Callable[[], object]) -> None:
        try:
            if self._thread is None:
                call()
                return
            asked: Future[Any] = self._thread.submit(torch.inference_mode()(call))
            wait([asked, self._lost], return_when=FIRST_COMPLETED)
            asked.result(GRACE_S if self._lost.done() else None)
            return
        except TimeoutError:
            reason = f"rank {self._lost.result()} has ended"
        except RuntimeError as error:  # what torch.distributed raises, whatever the transport
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        others = ", ".join(str(rank) for rank in self.ranks if rank != self._own)
        raise PeerLost(
            f"rank {self._own} lost one of its peers {others} in {what}, with a time-out of {self.timeout_s:g} s: "
            f"{reason}",
            rank=self._own,
            during=what,
        )


def _framed(message: bytes, size: int) -> Tensor:
    """``message`` behind its length, uint8 [size], cut where it is longer."""
    data = len(message).to_bytes(_LENGTH, "little") + message
    return torch.frombuffer(bytearray(data[:size].ljust(size, b"\0")), dtype=torch.uint8)


def _length_of(frame: Tensor) -> int:
    return int.from_bytes(frame[:_LENGTH].numpy().tobytes(), "little")


def _message_of(frame: Tensor) -> bytes:
    return frame[_LENGTH : _LENGTH + _length_of(frame)].numpy().tobytes()
