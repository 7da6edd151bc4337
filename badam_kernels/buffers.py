"""Memory of whichever block is active: as large as the largest block needs, kept, so that switches allocate nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .blocks import Block

__all__ = ["Buffers", "StaticGradients"]

_ALIGNMENT = 16  # elements; 32 bytes at least
Key = tuple[str, torch.dtype, torch.device]


class Buffers:
    """One flat buffer per key (name, dtype, device), in which every block has its tensors at the same addresses again.

    need   block -> the sizes, in elements, of its tensors in each buffer
    """

    def __init__(self, blocks: Sequence[Block], need: Callable[[Block], Mapping[Key, Sequence[int]]]):
        self._blocks, self._need = blocks, need
        self._buffers: dict[Key, Tensor] = {}

    def used(self, block: Block) -> dict[Key, tuple[Tensor, list[Tensor]]]:
        """By key: the part of the buffer that `block` uses, zeroed, and the 1-D tensors in it, each 16-byte aligned."""
        parts = {}
        for key, sizes in self._need(block).items():
            part = self._buffer(key)[: sum(map(_aligned, sizes))].zero_()
            tensors, start = [], 0
            for size in sizes:
                tensors.append(part[start : start + size])
                start += _aligned(size)
            parts[key] = part, tensors
        return parts

    def nbytes(self) -> dict[str, dict[str, int]]:
        """Bytes by name and place."""
        report: dict[str, dict[str, int]] = {}
        for (name, _, device), buffer in self._buffers.items():
            places, place = report.setdefault(name, {}), "host_pageable" if device.type == "cpu" else str(device)
            places[place] = places.get(place, 0) + buffer.nbytes
        return report

    def clear(self) -> None:
        self._buffers.clear()

    def _buffer(self, key: Key) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None:
            size = max(sum(map(_aligned, self._need(block).get(key, ()))) for block in self._blocks)
            buffer = self._buffers[key] = torch.empty(size, dtype=key[1], device=key[2])
        return buffer


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class StaticGradients:
    """The active block's gradients as views of one flat buffer per dtype and device, into which autograd accumulates."""

    def __init__(self, blocks: Sequence[Block], params: Mapping[str, Tensor]):
        self._params = params
        self._buffers = Buffers(blocks, self._sizes)
        self._parts: list[Tensor] = []
        self._views: list[tuple[Tensor, Tensor]] = []

    def attach(self, block: Block) -> None:
        """Give every parameter of `block` a gradient of zeros, of its whole shape."""
        used, waiting = self._buffers.used(block), _by_key(block, self._params)
        self._parts = [part for part, _ in used.values()]
        self._views = [(p, t.view(p.shape)) for key, params in waiting.items() for p, t in zip(params, used[key][1])]
        self._assign()

    def zero(self) -> None:
        """Zero the gradients, one operation for each buffer, and attach those that were replaced."""
        for part in self._parts:
            part.zero_()
        self._assign()

    def _assign(self) -> None:
        for param, view in self._views:
            param.grad = view

    def _sizes(self, block: Block) -> dict[Key, list[int]]:
        return {key: [p.numel() for p in params] for key, params in _by_key(block, self._params).items()}


def _by_key(block: Block, named: Mapping[str, Tensor]) -> dict[Key, list[Tensor]]:
    """The parameters of `block` by the buffer that their gradients lie in."""
    params: dict[Key, list[Tensor]] = {}
    for name in dict.fromkeys(span.name for span in block.spans):
        param = named[name]
        params.setdefault(("grad", getattr(param, "grad_dtype", None) or param.dtype, param.device), []).append(param)
    return params
