"""A loss scale for plain loops in fp16: gradients that would round to zero are computed larger, and made small in the step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["LossScale"]

_START, _GROWTH, _BACKOFF, _INTERVAL, _LEAST = 2.0**16, 2.0, 0.5, 2000, 1.0


class LossScale:
    """A factor on the loss: a number, or "dynamic".

    A dynamic one starts at 2**16, doubles after 2000 successful steps in a row and halves at an overflow, as that of
    torch.amp.GradScaler does, but never below 1. It lives on the device and is updated there: nothing waits for it.

    Raises ValueError for anything else.
    """

    def __init__(self, start: float | str):
        self.dynamic = start == "dynamic"
        if not self.dynamic and (isinstance(start, str) or not (start > 0 and math.isfinite(start))):
            raise ValueError(f"loss_scale must be None, 'dynamic' or a positive number; got {start!r}")
        self.value: float | Tensor = torch.tensor(_START) if self.dynamic else float(start)
        self._inverse: float | Tensor = 1 / self.value
        self._successes = torch.zeros((), dtype=torch.int32)
        self._applied = False

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the scale."""
        self._applied = True
        return loss * (self.value.to(loss.device, non_blocking=True) if self.dynamic else self.value)

    def inverse(self, device: torch.device) -> float | Tensor:
        """What unscales gradients; for a dynamic scale a tensor on `device`. Raises RuntimeError if no loss was ever scaled."""
        if not self._applied:
            raise RuntimeError("loss_scale is set, but no loss was scaled: call optimizer.scale(loss).backward()")
        if self.dynamic and self.value.device != device:
            self.value, self._inverse, self._successes = (
                t.to(device, non_blocking=True) for t in (self.value, self._inverse, self._successes)
            )
        return self._inverse

    def update(self, overflow: bool | Tensor) -> None:
        """Follow one step, of which `overflow` says (for a tensor: by not being zero) that it was skipped."""
        if not self.dynamic:
            return
        if not isinstance(overflow, Tensor):
            overflow = torch.full((), float(overflow), device=self.value.device)
        torch._amp_update_scale_(self.value, self._successes, overflow, _GROWTH, _BACKOFF, _INTERVAL)
        torch.reciprocal(self.value.clamp_(min=_LEAST), out=self._inverse)

    def state(self) -> dict[str, Any] | None:
        """What a state dict keeps of it, exact; waits for the device. None for a number."""
        return {"scale": float(self.value), "successes": int(self._successes)} if self.dynamic else None

    def load(self, state: dict[str, Any] | None) -> None:
        """Continue from another dynamic scale's `state`."""
        if self.dynamic and state is not None:
            self.value.fill_(state["scale"])
            torch.reciprocal(self.value, out=self._inverse)
            self._successes.fill_(state["successes"])
