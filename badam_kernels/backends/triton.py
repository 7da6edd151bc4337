"""The backend for NVIDIA and AMD GPUs: one launch per weight codec and gradient dtype, whatever the number of tensors.

What the kernels read lies in device memory that the visit owns: the table of rows, the hyper-parameters, the step counters. A
step uploads what changed, asynchronously, and launches; it never waits for the device, and after the first step of a visit it
allocates nothing. The kernels are in _triton_kernels.py.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..formats import PARAM_DTYPES
from ..visit import CODEC, COLUMNS, GRAD, GRAD_DTYPE, NUMEL, STEP, Visit

try:
    import triton

    from . import _triton_kernels as kernels
except ImportError as error:
    triton, _IMPORT_ERROR = None, str(error)

__all__ = ["BACKEND", "TILES", "Tile"]


@dataclass(frozen=True)
class Tile:
    """Block sizes, in elements.

    update        per program of the update: 4 for each of its threads
    norm, chunk   per iteration and per program of the norm
    warps         per program of either
    finish        rows, or partial sums, per iteration of the finishing program
    """

    update: int
    norm: int
    chunk: int
    warps: int
    finish: int = 512


TILES = {
    "cuda": Tile(update=512, norm=1024, chunk=16384, warps=4),
    "hip": Tile(update=1024, norm=2048, chunk=16384, warps=4),
    "interpreter": Tile(update=1 << 15, norm=1 << 15, chunk=1 << 16, warps=1),
}
"""By architecture. A wavefront of AMD's has 64 threads; the interpreter pays per operation, not per element."""

_SLOTS = 8
_FUSED = {"enable_fp_fusion": True}
"""A multiply and an add may become one instruction, as rules.py allows. Triton 3.9 warns where this is not said."""


class _Mirror:
    """A device tensor that follows a host tensor: copied asynchronously, from pinned slots guarded by events."""

    def __init__(self, host: Tensor, device: torch.device):
        self.tensor = torch.empty_like(host, device=device)
        pinned = device.type == "cuda"
        self._slots = [torch.empty_like(host, pin_memory=True) for _ in range(_SLOTS)] if pinned else []
        self._events = [torch.cuda.Event() for _ in self._slots]
        self._sent = 0

    def send(self, host: Tensor) -> None:
        if not self._slots:
            self.tensor.copy_(host)
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph is being captured, and hyper-parameters or addresses changed since the last step: capture after a "
                "step with the same lr and gradient buffers. Before a replay, `upload` brings new values to the device."
            )
        i = self._sent % _SLOTS
        self._events[i].synchronize()
        ctypes.memmove(self._slots[i].data_ptr(), host.data_ptr(), host.nbytes)  # a torch call less per step
        self.tensor.copy_(self._slots[i], non_blocking=True)
        self._events[i].record()
        self._sent += 1


@dataclass
class _Launch:
    """One launch of the update kernel: its constants, and the row of each of its programs."""

    constants: dict[str, Any]
    chunks: Tensor
    programs: int


