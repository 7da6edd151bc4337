"""Partitions: every trainable element is in exactly one block or named with the reason why not."""

import dataclasses

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from badam_kernels.blocks import Block, Partition, Skipped, Span, partition


def parameters(shapes, frozen=(), dtype=torch.float32, device="meta"):
    """Named parameters from {name: shape}; names that start with one of `frozen` do not train."""
    return [
        (name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=not name.startswith(tuple(frozen))))
        for name, shape in shapes.items()
    ]


def layer(stack, index, width=4):
    return {
        f"{stack}.{index}.attn.weight": (width, width),
        f"{stack}.{index}.mlp.weight": (2 * width, width),
        f"{stack}.{index}.norm.weight": (width,),
    }


def decoder(layers=3, stack="model.layers", width=4, vocabulary=32):
    """A decoder with untied head; 4 * (3 * width^2 + width) bytes of fp32 per layer."""
    body = {k: v for i in range(layers) for k, v in layer(stack, i, width).items()}
    outer = stack.rpartition(".")[0]
    ends = {f"{outer}.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}
    return {f"{outer}.embed_tokens.weight": (vocabulary, width), **body, **ends}


def names(part):
    return [block.name for block in part]


def members(block):
    return [span.name for span in block.spans]


def block_of(part, name):
    return [block.name for block in part if name in members(block)]


def elements(part, named):
    """How often each element is in a span; a skipped parameter counts as skipped throughout."""
    counts = {name: torch.zeros(p.numel(), dtype=torch.int64) for name, p in named}
    for block in part:
        for span in block.spans:
            assert 0 <= span.start < span.stop <= counts[span.name].numel()
            counts[span.name][span.start : span.stop] += 1
    for item in part.skipped:
        assert item.numel == counts[item.name].numel()
        counts[item.name] += 1
    return counts


def in_one_place(part, named):
    return all((count == 1).all() for count in elements(part, named).values())


# By layers


def test_one_block_per_layer_in_numerical_order():
    part = partition(parameters(decoder(12)))
    assert names(part) == [f"model.layers.{i}" for i in range(12)]
    assert members(part[11]) == list(layer("model.layers", 11))
    assert all(block.numel == 3 * 16 + 4 for block in part)


@pytest.mark.parametrize(
    "stack",
    ["model.layers", "transformer.h", "bert.encoder.layer", "encoder.block", "visual.blocks", "base_model.model.model.layers"],
)
def test_layers_are_found_whatever_their_stack_is_called(stack):
    assert names(partition(parameters(decoder(3, stack)))) == [f"{stack}.{i}" for i in range(3)]


def test_two_stacks_of_the_same_name_are_kept_apart():
    shapes = {k: v for s in ("vision_model.layers", "model.layers") for i in range(12) for k, v in layer(s, i).items()}
    part = partition(parameters(shapes))
    assert names(part) == [f"{s}.{i}" for s in ("vision_model.layers", "model.layers") for i in range(12)]
    assert all(name.startswith(block.name + ".") for block in part for name in members(block))


def test_experts_belong_to_their_layer_even_if_the_first_layers_have_none():
    shapes = {}
    for i in range(4):
        shapes |= {f"model.layers.{i}.attn.{x}.weight": (4, 4) for x in "qkvo"}
        if i == 0:
            shapes |= {f"model.layers.0.mlp.{x}.weight": (8, 4) for x in "wv"}
        else:
            shapes |= {f"model.layers.{i}.mlp.experts.{e}.{w}.weight": (2, 4) for e in range(16) for w in "wv"}
    assert names(partition(parameters(shapes))) == [f"model.layers.{i}" for i in range(4)]


def test_the_layers_within_unlike_stages_are_the_layers():
    shapes = {}
    for stage in range(3):
        shapes |= {f"stages.{stage}.downsample.weight": (4 << stage, 3)}
        shapes |= {k: v for i in range(2) for k, v in layer(f"stages.{stage}.blocks", i, 4 << stage).items()}
    part = partition(parameters(shapes), embeddings=True)
    assert names(part) == ["embeddings", *(f"stages.{s}.blocks.{i}" for s in range(3) for i in range(2))]


def test_plain_modules_in_a_sequential_are_not_layers():
    shapes = {f"projector.{i}.weight": (4, 4) for i in (0, 2)} | {f"classifier.{i}.weight": (4, 4) for i in (0, 1)} | decoder(2)
    adapted = {f"projector.{i}.lora_{x}.default.weight": (4, 4) for i in (0, 2) for x in "AB"} | decoder(2)
    for case in (shapes, adapted):
        assert names(partition(parameters(case))) == ["model.layers.0", "model.layers.1"]


def test_a_model_of_one_layer_has_one_block():
    assert names(partition(parameters(decoder(1)))) == ["model.layers.0"]


def test_wrapped_names_keep_their_layers():
    shapes = {f"base_model.model.{k}": v for k, v in decoder(2).items()}
    for i in range(2):
        attn = f"base_model.model.model.layers.{i}.attn"
        shapes[f"{attn}.base_layer.weight"] = shapes.pop(f"{attn}.weight")
        shapes |= {f"{attn}.lora_A.default.weight": (2, 4), f"{attn}.lora_B.default.weight": (4, 2)}
    frozen = [k for k in shapes if "lora" not in k]
    part = partition(parameters(shapes, frozen))
    assert [members(block) for block in part] == [
        [f"base_model.model.model.layers.{i}.attn.lora_{x}.default.weight" for x in "AB"] for i in range(2)
    ]
    compiled = {"_orig_mod." + k: v for k, v in decoder(2).items()}
    assert names(partition(parameters(compiled), head=True)) == [f"_orig_mod.model.layers.{i}" for i in (0, 1)] + ["head"]


def test_adapters_alone_show_the_layers_too():
    shapes = {f"model.layers.{i}.q_proj.lora_{x}.default.weight": (2, 4) for i in range(3) for x in "AB"}
    assert names(partition(parameters(shapes))) == [f"model.layers.{i}" for i in range(3)]


def test_a_model_without_layers_says_how_to_name_blocks():
    with pytest.raises(ValueError, match=r'expected numbered layers.*got fc1.weight, fc2.weight.*by=\[\["first_module."\]'):
        partition(parameters({"fc1.weight": (4, 4), "fc2.weight": (4, 4)}))


@pytest.mark.parametrize("prefix", ["", "layers.", "net.body."])
def test_a_model_of_plain_numbered_modules_has_those_as_layers(prefix):
    shapes = {f"{prefix}{i}.{x}": (8, 4) if x == "weight" else (8,) for i in (0, 2) for x in ("weight", "bias")}
    part = partition(parameters(shapes))
    assert names(part) == [f"{prefix}0", f"{prefix}2"] and part.skipped == ()


# Embeddings, head, final norm


def test_embeddings_and_head_are_left_out_unless_asked_for_and_said_with_size():
    part = partition(parameters(decoder()))
    assert {item.name: item.numel for item in part.skipped} == {
        "model.embed_tokens.weight": 128,
        "model.norm.weight": 4,
        "lm_head.weight": 128,
    }
    lines = part.skipped_lines()
    assert lines == [
        "not trained: model.embed_tokens.weight (128 elements): "
        "embeddings and what else feeds the layers: train it with embeddings=True",
        "not trained: model.norm.weight, lm_head.weight (132 elements): "
        "final norm, head and what else follows the layers: train it with head=True",
    ]
    assert partition(parameters(decoder()), embeddings=True, head=True).skipped_lines() == []


def test_head_alone_is_head_and_final_norm_only():
    part = partition(parameters(decoder()), head=True)
    assert names(part)[-1] == "head" and members(part[-1]) == ["model.norm.weight", "lm_head.weight"]
    assert [item.name for item in part.skipped] == ["model.embed_tokens.weight"]


def test_embeddings_come_first_and_the_head_last():
    part = partition(parameters(decoder(2)), embeddings=True, head=True)
    assert names(part) == ["embeddings", "model.layers.0", "model.layers.1", "head"]


@pytest.mark.parametrize("listed_twice", [True, False])
@pytest.mark.parametrize("asked, where", [("embeddings", "embeddings"), ("head", "head"), ("both", "embeddings"), ("none", None)])
def test_tied_weights_are_in_exactly_one_block(listed_twice, asked, where):
    named = dict(parameters(decoder()))
    named["lm_head.weight"] = named["model.embed_tokens.weight"]
    if not listed_twice:
        del named["lm_head.weight"]
    part = partition(named.items(), embeddings=asked in ("embeddings", "both"), head=asked in ("head", "both"))
    assert block_of(part, "model.embed_tokens.weight") == ([where] if where else [])
    assert block_of(part, "lm_head.weight") == []
    reasons = [item.reason for item in part.skipped if item.name == "model.embed_tokens.weight"]
    assert reasons == ([] if where else ["embeddings and head in one: train it with embeddings=True or head=True"])


def test_a_frozen_head_is_a_head_so_the_embeddings_are_not_tied():
    part = partition(parameters(decoder(), frozen=["lm_head"]), head=True)
    assert members(part[-1]) == ["model.norm.weight"]


def test_a_weight_listed_as_embeddings_and_head_is_tied_whatever_else_follows():
    named = dict(parameters(decoder() | {"value_head.weight": (4, 4)}))
    named["lm_head.weight"] = named["model.embed_tokens.weight"]
    assert block_of(partition(named.items(), head=True), "model.embed_tokens.weight") == ["head"]


def test_roles_do_not_depend_on_the_order_of_registration():
    shapes = decoder(2)
    turned = dict(sorted(shapes.items(), key=lambda item: ".layers." not in item[0]))
    for case in (turned, {"score.weight": (2, 4)} | shapes):
        part = partition(parameters(case), embeddings=True, head=True)
        assert members(part[0]) == ["model.embed_tokens.weight"]
        assert set(members(part[-1])) == {"model.norm.weight", "lm_head.weight", "score.weight"} & set(case)
    del turned["lm_head.weight"]
    assert block_of(partition(parameters(turned), head=True), "model.embed_tokens.weight") == ["head"]


def test_the_norm_of_a_connector_stays_with_it():
    shapes = {k: v for i in range(2) for k, v in layer("vision.layers", i).items()}
    shapes |= {"vision.norm.weight": (4,), "connector.fc.weight": (4, 4), "connector.norm.weight": (4,)} | decoder(2)
    part = partition(parameters(shapes), embeddings=True, head=True)
    assert members(part[0]) == ["connector.fc.weight", "connector.norm.weight", "model.embed_tokens.weight"]
    assert block_of(part, "vision.norm.weight") == ["head"]


def test_what_is_neither_layer_nor_named_goes_by_its_place():
    body = decoder(2)
    ends = {k: body.pop(k) for k in ("model.norm.weight", "lm_head.weight")}
    shapes = {"stem.conv.weight": (4, 4), **body, "model.summary.weight": (4, 4), **ends}
    part = partition(parameters(shapes), embeddings=True, head=True)
    assert block_of(part, "stem.conv.weight") == ["embeddings"] and block_of(part, "model.summary.weight") == ["head"]


def test_the_place_holds_if_weight_decay_groups_reorder_the_parameters():
    shapes = {"connector.fc.weight": (4, 4), "connector.fc.bias": (4,)} | decoder(3)
    shapes |= {"out.fc.weight": (4, 4), "out.fc.bias": (4,)}
    plain = parameters(shapes)
    grouped = [pair for pair in plain if pair[1].ndim > 1] + [pair for pair in plain if pair[1].ndim == 1]
    for named in (plain, grouped):
        part = partition(named, embeddings=True, head=True)
        assert block_of(part, "connector.fc.bias") == block_of(part, "connector.fc.weight") == ["embeddings"]
        assert block_of(part, "out.fc.bias") == block_of(part, "out.fc.weight") == ["head"]


# Frozen, and what the caller passes


def test_frozen_layers_leave_the_blocks_and_are_said():
    shapes = {k: v for i in range(3) for k, v in layer("vision_tower.layers", i).items()} | decoder(2)
    part = partition(parameters(shapes, frozen=["vision_tower."]))
    assert names(part) == ["model.layers.0", "model.layers.1"]
    frozen = [item for item in part.skipped if item.reason == "requires_grad is False"]
    assert {item.name for item in frozen} == {name for name in shapes if name.startswith("vision_tower.")}
    assert len([line for line in part.skipped_lines() if "requires_grad" in line]) == 1


def test_nothing_to_train_is_an_error_that_names_what_would():
    with pytest.raises(ValueError, match="no block has anything to train(.|\n)*layers.0.attn.weight.*requires_grad is False"):
        partition(parameters(decoder(), frozen=["model.layers."]))


def test_lora_names_in_no_block_are_an_error():
    shapes = decoder(2) | {"model.layers.1.attn.lora_A.default.weight": (2, 4)}
    named = parameters(shapes, frozen=[k for k in shapes if "lora" not in k])
    with pytest.raises(ValueError, match="no block has anything to train(.|\n)*lora_A.*in no block"):
        partition(named, [["model.layers.0."]])


def test_a_pair_passed_twice_counts_once():
    pairs = parameters({"stem.conv.weight": (4, 4)} | decoder())
    assert partition(pairs + pairs, head=True) == partition(pairs, head=True)


def test_a_generator_is_accepted():
    pairs = parameters(decoder())
    assert partition(pair for pair in pairs) == partition(pairs)


@pytest.mark.parametrize(
    "wrong", [nn.Linear(2, 2), nn.Linear(2, 2).parameters(), {"a.0.b.c": 1}, torch.ones(2), [("a", 1)], "ab", 3]
)
def test_anything_but_named_parameters_is_a_type_error_that_says_what_to_pass(wrong):
    with pytest.raises(TypeError, match=r"expected \(name, parameter\) pairs; got a .*: pass model.named_parameters\(\)"):
        partition(wrong)


def test_an_exhausted_generator_is_an_error():
    with pytest.raises(ValueError, match="got none.*a generator can be read only once"):
        partition(iter([]))


def test_one_name_for_two_parameters_is_an_error():
    with pytest.raises(ValueError, match="two called 'model.norm.weight'"):
        partition(parameters(decoder()) + parameters({"model.norm.weight": (4,)}))


def test_two_parameters_in_the_same_memory_are_an_error():
    named = dict(parameters(decoder(), device="cpu"))
    named["lm_head.weight"] = nn.Parameter(named["model.embed_tokens.weight"].detach())
    with pytest.raises(ValueError, match="'lm_head.weight' and 'model.embed_tokens.weight' are two .* at the same address"):
        partition(named.items())
    named["lm_head.weight"].requires_grad_(False)
    assert len(partition(named.items())) == 3


def test_parameters_without_elements_are_said():
    part = partition(parameters(decoder(2) | {"model.layers.1.empty.weight": (0, 4)}))
    assert Skipped("model.layers.1.empty.weight", 0, "it has no elements") in part.skipped


def test_a_partition_is_an_immutable_sequence():
    part = partition(parameters(decoder()))
    assert isinstance(part, Partition) and len(part) == 3 and list(part) == [part[0], part[1], part[2]] and part[-1] == part[2]
    with pytest.raises(dataclasses.FrozenInstanceError):
        part.blocks = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        part[0].name = "other"


# By prefixes


def test_a_prefix_is_whole_components():
    shapes = {k: v for s in ("vision_model.layers", "layers") for i in range(12) for k, v in layer(s, i).items()}
    for prefix in ("layers.1", "layers.1."):
        (block,) = partition(parameters(shapes), [[prefix]])
        assert block.name == "layers.1" and members(block) == list(layer("layers", 1))


def test_prefix_lists_are_blocks_and_the_rest_is_said():
    part = partition(parameters(decoder(4)), [["model.layers.3.", "lm_head.weight"], ["model.layers.0."]])
    assert names(part) == ["model.layers.3 + lm_head.weight", "model.layers.0"]
    assert set(members(part[0])) == {*layer("model.layers", 3), "lm_head.weight"}
    reason = {item.name: item.reason for item in part.skipped}
    assert reason["model.layers.1.attn.weight"] == "in no block: add its prefix to a prefix list or to always"
    assert "embeddings=True" in reason["model.embed_tokens.weight"]


def test_embeddings_and_head_can_join_prefix_lists():
    part = partition(parameters(decoder(2)), [["model.layers.0."], ["model.layers.1."]], embeddings=True, head=True)
    assert part == partition(parameters(decoder(2)), embeddings=True, head=True)


def test_a_block_may_be_called_like_a_role():
    shapes = {"embeddings.weight": (8, 4), "body.weight": (4, 4), "head.weight": (8, 4)}
    part = partition(parameters(shapes), [["embeddings"], ["body"], ["head"]])
    assert names(part) == ["embeddings", "body", "head"] and not part.skipped


def test_a_prefix_that_matches_nothing_is_named_with_the_full_one():
    with pytest.raises(ValueError, match=r"'layers.1.' in block 1 matches no parameter.*did you mean 'model.layers.1.'\?"):
        partition(parameters(decoder(12)), [["model.layers.0."], ["layers.1."]])
    with pytest.raises(ValueError, match=r"'layer.1' in block 0 matches no parameter. The names are model.embed_tokens.weight, "):
        partition(parameters(decoder(12)), [["layer.1"]])
    for empty in ("", "."):
        with pytest.raises(ValueError, match="matches no parameter"):
            partition(parameters(decoder()), [[empty]])


def test_a_parameter_in_two_prefix_lists_is_an_error():
    with pytest.raises(ValueError, match=r"'model.layers.1.attn.weight' is in blocks \[0, 1\]. To train it in all, use always"):
        partition(parameters(decoder()), [["model.layers.1"], ["model.layers.2", "model.layers.1.attn"]])


def test_a_tied_weight_is_found_under_either_name():
    named = dict(parameters(decoder(2)))
    named["lm_head.weight"] = named["model.embed_tokens.weight"]
    (only,) = partition(named.items(), [["lm_head."]])
    assert members(only) == ["model.embed_tokens.weight"]
    part = partition(named.items(), [["lm_head.", "model.norm."], ["model.embed_tokens."]])
    assert block_of(part, "model.embed_tokens.weight") == ["model.embed_tokens"]


@pytest.mark.parametrize(
    "by, error", [("layer", ValueError), ([], ValueError), ([[]], ValueError), (["a."], TypeError), ([[1]], TypeError)]
)
def test_other_kinds_of_by_are_refused(by, error):
    with pytest.raises(error, match="prefix"):
        partition(parameters(decoder()), by)


# Always


def test_always_trains_in_every_block_on_top_of_its_own():
    part = partition(parameters(decoder(3)), always=["model.norm", "model.layers.0.norm."])
    common = ("model.layers.0.norm.weight", "model.norm.weight")
    assert names(part) == ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert all(tuple(members(block)[-2:]) == common and len(set(members(block))) == len(block.spans) for block in part)
    assert not {item.name for item in part.skipped} & set(common)


def test_always_is_refused_if_it_matches_nothing_or_is_a_string():
    with pytest.raises(ValueError, match="'norm' in always matches no parameter.*did you mean 'model.layers.0.norm.'"):
        partition(parameters(decoder()), always=["norm"])
    with pytest.raises(TypeError, match="always must be a list of prefixes"):
        partition(parameters(decoder()), always="model.norm")
    with pytest.raises(ValueError, match="no block has anything to train"):
        partition(parameters(decoder(1)), always=["model.layers"])


# By size


LAYER_BYTES = 4 * (3 * 16 + 4)


def test_neighbouring_layers_merge_while_they_fit():
    part = partition(parameters(decoder(7)), embeddings=True, head=True, max_bytes=3 * LAYER_BYTES)
    assert names(part) == ["embeddings", "model.layers.0-2", "model.layers.3-5", "model.layers.6", "head"]
    assert members(part[1]) == [name for i in range(3) for name in layer("model.layers", i)]


def test_layers_of_two_stacks_and_named_blocks_do_not_merge():
    shapes = {k: v for s in ("a.layers", "b.layers") for i in range(2) for k, v in layer(s, i).items()}
    assert names(partition(parameters(shapes), max_bytes=1 << 20)) == ["a.layers.0-1", "b.layers.0-1"]
    assert len(partition(parameters(shapes), [["a.layers.0"], ["a.layers.1"]], max_bytes=1 << 20)) == 2


def test_a_merged_name_does_not_claim_the_frozen_layers_between():
    part = partition(parameters(decoder(5), frozen=["model.layers.1."]), max_bytes=1 << 20)
    assert names(part) == ["model.layers.0,2-4"]


def test_a_layer_too_large_is_split_between_parameters():
    part = partition(parameters(decoder(1)), max_bytes=4 * 36)
    assert names(part) == ["model.layers.0.attn.weight", "model.layers.0 (2 of 2)"]
    assert [block.numel for block in part] == [16, 36]


def test_a_matrix_too_large_is_cut_between_rows():
    part = partition(parameters(decoder(1, vocabulary=1000)), embeddings=True, max_bytes=4 * 4 * 300)
    assert names(part)[:4] == [f"model.embed_tokens.weight[{a}:{a + 250}]" for a in (0, 250, 500, 750)]
    assert part[1].spans == (Span("model.embed_tokens.weight", 1000, 2000),)


def test_a_row_too_large_is_cut_inside():
    part = partition(parameters({"a.weight": (2, 100)}), [["a"]], max_bytes=4 * 60)
    assert [block.spans[0] for block in part] == [Span("a.weight", i * 50, i * 50 + 50) for i in range(4)]
    assert part[1].name == "a.weight.flat[50:100]"


def test_bytes_are_counted_in_the_dtype_of_each_parameter():
    for dtype, count in ((torch.float32, 2), (torch.bfloat16, 1)):
        assert len(partition(parameters(decoder(2), dtype=dtype), max_bytes=LAYER_BYTES)) == count


def test_a_block_is_on_one_device():
    first, second = parameters(decoder(2), device="meta"), parameters({"model.layers.1.gate.weight": (4, 4)}, device="cpu")
    part = partition(first + second)
    assert names(part) == ["model.layers.0", "model.layers.1 on meta", "model.layers.1 on cpu"]
    assert names(partition(first + second, max_bytes=1 << 20)) == ["model.layers.0-1", "model.layers.1 on cpu"]
    assert len(partition(first + second, ratio=0.5)) == 4


# By ratio


def test_ratio_makes_one_range_of_every_parameter():
    part = partition(parameters(decoder(2)), ratio=0.25)
    assert names(part) == [f"range {i} of 4" for i in range(4)]
    assert Span("model.layers.0.mlp.weight", 8, 16) in part[1].spans
    assert {item.name for item in part.skipped} == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


@pytest.mark.parametrize("ratio, count", [(1, 1), (0.5, 2), (0.3, 4), (0.1, 10), (1 / 49, 49), (1 / 3, 3)])
def test_ratio_gives_the_next_whole_number_of_blocks(ratio, count):
    assert len(partition(parameters({"a.weight": (100, 2)}), ratio=ratio)) == count


def test_ratio_ranges_of_many_elements_begin_at_whole_vectors():
    part = partition(parameters({"a.weight": (1001, 7)}), ratio=0.3)
    starts = [block.spans[0].start for block in part]
    assert [start % 16 for start in starts] == [0, 0, 0, 0]
    assert all(abs(start - 7007 * i / 4) < 16 for i, start in enumerate(starts)) and part[-1].spans[0].stop == 7007


def test_a_tiny_ratio_gives_no_more_blocks_than_elements():
    assert len(partition(parameters({"a.weight": (4, 4), "b": (3,)}), ratio=1e-12)) == 16


def test_ratio_needs_no_layers():
    assert partition(parameters({"a.weight": (4, 4), "b": (3,)}), ratio=0.5).skipped == ()


@pytest.mark.parametrize(
    "wrong, error",
    [
        ({"ratio": 0}, ValueError),
        ({"ratio": 1.5}, ValueError),
        ({"ratio": float("nan")}, ValueError),
        ({"ratio": "0.1"}, TypeError),
        ({"ratio": 0.5, "max_bytes": 1000}, ValueError),
        ({"ratio": 0.5, "by": [["model.layers.0."]]}, ValueError),
        ({"max_bytes": 0}, ValueError),
        ({"max_bytes": 1e9}, TypeError),
    ],
)
def test_sizes_that_make_no_sense_are_refused(wrong, error):
    with pytest.raises(error, match="ratio|max_bytes"):
        partition(parameters(decoder()), **wrong)


# Properties of any partition

SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)
OUTER = ["model.embed_tokens", "model.connector", "model.norm", "lm_head", "score"]
MODULES = OUTER + [f"{stack}.{i}.fc" for stack in ("a.h", "b.h") for i in (0, 1, 10)]
MODELS = st.dictionaries(
    st.builds("{}.{}".format, st.sampled_from(MODULES), st.sampled_from(["weight", "bias", "scale"])),
    st.tuples(SHAPES, st.booleans(), st.sampled_from([torch.bfloat16, torch.float32])),
    min_size=1,
)
LAYERS = {f"{s}.{i}.fc.{x}": ((3, 4), True, torch.float32) for s in ("a.h", "b.h") for i in (0, 1) for x in ("weight", "u")}


