"""Gradient checkpointing ends at the active block in any loop, and the model is given back as it was. See test_trainer, too."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import pickle
import weakref

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers for its models")

from torch import nn  # noqa: E402
from torch.nn.modules.module import _global_forward_pre_hooks  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from trainers import Reached, Sequences, llama, plain_loop  # noqa: E402

from badam_kernels import BlockAdam, blocks  # noqa: E402
from badam_kernels.integrations.badam import BlockOptimizerRatio  # noqa: E402

from models import assert_same_bits, weights  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
BATCH = next(iter(torch.utils.data.DataLoader(Sequences(), batch_size=2)))
TOP_DOWN = [["2"], ["1", "2"], ["0", "1", "2"]]


def block_adam(model, **settings):
    return BlockAdam(model.named_parameters(), **dict(lr=1e-2, switch_every=1, schedule="descending") | settings)


def checkpointed(model, reentrant):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()  # newer versions do so themselves
    return model.train()


def layers_of_each_step(model, optimizer, steps):
    reached, seen = Reached(model), []
    for _ in range(steps):
        model(**BATCH).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(reached.take())
    return seen


def requires_grad(model):
    """Whether the output of frozen embeddings requires grad."""
    return model.get_input_embeddings()(BATCH["input_ids"]).requires_grad


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_plain_loop_ends_at_the_active_block(reentrant, when):
    model = llama()
    if when == "before":
        checkpointed(model, reentrant)
    optimizer = block_adam(model)
    if when == "after":
        checkpointed(model, reentrant)
    assert layers_of_each_step(model, optimizer, 6) == TOP_DOWN * 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_bits_are_those_without_checkpointing(reentrant):
    model = llama()
    expected = plain_loop(model, block_adam(model), steps=7)
    model = checkpointed(llama(), reentrant)
    assert plain_loop(model, block_adam(model), steps=7) == expected


@pytest.mark.parametrize("mode", ["adjacent", "scatter"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_in_ratio_mode_bits_are_those_without_checkpointing(reentrant, mode):
    def train(model):
        settings = dict(update_ratio=0.3, mask_mode=mode, switch_every=2, lr=1e-2, verbose=0)
        optimizer = BlockOptimizerRatio(list(model.parameters()), list(model.named_parameters()), **settings)
        before = len(_global_forward_pre_hooks)
        losses = plain_loop(model, optimizer, steps=1)
        assert len(_global_forward_pre_hooks) == before - 1 and not requires_grad(model)
        return losses + plain_loop(model, optimizer, steps=6)

    expected = train(llama())
    model = checkpointed(llama(), reentrant)
    assert train(model) == expected


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_compiled_model_with_checkpointing_has_one_graph_per_block(reentrant):
    graphs = []

    def count(module, inputs):
        graphs.append(module)
        return module.forward

    gc.collect()  # hooks of optimizers that are gone would go in the middle, which is a new graph
    torch._dynamo.reset()
    model = checkpointed(llama(), reentrant)
    compiled, optimizer = torch.compile(model, backend=count), block_adam(model)
    for _ in range(6):
        compiled(**BATCH).loss.backward()
        assert all(param.grad is not None for param in optimizer._params.values() if param.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
    torch._dynamo.reset()
    assert len(graphs) == len(optimizer.blocks)


def test_evaluation_and_other_models_first_change_nothing():
    model, other = checkpointed(llama(), True), checkpointed(llama(), True)
    optimizer = block_adam(model)
    with torch.no_grad():
        model(**BATCH)
    model.model.layers[2].mlp(torch.ones(1, 16))  # a part of the active block
    other(**BATCH).loss.backward()
    assert requires_grad(other) and requires_grad(model)
    assert layers_of_each_step(model, optimizer, 3) == TOP_DOWN
    assert requires_grad(other) and not requires_grad(model)


class OwnCheckpoints(nn.Module):
    """Calls torch's checkpoint itself, reentrant, as models on the hub of before transformers 4.35 do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens, self.lm_head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.gradient_checkpointing = False

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.gradient_checkpointing else layer(x)
        return self.lm_head(x)


