"""Mutants: the reference backend with one thing broken. Each names the check that must refuse it.

They are the mistakes that published optimizers made or that a port can make. A mutant patches the names that the reference
backend looks up at every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import oracle
import torch
from cases import GROUPS, Case

from badam_kernels import formats, rules
from badam_kernels.backends import reference
from badam_kernels.visit import GRAD, STEP

MUTANTS: dict[str, tuple[str, Callable]] = {}
"""name -> (check, function of monkeypatch)."""


def _mutant(check: str):
    def register(function: Callable) -> Callable:
        MUTANTS[function.__name__.strip("_")] = (check, function)
        return function

    return register


def _scalars(patch, change: Callable) -> None:
    """Let every row be updated with `change(scalars, rule, group, step)`."""
    right = rules.scalars
    patch.setattr(rules, "scalars", lambda rule, group, step, scale: change(right(rule, group, step, scale), rule, group, step))


def _rule(patch, change: Callable) -> None:
    """Let every row be updated by `change(right update, w, g, moments, scalars)`."""
    right = reference._update

    def update(rule, row, s):
        right(replace(rule, update=lambda *args: change(rule.update, *args)), row, s)

    patch.setattr(reference, "_update", update)


def _encoding(patch, encode_: Callable) -> None:
    right = reference._update

    def update(rule, row, s):
        codec = replace(row.codec, encode_=encode_) if row.codec.name == "split" else row.codec
        right(rule, replace(row, codec=codec), s)

    patch.setattr(reference, "_update", update)


@_mutant("step")
def no_op(patch):
    _rule(patch, lambda right, w, g, moments, s: (w, moments))


@_mutant("step")
def no_op_that_counts(patch):
    patch.setattr(reference, "_update", lambda rule, row, s: None)


@_mutant("step")
def v_not_written(patch):
    def change(right, w, g, moments, s):
        w, (m, v) = right(w, g, moments, s)
        return w, (m, moments[1])

    _rule(patch, change)


@_mutant("step")
def m_not_written(patch):
    def change(right, w, g, moments, s):
        w, (m, v) = right(w, g, moments, s)
        return w, (moments[0], v)

    _rule(patch, change)


@_mutant("step")
def swapped_betas(patch):
    _scalars(patch, lambda s, *_: replace(s, one_minus_beta1=s.one_minus_beta2, one_minus_beta2=s.one_minus_beta1))


@_mutant("step")
def missing_decay(patch):
    _scalars(patch, lambda s, *_: replace(s, decay=0.0))


@_mutant("step")
def decay_without_lr(patch):
    _scalars(patch, lambda s, rule, group, step: replace(s, decay=group["weight_decay"]))


@_mutant("step")
def decay_in_the_gradient(patch):
    _rule(patch, lambda right, w, g, moments, s: rules.ADAM.update(w, g, moments, s))


@_mutant("step")
def bias_correction_a_step_late(patch):
    right = rules.scalars
    patch.setattr(rules, "scalars", lambda rule, group, step, scale: right(rule, group, step + 1, scale))


@_mutant("step")
def no_bias_correction(patch):
    _scalars(patch, lambda s, rule, group, step: replace(s, step_size=group["lr"], root_scale=1.0))


@_mutant("step")
def bias_correction_in_fp32(patch):
    def change(s, rule, group, step):
        one = np.float32(1)
        beta1, beta2 = (np.float32(beta) for beta in group["betas"])
        corrections = float(one - beta1 ** np.float32(step)), float(one - beta2 ** np.float32(step))
        return replace(s, step_size=group["lr"] / corrections[0], root_scale=1 / math.sqrt(corrections[1]))

    _scalars(patch, change)


@_mutant("step")
def one_minus_beta_in_fp32(patch):
    def change(s, *_):
        return replace(s, one_minus_beta2=float(np.float32(1) - np.float32(1 - s.one_minus_beta2)))

    _scalars(patch, change)


@_mutant("step")
def eps_inside_the_root(patch):
    def change(right, w, g, moments, s):
        _, (m, v) = right(w, g, moments, s)
        denominator = (v * s.root_scale**2 + s.eps**2).sqrt()
        return w - (s.step_size * (m / denominator) + s.decay * w), (m, v)

    _rule(patch, change)


@_mutant("step")
def eps_before_the_correction(patch):
    def change(right, w, g, moments, s):
        _, (m, v) = right(w, g, moments, s)
        return w - (s.step_size * (m / ((v.sqrt() + s.eps) * s.root_scale)) + s.decay * w), (m, v)

    _rule(patch, change)


@_mutant("step")
def hyper_parameters_of_the_first_group(patch):
    right = rules.scalars
    patch.setattr(rules, "scalars", lambda rule, group, step, scale: right(rule, GROUPS[0], step, scale))


@_mutant("step")
def step_of_the_first_row(patch):
    right = rules.scalars
    steps = []

    def scalars(rule, group, step, scale):
        steps.append(step)
        return right(rule, group, steps[0], scale)

    patch.setattr(rules, "scalars", scalars)


@_mutant("step")
def scale_squared(patch):
    _scalars(patch, lambda s, *_: replace(s, grad_scale=s.grad_scale**2))


@_mutant("step")
def no_scale(patch):
    _scalars(patch, lambda s, *_: replace(s, grad_scale=1.0))


@_mutant("step")
def no_clip(patch):
    patch.setattr(reference, "clip_factor", lambda norm, max_norm: 1.0)


@_mutant("step")
def clip_that_amplifies(patch):
    patch.setattr(reference, "clip_factor", lambda norm, max_norm: 1.0 if max_norm is None else max_norm / (norm + 1e-6))


@_mutant("step")
def writes_the_gradient(patch):
    right = reference._update

    def update(rule, row, s):
        right(rule, row, s)
        row.flat(row.param.grad).mul_(s.grad_scale)

    patch.setattr(reference, "_update", update)


@_mutant("step")
def writes_behind_the_span(patch):
    right = reference._update

    def update(rule, row, s):
        right(rule, row, s)
        row.param.detach().view(-1)[row.span.stop :] = 0

    patch.setattr(reference, "_update", update)


@_mutant("step")
def reads_the_gradient_from_the_start(patch):
    patch.setattr(reference, "_grad", lambda row: row.param.grad.view(-1)[: row.span.numel].float())


@_mutant("step")
def tail_left_out(patch):
    right = reference._update

    def update(rule, row, s):
        body = row.span.numel // 16 * 16
        tails = [(t[body:], t[body:].clone()) for t in Case.written(row)]
        right(rule, row, s)
        for tail, old in tails:
            tail.copy_(old)

    patch.setattr(reference, "_update", update)


@_mutant("step")
def step_not_advanced(patch):
    right = reference._Reference.apply

    def apply(self, visit, scale, max_norm):
        steps = visit.table[:, STEP].clone()
        result = right(self, visit, scale, max_norm)
        visit.table[:, STEP] = steps
        return result

    patch.setattr(reference._Reference, "apply", apply)


@_mutant("step")
def truncating_to_bf16(patch):
    def truncate(x):
        return (formats._bits(x) >> 16).to(torch.int16).view(torch.bfloat16)

    patch.setattr(formats, "round_to_bf16", truncate)


@_mutant("storage")
def ties_away_in_fp16(patch):
    patch.setattr(formats, "round_to_fp16", lambda x: oracle.round_to(x, torch.float16, ties="away"))


@_mutant("storage")
def fp16_subnormals_flushed(patch):
    right = formats.round_to_fp16
    patch.setattr(formats, "round_to_fp16", lambda x: torch.where(x.abs() < 2.0**-14, 0 * x, right(x).float()).half())


@_mutant("storage")
def split_half_even(patch):
    def encode_(x, primary, auxiliary):
        primary.copy_(formats.round_to_bf16(x))
        auxiliary.copy_(formats._bits(x) - (formats._bits(primary.float()) >> 16 << 16))

    _encoding(patch, encode_)


@_mutant("storage")
def split_truncated(patch):
    def encode_(x, primary, auxiliary):
        primary.copy_((formats._bits(x) >> 16).to(torch.int16).view(torch.bfloat16))
        auxiliary.copy_(formats._bits(x) & 0xFFFF)

    _encoding(patch, encode_)


@_mutant("nonfinite")
def steps_on_non_finite_gradients(patch):
    patch.setattr(reference.math, "isfinite", lambda norm: True)


@_mutant("nonfinite")
def counts_non_finite_steps(patch):
    right = reference._Reference.apply

    def apply(self, visit, scale, max_norm):
        visit.table[:, STEP] += right(self, visit, scale, max_norm)[1] * (visit.table[:, GRAD] != 0)
        return torch.nan, True

    patch.setattr(reference._Reference, "apply", apply)
