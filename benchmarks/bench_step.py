"""One optimizer step on one block of a 2048 x 5632 Llama layer: ours beside torch, badam and DeepSpeed, in one run.

    python benchmarks/bench_step.py --device cpu            the step, as ns per parameter and share of the bandwidth
    python benchmarks/bench_step.py --device cpu --host     what a step costs outside its kernel
    python benchmarks/bench_step.py --device cuda           the step on layers of real models, as share of a copy's bandwidth
    python benchmarks/bench_step.py --device cuda --host    what a step costs the host, launches included

Contenders take turns and the median of their times counts, so that a busy machine disturbs all alike. None is timed before
its weights agree with an fp64 AdamW.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from contenders import HYPER, Block, Contender, all_contenders
from cuda_step import measure_on_gpu
from host_time import host_times

from badam_kernels.backends.cpu import isas

RESULTS = Path(__file__).parent / "results"
HIDDEN, INNER = 2048, 5632
_SETTLE_S = 0.03  # OpenMP's threads spin for some milliseconds after a contender's step, on the cores of the next one


def llama_layer(hidden: int, inner: int) -> list[tuple[int, ...]]:
    return [(hidden, hidden)] * 4 + [(inner, hidden)] * 2 + [(hidden, inner)] + [(hidden,)] * 2


def check(device: torch.device) -> None:
    """Three steps of every contender on a small layer agree with fp64; raises AssertionError."""
    block = Block.random(llama_layer(64, 176)).to(device)
    expected = [fp64_adamw(w, block.grads[name], steps=3) for name, w in block.weights.items()]
    for contender in all_contenders(block, device):
        for _ in range(3):
            contender.prepare()
            contender.step()
        for got, want in zip(contender.masters(), expected):
            error = (got.double() - want).abs()
            # Half an ulp of the weight per step, and an update right to a thousandth.
            bound = 3 * (2**-24 * want.abs() + 1e-3 * HYPER["lr"])
            assert (error <= bound).all(), f"{contender.name} is wrong by up to {error.max():.1e}"


def fp64_adamw(w: torch.Tensor, g: torch.Tensor, steps: int) -> torch.Tensor:
    w, g = w.double().view(-1), g.double().view(-1)
    (b1, b2), m, v = HYPER["betas"], torch.zeros_like(w), torch.zeros_like(w)
    for t in range(1, steps + 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        update = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + HYPER["eps"])
        w = w - HYPER["lr"] * (update + HYPER["weight_decay"] * w)
    return w


def in_place_pass(bytes_moved: int) -> Callable[[], object]:
    """torch multiplying a buffer in place, on the same threads, until it has moved that many bytes.

    A fair yardstick: like an optimizer it reads and writes memory it cannot keep in cache, with next to no arithmetic.
    """
    buffer = torch.ones(bytes_moved // 8)
    return lambda: buffer.mul_(1.0)


def median_times(contenders: list[Contender], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds + 1):
        for contender in contenders:
            contender.prepare()
            time.sleep(_SETTLE_S)
            started = time.perf_counter()
            contender.step()
            times[contender.name].append(time.perf_counter() - started)
    return {name: statistics.median(of_all[1:]) for name, of_all in times.items()}  # the first round warms up


def measure(device: torch.device, rounds: int) -> list[dict]:
    block = Block.random(llama_layer(HIDDEN, INNER))
    contenders = list(all_contenders(block, device))
    moved = max(c.moved_bytes for c in contenders[:2])
    sweep = in_place_pass(moved * block.numel)
    yardstick = Contender("in-place pass", moved, lambda: None, sweep, lambda: [])
    contenders.insert(0, yardstick)
    typical = median_times(contenders, rounds)
    peak = moved * block.numel / typical[yardstick.name]
    return [row(c, typical[c.name] / block.numel, peak) for c in contenders]


def row(contender: Contender, seconds: float, peak: float) -> dict:
    rate = contender.moved_bytes / seconds
    return {
        "step": contender.name,
        "ns/param": f"{seconds * 1e9:.3f}",
        "bytes/param": contender.moved_bytes,
        "GB/s": f"{rate / 1e9:.1f}",
        "% of in-place": f"{100 * rate / peak:.0f}",
    }


def report(rows: Iterable[dict], path: Path) -> None:
    """Write every row to `path` as it comes, so that a run that is cut short leaves what it measured; then print the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    with open(path, "w", newline="", buffering=1) as file:
        for row in rows:
            writer = csv.DictWriter(file, row.keys())
            if not written:
                writer.writeheader()
            writer.writerow(row)
            written.append(row)
    widths = {key: max(len(key), *(len(str(r[key])) for r in written)) for key in written[0]}
    for line in ({key: key for key in widths}, *written):
        print("  ".join(f"{line[key]!s:>{width}}" for key, width in widths.items()))
    print(f"written to {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds")
    parser.add_argument("--host", action="store_true", help="measure the host time of a step instead")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    built_for = isas()[-1] if isas() else "no extension"
    print(f"{platform.machine()} ({built_for}), {torch.get_num_threads()} threads, torch {torch.__version__}")
    if device.type == "cuda":
        print(f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}")
    if arguments.host:
        report(host_times(arguments.rounds, device), arguments.results / f"host_{device.type}.csv")
        return
    check(device)
    measured = measure_on_gpu if device.type == "cuda" else measure
    report(measured(device, arguments.rounds), arguments.results / f"step_{device.type}.csv")


if __name__ == "__main__":
    main()
