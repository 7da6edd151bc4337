"""BlockAdam as a torch optimizer: schedule, groups, edits, gradients, life cycle."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from badam_kernels import BlockAdam, blocks

from models import assert_same_bits, bits, flat_state, loss_of, set_gradients, tiny, trace, train, weights

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# --- schedule -------------------------------------------------------------------------------------------------------


def test_every_visit_has_exactly_k_steps():
    assert trace(BlockAdam(tiny().named_parameters(), schedule="ascending", switch_every=4), 13) == "0000111122220"


def test_descending_starts_at_the_last_block():
    assert trace(BlockAdam(tiny().named_parameters(), schedule="descending", switch_every=2), 8) == "22110022"


@pytest.mark.parametrize("never", [-1, None])
def test_an_interval_of_minus_one_or_none_never_switches(never):
    assert trace(BlockAdam(tiny().named_parameters(), schedule="ascending", switch_every=never), 7) == "0000000"


@pytest.mark.parametrize("interval", [0, -2])
def test_other_intervals_below_one_are_refused(interval):
    with pytest.raises(ValueError, match="switch_every must be at least 1"):
        BlockAdam(tiny().named_parameters(), switch_every=interval)


def test_fixed_trains_block_zero_unless_told_otherwise():
    assert trace(BlockAdam(tiny().named_parameters(), schedule="fixed", switch_every=2), 5) == "00000"
    assert trace(BlockAdam(tiny().named_parameters(), schedule="fixed", switch_every=2, start_block=1), 5) == "11111"


def test_random_with_a_start_block_trains_it_first_and_then_the_rest_of_the_sweep():
    for start in range(3):
        seen = trace(BlockAdam(tiny().named_parameters(), schedule="random", switch_every=1, start_block=start), 3)
        assert seen[0] == str(start) and sorted(seen) == ["0", "1", "2"]


def test_a_start_block_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"start_block must be in \[0, 3\)"):
        BlockAdam(tiny().named_parameters(), start_block=3)


def test_a_callable_schedule_is_followed():
    assert trace(BlockAdam(tiny().named_parameters(), schedule=lambda step: (step // 2) * 2 % 3), 6) == "002211"


def test_the_global_random_state_is_untouched_and_seeds_decide_the_order():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    orders = [trace(BlockAdam(tiny(layers=5).named_parameters(), switch_every=1, seed=seed), 15) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(orders[0][i : i + 5]) == list("01234") for i in (0, 5, 10))


def test_switch_hooks_see_both_blocks_and_can_be_removed():
    optimizer = BlockAdam(tiny().named_parameters(), schedule="ascending", switch_every=1)
    seen = []
    handle = optimizer.register_switch_hook(lambda opt, old, new: seen.append((opt is optimizer, old.name, new.name)))
    trace(optimizer, 2)
    handle.remove()
    trace(optimizer, 2)
    assert seen == [(True, "layers.0", "layers.1"), (True, "layers.1", "layers.2")]


# --- groups, hyper-parameters ---------------------------------------------------------------------------------------


def two_groups(model, **second):
    named = list(model.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.dim() > 1], **second},
        {"params": [(n, p) for n, p in named if p.dim() <= 1]},
    ]


def test_weight_decay_is_the_groups_own_and_nothing_else():
    model = tiny()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = BlockAdam(two_groups(model, weight_decay=0.5), lr=0.25, switch_every=1, schedule="ascending")
    for name in {span.name for span in optimizer.active_block.spans}:
        optimizer._params[name].grad = torch.zeros_like(optimizer._params[name])
    optimizer.step()
    for name, param in model.named_parameters():
        decayed = name.startswith("layers.0") and param.dim() > 1
        assert torch.equal(param, start[name] - 0.125 * start[name] if decayed else start[name]), name


def test_a_scheduler_moves_every_groups_lr_and_the_step_follows():
    model = tiny()
    optimizer = BlockAdam(two_groups(model, lr=0.5), lr=0.25, eps=0.0, switch_every=-1, schedule="fixed")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step)
    for factor in range(3):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        for name in {span.name for span in optimizer.active_block.spans}:
            optimizer._params[name].grad = torch.ones_like(optimizer._params[name])
        optimizer.step()
        scheduler.step()
        for name, param in model.layers[0].named_parameters():
            moved = before[f"layers.0.{name}"] - param
            expected = (0.5 if param.dim() > 1 else 0.25) * factor
            torch.testing.assert_close(moved, torch.full_like(moved, expected), rtol=1e-6, atol=1e-6)


def test_one_block_of_everything_follows_torch_adamw():
    ours, theirs = tiny(), tiny()
    everything = blocks.partition(ours.named_parameters(), by=[[name for name, _ in ours.named_children()]])
    settings = dict(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    optimizer = BlockAdam(ours.named_parameters(), blocks=everything, **settings)
    reference = torch.optim.AdamW(theirs.parameters(), **settings)
    torch.testing.assert_close(
        train(ours, optimizer, range(25)), train(theirs, reference, range(25)), rtol=2e-5, atol=0, msg="losses differ"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be finite and at least 0"),
        ({"betas": (1.0, 0.9)}, r"betas must be two numbers in \[0, 1\)"),
        ({"eps": -1e-8}, "eps must be finite"),
        ({"weight_decay": float("nan")}, "weight_decay must be finite"),
        ({"rule": "lion"}, "rule must be one of 'adamw'"),
        ({"format": "int4"}, "format must be a Format or one of"),
        ({"moments": "never"}, "moments must be 'visit' or 'run'"),
        ({"schedule": "sideways"}, "schedule must be one of"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
        ({"backend": "abacus"}, "backend must be 'auto' or one of"),
    ],
)
def test_bad_arguments_name_what_was_expected(settings, message):
    with pytest.raises(ValueError, match=message):
        BlockAdam(tiny().named_parameters(), **settings)


def test_split_refuses_fp16_and_says_what_to_use():
    with pytest.raises(ValueError, match="format='auto'"):
        BlockAdam(tiny(FP16).named_parameters(), format="split")


def test_parameters_without_names_are_refused_with_the_way_to_pass_them():
    with pytest.raises(TypeError, match=r"model.named_parameters\(\)"):
        BlockAdam(tiny().parameters())


def test_an_empty_group_keeps_its_place():
    model = tiny()
    optimizer = BlockAdam([{"params": [], "lr": 0.5}, {"params": list(model.named_parameters())}], lr=0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]


def test_groups_cannot_be_added_later():
    optimizer = BlockAdam(tiny().named_parameters())
    with pytest.raises(RuntimeError, match="fixed at construction"):
        optimizer.add_param_group({"params": [("x", nn.Parameter(torch.zeros(1)))]})


# --- what is trained ------------------------------------------------------------------------------------------------


def test_a_backward_pass_reaches_the_active_block_only():
    model = tiny()
    optimizer = BlockAdam(model.named_parameters(), schedule="ascending", start_block=1)
    loss_of(model, 0).backward()
    assert {n.split(".")[1] for n, p in model.named_parameters() if p.grad is not None} == {"1"}
    assert optimizer.active_block.name == "layers.1"


def test_what_the_user_froze_stays_frozen_and_leaves_the_schedule():
    model = tiny()
    model.layers[1].requires_grad_(False)
    optimizer = BlockAdam(model.named_parameters(), schedule="ascending", switch_every=1)
    assert [block.name for block in optimizer.blocks] == ["layers.0", "layers.2"]
    before = weights(model.layers[1])
    train(model, optimizer, range(4))
    assert_same_bits(weights(model.layers[1]), before)
    optimizer.close()
    assert not any(p.requires_grad for p in model.layers[1].parameters())
    assert all(p.requires_grad for p in model.layers[0].parameters())


def test_a_parameter_without_gradient_is_skipped_and_said_once(caplog):
    model = tiny()
    optimizer = BlockAdam(model.named_parameters(), schedule="ascending", switch_every=-1, lr=0.1)
    before = weights(model)
    with caplog.at_level(logging.WARNING, "badam_kernels"):
        for step in range(3):
            set_gradients(optimizer, step)
            model.layers[0].up.weight.grad = None
            optimizer.step()
    assert [r.message for r in caplog.records].count(
        "no gradient for 1 parameter(s) of the active block, skipped: layers.0.up.weight"
    ) == 1
    after = weights(model)
    assert torch.equal(after["layers.0.up.weight"], before["layers.0.up.weight"])
    assert not torch.equal(after["layers.0.down.weight"], before["layers.0.down.weight"])


def test_a_late_gradient_gets_its_own_bias_correction():
    """As in torch, a parameter's step count is the number of updates it had itself."""
    model = tiny()
    optimizer = BlockAdam(model.named_parameters(), schedule="fixed", switch_every=-1, lr=0.25, eps=0.0)
    weight = model.layers[0].up.weight
    before = weight.detach().clone()
    for step in range(4):
        set_gradients(optimizer, step)
        weight.grad = torch.ones_like(weight) if step == 3 else None
        optimizer.step()
    torch.testing.assert_close(before - weight, torch.full_like(weight, 0.25), rtol=1e-6, atol=1e-7)


