"""badam's ratio mode: AdamW on a part of every parameter at a time, as ranges or as scattered elements."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..blocks import Block, Partition, Span, partition
from .dropin import DropIn, forget_clipping, named_groups, scheduled
from .scatter import Scatter

__all__ = ["BlockOptimizerRatio"]

_log = logging.getLogger(__name__)
_CHECKED = ("amsgrad", "maximize", "differentiable")
_HOW_TO_COMPUTE = ("fused", "foreach", "capturable")


class BlockOptimizerRatio(DropIn):
    """AdamW on a part of every parameter at a time.

    param_groups           dicts ``{"params": [...], "weight_decay": ...}``, or parameters
    update_ratio           the part: 0.1 gives ten windows, trained one after the other
    switch_every           steps per window
    preserve_threshold     parameters with fewer elements train whole, always
    param_update_ratios    {a part of a name: another ratio for these parameters}
    mask_mode              "adjacent": a window is a range of elements; "scatter": a seeded random set of them
    optimizer_defaults     replaces lr, betas and eps
    keep_mask              "scatter": keep the active indices between steps instead of drawing them again
    include_embedding, include_lm_head   train the embeddings; the final norm and the head
    options                how torch's AdamW would compute (fused, foreach) does not matter here; other options are refused
    """

    def __init__(
        self,
        param_groups: Iterable[dict | Tensor],
        named_parameters_list: Iterable[tuple[str, Tensor]],
        update_ratio: float = 0.1,
        verbose: int = 1,
        switch_every: int | None = 100,
        preserve_threshold: int = 100,
        param_update_ratios: Mapping[str, float | None] | None = None,
        mask_mode: str = "adjacent",
        lr: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        optimizer_defaults: Mapping[str, Any] | None = None,
        keep_mask: bool = True,
        include_embedding: bool = False,
        include_lm_head: bool = False,
        **options: Any,
    ):
        if mask_mode not in ("adjacent", "scatter"):
            raise ValueError(f"mask_mode must be 'adjacent' or 'scatter'; got {mask_mode!r}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, **options} if optimizer_defaults is None else dict(optimizer_defaults)
        _check_options(defaults)
        self.named_parameters_list = named = list(named_parameters_list)
        given = list(param_groups)
        given = given if all(isinstance(group, dict) for group in given) else [{"params": given}]
        groups = named_groups([{**defaults, **group} for group in given], named)
        trainable = scheduled(groups, named)
        whole = partition(trainable, embeddings=include_embedding, head=include_lm_head, ratio=update_ratio)
        by_name = dict(trainable)
        counts = _window_counts(whole, by_name, update_ratio, param_update_ratios or {}, preserve_threshold)
        cut = {name: count for name, count in counts.items() if count > 1} if mask_mode == "scatter" else {}
        self._scatter = Scatter(by_name, cut, keep_mask)
        super().__init__(
            [{**group, "params": self._standing_in(group["params"])} for group in groups],
            blocks=Partition(tuple(_windows(by_name, counts, cut)), whole.skipped),
            schedule="ascending",
            switch_every=switch_every,
        )
        for ours, group in zip(self.param_groups, groups):
            ours["params"] = [param for _, param in group["params"]]
        self.update_ratio, self.mask_mode, self.keep_mask = update_ratio, mask_mode, keep_mask
        self.switch_every, self.preserve_threshold, self.verbose = switch_every, preserve_threshold, verbose
        self.include_embedding = include_embedding
        self.register_step_pre_hook(_gather)
        self.register_step_post_hook(_scatter_back)
        self.register_step_post_hook(forget_clipping)
        if verbose >= 1:
            _log.info("%d windows of %g of every parameter, %s", len(self.blocks), update_ratio, mask_mode)

    @property
    def current_block_index(self) -> int:
        """Index of the window that trains now."""
        return self.active_block_index

    def memory(self) -> dict[str, dict[str, int]]:
        """As BlockAdam's; `scatter` is what the active elements take beside their parameters."""
        report = super().memory()
        if self._scatter.nbytes:
            device = self._params[self.active_block.spans[0].name].device
            report["scatter"] = {"host_pageable" if device.type == "cpu" else str(device): self._scatter.nbytes}
        return report

    def export_fp32(self, path: Any) -> None:
        if self._scatter.stand_ins:
            raise ValueError("export_fp32 knows ranges of elements, not scattered ones: use mask_mode='adjacent'")
        super().export_fp32(path)

    def _standing_in(self, pairs: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        return [other for name, param in pairs for other in self._scatter.stand_ins.get(name, [(name, param)])]

    def _gather(self) -> None:
        self._scatter.gather(span.name for span in self.active_block.spans)

    def _active_gradients(self) -> list[Tensor]:
        self._gather()
        return super()._active_gradients()

    def _open_visit(self) -> None:
        self._gather()
        super()._open_visit()


def _check_options(options: Mapping[str, Any]) -> None:
    unknown = options.keys() - {"lr", "betas", "eps", "weight_decay", *_HOW_TO_COMPUTE, *_CHECKED}
    if unknown:
        raise TypeError(f"unexpected options {', '.join(sorted(unknown))}: expected those of AdamW, lr, betas, eps, weight_decay")


# --- windows of a ratio ---------------------------------------------------------------------------------------------


def _window_counts(
    whole: Partition, named: dict[str, Tensor], ratio: float, ratios: Mapping[str, float | None], threshold: int
) -> dict[str, int]:
    """How many windows each parameter that trains is cut into."""
    names = list(dict.fromkeys(span.name for block in whole for span in block.spans))
    for part, own in ratios.items():
        if not any(part in name for name in names):
            raise ValueError(f"{part!r} in param_update_ratios is in no name of a parameter that trains")
        if own is not None and not 0 < own <= 1:
            raise ValueError(f"ratios must be in (0, 1]; param_update_ratios has {own} for {part!r}")
    counts = {}
    for name in names:
        own = next((r for part, r in ratios.items() if part in name and r is not None), ratio)
        counts[name] = 1 if named[name].numel() < threshold else min(math.ceil(1 / own - 1e-9), named[name].numel())
    return counts


def _windows(named: dict[str, Tensor], counts: dict[str, int], cut: Mapping[str, int]) -> Iterable[Block]:
    """Block `i` holds window ``i % count`` of every parameter of one device; those in `cut` by their stand-ins."""
    for device in dict.fromkeys(named[name].device for name in counts):
        here = {name: count for name, count in counts.items() if named[name].device == device}
        total = max(here.values())
        for i in range(total):
            spans = []
            for name, count in here.items():
                numel, j = named[name].numel(), i % count
                start, stop = numel * j // count, numel * (j + 1) // count
                spans.append(Span(Scatter.key(name, j, count), 0, stop - start) if name in cut else Span(name, start, stop))
            yield Block(f"window {i} of {total} on {device}", tuple(spans))


# --- hooks ----------------------------------------------------------------------------------------------------------


def _gather(optimizer: BlockOptimizerRatio, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        optimizer._gather()
        return None

    def then_gather() -> Any:
        value = closure()
        optimizer._gather()
        return value

    return args[:1], {"closure": then_gather}


def _scatter_back(optimizer: BlockOptimizerRatio, args: tuple, kwargs: dict) -> None:
    optimizer._scatter.scatter()