class _State:
    """What the device holds for one visit."""

    def __init__(self, visit: Visit, tile: Tile):
        rows, device = len(visit.rows), visit.device
        self.tile = tile
        self._host = torch.zeros(rows, kernels.WIDTH.value, dtype=torch.int64)
        self._copied, self._bounds = self._host[:, : len(COLUMNS)], self._host[:, kernels.BOUND.value]
        self._addresses, self._vectors = visit.table[:, : GRAD + 1], visit.table[:, NUMEL] // 16
        first, self.norm_chunks = _chunks(visit.table[:, NUMEL], tile.chunk, device)
        self.norm_programs = len(self.norm_chunks)
        self._host[:, kernels.FIRST_NORM.value] = first
        self.table = _Mirror(self._host, device)
        self.hyper = _Mirror(torch.empty(2 + len(visit.hyper), dtype=torch.float64), device)
        self.steps = visit.table[:, STEP].contiguous().to(device)
        self.scalars = torch.zeros(rows, kernels.SCALARS.value, device=device)
        self.partials = torch.zeros(2 * self.norm_programs, device=device)
        self.result = torch.zeros(2, device=device)
        self.norm, self.found_inf = self.result.unbind()
        self.launches: list[_Launch] = []
        self._classes = torch.full((rows,), -1)
        self._values: list[float] = []
        self._version = self._layout = -1

    def upload(self, visit: Visit, scale: float, max_norm: float) -> None:
        """Bring what changed on the host since the last step to the device."""
        values = [scale, max_norm, *visit.hyper]
        if values != self._values:
            self.hyper.send(torch.tensor(values, dtype=torch.float64))
            self._values = values
        if visit.layout != self._layout:
            self._classify(visit)
            self._layout = visit.layout
        if visit.version != self._version:
            self._copied.copy_(visit.table)
            # One misaligned address makes the whole row take the scalar path: its vectors would fault.
            torch.mul(self._vectors, (self._addresses % 16 == 0).all(1), out=self._bounds)
            self.table.send(self._host)
            self._version = visit.version

    def knows(self, visit: Visit) -> bool:
        """Whether the device has the table as it is on the host."""
        return (visit.version, visit.layout) == (self._version, self._layout)

    def _classify(self, visit: Visit) -> None:
        """Plan anew if a row's codec and gradient dtype are no longer those of its launch."""
        table = visit.table
        # A row without a gradient stays where it is, so that experts may come and go.
        classes = torch.where(table[:, GRAD] != 0, table[:, CODEC] * len(PARAM_DTYPES) + table[:, GRAD_DTYPE], self._classes)
        if not torch.equal(classes, self._classes):
            self._classes = classes
            self._plan(visit)

    def _plan(self, visit: Visit) -> None:
        rule, moments = kernels.RULES[visit.rule.name]
        self.launches = []
        for cls in self._classes[self._classes >= 0].unique().tolist():
            rows = (self._classes == cls).nonzero().view(-1)
            first, chunks = _chunks(visit.table[rows, NUMEL], self.tile.update, visit.device, rows)
            self._host[rows, kernels.FIRST.value] = first
            decode, encode, param, auxiliary = kernels.CODECS[cls // len(PARAM_DTYPES)]
            constants = {
                "RULE": rule, "MOMENTS": moments, "DECODE": decode, "ENCODE": encode, "PARAM_TYPE": param,
                "AUXILIARY_TYPE": auxiliary, "GRAD_TYPE": kernels.GRADS[cls % len(PARAM_DTYPES)], "BLOCK": self.tile.update,
            }  # fmt: skip
            self.launches.append(_Launch(constants, chunks, len(chunks)))


def _chunks(numel: Tensor, size: int, device: torch.device, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(first program of every row, int32 row of every program on `device`) when a program takes `size` elements."""
    counts = (numel + size - 1) // size
    rows = torch.arange(len(numel)) if rows is None else rows
    first = counts.cumsum(0) - counts
    programs = torch.repeat_interleave(rows.int().to(device), counts.to(device), output_size=int(counts.sum()))
    return first, programs


class _Triton:
    name = "triton"

    def unavailable(self, device: torch.device) -> str | None:
        if triton is None:
            return f"Triton is missing ({_IMPORT_ERROR}); pip install triton"
        if _interpreted():
            return None if device.type == "cpu" else "Triton's interpreter (TRITON_INTERPRET=1) serves CPU tensors"
        if not torch.empty(0, device=device).is_cuda:
            return f"it serves CUDA and ROCm GPUs, not {device.type}"
        if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
            return "Triton needs compute capability 8.0"
        return None

    def upload(self, visit: Visit, scale: float | Tensor | None, max_norm: float | None) -> None:
        """Bring hyper-parameters and addresses to the device without a step: before the replay of a captured one."""
        with torch.cuda.device_of(visit.rows[0].param):
            self._upload(visit, scale, max_norm)

    def launch(
        self, visit: Visit, scale: float | Tensor | None, max_norm: float | None, found_inf: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | bool]:
        """The kernels of `apply` alone, for a CUDA graph: new hyper-parameters wait for the `upload` before a replay."""
        if visit.state is None or not visit.state.knows(visit):
            raise RuntimeError(
                "a CUDA graph is being captured, and gradients or weights lie elsewhere than at the last step: capture after a "
                "step on the same gradient buffers (BlockAdam's static_grads=True)"
            )
        with torch.cuda.device_of(visit.rows[0].param):
            return self._launch(visit, scale, max_norm, found_inf)

    def apply(
        self, visit: Visit, scale: float | Tensor | None, max_norm: float | None, found_inf: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | bool]:
        """The norm and found_inf live on the device and hold until the next call."""
        with torch.cuda.device_of(visit.rows[0].param):
            self._upload(visit, scale, max_norm)
            return self._launch(visit, scale, max_norm, found_inf)

    def _upload(self, visit: Visit, scale: float | Tensor | None, max_norm: float | None) -> None:
        if visit.state is None:
            visit.state = _State(visit, _tile())
            visit.counters = visit.state.steps
        factor = 1.0 if scale is None or isinstance(scale, Tensor) else scale
        visit.state.upload(visit, factor, math.inf if max_norm is None else max_norm)

    def _launch(
        self, visit: Visit, scale: float | Tensor | None, max_norm: float | None, found_inf: Tensor | None
    ) -> tuple[Tensor | None, Tensor | bool]:
        state, measured = visit.state, scale is not None or max_norm is not None
        if measured:
            _launch_norm(state)
        _launch_finish(state, visit, measured, scale if isinstance(scale, Tensor) else None, found_inf)
        for launch in state.launches:
            _launch_update(state, launch)
        return (state.norm if measured else None), (state.found_inf if measured or found_inf is not None else False)


def _interpreted() -> bool:
    return not isinstance(kernels.update, triton.runtime.JITFunction)


def _tile() -> Tile:
    if _interpreted():
        return TILES["interpreter"]
    return TILES["cuda" if torch.version.hip is None else "hip"]


def _launch_norm(state: _State) -> None:
    if state.norm_programs:
        kernels.norm[(state.norm_programs,)](
            state.table.tensor, state.partials, state.norm_chunks, CHUNK=state.tile.chunk, BLOCK=state.tile.norm,
            num_warps=state.tile.warps, **_FUSED,
        )  # fmt: skip


def _launch_finish(state: _State, visit: Visit, measured: bool, scale: Tensor | None, found_inf: Tensor | None) -> None:
    kernels.finish[(1,)](
        state.hyper.tensor, state.table.tensor, state.steps, state.scalars, state.result, state.partials if measured else None,
        scale, found_inf, len(visit.rows), state.norm_programs, ADAPTIVE=visit.rule.adaptive, DECOUPLED=visit.rule.decoupled,
        BLOCK=state.tile.finish, num_warps=4, **_FUSED,
    )  # fmt: skip


def _launch_update(state: _State, launch: _Launch) -> None:
    if launch.programs:
        kernels.update[(launch.programs,)](
            state.table.tensor, state.scalars, state.result, launch.chunks, **launch.constants,
            num_warps=state.tile.warps, **_FUSED,
        )  # fmt: skip


BACKEND = _Triton()
