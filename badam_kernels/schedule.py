"""Schedules: which block trains at which step, as a pure function of the step.

Nothing here has state, so the schedule can be asked about the future (prefetch) and a resumed run needs only the step.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["ORDERS", "Schedule"]

ORDERS = ("ascending", "descending", "random", "fixed")
_SIGHT = 256


@dataclass(frozen=True)
class Schedule:
    """Maps a step (0 for the first) to a block index in ``range(num_blocks)``.

    num_blocks     how many blocks there are
    order          "ascending", "descending", "random" (every sweep its own permutation), "fixed", or a callable step -> block
    switch_every   steps per visit (K in the paper); -1 or None: stay on the first block
    start_block    the first block to train; the rest of the order follows from it. None: 0, or the last for "descending",
                   or the permutation's own first for "random"
    seed           seeds the permutations; the global random state is never touched
    first_step, first_visit   visit number `first_visit` began at `first_step`: moves the steps at which visits end, and
                   the place in the order, for a run whose visits were cut short by hand

    Raises ValueError or TypeError for anything else.
    """

    num_blocks: int
    order: str | Callable[[int], int] = "random"
    switch_every: int | None = 100
    start_block: int | None = None
    seed: int = 0
    first_step: int = 0
    first_visit: int = 0

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ValueError(f"a schedule needs at least one block; got {self.num_blocks}")
        if not callable(self.order) and self.order not in ORDERS:
            raise ValueError(f"schedule must be one of {', '.join(map(repr, ORDERS))} or a callable; got {self.order!r}")
        every = self.switch_every
        if every is not None and (isinstance(every, bool) or not isinstance(every, int)):
            raise TypeError(f"switch_every must be an int or None; got {every!r}")
        if every is not None and every < 1 and every != -1:
            raise ValueError(f"switch_every must be at least 1, or -1 or None to never switch; got {every}")
        start = self.start_block
        if start is not None:
            if isinstance(start, bool) or not isinstance(start, int):
                raise TypeError(f"start_block must be an int or None; got {start!r}")
            if callable(self.order):
                raise ValueError("start_block cannot be combined with a callable schedule: let the callable return it at step 0")
            if not 0 <= start < self.num_blocks:
                raise ValueError(
                    f"start_block must be in [0, {self.num_blocks}), there are {self.num_blocks} blocks; got {start}"
                )

    def __call__(self, step: int) -> int:
        """The block that trains at `step`."""
        if callable(self.order):
            block = self.order(step)
            if not isinstance(block, int) or not 0 <= block < self.num_blocks:
                raise ValueError(f"the schedule returned {block!r} for step {step}; expected an int in [0, {self.num_blocks})")
            return block
        visit = 0 if self.order == "fixed" else self.visit(step)
        if self.order == "random":
            sweep, place = divmod(visit, self.num_blocks)
            return _permutation(self.num_blocks, self.seed, sweep, self.start_block if sweep == 0 else None)[place]
        start = self.start_block
        if self.order == "descending":
            return ((self.num_blocks - 1 if start is None else start) - visit) % self.num_blocks
        return ((start or 0) + visit) % self.num_blocks

    def upcoming(self, step: int, count: int) -> list[int]:
        """The blocks that train from `step` on, `count` at most, each once, in the order in which they come.

        Looks 256 visits ahead, or 256 steps for a callable order, and not beyond where that raises.
        """
        never = self.switch_every is None or self.switch_every == -1
        stride = 1 if callable(self.order) or never else self.switch_every
        found: dict[int, None] = {}
        for later in range(step, step + _SIGHT * stride, stride):
            if len(found) == min(count, self.num_blocks):
                break
            try:
                found[self(later)] = None
            except Exception:  # a callable may know no more steps than the run will take; step() raises what matters
                break
        return list(found)

    def visit(self, step: int) -> int:
        """The number of the visit that `step` belongs to, 0 for the first. Not for a callable order."""
        never = self.switch_every is None or self.switch_every == -1
        return self.first_visit + (0 if never else (step - self.first_step) // self.switch_every)


@functools.lru_cache(maxsize=8)
def _permutation(num_blocks: int, seed: int, sweep: int, first: int | None) -> list[int]:
    permutation = list(range(num_blocks))
    random.Random(f"{seed}/{sweep}").shuffle(permutation)
    if first is not None:
        permutation.remove(first)
        permutation.insert(0, first)
    return permutation
