"""Which BlockAdam a parameter belongs to: the one that switches its requires_grad."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from .optimizer import BlockAdam

__all__ = ["take"]

_owners = WeakIdKeyDictionary()  # parameter -> weak reference to its BlockAdam


def take(optimizer: BlockAdam, params: list[Tensor]) -> weakref.finalize:
    """Freeze `params` until the finalizer that is returned is called or `optimizer` is gone.

    Raises ValueError for parameters of another live BlockAdam: it has frozen most of them, so this one would train a fraction.
    """

    def rival() -> bool:
        return any(_owners.get(p) is not None and _owners[p]() is not None for p in params)

    if rival():
        gc.collect()  # an optimizer and its scheduler refer to each other and may only look alive
        if rival():
            raise ValueError("these parameters belong to another live BlockAdam; call close() on it first")
    for param in params:
        _owners[param] = weakref.ref(optimizer)
        param.requires_grad_(False)
    return weakref.finalize(optimizer, _give_back, params)


def _give_back(params: list[Tensor]) -> None:
    for param in params:
        _owners.pop(param, None)
        param.requires_grad_(True)
