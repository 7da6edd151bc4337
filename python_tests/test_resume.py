"""Save anywhere, load, continue: every weight, residual, moment, counter and order is bitwise the uninterrupted run's."""

from __future__ import annotations

import io

import pytest
import torch

from badam_kernels import BlockAdam, blocks

from models import assert_same_bits, flat_state, set_gradients, tiny, train, weights

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 14


def make(dtype, **settings):
    model = tiny(dtype)
    named = list(model.named_parameters())
    groups = [
        {"params": [(n, p) for n, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if p.dim() <= 1], "betas": (0.7, 0.9)},
    ]
    if "partition" in settings:
        settings["blocks"] = blocks.partition(named, **settings.pop("partition"))
    optimizer = BlockAdam(groups, lr=1e-2, **settings)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return model, optimizer, scheduler


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


CASES = {
    "split": (BF16, dict(switch_every=3, seed=1)),
    "master": (BF16, dict(switch_every=3, format="master", schedule="ascending")),
    "fp16": (FP16, dict(switch_every=2, schedule="descending")),
    "fp32": (FP32, dict(switch_every=2)),
    "run moments": (BF16, dict(switch_every=2, moments="run", seed=7)),
    "sgd, clipped": (BF16, dict(switch_every=2, rule="sgd", max_grad_norm=0.5)),
    "row ranges": (BF16, dict(switch_every=2, partition=dict(max_bytes=128))),
    "ratio": (BF16, dict(switch_every=2, moments="run", partition=dict(ratio=0.3))),
    "always": (BF16, dict(switch_every=2, partition=dict(always=["norm"], embeddings=True))),
    "one block": (BF16, dict(switch_every=-1)),
    "callable": (BF16, dict(schedule=lambda step: step * step % 3)),
}


@pytest.mark.parametrize("case", CASES)
def test_resuming_at_any_step_is_bitwise_the_uninterrupted_run(case):
    dtype, settings = CASES[case]
    model, optimizer, scheduler = make(dtype, **dict(settings))
    saved, trace = [], []
    for step in range(STEPS):
        saved.append(through_a_file([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()]))
        trace.append(optimizer.active_block_index)
        train(model, optimizer, range(step, step + 1), scheduler)
    final, end_state = weights(model), flat_state(optimizer.state_dict())
    for step, (model_state, optimizer_state, scheduler_state) in enumerate(saved):
        resumed, other, other_scheduler = make(dtype, **dict(settings))
        train(resumed, other, range(100, 100 + step % 5), other_scheduler)  # whatever it did before is replaced
        if step % 2:
            other.load_state_dict(optimizer_state)
            resumed.load_state_dict(model_state)
        else:
            resumed.load_state_dict(model_state)
            other.load_state_dict(optimizer_state)
        other_scheduler.load_state_dict(scheduler_state)
        assert flat_state(other.state_dict()) == flat_state(optimizer_state)
        assert other.active_block_index == trace[step]
        train(resumed, other, range(step, STEPS), other_scheduler)
        assert_same_bits(weights(resumed), final)
        assert flat_state(other.state_dict()) == end_state
        other.close()


