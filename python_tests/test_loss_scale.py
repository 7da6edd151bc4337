"""The built-in loss scale: a scaled run is the unscaled run, an overflow step never happened, fp16 trains where it would not."""

from __future__ import annotations

import copy

import pytest
import torch
from models import assert_same_bits, flat_state, loss_of, tiny, weights

from badam_kernels import BlockAdam, loss_scale
from badam_kernels.loss_scale import LossScale

FP16 = torch.float16
SETTINGS = dict(lr=1e-2, switch_every=2, schedule="ascending", weight_decay=0.1)


def run(steps: range, model, optimizer, factor: float = 1.0) -> None:
    for step in steps:
        optimizer.scale(loss_of(model, step) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("clip", [None, 0.5], ids=["plain", "clip"])
@pytest.mark.parametrize("scale", [1024.0, "dynamic"])
def test_a_scaled_run_is_the_unscaled_run(scale, clip):
    """Bitwise, since powers of two scale fp32 without rounding."""
    plain, scaled = tiny(), tiny()
    run(range(7), plain, BlockAdam(plain.named_parameters(), max_grad_norm=clip, **SETTINGS))
    optimizer = BlockAdam(scaled.named_parameters(), max_grad_norm=clip, loss_scale=scale, **SETTINGS)
    run(range(7), scaled, optimizer)
    assert_same_bits(weights(scaled), weights(plain))
    assert optimizer.global_step == 7


def test_the_norm_that_is_told_is_the_unscaled_one():
    norms = []
    for scale in (None, 512.0, "dynamic"):
        model = tiny()
        optimizer = BlockAdam(model.named_parameters(), max_grad_norm=1.0, loss_scale=scale, **SETTINGS)
        run(range(1), model, optimizer)
        norms.append(float(optimizer.grad_norm))
    assert norms[0] == norms[1] == norms[2] > 0


def test_an_fp16_model_trains_where_unscaled_gradients_round_to_zero():
    """With a loss 2**-30 of the usual, fp16 gradients are zero; scaled, training equals that of an fp32 model."""
    settings = dict(lr=1e-2, switch_every=2, schedule="ascending", eps=0.0)
    small = 2.0**-30
    frozen = tiny(FP16)
    before = weights(frozen)
    run(range(8), frozen, BlockAdam(frozen.named_parameters(), **settings | {"eps": 1e-30}), small)
    assert_same_bits(weights(frozen), before)
    half, full = tiny(FP16), tiny()
    optimizer = BlockAdam(half.named_parameters(), loss_scale=2.0**30, **settings)
    run(range(8), half, optimizer, small)
    run(range(8), full, BlockAdam(full.named_parameters(), **settings), small)
    for (name, a), b in zip(half.named_parameters(), full.parameters()):
        moved = (b - tiny().get_parameter(name)).abs().max()
        assert (a.float() - b).abs().max() <= 0.25 * moved, name


def test_an_overflow_changes_nothing_halves_the_scale_and_does_not_count():
    model = tiny(FP16)
    optimizer = BlockAdam(model.named_parameters(), loss_scale="dynamic", **SETTINGS)
    run(range(1), model, optimizer, 2.0**-6)
    assert optimizer.global_step == 1
    before, held = weights(model), optimizer.state_dict()
    state = {key: value for key, value in flat_state(held).items() if "loss_scale" not in key}
    run(range(1, 3), model, optimizer, torch.inf)
    assert_same_bits(weights(model), before)
    after = optimizer.state_dict()
    assert {key: value for key, value in flat_state(after).items() if "loss_scale" not in key} == state
    assert optimizer.global_step == 1 and optimizer.active_block_index == 0
    assert float(optimizer.loss_scale) == 2.0**14
    run(range(3, 4), model, optimizer, 2.0**-6)
    assert (optimizer.global_step, optimizer.active_block_index) == (2, 1)
    assert any(not torch.equal(now, before[name]) for name, now in weights(model).items())


@pytest.mark.parametrize("kind", [bool, torch.tensor], ids=["bool", "tensor"])
def test_the_scale_follows_torchs_grad_scaler(kind):
    """Answers as backends give them: a bool, or a float tensor."""
    ours = LossScale("dynamic")
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2000)
    theirs.scale(torch.ones(()))
    param = torch.nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([param], lr=0.0)
    ours.scale(torch.ones(()))
    for step in range(6010):
        overflow = step in (0, 5, 1999, 2007, 4008)
        param.grad = torch.full((1,), torch.inf if overflow else 0.0)
        theirs.unscale_(sgd)
        theirs.step(sgd)
        theirs.update()
        ours.update(kind(float(overflow)))
        if step % 500 == 499 or overflow:
            assert float(ours.value) == theirs.get_scale()
            assert float(ours.inverse(torch.device("cpu"))) == 1 / theirs.get_scale()
    assert theirs.get_scale() == 2.0**13  # five times halved, twice doubled


