"""The drop-in's ratio mode: windows of every parameter, as ranges and as scattered elements."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from safetensors.torch import load_file

from badam_kernels.integrations.badam import BlockOptimizerRatio

from models import assert_same_bits, flat_state, loss_of, tiny, train, weights

BF16 = torch.bfloat16
MODES = pytest.mark.parametrize("mode", ["adjacent", "scatter"])


def wrap(model, **settings):
    settings = dict(update_ratio=0.25, switch_every=3, preserve_threshold=12, lr=1e-2, verbose=0) | settings
    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
    ]
    return BlockOptimizerRatio(groups, named, **settings)


def set_gradients(model, step=0):
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(len(name) + 100 * step)
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype) if param.requires_grad else None


def changed_by_a_visit(model, optimizer, steps=3):
    before = weights(model)
    for step in range(steps):
        set_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return {name: (now != before[name]).flatten() for name, now in weights(model).items()}


@MODES
def test_a_sweep_changes_every_element_once_and_a_visit_its_window_only(mode):
    model = tiny()
    optimizer = wrap(model, mask_mode=mode, keep_mask=mode == "adjacent")
    visits = [changed_by_a_visit(model, optimizer) for _ in range(4)]
    for name, param in model.layers.named_parameters(prefix="layers"):
        counts = torch.stack([visit[name] for visit in visits]).sum(0)
        whole = param.numel() < 12
        assert counts.eq(4 if whole else 1).all(), name
        if not whole:
            assert all(abs(int(visit[name].sum()) - param.numel() / 4) < 1 for visit in visits)
    assert not any(visit["embed_tokens.weight"].any() or visit["lm_head.weight"].any() for visit in visits)
    ranges = visits[1]["layers.0.up.weight"].nonzero().flatten().tolist()
    assert (ranges == list(range(ranges[0], ranges[-1] + 1))) == (mode == "adjacent")


@MODES
def test_the_update_of_a_window_is_adamws(mode):
    """Ratio 1 is plain AdamW; at ratio 1/4 the first visit gives its elements what plain AdamW would give them."""
    def plain():
        model = tiny()
        named = [p for n, p in model.named_parameters() if n.startswith("layers")]
        vectors, matrices = [p for p in named if p.dim() <= 1], [p for p in named if p.dim() > 1]
        groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}]
        return model, torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)

    model, (reference, adamw) = tiny(), plain()
    optimizer = wrap(model, mask_mode=mode)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    moved = changed_by_a_visit(model, optimizer)
    changed_by_a_visit(reference, adamw)
    for name, param in model.named_parameters():
        expected = torch.where(moved[name].view_as(param), reference.get_parameter(name), start[name])
        torch.testing.assert_close(param.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
    model, (reference, adamw) = tiny(), plain()
    losses = train(model, wrap(model, mask_mode=mode, update_ratio=1.0), range(8))
    torch.testing.assert_close(losses, train(reference, adamw, range(8)), rtol=2e-5, atol=0)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@MODES
def test_resuming_at_any_step_is_bitwise_the_uninterrupted_run(mode):
    model = tiny(BF16)
    optimizer = wrap(model, mask_mode=mode)
    saved = []
    for step in range(14):
        saved.append(through_a_file([model.state_dict(), optimizer.state_dict()]))
        train(model, optimizer, range(step, step + 1))
    for step, (model_state, optimizer_state) in enumerate(saved):
        resumed = tiny(BF16)
        other = wrap(resumed, mask_mode=mode)
        resumed.load_state_dict(model_state)
        other.load_state_dict(optimizer_state)
        train(resumed, other, range(step, 14))
        assert_same_bits(weights(resumed), weights(model))
        assert flat_state(other.state_dict()) == flat_state(optimizer.state_dict())


@MODES
def test_masters_survive_from_sweep_to_sweep(mode, tmp_path):
    """The bf16 run is the rounding of the fp32 run on the same gradients."""
    half, full = tiny(BF16), tiny()
    one, other = wrap(half, mask_mode=mode, lr=3e-4), wrap(full, mask_mode=mode, lr=3e-4)
    for step in range(30):
        set_gradients(half, step)
        for a, b in zip(half.parameters(), full.parameters()):
            b.grad = None if a.grad is None else a.grad.float()
        one.step()
        other.step()
    for a, b in zip(half.parameters(), full.parameters()):
        torch.testing.assert_close(a.float(), b, rtol=2**-8, atol=0)
    if mode == "adjacent":
        one.export_fp32(tmp_path / "masters.safetensors")
        masters = load_file(tmp_path / "masters.safetensors")
        assert all(torch.equal(masters[name], param) for name, param in full.named_parameters())
    else:
        with pytest.raises(ValueError, match="mask_mode='adjacent'"):
            one.export_fp32(tmp_path / "masters.safetensors")


@MODES
def test_accumulation_closure_and_missing_gradients(mode):
    model = tiny()
    optimizer = wrap(model, mask_mode=mode)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        model.layers[0].up.weight.grad = None
        return loss

    before = weights(model)
    assert optimizer.step(closure).item() > 0
    after = weights(model)
    assert torch.equal(before["layers.0.up.weight"], after["layers.0.up.weight"])
    assert not torch.equal(before["layers.0.down.weight"], after["layers.0.down.weight"])


@MODES
def test_memory_is_flat_and_beside_the_weights_only_a_window(mode):
    model = tiny(BF16)
    optimizer = wrap(model, mask_mode=mode)
    changed_by_a_visit(model, optimizer, 12)
    first = optimizer.memory()
    changed_by_a_visit(model, optimizer, 12)
    assert optimizer.memory() == first
    assert ("scatter" in first) == (mode == "scatter")
    if mode == "scatter":
        cut = sum(p.numel() for p in model.layers.parameters() if p.numel() >= 12)
        assert first["scatter"]["host_pageable"] <= 10 * (cut / 4 + 12 * len(list(model.parameters())))


@MODES
def test_tied_and_missing_heads_work(mode):
    tied = tiny()
    tied.lm_head.weight = tied.embed_tokens.weight
    optimizer = wrap(tied, mask_mode=mode, include_embedding=True, include_lm_head=True)
    assert changed_by_a_visit(tied, optimizer, 12)["embed_tokens.weight"].all()
    headless = tiny()
    headless.lm_head = torch.nn.Identity()
    assert wrap(headless, mask_mode=mode).lm_head_layer is None


@MODES
def test_embeddings_and_head_are_frozen_unless_asked_for_and_restored(mode):
    model = tiny()
    optimizer = wrap(model, mask_mode=mode)
    assert not model.embed_tokens.weight.requires_grad and not model.lm_head.weight.requires_grad
    assert all(p.requires_grad for p in model.layers.parameters())
    optimizer.close()
    assert all(p.requires_grad for p in model.parameters())
    assert wrap(tiny(), mask_mode=mode, include_lm_head=True).lm_head_layer.requires_grad


def test_a_ratio_of_its_own_for_some_parameters():
    model = tiny()
    optimizer = wrap(model, param_update_ratios={"up": 0.5, "down": None})
    visits = [changed_by_a_visit(model, optimizer) for _ in range(4)]
    share = lambda name: [round(float(v[name].float().mean()), 2) for v in visits]  # noqa: E731
    assert share("layers.0.up.weight") == [0.5] * 4 and share("layers.1.down.weight") == [0.25] * 4
    with pytest.raises(ValueError, match="'query' in param_update_ratios"):
        wrap(tiny(), param_update_ratios={"query": 0.5})


def test_options_of_torch_that_only_say_how_are_accepted_and_others_refused():
    assert wrap(tiny(), fused=True, foreach=None).param_groups[0]["lr"] == 1e-2
    assert wrap(tiny(), optimizer_defaults={"lr": 0.5}).param_groups[1]["lr"] == 0.5
    with pytest.raises(ValueError, match="amsgrad=True"):
        wrap(tiny(), amsgrad=True)
    with pytest.raises(TypeError, match="unexpected options momentum"):
        wrap(tiny(), momentum=0.9)
    with pytest.raises(ValueError, match="mask_mode must be"):
        wrap(tiny(), mask_mode="diagonal")


@MODES
def test_a_scheduler_and_zero_grad_act_on_the_models_parameters(mode):
    model = tiny()
    optimizer = wrap(model, mask_mode=mode)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(model.state_dict())
    changed_by_a_visit(model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@MODES
def test_weights_edited_in_the_middle_of_a_visit_keep_the_edit(mode):
    model = tiny(BF16)
    optimizer = wrap(model, mask_mode=mode)
    changed_by_a_visit(model, optimizer, 13)
    param = model.layers[0].up.weight
    wanted = torch.linspace(-3, 3, param.numel()).view_as(param).to(BF16)
    param.data.copy_(wanted)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    changed_by_a_visit(model, optimizer, 6)
    assert torch.equal(param, wanted)
