"""BlockAdam: block-coordinate Adam with exact fp32 masters (Luo et al., arXiv 2404.02827, algorithm 1)."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from . import backends, checkpoint, formats, groups as named_groups, ownership, rules
from .blocks import Block, Span
from .buffers import Buffers
from .loss_scale import LossScale
from .progress import Progress
from .schedule import Schedule
from .store import Memory, Store
from .trainable import Trainable
from .visit import Row, Visit

__all__ = ["BlockAdam"]

_log = logging.getLogger(__name__)


class BlockAdam(torch.optim.Optimizer):
    """Adam on one block of the parameters at a time.

    params           ``model.named_parameters()``, or parameter groups ``{"params": [(name, p), ...], "lr": ...}`` with
                     their own lr, betas, eps and weight_decay. Parameters are fp32, bf16 or fp16, contiguous
    lr, betas, eps, weight_decay   as in torch.optim.AdamW; for rule "sgd" the momentum is ``betas[0]``
    rule             "adamw" (decoupled decay), "adam" (L2 decay) or "sgd"
    blocks           "layers", a list of lists of name prefixes, or a `badam_kernels.blocks.partition(...)`
    schedule         "random", "ascending", "descending", "fixed", or a callable step -> block index
    switch_every     steps per visit (K); -1 or None: never switch
    start_block      index of the first block; None: the schedule's own
    format           how masters are kept: "auto", "master", "split" or a `badam_kernels.formats` value
    moments          "visit": fresh at every visit, as in the paper; "run": kept in the store between visits
    max_grad_norm    clip the L2 norm of the active block's gradients; a step with non-finite gradients is then skipped
    seed             of the random schedule
    backend          "auto", or the name of one
    static_grads     keep the active block's gradients in memory that never moves, as CUDA graphs need (see `replay`): buffers
                     as large as the largest block, which `zero_grad` zeroes. False: dropped, and made anew by autograd
    prefetch_depth   blocks after the next one that are brought to the device ahead of their visits, for short visits over slow
                     links: each takes device memory for one block's slots that live for the run
    loss_scale       for fp16 without a GradScaler, with ``optimizer.scale(loss).backward()``: a number, or "dynamic" (2**16,
                     doubled after 2000 successful steps, halved at an overflow, which is skipped)

    Idle parameters do not require grad, so a backward pass computes and keeps only the active block's gradients. Parameters
    in no block, and those frozen before, stay frozen. Weights may be edited from outside at any time and keep their edit.
    State per element beside weight and gradient: see `badam_kernels.formats`.

    Raises TypeError or ValueError for arguments that do not fit, naming what was expected.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves unscaling and the overflow check to `step`

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        rule: str = "adamw",
        blocks: str | Sequence = "layers",
        schedule: str | Callable[[int], int] = "random",
        switch_every: int | None = 100,
        start_block: int | None = None,
        format: str | formats.Format = "auto",
        moments: str = "visit",
        max_grad_norm: float | None = None,
        seed: int = 0,
        backend: str = "auto",
        static_grads: bool = False,
        prefetch_depth: int = 0,
        loss_scale: float | str | None = None,
    ):
        if moments not in ("visit", "run"):
            raise ValueError(f"moments must be 'visit' or 'run'; got {moments!r}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive or None; got {max_grad_norm!r}")
        if backend != "auto":
            backends.load(backend)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        groups, named = named_groups.normalise(params, defaults)
        ownership.refuse_rivals(named.values())
        named_groups.check_parameters(named)
        self._partition = named_groups.partition(named, blocks)
        self._schedule = Schedule(len(self._partition), schedule, switch_every, start_block, seed)
        self._rule, self._format = rules.resolve(rule), formats.resolve(format)
        self._loss_scale = None if loss_scale is None else LossScale(loss_scale)
        self._moments, self.max_grad_norm, self._backend_name = moments, max_grad_norm, backend
        self._params: dict[str, Tensor] = named
        spans = list(dict.fromkeys(span for block in self._partition for span in block.spans))
        self._codecs = {name: self._format.codec(named[name].dtype) for name in dict.fromkeys(s.name for s in spans)}

        self._sealed = False
        super().__init__(groups, defaults)
        self._sealed = True
        self._group_of = {name: i for i, group in enumerate(self.param_groups) for name in group["param_names"]}
        devices = {named[span.name].device for span in spans}
        self._store = Store({span: self._run_slots(span) for span in spans}, devices, prefetch_depth)
        self._row_steps: dict[Span, int] = {}
        self._buffers = Buffers(self.blocks, self._visit_slots)
        self._visit: Visit | None = None
        self._captured: tuple[Visit, int, Any] | None = None
        self._switch_hooks: OrderedDict[int, Callable] = OrderedDict()
        self._told: set[str] = set()
        self.grad_norm: Any = None
        self._progress = Progress()
        self._active = self._schedule(0)

        self._trainable = Trainable(self, named, static_grads)
        self._trainable.switch(self.active_block, *self._partition)
        for line in self._partition.skipped_lines():
            _log.warning(line)

    # --- what a user asks ---------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, in the order that the schedule's indices mean."""
        return tuple(self._partition)

    @property
    def active_block(self) -> Block:
        """The block that the next `step` updates."""
        return self._partition[self._active]

    @property
    def active_block_index(self) -> int:
        """Index of `active_block` in `blocks`."""
        return self._active

    @property
    def global_step(self) -> int:
        """Successful steps so far. Waits for the device where only that knows whether the last ones were."""
        return self._progress.settle()

    def register_switch_hook(self, hook: Callable[[BlockAdam, Block, Block], None]) -> RemovableHandle:
        """Call ``hook(optimizer, old_block, new_block)`` after every switch. The handle's ``remove()`` ends that."""
        handle = RemovableHandle(self._switch_hooks)
        self._switch_hooks[handle.id] = hook
        return handle

    def memory(self) -> Memory:
        """Bytes held beside weights and gradients, by slot ("w": what extends weights to fp32, "m", "v") and place. They add up.

        Its attributes `asked`, `reserved` and `touched` say of the store's part in host memory how large that is by the slots
        alone, with padding, and in physical memory now.
        """
        report = self._store.memory()
        report.update(self._buffers.nbytes())
        return report

    # --- the step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the active block with its gradients, then switch if the schedule says so; the closure's value.

        Parameters without a gradient are skipped. A non-finite gradient norm (seen with `max_grad_norm` or a GradScaler)
        leaves weights, moments, steps and schedule as they were.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._schedule(self._progress.at_most + 1)  # one that fails must do so before anything is written
        if self._visit is None:
            self._open_visit()
        visit = self._visit
        if visit.refresh() < len(visit.rows):
            self._tell_missing(visit.missing())
        scale, found_inf = self._scaling()
        capturing = _capturing(visit.device)
        apply = backends.recordable(self._backend) if capturing else self._backend.apply
        self.grad_norm, overflow = apply(visit, scale, self.max_grad_norm, found_inf)
        if self._loss_scale is not None:
            self._loss_scale.update(overflow)
        if capturing:
            self._captured = visit, visit.version, overflow
        else:
            self._count(overflow)
        return loss

    @torch.no_grad()
    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """One step, and all else that `graph` holds: a CUDA graph into which a `step` of this visit was captured.

        Brings lr and the other hyper-parameters to the device as they are now, replays, counts the step and switches if it is
        due. A graph serves one visit: its first step is an eager one, which allocates; then forward, backward and `step` are
        captured, with `static_grads` and `zero_grad` of this optimizer; under capture `step` launches its kernels and nothing
        else. Whether gradients are clipped and scaled is what it was at the capture. Step hooks do not run.

        Raises RuntimeError if nothing was captured in this visit, or if gradients or weights have moved since.
        """
        visit, version, overflow = self._captured or (None, 0, None)
        if visit is None or visit is not self._visit or visit.version != version:
            raise RuntimeError(
                "the graph holds no step of this visit on these gradients and weights: after a switch, take one step and capture "
                "again (`register_switch_hook` tells of switches)"
            )
        self._backend.upload(visit, self._scaling()[0], self.max_grad_norm)
        graph.replay()
        self._count(overflow)

    def _count(self, overflow: bool | Tensor) -> None:
        """What follows the kernels of a step: tell autograd, count, switch."""
        # Backends write through raw pointers; autograd must know that saved tensors are out of date.
        torch.autograd.graph.increment_version(self._written)
        self._progress.add(overflow)
        if self._schedule(self._progress.at_most) != self._active:
            following = self._schedule(self.global_step)
            if following != self._active:
                self._switch(following)

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale, for ``optimizer.scale(loss).backward()``; `loss` itself without `loss_scale`."""
        return loss if self._loss_scale is None else self._loss_scale.scale(loss)

    @property
    def loss_scale(self) -> float | Tensor | None:
        """The loss scale as it is now; a dynamic one is a tensor on the device."""
        return None if self._loss_scale is None else self._loss_scale.value

    def _scaling(self) -> tuple[float | Tensor | None, Tensor | None]:
        """(factor that unscales gradients, flag that says to skip the step), from the loss scale or a GradScaler."""
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if self._loss_scale is None:
            return None if grad_scale is None else torch.as_tensor(grad_scale).double().reciprocal(), found_inf
        if grad_scale is not None or found_inf is not None:
            raise ValueError("gradients are scaled twice, by a GradScaler and by loss_scale: use one of them")
        return self._loss_scale.inverse(self._visit.device), None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero all gradients; with `static_grads`, zero those of the active block where they are."""
        super().zero_grad(set_to_none or self._trainable.has_static_grads)
        self._trainable.zero_static_grads()

    def add_param_group(self, param_group: dict) -> None:
        """Only for the constructor: blocks are fixed once the optimizer exists."""
        if getattr(self, "_sealed", False):
            raise RuntimeError("BlockAdam's blocks are fixed at construction; pass all parameter groups to the constructor")
        super().add_param_group(param_group)

    def close(self) -> None:
        """Restore every `requires_grad` and give up all state. The optimizer cannot step afterwards."""
        self._trainable.restore()
        self._visit = None
        self._buffers.clear()
        self._store.close()
        self.step = self.state_dict = self.load_state_dict = self.export_fp32 = self._closed  # type: ignore[method-assign]

    def _closed(self, *args: Any) -> None:
        raise RuntimeError("this BlockAdam was closed; make a new one")

    # --- visits -------------------------------------------------------------------------------------------------------

    def _run_slots(self, span: Span) -> dict[str, torch.dtype]:
        """Slots of `span` that live for the run, and their dtypes."""
        codec = self._codecs[span.name]
        slots = {} if codec.auxiliary is None else {"w": codec.auxiliary}
        if self._moments == "run":
            slots |= dict.fromkeys(self._rule.moments, self._format.moment.primary)
        return slots

    def _open_visit(self) -> None:
        """Make the active block's rows from store and buffers; moments that live for the visit start at zero."""
        spans = self.active_block.spans
        for span in spans:
            codec, dtype = self._codecs[span.name], self._params[span.name].dtype
            if dtype is not codec.primary:
                raise RuntimeError(
                    f"{span.name!r} was {codec.primary} when BlockAdam was made and is now {dtype}. Make BlockAdam after "
                    f"model.to({dtype})."
                )
        device = self._params[spans[0].name].device
        if _capturing(device):
            raise RuntimeError("a CUDA graph is being captured before the first step of a visit: take that first, it allocates")
        stored = self._store.fetch(spans, device)
        fresh = {slot: tensors for (slot, *_), (_, tensors) in self._buffers.used(self.active_block).items()}
        rows = []
        for i, span in enumerate(spans):
            slots = stored[span] | {slot: tensors[i] for slot, tensors in fresh.items()}
            rows.append(
                Row(
                    span,
                    self._params[span.name],
                    self._codecs[span.name],
                    slots.get("w"),
                    tuple(slots[slot] for slot in self._rule.moments),
                    self._group_of[span.name],
                    self._row_steps.get(span, 0),
                )
            )
        self._backend = backends.resolve(self._backend_name, device)
        self._written = list({id(row.param): row.param for row in rows}.values())
        self._visit = Visit(self._rule, rows, self.param_groups)

    def _visit_slots(self, block: Block) -> dict[tuple[str, torch.dtype, torch.device], list[int]]:
        """Sizes of the slots of `block` that live for the visit, for `Buffers`."""
        if self._moments == "run":
            return {}
        device, sizes = self._params[block.spans[0].name].device, [span.numel for span in block.spans]
        return {(slot, self._format.moment.primary, device): sizes for slot in self._rule.moments}

    def _close_visit(self) -> None:
        """Return the run-lifetime slots to the store."""
        if self._visit is None:
            return
        spans = [row.span for row in self._visit.rows]
        if self._moments == "run":
            self._row_steps.update(zip(spans, self._visit.steps))
        self._store.flush(spans)
        self._visit = None

    def _switch(self, index: int) -> None:
        old, self._active = self.active_block, index
        self._close_visit()
        new = self.active_block
        for upcoming in self._schedule.upcoming(self._progress.at_most, 1 + self._store.prefetch_depth):
            spans = self._partition[upcoming].spans
            self._store.prefetch(spans, self._params[spans[0].name].device)
        self._trainable.switch(self.active_block, old)
        for hook in list(self._switch_hooks.values()):
            hook(self, old, new)

    def _resume(self, global_step: int, schedule: Schedule, moments: dict[Span, dict[str, Tensor]]) -> None:
        """Continue at `global_step`, with `moments` where they live for the visit; the store is already set."""
        old, self._schedule, self._progress = self.active_block, schedule, Progress(global_step)
        self._active = schedule(global_step)
        self._trainable.switch(self.active_block, old)
        if moments:
            self._open_visit()
            for row in self._visit.rows:
                for held, slot in zip(row.moments, self._rule.moments):
                    held.copy_(moments[row.span][slot].reshape(-1))
        if self._moments == "visit":
            self._row_steps.clear()

    def _tell_missing(self, names: list[str]) -> None:
        new = [name for name in names if name not in self._told]
        if new:
            self._told.update(new)
            _log.warning("no gradient for %d parameter(s) of the active block, skipped: %s", len(new), ", ".join(new[:5]))

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All state but the weights, keyed by parameter name; plain tensors, so ``weights_only=True`` loads it.

        Saved together with the model's state dict, training resumes bitwise. Tensors may share memory with the live state,
        as torch's do: save or deepcopy them before the next `step`.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state = checkpoint.pack(self)
        for hook in self._optimizer_state_dict_post_hooks.values():
            state = hook(self, state) or state
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`. Load the model's weights too, before or after.

        Hyper-parameters, schedule, interval and seed become the state's. Raises ValueError, with nothing changed, if the state
        is damaged or for another model, partition, rule or codec.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        checkpoint.unpack(self, state_dict)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def export_fp32(self, path: Any) -> None:
        """Write the exact fp32 value of every parameter to `path` as safetensors; atomic, one parameter in memory at a time."""
        checkpoint.export_fp32(self, path)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "BlockAdam drives live parameters and cannot be copied or pickled; use state_dict() and load_state_dict()"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(None)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
