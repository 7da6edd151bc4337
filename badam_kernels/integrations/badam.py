"""The drop-in for badam 1.x: its names, signatures and attributes over BlockAdam.

>>> import badam_kernels.integrations.badam as badam
>>> optimizer = badam.BlockOptimizer(base_optimizer, list(model.named_parameters()))  # doctest: +SKIP

Where badam 1.4 differs from the paper or from what was asked for (weight decay and lr per group, masters at a switch, the
length of the first visit, resuming), this does what was asked for.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..blocks import Block, partition
from ..optimizer import BlockAdam
from .base_optimizer import check_group, hyper, rule_of
from .dropin import DropIn, forget_clipping, named_groups, scheduled
from .ratio import BlockOptimizerRatio

__all__ = [
    "BAdamCallback",
    "BlockOptimizer",
    "BlockOptimizerRatio",
    "clip_grad_norm_for_sparse_tensor",
    "clip_grad_norm_old_version",
]

_log = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    if name == "BAdamCallback":  # needs transformers, which the optimizers do not
        from .transformers import BAdamCallback

        return BAdamCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class BlockOptimizer(DropIn):
    """Trains one block of layers at a time with the rule and the hyper-parameters of `base_optimizer`.

    base_optimizer         AdamW, Adam or SGD; it never steps and holds no state. Its parameter groups become this optimizer's
    named_parameters_list  ``model.named_parameters()``
    block_prefix_list      a list of name prefixes per block; None: one block per repeated layer
    switch_block_every     steps per visit; -1 or None: never switch
    active_modules         name prefixes of modules that train in every block
    include_embedding, include_lm_head   add a block of the embeddings, one of final norm and head
    verbose, log_fn        1: say at every switch which prefixes train, through `log_fn` or this module's logger
    bug_compatible         badam's own habits: a first visit of K-1 steps, and base_optimizer's default weight decay for every
                           parameter, whatever its group says

    Raises TypeError or ValueError for what cannot be done, naming it.
    """

    def __init__(
        self,
        base_optimizer: torch.optim.Optimizer,
        named_parameters_list: Iterable[tuple[str, Tensor]],
        block_prefix_list: Iterable[Iterable[str]] | None = None,
        switch_block_every: int | None = 50,
        start_block: int | None = None,
        switch_mode: str = "descending",
        active_modules: Iterable[str] = (),
        include_embedding: bool = False,
        include_lm_head: bool = False,
        verbose: int = 1,
        log_fn: Any = None,
        ds_zero3_enabled: bool | None = None,
        *,
        bug_compatible: bool = False,
    ):
        if ds_zero3_enabled:
            raise ValueError("DeepSpeed ZeRO-3 is not supported by this optimizer: train without it")
        self._rule_name = rule_of(base_optimizer)
        self.named_parameters_list = named = list(named_parameters_list)
        self.active_modules = list(active_modules)
        groups = named_groups(base_optimizer.param_groups, named)
        if bug_compatible:
            for group in groups:
                group["weight_decay"] = base_optimizer.defaults.get("weight_decay", 0.0)
        elif _differs(groups, base_optimizer, switch_block_every):
            _warn(groups, base_optimizer, switch_block_every)
        prefixes = None if block_prefix_list is None else [list(block) for block in block_prefix_list]
        default = prefixes is None
        super().__init__(
            [{"params": group["params"], **hyper(group, self._rule_name)} for group in groups],
            rule=self._rule_name,
            blocks=partition(
                scheduled(groups, named),
                by="layers" if default else prefixes,
                embeddings=default and include_embedding,
                head=default and include_lm_head,
                always=self.active_modules,
            ),
            schedule=switch_mode,
            switch_every=switch_block_every,
            start_block=start_block,
        )
        self._adopt(base_optimizer)
        self._check_lora()
        self.block_prefix_list = [self._prefixes(block, prefixes or [[f"{block.name}."]]) for block in self.blocks]
        self.block_num = len(self.blocks)
        if bug_compatible and (switch_block_every or 0) > 1:
            self._schedule = dataclasses.replace(self._schedule, first_step=-1)
        self.switch_mode, self.switch_block_every = switch_mode, switch_block_every
        self.verbose, self.log_fn = verbose, log_fn
        self.register_step_pre_hook(_follow_base)
        self.register_step_post_hook(forget_clipping)
        self.register_switch_hook(_say_prefixes)
        _say_prefixes(self)

    def _adopt(self, base_optimizer: torch.optim.Optimizer) -> None:
        """Share the group dicts with `base_optimizer`, so that what is written through either is read by both."""
        for theirs, ours in zip(base_optimizer.param_groups, self.param_groups):
            theirs.update(ours)
        self.param_groups = base_optimizer.param_groups
        self.base_optimizer, self.defaults = base_optimizer, base_optimizer.defaults

    def _check_lora(self) -> None:
        self.lora_mode = any("lora" in name for name, _ in self.named_parameters_list)
        if self.lora_mode and not any("lora" in span.name for block in self.blocks for span in block.spans):
            self.close()
            raise ValueError(
                "expected trainable parameters with 'lora' in their names in some block; there are none: check block_prefix_list"
            )

    @property
    def current_block_idx(self) -> int:
        """Index of the block that trains now."""
        return self.active_block_index

    @property
    def block_order(self) -> list[int]:
        """The blocks that this sweep still has to visit, the next one last."""
        last = (self._visit_number // self.block_num + 1) * self.block_num
        return [self._block_of_visit(visit) for visit in range(last - 1, self._visit_number, -1)]

    @property
    def active_param_prefixs(self) -> list[str]:
        """Prefixes of the parameters that train now."""
        return self.block_prefix_list[self.active_block_index] + self.active_modules

    def switch_trainable_params(self, verbose: int | None = None) -> None:
        """End the current visit now; the next block gets a whole one."""
        next_visit = self._visit_number + 1
        self._schedule = dataclasses.replace(self._schedule, first_step=self.global_step, first_visit=next_visit)
        self._switch(self._schedule(self.global_step))

    @property
    def _visit_number(self) -> int:
        return self._schedule.visit(self.global_step)

    def _block_of_visit(self, visit: int) -> int:
        return dataclasses.replace(self._schedule, first_step=0, first_visit=visit)(0)

    def _prefixes(self, block: Block, candidates: list[list[str]]) -> list[str]:
        """The candidate that `block` was made from; its names where it is a part of one."""
        names = [span.name for span in block.spans if not _under(span.name, self.active_modules)]
        whole = (prefixes for prefixes in candidates if all(_under(name, prefixes) for name in names))
        return next(whole, names)


def _under(name: str, prefixes: list[str]) -> bool:
    return any(f"{name}.".startswith(prefix.rstrip(".") + ".") for prefix in prefixes)


def _say_prefixes(optimizer: BlockOptimizer, *blocks: Block) -> None:
    if optimizer.verbose >= 1:
        say = optimizer.log_fn if callable(optimizer.log_fn) else _log.info
        say(f"Parameters with the following prefix will be trainable: {optimizer.active_param_prefixs}")


def _follow_base(optimizer: BlockOptimizer, args: tuple, kwargs: dict) -> None:
    """Values that a user or a scheduler wrote into the groups since."""
    for group in optimizer.param_groups:
        check_group(group)
        group["betas"] = hyper(group, optimizer._rule_name)["betas"]
    optimizer.base_optimizer._opt_called = True  # or a scheduler on it warns that it was never stepped


# --- badam's habits -------------------------------------------------------------------------------------------------


def _decays(groups: list[dict]) -> list[float]:
    return sorted({float(group.get("weight_decay", 0.0)) for group in groups if group["params"]})


def _differs(groups: list[dict], base: torch.optim.Optimizer, every: int | None) -> bool:
    return (every is not None and every > 1) or _decays(groups) != [float(base.defaults.get("weight_decay", 0.0))]


def _warn(groups: list[dict], base: torch.optim.Optimizer, every: int | None) -> None:
    badams = float(base.defaults.get("weight_decay", 0.0))
    steps = f"the first visit has {every} steps (badam 1.4: {every - 1})" if every is not None and every > 1 else ""
    decay = f"weight decay is {', '.join(map(str, _decays(groups)))} as the groups say (badam 1.4: {badams} for all)"
    parts = [part for part in (steps, decay if _decays(groups) != [badams] else "") if part]
    warnings.warn(f"{'; '.join(parts)}. bug_compatible=True gives badam's numbers.", UserWarning, stacklevel=3)


# --- clipping -------------------------------------------------------------------------------------------------------


def clip_grad_norm_old_version(self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
    """Clip for an accelerator: bind it with ``MethodType(clip_grad_norm_old_version, accelerator)`` over `clip_grad_norm_`.

    For an optimizer of this module the step itself unscales and clips, in fp32, without writing a gradient: that is what
    makes fp16 models work under a GradScaler. Otherwise as accelerate's own. Returns the norm before clipping.
    """
    inner = [_unwrapped(optimizer) for optimizer in self._optimizers]
    if len(inner) != 1 or not isinstance(inner[0], DropIn) or norm_type != 2:
        return type(self).clip_grad_norm_(self, parameters, max_norm, norm_type)
    scaler = getattr(self, "scaler", None)
    return inner[0].clip_next_step(max_norm, 1.0 if scaler is None else 1.0 / scaler.get_scale())


clip_grad_norm_for_sparse_tensor = clip_grad_norm_old_version


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrapper, if it is wrapped."""
    while not isinstance(optimizer, BlockAdam) and isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer
