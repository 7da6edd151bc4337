"""badam 1.4 itself and the drop-in side by side on small models, row by row of what badam does and what is right instead."""

from __future__ import annotations

import copy
import gc
import logging
import random
import warnings

import pytest
import torch
from torch import nn

badam = pytest.importorskip("badam", reason="compares with badam itself")

from badam_kernels.integrations.badam import BAdamCallback, BlockOptimizer, BlockOptimizerRatio  # noqa: E402

from models import assert_same_bits, loss_of, tiny, weights  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("little_garbage"),
    pytest.mark.filterwarnings(
        "ignore:BAdam expect model:UserWarning",
        "ignore:the first visit has:UserWarning",
        "ignore:weight decay is:UserWarning",
        "ignore:Sparse invariant checks:UserWarning",
    ),
]
BADAM, OURS = badam.BlockOptimizer, BlockOptimizer


def groups_of(model, decay: float = 0.1) -> list[dict]:
    """As LLaMA-Factory makes them: without decay first."""
    params = list(model.parameters())
    vectors, matrices = [p for p in params if p.dim() <= 1], [p for p in params if p.dim() > 1]
    return [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": decay}]


def wrap(kind, model, base=None, **settings):
    base = base or torch.optim.AdamW(groups_of(model), lr=1e-2)
    settings = dict(switch_mode="ascending", switch_block_every=4, verbose=0) | settings
    return kind(base, list(model.named_parameters()), **settings)


def ratio(kind, model, decay: float = 0.0, **settings):
    groups = [{"params": list(model.parameters()), "weight_decay": decay}]
    return kind(groups, list(model.named_parameters()), **dict(switch_every=3, verbose=0) | settings)


def step(model, optimizer, gradient: float = 1.0) -> dict[str, torch.Tensor]:
    """One step with this gradient in all that trains; how far each parameter that moved did."""
    before = copy.deepcopy(dict(model.named_parameters()))
    for param in model.parameters():
        param.grad = torch.full_like(param, gradient) if param.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    return {n: before[n].detach() - p.detach() for n, p in model.named_parameters() if not torch.equal(p, before[n])}


def trainable(model) -> set[str]:
    return {name for name, param in model.named_parameters() if param.requires_grad}


def trace(model, optimizer, steps: int) -> str:
    """The layer that trains at each of `steps` steps."""
    seen = ""
    for _ in range(steps):
        seen += "".join(sorted({name.split(".")[1] for name in trainable(model)}))
        step(model, optimizer)
    return seen


def named(*names: str) -> nn.Module:
    """A model with a Linear(2, 2) under each of these dotted names."""
    model = nn.Module()
    for name in names:
        *path, last = name.split(".")
        at = model
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        at.add_module(last, nn.Linear(2, 2))
    return model


# --- what is asked for: decay, lr -------------------------------------------------------------------------------------


def test_row_1_weight_decay_per_group():
    for kind in (BADAM, OURS):
        model = tiny()
        base = torch.optim.AdamW(groups_of(model, 0.5), lr=0.25)
        start = copy.deepcopy(dict(model.named_parameters()))
        moved = step(model, wrap(kind, model, base), gradient=0.0)
        decay = {n: 0.01 if kind is BADAM else 0.5 * (start[n].dim() > 1) for n in start if n.startswith("layers.0")}
        expected = {n: 0.25 * d * start[n].detach() for n, d in decay.items()}
        assert moved.keys() == {n for n, e in expected.items() if e.any()}
        for name, delta in moved.items():
            torch.testing.assert_close(delta, expected[name], rtol=1e-5, atol=1e-7)


def test_row_1_weight_decay_in_the_ratio_mode():
    """badam's takes none, not even a default: with zero gradients nothing moves."""
    for kind, expected in ((badam.BlockOptimizerRatio, 0), (BlockOptimizerRatio, 18)):
        model = tiny()
        nn.init.ones_(model.layers[0].up.weight)
        optimizer = ratio(kind, model, decay=0.5, lr=0.25, update_ratio=0.25, preserve_threshold=0)
        sum((0 * p).sum() for p in model.parameters() if p.requires_grad).backward()
        optimizer.step()
        moved = model.layers[0].up.weight.flatten() != 1
        assert moved.sum() == expected and model.layers[0].up.weight.flatten()[moved].eq(1 - 0.25 * 0.5).all()


def test_row_2_lr_per_group():
    """With gradient 1, no eps and no decay, the first step is lr."""
    for kind, expected in ((BADAM, {0.25}), (OURS, {0.25, 0.5})):
        model = tiny()
        vectors, matrices = groups_of(model, 0.0)
        base = torch.optim.AdamW([vectors | {"lr": 0.25}, matrices], lr=0.5, eps=0.0, weight_decay=0.0)
        moved = step(model, wrap(kind, model, base))
        assert {round(float(delta.mean()), 3) for delta in moved.values()} == expected


def test_row_2_a_scheduler_on_the_inner_optimizer():
    """Warm-up from 0. On the wrapper, badam follows it."""
    for kind, inner, expected in ((BADAM, True, [0.0] * 3), (OURS, True, [0.0, 0.25, 0.5]), (BADAM, False, [0.0, 0.25, 0.5])):
        model = tiny()
        base = torch.optim.AdamW(groups_of(model, 0.0), lr=0.25, eps=0.0, weight_decay=0.0)
        if inner:
            scheduler = torch.optim.lr_scheduler.LambdaLR(base, float)
        optimizer = wrap(kind, model, base)
        if not inner:
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, float)
        found = []
        for _ in range(3):
            found.append(round(float(step(model, optimizer).get("layers.0.up.weight", torch.zeros(1)).mean()), 3))
            scheduler.step()
        assert found == expected


