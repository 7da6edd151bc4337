"""Cases: a table of rows becomes a visit over guarded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import oracle
import pytest
import torch
from torch import Tensor

from badam_kernels.blocks import Span
from badam_kernels.formats import FORMATS, Codec
from badam_kernels.rules import Rule
from badam_kernels.visit import Row, Visit

GROUPS = (
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 2e-2, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.0},
    {"lr": 1e-5, "betas": (0.95, 0.9999), "eps": 1e-6, "weight_decay": 0.01},
)
CODECS = tuple(dict.fromkeys(codec for format in FORMATS.values() for codec in format.weight.values()))
SIZES = (0, 1, 15, 16, 17, 1023, 1025)
LARGE = 2**20 + 3
PLACES = ((0, 0), (1, 0), (5, 0), (0, 3), (5, 1))
"""(span start, storage offset): whole parameters and inner ranges, aligned and not."""
AFTER = 3
"""Elements behind the span in its parameter, and behind the parameter in its storage, that nobody may touch."""


@dataclass(frozen=True)
class RowCase:
    """One row to build; `grad_dtype` None means that the parameter has no gradient."""

    size: int
    codec: Codec
    grad_dtype: torch.dtype | None
    start: int = 0
    offset: int = 0
    group: int = 0
    step: int = 0


def codec_id(codec: Codec) -> str:
    return codec.name if codec.name == "fp32" else f"{codec.name}_{dtype_id(codec.primary)}"


def dtype_id(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def every_size_and_place(codec: Codec, grad_dtype: torch.dtype) -> list[RowCase]:
    """Rows of every size at every place, groups and step counts taking turns."""
    rows = [(size, *place) for size in SIZES for place in PLACES]
    return [
        RowCase(size, codec, grad_dtype, start, offset, group=i % len(GROUPS), step=(0, 1, 9, 1000)[i % 4])
        for i, (size, start, offset) in enumerate(rows)
    ]


class Case:
    """A visit, and the storages behind it. Everything outside the spans is NaN (integers: the largest), gradients too."""

    def __init__(self, rule: Rule, specs: Sequence[RowCase], groups: Sequence[dict] = GROUPS, seed: int = 0, device="cpu"):
        self.device = torch.device(device)
        self.groups = [dict(group) for group in groups]
        self.buffers: list[Tensor] = []
        generator = torch.Generator().manual_seed(seed)
        self.visit = Visit(rule, [self._row(rule, i, spec, generator) for i, spec in enumerate(specs)], self.groups)

    def _row(self, rule: Rule, i: int, spec: RowCase, generator: torch.Generator) -> Row:
        w, g, m, v = values(spec, generator)
        primary, auxiliary = oracle.encode(spec.codec, w)
        param = torch.nn.Parameter(self._guarded(primary, spec.offset, spec.start, AFTER if spec.start else 0))
        if spec.grad_dtype is not None:
            if spec.grad_dtype is not param.dtype and not hasattr(torch.Tensor, "grad_dtype"):
                pytest.skip("this torch has no gradients of another dtype than their parameter's")
            param.grad_dtype = None
            param.grad = self._guarded(g, spec.offset, spec.start, AFTER if spec.start else 0)
        return Row(
            span=Span(f"row{i}[{spec.start}:{spec.start + spec.size}]", spec.start, spec.start + spec.size),
            param=param,
            codec=spec.codec,
            auxiliary=None if auxiliary is None else self._guarded(auxiliary, spec.offset),
            moments=tuple(self._guarded(x, spec.offset) for x in (m, v)[: len(rule.moments)]),
            group=spec.group,
            step=spec.step,
        )

    def _guarded(self, x: Tensor, offset: int, before: int = 0, after: int = 0) -> Tensor:
        """`x` on the device with `before` and `after` poisoned elements, itself a view into a larger poisoned storage."""
        length = before + len(x) + after
        poison = torch.nan if x.dtype.is_floating_point else torch.iinfo(x.dtype).max
        buffer = torch.full((offset + length + AFTER,), poison, dtype=x.dtype)
        buffer[offset + before : offset + before + len(x)] = x
        self.buffers.append(buffer.to(self.device))
        return self.buffers[-1][offset : offset + length]

    def snapshot(self) -> list[Tensor]:
        """The bytes of everything, copied."""
        return [buffer.view(torch.uint8).cpu().clone() for buffer in self.buffers]

    def guards(self) -> list[Tensor]:
        """The bytes of everything that no step may write: gradients, and all that lies outside the spans."""
        state = [t for row in self.visit.rows for t in self.written(row)]
        held = [t.clone() for t in state]
        for t in state:
            t.zero_()
        bytes_ = self.snapshot()
        for t, old in zip(state, held):
            t.copy_(old)
        return bytes_

    @staticmethod
    def written(row: Row) -> list[Tensor]:
        """The tensors that a step writes."""
        return [row.flat(row.param), *([] if row.auxiliary is None else [row.auxiliary]), *row.moments]

    @staticmethod
    def weight(row: Row) -> Tensor:
        """The fp32 weight of `row`, on the CPU, decoded by the oracle."""
        auxiliary = None if row.auxiliary is None else row.auxiliary.cpu()
        return oracle.decode(row.codec, row.flat(row.param).cpu(), auxiliary)

    @staticmethod
    def gradient(row: Row) -> Tensor | None:
        """The gradient of the span in its own dtype, on the CPU."""
        return None if row.param.grad is None else row.flat(row.param.grad).cpu()


def values(spec: RowCase, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weight, gradient, m and v of one row: gradients over seven decades, small and zero values among all of them.

    The moments are ones that such gradients leave behind (m**2 <= v), or none before the first update.
    """

    def normal() -> Tensor:
        return torch.randn(spec.size, generator=generator)

    def lanes(x: Tensor, shift: int, *special: float) -> Tensor:
        for k, value in enumerate(special):
            x[shift + 7 * k :: 7 * len(special)] = value
        return x

    w = lanes(0.05 * normal(), 3, 0.0, 1.0, -1e-6, 100.0)
    decades = 10.0 ** (7 * torch.rand(spec.size, generator=generator) - 6)
    g = lanes(normal() * decades, 5, 0.0, 1e-3)
    m, v = lanes(normal() * decades, 6, 0.0), (3 * decades * (1 + normal().abs())) ** 2
    if spec.step == 0:
        m, v = torch.zeros(spec.size), torch.zeros(spec.size)
    m = m.clamp(-v.sqrt(), v.sqrt())
    return w, g.to(spec.grad_dtype or torch.float32), m, v
