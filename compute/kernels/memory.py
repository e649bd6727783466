"""Reading and writing at absolute addresses in plain torch.

Kernels follow an address; torch can only index a tensor. `Memory` knows which tensor backs which range of addresses.
It is how the reference functions reach pages, key blocks and slots; it owns no memory and maps none.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import torch
from torch import Tensor

from protocol.errors import InvalidValue

WORD = 4
"""Addresses and sizes are multiples of this many bytes."""


class Memory:
    """The tensors that back ranges of addresses: uint8, one-dimensional, contiguous, and kept alive from here.

    Addresses are checked, all of them, before a byte is read or written. Data is given and returned on the device of
    the addresses, wherever the bytes are.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._bases: list[int] = []
        self._ends: list[int] = []
        self._tensors: list[Tensor] = []
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor, address: int | None = None) -> int:
        """Back the range from ``address`` (by default where ``tensor`` lies) by ``tensor``; returns the address.

        ``address`` differs from the tensor's own where a device sees host memory at another place. Raises
        `InvalidValue` if the tensor's type or place does not fit, or if the range overlaps another.
        """
        base = tensor.data_ptr() if address is None else address
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise InvalidValue(
                "tensor behind addresses", f"{tensor.dtype} {tuple(tensor.shape)}", "contiguous uint8 [n]"
            )
        if base <= 0 or base % 16 or tensor.numel() == 0 or tensor.numel() % WORD or tensor.storage_offset() % WORD:
            raise InvalidValue("range of addresses", f"{base} + {tensor.numel()}", "a multiple of 16, of whole words")
        at = bisect_left(self._bases, base)
        ends_before = at == 0 or self._ends[at - 1] <= base
        begins_after = at == len(self._bases) or base + tensor.numel() <= self._bases[at]
        if not (ends_before and begins_after):
            raise InvalidValue("range of addresses", f"{base} + {tensor.numel()}", "no byte of a range added before")
        self._bases.insert(at, base)
        self._ends.insert(at, base + tensor.numel())
        self._tensors.insert(at, tensor)
        return base

    def remove(self, address: int) -> None:
        """Forget the range that begins at ``address``; raises `InvalidValue` if none does."""
        if address not in self._bases:
            raise InvalidValue("range of addresses", address, "the first address of a range")
        at = self._bases.index(address)
        del self._bases[at], self._ends[at], self._tensors[at]

    def read(self, addresses: Tensor, nbytes: int) -> Tensor:
        """``nbytes`` at each address: int64 [...] -> uint8 [..., nbytes]. Address 0 reads zeros.

        Raises `InvalidValue` for an address, other than 0, whose bytes are not all in one range.
        """
        flat = addresses.reshape(-1)
        whole = self._range_of_all(flat, nbytes)
        if whole is not None:
            windows, first = self._windows(whole, flat, nbytes)
            words = windows.index_select(0, first).to(flat.device)
        else:
            words = torch.zeros((flat.numel(), nbytes // WORD), dtype=torch.int32, device=flat.device)
            for index, mine in self._by_range(flat, nbytes, zero_allowed=True):
                windows, first = self._windows(index, flat[mine], nbytes)
                words[mine] = windows.index_select(0, first).to(flat.device)
        return words.view(torch.uint8).view(*addresses.shape, nbytes)

    def write(self, addresses: Tensor, data: Tensor) -> None:
        """Write ``data`` uint8 [n, nbytes] at ``addresses`` int64 [n]; no byte may be written twice.

        Raises `InvalidValue` for an address whose bytes are not all in one range; then nothing is written.
        """
        nbytes = data.shape[1]
        words = data.contiguous().view(torch.int32)
        whole = self._range_of_all(addresses, nbytes)
        if whole is not None:
            windows, first = self._windows(whole, addresses, nbytes)
            windows.index_copy_(0, first, words.to(windows.device))
            return
        for index, mine in self._by_range(addresses, nbytes, zero_allowed=False):
            windows, first = self._windows(index, addresses[mine], nbytes)
            windows.index_copy_(0, first, words[mine].to(windows.device))

    def _range_of_all(self, addresses: Tensor, nbytes: int) -> int | None:
        """Index of the one range that all addresses are in, the common case; None where it takes a closer look."""
        if addresses.dtype != torch.int64:
            raise InvalidValue("addresses' dtype", str(addresses.dtype), "int64")
        if nbytes <= 0 or nbytes % WORD:
            raise InvalidValue("bytes to read or write", nbytes, f"a positive multiple of {WORD}")
        if addresses.numel() == 0:
            return None
        lowest, highest = (int(bound) for bound in addresses.aminmax())
        index = bisect_right(self._bases, lowest) - 1
        if index < 0 or highest > self._ends[index] - nbytes or bool((addresses & WORD - 1).any()):
            return None
        return index

    def _by_range(self, addresses: Tensor, nbytes: int, *, zero_allowed: bool) -> list[tuple[int, Tensor]]:
        """Ranges in use and the places of their addresses among ``addresses``, once all are known to be right."""
        device = addresses.device
        bases, ends = torch.tensor(self._bases, device=device), torch.tensor(self._ends, device=device)
        owner = torch.searchsorted(bases, addresses, right=True) - 1
        # Compared without adding to the address, which may be as large as an int64 can be.
        beyond = addresses > ends[owner.clamp_min(0)] - nbytes if self._bases else torch.ones_like(addresses).bool()
        outside = (owner < 0) | beyond | (addresses % WORD != 0)
        if zero_allowed:
            outside &= addresses != 0
        if bool(outside.any()):
            first = int(addresses[outside][0])
            raise InvalidValue(f"address of {nbytes} bytes", first, "a multiple of 4 within one range of the memory")
        return [(index, (owner == index).nonzero().squeeze(1)) for index in torch.unique(owner).tolist() if index >= 0]

    def _windows(self, index: int, addresses: Tensor, nbytes: int) -> tuple[Tensor, Tensor]:
        """The words from every offset of a range on, int32 [offsets, words], and the offsets of ``addresses``.

        The windows overlap; they are a view, without a copy.
        """
        flat = self._tensors[index].view(torch.int32)
        words = nbytes // WORD
        windows = flat.as_strided((flat.numel() - words + 1, words), (1, 1))
        return windows, ((addresses - self._bases[index]) // WORD).to(flat.device)
