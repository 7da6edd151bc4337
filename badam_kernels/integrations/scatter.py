"""Sets of scattered elements as compact tensors, so that blocks of ranges can train them.

The elements of a parameter are put into a seeded random order, which is cut into windows. A window has a *stand-in*: a 1-D
parameter that an optimizer trains in place of those elements. It has memory only while its block is active: weights and
gradients are gathered into it before a step, weights scattered back after it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Scatter"]


class Scatter:
    """Stand-ins for the windows of `named` parameters.

    counts   windows of each parameter
    keep     keep the indices of the active windows between steps (8 bytes per element) instead of drawing them again
    """

    def __init__(self, named: dict[str, Tensor], counts: dict[str, int], keep: bool = True):
        self._keep = keep
        self._windows: dict[str, tuple[str, Tensor, int, int]] = {}
        self._indices: dict[str, Tensor] = {}
        self._active: list[str] = []
        self.stand_ins: dict[str, list[tuple[str, Tensor]]] = {}
        self._tensors: dict[str, Tensor] = {}
        for name, count in counts.items():
            pairs = []
            for i in range(count):
                param = named[name]
                start, stop = param.numel() * i // count, param.numel() * (i + 1) // count
                key = self.key(name, i, count)
                self._windows[key] = (name, param, start, stop)
                self._tensors[key] = _placeholder(param, stop - start)
                self._tensors[key].stands_for = param  # as a model is found around its own parameters
                pairs.append((key, self._tensors[key]))
            self.stand_ins[name] = pairs

    @staticmethod
    def key(name: str, i: int, count: int) -> str:
        """The name of the stand-in of window `i` of `count`."""
        return f"{name} (scattered, {i} of {count})"

    @property
    def nbytes(self) -> int:
        """Bytes of the active stand-ins and their indices."""
        return sum(self._tensors[key].nbytes for key in self._active) + sum(t.nbytes for t in self._indices.values())

    @torch.no_grad()
    def gather(self, keys: Iterable[str]) -> None:
        """Make `keys` the active stand-ins, with the weights and gradients of their elements."""
        keys = [key for key in keys if key in self._windows]
        for key in set(self._active) - set(keys):
            _, param, start, stop = self._windows[key]
            self._tensors[key].data = _placeholder(param, stop - start)
            self._tensors[key].grad = None
            self._indices.pop(key, None)
        entering, self._active = set(keys) - set(self._active), keys
        for key in keys:
            param, stand_in, index = self._windows[key][1], self._tensors[key], self._index(key)
            if key in entering:
                stand_in.data = torch.empty(len(index), dtype=param.dtype, device=param.device)
            torch.index_select(param.detach().view(-1), 0, index, out=stand_in.data)
            stand_in.grad = None if param.grad is None else param.grad.reshape(-1)[index]

    @torch.no_grad()
    def scatter(self) -> None:
        """Write the active stand-ins back into their parameters."""
        for key in self._active:
            self._windows[key][1].view(-1).index_copy_(0, self._index(key), self._tensors[key].detach())

    def _index(self, key: str) -> Tensor:
        index = self._indices.get(key)
        if index is None:
            name, param, start, stop = self._windows[key]
            # On the CPU, so that every rank, device and resumed run draws the same order.
            order = torch.randperm(param.numel(), generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            index = order[start:stop].to(param.device, copy=True)
            if self._keep:
                self._indices[key] = index
        return index


def _placeholder(param: Tensor, size: int) -> Tensor:
    """A tensor of `size` elements with the memory of one."""
    return torch.empty(1, dtype=param.dtype, device=param.device).expand(size)
