"""Fine-tune a causal language model on a text with BlockAdam and transformers' Trainer: `python -m badam_kernels finetune`."""

from .settings import Settings

__all__ = ["Settings"]
