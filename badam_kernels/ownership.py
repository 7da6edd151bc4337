"""Which BlockAdam a parameter belongs to: the one that switches its requires_grad."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from .optimizer import BlockAdam

__all__ = ["refuse_rivals", "take"]

_owners = WeakIdKeyDictionary()  # parameter -> weak reference to its BlockAdam


def refuse_rivals(params: Iterable[Tensor]) -> None:
    """Raises ValueError for parameters of another live BlockAdam: it has frozen most of them, so a second trains a fraction.

    Call it before requires_grad is looked at: it lets an optimizer that only looks alive give its parameters back.
    """
    params = list(params)

    def rival() -> bool:
        return any(_owners.get(p) is not None and _owners[p]() is not None for p in params)

    if rival():
        gc.collect()  # an optimizer and its scheduler refer to each other and may only look alive
        if rival():
            raise ValueError(
                "these parameters belong to another live BlockAdam; call close() on it, or drop every reference to it, first"
            )


def take(optimizer: BlockAdam, params: list[Tensor]) -> weakref.finalize:
    """Freeze `params` until the finalizer that is returned is called or `optimizer` is gone."""
    for param in params:
        _owners[param] = weakref.ref(optimizer)
        param.requires_grad_(False)
    return weakref.finalize(optimizer, _give_back, params)


def _give_back(params: list[Tensor]) -> None:
    for param in params:
        _owners.pop(param, None)
        param.requires_grad = True  # by assignment: the method fails if memory is collected within a vmap, as of a mask
