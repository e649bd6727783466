"""Reading and writing at absolute addresses in plain torch.

Kernels follow an address; torch can only index a tensor. `Memory` knows which tensor backs which range of addresses.
It is how the reference functions reach pages, key blocks and slots; it owns no memory and maps none.
"""

from __future__ import annotations

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
        at = sum(other < base for other in self._bases)
        ends_before = at == 0 or self._bases[at - 1] + self._tensors[at - 1].numel() <= base
        begins_after = at == len(self._bases) or base + tensor.numel() <= self._bases[at]
        if not (ends_before and begins_after):
            raise InvalidValue("range of addresses", f"{base} + {tensor.numel()}", "no byte of a range added before")
        self._bases.insert(at, base)
        self._tensors.insert(at, tensor)
        return base

    def remove(self, address: int) -> None:
        """Forget the range that begins at ``address``; raises `InvalidValue` if none does."""
        if address not in self._bases:
            raise InvalidValue("range of addresses", address, "the first address of a range")
        at = self._bases.index(address)
        del self._bases[at], self._tensors[at]

    def read(self, addresses: Tensor, nbytes: int) -> Tensor:
        """``nbytes`` at each address: int64 [...] -> uint8 [..., nbytes]. Address 0 reads zeros.

        Raises `InvalidValue` for an address, other than 0, whose bytes are not all in one range.
        """
        flat = addresses.reshape(-1)
        owner = self._owners(flat, nbytes, zero_allowed=True)
        words = nbytes // WORD
        used = torch.unique(owner).tolist()
        if len(used) == 1 and used[0] >= 0:
            out = self._windows(used[0], words).index_select(0, self._offsets(used[0], flat)).to(flat.device)
        else:
            out = torch.zeros((flat.numel(), words), dtype=torch.int32, device=flat.device)
            for index in used:
                if index >= 0:
                    mine = (owner == index).nonzero().squeeze(1)
                    found = self._windows(index, words).index_select(0, self._offsets(index, flat[mine]))
                    out.index_copy_(0, mine, found.to(flat.device))
        return out.view(torch.uint8).view(*addresses.shape, nbytes)

    def write(self, addresses: Tensor, data: Tensor) -> None:
        """Write ``data`` uint8 [n, nbytes] at ``addresses`` int64 [n]; no byte may be written twice.

        Raises `InvalidValue` for an address whose bytes are not all in one range; then nothing is written.
        """
        nbytes = data.shape[1]
        owner = self._owners(addresses, nbytes, zero_allowed=False)
        words = data.contiguous().view(torch.int32)
        for index in torch.unique(owner).tolist():
            mine = (owner == index).nonzero().squeeze(1)
            first = self._offsets(index, addresses[mine])
            at = first[:, None] + torch.arange(nbytes // WORD, device=first.device)
            self._tensors[index].view(torch.int32)[at.reshape(-1)] = words[mine].reshape(-1).to(first.device)

    def _owners(self, addresses: Tensor, nbytes: int, *, zero_allowed: bool) -> Tensor:
        """Index of the range that holds each address, int64 [n]; -1 for address 0."""
        if addresses.dtype != torch.int64:
            raise InvalidValue("addresses' dtype", str(addresses.dtype), "int64")
        if nbytes <= 0 or nbytes % WORD:
            raise InvalidValue("bytes to read or write", nbytes, f"a positive multiple of {WORD}")
        if not self._bases:
            raise InvalidValue("memory behind addresses", 0, "at least one range")
        bases = torch.tensor(self._bases, device=addresses.device)
        ends = torch.tensor(
            [base + tensor.numel() for base, tensor in zip(self._bases, self._tensors, strict=True)],
            device=addresses.device,
        )
        owner = torch.searchsorted(bases, addresses, right=True) - 1
        # Compared without adding to the address, which may be as large as an int64 can be.
        outside = (owner < 0) | (addresses > ends[owner.clamp_min(0)] - nbytes) | (addresses % WORD != 0)
        if zero_allowed:
            outside &= addresses != 0
        if bool(outside.any()):
            first = int(addresses[outside][0])
            raise InvalidValue(f"address of {nbytes} bytes", first, "a multiple of 4 within one range of the memory")
        return owner

    def _offsets(self, index: int, addresses: Tensor) -> Tensor:
        """Offsets in words into the range's tensor, on the tensor's device."""
        return ((addresses - self._bases[index]) // WORD).to(self._tensors[index].device)

    def _windows(self, index: int, words: int) -> Tensor:
        """int32 [offsets, words]: the words from every offset on, as a view without copies."""
        flat = self._tensors[index].view(torch.int32)
        return flat.as_strided((flat.numel() - words + 1, words), (1, 1))
