"""Partitions of real model classes, built tiny from their transformers configs without memory."""

import warnings

import pytest
import torch

from badam_kernels.blocks import partition

transformers = pytest.importorskip("transformers", "5.0", reason="needs the model classes and names of transformers 5")

TEXT = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=96)
GROUPED = dict(TEXT, num_key_value_heads=2)
VISION = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=28, patch_size=14)
IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2]}
SPEECH = dict(d_model=32, encoder_layers=3, decoder_layers=2, num_mel_bins=8, max_source_positions=16, max_target_positions=16)

# name: (model class, config class, config, {stack: layers}, what is tied, a name in embeddings, a name in head)
LLAMA = ({"model.layers": 3}, None, "model.embed_tokens.weight", "model.norm.weight")
BERT = {"bert.encoder.layer": 3}
MODELS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, *LLAMA),
    "Llama, one layer": ("LlamaForCausalLM", "LlamaConfig", GROUPED | {"num_hidden_layers": 1}, {"model.layers": 1}, *LLAMA[1:]),
    "Llama classifier": ("LlamaForSequenceClassification", "LlamaConfig", GROUPED, *LLAMA[:3], "score.weight"),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED, *LLAMA),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 8}, *LLAMA),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        GROUPED | {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
        *LLAMA,
    ),
    "Mistral": ("MistralForCausalLM", "MistralConfig", GROUPED, *LLAMA),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", GROUPED | {"num_local_experts": 4}, *LLAMA),
    "Gemma3 text": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        GROUPED | {"head_dim": 8},
        {"model.layers": 3},
        "model.embed_tokens.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    ),
    "Gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {"text_config": GROUPED | {"head_dim": 8}, "vision_config": VISION},
        {"model.vision_tower.encoder.layers": 2, "model.language_model.layers": 3},
        "model.language_model.embed_tokens.weight",
        "model.multi_modal_projector.mm_input_projection_weight",
        "model.language_model.norm.weight",
    ),
    "Phi-3": ("Phi3ForCausalLM", "Phi3Config", GROUPED | IDS, *LLAMA),
    "GPT-2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        dict(n_layer=3, n_embd=32, n_head=4, vocab_size=96, n_positions=128, **IDS),
        {"transformer.h": 3},
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.ln_f.weight",
    ),
    "GPT-NeoX": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        TEXT,
        {"gpt_neox.layers": 3},
        None,
        "gpt_neox.embed_in.weight",
        "gpt_neox.final_layer_norm.bias",
    ),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        dict(hidden_size=32, num_hidden_layers=3, ffn_dim=48, num_attention_heads=4, vocab_size=96, word_embed_proj_dim=16),
        {"model.decoder.layers": 3},
        "model.decoder.embed_tokens.weight",
        "model.decoder.embed_positions.weight",
        "model.decoder.final_layer_norm.weight",
    ),
    "BLOOM": (
        "BloomForCausalLM",
        "BloomConfig",
        dict(hidden_size=32, n_layer=3, n_head=4, vocab_size=96),
        {"transformer.h": 3},
        "transformer.word_embeddings.weight",
        "transformer.word_embeddings_layernorm.weight",
        "transformer.ln_f.bias",
    ),
    "Falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, vocab_size=96),
        {"transformer.h": 3},
        "transformer.word_embeddings.weight",
        "transformer.word_embeddings.weight",
        "transformer.ln_f.weight",
    ),
    "BERT": (
        "BertForMaskedLM",
        "BertConfig",
        TEXT,
        BERT,
        "bert.embeddings.word_embeddings.weight",
        "bert.embeddings.LayerNorm.weight",
        "cls.predictions.bias",
    ),
    "BERT classifier": (
        "BertForSequenceClassification",
        "BertConfig",
        TEXT,
        BERT,
        None,
        "bert.embeddings.position_embeddings.weight",
        "bert.pooler.dense.weight",
    ),
    "RoBERTa": (
        "RobertaForMaskedLM",
        "RobertaConfig",
        TEXT,
        {"roberta.encoder.layer": 3},
        "roberta.embeddings.word_embeddings.weight",
        "roberta.embeddings.word_embeddings.weight",
        "lm_head.layer_norm.weight",
    ),
    "ModernBERT": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        TEXT | IDS,
        {"model.layers": 3},
        "model.embeddings.tok_embeddings.weight",
        "model.embeddings.norm.weight",
        "model.final_norm.weight",
    ),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        dict(d_model=32, d_kv=8, d_ff=48, num_layers=3, num_decoder_layers=2, num_heads=4, vocab_size=96),
        {"encoder.block": 3, "decoder.block": 2},
        "shared.weight",
        "shared.weight",
        "encoder.final_layer_norm.weight",
    ),
    "ViT": (
        "ViTForImageClassification",
        "ViTConfig",
        VISION,
        {"vit.layers": 2},
        None,
        "vit.embeddings.cls_token",
        "vit.layernorm.weight",
    ),
    "Whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        dict(SPEECH, encoder_attention_heads=4, decoder_attention_heads=4, vocab_size=96, **IDS),
        {"model.encoder.layers": 3, "model.decoder.layers": 2},
        "model.decoder.embed_tokens.weight",
        "model.encoder.conv1.weight",
        "model.encoder.layer_norm.weight",
    ),
    "LLaVA": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"text_config": GROUPED | {"model_type": "llama"}, "vision_config": VISION | {"model_type": "clip_vision_model"}},
        {"model.vision_tower.encoder.layers": 2, "model.language_model.layers": 3},
        None,
        "model.vision_tower.pre_layrnorm.weight",
        "model.vision_tower.post_layernorm.weight",
    ),
    "Qwen2-VL": (
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {
            "text_config": GROUPED | {"rope_parameters": ROPE},
            "vision_config": dict(depth=2, embed_dim=32, hidden_size=32, num_heads=4, mlp_ratio=2),
        },
        {"model.visual.blocks": 2, "model.language_model.layers": 3},
        None,
        "model.visual.merger.mlp.0.weight",
        "lm_head.weight",
    ),
}


