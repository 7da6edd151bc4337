"""Transformers: what a Trainer needs beside ``Trainer(..., optimizers=(BlockAdam(...), None))``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback
from transformers.utils import logging

from ..blocks import Span
from ..optimizer import BlockAdam

__all__ = ["BAdamCallback", "BlockAdamCallback", "last_complete_checkpoint"]

_log = logging.get_logger("transformers.badam_kernels")  # under the name that transformers' verbosity governs


class BlockAdamCallback(TrainerCallback):
    """What the Trainer cannot know of BlockAdam.

    Adds to every log entry, those of ``trainer_state.json`` too, which block trained: ``block`` (index), ``block_name``,
    ``visit`` (0 for the first), what is held beside weights and gradients, ``optimizer_bytes`` in all, of which ``host_bytes``
    in host memory, and for 16-bit weights ``surviving_update``: how much of what this visit did to the masters shows in the
    weights themselves, 1 for all of it. The rest would be lost if masters were dropped at a switch. Keeps the learning-rate
    scheduler from advancing at a step that was skipped for an overflow.

    optimizer   the BlockAdam; None: the Trainer's
    """

    def __init__(self, optimizer: BlockAdam | None = None):
        self._optimizer = optimizer
        self._trained: dict[str, object] = {}
        self._counted, self._visit, self._step = 0, 0, 0
        self._sample = _Sample()

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        if self._optimizer is None:
            self._optimizer = block_adam_in(optimizer)
        names = ", ".join(block.name for block in self._optimizer.blocks)
        kind = f"{type(self._optimizer).__module__}.{type(self._optimizer).__name__}"
        _log.info(f"{kind}: {len(self._optimizer.blocks)} blocks ({names}), at step {self._optimizer.global_step}")

    def on_step_begin(self, args, state, control, **kwargs):
        optimizer = self._optimizer
        self._trained = {
            "block": optimizer.active_block_index,
            "block_name": optimizer.active_block.name,
            "visit": self._visit_at(optimizer.global_step),
        }
        self._sample.begin(optimizer, self._visit)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._step = self._optimizer.global_step

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        # A GradScaler always calls an optimizer that unscales itself, so accelerate cannot see that a step was skipped.
        if getattr(optimizer, "scaler", None) is not None:
            optimizer._is_overflow = self._optimizer.global_step == self._step

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self._trained and "loss" in (logs or {}):
            held = [item for places in self._optimizer.memory().values() for item in places.items()]
            entry = {
                **self._trained,
                "optimizer_bytes": sum(size for _, size in held),
                "host_bytes": sum(size for place, size in held if place.startswith("host")),
            }
            share = self._sample.surviving(self._optimizer)
            if share is not None:
                entry["surviving_update"] = share
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


class _Sample:
    """Some weights of the active block and their masters as the visit began."""

    _ELEMENTS = 65_536

    def __init__(self) -> None:
        self._visit: int | None = None
        self._span: Span | None = None

    def begin(self, optimizer: BlockAdam, visit: int) -> None:
        """Take the sample, if `visit` is new: of the block's largest part that has a master and memory of its own."""
        if visit == self._visit:
            return
        self._visit = visit
        spans = [span for span in optimizer.active_block.spans if "w" in optimizer._run_slots(span)]
        spans = [span for span in spans if optimizer._params[span.name].is_contiguous()]
        self._span = max(spans, key=lambda span: span.numel, default=None)
        if self._span is not None:
            self._weights, self._masters = self._now(optimizer)

    def _now(self, optimizer: BlockAdam) -> tuple[Tensor, Tensor]:
        span, count = self._span, min(self._span.numel, self._ELEMENTS)
        weights = optimizer._params[span.name].detach().view(-1)[span.start : span.start + count].clone()
        auxiliary = optimizer._store.read(span)["w"][:count].to(weights.device)
        return weights.float(), optimizer._codecs[span.name].decode(weights, auxiliary)

    def surviving(self, optimizer: BlockAdam) -> float | None:
        """The change of the weights projected on that of the masters; None without masters or without a change."""
        if self._span is None:
            return None
        weights, masters = self._now(optimizer)
        update = (masters - self._masters).double()
        size = float(update.square().sum())
        return float(((weights - self._weights).double() * update).sum()) / size if size else None


class BAdamCallback(BlockAdamCallback):
    """badam's callback, passed as a class or as an instance. `init_loss_scale` belongs to DeepSpeed and has no effect here."""

    def __init__(self, *args: Any, init_loss_scale: int = 12, **kwargs: Any):
        super().__init__()
        self.init_loss_scale = init_loss_scale


def block_adam_in(optimizer: Any) -> BlockAdam:
    """The BlockAdam inside accelerate's wrappers. Raises TypeError if there is none."""
    inner = optimizer
    while not isinstance(inner, BlockAdam):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            raise TypeError(f"expected a Trainer whose optimizer is a BlockAdam; got {type(optimizer).__name__}")
    return inner


def last_complete_checkpoint(folder: Any) -> str | None:
    """The newest ``checkpoint-N`` in `folder` that the Trainer finished writing; None if there is none.

    The Trainer writes ``trainer_state.json`` last and deletes an older checkpoint only after that, so whenever a run was
    killed, this is what ``trainer.train(resume_from_checkpoint=...)`` can go on from.
    """
    found = [path for path in Path(folder).glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit() and _is_complete(path)]
    newest = max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    return None if newest is None else str(newest)


def _is_complete(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return False
    return True
