"""Every access of an interpreted kernel, lane by lane before it is made: is it within what the launch was given?

    with Bounds():
        ...  # make tensors, launch kernels

A launch is given its tensor arguments, as far as their sizes and strides reach, and the memory that int64 numbers in
these point to, and so on: records, page tables and lists of rows hold addresses. Everything else is out of bounds.
Tensors that are made within have `GUARD` poisoned bytes of nobody's before and behind them, so that what runs past the
end of one does not land in another. Of what was made before, only arguments are known.

Hints of alignment and contiguity, by which a compiler makes wide accesses, are checked as well. Kernels in Gluon or
CUDA C++ are not interpreted: those are for `make sanitize`.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError as InterpreterError

GUARD = 1 << 17
"""Bytes on either side of a tensor."""
POISON = 0xFF
"""What they are filled with near the tensor: NaN in every type, and no position."""
_POISONED = 1 << 12

_Array = npt.NDArray[Any]
_NOT_KERNELS = (str(Path(triton.__file__).parent), __file__, str(Path(np.__file__).parent), "<")


class OutOfBounds(AssertionError):
    """An access to memory that the launch was not given, or a hint to the compiler that is not true."""


@dataclass(frozen=True)
class _Range:
    """Addresses from ``start`` to before ``end``."""

    start: int
    end: int
    what: str

    def distance(self, address: int) -> int:
        return max(self.start - address, address - self.end + 1, 0)


class Bounds:
    """Within, launches of interpreted kernels raise Triton's ``InterpreterError``, with an `OutOfBounds`, where they
    would touch what they were not given. ``kernels`` are the names of those that ran.
    """

    def __init__(self) -> None:
        self.kernels: set[str] = set()
        self._memory = _GuardedMemory()
        self._launch: _Launch | None = None
        self._entered = ExitStack()

    def __enter__(self) -> Bounds:
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        for owner, name, wrapper in (
            (executor, "__call__", self._launching),
            (builder, "create_masked_load", functools.partial(self._checking, "load", 0, 1)),
            (builder, "create_masked_store", functools.partial(self._checking, "store", 0, 2)),
            (builder, "create_atomic_rmw", functools.partial(self._checking, "atomic", 1, 3)),
            (builder, "create_atomic_cas", functools.partial(self._checking, "atomic", 0, None)),
            (interpreter.TensorHandle, "set_attr", self._checking_hint),
            (interpreter.InterpretedFunction, "__call__", self._calling),
        ):
            self._entered.enter_context(mock.patch.object(owner, name, wrapper(getattr(owner, name))))
        self._entered.enter_context(self._memory)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.close()

    def _launching(self, original: Callable[..., None]) -> Callable[..., None]:
        def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            name = executor.fn.__name__
            self.kernels.add(name)
            named = dict(zip(executor.arg_names, args, strict=False)) | kwargs
            self._launch = _Launch(name, self._memory.given(named))
            try:
                original(executor, *args, **kwargs)
            finally:
                self._launch = None

        return launch

    def _checking(
        self, access: str, pointers_at: int, mask_at: int | None, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        def checked(builder: Any, *args: Any) -> Any:
            pointers = args[pointers_at]
            if self._launch is not None:
                mask = None if mask_at is None else args[mask_at].data
                nbytes = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
                self._launch.check(builder, access, pointers.data, mask, nbytes)
            return original(builder, *args)

        return checked

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            """Of one function by another, as Triton does it, which makes its language ready at every call: that would
            take most of the time. Once in a launch is enough.
            """
            modules = _languages(function.fn)
            if self._launch is None or modules not in self._launch.ready:
                if self._launch is not None:
                    self._launch.ready.add(modules)
                return original(function, *args, **kwargs)
            return function.rewrite()(*args, **kwargs)

        return call

    def _checking_hint(self, original: Callable[..., None]) -> Callable[..., None]:
        def checked(handle: Any, hint: str, values: list[int]) -> None:
            if self._launch is not None:
                self._launch.check_hint(hint, handle, values)
            original(handle, hint, values)

        return checked


class _Launch:
    """One launch under way, and what it was given."""

    def __init__(self, kernel: str, ranges: Iterable[_Range]) -> None:
        self._kernel = kernel
        self.ready: set[frozenset[str]] = set()
        self._ranges = sorted(ranges, key=lambda one: one.start)
        merged: list[tuple[int, int]] = []
        for one in self._ranges:
            if merged and one.start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], one.end))
            else:
                merged.append((one.start, one.end))
        self._starts = [start for start, _ in merged]
        self._ends = [end for _, end in merged]

    def check(self, builder: Any, access: str, addresses: _Array, mask: _Array | None, nbytes: int) -> None:
        """Raise `OutOfBounds` unless all ``addresses`` under ``mask`` are of ``nbytes`` bytes that were given."""
        wanted = addresses if mask is None else addresses[np.broadcast_to(mask, addresses.shape)]
        if not wanted.size:
            return
        lowest, highest = int(wanted.min()), int(wanted.max())
        owner = bisect_right(self._starts, lowest) - 1
        aligned = not (wanted & (nbytes - 1)).any()
        if aligned and owner >= 0 and highest + nbytes <= self._ends[owner]:  # all in one range, the common case
            return
        for lane in np.ndindex(addresses.shape):
            if mask is not None and not np.broadcast_to(mask, addresses.shape)[lane]:
                continue
            address = int(addresses[lane])
            owner = bisect_right(self._starts, address) - 1
            outside = owner < 0 or address + nbytes > self._ends[owner]
            if outside or address % nbytes:
                why = self._nearest(address, nbytes) if outside else "not aligned"
                where = f"{self._kernel}, program {builder.grid_idx}, {_line()}"
                raise OutOfBounds(f"{where}: {access} of {nbytes} bytes at {address:#x}, lane {lane}: {why}")

    def _nearest(self, address: int, nbytes: int) -> str:
        if not self._ranges:
            return "nothing was given"
        one = min(self._ranges, key=lambda given: given.distance(address))
        if address < one.start:
            return f"{one.start - address} bytes before {one.what}"
        if address >= one.end:
            return f"{address - one.end} bytes after the end of {one.what}"
        return f"the last {address + nbytes - one.end} of them after the end of {one.what}"

    def check_hint(self, hint: str, handle: Any, values: list[int]) -> None:
        """Raise `OutOfBounds` if the compiler would be told something wrong: each run of consecutive values along a
        dimension begins at a multiple of that dimension's value (divisibility), or is as long as it (contiguity).
        """
        data: _Array = handle.data
        step = max(1, handle.get_element_ty().primitive_bitwidth // 8) if handle.dtype.is_ptr() else 1
        for axis, value in enumerate(values):
            along = np.moveaxis(data, axis, -1)
            follows = along[..., 1:] == along[..., :-1] + along.dtype.type(step)
            if hint == "tt.divisibility":
                first = np.ones(along.shape, dtype=bool)
                first[..., 1:] = ~follows
                wrong = bool((along[first] % along.dtype.type(value)).any())
            elif hint == "tt.contiguity":
                inner = np.arange(1, along.shape[-1]) % value != 0
                wrong = not bool(follows[..., inner].all())
            else:
                continue
            if wrong:
                raise OutOfBounds(f"{self._kernel}, {_line()}: {hint} of {values} does not hold along dimension {axis}")


class _GuardedMemory(TorchDispatchMode):
    """Gives every new tensor a place of its own, and knows which places there are."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: that would import torch's compiler, which takes longer than all tests."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[_Range, torch.dtype, weakref.ref[torch.UntypedStorage]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.lift_fresh.default:  # what torch.tensor ends with: its memory is new
            args = ()
        old = {_storage(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}

        def guarded(one: Any) -> Any:
            if not isinstance(one, Tensor) or one.device.type != "cpu" or one.layout != torch.strided:
                return one
            return one if _storage(one) in old else self._guarded(one)

        return tree_map(guarded, out)

    def _guarded(self, tensor: Tensor) -> Tensor:
        nbytes = _reach(tensor)
        memory = torch.empty(GUARD + -(-nbytes // 64) * 64 + GUARD, dtype=torch.uint8)
        memory[GUARD - _POISONED : GUARD] = POISON
        memory[GUARD + nbytes :][:_POISONED] = POISON
        size = tensor.element_size()
        placed = memory[: len(memory) // size * size].view(tensor.dtype)
        placed = placed.as_strided(tensor.shape, tensor.stride(), GUARD // size)
        placed.copy_(tensor)
        if nbytes:
            one = _range_of(placed, "")
            self._live[one.start] = (one, tensor.dtype, weakref.ref(memory.untyped_storage()))
        return placed

    def given(self, arguments: dict[str, Any]) -> list[_Range]:
        """What a launch with ``arguments`` is given."""
        for start in [start for start, (_, _, storage) in self._live.items() if storage() is None]:
            del self._live[start]
        starts = sorted(self._live)
        with _disable_current_modes():
            tensors = {name: one for name, one in arguments.items() if isinstance(one, Tensor) and one.numel()}
            found = [_range_of(one, f"argument {name}") for name, one in tensors.items()]
            unread = [one for one, tensor in zip(found, tensors.values(), strict=True) if tensor.dtype == torch.int64]
        reached: set[int] = set()
        while unread:
            for address in np.unique(_int64s(unread.pop())):
                # A base may lie before the memory that is reached from it.
                at = bisect_right(starts, int(address) + GUARD) - 1
                if at < 0 or starts[at] in reached or int(address) >= self._live[starts[at]][0].end:
                    continue
                one, dtype, _ = self._live[starts[at]]
                reached.add(one.start)
                found.append(_Range(one.start, one.end, f"memory of addresses, {one.what}"))
                if dtype == torch.int64:
                    unread.append(one)
        return found


@functools.cache
def _languages(function: Callable[..., Any]) -> frozenset[str]:
    """Triton's modules that ``function`` sees."""
    return frozenset(one.__name__ for one in function.__globals__.values() if one is tl or one is tl.core)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _reach(tensor: Tensor) -> int:
    """Bytes from the first element to behind the last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _range_of(tensor: Tensor, what: str) -> _Range:
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    return _Range(tensor.data_ptr(), tensor.data_ptr() + _reach(tensor), f"{what} {kind}".strip())


def _int64s(one: _Range) -> npt.NDArray[np.int64]:
    count = (one.end - one.start) // 8
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(one.start))


def _line() -> str:
    """The kernel's line that is interpreted now."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_KERNELS):
        frame = frame.f_back
    if frame is None:
        return "unknown line"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
