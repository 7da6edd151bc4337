"""Spans, blocks and partitions: what trains together.

`partition` reads names, shapes, dtypes and devices, never a weight, so that it works on the meta device too.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .layers import EMBEDDINGS, HEAD, TIED, UNKNOWN, Layer, Param, find_layers, find_roles

__all__ = ["Block", "Partition", "Skipped", "Span", "partition"]

_FROZEN = "requires_grad is False"
_EMPTY = "it has no elements"
_REASONS = {
    EMBEDDINGS: "embeddings and what else feeds the layers: train it with embeddings=True",
    HEAD: "final norm, head and what else follows the layers: train it with head=True",
    TIED: "embeddings and head in one: train it with embeddings=True or head=True",
    UNKNOWN: "in no block: add its prefix to a prefix list or to always",
}


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


@dataclass(frozen=True)
class Skipped:
    """A parameter that no block trains, and why."""

    name: str
    numel: int
    reason: str


@dataclass(frozen=True)
class Partition(Sequence):
    """The blocks of a model in order, and the parameters that are in none of them."""

    blocks: tuple[Block, ...]
    skipped: tuple[Skipped, ...] = ()

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    def __getitem__(self, index):
        return self.blocks[index]

    def skipped_lines(self) -> list[str]:
        """A line for each reason: the first names, how many elements, why, and what to do about it."""
        groups = defaultdict(list)
        for item in self.skipped:
            groups[item.reason].append(item)
        return [
            f"not trained: {_shown([item.name for item in items])} ({sum(item.numel for item in items):,} elements): {reason}"
            for reason, items in groups.items()
        ]


def partition(
    named_parameters: Iterable[tuple[str, Tensor]],
    by: str | Sequence[Sequence[str]] = "layers",
    *,
    embeddings: bool = False,
    head: bool = False,
    always: Sequence[str] = (),
    max_bytes: int | None = None,
    ratio: float | None = None,
) -> Partition:
    """Divides the trainable parameters of a model into blocks; each trainable element is in one block or in `skipped`.

    named_parameters  what `model.named_parameters()` gives, frozen parameters included. A tensor under two names counts
                      once, under the first
    by                "layers": one block per repeated layer (see `find_layers`). Or a list of prefix lists, one per block:
                      a prefix is whole dotted components from the start of the name, so `model.layers.1` is not `model.layers.10`
    embeddings        adds a first block: embeddings, patch and position embeddings, projectors, all that feeds a layer
    head              adds a last block: final norms, heads, poolers, all that follows the layers. A head tied to the
                      embeddings is in the embeddings' block if both are asked for
    always            prefixes of modules that train in every block, on top of its own spans
    max_bytes         most bytes of weights (numel x itemsize) in a block, without `always`: neighbouring layers of a stack are
                      merged, larger blocks are split between parameters, a larger matrix between rows, a larger row inside it
    ratio             instead: ceil(1 / ratio) blocks, at most the largest parameter's elements; each block is one contiguous
                      range of every parameter, equal within 16 elements

    The parameters of a block are on one device: a block over two is split. Raises TypeError or ValueError if the arguments
    contradict each other or the names, or if nothing would train.
    """
    params = _collect(named_parameters)
    _check_arguments(by, max_bytes, ratio)
    if by == "layers":
        slots, places = _layer_slots(params, needed=ratio is None)
    else:
        slots, places = _prefix_slots(params, by)
    asked = {EMBEDDINGS: embeddings, HEAD: head, UNKNOWN: ratio is not None}
    groups, common, skipped = _distribute(params, slots, places, asked, set(_matching(params, always, "always")))
    if not groups:
        raise ValueError("\n".join(["no block has anything to train.", *Partition((), skipped).skipped_lines()]))
    if ratio is not None:
        blocks = _by_ratio(groups, ratio)
    elif max_bytes is not None:
        blocks = _by_size(groups, max_bytes)
    else:
        blocks = [Block(group.name, _whole(group.params)) for group in groups]
    return Partition(tuple(Block(block.name, block.spans + common) for block in blocks), skipped)


def _collect(named_parameters: Iterable[tuple[str, Tensor]]) -> list[Param]:
    how = "pass model.named_parameters()"
    if isinstance(named_parameters, (Tensor, torch.nn.Module, str)) or not isinstance(named_parameters, Iterable):
        raise TypeError(f"expected (name, parameter) pairs; got a {type(named_parameters).__name__}: {how}")
    names: dict[int, list[str]] = {}
    tensors: dict[str, Tensor] = {}
    for item in named_parameters:
        pair = isinstance(item, (tuple, list)) and len(item) == 2
        if not pair or not isinstance(item[0], str) or not isinstance(item[1], Tensor):
            raise TypeError(f"expected (name, parameter) pairs; got a {type(item).__name__}: {how}")
        name, tensor = item
        if tensors.setdefault(name, tensor) is not tensor:
            raise ValueError(f"expected one parameter per name; got two called {name!r}")
        known = names.setdefault(id(tensor), [])
        if name not in known:
            known.append(name)
    if not tensors:
        raise ValueError(f"expected parameters; got none: {how} (a generator can be read only once)")
    _check_storage([(known[0], tensors[known[0]]) for known in names.values()])
    named = ((tuple(known), tensors[known[0]]) for known in names.values())
    return [Param(known, tuple(t.shape), t.numel(), t.element_size(), t.device, t.requires_grad) for known, t in named]


def _check_storage(named: list[tuple[str, Tensor]]) -> None:
    """Two parameters in the same memory get two gradients, two masters and two updates: none of them right."""
    first: dict[tuple, str] = {}
    for name, tensor in named:
        plain = type(tensor.data) is Tensor and tensor.device.type != "meta"
        if not plain or not tensor.requires_grad or not tensor.numel():
            continue
        other = first.setdefault((tensor.device, tensor.data_ptr()), name)
        if other != name:
            raise ValueError(
                f"expected each parameter in its own memory; {name!r} and {other!r} are two parameters at the same address. "
                "Tie them by assigning one the other's Parameter, or freeze one."
            )


def _check_arguments(by, max_bytes, ratio) -> None:
    if isinstance(by, str):
        if by != "layers":
            raise ValueError(f"by must be 'layers' or a list of prefix lists such as [['model.layers.0.']]; got {by!r}")
    elif not isinstance(by, (list, tuple)) or not all(isinstance(prefixes, (list, tuple)) for prefixes in by):
        raise TypeError(f"by must be 'layers' or a list of prefix lists such as [['model.layers.0.']]; got {by!r}")
    elif not by or not all(by):
        raise ValueError(f"expected at least one prefix list, and at least one prefix in each; got by={by!r}")
    if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int)):
        raise TypeError(f"max_bytes must be an int or None; got {max_bytes!r}")
    if max_bytes is not None and max_bytes < 8:
        raise ValueError(f"max_bytes must be at least 8, the size of the largest element; got {max_bytes}")
    if ratio is None:
        return
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)):
        raise TypeError(f"ratio must be a number or None; got {ratio!r}")
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must be in (0, 1]; got {ratio}")
    if by != "layers" or max_bytes is not None:
        raise ValueError("ratio cuts every parameter into ranges: it cannot be combined with prefix lists or max_bytes")


# Which parameters go together


@dataclass(frozen=True)
class _Group:
    """A block before its size is looked at; `layer` is the layer that it is, if it is one."""

    name: str
    layer: Layer | None
    params: list[Param]

    @property
    def nbytes(self) -> int:
        return sum(param.nbytes for param in self.params)


def _layer_slots(params: list[Param], needed: bool) -> tuple[list[Layer], dict[str, int | str]]:
    """The layers, stacks as they first appear, and {parameter name: index into them, or role}."""
    layers = find_layers(params)
    if needed and not layers:
        raise ValueError(
            f"expected numbered layers in the parameter names; got {_shown([p.name for p in params])}. "
            f'Name the blocks yourself: by=[["first_module."], ["second_module.", "third_module."]].'
        )
    stacks = list(dict.fromkeys(layer.stack for layer in layers.values()))
    ordered = sorted(set(layers.values()), key=lambda layer: (stacks.index(layer.stack), layer.index))
    index = {layer: i for i, layer in enumerate(ordered)}
    return ordered, find_roles(params, layers) | {name: index[layer] for name, layer in layers.items()}


def _prefix_slots(params: list[Param], by: Sequence[Sequence[str]]) -> tuple[list[str], dict[str, int | str]]:
    """Names of the blocks, and {parameter name: index into them, or role}. A tied parameter goes where its first
    name that is in a block says."""
    layers = find_layers(params)
    places: dict[str, int | str] = find_roles(params, layers) | dict.fromkeys(layers, UNKNOWN)
    matches = [set(_matching(params, prefixes, f"block {i}")) for i, prefixes in enumerate(by)]
    stems = [[prefix.rstrip(".") for prefix in prefixes] for prefixes in by]
    for param in params:
        candidates = [i for i, names in enumerate(matches) if param.name in names]
        owners = next((own for alias in param.names if (own := [i for i in candidates if _is_under(alias, stems[i])])), [])
        if len(owners) > 1:
            raise ValueError(
                f"expected each parameter in one block; {param.name!r} is in blocks {owners}. To train it in all, use always."
            )
        if owners:
            places[param.name] = owners[0]
    return [" + ".join(block[:3]) + (f" + {len(block) - 3} more" if len(block) > 3 else "") for block in stems], places


def _distribute(
    params: list[Param], slots: Sequence[Layer | str], places: dict[str, int | str], asked: dict[str, bool], everywhere: set[str]
) -> tuple[list[_Group], tuple[Span, ...], tuple[Skipped, ...]]:
    """The groups to train in order (embeddings, slots, head), the spans that train in all of them, and the rest."""
    members: dict[int | str, list[Param]] = defaultdict(list)
    common, skipped = [], []
    for param in params:
        place = places[param.name]
        if place == TIED and (asked[EMBEDDINGS] or asked[HEAD]):
            place = EMBEDDINGS if asked[EMBEDDINGS] else HEAD
        if not param.trainable or not param.numel:
            skipped.append(Skipped(param.name, param.numel, _EMPTY if param.trainable else _FROZEN))
        elif param.name in everywhere:
            common.append(param)
        elif isinstance(place, int) or asked.get(place, False):
            members[place].append(param)
        else:
            skipped.append(Skipped(param.name, param.numel, _REASONS[place]))
    groups = []
    for place in (EMBEDDINGS, *range(len(slots)), UNKNOWN, HEAD):
        slot = slots[place] if isinstance(place, int) else place
        layer = slot if isinstance(slot, Layer) else None
        devices = list(dict.fromkeys(param.device for param in members[place]))
        for device in devices:
            name = (layer.name if layer else slot) + (f" on {device}" if len(devices) > 1 else "")
            groups.append(_Group(name, layer, [param for param in members[place] if param.device == device]))
    return groups, _whole(common), tuple(skipped)


def _is_under(name: str, stems: Iterable[str]) -> bool:
    return any(name == stem or name.startswith(stem + ".") for stem in stems)


def _matching(params: list[Param], prefixes: Sequence[str], what: str) -> list[str]:
    """First names of the parameters that have a name under one of `prefixes`; ValueError for a prefix that has none."""
    if isinstance(prefixes, str) or not all(isinstance(prefix, str) for prefix in prefixes):
        raise TypeError(f"{what} must be a list of prefixes such as ['model.layers.0.']; got {prefixes!r}")
    matches: dict[str, None] = {}
    for prefix in prefixes:
        stem = prefix.rstrip(".")
        here = [param.name for param in params if any(_is_under(name, [stem]) for name in param.names)]
        if not here:
            raise ValueError(f"the prefix {prefix!r} in {what} matches no parameter. {_suggestion(params, stem)}")
        matches |= dict.fromkeys(here)
    return list(matches)


def _suggestion(params: list[Param], stem: str) -> str:
    inside = rf"(.*\.{re.escape(stem)})(\..*)?"
    full = dict.fromkeys(match[1] for param in params if stem and (match := re.fullmatch(inside, param.name)))
    if full:
        return f"Prefixes start where the name starts: did you mean {' or '.join(repr(f + '.') for f in list(full)[:3])}?"
    return f"The names are {_shown([param.name for param in params])}."


# How large blocks are


def _whole(params: Iterable[Param]) -> tuple[Span, ...]:
    return tuple(Span(param.name, 0, param.numel) for param in params)


def _boundary(numel: int, i: int, count: int) -> int:
    """Where range `i` of `count` begins; a multiple of 16 elements if they are many, so that kernels load whole vectors."""
    exact = numel * i // count
    return exact if i == count or numel < 16 * count else exact // 16 * 16


def _by_ratio(groups: list[_Group], ratio: float) -> list[Block]:
    """Ranges of all parameters, for each device its own."""
    params = [param for group in groups for param in group.params]
    count = min(math.ceil(1 / ratio - 1e-9), max(param.numel for param in params))
    devices = list(dict.fromkeys(param.device for param in params))
    blocks = []
    for device in devices:
        for i in range(count):
            here = (param for param in params if param.device == device)
            spans = (Span(p.name, _boundary(p.numel, i, count), _boundary(p.numel, i + 1, count)) for p in here)
            name = f"range {i} of {count}" + (f" on {device}" if len(devices) > 1 else "")
            blocks.append(Block(name, tuple(span for span in spans if span.numel)))
    return [block for block in blocks if block.spans]


def _by_size(groups: list[_Group], max_bytes: int) -> list[Block]:
    """Merges neighbouring layers while they fit, and splits what does not fit alone."""
    runs: list[list[_Group]] = []
    for group in groups:
        if runs and _neighbours(runs[-1][-1], group) and sum(g.nbytes for g in [*runs[-1], group]) <= max_bytes:
            runs[-1].append(group)
        else:
            runs.append([group])
    blocks: list[Block] = []
    for run in runs:
        params = [param for group in run for param in group.params]
        if len(run) == 1 and run[0].nbytes > max_bytes:
            blocks += _split(run[0], max_bytes)
        else:
            blocks.append(Block(_run_name(run), _whole(params)))
    return blocks


def _neighbours(a: _Group, b: _Group) -> bool:
    """Whether they may merge: layers of one stack on one device. Blocks that the user named stay as they are."""
    return bool(a.layer and b.layer) and a.layer.stack == b.layer.stack and a.params[0].device == b.params[0].device


def _run_name(run: list[_Group]) -> str:
    """model.layers.0-3; with a frozen layer between, model.layers.0,2-3."""
    if len(run) == 1:
        return run[0].name
    ends: list[list[int]] = []
    for index in (group.layer.index for group in run):
        if ends and ends[-1][1] == index - 1:
            ends[-1][1] = index
        else:
            ends.append([index, index])
    numbers = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ends)
    stack = run[0].layer.stack
    return f"{stack}.{numbers}" if stack else numbers


def _split(group: _Group, max_bytes: int) -> list[Block]:
    """Pieces of the group's parameters in order, each as full as it gets."""
    pieces: list[list[Span]] = []
    names: list[str] = []
    room = 0
    for param in group.params:
        for span, name in _cut(param, max_bytes):
            size = span.numel * param.itemsize
            if size > room:
                pieces.append([])
                names.append(name)
                room = max_bytes
            pieces[-1].append(span)
            room -= size
    return [
        Block(name if len(piece) == 1 else f"{group.name} ({i} of {len(pieces)})", tuple(piece))
        for i, (name, piece) in enumerate(zip(names, pieces), 1)
    ]


def _cut(param: Param, max_bytes: int) -> list[tuple[Span, str]]:
    """The parameter as spans of at most `max_bytes`, of whole rows if a row fits, equal within one row, with their names."""
    if param.nbytes <= max_bytes:
        return [(Span(param.name, 0, param.numel), param.name)]
    row = param.numel // param.shape[0]
    by_rows = row * param.itemsize <= max_bytes
    unit = row if by_rows else 1
    units = param.numel // unit
    count = math.ceil(units / (max_bytes // (unit * param.itemsize)))
    edges = [units * i // count for i in range(count + 1)]
    view = param.name if by_rows else f"{param.name}.flat"
    return [(Span(param.name, a * unit, b * unit), f"{view}[{a}:{b}]") for a, b in zip(edges, edges[1:])]


def _shown(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
