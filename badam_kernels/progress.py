"""How many steps succeeded, where the device knows first whether a gradient was finite."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Progress"]


class Progress:
    """A count of successful steps that waits for the device only when asked for the exact number.

    A backend that works asynchronously answers "was this step skipped?" with a tensor. Those answers are summed on the device
    and copied to pinned memory behind the step.
    """

    def __init__(self, done: int = 0):
        self._done, self._pending, self._seen = done, 0, 0
        self._skipped: Tensor | None = None
        self._host: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    @property
    def at_most(self) -> int:
        """The count if no step was skipped of which the answer is still on the device. Never waits."""
        return self._done + self._pending

    def add(self, skipped: bool | Tensor) -> None:
        """Count one step, unless `skipped` (for a tensor: not zero). Does not wait for a tensor on a GPU."""
        if not isinstance(skipped, Tensor):
            self._done += not skipped
            return
        if self._skipped is None or self._skipped.device != skipped.device:
            self.settle()
            self._start(skipped)
        self._skipped.add_(skipped)
        self._host.copy_(self._skipped, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(skipped.device))
        self._pending += 1

    def settle(self) -> int:
        """The exact count; waits for the last step on the device."""
        if self._pending:
            if self._copied is not None:
                self._copied.synchronize()
            skipped = int(self._host)
            self._done += self._pending - (skipped - self._seen)
            self._seen, self._pending = skipped, 0
        return self._done

    def _start(self, skipped: Tensor) -> None:
        on_gpu = skipped.device.type == "cuda"
        self._seen = 0
        # In the dtype of what is added, since torch takes twice as long to add two dtypes. fp32 counts exactly to 2**24.
        self._skipped = torch.zeros_like(skipped)
        self._host = torch.zeros((), dtype=skipped.dtype, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
