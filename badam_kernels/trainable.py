"""Which parameters are trainable now: those of the active block, and what comes with that for their gradients and their model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from . import ownership
from .blocks import Block
from .buffers import StaticGradients
from .model_watch import ModelWatch

if TYPE_CHECKING:
    from .optimizer import BlockAdam

__all__ = ["Trainable"]


class Trainable:
    """Freezes all parameters, then thaws one block at a time, until `restore` is called or `optimizer` is gone.

    params         all of `optimizer`, by name
    static_grads   give the block's parameters gradients in memory that never moves
    """

    def __init__(self, optimizer: BlockAdam, params: Mapping[str, Tensor], static_grads: bool):
        self._params = params
        self._static_grads = StaticGradients(optimizer.blocks, params) if static_grads else None
        self._restore = ownership.take(optimizer, [p for p in params.values() if p.requires_grad])
        names = dict.fromkeys(span.name for block in optimizer.blocks for span in block.spans)
        self._model_watch = ModelWatch(self._in_model(names))

    @property
    def has_static_grads(self) -> bool:
        return self._static_grads is not None

    def switch(self, new: Block, *old: Block) -> None:
        """Let a backward pass compute the gradients of `new`, and no longer those of `old`, which are dropped."""
        names = {span.name for span in new.spans}
        for name in {span.name for block in old for span in block.spans} - names:
            self._params[name].requires_grad_(False)
            self._params[name].grad = None
        for name in names:
            self._params[name].requires_grad_(True)
        self._model_watch.arm(self._in_model(names))
        if self._static_grads is not None:
            self._static_grads.attach(new)

    def _in_model(self, names: Iterable[str]) -> list[Tensor]:
        """The model's parameters of these names, each once; of a stand-in, the one that it stands for."""
        params = [getattr(self._params[name], "stands_for", self._params[name]) for name in names]
        return list({id(param): param for param in params}.values())

    def zero_static_grads(self) -> None:
        if self._static_grads is not None:
            self._static_grads.zero()

    def restore(self) -> None:
        """Give every parameter its `requires_grad` back, and the model what was changed in it."""
        self._restore()
        self._model_watch.undo()
        self._static_grads = None
