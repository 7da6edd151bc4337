"""A room: the device memory that the slots of one block share, and what moves in and out of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .blocks import Span

__all__ = ["BlockingRoom", "Room", "Slots", "aligned"]

_ALIGNMENT_BYTES = 64
Slots = dict[str, Tensor]


def aligned(size: int) -> int:
    """`size` in bytes, rounded up so that what follows is aligned."""
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class Room:
    """Device memory for the slots of one block at a time. One block leaves it while the next one enters.

    stager   a `_C.Stager` for `device`
    slabs    the host memory, kept alive for as long as anything may be in flight
    holds    by span, the slots that are in the room or on their way in
    """

    def __init__(self, device: torch.device, stager: Any, slabs: list):
        self.device, self.stager = device, stager
        self.holds: dict[Span, Slots] = {}
        self._host: dict[Span, Slots] = {}
        self._slabs = slabs
        self._buffer: Tensor | None = None
        self._acquired = False
        self._leaving: set[Span] = set()
        self._error: Exception | None = None

    def __del__(self) -> None:
        try:
            self.stager.synchronize()
        except RuntimeError:
            pass  # nothing moves on a device that is gone, nor in a forked child

    @property
    def nbytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.nbytes

    @property
    def ring_bytes(self) -> int:
        return self.stager.ring_bytes

    def fetch(self, host: dict[Span, Slots]) -> dict[Span, Slots]:
        if self._acquired:
            if host.keys() == self.holds.keys():
                return self.holds
            raise ValueError(f"{self.device} holds the slots of another block; flush them first")
        error, self._error = self._error, None
        if error is not None:
            raise error
        if list(host) != list(self.holds):
            self._load(host)
        self.stager.acquire(self._stream())
        if self.stager.settled():
            self._leaving.clear()
        self._acquired = True
        return dict(self.holds)

    def prefetch(self, host: dict[Span, Slots]) -> None:
        if self._acquired:
            return
        try:
            self._load(host)
        except (RuntimeError, MemoryError) as error:
            self._error = error

    def flush(self, spans: list[Span]) -> None:
        if not spans:
            return
        pieces = self._pieces(spans)
        for span in spans:
            del self.holds[span]
        self._acquired = bool(self.holds)
        self._leaving.update(spans)
        try:
            self.stager.flush(pieces, self._stream())
        except RuntimeError as error:
            self._error = error

    def settle(self, span: Span) -> None:
        """Make the host copy of an idle `span` current."""
        if span in self._leaving:
            self.stager.settle()
            self._leaving.clear()

    def forget_prefetched(self) -> None:
        """Make sure that nothing reads host memory, nor was read from it ahead of its use."""
        self.stager.settle()
        self.stager.synchronize()
        self._leaving.clear()
        if not self._acquired:
            self.holds = {}

    def drop(self) -> None:
        self.stager.synchronize()
        self.holds, self._acquired, self._error = {}, False, None
        self._leaving.clear()

    def _load(self, host: dict[Span, Slots]) -> None:
        """Lay `host` out in the room and start to move it in."""
        self.holds, self._host = {}, host
        sizes = [aligned(value.nbytes) for slots in host.values() for value in slots.values()]
        if self._buffer is None or self.nbytes < sum(sizes):
            self.stager.settle()
            self.stager.synchronize()
            self._buffer = None  # before the new one is there: a device may not have space for both
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        holds, offset = {}, 0
        for span, slots in host.items():
            holds[span] = {}
            for slot, value in slots.items():
                holds[span][slot] = self._buffer[offset : offset + value.nbytes].view(value.dtype)
                offset += aligned(value.nbytes)
        self.holds = holds
        try:
            self.stager.prefetch(self._pieces(host), self._stream())
        except BaseException:
            self.holds = {}
            raise

    def _pieces(self, spans: Iterable[Span]) -> list[tuple[int, int, int]]:
        """(room address, host address, bytes) of all slots of `spans`; neighbours on both sides are one piece."""
        pieces: list[tuple[int, int, int]] = []
        for span in spans:
            for slot, value in self.holds[span].items():
                room, host, size = value.data_ptr(), self._host[span][slot].data_ptr(), aligned(value.nbytes)
                if not size:
                    continue
                if pieces and room == pieces[-1][0] + pieces[-1][2] and host == pieces[-1][1] + pieces[-1][2]:
                    pieces[-1] = (*pieces[-1][:2], pieces[-1][2] + size)
                else:
                    pieces.append((room, host, size))
        return pieces

    def _stream(self) -> int:
        """The handle of the stream that computes."""
        return torch.cuda.current_stream(self.device).cuda_stream


class BlockingRoom:
    """What stands in for `Room` without the extension or a CUDA driver: copies that wait, to memory of their own."""

    ring_bytes = 0

    def __init__(self, device: torch.device):
        self.device = device
        self.holds: dict[Span, Slots] = {}
        self._host: dict[Span, Slots] = {}

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for slots in self.holds.values() for value in slots.values())

    def fetch(self, host: dict[Span, Slots]) -> dict[Span, Slots]:
        self._host |= host
        for span in host.keys() - self.holds.keys():
            self.holds[span] = {slot: value.to(self.device, copy=True) for slot, value in host[span].items()}
        return {span: self.holds[span] for span in host}

    def flush(self, spans: list[Span]) -> None:
        for span in spans:
            for slot, value in self.holds.pop(span).items():
                self._host[span][slot].copy_(value)

    def drop(self) -> None:
        self.holds.clear()

    def prefetch(self, host: dict[Span, Slots]) -> None:
        """Nothing to do ahead of `fetch`."""

    def settle(self, span: Span) -> None:
        """The host copy of an idle span is always current."""

    def forget_prefetched(self) -> None:
        """Nothing is."""
