"""Rooms: the device memory that the slots of one block share, and what moves in and out of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from .blocks import Span

__all__ = ["BlockingRoom", "Rooms", "Slots", "aligned"]

_ALIGNMENT_BYTES = 64
Slots = dict[str, Tensor]


def aligned(size: int) -> int:
    """`size` in bytes, rounded up so that what follows is aligned."""
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class Room:
    """Device memory for the slots of one block at a time.

    holds    by span, the slots that are laid out in it
    absent   spans of `holds` of which the room has no bytes, or old ones
    arrival  comes to pass when the bytes of the others are there
    """

    def __init__(self) -> None:
        self.holds: dict[Span, Slots] = {}
        self.absent: set[Span] = set()
        self.arrival: Any = None
        self._host: dict[Span, Slots] = {}
        self._buffer: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.nbytes

    def lay_out(self, host: dict[Span, Slots], device: torch.device, synchronize: Callable[[], None]) -> None:
        """Make space for `host`, of which nothing is here yet. Calls `synchronize` before it gives memory up."""
        self.holds, self._host = {}, host
        sizes = [aligned(value.nbytes) for slots in host.values() for value in slots.values()]
        if self._buffer is None or self.nbytes < sum(sizes):
            synchronize()
            self._buffer = None  # before the new one is there: a device may not have space for both
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        offset = 0
        for span, slots in host.items():
            self.holds[span] = {}
            for slot, value in slots.items():
                self.holds[span][slot] = self._buffer[offset : offset + value.nbytes].view(value.dtype)
                offset += aligned(value.nbytes)
        self.absent = set(host)

    def pieces(self, spans: Collection[Span]) -> list[tuple[int, int, int]]:
        """(room address, host address, bytes) of all slots of `spans`; neighbours on both sides are one piece."""
        pieces: list[tuple[int, int, int]] = []
        for span in (span for span in self.holds if span in spans):
            for slot, value in self.holds[span].items():
                room, host, size = value.data_ptr(), self._host[span][slot].data_ptr(), aligned(value.nbytes)
                if not size:
                    continue
                if pieces and room == pieces[-1][0] + pieces[-1][2] and host == pieces[-1][1] + pieces[-1][2]:
                    pieces[-1] = (*pieces[-1][:2], pieces[-1][2] + size)
                else:
                    pieces.append((room, host, size))
        return pieces


class Rooms:
    """The rooms of a device: one for the active block, and one more for each block that is brought ahead of its visit.

    stager          a `_C.Stager` for `device`
    slabs           the host memory, kept alive for as long as anything may be in flight
    prefetch_depth  blocks beyond the next one that are brought ahead; 0: one block leaves the only room while the next enters

    Blocks may share spans: a span is brought ahead for one of them only, and again once another's visit has changed it.
    """

    def __init__(self, device: torch.device, stager: Any, slabs: list, prefetch_depth: int = 0):
        self.device, self.stager = device, stager
        self._slabs, self._prefetch_depth = slabs, prefetch_depth
        self._rooms: list[Room] = []  # that asked for last is last
        self._active: Room | None = None
        self._leaving: set[Span] = set()
        self._error: Exception | None = None

    def __del__(self) -> None:
        try:
            self.stager.synchronize()
        except RuntimeError:
            pass  # nothing moves on a device that is gone, nor in a forked child

    @property
    def nbytes(self) -> int:
        return sum(room.nbytes for room in self._rooms)

    @property
    def ring_bytes(self) -> int:
        return self.stager.ring_bytes

    @property
    def held(self) -> list[Slots]:
        """The slots that some room has space for, of each span."""
        return [slots for room in self._rooms for slots in room.holds.values()]

    def fetch(self, host: dict[Span, Slots]) -> dict[Span, Slots]:
        if self._active is not None:
            if host.keys() == self._active.holds.keys():
                return self._active.holds
            raise ValueError(f"{self.device} holds the slots of another block; flush them first")
        error, self._error = self._error, None
        if error is not None:
            raise error
        room = self._room_for(host)
        self._bring(room, room.absent)
        self.stager.acquire(room.arrival, self._stream())
        if self.stager.settled():
            self._leaving.clear()
        self._active = room
        return dict(room.holds)

    def prefetch(self, host: dict[Span, Slots]) -> None:
        try:
            room = self._room_for(host)
            if room is not None:
                elsewhere = [other.holds.keys() - other.absent for other in self._rooms if other is not room]
                self._bring(room, room.absent.difference(*elsewhere))
        except (RuntimeError, MemoryError) as error:
            self._error = error

    def flush(self, spans: Iterable[Span]) -> None:
        room = self._active
        spans = [span for span in spans if room is not None and span in room.holds]
        if not spans:
            return
        pieces = room.pieces(spans)
        for span in spans:
            del room.holds[span]
        if not room.holds:
            self._active = None
        for other in self._rooms:
            other.absent |= other.holds.keys() & spans
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
        self._empty_lanes()
        self._leaving.clear()
        for room in self._rooms:
            if room is not self._active:
                room.holds = {}

    def drop(self) -> None:
        self.stager.synchronize()
        for room in self._rooms:
            room.holds = {}
        self._active = self._error = None
        self._leaving.clear()

    def _room_for(self, host: dict[Span, Slots]) -> Room | None:
        """The room laid out for `host`; else an empty one, else that asked for longest ago, laid out now. None: there is none."""
        idle = [room for room in self._rooms if room is not self._active]
        if len(self._rooms) <= self._prefetch_depth:
            idle.append(Room())
        room = min(idle, key=lambda room: (list(room.holds) != list(host), bool(room.holds)), default=None)
        if room is None:
            return None
        if list(room.holds) != list(host):
            room.lay_out(host, self.device, self._empty_lanes)
        self._rooms = [other for other in self._rooms if other is not room] + [room]
        return room

    def _bring(self, room: Room, spans: set[Span]) -> None:
        """Start to move `spans` into `room`."""
        if spans:
            room.arrival = self.stager.prefetch(room.pieces(spans), self._stream())
            room.absent = room.absent - spans

    def _empty_lanes(self) -> None:
        self.stager.settle()
        self.stager.synchronize()

    def _stream(self) -> int:
        """The handle of the stream that computes."""
        return torch.cuda.current_stream(self.device).cuda_stream


class BlockingRoom:
    """What stands in for `Rooms` without the extension or a CUDA driver: copies that wait, to memory of their own."""

    ring_bytes = 0

    def __init__(self, device: torch.device):
        self.device = device
        self.holds: dict[Span, Slots] = {}
        self._host: dict[Span, Slots] = {}

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for slots in self.held for value in slots.values())

    @property
    def held(self) -> list[Slots]:
        return list(self.holds.values())

    def fetch(self, host: dict[Span, Slots]) -> dict[Span, Slots]:
        self._host |= host
        for span in host.keys() - self.holds.keys():
            self.holds[span] = {slot: value.to(self.device, copy=True) for slot, value in host[span].items()}
        return {span: self.holds[span] for span in host}

    def flush(self, spans: Iterable[Span]) -> None:
        for span in spans:
            for slot, value in self.holds.pop(span, {}).items():
                self._host[span][slot].copy_(value)

    def drop(self) -> None:
        self.holds.clear()

    def prefetch(self, host: dict[Span, Slots]) -> None:
        """Nothing to do ahead of `fetch`."""

    def settle(self, span: Span) -> None:
        """The host copy of an idle span is always current."""

    def forget_prefetched(self) -> None:
        """Nothing is."""