def test_accumulated_gradients_across_a_switch_equal_the_big_batch():
    big, small = tiny(), tiny()
    settings = dict(lr=1e-2, schedule="ascending", switch_every=1)
    one, other = BlockAdam(big.named_parameters(), **settings), BlockAdam(small.named_parameters(), **settings)
    for step in range(4):
        parts = [loss_of(big, 10 * step + i) for i in range(2)]
        (sum(parts) / 2).backward()
        one.step()
        one.zero_grad()
        for i in range(2):
            (loss_of(small, 10 * step + i) / 2).backward()
        other.step()
        idle = {id(small.get_parameter(s.name)) for s in other.active_block.spans}
        assert all(p.grad is None for p in small.parameters() if id(p) not in idle)
        other.zero_grad()
    for a, b in zip(big.parameters(), small.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_always_modules_train_in_every_block():
    model = tiny()
    partition = blocks.partition(model.named_parameters(), always=["norm"])
    optimizer = BlockAdam(model.named_parameters(), blocks=partition, schedule="ascending", switch_every=1, lr=0.1)
    for step in range(3):
        before = bits(model.norm.weight)
        assert model.norm.weight.requires_grad
        train(model, optimizer, range(step, step + 1))
        assert not torch.equal(bits(model.norm.weight), before)


def test_row_ranges_of_one_matrix_train_as_blocks_of_their_own():
    model = tiny(BF16)
    partition = blocks.partition(model.named_parameters(), by="layers", max_bytes=64)
    optimizer = BlockAdam(model.named_parameters(), blocks=partition, schedule="ascending", switch_every=1, lr=0.1)
    assert len(optimizer.blocks) > 3
    for step in range(len(optimizer.blocks)):
        before = weights(model)
        block = optimizer.active_block
        set_gradients(optimizer, step)
        optimizer.step()
        touched = {s.name: slice(s.start, s.stop) for s in block.spans}
        for name, now in weights(model).items():
            changed = (now != before[name]).flatten().nonzero().flatten().tolist()
            inside = touched.get(name, slice(0, 0))
            assert all(inside.start <= i < inside.stop for i in changed), (block.name, name)


# --- masters ----------------------------------------------------------------------------------------------------------


def exported(optimizer, tmp_path):
    optimizer.export_fp32(tmp_path / "masters.safetensors")
    return {name: bits(value) for name, value in load_file(tmp_path / "masters.safetensors").items()}


@pytest.mark.parametrize(("dtype", "format"), [(BF16, "split"), (BF16, "master"), (FP16, "master"), (FP16, "auto")])
@pytest.mark.parametrize("moments", ["visit", "run"])
def test_masters_survive_every_switch_bit_for_bit(dtype, format, moments, tmp_path):
    """With the same gradients, the masters of a 16-bit model are those of the fp32 model, sweep after sweep."""
    settings = dict(lr=3e-4, weight_decay=0.1, switch_every=2, moments=moments, seed=4)
    full, half = tiny(FP32), tiny(dtype)
    one = BlockAdam(full.named_parameters(), **settings)
    other = BlockAdam(half.named_parameters(), format=format, **settings)
    for step in range(20):
        for optimizer in (one, other):
            set_gradients(optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bits(exported(other, tmp_path), weights(full))
    assert_same_bits(exported(one, tmp_path), weights(full))


def test_updates_too_small_for_bf16_are_kept():
    """Contract row 3: weight 1, gradient 1, lr 1e-5, K = 50, two blocks."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
    model.to(BF16)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    optimizer = BlockAdam(model.named_parameters(), lr=1e-5, switch_every=50, schedule="ascending", blocks=[["layers.0"], ["layers.1"]])
    weight, active_steps, first_move = model.layers[0].weight, 0, None
    while active_steps < 250:
        active = optimizer.active_block_index == 0
        for param in model.parameters():
            param.grad = torch.ones_like(param) if param.requires_grad else None
        optimizer.step()
        active_steps += active
        if first_move is None and weight.item() != 1.0:
            first_move = active_steps
    assert first_move == 196
    span = optimizer.blocks[0].spans[0]
    master = optimizer._codecs[span.name].decode(weight.detach().view(-1), optimizer._store.read(span)["w"])
    assert f"{master.item():.6f}" == "0.997497"


def edit(how: str, param: torch.Tensor, value: torch.Tensor) -> None:
    if how == "data":
        param.data.copy_(value)
    elif how == "swap":
        param.data = value.clone()
    else:
        with torch.no_grad():
            param.copy_(value)


@pytest.mark.parametrize("format", ["split", "master"])
@pytest.mark.parametrize("how", ["data", "no_grad", "swap"])
@pytest.mark.parametrize("layer", [0, 1], ids=["active", "idle"])
def test_weights_edited_from_outside_keep_the_edit(format, how, layer):
    """After an edit and lr 0, a bf16 weight is exactly what was written; and training goes on from there."""
    model = tiny(BF16)
    optimizer = BlockAdam(model.named_parameters(), format=format, lr=1e-3, schedule="ascending", switch_every=4)
    trace(optimizer, 14)  # a sweep, so that every block holds residuals, and two steps into the next
    assert optimizer.active_block_index == 0
    param = model.layers[layer].up.weight
    wanted = torch.linspace(-3, 3, param.numel()).view_as(param).to(BF16)
    wanted.view(-1)[:4] = torch.tensor([0.0, -0.0, 1.0, -1.0])
    edit(how, param, wanted)
    optimizer.param_groups[0]["lr"] = 0.0
    trace(optimizer, 6)
    assert torch.equal(param, wanted)  # by value: subtracting a zero update may turn -0 into 0
    optimizer.param_groups[0]["lr"] = 0.5
    trace(optimizer, 12)
    assert torch.isfinite(param).all() and not torch.equal(param, wanted)


def test_autograd_notices_that_a_step_changed_the_weights():
    model = tiny()
    optimizer = BlockAdam(model.named_parameters(), schedule="fixed", start_block=2)
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- norm, overflow, scaler -------------------------------------------------------------------------------------------


def test_clipping_follows_torch_over_the_active_block():
    model = tiny()
    optimizer = BlockAdam(model.named_parameters(), max_grad_norm=0.1, rule="sgd", betas=(0.0, 0.0), lr=1.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    active = [model.get_parameter(span.name) for span in optimizer.active_block.spans]
    loss_of(model, 0).backward()
    gradients = [p.grad.clone() for p in active]
    optimizer.step()
    norm = torch.nn.utils.clip_grad_norm_([nn.Parameter(g) for g in gradients], 1.0)
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))
    torch.testing.assert_close(float(optimizer.grad_norm), float(norm), rtol=1e-6, atol=0)
    for param, gradient, name in zip(active, gradients, [s.name for s in optimizer.blocks[0].spans]):
        name = next(n for n, p in model.named_parameters() if p is param)
        torch.testing.assert_close(before[name] - param, gradient * (0.1 / (norm + 1e-6)), rtol=1e-4, atol=1e-7)


def test_a_non_finite_gradient_changes_nothing_and_does_not_count():
    model = tiny(BF16)
    optimizer = BlockAdam(model.named_parameters(), max_grad_norm=1.0, schedule="ascending", switch_every=2, lr=0.1)
    set_gradients(optimizer, 0)
    optimizer.step()
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    for bad in (float("inf"), float("nan")):
        set_gradients(optimizer, 1)
        model.layers[0].down.weight.grad[0, 0] = bad
        optimizer.step()
        assert optimizer.global_step == 1 and optimizer.active_block_index == 0
        assert_same_bits(weights(model), before)
        assert flat_state(optimizer.state_dict()) == flat_state(state)
    set_gradients(optimizer, 1)
    optimizer.step()
    assert optimizer.active_block_index == 1


@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_gives_the_unscaled_run_and_an_overflow_changes_nothing(unscale):
    plain, scaled = tiny(), tiny()
    settings = dict(lr=1e-2, schedule="ascending", switch_every=1)
    one, other = BlockAdam(plain.named_parameters(), **settings), BlockAdam(scaled.named_parameters(), **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(6):
        if step == 3:
            before, block = weights(scaled), other.active_block_index
            scaler.scale(loss_of(scaled, step) * float("inf")).backward()
            scaler.step(other)
            scaler.update()
            other.zero_grad()
            assert_same_bits(weights(scaled), before)
            assert other.active_block_index == block and other.global_step == 3
        loss_of(plain, step).backward()
        one.step()
        one.zero_grad()
        scaler.scale(loss_of(scaled, step)).backward()
        if unscale:
            scaler.unscale_(other)
        scaler.step(other)
        scaler.update()
        other.zero_grad()
    assert_same_bits(weights(scaled), weights(plain))


# --- life cycle -------------------------------------------------------------------------------------------------------


def test_a_closure_is_run_with_gradients_and_its_value_returned():
    model = tiny()
    optimizer = BlockAdam(model.named_parameters(), lr=1e-2)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    before = weights(model)
    assert optimizer.step(closure).item() > 0
    assert any(not torch.equal(now, before[name]) for name, now in weights(model).items())


def test_close_restores_requires_grad_and_ends_stepping():
    model = tiny()
    model.embed_tokens.requires_grad_(False)
    before = {n: p.requires_grad for n, p in model.named_parameters()}
    optimizer = BlockAdam(model.named_parameters())
    train(model, optimizer, range(2))
    optimizer.close()
    optimizer.close()
    assert {n: p.requires_grad for n, p in model.named_parameters()} == before
    assert sum(sum(places.values()) for places in optimizer.memory().values()) == 0
    with pytest.raises(RuntimeError, match="was closed"):
        optimizer.step()


def test_dropping_the_optimizer_restores_requires_grad():
    model = tiny()
    optimizer = BlockAdam(model.named_parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    del optimizer, scheduler
    gc.collect()
    assert all(p.requires_grad for p in model.parameters())


def test_a_second_optimizer_on_the_same_weights_waits_for_the_first_to_close():
    model = tiny()
    first = BlockAdam(model.named_parameters())
    with pytest.raises(ValueError, match="another live BlockAdam"):
        BlockAdam(model.named_parameters())
    first.close()
    second = BlockAdam(model.named_parameters())
    assert len(second.blocks) == 3


def test_copying_and_pickling_are_refused_with_a_reason():
    optimizer = BlockAdam(tiny().named_parameters())
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps, lambda o: torch.save(o, io.BytesIO())):
        with pytest.raises(TypeError, match=r"use state_dict\(\)"):
            attempt(optimizer)


def test_memory_is_exact_and_flat_over_two_sweeps():
    model = tiny(BF16)
    optimizer = BlockAdam(model.named_parameters(), switch_every=1, format="split")
    trace(optimizer, 3)
    first = optimizer.memory()
    trace(optimizer, 6)
    assert optimizer.memory() == first
    trained = sum(p.numel() for p in model.layers.parameters())
    assert first["w"] == {"host_pageable": 2 * trained}
    largest = max(sum(-(-p.numel() // 16) * 16 for p in layer.parameters()) for layer in model.layers)
    assert first["m"] == first["v"] == {"host_pageable": 4 * largest}
    assert first.asked == 2 * trained and first["padding"] == {"host_pageable": first.reserved - first.asked}
    assert first.touched <= first.reserved


def test_moments_kept_for_the_run_are_counted():
    model = tiny(BF16)
    optimizer = BlockAdam(model.named_parameters(), switch_every=1, moments="run")
    trained = sum(p.numel() for p in model.layers.parameters())
    trace(optimizer, 2)
    assert optimizer.memory()["m"] == {"host_pageable": 4 * trained}


def test_the_model_may_move_to_new_memory_but_not_to_another_dtype():
    model = tiny()
    optimizer = BlockAdam(model.named_parameters(), schedule="fixed", lr=0.1)
    trace(optimizer, 1)
    for param in model.parameters():
        param.data = param.data.clone()
    before = weights(model)
    trace(optimizer, 1)
    assert not torch.equal(bits(model.layers[0].up.weight), before["layers.0.up.weight"])
    model.bfloat16()
    with pytest.raises(RuntimeError, match="Make BlockAdam after model.to"):
        for param in model.layers[0].parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()


# --- what must not pass in silence --------------------------------------------------------------------------------------


def test_a_second_run_on_the_same_model_trains_every_block_again():
    """An optimizer and its scheduler refer to each other and outlive the function that made them."""
    model = tiny()

    def run():
        optimizer = BlockAdam(model.named_parameters(), switch_every=1)
        train(model, optimizer, range(3), torch.optim.lr_scheduler.StepLR(optimizer, 1))
        return [block.name for block in optimizer.blocks]

    assert run() == run() == ["layers.0", "layers.1", "layers.2"]


def test_an_optimizer_that_is_collected_within_a_transform_gives_its_parameters_back():
    """transformers makes attention masks with a vmap, and any allocation may collect garbage."""
    model = tiny()

    def collecting(x):
        gc.collect()
        return x

    optimizer = BlockAdam(model.named_parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # they refer to each other
    del optimizer
    torch.vmap(collecting)(torch.ones(2))
    assert all(param.requires_grad for param in model.parameters())


def test_a_failed_constructor_leaves_the_model_free():
    model = tiny(FP16)
    with pytest.raises(ValueError, match="format='auto'") as kept:
        BlockAdam(model.named_parameters(), format="split")
    assert all(p.requires_grad for p in model.parameters()) and kept is not None
    assert len(BlockAdam(model.named_parameters(), format="master").blocks) == 3


def test_a_partition_from_before_freezing_is_refused():
    model = tiny()
    partition = blocks.partition(model.named_parameters())
    model.layers[1].requires_grad_(False)
    with pytest.raises(ValueError, match="trains 'layers.1.* frozen now"):
        BlockAdam(model.named_parameters(), blocks=partition)


def test_overlapping_spans_and_empty_blocks_are_refused():
    model = tiny()
    span = blocks.Span("layers.0.up.weight", 0, 40)
    for spans, message in (((span, blocks.Span(span.name, 30, 60)), "overlapping spans"), ((), "has no spans")):
        with pytest.raises(ValueError, match=message):
            BlockAdam(model.named_parameters(), blocks=blocks.Partition((blocks.Block("mine", spans),)))


def transposed():
    return nn.Parameter(torch.zeros(4, 6).t())


@pytest.mark.parametrize(
    ("named", "error", "message"),
    [
        (lambda: [("layers.0.w", transposed())], ValueError, "must be contiguous; 'layers.0.w' has strides"),
        (lambda: [("layers.0.w", nn.Parameter(torch.zeros(4, dtype=torch.float64)))], ValueError, "is torch.float64"),
        (lambda: tiny(), TypeError, "got TinyLM"),
        (lambda: [{"params": [*tiny().named_parameters()], "amsgrad": True}], ValueError, "amsgrad is not supported"),
        (lambda: [{"params": [*tiny().named_parameters()], "lr": None}], TypeError, "must be numbers"),
        (lambda: [{"params": [*tiny().named_parameters()], "betas": 0.9}], TypeError, "betas two numbers"),
    ],
)
def test_unfit_parameters_and_groups_are_refused_at_construction(named, error, message):
    with pytest.raises(error, match=message):
        BlockAdam(named())


def test_a_parameter_in_two_groups_is_refused():
    named = list(tiny().named_parameters())
    with pytest.raises(ValueError, match="is in parameter groups 0 and 1"):
        BlockAdam([{"params": named}, {"params": named[-1:]}])


def test_frozen_parameters_may_have_any_dtype(tmp_path):
    model = tiny()
    model.register_parameter("packed", nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False))
    optimizer = BlockAdam(model.named_parameters())
    train(model, optimizer, range(2))
    assert "packed" not in exported(optimizer, tmp_path)


def test_a_weight_that_is_transposed_in_place_is_refused():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)])})
    optimizer = BlockAdam(model.named_parameters(), blocks=[["layers.0"]])
    trace(optimizer, 1)
    weight = model["layers"][0].weight
    weight.data = weight.data.t()
    before = bits(weight)
    with pytest.raises(ValueError, match="must be contiguous"):
        trace(optimizer, 1)
    assert torch.equal(bits(weight), before)


def test_a_schedule_that_fails_does_so_before_anything_is_written():
    model = tiny()
    optimizer = BlockAdam(model.named_parameters(), schedule=lambda step: 9 if step == 2 else 0)
    trace(optimizer, 1)
    before = weights(model)
    with pytest.raises(ValueError, match="returned 9 for step 2"):
        trace(optimizer, 1)
    assert_same_bits(weights(model), before)
    assert optimizer.global_step == 1


def test_gradients_of_idle_blocks_from_before_are_dropped():
    model = tiny()
    loss_of(model, 0).backward()
    optimizer = BlockAdam(model.named_parameters(), schedule="ascending")
    left = {n.split(".")[1] for n, p in model.layers.named_parameters(prefix="layers") if p.grad is not None}
    assert left == {"0"} and optimizer.active_block_index == 0


def test_what_is_not_trained_is_said(caplog):
    with caplog.at_level(logging.WARNING, "badam_kernels"):
        optimizer = BlockAdam(tiny().named_parameters())
    assert "embed_tokens.weight" in caplog.text and "lm_head.weight" in caplog.text and len(optimizer.blocks) == 3


def test_a_closed_optimizer_gives_no_state(tmp_path):
    optimizer = BlockAdam(tiny().named_parameters())
    state = optimizer.state_dict()
    optimizer.close()
    for call in (optimizer.state_dict, lambda: optimizer.load_state_dict(state), lambda: optimizer.export_fp32(tmp_path / "x")):
        with pytest.raises(RuntimeError, match="was closed"):
            call()
