"""Host time of a step: on tensors so small that the kernel costs nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from badam_kernels import BlockAdam

NUMEL, STEPS = 16, 50


def parameters(count: int, dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
    params = {f"layers.0.{i}": torch.nn.Parameter(torch.ones(NUMEL, dtype=dtype)) for i in range(count)}
    for p in params.values():
        p.grad = torch.ones(NUMEL, dtype=dtype)
    return params


def steps(optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    def run() -> float:
        started = time.perf_counter()
        for _ in range(STEPS):
            optimizer.step()
        return (time.perf_counter() - started) / STEPS

    return run


def host_times(rounds: int) -> list[dict]:
    """µs per step for one block of 9 and of 400 tensors (a single block: the switch that ends a visit costs nothing here)."""
    rows = []
    for count in (9, 400):
        fp32, bf16 = torch.float32, torch.bfloat16
        contenders = {
            "torch AdamW fused fp32": steps(torch.optim.AdamW(parameters(count, fp32).values(), fused=True)),
            "BlockAdam fp32": steps(BlockAdam(parameters(count, fp32).items())),
            "BlockAdam bf16": steps(BlockAdam(parameters(count, bf16).items())),
            "BlockAdam bf16, clipped": steps(BlockAdam(parameters(count, bf16).items(), max_grad_norm=1.0)),
        }
        best = {name: float("inf") for name in contenders}
        for _ in range(rounds + 1):
            for name, run in contenders.items():
                best[name] = min(best[name], run())
        rows += [{"tensors": count, "step": name, "us": f"{1e6 * seconds:.1f}"} for name, seconds in best.items()]
    return rows
