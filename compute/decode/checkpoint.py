"""Weights of a published checkpoint: safetensors files, in bfloat16 or in FP8 with block scales.

A file is untrusted. Everything that its header says is checked before the first tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compute.decode.matrices import scales_shape, store
from compute.kernels.matrix import Matrix
from compute.kernels.reference_linear import dequantise
from compute.model.weights import safetensors_files
from protocol.errors import InvalidValue

Progress = Callable[[int, int], None]
"""Gets (bytes read, bytes in all)."""

_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}
_SCALES = "_scale_inv"
"""Ends the name of the scales of an FP8 tensor; despite it a weight is its value times its scale."""


class CheckpointSource:
    """A `compute.decode.weights.Source` over the tensors ``shapes`` names. Use it as a context: it keeps files open.

    Raises `InvalidValue` naming the first tensor that is missing, misshapen or of an unreadable type, or the file that
    cannot be read. Tensors that nobody asked for are passed over.
    """

    def __init__(
        self, path: Path, shapes: dict[str, tuple[int, ...]], device: torch.device, progress: Progress | None = None
    ) -> None:
        self._device = device
        self._progress = progress
        self._done = 0
        self._files: dict[str, Any] = {}
        """The open file of each tensor."""
        self._opened = ExitStack()
        wanted = shapes | {
            f"{name}{_SCALES}": scales_shape(*shape) for name, shape in shapes.items() if len(shape) == 2
        }
        try:
            for file in safetensors_files(path):
                self._open(file, wanted)
            self._total = sum(self._check(path, name, shape) for name, shape in shapes.items())
        except BaseException:
            self._opened.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._opened.close()

    def vector(self, name: str) -> Tensor:
        """float32 on the device."""
        return self._read(name).float()

    def matrix(self, name: str, out: Matrix) -> None:
        """An FP8 tensor goes to an FP8 ``out`` as it is; everything else is converted (`matrices.store`)."""
        values = self._read(name)
        if values.dtype != torch.float8_e4m3fn:
            store(values, out)
            return
        stored = Matrix(values, self._read(f"{name}{_SCALES}").float())
        if out.scales is None:
            store(dequantise(stored), out)
            return
        assert stored.scales is not None
        out.values.copy_(stored.values)
        out.scales.copy_(stored.scales)

    def _open(self, file: Path, wanted: dict[str, tuple[int, ...]]) -> None:
        try:
            opened = self._opened.enter_context(safe_open(file, framework="pt"))
            self._files |= {name: opened for name in opened.keys() if name in wanted}  # noqa: SIM118 - no dictionary
        except (OSError, SafetensorError) as error:
            raise InvalidValue("weights file", str(file), f"a readable safetensors file ({error})") from None

    def _check(self, path: Path, name: str, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor, and of its scales where it has some."""
        if name not in self._files:
            raise InvalidValue(f"tensor {name} in {path}", "missing", f"shape {list(shape)}")
        found = self._files[name].get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise InvalidValue(f"shape of tensor {name}", str(list(found.get_shape())), str(list(shape)))
        kind = found.get_dtype()
        quantised = kind == "F8_E4M3"
        if kind not in _BYTES or (quantised and len(shape) != 2):
            allowed = [allowed for allowed in _BYTES if len(shape) == 2 or allowed != "F8_E4M3"]
            raise InvalidValue(f"dtype of tensor {name}", kind, ", ".join(allowed))
        nbytes = _BYTES[kind] * torch.Size(shape).numel()
        return nbytes + self._check(path, f"{name}{_SCALES}", scales_shape(*shape)) if quantised else nbytes

    def _read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except SafetensorError as error:
            raise InvalidValue(f"tensor {name}", "unreadable", f"a tensor within its file ({error})") from None
        self._done += tensor.nbytes
        if self._progress:
            self._progress(self._done, self._total)
        return tensor.to(self._device)
