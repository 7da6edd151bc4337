"""A visit: the active block with its live tensors, as a table of rows that a backend runs over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .blocks import Span
from .formats import PARAM_DTYPES, WEIGHT_CODECS, Codec
from .rules import Rule

__all__ = ["COLUMNS", "HYPER", "Row", "Visit"]

COLUMNS = ("param", "auxiliary", "m", "v", "grad", "numel", "codec", "grad_dtype", "group", "step")
"""Columns of `Visit.table`, all int64: addresses (0: none), element count, codes, parameter group, updates done."""
PARAM, AUXILIARY, M, V, GRAD, NUMEL, CODEC, GRAD_DTYPE, GROUP, STEP = range(len(COLUMNS))
HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay")
"""What `Visit.hyper` lists for each parameter group."""

_NO_GRADIENT = -1
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(PARAM_DTYPES)}


@dataclass
class Row:
    """One span of the active block.

    param        the whole parameter, contiguous
    codec        how its weight is stored
    auxiliary    1-D, `span.numel` elements of `codec.auxiliary`, on the parameter's device; None if the codec has none
    moments      the rule's moments in order, each 1-D fp32 of `span.numel` elements, same device
    group        index of its parameter group
    step         updates these moments have seen
    """

    span: Span
    param: Tensor
    codec: Codec
    auxiliary: Tensor | None
    moments: tuple[Tensor, ...]
    group: int
    step: int = 0

    def flat(self, tensor: Tensor) -> Tensor:
        """The span of `tensor`, which has the parameter's shape, as a 1-D view."""
        return tensor.detach().view(-1)[self.span.start : self.span.stop]


class Visit:
    """The rows of the active block, verified against the live tensors before every step.

    rule      the update rule
    rows      one Row per span, all on one device
    groups    the optimizer's parameter groups, live: read at every step
    table     int64 CPU tensor (rows, COLUMNS); `refresh` keeps it true, a backend advances its step column
    version   grows whenever `refresh` changes the table, so that a backend knows when its copy is out of date
    layout    grows whenever a gradient comes, goes or changes its dtype
    counters  int64 tensor that a backend advances instead of the step column, on the device; None if it does not
    state     what the backend keeps with this visit

    The table owns nothing: `rows` keeps every tensor alive that it points to.
    """

    def __init__(self, rule: Rule, rows: Sequence[Row], groups: Sequence[dict]):
        self.rule, self.rows, self.groups = rule, list(rows), groups
        self.device = self.rows[0].param.device
        self.table = torch.zeros(len(self.rows), len(COLUMNS), dtype=torch.int64)
        self._live = []
        for i, row in enumerate(self.rows):
            self._check(row)
            param = row.param
            addresses = [0 if t is None else t.data_ptr() for t in (row.auxiliary, *row.moments)]
            addresses += [0] * (3 - len(addresses))
            start = row.span.start * param.element_size()
            self.table[i] = torch.tensor(
                [param.data_ptr() + start, *addresses, 0, row.span.numel, WEIGHT_CODECS.index(row.codec), 0, row.group, row.step],
                dtype=torch.int64,
            )
            self._live.append((param, param.data_ptr(), param.numel(), param.dtype, row.span.start))
        self._grads = [0] * len(self.rows)
        self._grad_dtypes = [_NO_GRADIENT] * len(self.rows)
        self._grad_column = self.table[:, GRAD]
        self._copies: list[Tensor] = []
        self.version = self.layout = 0
        self.counters: Tensor | None = None
        self.state: Any = None

    @property
    def steps(self) -> list[int]:
        """Updates that each row's moments have seen. Waits for the device where the counters live there."""
        return (self.table[:, STEP] if self.counters is None else self.counters).tolist()

    @property
    def hyper(self) -> list[float]:
        """The HYPER values of every parameter group, one after the other, as they are now."""
        values = []
        for group in self.groups:
            values += (float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"])
        return values

    def refresh(self) -> int:
        """Bring the table up to date with the live parameters and gradients; the number of rows with a gradient.

        Raises RuntimeError if a parameter changed dtype, device or size, and ValueError for a gradient that no backend takes.
        """
        grads, dtypes = [], []
        self._copies.clear()
        for i, (param, address, numel, dtype, start) in enumerate(self._live):
            if param.data_ptr() != address or param.numel() != numel or param.dtype is not dtype or not param.is_contiguous():
                self._relocate(i)
            grad = param.grad
            if grad is None:
                grads.append(0)
                dtypes.append(_NO_GRADIENT)
                continue
            if grad.layout is not torch.strided or not grad.is_contiguous() or grad.numel() != numel:
                grad = self._contiguous(i, grad)
            code = _DTYPE_CODE.get(grad.dtype)
            if code is None:
                raise ValueError(f"gradients must be {_dtype_names()}; {self.rows[i].span.name!r} has one of {grad.dtype}")
            grads.append(grad.data_ptr() + start * grad.itemsize)
            dtypes.append(code)
        if grads != self._grads:
            self._grad_column.copy_(torch.tensor(grads))
            self._grads = grads
            self.version += 1
        if dtypes != self._grad_dtypes:
            self.table[:, GRAD_DTYPE] = torch.tensor(dtypes).clamp(min=0)
            self._grad_dtypes = dtypes
            self.version += 1
            self.layout += 1
        return len(grads) - grads.count(0)

    def missing(self) -> list[str]:
        """Names of the rows that had no gradient at the last `refresh`; an empty row needs none."""
        return [row.span.name for row, grad in zip(self.rows, self._grads) if not grad and row.span.numel]

    def _check(self, row: Row) -> None:
        param, name = row.param, row.span.name
        if param.device != self.device:
            raise ValueError(
                f"the parameters of one block must be on one device; {self.rows[0].span.name!r} is on {self.device}, "
                f"{name!r} on {param.device}. Put them into different blocks."
            )
        if not param.is_contiguous():
            raise ValueError(
                f"parameters must be contiguous; {name!r} has strides {param.stride()}. Use p.data = p.data.contiguous()."
            )

    def _relocate(self, i: int) -> None:
        """The parameter of row `i` got new memory: take its address, if it is still the same kind of tensor."""
        row = self.rows[i]
        param, _, numel, dtype, start = self._live[i]
        if param.numel() != numel or param.dtype is not dtype or param.device != self.device:
            raise RuntimeError(
                f"{row.span.name!r} was {numel} elements of {dtype} on {self.device} when the optimizer was made and is now "
                f"{param.numel()} of {param.dtype} on {param.device}. Make BlockAdam after model.to(...)."
            )
        self._check(row)
        self.table[i, PARAM] = param.data_ptr() + start * param.element_size()
        self._live[i] = (param, param.data_ptr(), numel, dtype, start)
        self.version += 1

    def _contiguous(self, i: int, grad: Tensor) -> Tensor:
        name, numel = self.rows[i].span.name, self._live[i][2]
        if grad.layout is not torch.strided:
            raise ValueError(f"gradients must be dense; {name!r} has one of layout {grad.layout}. Use sparse=False.")
        if grad.numel() != numel:
            raise ValueError(f"the gradient of {name!r} has {grad.numel()} elements, the parameter {numel}")
        self._copies.append(grad.contiguous())
        return self._copies[-1]


def _dtype_names() -> str:
    return ", ".join(str(dtype) for dtype in PARAM_DTYPES)