# --- masters and visits -----------------------------------------------------------------------------------------------


def test_row_3_masters_at_a_switch():
    """Weight 1, gradient 1, lr 1e-5, five visits of 50 steps: the bf16 weight moves when its master has, at active step 196."""
    for kind, expected in ((BADAM, None), (OURS, 196)):
        model = named("layers.0", "layers.1").to(torch.bfloat16)
        for param in model.parameters():
            nn.init.ones_(param)
        base = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
        optimizer = wrap(kind, model, base, switch_block_every=50)
        active, first = 0, None
        while active < 250:
            active += "layers.0.weight" in trainable(model)
            if "layers.0.weight" in step(model, optimizer) and first is None:
                first = active
        assert first == expected


def test_row_4_the_first_visit():
    for kind, expected in ((BADAM, "0001111222200"), (OURS, "0000111122220")):
        model = tiny()
        assert trace(model, wrap(kind, model), 13) == expected


INTERVALS = {-1: "012012", None: TypeError, 0: ZeroDivisionError, -2: "011220"}


@pytest.mark.parametrize("every", INTERVALS)
def test_row_5_intervals_that_are_none(every):
    """-1 and None: never switch, as LLaMA-Factory's help says of -1. The others mean nothing."""
    today, model = INTERVALS[every], tiny()
    if isinstance(today, str):
        assert trace(model, wrap(BADAM, model, switch_block_every=every), 6) == today
    else:
        optimizer = wrap(BADAM, model, switch_block_every=every)
        with pytest.raises(today):
            step(model, optimizer)
    model = tiny()
    if every in (-1, None):
        assert trace(model, wrap(OURS, model, switch_block_every=every), 6) == "000000"
    else:
        with pytest.raises(ValueError, match="switch_every must be at least 1"):
            wrap(OURS, model, switch_block_every=every)


@pytest.mark.parametrize(
    ("settings", "right"),
    [(dict(switch_mode="fixed"), {"000"}), (dict(switch_mode="random", start_block=1), {"102", "120"})],
)
def test_row_6_fixed_and_random(settings, right):
    with pytest.raises(AttributeError):
        wrap(BADAM, tiny(), **settings)
    model = tiny()
    assert trace(model, wrap(OURS, model, switch_block_every=1, **settings), 3) in right


def test_row_6_start_block_out_of_range():
    with pytest.raises(IndexError):
        wrap(BADAM, tiny(), start_block=3)
    with pytest.raises(ValueError, match="start_block must be in"):
        wrap(OURS, tiny(), start_block=3)


# --- which parameters train -------------------------------------------------------------------------------------------


