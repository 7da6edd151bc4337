"""transformers' Trainer with BlockAdam: ``Trainer(..., optimizers=(BlockAdam(...), None))`` is the plain loop."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import time
from pathlib import Path
from types import MethodType

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers for its Trainer")

from accelerate.state import AcceleratorState  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from trainers import BATCH, Reached, Sequences, llama, logged, plain_loop, trainer  # noqa: E402

from badam_kernels import BlockAdam  # noqa: E402
from badam_kernels.integrations.badam import BAdamCallback, BlockOptimizer, clip_grad_norm_old_version  # noqa: E402
from badam_kernels.integrations.transformers import BlockAdamCallback, last_complete_checkpoint  # noqa: E402

from models import assert_same_bits, flat_state, weights  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def no_precision_left_over(monkeypatch):
    """TrainingArguments(bf16=True) of some versions sets this for the whole process."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def block_adam(model, **settings):
    return BlockAdam(model.named_parameters(), **dict(lr=1e-2, switch_every=2, schedule="ascending") | settings)


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("precision", ["fp32", "bf16 weights", "bf16 autocast", "fp16 autocast"])
def test_losses_are_those_of_a_plain_loop(precision, checkpointing, accumulate, clip, tmp_path):
    """Two sweeps of three blocks. Recomputed activations and a sum over micro-batches may differ in the last bits."""
    steps, autocast = 7, {"bf16 autocast": BF16, "fp16 autocast": FP16}.get(precision)
    dtype = BF16 if precision == "bf16 weights" else torch.float32
    model = llama(dtype)
    expected = plain_loop(model, block_adam(model), steps=steps, accumulate=accumulate, clip=clip, autocast=autocast)
    model = llama(dtype)
    optimizer = block_adam(model)
    settings = dict(steps=steps, accumulate=accumulate, clip=clip, checkpointing=checkpointing, bf16=autocast is BF16)
    settings["loss_scale"] = 2.0**10 if autocast is FP16 else None
    runner = trainer(tmp_path, model, optimizer, callbacks=[BlockAdamCallback(optimizer)], **settings)
    runner.train()
    losses = [entry["loss"] for entry in logged(runner)]
    tolerance = 1e-5 if precision == "fp32" else 2e-3
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=1e-4)  # the Trainer's log rounds to four digits
    assert optimizer.global_step == steps
    assert [entry["block"] for entry in logged(runner)] == [0, 0, 1, 1, 2, 2, 0]


@pytest.mark.parametrize("kind", ["BlockAdam", "BlockOptimizer"])
@pytest.mark.parametrize("callback", [True, False], ids=["callback", "no callback"])
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
def test_nothing_below_the_active_block_enters_the_graph(checkpointing, callback, kind, tmp_path):
    """Contract row 13: every block trains, and the backward pass ends at it."""
    model = llama()
    if kind == "BlockAdam":
        optimizer, callbacks = block_adam(model, schedule="descending", switch_every=1), [BlockAdamCallback]
    else:
        base = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = BlockOptimizer(base, list(model.named_parameters()), switch_block_every=1, verbose=0)
        callbacks = [BAdamCallback]
    reached, seen, before = Reached(model), [], weights(model)

    class Watch(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            seen.append(reached.take())

    callbacks = [*(callbacks if callback else ()), Watch()]
    trainer(tmp_path, model, optimizer, steps=6, callbacks=callbacks, checkpointing=checkpointing).train()
    assert seen == [["2"], ["1", "2"], ["0", "1", "2"]] * 2
    after = weights(model)
    assert all(not torch.equal(after[n], before[n]) for n in before if n.startswith("model.layers") and n.endswith("proj.weight"))


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
def test_without_a_callback_every_block_trains_the_same(checkpointing, tmp_path):
    model = llama()
    expected = plain_loop(model, block_adam(model), steps=6)
    model = llama()
    runner = trainer(tmp_path, model, block_adam(model), steps=6, checkpointing=checkpointing)
    runner.train()
    torch.testing.assert_close([entry["loss"] for entry in logged(runner)], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, FP16], ids=["fp32 weights", "fp16 weights"])
def test_fp16_overflows_change_nothing_and_do_not_advance_block_or_scheduler(dtype, tmp_path):
    """The first losses are scaled by too much. torch unscales no fp16 gradient, so there clipping is replaced, as for badam."""
    steps, model, skipped = 12, llama(dtype), []
    settings = dict(switch_block_every=2, switch_mode="ascending", verbose=0)
    optimizer = BlockOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), list(model.named_parameters()), **settings)

    class Watch(BAdamCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            super().on_step_begin(args, state, control, **kwargs)
            self.before = optimizer.global_step, weights(model), flat_state(optimizer.state_dict())

        def on_step_end(self, args, state, control, **kwargs):
            step, bits, held = self.before
            if optimizer.global_step == step:
                skipped.append(state.global_step)
                assert_same_bits(weights(model), bits)
                now = flat_state(optimizer.state_dict())
                assert now | held == now, "no more than that a visit may have begun"

    runner = trainer(tmp_path, model, optimizer, steps=steps, callbacks=[Watch()], clip=1.0, loss_scale=2.0**24)
    if dtype is FP16:
        runner.accelerator.clip_grad_norm_ = MethodType(clip_grad_norm_old_version, runner.accelerator)
    runner.train()
    blocks = [entry["block"] for entry in logged(runner)]
    assert 2 <= len(skipped) <= 8 and optimizer.global_step == steps - len(skipped) == runner.lr_scheduler.last_epoch
    trained = [block for step, block in enumerate(blocks, 1) if step not in skipped]
    assert trained == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2][: len(trained)]


