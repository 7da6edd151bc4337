"""The optimizer step on a GPU: layers of real models, timed by events, beside a device-to-device copy in the same run."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator

import torch
from contenders import BF16, Block, Contender, all_contenders

COPY_BYTES, SWEEPS = 2**30, 32


def layer(hidden: int, inner: int, key_value: int, biases: bool = False) -> list[tuple[int, ...]]:
    """Shapes of one layer of a Llama or Qwen2: attention, gated MLP, two norms."""
    projections = [(hidden, hidden), (key_value, hidden), (key_value, hidden), (hidden, hidden)]
    shapes = [*projections, (inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,)]
    return shapes + ([(hidden,), (key_value,), (key_value,)] if biases else [])


BLOCKS = {
    "Llama-3-8B layer": layer(4096, 14336, 1024),
    "Llama-3-70B layer": layer(8192, 28672, 1024),
    "Qwen2.5-0.5B layer": layer(896, 4864, 128, biases=True),
    "MoE of 400 experts": [(256, 2048), (256, 2048), (2048, 256)] * 400,
}


def random_block(shapes: list[tuple[int, ...]], device: torch.device) -> Block:
    """`Block.random`, made on the device: the largest layer has 856 M parameters."""
    generator = torch.Generator(device).manual_seed(0)

    def tensors(scale: float) -> dict[str, torch.Tensor]:
        return {
            f"layers.0.{i}": torch.empty(shape, device=device, dtype=BF16).normal_(0, scale, generator=generator)
            for i, shape in enumerate(shapes)
        }

    return Block(tensors(0.02), tensors(1e-3))


def milliseconds(prepare: Callable[[], object], step: Callable[[], object], rounds: int, sweep: torch.Tensor) -> float:
    """The median time of `step` on the device.

    Before each, a buffer larger than the L2 cache is overwritten, so that all inputs are cold; SWEEPS times, so that the host
    has queued the whole step before the device begins it, as it has in training behind a backward pass. Then it is read, so
    that the cache holds nothing of it that would be written back during the step.
    """
    times = []
    for i in range(rounds + 3):
        prepare()
        for _ in range(SWEEPS):
            sweep.fill_(i)
        sweep.amax()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[3:])


def copy(device: torch.device) -> Contender:
    """A device-to-device copy: nothing that reads and writes memory is faster."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return Contender("device-to-device copy", 2, lambda: None, lambda: target.copy_(source), lambda: [])


def measure_on_gpu(device: torch.device, rounds: int) -> Iterator[dict]:
    sweep = torch.empty(4 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)
    yardstick = copy(device)
    time_ms = milliseconds(yardstick.prepare, yardstick.step, rounds, sweep)
    peak = 2 * COPY_BYTES / time_ms / 1e6
    yield _row(f"{COPY_BYTES:,} bytes", yardstick, 2 * COPY_BYTES, time_ms, peak)
    for name, shapes in BLOCKS.items():
        block = random_block(shapes, device)
        for contender in all_contenders(block, device):
            time_ms = milliseconds(contender.prepare, contender.step, rounds, sweep)
            yield _row(name, contender, contender.moved_bytes * block.numel, time_ms, peak)
            del contender
            gc.collect()
            torch.cuda.empty_cache()


def _row(block: str, contender: Contender, moved_bytes: int, time_ms: float, peak_gbps: float) -> dict:
    gbps = moved_bytes / time_ms / 1e6
    return {
        "block": block,
        "step": contender.name,
        "ms": f"{time_ms:.3f}",
        "bytes/param": contender.moved_bytes,
        "GB/s": f"{gbps:.0f}",
        "% of copy": f"{100 * gbps / peak_gbps:.1f}",
    }