def test_row_7_what_the_user_froze():
    for kind, expected in ((BADAM, "0120"), (OURS, "0202")):
        model = tiny()
        model.layers[1].requires_grad_(False)
        assert trace(model, wrap(kind, model, switch_block_every=1), 4) == expected


LAYERS = {
    "GPT-2": ["transformer.h.0.mlp", "transformer.h.1.mlp"],
    "BERT": ["bert.encoder.layer.0.output", "bert.encoder.layer.1.output"],
    "T5": ["encoder.block.0.layer", "encoder.block.1.layer", "decoder.block.0.layer"],
    "vision": ["visual.blocks.0.mlp", "visual.blocks.1.mlp"],
}


@pytest.mark.parametrize("family", LAYERS)
def test_row_8_names_of_layers(family):
    names = LAYERS[family]
    with pytest.raises(IndexError):
        wrap(BADAM, named(*names), switch_mode="descending")
    optimizer = wrap(OURS, named(*names))
    assert [{s.name.rpartition(".")[0] for s in block.spans} for block in optimizer.blocks] == [{name} for name in names]


@pytest.mark.parametrize("prefixes", [None, [["layers.0."], ["layers.1."]]], ids=["found", "given"])
def test_row_8_two_stacks_of_layers(prefixes):
    names = ["layers.0", "layers.1", "vision_model.layers.0", "vision_model.layers.1"]
    for kind, expected in ((BADAM, {"layers.0", "vision_model.layers.0"}), (OURS, {"layers.0"})):
        model = named(*names)
        optimizer = wrap(kind, model, block_prefix_list=prefixes)
        assert {name.rpartition(".")[0] for name in trainable(model)} == expected
        assert optimizer.block_num == (4 if kind is OURS and prefixes is None else 2)


def test_row_9_a_prefix_without_match():
    model = tiny()
    wrap(BADAM, model, block_prefix_list=[["model.layers.0."]])
    assert not trainable(model)
    with pytest.raises(ValueError, match="'model.layers.0.' in block 0 matches no parameter"):
        wrap(OURS, tiny(), block_prefix_list=[["model.layers.0."]])


def test_row_9_a_generator_of_parameters():
    for kind in (BADAM, OURS):
        model = tiny()
        optimizer = kind(torch.optim.AdamW(model.parameters()), model.named_parameters(), switch_mode="ascending", verbose=0)
        moved = step(model, optimizer)
        assert {name.split(".")[1] for name in moved} == (set() if kind is BADAM else {"0"})


def test_row_9_lora_in_no_block():
    class Endless(BADAM):
        def _update_active_block_idx(self):
            super()._update_active_block_idx()
            self.looked = getattr(self, "looked", 0) + 1
            if self.looked == 100:
                raise TimeoutError

    model = tiny()
    model.lora_A = nn.Linear(2, 2)
    with pytest.raises(TimeoutError):
        wrap(Endless, model)
    with pytest.raises(ValueError, match="with 'lora' in their names in some block"):
        wrap(OURS, model)


def test_row_10_the_head_alone():
    """Final norm and head; in badam, whatever is no layer and no embedding asked for, and what has such a name inside its own."""
    head = {"norm.weight", "norm.bias", "lm_head.weight"}
    also = {"embed_tokens.weight", *(f"layers.{i}.norm.{kind}" for i in range(3) for kind in ("weight", "bias"))}
    for kind, expected in ((BADAM, head | also), (OURS, head)):
        model = tiny()
        optimizer = wrap(kind, model, switch_mode="descending", include_lm_head=True)
        assert trainable(model) == expected and optimizer.block_num == 4


def test_row_10_the_final_norm_in_the_ratio_mode():
    """Only by layers is it never trained in badam: its ratio mode trains it without being asked to."""
    for kind, expected in ((badam.BlockOptimizerRatio, True), (BlockOptimizerRatio, False)):
        model = tiny()
        ratio(kind, model)
        assert model.norm.weight.requires_grad == expected and not model.lm_head.weight.requires_grad
    model = tiny()
    ratio(BlockOptimizerRatio, model, include_lm_head=True)
    assert model.norm.weight.requires_grad and model.lm_head.weight.requires_grad


def tied():
    model = tiny()
    model.lm_head.weight = model.embed_tokens.weight
    return model