def test_the_callback_logs_what_trained_and_what_is_held(tmp_path):
    model = llama(BF16)
    optimizer = block_adam(model)
    runner = trainer(tmp_path, model, optimizer, steps=8, callbacks=[BlockAdamCallback])
    runner.train()
    entries = logged(runner)
    assert [entry["visit"] for entry in entries] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert entries[2]["block_name"] == "model.layers.1"
    held = sum(size for places in optimizer.memory().values() for size in places.values())
    assert entries[-1]["optimizer_bytes"] == entries[-1]["host_bytes"] == held


@pytest.mark.parametrize(("lr", "low", "high"), [(1e-6, 0.0, 0.2), (1e-2, 0.95, 1.05)])
def test_the_callback_says_how_much_of_an_update_shows_in_16_bits(lr, low, high, tmp_path):
    """At a small lr most of a visit lives in the masters alone."""
    model = llama(BF16)
    runner = trainer(tmp_path, model, block_adam(model, lr=lr, switch_every=4), steps=8, callbacks=[BlockAdamCallback])
    runner.train()
    assert all(low <= entry["surviving_update"] <= high for entry in logged(runner))
    model = llama()
    runner = trainer(tmp_path, model, block_adam(model), steps=1, callbacks=[BlockAdamCallback])
    runner.train()
    assert "surviving_update" not in logged(runner)[0]


@pytest.mark.parametrize("kind", ["BlockAdam", "BlockOptimizer"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_resuming_from_a_checkpoint_is_bitwise_the_uninterrupted_run(kind, accumulate, tmp_path):
    def start(out):
        model = llama(BF16)
        if kind == "BlockAdam":
            optimizer, callback = block_adam(model, schedule="random", switch_every=3, moments="run"), BlockAdamCallback
        else:
            base = torch.optim.AdamW(model.parameters(), lr=1e-2)
            named = list(model.named_parameters())
            optimizer = BlockOptimizer(base, named, switch_block_every=3, switch_mode="random", verbose=0)
            callback = BAdamCallback
        settings = dict(steps=8, accumulate=accumulate, clip=1.0, save_strategy="steps", save_steps=1, save_total_limit=20)
        return model, optimizer, trainer(out, model, optimizer, callbacks=[callback], **settings)

    model, optimizer, runner = start(tmp_path / "whole")
    runner.train()
    for step in (3, 5):
        resumed, other, again = start(tmp_path / f"resumed {step}")
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert_same_bits(weights(resumed), weights(model))
        assert flat_state(other.state_dict()) == flat_state(optimizer.state_dict())
        assert [entry["loss"] for entry in logged(again)] == [entry["loss"] for entry in logged(runner)]
        assert [entry["visit"] for entry in logged(again)] == [entry["visit"] for entry in logged(runner)]


def test_the_best_model_is_loaded_at_the_end_and_training_can_go_on(tmp_path):
    model = llama(BF16)
    optimizer = block_adam(model)
    settings = dict(save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True)
    runner = trainer(tmp_path, model, optimizer, steps=6, save_total_limit=1, evaluate=Sequences(4), **settings)
    runner.train()
    assert runner.state.best_model_checkpoint is not None
    kept = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert Path(runner.state.best_model_checkpoint).name in kept and len(kept) <= 2
    loaded = weights(model)
    batch = {key: torch.stack([Sequences()[i][key] for i in range(BATCH)]) for key in ("input_ids", "labels")}
    model(**batch).loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    after = weights(model)
    # By value: a zero update may turn -0 into 0.
    assert all(torch.equal(after[n].view(BF16), loaded[n].view(BF16)) for n in loaded)


def save_at_every_step(out, ready):
    """A run that does little but save; until it is killed."""
    ready.wait()
    sys.stdout = open(os.devnull, "w")
    model = llama()
    optimizer = block_adam(model)
    settings = dict(steps=10**6, save_strategy="steps", save_steps=1, save_total_limit=1)
    trainer(out, model, optimizer, **settings).train(resume_from_checkpoint=last_complete_checkpoint(out))


def test_a_run_killed_while_saving_goes_on_from_a_complete_checkpoint(tmp_path):
    """Killed at several moments; each time the next run finds what it needs and gets further."""
    context = multiprocessing.get_context("fork")
    reached = 0
    for pause in (0.0, 0.004, 0.013, 0.029):
        ready = context.Event()
        process = context.Process(target=save_at_every_step, args=(tmp_path, ready))
        process.start()
        ready.set()
        while not (tmp_path / f"checkpoint-{reached + 3}").exists():
            assert process.is_alive()
            time.sleep(0.001)
        time.sleep(pause)
        process.kill()
        process.join()
        complete = last_complete_checkpoint(tmp_path)
        assert complete is not None and int(complete.rpartition("-")[2]) > reached
        reached = int(complete.rpartition("-")[2])
        state = torch.load(os.path.join(complete, "optimizer.pt"), weights_only=True)
        assert state["badam_kernels"]["global_step"] == reached
    model = llama()
    runner = trainer(tmp_path, model, block_adam(model), steps=reached + 1)
    runner.train(resume_from_checkpoint=last_complete_checkpoint(tmp_path))
    assert runner.state.global_step == reached + 1


def test_an_unfinished_checkpoint_is_passed_over(tmp_path):
    for step, state in ((5, json.dumps({"global_step": 5})), (12, '{"global_'), (20, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")
    shutil.rmtree(tmp_path / "checkpoint-5")
    assert last_complete_checkpoint(tmp_path) is None
