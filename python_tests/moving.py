"""Stores that move slots although there is no GPU: by threads, or by the stand-in driver."""

from __future__ import annotations

import torch

from badam_kernels import _C
from badam_kernels.room import Rooms
from badam_kernels.store import Store


class MovingStore(Store):
    """A store whose slots move on the CPU too, in small chunks.

    standin   a `standin.StandIn`, None for threads
    compute   the stand-in's stream that computes; None: the host does, and waits for what it fetches
    pinned    whether to ask for pinned memory
    """

    def __init__(
        self, layout, devices=(), prefetch_depth=0, *, standin=None, compute=None, pinned=True, chunk_bytes=256
    ):
        self.standin, self.compute, self.chunk_bytes = standin, compute, chunk_bytes
        self._own_stream = standin.stream() if standin and compute is None else None
        super().__init__(layout, [torch.device("cuda", 0)] if standin and pinned else [], prefetch_depth)

    def fetch(self, spans, device):
        fetched = super().fetch(spans, device)
        if self._own_stream is not None:
            self.standin.finish(self._own_stream)
        return fetched

    def close(self):
        super().close()
        if self._own_stream is not None:
            self.standin.drop_stream(self._own_stream)
            self._own_stream = None

    def _rooms_on(self, device):
        if device not in self._rooms:
            stager = _C.Stager(self._context(device) if self.standin else None, self.chunk_bytes, self._pinned)
            self._rooms[device] = _Rooms(device, stager, self._slabs, self.prefetch_depth)
            self._rooms[device].stream = self.compute or self._own_stream or 0
        return self._rooms[device]

    def _context(self, device):
        return _C.Context(0, self.standin.path)


class _Rooms(Rooms):
    stream = 0

    def _stream(self):
        return self.stream
