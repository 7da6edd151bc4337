"""BlockAdam on models as people load and wrap them: adapters, tied weights, experts, vision towers, compile, device_map."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers for its models")

import transformers  # noqa: E402
from trainers import Sequences, llama, logged, trainer  # noqa: E402

from badam_kernels import BlockAdam, blocks  # noqa: E402
from badam_kernels.integrations.transformers import BlockAdamCallback  # noqa: E402

from models import assert_same_bits, train, weights  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
BATCH = {key: torch.stack([Sequences()[i][key] for i in range(2)]) for key in ("input_ids", "labels")}


def go(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        loss = model(**BATCH).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def changed(before, model):
    after = weights(model)
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_only_the_adapters_that_peft_left_trainable_are_scheduled(tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft")
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(llama(), adapters)
    optimizer = BlockAdam(model.named_parameters(), lr=1e-2, switch_every=1, schedule="ascending")
    assert len(optimizer.blocks) == 3
    assert all("lora_" in span.name for block in optimizer.blocks for span in block.spans)
    before = weights(model)
    runner = trainer(tmp_path, model, optimizer, steps=3, callbacks=[BlockAdamCallback], checkpointing="reentrant")
    runner.train()
    assert changed(before, model) == {span.name for block in optimizer.blocks for span in block.spans}
    assert len(logged(runner)) == 3


def test_tied_embeddings_are_in_one_block_and_stay_tied():
    model = llama(tie_word_embeddings=True)
    partition = blocks.partition(model.named_parameters(), embeddings=True, head=True)
    optimizer = BlockAdam(model.named_parameters(), lr=1e-2, blocks=partition, switch_every=1, schedule="ascending")
    assert sum(span.name == "model.embed_tokens.weight" for block in optimizer.blocks for span in block.spans) == 1
    before = weights(model)
    losses = go(model, optimizer, 10)
    assert changed(before, model) == set(before) and losses[-1] < losses[0]
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_experts_that_no_token_reached_are_skipped_and_train_later(caplog):
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1)
    config = transformers.MixtralConfig(**sizes, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=1)
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    optimizer = BlockAdam(model.named_parameters(), lr=1e-2, switch_every=1, schedule="ascending")
    losses = go(model, optimizer, 4)
    assert losses[-1] < losses[0]

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3)) for _ in range(2))

        def forward(self, x, expert):
            for layer in self.layers:
                x = x + layer[expert](x)
            return x

    model = Experts()
    optimizer = BlockAdam(model.named_parameters(), lr=1e-2, switch_every=2, schedule="ascending")
    for step, expert in enumerate((0, 1, 0, 1)):
        before = weights(model)
        with caplog.at_level(logging.WARNING, "badam_kernels"):
            model(torch.ones(1, 4), expert).sum().backward()
            layer = optimizer.active_block_index
            optimizer.step()
            optimizer.zero_grad()
        assert changed(before, model) == {f"layers.{layer}.{expert}.{kind}" for kind in ("weight", "bias")}, step


def test_a_frozen_vision_tower_stays_frozen():
    text = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1)
    vision = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4)
    config = transformers.LlavaConfig(
        text_config=text | {"model_type": "llama", "num_hidden_layers": 3},
        vision_config=vision | {"model_type": "clip_vision_model"},
        image_token_index=31,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config)
    tower = [p for n, p in model.named_parameters() if "vision_tower" in n]
    for param in tower:
        param.requires_grad_(False)
    optimizer = BlockAdam(model.named_parameters(), lr=1e-2, switch_every=1, schedule="ascending")
    assert len(optimizer.blocks) == 3 and not any("vision" in span.name for block in optimizer.blocks for span in block.spans)
    ids = torch.tensor([[1, 31, 31, 31, 31, 2, 3, 4]])
    before = weights(model)
    for _ in range(3):
        model(input_ids=ids, pixel_values=torch.ones(1, 3, 8, 8), labels=ids.where(ids != 31, -100)).loss.backward()
        assert all(param.grad is None for param in tower)
        optimizer.step()
        optimizer.zero_grad()
    assert changed(before, model) == {s.name for b in optimizer.blocks for s in b.spans if s.name in changed(before, model)}
    assert {name.split("layers.")[1][0] for name in changed(before, model)} == {"0", "1", "2"}


@pytest.mark.parametrize("how", ["torch.compile", "in place", "evaluated at every switch"])
def test_a_compiled_model_has_at_most_one_graph_per_block(how):
    """Over three sweeps; which parameters require grad is part of a graph, their values are not. Evaluation has graphs too."""
    from models import loss_of, tiny

    graphs = []

    def count(module, inputs):
        graphs.append(torch.is_grad_enabled())
        return module.forward

    gc.collect()  # hooks of optimizers that are gone would go in the middle, which is a new graph
    torch._dynamo.reset()
    model = tiny()
    optimizer = BlockAdam(model.named_parameters(), lr=1e-2, switch_every=2, schedule="ascending")
    compiled = torch.compile(model, backend=count) if how != "in place" else model
    if how == "in place":
        model.compile(backend=count)
    for step in range(3 * 2 * 3):
        loss_of(compiled, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 and how == "evaluated at every switch":
            with torch.no_grad():
                loss_of(compiled, step)
    torch._dynamo.reset()
    assert 1 <= graphs.count(True) <= len(optimizer.blocks)
    assert graphs.count(False) <= len(optimizer.blocks)
    eager = tiny()
    reference = BlockAdam(eager.named_parameters(), lr=1e-2, switch_every=2, schedule="ascending")
    train(eager, reference, range(18))
    assert_same_bits(weights(model), weights(eager))


def load(folder, **settings):
    """In bf16 whatever the version's default is."""
    return transformers.LlamaForCausalLM.from_pretrained(folder, **settings).to(torch.bfloat16)


def test_a_model_from_sharded_safetensors_with_a_device_map_trains_and_saves(tmp_path):
    llama(torch.bfloat16).save_pretrained(tmp_path / "model", max_shard_size="5KB")
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 2
    results = []
    modules = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")
    for device_map in (None, {"": "cpu"}, dict.fromkeys(modules, "cpu")):
        model = load(tmp_path / "model", device_map=device_map)
        optimizer = BlockAdam(model.named_parameters(), lr=1e-2, switch_every=1)
        losses = go(model, optimizer, 6)
        results.append((losses, weights(model)))
        model.save_pretrained(tmp_path / "trained", max_shard_size="5KB")
        again = load(tmp_path / "trained")
        assert_same_bits(weights(again), weights(model))
        optimizer.close()
    for losses, bits in results[1:]:
        assert losses == results[0][0]
        assert_same_bits(bits, results[0][1])
