"""Clipping and fp16 under accelerate: `clip_grad_norm_old_version`, GradScaler, prepare, and accelerate's state dicts."""

from __future__ import annotations

from types import MethodType

import pytest
import torch

pytest.importorskip("accelerate", reason="needs accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402

from badam_kernels import BlockAdam  # noqa: E402
from badam_kernels.integrations.badam import (  # noqa: E402
    BAdamCallback,
    BlockOptimizer,
    BlockOptimizerRatio,
    clip_grad_norm_old_version,
)

from models import assert_same_bits, flat_state, loss_of, tiny, weights  # noqa: E402

FP16, FP32 = torch.float16, torch.float32
pytestmark = pytest.mark.filterwarnings("ignore:the first visit has:UserWarning")
KINDS = pytest.mark.parametrize("kind", ["layers", "adjacent", "scatter"])


def make(kind, dtype=FP32):
    model = tiny(dtype)
    named = list(model.named_parameters())
    if kind == "layers":
        base = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return model, BlockOptimizer(base, named, switch_block_every=2, switch_mode="ascending", verbose=0)
    settings = dict(update_ratio=0.25, mask_mode=kind, switch_every=2, lr=1e-3, weight_decay=0.01, verbose=0)
    return model, BlockOptimizerRatio([p for _, p in named], named, **settings)


def accelerated(optimizer, scaler=None):
    """An accelerator as a Trainer has it, clipping replaced as LLaMA-Factory does. accelerate refuses fp16 on a CPU itself."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = scaler
    wrapped = AcceleratedOptimizer(optimizer, scaler=scaler)
    accelerator._optimizers = [wrapped]
    accelerator.clip_grad_norm_ = MethodType(clip_grad_norm_old_version, accelerator)
    return accelerator, wrapped


def masked(optimizer, model):
    """The gradients of the elements that the next step updates."""
    return torch.cat([gradient.float().flatten() for gradient in optimizer._active_gradients()])


@KINDS
def test_the_norm_is_that_of_what_trains_and_no_gradient_is_written(kind):
    model, optimizer = make(kind)
    accelerator, _ = accelerated(optimizer)
    loss_of(model, 0).backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(norm, masked(optimizer, model).norm())
    assert norm > 0.01
    assert all(torch.equal(model.get_parameter(n).grad, grad) for n, grad in before.items())


@KINDS
def test_the_next_step_clips_and_only_the_next(kind):
    (model, optimizer), (reference, other) = make(kind), make(kind)
    accelerator, wrapped = accelerated(optimizer)
    for step in range(6):
        loss_of(model, step).backward()
        loss_of(reference, step).backward()
        if step % 2:
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.01)
            for param in reference.parameters():
                if param.grad is not None:
                    param.grad.mul_(min(1.0, 0.01 / (float(norm) + 1e-6)))
        wrapped.step()
        other.step()
        optimizer.zero_grad()
        other.zero_grad()
    for a, b in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_another_norm_and_other_optimizers_are_left_to_accelerate():
    model, optimizer = make("layers")
    accelerator, _ = accelerated(optimizer)
    loss_of(model, 0).backward()
    largest = masked(optimizer, model).abs().max()
    torch.testing.assert_close(accelerator.clip_grad_norm_(model.parameters(), 1e9, float("inf")), largest)
    plain = tiny()
    accelerator, _ = accelerated(torch.optim.AdamW(plain.parameters()))
    loss_of(plain, 0).backward()
    accelerator.clip_grad_norm_(plain.parameters(), 0.01)
    total = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
    torch.testing.assert_close(total, torch.tensor(0.01), rtol=1e-3, atol=0)


@KINDS
def test_row_12_an_fp16_model_under_a_scaler_follows_fp32_and_an_overflow_changes_nothing(kind):
    (half, optimizer), (full, reference) = make(kind, FP16), make(kind, FP32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    accelerator, wrapped = accelerated(optimizer, scaler)
    reference_scheduler = torch.optim.lr_scheduler.LambdaLR(reference, lambda step: 1 / (1 + step))
    callback = BAdamCallback()
    callback._optimizer = optimizer

    def step_half(step):
        """The same gradients as the fp32 run, scaled, in fp16."""
        for a, b in zip(half.parameters(), full.parameters()):
            a.grad = None if b.grad is None else (b.grad * scaler.get_scale()).half()
            assert a.grad is None or step == 3 or torch.isfinite(a.grad).all()
        if step == 3:
            next(p for p in half.layers.parameters() if p.requires_grad).grad.view(-1)[0] = float("inf")
        norm = accelerator.clip_grad_norm_(half.parameters(), 0.5)
        callback.on_pre_optimizer_step(None, None, None)
        wrapped.step()
        callback.on_optimizer_step(None, None, None, optimizer=wrapped)
        if not accelerator.optimizer_step_was_skipped:  # as the Trainer does
            scheduler.step()
        optimizer.zero_grad()
        return norm

    scaler.scale(torch.zeros(()))  # allocates the scale, as the loss does
    for step in range(9):
        loss_of(full, step).backward()
        for param in full.parameters():
            if param.grad is not None:
                param.grad = param.grad.half().float()
        if step == 3:
            before, state, scale = weights(half), flat_state(optimizer.state_dict()), scaler.get_scale()
            assert not torch.isfinite(step_half(step))
            assert_same_bits(weights(half), before)
            assert flat_state(optimizer.state_dict()) == state and scaler.get_scale() == scale / 2
            assert scheduler.last_epoch == 3 and accelerator.optimizer_step_was_skipped
            scaler.update(scale)
        norm = step_half(step if step != 3 else -1)
        expected = masked(reference, full).norm()
        torch.testing.assert_close(norm, expected, rtol=1e-3, atol=0)
        reference.clip_next_step(0.5)
        reference.step()
        reference_scheduler.step()
        reference.zero_grad()
        assert optimizer.global_step == reference.global_step == scheduler.last_epoch
        assert not accelerator.optimizer_step_was_skipped
    for a, b in zip(half.parameters(), full.parameters()):
        torch.testing.assert_close(a.float(), b, rtol=2**-10, atol=2**-20)


def test_prepare_costs_nothing_before_the_first_step():
    """accelerate moves every tensor of the state to the device and loads it back: there is none."""
    model = tiny(torch.bfloat16)
    optimizer = BlockAdam(model.named_parameters(), switch_every=2)
    before = optimizer.memory()
    accelerator = Accelerator(cpu=True)
    prepared_model, prepared = accelerator.prepare(model, optimizer)
    assert optimizer.state_dict()["state"] == {} and optimizer.memory() == before
    assert sum(places.get("host_pageable", 0) for slot, places in before.items() if slot in "mv") == 0
    for step in range(3):
        accelerator.backward(loss_of(prepared_model, step))
        prepared.step()
        prepared.zero_grad()
    assert optimizer.global_step == 3


def test_accelerates_saved_state_round_trips_bitwise(tmp_path):
    def start():
        model = tiny(torch.bfloat16)
        optimizer = BlockAdam(model.named_parameters(), switch_every=2, schedule="random", lr=1e-2)
        accelerator = Accelerator(cpu=True)
        return (accelerator, *accelerator.prepare(model, optimizer))

    def go(accelerator, model, optimizer, steps):
        for step in steps:
            accelerator.backward(loss_of(model, step))
            optimizer.step()
            optimizer.zero_grad()

    first = start()
    go(*first, range(5))
    first[0].save_state(tmp_path)
    go(*first, range(5, 9))
    second = start()
    go(*second, range(20, 23))
    second[0].load_state(tmp_path)
    go(*second, range(5, 9))
    assert_same_bits(weights(second[1]), weights(first[1]))
    assert flat_state(second[2].state_dict()) == flat_state(first[2].state_dict())
