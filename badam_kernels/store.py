"""The store: where the run-lifetime slots of idle blocks live.

One exact-size slab of host memory, reserved once. Zeros are the valid empty state of every slot, and untouched pages of
the slab cost nothing until a block's first visit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .blocks import Span

__all__ = ["Store"]

_ALIGNMENT_BYTES = 64


class Store:
    """Host memory for the run-lifetime slots of every span.

    layout    for each span, the slots it keeps and their dtypes; each slot is 1-D of `span.numel` elements

    While a span is fetched, the tensors that `fetch` returned are its slots; otherwise the host copy is. For a span on the
    CPU both are the same memory: nothing moves.
    """

    def __init__(self, layout: Mapping[Span, Mapping[str, torch.dtype]]):
        offsets, total = {}, 0
        for span, slots in layout.items():
            for slot, dtype in slots.items():
                offsets[span, slot] = total
                size = span.numel * dtype.itemsize
                total += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        slab = torch.zeros(total, dtype=torch.uint8)
        self._host = {
            span: {
                slot: slab[offsets[span, slot] :][: span.numel * dtype.itemsize].view(dtype)
                for slot, dtype in slots.items()
            }
            for span, slots in layout.items()
        }
        self._fetched: dict[Span, dict[str, Tensor]] = {}
        self._touched: set[Span] = set()
        self._slab_bytes = total

    def fetch(self, spans: Iterable[Span], device: torch.device) -> dict[Span, dict[str, Tensor]]:
        """The slots of `spans` on `device`, by span and slot. They may be written; `flush` takes them back."""
        for span in spans:
            self._fetched[span] = {slot: host.to(device, non_blocking=True) for slot, host in self._host[span].items()}
            self._touched.add(span)
        return {span: self._fetched[span] for span in spans}

    def flush(self, spans: Iterable[Span]) -> None:
        """Make the host copy of fetched `spans` current and give up what `fetch` returned for them."""
        for span in spans:
            for slot, live in self._fetched.pop(span).items():
                host = self._host[span][slot]
                if live.data_ptr() != host.data_ptr():
                    host.copy_(live)

    def drop(self) -> None:
        """Forget everything: every slot is zeros again, nothing is fetched."""
        self._fetched.clear()
        for span in self._touched:
            for host in self._host[span].values():
                host.zero_()
        self._touched.clear()

    def touched(self) -> list[Span]:
        """The spans that were ever fetched or written; all slots of the others are zeros."""
        return [span for span in self._host if span in self._touched]

    def read(self, span: Span) -> dict[str, Tensor]:
        """The current slots of `span`, wherever they are: the live tensors, not copies."""
        return self._fetched.get(span) or self._host[span]

    def write(self, span: Span, slots: Mapping[str, Tensor]) -> None:
        """Set the host copy of an idle `span`."""
        for slot, value in slots.items():
            self._host[span][slot].copy_(value.reshape(-1))
        self._touched.add(span)

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes by slot and place. `padding` is what alignment adds to the exact size of all slots."""
        report: dict[str, dict[str, int]] = {}
        for span, slots in self._host.items():
            for slot, host in slots.items():
                places = report.setdefault(slot, {"host_pageable": 0})
                places["host_pageable"] += host.nbytes
                live = self._fetched.get(span, {}).get(slot)
                if live is not None and live.device.type != "cpu":
                    places[str(live.device)] = places.get(str(live.device), 0) + live.nbytes
        exact = sum(places["host_pageable"] for places in report.values())
        report["padding"] = {"host_pageable": self._slab_bytes - exact}
        return report

    def close(self) -> None:
        """Give all memory back. Tensors that were handed out stay valid as long as someone holds them."""
        self._host, self._fetched, self._touched, self._slab_bytes = {}, {}, set(), 0
