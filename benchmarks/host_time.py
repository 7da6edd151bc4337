"""Host time of a step: on tensors so small that the kernel costs nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from badam_kernels import BlockAdam

NUMEL, STEPS = 16, 50


def parameters(count: int, dtype: torch.dtype, device: torch.device) -> dict[str, torch.nn.Parameter]:
    ones = [torch.ones(NUMEL, dtype=dtype, device=device) for _ in range(2 * count)]
    params = {f"layers.0.{i}": torch.nn.Parameter(ones[i]) for i in range(count)}
    for p, grad in zip(params.values(), ones[count:]):
        p.grad = grad
    return params


def steps(optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    def run() -> float:
        started = time.perf_counter()
        for _ in range(STEPS):
            optimizer.step()
        return (time.perf_counter() - started) / STEPS

    return run


def host_times(rounds: int, device: torch.device) -> Iterator[dict]:
    """µs per step for one block of 9 and of 400 tensors (a single block: the switch that ends a visit costs nothing here).

    On a GPU the time until the last step is launched: it is idle when the first begins, and nothing waits for it.
    """
    fp32, bf16 = torch.float32, torch.bfloat16
    for count in (9, 400):
        contenders = {
            "torch AdamW fused fp32": steps(torch.optim.AdamW(parameters(count, fp32, device).values(), fused=True)),
            "BlockAdam fp32": steps(BlockAdam(parameters(count, fp32, device).items())),
            "BlockAdam bf16": steps(BlockAdam(parameters(count, bf16, device).items())),
            "BlockAdam bf16, clipped": steps(BlockAdam(parameters(count, bf16, device).items(), max_grad_norm=1.0)),
        }
        best = {name: float("inf") for name in contenders}
        for _ in range(rounds + 1):
            for name, run in contenders.items():
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                best[name] = min(best[name], run())
        for name, seconds in best.items():
            yield {"tensors": count, "step": name, "us": f"{1e6 * seconds:.1f}"}