@pytest.fixture(scope="module", params=MODELS.items(), ids=MODELS)
def case(request):
    model_class, config_class, config, *expected = request.param[1]
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        return getattr(transformers, model_class)(getattr(transformers, config_class)(**config)), *expected


def spans(blocks):
    return [span.name for block in blocks for span in block.spans]


def test_one_block_per_repeated_layer_and_nothing_trainable_is_lost(case):
    model, stacks, _, first, last = case
    named = dict(model.named_parameters())
    part = partition(named.items(), embeddings=True, head=True)
    layers = [f"{stack}.{i}" for stack, count in stacks.items() for i in range(count)]
    assert [block.name for block in part] == ["embeddings", *layers, "head"]
    for block in part[1:-1]:
        assert {span.name for span in block.spans} == {name for name in named if name.startswith(block.name + ".")}
    assert sorted(spans(part)) == sorted(name for name, p in named.items() if p.requires_grad)
    assert sum(block.numel for block in part) == sum(p.numel() for p in named.values() if p.requires_grad)
    assert {item.name for item in part.skipped} == {name for name, p in named.items() if not p.requires_grad}
    assert first in spans([part[0]]) and last in spans([part[-1]])


def test_layers_alone_are_the_default_and_the_rest_is_said(case):
    model, stacks, *_ = case
    named = dict(model.named_parameters())
    part = partition(named.items())
    assert len(part) == sum(stacks.values())
    assert sorted(spans(part) + [item.name for item in part.skipped]) == sorted(named)


@pytest.mark.parametrize("remove_duplicate", [True, False])
def test_the_tied_matrix_is_in_one_block(case, remove_duplicate):
    model, _, tied, *_ = case
    if tied is None:
        named = list(model.named_parameters(remove_duplicate=remove_duplicate))
        assert partition(named, head=True)[-1] == partition(named, embeddings=True, head=True)[-1]
        return
    for embeddings, head in ((True, True), (True, False), (False, True)):
        part = partition(model.named_parameters(remove_duplicate=remove_duplicate), embeddings=embeddings, head=head)
        assert [block.name for block in part if tied in spans([block])] == ["embeddings" if embeddings else "head"]


def test_a_frozen_vision_tower_leaves_the_language_layers():
    model_class, config_class, config, stacks, *_ = MODELS["LLaVA"]
    with torch.device("meta"):
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**config))
    model.model.vision_tower.requires_grad_(False)
    part = partition(model.named_parameters(), embeddings=True, head=True)
    assert [block.name for block in part] == ["embeddings", *(f"model.language_model.layers.{i}" for i in range(3)), "head"]
    assert not any("vision_tower" in name for name in spans(part))
