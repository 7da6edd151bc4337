"""The model around some parameters, which know nothing of it: found at its next forward pass, and adapted to one active block."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.utils.hooks import RemovableHandle

from .data_parallel import refuse_late_wrapper
from .gradient_checkpointing import stop_at_active_block

__all__ = ["ModelWatch"]


class ModelWatch:
    """`undo()`, or the end of this object, gives the model back as it was.

    params   all that ever train
    """

    def __init__(self, params: Collection[Tensor]) -> None:
        self._params = params
        self._changes: list[Callable[[], None]] = []
        self._undo = weakref.finalize(self, _take_back, self._changes)
        self._undo.atexit = False
        self._active: frozenset[int] = frozenset()
        # The same hook under the same key at every visit, since torch.compile guards on both.
        self._hook = functools.partial(_before_forward, weakref.ref(self))
        self._handle = RemovableHandle(_global_forward_pre_hooks)
        weakref.finalize(self, self._handle.remove)

    def arm(self, active: Iterable[Tensor]) -> None:
        """Let the next forward pass that records a graph, of a module with all of `active`, stop its backward pass there.

        Once per visit is enough, unless checkpointing is enabled anew within one. Until then every module's call, of any
        model, is looked at; afterwards none. Raises RuntimeError, in that forward pass, for a model that cannot be trained so.
        """
        self._active = frozenset(map(id, active))
        _global_forward_pre_hooks[self._handle.id] = self._hook

    def undo(self) -> None:
        """Give the model back as it was."""
        self._handle.remove()
        self._undo()

    def _adapt(self, model: nn.Module) -> None:
        refuse_late_wrapper(model, self._params)
        self._handle.remove()
        self._changes.extend(stop_at_active_block(model))


def _before_forward(watch: weakref.ref[ModelWatch], module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    found = watch()
    if found is not None and found._active <= {id(param) for param in module.parameters()}:
        found._adapt(module)


def _take_back(changes: list[Callable[[], None]]) -> None:
    while changes:
        changes.pop()()
