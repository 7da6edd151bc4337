"""Rules: the update of one element, as pure fp32 arithmetic on its slots.

Each rule shows its equation above its code. The code is the specification: every backend performs these operations in
this order, each rounded to fp32 once (a device compiler may fuse a multiply and an add). Scalars that depend on the step
or the hyper-parameters are computed in fp64 and rounded to fp32 once: ``1 - beta**t`` in fp32 is wrong by up to 1.6e-4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

__all__ = ["ADAM", "ADAMW", "RULES", "SGD", "Rule", "Scalars", "resolve", "scalars"]


@dataclass(frozen=True)
class Scalars:
    """What an update needs beside the slots, fp64 here, rounded to fp32 where used.

    grad_scale     factor on the gradient: unscaling times clipping
    step_size      lr / (1 - beta1**t); for sgd, lr
    beta1          decay of the first moment; for sgd, the momentum
    one_minus_beta1, one_minus_beta2
    root_scale     1 / sqrt(1 - beta2**t)
    eps            added outside the root
    decay          weight decay times lr (adamw), or weight decay (adam, sgd)
    """

    grad_scale: float
    step_size: float
    beta1: float
    one_minus_beta1: float
    one_minus_beta2: float
    root_scale: float
    eps: float
    decay: float


@dataclass(frozen=True)
class Rule:
    """One update rule.

    moments    the moment slots it uses, in order: ("m", "v") or ("m",)
    decoupled  whether weight decay acts on the weight (True) or on the gradient
    adaptive   whether it divides by the root of the second moment and corrects biases
    update     (w, g, moments, scalars) -> (w, moments), fp32 tensors in and out, nothing mutated
    """

    name: str
    moments: tuple[str, ...]
    decoupled: bool
    adaptive: bool
    update: Callable[[Tensor, Tensor, tuple[Tensor, ...], Scalars], tuple[Tensor, tuple[Tensor, ...]]]


def scalars(rule: Rule, group: dict, step: int, grad_scale: float = 1.0) -> Scalars:
    """The scalars of update number `step` (1 for the first) under the hyper-parameters of `group`.

    `group` holds lr, betas, eps and weight_decay, as torch's parameter groups do; sgd's momentum is ``betas[0]``.
    """
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    correction1 = 1.0 - beta1**step if rule.adaptive else 1.0
    correction2 = 1.0 - beta2**step if rule.adaptive else 1.0
    return Scalars(
        grad_scale=grad_scale,
        step_size=lr / correction1,
        beta1=beta1,
        one_minus_beta1=1.0 - beta1,
        one_minus_beta2=1.0 - beta2,
        root_scale=1.0 / math.sqrt(correction2),
        eps=group["eps"],
        decay=group["weight_decay"] * (lr if rule.decoupled else 1.0),
    )


def _moments(g: Tensor, moments: tuple[Tensor, ...], s: Scalars) -> tuple[Tensor, Tensor]:
    # The form m + (1 - beta)(x - m) uses only 1 - beta, whose fp32 rounding is relative to itself: with beta2 = 0.999 as an
    # fp32 factor, v settles 3e-5 off.
    m, v = moments
    m = m + s.one_minus_beta1 * (g - m)
    v = v + s.one_minus_beta2 * (g * g - v)
    return m, v


def _root(v: Tensor) -> Tensor:
    # Correctly rounded, as every compiled backend has it; torch's own fp32 sqrt may be one ulp off, depending on the machine.
    return v.double().sqrt().to(v.dtype)


def _adamw(w: Tensor, g: Tensor, moments: tuple[Tensor, ...], s: Scalars) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Loshchilov & Hutter 2019, algorithm 2, with the decay folded into the one subtraction so that fp32 keeps it:

    m <- m + (1 - b1)(g - m)
    v <- v + (1 - b2)(g^2 - v)
    w <- w - [ lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps) + lr * wd * w ]
    """
    m, v = _moments(g, moments, s)
    update = s.step_size * (m / (_root(v) * s.root_scale + s.eps))
    return w - (update + s.decay * w), (m, v)


def _adam(w: Tensor, g: Tensor, moments: tuple[Tensor, ...], s: Scalars) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Kingma & Ba 2015, algorithm 1, with L2 decay in the gradient:

    g <- g + wd * w,  then m and v as in adamw
    w <- w - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
    """
    m, v = _moments(g + s.decay * w, moments, s)
    return w - s.step_size * (m / (_root(v) * s.root_scale + s.eps)), (m, v)


def _sgd(w: Tensor, g: Tensor, moments: tuple[Tensor, ...], s: Scalars) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Heavy-ball momentum as torch.optim.SGD writes it (dampening 0), the ablation of the BAdam paper:

    m <- b1 * m + (g + wd * w)
    w <- w - lr * m
    """
    (m,) = moments
    m = s.beta1 * m + (g + s.decay * w)
    return w - s.step_size * m, (m,)


ADAMW = Rule("adamw", ("m", "v"), decoupled=True, adaptive=True, update=_adamw)
ADAM = Rule("adam", ("m", "v"), decoupled=False, adaptive=True, update=_adam)
SGD = Rule("sgd", ("m",), decoupled=False, adaptive=False, update=_sgd)
RULES = {rule.name: rule for rule in (ADAMW, ADAM, SGD)}


def resolve(rule: str | Rule) -> Rule:
    """The rule named `rule`, or `rule` itself. Raises ValueError for an unknown name."""
    if isinstance(rule, Rule):
        return rule
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(map(repr, RULES))}; got {rule!r}")
    return RULES[rule]