def test_row_10_tied_weights():
    """Under both names, badam thaws them by one and freezes them by the other; the ratio mode looks for the head's own."""
    for kind in (BADAM, OURS):
        model = tied()
        base = torch.optim.AdamW(model.parameters())
        both = list(model.named_parameters(remove_duplicate=False))
        places = dict(include_embedding=True, include_lm_head=True)
        optimizer = kind(base, both, switch_mode="ascending", switch_block_every=1, verbose=0, **places)
        if kind is BADAM:
            with pytest.raises(AssertionError, match="gradient is None"):
                step(model, optimizer)
        else:
            assert ["embed_tokens.weight" in step(model, optimizer) for _ in range(5)] == [True, False, False, False, False]
    with pytest.raises(AttributeError, match="requires_grad_"):
        ratio(badam.BlockOptimizerRatio, tied())
    assert ratio(BlockOptimizerRatio, tied()).lm_head_layer is None


def test_row_11_a_parameter_without_gradient(caplog):
    for kind in (BADAM, OURS):
        model = tiny()
        optimizer = wrap(kind, model)
        loss_of(model, 0).backward()
        model.layers[0].up.weight.grad = None
        before = weights(model)
        if kind is BADAM:
            with pytest.raises(AssertionError, match="gradient is None"):
                optimizer.step()
            continue
        with caplog.at_level(logging.WARNING, "badam_kernels"):
            optimizer.step()
        changed = {name for name, now in weights(model).items() if not torch.equal(now, before[name])}
        assert changed == trainable(model) - {"layers.0.up.weight"}
        assert "no gradient for 1 parameter(s) of the active block, skipped: layers.0.up.weight" in caplog.text


# --- fp16, checkpointing, accumulation --------------------------------------------------------------------------------


def test_row_12_fp16_under_a_scaler():
    model, reference = tiny(torch.float16), tiny()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = wrap(BADAM, model)
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(optimizer)
    model, scaler = tiny(torch.float16), torch.amp.GradScaler("cpu", init_scale=8.0)
    # With an eps as large as the gradients, their scale matters.
    optimizer, other = (wrap(OURS, m, torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1.0)) for m in (model, reference))
    scaler.scale(torch.zeros(()))  # allocates the scale, as the loss does
    for gradient in (8.0, 2.0, float("inf"), -4.0, 8.0, 8.0):
        for param in model.parameters():
            param.grad = torch.full_like(param, gradient) if param.requires_grad else None
        before, done = weights(model), optimizer.global_step
        scaler.step(optimizer)
        scaler.update(8.0)
        if gradient == float("inf"):
            assert_same_bits(weights(model), before)
            assert optimizer.global_step == done
        else:
            step(reference, other, gradient / 8)
    assert optimizer.global_step == other.global_step == 5 and optimizer.current_block_idx == other.current_block_idx == 1
    for a, b in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(a.float(), b, rtol=2**-11, atol=2**-24)


CHECKPOINTING = {
    ("none", True): False,
    ("none", False): False,
    ("non-reentrant", True): False,
    ("non-reentrant", False): True,
    ("reentrant", True): (RuntimeError, "element 0 of tensors does not require grad"),
    ("reentrant", False): True,
    ("its own", True): (AttributeError, "'functools.partial' object has no attribute '__self__'"),
}
"""With the callback or without: what badam raises, or whether everything below the active block enters the graph.

Its own: the `gradient_checkpointing_enable` that its callback puts into the model."""


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("checkpointing", "with_callback"), CHECKPOINTING)
def test_row_13_gradient_checkpointing(checkpointing, with_callback):
    from trainers import llama

    def trained(kind, callback) -> tuple[set[str], bool]:
        """The layers that two sweeps changed, and whether anything below the active block entered the graph."""
        model, below = llama().train(), []
        optimizer = wrap(kind, model, switch_mode="descending", switch_block_every=1)
        if "reentrant" in checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        if with_callback:
            callback.on_train_begin(None, None, None, model=model, optimizer=optimizer)
        if checkpointing == "its own":
            model.gradient_checkpointing_enable()
        model.model.embed_tokens.register_forward_hook(lambda module, args, output: below.append(output.requires_grad))
        before, tokens = weights(model), torch.arange(8).view(1, 8)
        for _ in range(6):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        changed = {name.split(".")[2] for name, now in weights(model).items() if not torch.equal(now, before[name])}
        return changed, any(below)

    assert trained(OURS, BAdamCallback()) == ({"0", "1", "2"}, False)
    today = CHECKPOINTING[checkpointing, with_callback]
    if isinstance(today, bool):
        assert trained(BADAM, badam.BAdamCallback()) == ({"0", "1", "2"}, today)
    else:
        with pytest.raises(today[0], match=today[1]):
            trained(BADAM, badam.BAdamCallback())