def test_a_model_that_checkpoints_by_itself_trains_the_same():
    def train(model):
        optimizer = block_adam(model)
        for _ in range(6):
            model(torch.arange(8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    def make_inputs_require_grads(module, args, output):
        output.requires_grad_(True)

    model = OwnCheckpoints()
    model.gradient_checkpointing = True
    model.embed_tokens.register_forward_hook(make_inputs_require_grads)
    assert_same_bits(train(model), train(OwnCheckpoints()))


class Layer(nn.Linear):
    """A layer as transformers checkpoints it."""

    def __call__(self, *args, **kwargs):
        return self._gradient_checkpointing_func(functools.partial(super().__call__, **kwargs), *args)

    def forward(self, x, bias=0.0):
        return torch.tanh(super().forward(x)) + bias


class Biased(nn.Module):
    """A module below the layers trains in every block; it enters a layer by keyword."""

    def __init__(self, checkpoint):
        super().__init__()
        torch.manual_seed(0)
        self.bias, self.layers = nn.Linear(4, 4), nn.ModuleList(Layer(4, 4) for _ in range(3))
        for layer in self.layers:
            layer._gradient_checkpointing_func = checkpoint

    def forward(self, x):
        x = self.layers[1](self.layers[0](x), bias=self.bias(torch.ones(4)))
        return self.layers[2](x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_requires_grad_may_enter_a_layer_by_keyword(reentrant):
    def train(model):
        partition = blocks.partition(model.named_parameters(), always=["bias"])
        optimizer = block_adam(model, blocks=partition)
        for _ in range(6):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    expected = train(Biased(lambda function, *args: function(*args)))
    assert_same_bits(train(Biased(functools.partial(checkpoint, use_reentrant=reentrant))), expected)


def test_checkpointing_enabled_anew_is_seen_at_the_next_visit():
    model = checkpointed(llama(), True)
    optimizer = block_adam(model)
    layers_of_each_step(model, optimizer, 2)
    checkpointed(model, False)
    assert layers_of_each_step(model, optimizer, 4) == (TOP_DOWN * 2)[2:6]


@pytest.mark.parametrize("how", ["close", "del"])
def test_the_model_is_given_back_as_it_was(how):
    model = checkpointed(llama(), True)
    functions = [vars(m).get("_gradient_checkpointing_func") for m in model.modules()]
    optimizer = block_adam(model)
    layers_of_each_step(model, optimizer, 2)
    assert [vars(m).get("_gradient_checkpointing_func") for m in model.modules()] != functions
    if how == "close":
        optimizer.close()
    else:
        del optimizer
        gc.collect()
    assert [vars(m).get("_gradient_checkpointing_func") for m in model.modules()] == functions
    model.requires_grad_(False)
    assert requires_grad(model)


def test_a_hook_that_the_user_removes_meanwhile_stays_removed():
    model = checkpointed(llama(), True)
    handles = [*getattr(model, "_require_grads_hooks", [model._require_grads_hook])]
    optimizer = block_adam(model)
    model.get_input_embeddings().register_forward_hook(lambda *args: None)
    layers_of_each_step(model, optimizer, 2)
    for handle in handles:
        handle.remove()
    left = dict(model.get_input_embeddings()._forward_hooks)
    optimizer.close()
    assert not left.keys() & {handle.id for handle in handles}
    assert model.get_input_embeddings()._forward_hooks.keys() == left.keys()


def test_a_model_that_refers_to_its_optimizer_goes_with_it():
    model = checkpointed(llama(), True)
    model.model.optimizer = block_adam(model)
    layers_of_each_step(model, model.model.optimizer, 2)
    weight = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    del model
    gc.collect()
    assert weight() is None


def test_no_hook_is_left_once_the_model_was_found_nor_when_the_optimizer_is_gone():
    before = len(_global_forward_pre_hooks)
    model = llama().train()
    optimizer = block_adam(model, switch_every=2)
    assert len(_global_forward_pre_hooks) == before + 1
    model(**BATCH)
    assert len(_global_forward_pre_hooks) == before
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(_global_forward_pre_hooks) == before + 1
    del optimizer
    gc.collect()
    assert len(_global_forward_pre_hooks) == before


def test_a_model_in_training_can_be_copied_and_pickled():
    model = checkpointed(llama(), True)
    optimizer = block_adam(model)
    model(**BATCH).loss.backward()
    optimizer.step()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**BATCH).loss, model(**BATCH).loss)


def test_it_is_said_once_that_the_backward_pass_is_cut(caplog):
    model = checkpointed(llama(), True)
    optimizer = block_adam(model)
    with caplog.at_level(logging.INFO, logger="badam_kernels"):
        layers_of_each_step(model, optimizer, 6)
    assert sum("stops at the active block" in message for message in caplog.messages) == 1
