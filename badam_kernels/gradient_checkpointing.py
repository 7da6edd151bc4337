"""Gradient checkpointing that records nothing below the active block.

transformers lets the embeddings' output require grad, so that reentrant checkpointing records a graph at all; every idle
layer is then recomputed and differentiated, down to the bottom. Here that is taken back. Instead, the input of a layer that
trains requires grad where reentrant checkpointing needs it, and frozen layers below run without a checkpoint.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

__all__ = ["StopAtActiveBlock"]

_log = logging.getLogger(__name__)


class StopAtActiveBlock:
    """Finds the model of some parameters, which know nothing of it, at its next forward pass, and changes its checkpointing.

    `undo()`, or the end of this object, gives the model back as it was.
    """

    def __init__(self) -> None:
        self._changes: list[Callable[[], None]] = []
        self._undo = weakref.finalize(self, _take_back, self._changes)
        self._undo.atexit = False
        self._disarm: Callable[[], Any] = lambda: None
        self._params: frozenset[int] = frozenset()

    def arm(self, params: Iterable[Tensor]) -> None:
        """Let the next forward pass that records a graph, of a module with all of `params`, stop its backward pass there.

        Once per visit is enough, unless checkpointing is enabled anew within one. Until then every module's call, of any
        model, is looked at; afterwards none.
        """
        self._params = frozenset(map(id, params))
        self._disarm()
        handle = register_module_forward_pre_hook(functools.partial(_before_forward, weakref.ref(self)))
        self._disarm = weakref.finalize(self, handle.remove)

    def undo(self) -> None:
        """Give the model back its own checkpointing."""
        self._disarm()
        self._undo()

    def _change(self, model: nn.Module) -> None:
        self._disarm()
        for module in model.modules():
            # By name: transformers forgets the first of two such hooks, and peft keeps no handle.
            hooks = {key: hook for key, hook in module._forward_hooks.items() if _requires_grad(hook)}
            if hooks:
                for key in hooks:
                    del module._forward_hooks[key]
                self._changes.append(functools.partial(module._forward_hooks.update, hooks))
                _log.info("the embeddings' output no longer requires grad: the backward pass stops at the active block")
            checkpoint = vars(module).get("_gradient_checkpointing_func")
            if checkpoint is not None and not isinstance(checkpoint, _Stopping):
                module._gradient_checkpointing_func = _Stopping(checkpoint)
                self._changes.append(functools.partial(_restore, module))


def _before_forward(stop: weakref.ref[StopAtActiveBlock], module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    found = stop()
    if found is not None and found._params <= {id(param) for param in module.parameters()}:
        found._change(module)


def _requires_grad(hook: Callable) -> bool:
    return getattr(hook, "__name__", "").startswith("make_inputs_require_grad")


def _take_back(changes: list[Callable[[], None]]) -> None:
    while changes:
        changes.pop()()


def _restore(module: nn.Module) -> None:
    if isinstance(module._gradient_checkpointing_func, _Stopping):
        module._gradient_checkpointing_func = module._gradient_checkpointing_func.checkpoint


class _Stopping:
    """A checkpoint function of transformers, for layers of which some are frozen. A class, so that models can be pickled."""

    def __init__(self, checkpoint: Callable):
        self.checkpoint = checkpoint
        self._reentrant = getattr(checkpoint, "keywords", {}).get("use_reentrant") is not False

    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        inner = function.func if isinstance(function, functools.partial) else function
        inputs = [*args, *getattr(function, "keywords", {}).values(), *kwargs.values()]
        if torch.is_grad_enabled() and not any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
            module = getattr(inner, "__self__", None)
            if isinstance(module, nn.Module) and not any(param.requires_grad for param in module.parameters()):
                return function(*args, **kwargs)
            if self._reentrant:
                args = _requiring_grad(args)
        return self.checkpoint(function, *args, **kwargs)


def _requiring_grad(args: tuple) -> tuple:
    """`args` with a leaf that requires grad in place of the first floating-point tensor."""
    for i, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point():
            return (*args[:i], value.detach().requires_grad_(), *args[i + 1 :])
    return args
