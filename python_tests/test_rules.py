"""Rules: their scalars are exact, and what one step changes by less than a 16-bit ulp is not lost."""

import math
from dataclasses import replace
from fractions import Fraction

import checks
import pytest
import torch
from cases import Case, RowCase
from tolerances import SUB_ULP_MASTER

from badam_kernels import rules
from badam_kernels.formats import MASTER, SPLIT
from badam_kernels.rules import ADAM, ADAMW, RULES, SGD

GROUP = {"lr": 3e-4, "betas": (0.9, 0.9999), "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("step", [1, 2, 10, 1000, 100_000])
def test_bias_corrections_are_those_of_exact_arithmetic(step):
    s = rules.scalars(ADAMW, GROUP, step)
    corrections = [float(1 - Fraction(beta) ** step) for beta in GROUP["betas"]] if step <= 1000 else [1.0, 1 - 0.9999**step]
    assert s.step_size == pytest.approx(GROUP["lr"] / corrections[0], rel=1e-12)
    assert s.root_scale == pytest.approx(1 / math.sqrt(corrections[1]), rel=1e-12)


def test_scalars_of_each_rule():
    """Decay acts times lr on the weight (adamw) or as it is on the gradient; sgd corrects no bias; the scale goes through."""
    adamw, adam, sgd = (rules.scalars(rule, GROUP, 1, 0.25) for rule in (ADAMW, ADAM, SGD))
    assert adamw.decay == 0.1 * 3e-4
    assert replace(adamw, decay=0.1) == adam
    assert adam.grad_scale == sgd.grad_scale == 0.25
    assert adam.one_minus_beta1 == 1 - 0.9
    assert adam.one_minus_beta2 == 1 - 0.9999
    assert sgd == replace(adam, step_size=3e-4, root_scale=1.0)


def test_a_learning_rate_may_be_a_tensor():
    assert rules.scalars(SGD, {**GROUP, "lr": torch.tensor(0.5)}, 1).step_size == 0.5


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_an_update_mutates_nothing_and_is_fp32(rule):
    w, g, *moments = (torch.randn(33, generator=torch.Generator().manual_seed(i)) for i in range(2 + len(rule.moments)))
    moments = tuple(m.abs() for m in moments)
    inputs = [t.clone() for t in (w, g, *moments)]
    new_w, new_moments = rule.update(w, g, moments, rules.scalars(rule, GROUP, 3))
    assert all(torch.equal(a, b) for a, b in zip((w, g, *moments), inputs, strict=True))
    assert [t.dtype for t in (new_w, *new_moments)] == [torch.float32] * len(inputs[1:])
    assert len(new_moments) == len(rule.moments)


@pytest.mark.parametrize("format", [MASTER, SPLIT], ids=lambda format: format.name)
def test_updates_below_a_bf16_ulp_are_kept_over_visits(backend, device, format):
    """Weight 1, gradient 1, lr 1e-5, K=50, two blocks taking turns: 250 active steps each, moments dropped at each switch.

    The master reaches 0.997497, and the bf16 weight first moves at active step 196. A step moves the master by 168 ulp.
    """
    group = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    spec = RowCase(17, format.codec(torch.bfloat16), torch.bfloat16)
    blocks = [Case(ADAMW, [spec], [group], device=device) for _ in range(2)]
    for case in blocks:
        (row,) = case.visit.rows
        row.param.data.fill_(1.0)
        row.auxiliary.zero_()
        row.param.grad.fill_(1.0)
    moved = [[], []]
    for visit in range(10):
        case = blocks[visit % 2]
        row = replace(case.visit.rows[0], moments=tuple(torch.zeros_like(m) for m in case.visit.rows[0].moments), step=0)
        case.visit = type(case.visit)(ADAMW, [row], [group])
        for _ in range(50):
            checks.apply(backend, case.visit)
            moved[visit % 2].append(bool((row.param != 1.0).any()))
    for case, history in zip(blocks, moved):
        assert history.index(True) + 1 == 196
        assert len(history) == 250
        torch.testing.assert_close(case.weight(case.visit.rows[0]), torch.full((17,), 0.997497), rtol=0, atol=SUB_ULP_MASTER)


def test_without_an_auxiliary_the_same_weight_never_moves():
    """The case can fail: rounded to bf16 at every step, or at every switch, 1.0 stays 1.0."""
    w = torch.ones((), dtype=torch.bfloat16)
    for _ in range(5):
        master, moments = w.float(), (torch.zeros(()), torch.zeros(()))
        for step in range(1, 51):
            master, moments = ADAMW.update(
                master, torch.ones(()), moments, rules.scalars(ADAMW, {**GROUP, "lr": 1e-5, "weight_decay": 0.0}, step)
            )
        assert master < 1.0
        w = master.to(torch.bfloat16)
    assert w == 1.0


def test_an_unknown_rule_is_refused_by_name():
    with pytest.raises(ValueError, match=r"one of 'adamw', 'adam', 'sgd'; got 'lion'"):
        rules.resolve("lion")
    assert rules.resolve("adam") is ADAM is rules.resolve(ADAM)
