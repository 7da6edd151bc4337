"""Named parameter groups and blocks: what an optimizer is given, checked and made uniform."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import blocks as partitions
from .blocks import Partition
from .formats import PARAM_DTYPES

__all__ = ["check_hyper", "check_parameters", "normalise", "partition"]

_HOW = "pass model.named_parameters(), or groups {'params': [(name, parameter), ...]}"


def normalise(params: Iterable, defaults: dict[str, Any]) -> tuple[list[dict], dict[str, Tensor]]:
    """Groups in torch's named form and all parameters by name.

    A tensor that appears twice (tied weights) is kept once, under its first name. Raises TypeError for parameters without
    names, and ValueError for a name that means two tensors, a parameter in two groups, or hyper-parameters out of range.
    """
    if isinstance(params, (Tensor, dict, str)) or not isinstance(params, Iterable):
        raise TypeError(f"expected named parameters, got {type(params).__name__}: {_HOW}")
    given = list(params)
    if not given:
        raise ValueError(f"got no parameters: {_HOW}")
    groups = given if all(isinstance(g, dict) for g in given) else [{"params": given}]
    named: dict[str, Tensor] = {}
    group_of: dict[int, int] = {}
    result = []
    for i, group in enumerate(groups):
        pairs = []
        for name, param in map(_pair, _listed(group)):
            if id(param) in group_of:
                if group_of[id(param)] != i:
                    raise ValueError(f"{name!r} is in parameter groups {group_of[id(param)]} and {i}; it can be in one only")
                continue
            if name in named:
                raise ValueError(f"the name {name!r} stands for two different parameters; names must be unique")
            group_of[id(param)] = i
            named[name] = param
            pairs.append((name, param))
        merged = {**defaults, **group, "params": pairs}
        check_hyper(merged)
        result.append(merged if pairs else merged | {"param_names": []})
    return result, named


def partition(named: dict[str, Tensor], blocks: Any) -> Partition:
    """`blocks` of the `named` parameters: a Partition, checked, or what `badam_kernels.blocks.partition` takes as ``by``."""
    if not isinstance(blocks, Partition):
        return partitions.partition(named.items(), by=blocks)
    for block in blocks:
        before = None
        for span in sorted(block.spans):
            param = named.get(span.name)
            if param is None or not 0 <= span.start < span.stop <= param.numel():
                have = "no such parameter" if param is None else f"{param.numel()} elements"
                raise ValueError(f"the partition has {span}, but there is {have}. Make it from the same named parameters.")
            if isinstance(param, torch.nn.Parameter) and not param.requires_grad:
                raise ValueError(f"the partition trains {span.name!r}, which is frozen now. Make it after freezing.")
            if before is not None and before.name == span.name and span.start < before.stop:
                raise ValueError(f"block {block.name!r} has the overlapping spans {before} and {span}")
            before = span
        if before is None:
            raise ValueError(f"block {block.name!r} has no spans")
    return blocks


def check_parameters(named: dict[str, Tensor]) -> None:
    """Raises ValueError for a trainable parameter that no backend can update in place."""
    for name, param in named.items():
        if not param.requires_grad:
            continue
        if is_traceable_wrapper_subclass(param):
            raise ValueError(
                f"parameters must be plain tensors; {name!r} is a {type(param).__name__}, whose memory is elsewhere (FSDP2 and "
                "tensor-parallel shards are not supported yet)"
            )
        if param.dtype not in PARAM_DTYPES:
            raise ValueError(f"parameters must be {', '.join(map(str, PARAM_DTYPES))}; {name!r} is {param.dtype}")
        if not param.is_contiguous():
            raise ValueError(
                f"parameters must be contiguous; {name!r} has strides {param.stride()}. Use p.data = p.data.contiguous()."
            )


def _listed(group: dict) -> list:
    params = group.get("params")
    if params is None or isinstance(params, Tensor):
        raise TypeError(f"a group's 'params' must be a list of (name, parameter) pairs; got {type(params).__name__}: {_HOW}")
    return list(params)


def _pair(item: Any) -> tuple[str, Tensor]:
    if isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor):
        return item[0], item[1]
    raise TypeError(f"expected (name, parameter) pairs, got {type(item).__name__}: {_HOW}")


def check_hyper(group: dict[str, Any]) -> None:
    """Raises TypeError or ValueError unless lr, betas, eps and weight_decay of `group` are numbers in their ranges."""
    try:
        lr, eps, decay = (float(group[key]) for key in ("lr", "eps", "weight_decay"))
        betas = tuple(map(float, group["betas"]))
    except (TypeError, ValueError, KeyError) as error:
        got = {key: group.get(key) for key in ("lr", "betas", "eps", "weight_decay")}
        raise TypeError(f"lr, eps and weight_decay must be numbers and betas two numbers; got {got}") from error
    if not (lr >= 0 and math.isfinite(lr)):
        raise ValueError(f"lr must be finite and at least 0; got {lr}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1); got {betas}")
    if not (eps >= 0 and math.isfinite(eps)):
        raise ValueError(f"eps must be finite and at least 0; got {eps}")
    if not (decay >= 0 and math.isfinite(decay)):
        raise ValueError(f"weight_decay must be finite and at least 0; got {decay}")
    for flag in ("amsgrad", "maximize", "nesterov", "dampening"):
        if group.get(flag):
            raise ValueError(f"{flag} is not supported; leave it out of the parameter group")
