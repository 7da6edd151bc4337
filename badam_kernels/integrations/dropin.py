"""What the drop-in optimizers of badam share: names, groups, clipping left to the step."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from ..optimizer import BlockAdam
from .base_optimizer import check_group

__all__ = ["DropIn", "forget_clipping", "named_groups", "scheduled"]

_log = logging.getLogger(__name__)
_HOW = "pass list(model.named_parameters())"


class DropIn(BlockAdam):
    """What both optimizers of badam share."""

    named_parameters_list: list[tuple[str, Tensor]]

    @property
    def embedding_layer(self) -> Tensor | None:
        """The first parameter with "embed" in its name."""
        return next((p for n, p in self.named_parameters_list if "embed" in n), None)

    @property
    def lm_head_layer(self) -> Tensor | None:
        """The first parameter with "lm_head" in its name."""
        return next((p for n, p in self.named_parameters_list if "lm_head" in n), None)

    @torch.no_grad()
    def clip_next_step(self, max_norm: float, scale: float = 1.0) -> Tensor:
        """Let the next `step` clip the active block's gradients, multiplied by `scale`, to `max_norm`; their norm now.

        The gradients are not written: the step clips in fp32 what it reads.
        """
        self.max_grad_norm = float(max_norm)
        grads = self._active_gradients()
        if not grads:
            return torch.zeros(())
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
        return torch.linalg.vector_norm(torch.stack(norms)) * scale

    def _active_gradients(self) -> list[Tensor]:
        spans = [(span, self._params[span.name].grad) for span in self.active_block.spans]
        return [grad.reshape(-1)[span.start : span.stop] for span, grad in spans if grad is not None]


def forget_clipping(optimizer: DropIn, args: tuple, kwargs: dict) -> None:
    optimizer.max_grad_norm = None


def named_groups(groups: Iterable[dict], named: list[tuple[str, Tensor]]) -> list[dict]:
    """Copies of `groups` with (name, parameter) pairs; a parameter's name is its first in `named`."""
    names: dict[int, str] = {}
    for name, param in named:
        names.setdefault(id(param), name)
    result = []
    for group in groups:
        check_group(group)
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        nameless = [tuple(p.shape) for p in params if id(p) not in names]
        if nameless:
            raise ValueError(
                f"{len(nameless)} parameters have no name in named_parameters_list, shapes {nameless[:3]}: "
                f"{_HOW} of the same model"
            )
        result.append({**group, "params": [(names[id(p)], p) for p in params]})
    return result


def scheduled(groups: list[dict], named: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """What a partition may see: parameters in a group, under all their names, and frozen ones that explain the rest."""
    grouped = {id(param) for group in groups for _, param in group["params"]}
    left_out = [name for name, param in named if param.requires_grad and id(param) not in grouped]
    if left_out:
        _log.warning("%d parameter(s) are in no parameter group and do not train: %s", len(left_out), ", ".join(left_out[:5]))
    return [(name, param) for name, param in named if id(param) in grouped or not param.requires_grad]