def test_row_14_accumulation_across_a_switch():
    """No difference: the sum of micro-batches is the big batch, and no gradient stays in an idle block."""
    for kind in (BADAM, OURS):
        big, small = tiny(), tiny()
        one, other = wrap(kind, big, switch_block_every=1), wrap(kind, small, switch_block_every=1)
        for t in range(4):
            (sum(loss_of(big, 10 * t + i) for i in range(2)) / 2).backward()
            for i in range(2):
                (loss_of(small, 10 * t + i) / 2).backward()
            one.step()
            other.step()
            assert all(p.grad is None for p in small.parameters() if not p.requires_grad)
            one.zero_grad()
            other.zero_grad()
        for a, b in zip(big.parameters(), small.parameters()):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# --- state ------------------------------------------------------------------------------------------------------------


def test_row_15_resuming():
    """Saved after two steps of the second visit, whose gradients of 2 make moments of 0.38."""
    for kind in (BADAM, OURS):
        model = named("layers.0", "layers.1", "layers.2")
        optimizer = wrap(kind, model)
        for gradient in [1] * (3 if kind is BADAM else 4) + [2] * 2:
            step(model, optimizer, gradient)
        resumed = copy.deepcopy(model)
        resumed.requires_grad_(True)
        other = wrap(kind, resumed)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        here = {"layers.0.weight", "layers.0.bias"} if kind is BADAM else {"layers.1.weight", "layers.1.bias"}
        assert trainable(resumed) == here
        held = (
            [other.base_optimizer.state[hp]["exp_avg"] for hp in other.param_idx2hp.values()]
            if kind is BADAM
            else [slots["exp_avg"] for slots in other.state_dict()["state"].values() if "exp_avg" in slots]
        )
        assert len(held) == 2 and all(torch.allclose(m, torch.tensor(0.38)) for m in held)
        step(model, optimizer)
        step(resumed, other)
        same = all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters()))
        assert same == (kind is OURS)


@pytest.mark.parametrize("layer", [0, 1], ids=["active", "idle"])
def test_row_16_weights_edited_after_wrapping(layer):
    for kind in (BADAM, OURS):
        model = tiny(torch.bfloat16)
        optimizer = wrap(kind, model, torch.optim.AdamW(model.parameters(), lr=0.0))
        param = model.layers[layer].up.weight
        old, wanted = param.detach().clone(), torch.full_like(param, 0.75)
        param.data.copy_(wanted)
        for _ in range(6):
            step(model, optimizer)
        assert torch.equal(param, old if kind is BADAM and layer == 0 else wanted)


def test_row_17_random_order():
    """One of 120 orders: in badam from torch's global generator, which moves on; in ours the same whatever that is."""
    for kind in (BADAM, OURS):
        orders = set()
        for seed in range(4):
            torch.manual_seed(seed)
            random.seed(seed)
            model = tiny(layers=5)
            before = torch.get_rng_state(), random.getstate()
            optimizer = wrap(kind, model, switch_mode="random", switch_block_every=1)
            orders.add(trace(model, optimizer, 5))
            assert (torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]) == (kind is OURS)
        assert len(orders) == (4 if kind is BADAM else 1)


