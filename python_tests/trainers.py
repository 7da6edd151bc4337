"""What the tests of Trainer, accelerate and checkpointing share: tiny real models, data, and a plain loop to compare with."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate.state import AcceleratorState
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

BATCH, LENGTH = 2, 8


def llama(dtype: torch.dtype = torch.float32, layers: int = 3, **settings) -> LlamaForCausalLM:
    """The same weights every time."""
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1)
    config = LlamaConfig(**sizes | dict(num_hidden_layers=layers, max_position_embeddings=32, use_cache=False) | settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    return model.to(dtype)


class Reached:
    """The layers that a backward pass went through, and whether the embeddings' output required grad."""

    def __init__(self, model):
        self.layers = set()
        for i, layer in enumerate(model.model.layers):
            layer.register_full_backward_hook(lambda module, grad_in, grad_out, i=i: self.layers.add(i))
        model.model.embed_tokens.register_forward_hook(self._watch)

    def _watch(self, module, args, output):
        if output.requires_grad:
            self.layers.add("embeddings")

    def take(self) -> list[str]:
        """What was reached since the last call, in order."""
        layers, self.layers = self.layers, set()
        return sorted(map(str, layers))


class Sequences(torch.utils.data.Dataset):
    """`count` fixed sequences."""

    def __init__(self, count: int = 256):
        generator = torch.Generator().manual_seed(7)
        self._ids = torch.randint(0, 32, (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        # The first token is predicted by none; older Trainers would count it in the mean.
        return {"input_ids": self._ids[index], "labels": torch.cat([torch.tensor([-100]), self._ids[index][1:]])}


class InOrder(Trainer):
    """Takes the sequences in order, so that a plain loop can."""

    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer(
    out,
    model,
    optimizer,
    *,
    steps,
    callbacks=(),
    accumulate=1,
    clip=0.0,
    checkpointing=None,
    evaluate=None,
    loss_scale=None,
    **settings,
) -> Trainer:
    """`loss_scale`: as with ``fp16=True`` on a GPU, from that scale on. accelerate refuses it on a CPU, torch does not."""
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=clip,
        lr_scheduler_type="linear",
        learning_rate=optimizer.param_groups[0]["lr"],
        gradient_checkpointing=checkpointing is not None,
        gradient_checkpointing_kwargs=None if checkpointing is None else {"use_reentrant": checkpointing == "reentrant"},
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{"save_strategy": "no"} | settings,
    )
    data = dict(train_dataset=Sequences(), eval_dataset=evaluate)
    runner = InOrder(model, arguments, **data, optimizers=(optimizer, None), callbacks=list(callbacks))
    if loss_scale is not None:
        AcceleratorState._shared_state["_mixed_precision"] = "fp16"
        runner.accelerator.native_amp = True
        runner.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale)
    return runner


def plain_loop(model, optimizer, *, steps, accumulate=1, clip=0.0, autocast=None) -> list[float]:
    """What the Trainer is compared with: the losses of the same data under the same schedule, as anyone would write it."""
    data = torch.utils.data.DataLoader(Sequences(), batch_size=BATCH)
    batches = iter(data)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (steps - step) / steps))
    model.train()
    losses = []
    for _ in range(steps):
        total = 0.0
        for _ in range(accumulate):
            batch = next(batches)
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                loss = model(**batch).loss
            loss = loss / accumulate
            loss.backward()
            total += loss.item()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def logged(runner: Trainer) -> list[dict]:
    return [entry for entry in runner.state.log_history if "loss" in entry]
