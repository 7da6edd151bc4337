"""Named parameter groups and blocks: what an optimizer is given, checked and made uniform."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from . import blocks as partitions
from .blocks import Partition
from .formats import PARAM_DTYPES

__all__ = ["normalise", "partition"]

_HOW = "pass model.named_parameters(), or groups {'params': [(name, parameter), ...]}"


def normalise(params: Iterable, defaults: dict[str, Any]) -> tuple[list[dict], dict[str, Tensor]]:
    """Groups in torch's named form and all parameters by name.

    A tensor that appears twice (tied weights) is kept once, under its first name. Raises TypeError for parameters without
    names, and ValueError for a name that means two tensors, unsupported dtypes, or hyper-parameters out of range.
    """
    if isinstance(params, (Tensor, dict, str)):
        raise TypeError(f"expected named parameters, got {type(params).__name__}: {_HOW}")
    given = list(params)
    if not given:
        raise ValueError(f"got no parameters: {_HOW}")
    groups = given if all(isinstance(g, dict) for g in given) else [{"params": given}]
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    result = []
    for group in groups:
        pairs = []
        for name, param in map(_pair, _listed(group)):
            if id(param) in seen:
                continue
            if name in named:
                raise ValueError(f"the name {name!r} stands for two different parameters; names must be unique")
            if param.dtype not in PARAM_DTYPES:
                raise ValueError(f"parameters must be {', '.join(map(str, PARAM_DTYPES))}; {name!r} is {param.dtype}")
            seen.add(id(param))
            named[name] = param
            pairs.append((name, param))
        merged = {**defaults, **group, "params": pairs}
        _check(merged)
        result.append(merged if pairs else merged | {"param_names": []})
    return result, named


def partition(named: dict[str, Tensor], blocks: Any) -> Partition:
    """`blocks` of the `named` parameters: a Partition, checked, or what `badam_kernels.blocks.partition` takes as ``by``."""
    if not isinstance(blocks, Partition):
        return partitions.partition(named.items(), by=blocks)
    for span in (span for block in blocks for span in block.spans):
        param = named.get(span.name)
        if param is None or not 0 <= span.start < span.stop <= param.numel():
            have = "no such parameter" if param is None else f"{param.numel()} elements"
            raise ValueError(f"the partition has {span}, but there is {have}. Make it from the same named parameters.")
    return blocks


def _listed(group: dict) -> list:
    params = group.get("params")
    if params is None or isinstance(params, Tensor):
        raise TypeError(f"a group's 'params' must be a list of (name, parameter) pairs; got {type(params).__name__}: {_HOW}")
    return list(params)


def _pair(item: Any) -> tuple[str, Tensor]:
    if isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor):
        return item[0], item[1]
    raise TypeError(f"expected (name, parameter) pairs, got {type(item).__name__}: {_HOW}")


def _check(group: dict[str, Any]) -> None:
    lr, betas, eps, decay = float(group["lr"]), group["betas"], group["eps"], group["weight_decay"]
    if not (lr >= 0 and math.isfinite(lr)):
        raise ValueError(f"lr must be finite and at least 0; got {lr}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1); got {betas}")
    if not (eps >= 0 and math.isfinite(eps)):
        raise ValueError(f"eps must be finite and at least 0; got {eps}")
    if not (decay >= 0 and math.isfinite(decay)):
        raise ValueError(f"weight_decay must be finite and at least 0; got {decay}")
