"""The specification in plain torch: any device, no compiler, slow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import rules
from ..visit import GRAD, STEP, Row, Visit

__all__ = ["BACKEND", "clip_factor"]


def clip_factor(norm: float, max_norm: float | None) -> float:
    """The factor that torch.nn.utils.clip_grad_norm_ applies to gradients of L2 norm `norm`."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


class _Reference:
    name = "reference"

    def unavailable(self, device: torch.device) -> str | None:
        return None

    @torch.no_grad()
    def apply(
        self, visit: Visit, scale: float | Tensor | None, max_norm: float | None, found_inf: Tensor | None = None
    ) -> tuple[float | None, bool]:
        if found_inf is not None and float(found_inf) != 0.0:
            return None, True
        present = visit.table[:, GRAD] != 0
        rows = [row for row, has_grad in zip(visit.rows, present.tolist()) if has_grad]
        norm, factor = None, 1.0
        if scale is not None or max_norm is not None:
            factor = 1.0 if scale is None else float(scale)
            norm = math.sqrt(sum(float(_grad(row).double().square().sum()) for row in rows)) * abs(factor)
            if not math.isfinite(norm):
                return norm, True
            factor *= clip_factor(norm, max_norm)
        visit.table[:, STEP] += present
        for row, step, has_grad in zip(visit.rows, visit.steps, present.tolist()):
            if has_grad:
                s = rules.scalars(visit.rule, visit.groups[row.group], step, factor)
                _update(visit.rule, row, s)
        return norm, False


def _grad(row: Row) -> Tensor:
    return row.param.grad.detach().reshape(-1)[row.span.start : row.span.stop].float()


def _update(rule: rules.Rule, row: Row, s: rules.Scalars) -> None:
    primary = row.flat(row.param)
    weight = row.codec.decode(primary, row.auxiliary)
    weight, moments = rule.update(weight, _grad(row) * s.grad_scale, row.moments, s)
    row.codec.encode_(weight, primary, row.auxiliary)
    for held, new in zip(row.moments, moments):
        held.copy_(new)


BACKEND = _Reference()