def build(model):
    return [(name, nn.Parameter(torch.empty(s, dtype=d, device="meta"), requires_grad=g)) for name, (s, g, d) in model.items()]


@given(MODELS, st.booleans(), st.booleans(), st.none() | st.integers(8, 200))
def test_every_element_is_in_one_block_or_skipped_and_no_block_is_too_large(model, embeddings, head, max_bytes):
    named = build(model | LAYERS)
    part = partition(named, embeddings=embeddings, head=head, max_bytes=max_bytes)
    assert in_one_place(part, named)
    params = dict(named)
    assert {item.name for item in part.skipped} >= {name for name, p in named if not p.requires_grad}
    assert len(set(names(part))) == len(part)
    if max_bytes is None:
        assert all(span.numel == params[span.name].numel() for block in part for span in block.spans)
        return
    for block in part:
        assert block.spans and sum(span.numel * params[span.name].element_size() for span in block.spans) <= max_bytes
        for span in block.spans:
            param = params[span.name]
            row = param.numel() // param.shape[0] if param.ndim else 1
            assert row * param.element_size() > max_bytes or (span.start % row == 0 and span.stop % row == 0)


@given(MODELS, st.floats(0.02, 1))
def test_ratio_ranges_of_few_elements_are_equal_within_one(model, ratio):
    named = build(model | LAYERS)
    part = partition(named, embeddings=True, head=True, ratio=ratio)
    assert in_one_place(part, named)
    spans = {}
    for block in part:
        assert len(set(members(block))) == len(block.spans) > 0
        for span in block.spans:
            spans.setdefault(span.name, []).append(span.numel)
    count = int(part[0].name.split()[-1])
    largest = max(dict(named)[name].numel() for name in spans)
    assert count == largest or count - 1 < 1 / ratio + 1e-6 and count * ratio >= 1 - 1e-6
    assert count <= largest
    for name, sizes in spans.items():
        numel = dict(named)[name].numel()
        if numel < 16 * count:
            assert max(sizes) == -(-numel // count) and min(sizes) >= max(1, numel // count)


@given(MODELS)
def test_always_is_the_only_overlap(model):
    named = build(model | LAYERS)
    part = partition(named, embeddings=True, head=True, always=["a.h.0"])
    for name, count in elements(part, named).items():
        everywhere = name.startswith("a.h.0.") and dict(named)[name].requires_grad
        assert (count == (len(part) if everywhere else 1)).all()


def test_a_block_counts_its_elements():
    assert Block("x", (Span("a", 2, 5), Span("b", 0, 4))).numel == 7
