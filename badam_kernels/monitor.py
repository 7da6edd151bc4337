"""What a run costs, measured: memory by place, peak memory, training speed."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from .optimizer import BlockAdam

__all__ = ["memory_by_place", "peak_memory_bytes", "readable"]


def readable(size_bytes: float) -> str:
    """Bytes with a decimal unit, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size_bytes) < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"


def memory_by_place(parameters: Iterable[Tensor], optimizer: BlockAdam) -> dict[str, dict[str, int]]:
    """Bytes by what they are for and where they lie: weights, gradients of the largest block, and the optimizer's slots."""
    weights: dict[str, int] = {}
    for param in parameters:
        place = _place(param.device)
        weights[place] = weights.get(place, 0) + param.nbytes
    named = {name: param for group in optimizer.param_groups for name, param in zip(group["param_names"], group["params"])}
    gradients: dict[str, int] = {}
    for block in optimizer.blocks:
        # A gradient is as large as the whole parameter, even where the block trains a part of it.
        params = [named[name] for name in dict.fromkeys(span.name for span in block.spans)]
        place = _place(params[0].device)
        gradients[place] = max(gradients.get(place, 0), sum(param.nbytes for param in params))
    return {"weights": weights, "gradients": gradients, **optimizer.memory()}


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has held so far: allocated on a CUDA `device`, else resident in the host's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not there on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _place(device: torch.device) -> str:
    return "host" if device.type == "cpu" else str(device)