def test_resume_without_the_residuals_would_not_be_bitwise():
    """The mutant that shows the test above can fail."""
    dtype, settings = CASES["split"]
    model, optimizer, scheduler = make(dtype, **settings)
    train(model, optimizer, range(8), scheduler)
    state = through_a_file([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
    for entry in state[1]["state"].values():
        entry["split"].zero_()
    train(model, optimizer, range(8, STEPS), scheduler)
    resumed, other, other_scheduler = make(dtype, **settings)
    resumed.load_state_dict(state[0])
    other.load_state_dict(state[1])
    other_scheduler.load_state_dict(state[2])
    train(resumed, other, range(8, STEPS), other_scheduler)
    with pytest.raises(AssertionError, match="differs in"):
        assert_same_bits(weights(resumed), weights(model))


@pytest.mark.parametrize("moments", ["visit", "run"])
def test_an_optimizer_loads_its_own_state_without_a_change(moments):
    """accelerate does so when it prepares an optimizer; the state's tensors are then the live ones."""
    model, optimizer, scheduler = make(BF16, switch_every=3, moments=moments)
    train(model, optimizer, range(8), scheduler)
    before = flat_state(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert flat_state(optimizer.state_dict()) == before


def test_the_saved_schedule_and_hyper_parameters_win():
    _, optimizer, _ = make(BF16, switch_every=3, seed=1)
    state = through_a_file(optimizer.state_dict())
    _, other, _ = make(BF16, switch_every=5, seed=2)
    other.param_groups[0]["lr"] = 7.0
    other.load_state_dict(state)
    assert flat_state(other.state_dict()) == flat_state(state)


def test_a_fresh_state_holds_no_tensors():
    """Frameworks move every tensor of the state to the device before the first step."""
    _, optimizer, _ = make(BF16)
    assert optimizer.state_dict()["state"] == {}


def refused(message, change=None, source=None, **target):
    """Loading into `target` fails with `message` and leaves weights and state as they were."""
    _, optimizer, _ = make(BF16, **(source or {}))
    set_gradients(optimizer, 0)
    optimizer.step()
    state = through_a_file(optimizer.state_dict())
    if change:
        change(state)
    model, other, _ = make(target.pop("dtype", BF16), **target)
    set_gradients(other, 5)
    other.step()
    before, own = weights(model), flat_state(other.state_dict())
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    assert_same_bits(weights(model), before)
    assert flat_state(other.state_dict()) == own


def test_another_rule_partition_or_moment_life_is_refused():
    refused("saved with rule='adamw', this optimizer has 'sgd'", rule="sgd")
    refused("saved with moments='visit'", moments="run")
    refused(r"Only in this optimizer: embed_tokens.weight", partition=dict(embeddings=True))
    refused("another partition or model. Only in the state: layers.0.down.weight", partition=dict(max_bytes=128))
    refused("blocks that differ", blocks=[["layers.0"], ["layers.1", "layers.2"]])
    refused("resumes only under a callable", schedule=lambda step: 0)


def test_another_codec_is_refused():
    refused("to hold 'master'.*got keys", format="master")


def test_damaged_state_is_refused():
    first = "layers.0.up.weight"

    def shorten(state):
        entry = state["state"][next(iter(state["state"]))]
        entry["split"] = entry["split"].flatten()[:3]

    def cast(state):
        entry = state["state"][next(iter(state["state"]))]
        entry["exp_avg"] = entry["exp_avg"].bfloat16()

    refused("expected state .* to hold 'split'", shorten)
    refused("to hold 'exp_avg', .* of torch.float32; got .* of torch.bfloat16", cast)
    refused("in no block of this optimizer", lambda state: state["state"].update({first + "x": {}}))
    refused("expected a state dict of BlockAdam", lambda state: state.pop("badam_kernels"))
    refused("parameter group 0 differs", lambda state: state["param_groups"][0]["params"].pop())
    refused("has 1 parameter groups, this optimizer 2", lambda state: state["param_groups"].pop())


def test_every_wrong_field_is_refused_before_anything_changes():
    def header(**fields):
        return lambda state: state["badam_kernels"].update(fields)

    def schedule(**fields):
        return lambda state: state["badam_kernels"]["schedule"].update(fields)

    def group(**fields):
        return lambda state: state["param_groups"][0].update(fields)

    def step(value):
        return lambda state: next(iter(state["state"].values())).update(step=value)

    refused("global_step 'x'", header(global_step="x"))
    refused("global_step -5", header(global_step=-5))
    refused("9 blocks", schedule(num_blocks=9))
    refused("schedule does not fit: switch_every", schedule(switch_every=0))
    refused("schedule does not fit", schedule(unknown=1))
    refused("has moments of other parameters", header(global_step=3 * 100), source=dict(seed=1), seed=1)
    refused("step of .* to be an int", step(torch.tensor(1.0)))
    refused("step of .* to be an int", step(-1))
    refused("lr must be finite", group(lr=float("nan")))
    refused("betas must be two numbers", group(betas=(2, 3)))
    refused("lacks param_groups", lambda state: state.pop("param_groups"))
    refused("lacks schedule", lambda state: state["badam_kernels"].pop("schedule"))
    for entry in (None, []):
        with pytest.raises(ValueError, match="expected a state dict of BlockAdam"):
            make(BF16)[1].load_state_dict(entry)


def test_a_loaded_learning_rate_tensor_is_not_shared():
    model = tiny()
    optimizer = BlockAdam(model.named_parameters(), lr=torch.tensor(0.5))
    other = BlockAdam(tiny().named_parameters())
    other.load_state_dict(optimizer.state_dict())
    other.param_groups[0]["lr"].fill_(7.0)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_state_dict_hooks_run():
    _, optimizer, _ = make(BF16)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("pre save"))
    optimizer.register_state_dict_post_hook(lambda opt, state: state | {"mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda opt, state: seen.append(("pre load", state["mine"])))
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append("post load"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["pre save", ("pre load", 1), "post load"]
