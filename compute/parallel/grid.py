"""Which rank does what: stages of layers, each on as many devices as tensor parallelism takes.

Rank r is shard ``r mod tensor`` of stage ``r // tensor``, so that under ``torchrun`` the shards of a stage are on one
node. ``torchrun`` says who this process is (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``) and where rank 0 listens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from compute.parallel.lifeline import GRACE_S, Lifeline
from compute.parallel.peers import Peers
from protocol.errors import InvalidValue, PeerLost

START_TIMEOUT_S = 600.0
"""How long ranks wait for each other at the start: weights take as long as the slowest disk."""
_POLL_S = 20e-6


@dataclass(frozen=True)
class Place:
    """A process's place, without connections: rank ``rank`` of ``tensor`` × ``pipeline``."""

    tensor: int
    pipeline: int
    rank: int = 0
    local_rank: int = 0

    def __post_init__(self) -> None:
        for name, value in (("tensor parallelism", self.tensor), ("pipeline stages", self.pipeline)):
            if value < 1:
                raise InvalidValue(name, value, "at least 1")
        if not 0 <= self.rank < self.world:
            raise InvalidValue("rank", self.rank, f"0 to {self.world - 1}")

    @classmethod
    def of_environment(cls, tensor: int, pipeline: int, environment: Mapping[str, str]) -> Place:
        """As ``torchrun`` says. Raises `InvalidValue` where it started another number of processes, or none."""
        place = cls(tensor, pipeline)
        shape = f"--tensor-parallel {tensor} times --pipeline-parallel {pipeline}"
        try:
            world, rank = int(environment["WORLD_SIZE"]), int(environment["RANK"])
            local = int(environment.get("LOCAL_RANK", rank))
        except (KeyError, ValueError):
            raise InvalidValue(
                "ranks of this process",
                None,
                f"{place.world} ranks under torchrun ({shape}): torchrun --nproc-per-node {place.world} -m ...",
            ) from None
        if world != place.world:
            raise InvalidValue("ranks started by torchrun", world, f"{place.world}: {shape}")
        return cls(tensor, pipeline, rank, local)

    def device(self, name: str) -> str:
        """The device of this rank where all were given ``name``: of ``cuda``, the GPU of its number on its node."""
        return f"cuda:{self.local_rank}" if name == "cuda" else name

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline

    @property
    def stage(self) -> int:
        return self.rank // self.tensor

    @property
    def shard(self) -> int:
        return self.rank % self.tensor

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pipeline - 1


class Grid:
    """The connections of one process to the others. Raises `PeerLost` where they do not come.

    ``control`` are all ranks, for messages; ``shards`` those of this stage, ``stages`` those of this shard, for
    tensors of the device: over NCCL on GPUs, else over gloo. ``timeout_s`` is the longest that a rank waits for
    another one in the middle of its work, whatever it waits for; ``start_timeout_s`` is for the start alone.
    """

    def __init__(
        self, place: Place, *, device: str, timeout_s: float, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        if timeout_s <= 0:
            raise InvalidValue("time-out of peers", timeout_s, "above 0 s")
        self.place, self.timeout_s = place, timeout_s
        backend = "nccl" if device.startswith("cuda") else "gloo"
        self._aborted = False
        limit, start_limit = timedelta(seconds=timeout_s), timedelta(seconds=start_timeout_s)
        try:
            store, _, _ = next(rendezvous("env://", place.rank, place.world, timeout=start_limit))
            dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world, timeout=start_limit)
            assert dist.group.WORLD is not None
            self._lifeline = Lifeline(store, place.rank, place.world, start_timeout_s)
            lost = self._lifeline.lost
            self._world = Peers(dist.group.WORLD, range(place.world), start_timeout_s, lost)

            def own(groups: list[range], backend: str) -> Peers:
                """This rank's of ``groups``, all of which every rank makes, in one order."""
                made = [(dist.new_group(list(ranks), backend=backend, timeout=limit), ranks) for ranks in groups]
                return next(Peers(group, ranks, timeout_s, lost) for group, ranks in made if place.rank in ranks)

            every, tensor = range(place.world), place.tensor
            self.control = own([every], "gloo")
            self.shards = own([every[first : first + tensor] for first in every[::tensor]], backend)
            self.stages = own([every[shard::tensor] for shard in range(tensor)], backend)
            store.set_timeout(limit)  # NCCL's ranks find each other through it, when they first need each other
        except (RuntimeError, ValueError, OSError) as error:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            reason = str(error).splitlines()[0]
            raise PeerLost(
                f"rank {place.rank} of {place.world} did not find the others at {address} within "
                f"{start_timeout_s:g} s: {reason}",
                rank=place.rank,
                during="the start",
            ) from None

    def wait_for_all(self) -> None:
        """Return when every rank is here, however long its weights took; within the time-out of the start."""
        self._world.exchange(b"")

    def wait_for_step(self, done: Callable[[], bool]) -> None:
        """Return when a step is ``done``. Raises `PeerLost` if that is not in time, or a rank is lost meanwhile.

        A collective whose peer is gone never ends, and cannot be waited for blindly.
        """
        lost = self._lifeline.lost
        if not _poll(lambda: done() or lost.done(), self.timeout_s):
            reason = f"nothing came within {self.timeout_s:g} s"
        elif not _poll(done, GRACE_S):
            reason = f"rank {lost.result()} has ended"
        else:
            return
        raise PeerLost(f"rank {self.place.rank} lost a peer in a step: {reason}", rank=self.place.rank, during="a step")

    def abort(self, give_up: Callable[[], None]) -> None:
        """End what is under way with peers that are lost. The connections are of no more use.

        ``give_up`` gives up recorded steps: NCCL first ends what is under way, then waits until no graph has its
        collectives any more.
        """
        self._aborted = True
        aborting = [Thread(target=peers.abort, daemon=True) for peers in (self.shards, self.stages)]
        for thread in aborting:
            thread.start()
        give_up()
        for thread in aborting:
            thread.join(self.timeout_s)

    def close(self) -> None:
        """End the connections; the others see that."""
        self._lifeline.close()
        for peers in (self._world, self.control, self.shards, self.stages):
            peers.close()
        if dist.is_initialized() and not self._aborted:
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _poll(done: Callable[[], bool], limit_s: float) -> bool:
    """Whether ``done`` within ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
