"""One run: held-out loss and a sample, training by transformers' Trainer with BlockAdam, the same again, a report."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from .. import __version__, monitor
from ..integrations.transformers import BlockAdamCallback
from ..optimizer import BlockAdam
from . import data, model as models
from .plot import plot
from .settings import Settings, prepare

__all__ = ["run"]

_PROMPT_TOKENS = 24
_SAMPLE_TOKENS = 24


def run(settings: Settings, say: Callable[[str], None]) -> dict:
    """Fine-tune as `settings` say and leave model, metrics.json and loss.png in `settings.out`; the metrics.

    `say` is called with lines for the user. Weights are bf16, masters exact; on a CPU the arithmetic is fp32.
    """
    texts = data.read(settings.data)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(settings.seed)
    model, tokenizer = models.load(settings.model, device)
    if device.type == "cpu":
        models.compute_in_fp32(model)
    split = data.split(data.encode(texts, tokenizer, settings.length), settings.batch)
    checkpoint = prepare(settings)
    say(f"training on {len(split.train):,} sequences of {settings.length} tokens, {len(split.held_out)} held out; {device}")

    before = _measure(model, tokenizer, split.held_out, settings.batch)
    say(f"held-out loss before: {before['loss']:.4f}\nsample before: {before['sample']}")
    optimizer = BlockAdam(
        model.named_parameters(),
        max_grad_norm=1.0,
        **{name: getattr(settings, name) for name in ("lr", "schedule", "switch_every", "format", "seed")},
    )
    trainer, clock = _trainer(settings, model, optimizer, split.train)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    memory = monitor.memory_by_place(model.parameters(), optimizer)
    num_blocks = len(optimizer.blocks)
    optimizer.close()

    after = _measure(model, tokenizer, split.held_out, settings.batch)
    say(f"held-out loss after: {after['loss']:.4f}\nsample after: {after['sample']}")
    metrics = {
        "settings": dataclasses.asdict(settings),
        "versions": {"badam_kernels": __version__, "torch": torch.__version__},
        "device": str(device),
        "held_out_tokens": split.held_out.numel(),
        "before": before,
        "after": after,
        "steps_of_this_process": clock.steps,
        "tokens_per_second": clock.steps * settings.batch * settings.length / clock.seconds if clock.steps else None,
        "peak_memory_bytes": monitor.peak_memory_bytes(device),
        "memory_bytes": memory,
        "history": [entry for entry in trainer.state.log_history if "loss" in entry],
    }
    for saved in (model, tokenizer):
        saved.save_pretrained(settings.out)
    (Path(settings.out) / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    plot(Path(settings.out) / "loss.png", metrics["history"], (before["loss"], after["loss"]), num_blocks)
    return metrics


class _Clock(TrainerCallback):
    """Time spent in steps, without checkpoints and evaluation."""

    def __init__(self) -> None:
        self.steps, self.seconds, self._begun = 0, 0.0, 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self._begun = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1
        self.seconds += time.perf_counter() - self._begun


class _Progress(ProgressCallback):
    """The Trainer's bar, with the loss beside it instead of lines above it."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and "loss" in (logs or {}):
            self.training_bar.set_postfix(loss=f"{logs['loss']:.3f}", block=logs.get("block_name"))


class _Sequences(torch.utils.data.Dataset):
    def __init__(self, ids: Tensor):
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def _trainer(settings: Settings, model: nn.Module, optimizer: BlockAdam, train: Tensor) -> tuple[Trainer, _Clock]:
    """A Trainer whose learning rate is constant: a run that is resumed with more --steps is the longer run, exactly."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    arguments = TrainingArguments(
        output_dir=settings.out,
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch,
        dataloader_drop_last=True,
        dataloader_pin_memory=not on_cpu,
        use_cpu=on_cpu,
        learning_rate=settings.lr,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,  # BlockAdam clips, in fp32 and without writing the gradients
        gradient_checkpointing=settings.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if settings.gradient_checkpointing else None,
        logging_steps=1,
        save_steps=settings.save_every,
        save_total_limit=2,
        seed=settings.seed,
        report_to="none",
    )
    clock = _Clock()
    trainer = Trainer(
        model,
        arguments,
        train_dataset=_Sequences(train),
        optimizers=(optimizer, None),
        callbacks=[BlockAdamCallback(optimizer), clock],
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(_Progress())
    return trainer, clock


@torch.no_grad()
def _measure(model: nn.Module, tokenizer, held_out: Tensor, batch: int) -> dict:
    """The mean loss per token over all of `held_out`, and how the model continues its first sequence (greedily)."""
    device = next(model.parameters()).device
    model.eval()
    total = sum(float(model(input_ids=ids.to(device), labels=ids.to(device)).loss) * len(ids) for ids in held_out.split(batch))
    prompt = held_out[:1, :_PROMPT_TOKENS].to(device)
    ids = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=_SAMPLE_TOKENS,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )[0]
    start, continuation = (tokenizer.decode(part) for part in (ids[: prompt.shape[1]], ids[prompt.shape[1] :]))
    return {"loss": total / len(held_out), "sample": f"{start} >>> {continuation}"}
