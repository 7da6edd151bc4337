"""Optimizers on one block of bf16 weights (or of fp32 weights, for those that know nothing else), behind one interface."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from badam_kernels import formats, rules
from badam_kernels.backends import resolve
from badam_kernels.blocks import Span
from badam_kernels.visit import Row, Visit

HYPER = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""The decay is torch's default, because badam 1.4 resets it to that whatever is asked."""
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Block:
    """Initial weights and gradients, bf16, by name."""

    weights: dict[str, Tensor]
    grads: dict[str, Tensor]

    @classmethod
    def random(cls, shapes: Sequence[tuple[int, ...]]) -> Block:
        generator = torch.Generator().manual_seed(0)

        def tensors(scale: float) -> dict[str, Tensor]:
            normal = (torch.randn(shape, generator=generator) * scale for shape in shapes)
            return {f"layers.0.{i}": x.to(BF16) for i, x in enumerate(normal)}

        return cls(tensors(0.02), tensors(1e-3))

    def to(self, device: torch.device) -> Block:
        return Block(*({name: t.to(device) for name, t in tensors.items()} for tensors in (self.weights, self.grads)))

    @property
    def numel(self) -> int:
        return sum(w.numel() for w in self.weights.values())

    def parameters(self, dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
        return {name: torch.nn.Parameter(w.detach().clone().to(dtype)) for name, w in self.weights.items()}


@dataclass
class Contender:
    """`prepare` readies the gradients and is not timed, `step` is; `masters` gives the fp32 weights."""

    name: str
    moved_bytes: int
    prepare: Callable[[], object]
    step: Callable[[], object]
    masters: Callable[[], list[Tensor]]


def ours(block: Block, format: formats.Format, device: torch.device) -> Contender:
    codec, params = format.codec(BF16), block.parameters(BF16)
    rows = []
    for name, p in params.items():
        p.grad = block.grads[name]
        auxiliary, m, v = (torch.zeros(p.numel(), dtype=dtype, device=device) for dtype in (codec.auxiliary, FP32, FP32))
        rows.append(Row(Span(name, 0, p.numel()), p, codec, auxiliary, (m, v), 0))
    visit, backend = Visit(rules.ADAMW, rows, [HYPER]), resolve("auto", device)
    return Contender(
        f"ours {format.name} ({backend.name})",
        format.moved_bytes(BF16),
        lambda: None,
        lambda: (visit.refresh(), backend.apply(visit, None, None)),
        lambda: [codec.decode(row.flat(row.param), row.auxiliary) for row in rows],
    )


def torch_adamw(block: Block, grads: dict[str, Tensor], **how: bool) -> Contender:
    """torch on fp32 weights and gradients: no 16-bit weight at all, so it moves no fewer bytes than an fp32 optimizer must."""
    params = block.parameters(FP32)
    for name, p in params.items():
        p.grad = grads[name]
    optimizer = torch.optim.AdamW(params.values(), **HYPER, **how)
    return Contender(
        f"torch AdamW {next(iter(how))} fp32",
        formats.AUTO.moved_bytes(FP32),
        lambda: None,
        optimizer.step,
        lambda: [p.detach().view(-1) for p in params.values()],
    )


def badam(block: Block, kind: str, **how: bool) -> Contender:
    """badam's own BlockOptimizer over torch's AdamW. Its step drops the gradients, so they are set again before each."""
    from badam import BlockOptimizer

    params = block.parameters(BF16)
    base = torch.optim.AdamW(params.values(), **HYPER, **how)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints whatever `verbose` says
        optimizer = BlockOptimizer(
            base, list(params.items()), [["layers.0."]], switch_block_every=10**9, start_block=0, switch_mode="fixed", verbose=0
        )

    def prepare() -> None:
        for name, p in params.items():
            p.grad = block.grads[name]

    def masters() -> list[Tensor]:
        high = list(optimizer.param_idx2hp.values())
        for h, p in zip(high, params.values(), strict=True):
            assert torch.equal(h.detach().to(BF16), p.detach()), "badam's weight is not its master, rounded"
        return [h.detach().view(-1) for h in high]

    # fp32 AdamW, and around it: bf16 gradient to fp32 (6), master to a bf16 copy (6), copy to weight (4).
    return Contender(f"badam 1.4 over {kind}", formats.AUTO.moved_bytes(FP32) + 16, prepare, optimizer.step, masters)


def deepspeed(block: Block) -> Contender:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    params = block.parameters(BF16)
    for name, p in params.items():
        p.grad = block.grads[name]
    optimizer = DeepSpeedCPUAdam(list(params.values()), **HYPER, adamw_mode=True)
    moved = 2 * 2 + 2 + 2 * formats.FP32.moved_bytes  # no master: weights are bf16 alone
    return Contender("DeepSpeedCPUAdam bf16", moved, lambda: None, optimizer.step, lambda: [])


def _without_master(name: str, moved: int, kind: type, block: Block, **how) -> Contender:
    """An optimizer whose moments have 8 bits: its weights drift from fp64's, so there is nothing to check them against."""
    params = block.parameters(BF16)
    for key, p in params.items():
        p.grad = block.grads[key]
    optimizer = kind(list(params.values()), **HYPER, **how)
    return Contender(name, moved, lambda: None, optimizer.step, lambda: [])


def bitsandbytes_8bit(block: Block) -> Contender:
    from bitsandbytes.optim import AdamW8bit

    return _without_master("bitsandbytes AdamW8bit bf16", 2 * 2 + 2 + 2 * 2, AdamW8bit, block)


def flashoptim(block: Block) -> Contender:
    from flashoptim import FlashAdamW

    # Weights of 24 bits: bf16, and a byte beside it.
    return _without_master("flashoptim FlashAdamW", 2 * 3 + 2 + 2 * 2, FlashAdamW, block, master_weight_bits=24)


@functools.cache
def _available(name: str) -> bool:
    """Whether the rival `name` is installed; one that cannot be imported is left out, and said to be."""
    if importlib.util.find_spec(name) is None:
        return False
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"{name} left out: {error!r}")
        return False
    return True


def all_contenders(block: Block, device: torch.device) -> Iterator[Contender]:
    """One after the other, so that the caller need not hold them all in memory."""
    grads = {name: g.float() for name, g in block.grads.items()}
    yield ours(block, formats.MASTER, device)
    yield ours(block, formats.SPLIT, device)
    yield torch_adamw(block, grads, fused=True)
    yield torch_adamw(block, grads, foreach=True)
    if _available("badam"):
        yield badam(block, "fused", fused=True)
        yield badam(block, "foreach", foreach=True)
        yield badam(block, "for-loop", foreach=False)
    if device.type == "cpu" and _available("deepspeed"):
        yield deepspeed(block)
    for name, make in (("bitsandbytes", bitsandbytes_8bit), ("flashoptim", flashoptim)):
        if device.type == "cuda" and _available(name):
            try:
                contender = make(block)
                contender.step()
            except Exception as error:  # one that does not work with this torch must not cost the others their figures
                print(f"{name} left out: {error!r}")
            else:
                yield contender
