"""The store: where the run-lifetime slots of idle blocks live, and how they move when the active block switches.

Host memory of exact size, reserved once. Zeros are the valid empty state of every slot, and untouched pageable memory
costs nothing until a block's first visit. On a CUDA device the memory is pinned, and the active block's slots share one
device buffer, the room: at a switch the outgoing block leaves it while the incoming one enters, both on streams of their
own beside the next forward and backward. With a prefetch depth, blocks that come later wait in rooms of their own.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from . import hostmem
from .blocks import Span
from .room import BlockingRoom, Rooms, Slots, aligned

try:
    from badam_kernels import _C
except ImportError:
    _C = None

__all__ = ["Memory", "Store"]

_SLAB_BYTES = 64 << 30  # drivers refuse to pin 512 GiB and more at once
_CHUNK_BYTES = 16 << 20


class Store:
    """Host memory for the run-lifetime slots of every span.

    layout          for each span, the slots it keeps and their dtypes; each slot is 1-D of `span.numel` elements
    devices         where the parameters are; memory is pinned if one of them is a CUDA device
    prefetch_depth  how many sets of spans `prefetch` brings to a device beside the one that is fetched next: each takes
                    device memory of its own, as much as the largest set needs

    While a span is fetched, the tensors that `fetch` returned are its slots; otherwise the host copy is. For a span on the
    CPU both are the same memory: nothing moves.

    Raises MemoryError, before anything is allocated, if the slots do not fit into the host memory that is left.
    """

    def __init__(
        self,
        layout: Mapping[Span, Mapping[str, torch.dtype]],
        devices: Iterable[torch.device] = (),
        prefetch_depth: int = 0,
    ):
        if isinstance(prefetch_depth, bool) or not isinstance(prefetch_depth, int) or prefetch_depth < 0:
            raise ValueError(f"prefetch_depth must be an int of at least 0; got {prefetch_depth!r}")
        self.prefetch_depth = prefetch_depth
        places, slab_bytes = _place(layout)
        _check_budget(layout, sum(slab_bytes))
        cuda = next((device for device in devices if device.type == "cuda"), None)
        self._slabs, self._pinned = self._reserve(slab_bytes, cuda)
        self._host: dict[Span, Slots] = {span: {} for span in layout}
        for (span, slot), (slab, offset) in places.items():
            dtype = layout[span][slot]
            # A storage of its own for every slot: torch.save writes whole storages.
            self._host[span][slot] = (
                torch.frombuffer(self._slabs[slab], dtype=dtype, count=span.numel, offset=offset)
                if span.numel
                else torch.empty(0, dtype=dtype)
            )
        self._fetched: dict[Span, Slots] = {}
        self._touched: set[Span] = set()
        self._rooms: dict[torch.device, Rooms | BlockingRoom] = {}

    def fetch(self, spans: Iterable[Span], device: torch.device) -> dict[Span, Slots]:
        """The slots of `spans` on `device`, by span and slot. They may be written; `flush` takes them back.

        Work given to the device's current stream from now on finds them there. Only one set of spans can be on a device other
        than the CPU at a time. Raises RuntimeError for a transfer that failed, now or since the last call; nothing is lost
        then, and another call tries again.
        """
        spans = list(spans)
        try:
            rooms = self._rooms_on(device)
            if rooms is None:
                fetched = {span: self.read(span) for span in spans}
            else:
                fetched = rooms.fetch({span: self._host[span] for span in spans})
        except (RuntimeError, MemoryError) as error:
            raise RuntimeError(
                f"the block's slots could not be moved to or from {device}: {error}. Weights and slots are as the last step left "
                "them: call step() again to retry, or save state_dict() and restart."
            ) from error
        self._fetched.update(fetched)
        self._touched.update(spans)
        return fetched

    def prefetch(self, spans: Iterable[Span], device: torch.device) -> None:
        """Start to move the slots of `spans` to `device`, for a `fetch` to come. A failure is raised at the next one.

        Of the sets announced so, those that came last stay: one, and `prefetch_depth` more. One that is then not fetched has
        been moved in vain, no more.
        """
        try:
            rooms = self._rooms_on(device)
        except RuntimeError:
            return  # `fetch` meets it again
        if rooms is not None:
            rooms.prefetch({span: self._host[span] for span in spans})

    def flush(self, spans: Iterable[Span]) -> None:
        """Give up what `fetch` returned for `spans` and start to make their host copy current.

        The copies follow the work given to the device's current stream so far. A failure is raised at the next `fetch`.
        """
        spans = list(spans)
        for span in spans:
            del self._fetched[span]
        for rooms in self._rooms.values():
            rooms.flush(spans)

    def drop(self, keep: Iterable[Span] = ()) -> None:
        """Forget everything: every slot is zeros again, nothing is fetched. The host copies of `keep` are left as they are."""
        for rooms in self._rooms.values():
            rooms.drop()
        self._fetched.clear()
        kept = self._touched.intersection(keep)
        for span in self._touched - kept:
            for host in self._host[span].values():
                host.zero_()
        self._touched = kept

    def touched(self) -> list[Span]:
        """The spans that were ever fetched or written; all slots of the others are zeros."""
        return [span for span in self._host if span in self._touched]

    def read(self, span: Span) -> Slots:
        """The current slots of `span`, wherever they are: the live tensors, not copies.

        Waits for a flush of `span` that is under way, and raises RuntimeError if it failed and fails again.
        """
        if span in self._fetched:
            return self._fetched[span]
        for rooms in self._rooms.values():
            rooms.settle(span)
        return self._host[span]

    def write(self, span: Span, slots: Mapping[str, Tensor]) -> None:
        """Set the host copy of an idle `span`."""
        for rooms in self._rooms.values():
            rooms.forget_prefetched()
        for slot, value in slots.items():
            self._host[span][slot].copy_(value.reshape(-1))
        self._touched.add(span)

    def memory(self) -> Memory:
        """Bytes by slot and place. `padding` is what alignment and whole pages add to the exact size of all slots, and what
        the device's buffers have beyond the blocks in them; `ring` is what pageable memory moves through on its way there."""
        report = Memory(**self.reservation())
        padding, ring = report.setdefault("padding", {}), 0
        host = "host_pinned" if self._pinned else "host_pageable"
        for slots in self._host.values():
            _count(report, slots, host)
        padding[host] = report.reserved - report.asked
        for device, rooms in self._rooms.items():
            for slots in rooms.held:
                _count(report, slots, str(device))
            padding[str(device)] = rooms.nbytes - sum(value.nbytes for slots in rooms.held for value in slots.values())
            ring += rooms.ring_bytes
        if ring:
            report["ring"] = {"host_pinned": ring}
        return report

    def reservation(self) -> dict[str, int]:
        """Bytes of host memory: `asked` for, all slots; `reserved`, with padding; `touched`, in physical memory now."""
        return {
            "asked": sum(value.nbytes for slots in self._host.values() for value in slots.values()),
            "reserved": sum(slab.reserved for slab in self._slabs),
            "touched": sum(slab.touched for slab in self._slabs),
        }

    def close(self) -> None:
        """Give all memory back. Host tensors that were handed out stay valid as long as someone holds them."""
        self._rooms.clear()
        self._host, self._fetched, self._touched, self._slabs = {}, {}, set(), []

    def _rooms_on(self, device: torch.device) -> Rooms | BlockingRoom | None:
        """What slots move to on `device`; None on the CPU, where they do not."""
        if device.type == "cpu":
            return None
        if device not in self._rooms:
            self._rooms[device] = self._make_rooms(device)
        return self._rooms[device]

    def _make_rooms(self, device: torch.device) -> Rooms | BlockingRoom:
        if _C is None or device.type != "cuda" or torch.version.hip:
            return BlockingRoom(device)
        stager = _C.Stager(self._context(device), _CHUNK_BYTES, self._pinned)
        return Rooms(device, stager, self._slabs, self.prefetch_depth)

    def _reserve(self, slab_bytes: list[int], cuda: torch.device | None) -> tuple[list, bool]:
        """Zeroed memory for every slab, and whether it is pinned."""
        if _C is None:
            return [_PlainSlab(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for size in slab_bytes], False
        if cuda is not None and not torch.version.hip:
            try:
                context = self._context(cuda)
                return [_C.Slab(size, context) for size in slab_bytes], True
            except _C.DriverError as error:
                _warn_pageable(sum(slab_bytes), error)
        return [_C.Slab(size) for size in slab_bytes], False

    def _context(self, device: torch.device) -> _C.Context:
        return _C.Context(torch.cuda.current_device() if device.index is None else device.index)


class Memory(dict[str, dict[str, int]]):
    """Bytes by slot, then by place; each byte is counted once, so the numbers may be summed.

    Of those in host memory, the store reserved its own as one: `asked` bytes for all slots, `reserved` with padding, of which
    `touched` are in physical memory now.
    """

    def __init__(self, asked: int, reserved: int, touched: int):
        super().__init__()
        self.asked, self.reserved, self.touched = asked, reserved, touched


class _PlainSlab(mmap.mmap):
    """What stands in for `_C.Slab` without the extension: zeroed pages that cost nothing until written."""

    @property
    def reserved(self) -> int:
        return -(-len(self) // mmap.PAGESIZE) * mmap.PAGESIZE

    touched = reserved  # nobody counts the pages that were written


def _place(layout: Mapping[Span, Mapping[str, torch.dtype]]) -> tuple[dict[tuple[Span, str], tuple[int, int]], list[int]]:
    """(slab, offset) of every slot, in order and aligned, and the bytes of each slab; no slot lies in two slabs."""
    places, slabs = {}, []
    for span, slots in layout.items():
        for slot, dtype in slots.items():
            size = aligned(span.numel * dtype.itemsize)
            if not slabs or slabs[-1] + size > _SLAB_BYTES and slabs[-1]:
                slabs.append(0)
            places[span, slot] = len(slabs) - 1, slabs[-1]
            slabs[-1] += size
    return places, [size for size in slabs if size]


def _check_budget(layout: Mapping[Span, Mapping[str, torch.dtype]], wanted: int) -> None:
    left = hostmem.available_bytes()
    if left is None or wanted <= left:
        return
    masters = any(slots.get("w") is torch.float32 for slots in layout.values())
    hint = " For bf16 weights format='split' needs 2 bytes per element instead of 4." if masters else ""
    raise MemoryError(
        f"the idle blocks need {wanted:,} bytes ({wanted / 1e9:.2f} GB) of host memory; "
        f"{left:,} ({left / 1e9:.2f} GB) are left.{hint}"
    )


def _warn_pageable(wanted: int, error: Exception) -> None:
    import resource  # where there is no CUDA there may be no such module

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
    warnings.warn(
        f"could not pin {wanted:,} bytes of host memory ({error}); the limit on locked memory (ulimit -l) is {limit}. The idle "
        f"blocks stay in pageable memory, and every switch copies them once more within the host, through a pinned ring. Raise "
        "the limit (in a container: --ulimit memlock=-1) or free host memory.",
        RuntimeWarning,
        stacklevel=4,
    )


def _count(report: dict[str, dict[str, int]], slots: Slots, place: str) -> None:
    for slot, value in slots.items():
        places = report.setdefault(slot, {})
        places[place] = places.get(place, 0) + value.nbytes
