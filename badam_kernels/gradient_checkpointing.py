"""Gradient checkpointing that records nothing below the active block.

transformers lets the embeddings' output require grad, so that reentrant checkpointing records a graph at all; every idle
layer is then recomputed and differentiated, down to the bottom. Here that is taken back. Instead, the input of a layer that
trains requires grad where reentrant checkpointing needs it, and frozen layers below run without a checkpoint.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["stop_at_active_block"]

_log = logging.getLogger(__name__)


def stop_at_active_block(model: nn.Module) -> list[Callable[[], None]]:
    """Change `model`, once; what undoes it, in order, the last first."""
    if any(_checkpoints_itself(module) for module in model.modules()):
        return []  # reentrant, it would record nothing without the hooks
    changes: list[Callable[[], None]] = []
    for module in model.modules():
        # Weakly, or what undoes the changes would keep a model alive that refers to its optimizer.
        ref = weakref.ref(module)
        # By name: transformers forgets the first of two such hooks, and peft keeps no handle.
        hooks = {key: hook for key, hook in module._forward_hooks.items() if _requires_grad(hook)}
        if hooks:
            module._forward_hooks.update(dict.fromkeys(hooks, _nothing))
            changes.append(functools.partial(_restore_hooks, ref, hooks))
            _log.info("the embeddings' output no longer requires grad: the backward pass stops at the active block")
        checkpoint = vars(module).get("_gradient_checkpointing_func")
        if checkpoint is not None and not isinstance(checkpoint, _Stopping):
            module._gradient_checkpointing_func = _Stopping(checkpoint)
            changes.append(functools.partial(_restore_function, ref))
    return changes


def _checkpoints_itself(module: nn.Module) -> bool:
    """As models of before transformers 4.35 do, which have the flag alone."""
    own = vars(module)
    return bool(own.get("gradient_checkpointing")) and "_gradient_checkpointing_func" not in own


def _requires_grad(hook: Callable) -> bool:
    return getattr(hook, "__name__", "").startswith("make_inputs_require_grad")


def _nothing(module: nn.Module, args: Any, output: Any) -> None:
    """Holds the place of a hook, which its handle can still remove for good."""


def _restore_hooks(ref: weakref.ref[nn.Module], hooks: dict[int, Callable]) -> None:
    module = ref()
    if module is not None:
        module._forward_hooks.update({key: hook for key, hook in hooks.items() if key in module._forward_hooks})


def _restore_function(ref: weakref.ref[nn.Module]) -> None:
    module = ref()
    if module is not None and isinstance(module._gradient_checkpointing_func, _Stopping):
        module._gradient_checkpointing_func = module._gradient_checkpointing_func.checkpoint


class _Stopping:
    """A checkpoint function of transformers, for layers of which some are frozen. A class, so that models can be pickled."""

    def __init__(self, checkpoint: Callable):
        self.checkpoint = checkpoint
        self._reentrant = getattr(checkpoint, "keywords", {}).get("use_reentrant") is not False

    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # traced as a whole, where what a layer's input requires does not matter
            return self.checkpoint(function, *args, **kwargs)
        inner = function.func if isinstance(function, functools.partial) else function
        # Reentrant, only what is passed by position can be differentiated.
        named = () if self._reentrant else (*getattr(function, "keywords", {}).values(), *kwargs.values())
        if torch.is_grad_enabled() and not any(isinstance(value, Tensor) and value.requires_grad for value in (*args, *named)):
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
