"""A real vLLM engine on the CPU, in a process of its own that can be killed.

Importing vLLM takes long; so the process that runs trials imports it once, starts no threads, and forks each engine.
Scheduler and worker are both in the forked process.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

START_TIMEOUT_S = 600.0
SHARED_MEMORY = Path("/dev/shm")
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "LMCACHE_DISABLE_BANNER": "1",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class EngineError(RuntimeError):
    """What ended an engine, or something that runs beside one: its traceback, which another process raised."""

    @property
    def in_short(self) -> str:
        """The error's first line, and where in which file it was raised: what a report has room for."""
        trace = str(self).strip()
        places = list(re.finditer(r'^ +File "(.+)", line (\d+)', trace, re.MULTILINE))
        if not places:
            return trace.rpartition("\n")[2]
        file = places[-1][1].rpartition("site-packages/")[2]
        said = re.compile(r"^\S.*", re.MULTILINE).search(trace, places[-1].end())
        return f"{said[0] if said else 'unknown'} ({file}:{places[-1][2]})"


@dataclass(frozen=True)
class Made:
    """What an engine made of a prompt; ``cached`` tokens were not computed."""

    tokens: tuple[int, ...]
    cached: int


@dataclass
class Setup:
    """An engine's settings. ``run_dir`` is that of the daemon; None is an engine without the connector."""

    model: Path
    block_tokens: int = 32
    run_dir: Path | None = None
    chunk: int | None = None
    """Tokens of a chunk of a prefill; None does without chunks."""
    own_cache: bool = True
    """Whether the engine's own prefix cache is on."""
    dtype: str = "float32"
    max_tokens: int = 4096
    blocks: int | None = None
    """Of the engine's cache; None for as many as fit."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Settings of the connector."""
    transfer: dict[str, Any] | None = None
    """Another connector's ``kv_transfer_config``."""
    check: Callable[[], None] | None = None
    """Called in the engine once it is there; raises if its connector is not, which the engine may do without."""
    corrupt: bool = False
    """Whether a byte of every loaded block is changed: what a test of equality has to notice."""


class Engine:
    """A forked engine, killed at the end of the ``with`` block."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        ours, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _live(setup, theirs)
        theirs.close()
        self._pipe = ours
        try:
            self._answer(START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise

    def ask(self, prompts: Sequence[Sequence[int]], new: int, *, salt: str = "") -> None:
        """Have it begin with all of these prompts; `answers` waits for what it makes of them."""
        self._pipe.send(("generate", [list(prompt) for prompt in prompts], new, salt))

    def answers(self, timeout_s: float = 600.0) -> list[Made]:
        made = self._answer(timeout_s)
        assert isinstance(made, list)
        return made

    def generate(self, prompts: Sequence[Sequence[int]], new: int, *, salt: str = "") -> list[Made]:
        """``new`` greedy tokens for each prompt."""
        self.ask(prompts, new, salt=salt)
        return self.answers()

    def reset_cache(self) -> None:
        """Have it forget every prefix, its connector's too."""
        self._pipe.send(("reset",))
        assert self._answer(60) is True

    def preemptions(self) -> int:
        """How often requests were preempted so far."""
        self._pipe.send(("preemptions",))
        answer = self._answer(60)
        assert isinstance(answer, int)
        return answer

    def settle(self) -> None:
        """Step until no save is under way."""
        self._pipe.send(("settle",))
        self._answer(120)

    def _answer(self, timeout_s: float) -> object:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"engine {self.pid} said nothing for {timeout_s} s")
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._pipe.close()
            for left in SHARED_MEMORY.glob(f"lmcache_kv_{self.pid}_*"):  # LMCache has its engine's cache there
                left.unlink()
            self.pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()


def prepare() -> None:
    """Import vLLM, in a process that will fork engines and do nothing else with it."""
    os.environ.update(ENVIRONMENT)
    import torch
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    torch.set_num_threads(1)
    _hide_answers_of_llvmlite()


def _hide_answers_of_llvmlite() -> None:
    """Have llvmlite's library no longer answer when it is asked for a ``__dict__``.

    vLLM looks into every module that is loaded for Triton kernels, and cannot take that answer. Its own processes load
    numba after that; a connector that needs numba has it loaded before where there is one process only.
    """
    from llvmlite.binding import ffi

    kind = type(ffi.lib)
    answer = kind.__getattr__

    def without_dict(library: object, name: str) -> object:
        if name == "__dict__":
            raise AttributeError(name)
        return answer(library, name)

    kind.__getattr__ = without_dict


def _live(setup: Setup, pipe: Connection) -> NoReturn:
    """The forked process, until it is killed or nobody asks any more."""
    try:
        if setup.corrupt:
            _corrupt_loads()
        preempted = _note_preemptions()
        llm = _make(setup)
        if setup.check is not None:
            setup.check()
        pipe.send("ready")
        _serve(llm, pipe, preempted)
    except BaseException as error:  # noqa: BLE001
        told = error if isinstance(error, EngineError) else EngineError("".join(traceback.format_exception(error)))
        try:
            pipe.send(told)
        except OSError:
            sys.stderr.write(f"engine {os.getpid()}: {error!r}\n")
    finally:
        os._exit(1)


def _make(setup: Setup) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = setup.transfer
    if setup.run_dir is not None:
        transfer = {
            "kv_connector": "KvdConnector",
            "kv_connector_module_path": "compute.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"run_dir": str(setup.run_dir), **setup.extra},
        }
    options: dict[str, Any] = {"max_num_batched_tokens": setup.chunk or 4 * setup.max_tokens}
    if setup.blocks is not None:
        options["num_gpu_blocks_override"] = setup.blocks
    return LLM(
        str(setup.model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype=setup.dtype,
        block_size=setup.block_tokens,
        max_model_len=setup.max_tokens,
        enable_prefix_caching=setup.own_cache,
        enable_chunked_prefill=setup.chunk is not None,
        kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
        seed=0,
        **options,
    )


def _corrupt_loads() -> None:
    from compute.integrations.vllm.copies import CpuCopies

    load = CpuCopies.load

    def corrupting(self: CpuCopies, blocks: Sequence[int], frames: Sequence[int], after: object) -> None:
        load(self, blocks, frames, after)
        for block in blocks:
            region = self._regions[0]
            byte = ctypes.c_uint8.from_address(region.address + block * region.stride + 3)  # sign and exponent
            byte.value ^= 0x42

    CpuCopies.load = corrupting  # type: ignore[method-assign]


def _note_preemptions() -> list[str]:
    """Requests that the engine's scheduler preempts are added to this."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted: list[str] = []
    preempt = Scheduler._preempt_request

    def noting(self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(self, request, *arguments, **named)

    Scheduler._preempt_request = noting
    return preempted


def _serve(llm: Any, pipe: Connection, preempted: list[str]) -> NoReturn:
    from vllm import SamplingParams

    while True:
        command, *arguments = pipe.recv()
        if command == "reset":
            pipe.send(llm.reset_prefix_cache(reset_connector=True))
        elif command == "preemptions":
            pipe.send(len(preempted))
        elif command == "settle":
            core = llm.llm_engine.engine_core.engine_core
            while core.scheduler.has_requests():
                core.step()
            pipe.send(True)
        else:
            prompts, new, salt = arguments
            given = [{"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})} for prompt in prompts]
            sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
            made = llm.generate(given, sampling, use_tqdm=False)
            pipe.send([Made(tuple(one.outputs[0].token_ids), one.num_cached_tokens or 0) for one in made])