def test_row_18_memory():
    """Flat in both. badam: 12 bytes per element of the active block; ours: 2 of all, and 8 of the largest, in multiples of 16."""
    sizes, padded = ([sum(-(-p.numel() // n) * n for p in layer.parameters()) for layer in tiny().layers] for n in (1, 16))
    model = tiny(torch.bfloat16)
    optimizer, held = wrap(BADAM, model, switch_block_every=2), []
    for _ in range(12):
        step(model, optimizer)
        moments = [s[m] for s in optimizer.base_optimizer.state.values() for m in ("exp_avg", "exp_avg_sq")]
        held.append(sum(t.nbytes for t in [*optimizer.param_idx2hp.values(), *moments]))
    assert held[:6] == held[6:] and max(held) == 12 * max(sizes)
    model = tiny(torch.bfloat16)
    optimizer = wrap(OURS, model, switch_block_every=2)
    for _ in range(12):
        step(model, optimizer)
        report = optimizer.memory()
        assert report["w"] == {"host_pageable": 2 * sum(sizes)}
        assert report["m"] == report["v"] == {"host_pageable": 4 * max(padded)}


# --- the surroundings -------------------------------------------------------------------------------------------------


def test_row_19_closure():
    for kind in (BADAM, OURS):
        model = tiny()
        optimizer = wrap(kind, model)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        if kind is BADAM:
            with pytest.raises(AssertionError, match="gradient is None"):
                optimizer.step(closure)
        else:
            expected = loss_of(model, 0)
            assert optimizer.step(closure) == expected and loss_of(model, 0) < expected


def test_row_19_what_is_left_when_the_optimizer_is_gone():
    for kind in (BADAM, OURS):
        model = tiny()
        optimizer = wrap(kind, model)
        active = trainable(model)
        del optimizer
        gc.collect()
        assert trainable(model) == (active if kind is BADAM else {name for name, _ in model.named_parameters()})


def test_row_19_what_the_callback_leaves_in_the_model():
    from trainers import llama

    patched = {"gradient_checkpointing_enable"}
    for kind, callback, left in ((BADAM, badam.BAdamCallback(), patched), (OURS, BAdamCallback(), set())):
        model = llama()
        optimizer = wrap(kind, model)
        before = set(vars(model))
        callback.on_train_begin(None, None, None, model=model, optimizer=optimizer)
        callback.on_train_end(None, None, None, model=model, optimizer=optimizer)
        assert set(vars(model)) - before == left


def test_row_20_badams_habits_on_demand():
    """bug_compatible gives badam's visits and decay, in silence; without it one warning has both numbers."""
    found = []
    for kind, settings in ((BADAM, {}), (OURS, dict(bug_compatible=True))):
        model = tiny()
        base = torch.optim.AdamW(groups_of(model, 0.5), lr=0.25)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if kind is OURS else "ignore")
            optimizer = wrap(kind, model, base, **settings)
        decayed = step(model, optimizer, gradient=0.0)
        found.append((decayed, trace(model, optimizer, 12)))
    (theirs, visits), (ours, same) = found
    assert visits == same == "001111222200"
    assert ours.keys() == theirs.keys()
    for name, delta in theirs.items():
        torch.testing.assert_close(ours[name], delta, rtol=1e-5, atol=1e-7)
    both = r"first visit has 4 steps \(badam 1.4: 3\); weight decay is 0.0, 0.1 .*\(badam 1.4: 0.01 for all\)"
    with pytest.warns(UserWarning, match=both) as said:
        wrap(OURS, tiny())
    assert len(said) == 1


# --- what no row names ------------------------------------------------------------------------------------------------


def test_beyond_the_rows_the_current_block():
    """badam's current_block_idx is the block that comes next; the prefixes are those of what trains in both."""
    for kind, current in ((BADAM, 1), (OURS, 0)):
        model = tiny()
        optimizer = wrap(kind, model)
        assert optimizer.current_block_idx == current and optimizer.active_param_prefixs == ["layers.0."]


def test_beyond_the_rows_small_parameters_in_the_ratio_mode():
    """preserve_threshold: parameters with fewer elements train whole. In badam it changes nothing."""
    for kind, expected in ((badam.BlockOptimizerRatio, 18), (BlockOptimizerRatio, 72)):
        model = tiny()
        optimizer = ratio(kind, model, lr=0.25, update_ratio=0.25, preserve_threshold=100)
        before = model.layers[0].up.weight.detach().clone()
        loss_of(model, 0).backward()
        optimizer.step()
        assert (model.layers[0].up.weight != before).sum() == expected
