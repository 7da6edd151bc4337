"""torch's GradScaler over every backend: a scaled run is the unscaled run, bit for bit, and an overflow step never happened."""

import pytest
import torch

from badam_kernels import BlockAdam

OVERFLOW_STEP = 2


def train(backend, device, dtype, scaled, unscale, clip, overflow):
    """(weights, successful steps, active block) after six steps over a switch; powers of two scale without rounding."""
    params = {f"layers.{i}.w": torch.nn.Parameter(torch.linspace(-1, 1, 37, device=device).to(dtype)) for i in range(2)}
    optimizer = BlockAdam(
        params.items(), lr=1e-2, weight_decay=0.1, switch_every=4, schedule="ascending", max_grad_norm=clip, backend=backend.name
    )
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled=scaled)
    scaler.scale(torch.ones(1, device=device))
    for step in range(6):
        for p in params.values():
            if p.requires_grad:
                grad = torch.sin(torch.arange(37.0) * (step + 1)).half().float()
                p.grad = (grad * scaler.get_scale()).to(device, dtype)
                if overflow and step == OVERFLOW_STEP:
                    p.grad[5] = torch.inf
        if unscale:
            scaler.unscale_(optimizer)
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        elif not (overflow and step == OVERFLOW_STEP):
            optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in params.values()], optimizer.global_step, optimizer.active_block_index


@pytest.mark.parametrize("overflow", [False, True], ids=["finite", "overflow"])
@pytest.mark.parametrize("clip", [None, 0.5], ids=["plain", "clip"])
@pytest.mark.parametrize(
    "dtype, unscale",
    [(torch.float32, False), (torch.float32, True), (torch.float16, False)],  # torch refuses to unscale fp16 gradients
    ids=["fp32", "fp32-unscaled_before", "fp16"],
)
def test_a_scaled_run_is_the_unscaled_run(backend, device, dtype, unscale, clip, overflow):
    weights, steps, block = train(backend, device, dtype, True, unscale, clip, overflow)
    expected, expected_steps, expected_block = train(backend, device, dtype, False, False, clip, overflow)
    assert (steps, block) == (expected_steps, expected_block) == (6 - overflow, 1)
    for got, want in zip(weights, expected):
        assert torch.equal(got, want)
    assert not torch.equal(weights[0], torch.linspace(-1, 1, 37).to(dtype))
