"""Transformers: what a Trainer needs beside ``Trainer(..., optimizers=(BlockAdam(...), None))``."""

from __future__ import annotations

from transformers import TrainerCallback

from ..optimizer import BlockAdam

__all__ = ["BlockAdamCallback"]


class BlockAdamCallback(TrainerCallback):
    """Adds to every log entry which block trained: ``block`` (index), ``block_name``, ``visit`` (0 for the first) and
    ``optimizer_bytes`` (held beside weights and gradients).

    The entries of ``trainer_state.json`` have them too.
    """

    def __init__(self, optimizer: BlockAdam):
        self._optimizer = optimizer
        self._trained: dict[str, object] = {}
        self._counted, self._visit = 0, 0

    def on_step_begin(self, args, state, control, **kwargs):
        optimizer = self._optimizer
        self._trained = {
            "block": optimizer.active_block_index,
            "block_name": optimizer.active_block.name,
            "visit": self._visit_at(optimizer.global_step),
        }

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self._trained and "loss" in (logs or {}):
            held = self._optimizer.memory()
            entry = {**self._trained, "optimizer_bytes": sum(size for places in held.values() for size in places.values())}
            logs.update(entry)
            state.log_history[-1].update(entry)

    def _visit_at(self, step: int) -> int:
        """How often the block changed up to `step`: a function of the schedule, so that it is right after a resume."""
        if step < self._counted:
            self._counted, self._visit = 0, 0
        block_at = self._optimizer._schedule
        self._visit += sum(block_at(t) != block_at(t - 1) for t in range(self._counted + 1, step + 1))
        self._counted = step
        return self._visit
