"""What a torch or bitsandbytes optimizer asks for, in BlockAdam's words. What BlockAdam cannot do is refused by name."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["check_group", "hyper", "rule_of"]

_OFF = {"amsgrad": False, "maximize": False, "nesterov": False, "dampening": 0, "differentiable": False}
_HOW = "use torch.optim.AdamW, Adam or SGD, or those of bitsandbytes"


def rule_of(optimizer: torch.optim.Optimizer) -> str:
    """The rule that `optimizer` follows. Raises TypeError for another class and ValueError for an option without counterpart.

    How the base optimizer computes or stores (fused, foreach, paged, 8-bit moments) does not matter: it never steps.
    """
    kind = type(optimizer)
    if kind.__module__.partition(".")[0] == "bitsandbytes":
        return _bitsandbytes_rule(optimizer)
    rules = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd"}
    if kind not in rules:
        raise TypeError(f"base_optimizer is a {kind.__module__}.{kind.__name__}, whose rule is not known here: {_HOW}")
    decoupled = {bool(group.get("decoupled_weight_decay", kind is torch.optim.AdamW)) for group in optimizer.param_groups}
    if len(decoupled) > 1:
        raise ValueError("the groups of base_optimizer differ in decoupled_weight_decay: BlockAdam has one rule for all groups")
    return "adamw" if rules[kind] == "adam" and True in decoupled else rules[kind]


def _bitsandbytes_rule(optimizer: torch.optim.Optimizer) -> str:
    name = type(optimizer).__name__.removeprefix("Paged").removesuffix("8bit").removesuffix("32bit")
    # Its Adam decays the weight, not the gradient: both are adamw.
    rules = {"AdamW": "adamw", "Adam": "adamw", "SGD": "sgd"}
    if name not in rules:
        raise TypeError(f"base_optimizer is a bitsandbytes {type(optimizer).__name__}, whose rule is not known here: {_HOW}")
    clipping = getattr(getattr(optimizer, "args", None), "percentile_clipping", 100)
    if clipping != 100:
        raise ValueError(f"percentile_clipping={clipping} of base_optimizer has no counterpart here: use 100, and max_grad_norm")
    return rules[name]


def hyper(group: dict[str, Any], rule: str) -> dict[str, Any]:
    """lr, betas, eps and weight_decay of `group`; for sgd the momentum is ``betas[0]``."""
    betas = (group["momentum"], 0.0) if "momentum" in group else tuple(group["betas"])
    if rule == "sgd" and betas[1] != 0:
        raise ValueError(f"dampening={betas[1]} of base_optimizer has no counterpart here: use dampening=0")
    return {"lr": group["lr"], "betas": betas, "eps": group.get("eps", 0.0), "weight_decay": group.get("weight_decay", 0.0)}


def check_group(group: dict[str, Any]) -> None:
    """Raises ValueError for an option in `group` that would have to be ignored."""
    for option, off in _OFF.items():
        if group.get(option, off) != off:
            raise ValueError(f"{option}={group[option]} has no counterpart in BlockAdam: use {option}={off}")
