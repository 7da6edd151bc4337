"""Backends: each applies a rule to the rows of a visit, in place.

A backend is an object with

``name``                                its word
``unavailable(device) -> str | None``   why it cannot serve `device`; None if it can
``apply(visit, scale, max_norm, found_inf=None)``   one step over ``visit.rows`` whose table was refreshed

`apply` multiplies every gradient by ``scale * clip``, with ``clip = min(1, max_norm / (norm + 1e-6))`` and `norm` the L2 norm
of all scaled gradients of the block (torch.nn.utils.clip_grad_norm_'s formula), updates every row that has a gradient and
advances its step. It returns ``(norm, found_inf)``. With `scale` and `max_norm` both None no norm is computed, and
``(None, False)`` comes back. If a gradient is not finite, nothing is written, no step advances, and found_inf is True.
Gradients are never written. Raw writes are invisible to autograd: the caller bumps the versions of the parameters.

`scale` may be a tensor of one element, and `found_inf` one that is not zero where the step must be skipped, as a GradScaler has
them on the device. A backend that works asynchronously returns its answers as tensors there, valid until the next `apply`.

A backend whose steps a CUDA graph can record has the two halves of `apply` too: ``upload(visit, scale, max_norm)`` brings what
changed to the device, and ``launch(visit, scale, max_norm, found_inf=None)`` does the rest.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..visit import Visit

__all__ = ["BACKENDS", "Backend", "candidates", "load", "recordable", "resolve"]


class Backend(Protocol):
    name: str

    def unavailable(self, device: torch.device) -> str | None: ...

    def apply(
        self, visit: Visit, scale: float | Tensor | None, max_norm: float | None, found_inf: Tensor | None = None
    ) -> tuple[Any, Any]: ...


BACKENDS = ("triton", "cpu", "reference")
"""Backends by preference. Each is the module of that name here, which holds one `Backend` called BACKEND."""


def load(name: str) -> Backend:
    """The backend called `name`. Raises ValueError for an unknown one."""
    if name not in BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(map(repr, BACKENDS))}; got {name!r}")
    return importlib.import_module(f"{__name__}.{name}").BACKEND


def candidates(device: torch.device) -> list[tuple[str, str | None]]:
    """(name, why not) of every backend for `device`, by preference."""
    return [(name, load(name).unavailable(device)) for name in BACKENDS]


def resolve(name: str, device: torch.device) -> Backend:
    """The backend for `device`: the one called `name`, or with "auto" the first that can serve it.

    Raises ValueError for an unknown name and RuntimeError if the named one cannot serve the device.
    """
    if name == "auto":
        name = _automatic(device)
    backend = load(name)
    why_not = backend.unavailable(device)
    if why_not is not None:
        raise RuntimeError(f"backend {name!r} cannot serve {device}: {why_not}. Use backend='auto'.")
    return backend


def recordable(backend: Backend) -> Callable:
    """The half of a step that a CUDA graph can record. Raises RuntimeError for a backend that has none."""
    launch = getattr(backend, "launch", None)
    if launch is None:
        raise RuntimeError(f"a CUDA graph cannot record a step of backend {backend.name!r}: use backend='triton'")
    return launch


def _automatic(device: torch.device) -> str:
    # Triton's interpreter serves CPU tensors, thousands of times slower: only for whoever asks for it by name.
    serving = [(name, why_not) for name, why_not in candidates(device) if not (name == "triton" and device.type == "cpu")]
    name = next(name for name, why_not in serving if why_not is None)
    if device.type != "cpu" and name == "reference":
        reasons = "; ".join(f"{other}: {why_not}" for other, why_not in serving if why_not is not None)
        warnings.warn(f"steps on {device} run on the slow 'reference' backend ({reasons})", stacklevel=3)
    return name