def test_it_never_falls_below_one():
    scale = LossScale("dynamic")
    for _ in range(20):
        scale.update(True)
    assert float(scale.value) == 1.0
    for _ in range(2000):
        scale.update(False)
    assert float(scale.value) == 2.0


def test_an_update_reads_nothing_back_and_makes_no_tensor():
    scale, overflow = LossScale("dynamic"), torch.tensor(1.0)
    held = scale.value, scale._inverse, scale._successes
    scale.update(overflow)
    assert all(now is then for now, then in zip((scale.value, scale._inverse, scale._successes), held))
    assert float(scale._inverse) == 2.0**-15 and float(overflow) == 1.0


def test_resuming_is_bitwise_with_the_scale_and_its_count(monkeypatch):
    monkeypatch.setattr(loss_scale, "_INTERVAL", 3)

    def make():
        model = tiny(FP16)
        return model, BlockAdam(model.named_parameters(), loss_scale="dynamic", **SETTINGS)

    model, optimizer = make()
    saved = []
    for step in range(12):
        saved.append(([p.detach().clone() for p in model.parameters()], copy.deepcopy(optimizer.state_dict())))
        run(range(step, step + 1), model, optimizer, torch.inf if step == 7 else 2.0**-6)
    assert len({state["badam_kernels"]["loss_scale"]["scale"] for _, state in saved}) > 2
    for step, (params, state) in enumerate(saved):
        resumed, other = make()
        with torch.no_grad():
            for p, value in zip(resumed.parameters(), params):
                p.copy_(value)
        other.load_state_dict(state)
        assert flat_state(other.state_dict()) == flat_state(state)
        for later in range(step, 12):
            run(range(later, later + 1), resumed, other, torch.inf if later == 7 else 2.0**-6)
        assert_same_bits(weights(resumed), weights(model))
        assert flat_state(other.state_dict()) == flat_state(optimizer.state_dict())
        other.close()


def test_states_without_a_dynamic_scale_load_and_start_a_new_one():
    source = tiny()
    plain = BlockAdam(source.named_parameters(), **SETTINGS)
    assert plain.loss_scale is None and plain.scale(loss := torch.ones(())) is loss
    run(range(1), source, plain)
    state = plain.state_dict()
    del state["badam_kernels"]["loss_scale"]  # as one saved before there was any
    for scale, expected in (("dynamic", 2.0**16), (8.0, 8.0), (None, None)):
        optimizer = BlockAdam(tiny().named_parameters(), loss_scale=scale, **SETTINGS)
        optimizer.load_state_dict(state)
        assert optimizer.loss_scale == expected


@pytest.mark.parametrize("wrong", ["automatic", 0.0, -2.0, float("inf"), float("nan")])
def test_other_values_are_refused(wrong):
    with pytest.raises(ValueError, match="loss_scale must be None, 'dynamic' or a positive number"):
        BlockAdam(tiny().named_parameters(), loss_scale=wrong)


@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_beside_it_is_refused(unscale):
    model = tiny()
    optimizer = BlockAdam(model.named_parameters(), loss_scale="dynamic", **SETTINGS)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(optimizer.scale(loss_of(model, 0))).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match="scaled twice, by a GradScaler and by loss_scale"):
        scaler.step(optimizer)


def test_a_loop_that_forgets_to_scale_its_loss_is_told():
    model = tiny()
    optimizer = BlockAdam(model.named_parameters(), loss_scale=64.0, **SETTINGS)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"optimizer.scale\(loss\).backward\(\)"):
        optimizer.step()
