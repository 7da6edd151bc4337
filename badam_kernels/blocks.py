"""Spans, blocks and partitions: what trains together."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Block", "Span"]


@dataclass(frozen=True, order=True)
class Span:
    """The half-open range [start, stop) of the flattened elements of the parameter called `name`."""

    name: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Block:
    """Spans that train together, in order."""

    name: str
    spans: tuple[Span, ...]

    @property
    def numel(self) -> int:
        return sum(span.numel for span in self.spans)
