"""Spans, blocks and partitions: what trains together.

`partition` reads names, shapes and dtypes only, never a weight, so that it works on the meta device too.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Block", "Partition", "Skipped", "Span", "partition"]

FROZEN = "requires_grad is False"
EMPTY = "it has no elements"
NOT_EMBEDDINGS = "embeddings and what else feeds the layers: train it with embeddings=True"
NOT_HEAD = "final norm, head and what else follows the layers: train it with head=True"
NOT_TIED = "embeddings and head in one: train it with embeddings=True or head=True"
OUTSIDE = "in no block: add its prefix to a prefix list or to always"

_HEAD_MODULES = {"classifier", "embed_out", "pooler", "proj_out", "project_out", "qa_outputs", "score"}
_EMBEDDING_MODULES = {"shared", "wpe", "wte"}
_NOT_VOCABULARY = {"patch", "pos", "position", "positions", "type", "wpe"}
_WRAPPERS = {"_orig_mod", "base_layer", "original_module"}


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

    def describe_skipped(self) -> str:
        """One line for each reason: how many parameters and elements, the first names, and what to do. Empty if all train."""
        groups = defaultdict(list)
        for item in self.skipped:
            groups[item.reason].append(item)
        return "\n".join(
            f"not trained: {_shown([item.name for item in items])} ({sum(item.numel for item in items):,} elements): {reason}"
            for reason, items in groups.items()
        )


@dataclass(frozen=True)
class _Param:
    """What `partition` may know of a parameter. `names` has the first name and, for a tied one, the others."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    numel: int
    itemsize: int
    trainable: bool

    @property
    def name(self) -> str:
        return self.names[0]


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

    named_parameters  what `model.named_parameters()` gives, frozen parameters included. A tensor under two names counts once
    by                "layers": one block per repeated layer (see `_find_layers`). Or a list of prefix lists, one per block:
                      a prefix is whole dotted components from the start of the name, so `model.layers.1` is not `model.layers.10`
    embeddings        adds a first block: embeddings, patch and position embeddings, projectors, all that feeds a layer
    head              adds a last block: final norms, heads, poolers, all that follows the layers. A head tied to the
                      embeddings is in the embeddings' block if both are asked for
    always            prefixes of modules that train in every block, on top of its own spans
    max_bytes         most bytes of weights (numel x itemsize) in a block, without `always`: neighbouring layers of a stack are
                      merged, larger blocks are split between parameters, a larger matrix between rows, a larger row inside it
    ratio             instead: ceil(1 / ratio) blocks, each one contiguous range of every parameter, equal within one element

    Raises TypeError or ValueError if the arguments contradict each other or the names, or if nothing would train.
    """
    params = _collect(named_parameters)
    _check_arguments(by, max_bytes, ratio)
    layers = _find_layers(params)
    labels = _roles(params, layers)
    labels |= {name: _label(*layer) for name, layer in layers.items()}
    order = _layer_order(layers)
    if by != "layers":
        order, chosen = _by_prefixes(params, by)
        labels = {p.name: OUTSIDE if p.name in layers else labels[p.name] for p in params} | chosen
    elif ratio is None and not layers:
        raise ValueError(
            f"expected numbered layers in the parameter names; got {_shown([p.name for p in params])}. "
            f'Name the blocks: by=[["first_module."], ["second_module.", "third_module."]].'
        )
    everywhere = set(_matching(params, always, "always"))

    wanted = {"embeddings": embeddings, "head": head, "tied": embeddings or head, OUTSIDE: ratio is not None}
    groups: dict[str, list[_Param]] = {label: [] for label in ["embeddings", *order, OUTSIDE, "head"]}
    skipped, common = [], []
    for param in params:
        label = labels[param.name]
        if not param.trainable or not param.numel:
            skipped.append(Skipped(param.name, param.numel, EMPTY if param.trainable else FROZEN))
        elif param.name in everywhere:
            common.append(param)
        elif wanted.get(label, True):
            groups["embeddings" if label == "tied" and embeddings else "head" if label == "tied" else label].append(param)
        else:
            reason = {"embeddings": NOT_EMBEDDINGS, "head": NOT_HEAD, "tied": NOT_TIED}.get(label, OUTSIDE)
            skipped.append(Skipped(param.name, param.numel, reason))

    groups = {label: members for label, members in groups.items() if members}
    if not groups:
        raise ValueError("no block has anything to train.\n" + Partition((), tuple(skipped)).describe_skipped())
    if ratio is not None:
        blocks = _by_ratio([p for members in groups.values() for p in members], ratio)
    elif max_bytes is not None:
        blocks = _by_size(groups, {_label(*layer): layer for layer in layers.values()} if by == "layers" else {}, max_bytes)
    else:
        blocks = [Block(label, _whole(members)) for label, members in groups.items()]
    return Partition(tuple(Block(b.name, b.spans + _whole(common)) for b in blocks), tuple(skipped))


def _collect(named_parameters: Iterable[tuple[str, Tensor]]) -> list[_Param]:
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
    return [
        _Param(tuple(known), tuple(t.shape), t.numel(), t.element_size(), t.requires_grad)
        for known in names.values()
        for t in [tensors[known[0]]]
    ]


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


# Which names are layers, embeddings or head


def _core(name: str) -> list[str]:
    """The dotted components of `name` without those that torch.compile and PEFT put between module and parameter."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    for i, part in enumerate(parts):
        if part == "modules_to_save" or part.startswith("lora_"):
            return parts[:i] + parts[-1:]
    return parts


def _find_layers(params: list[_Param]) -> dict[str, tuple[str, int]]:
    """{parameter name: (stack, index)} for the parameters of repeated layers.

    A stack is a list of modules, `stack.0`, `stack.1`, ..., whose entries have submodules and repeat: at least half of them
    share at least half of their (name, shape) pairs with another entry, or there is only one. The outermost such number of a
    name decides, so experts belong to their layer. The plain modules of an `nn.Sequential` (a projector, a classifier, a
    convolutional stem) are no layers, and stages of unlike widths are no layers either, but the layers in them are.
    """
    found: dict[str, tuple[str, int]] = {}
    depth = 0
    while True:
        members: list[tuple[str, str, int]] = []
        lists: dict[str, dict[int, set]] = defaultdict(lambda: defaultdict(set))
        for param in params:
            parts = param.name.split(".")
            numbers = [i for i, part in enumerate(parts[:-1]) if part.isdecimal()]
            if param.name in found or len(numbers) <= depth:
                continue
            at = numbers[depth]
            inner = _core(".".join(parts[at + 1 :]))
            stack, index = ".".join(parts[:at]), int(parts[at])
            lists[stack][index].add((tuple(inner), param.shape))
            members.append((param.name, stack, index))
        if not members:
            return found
        layers = {(stack, index) for stack, entries in lists.items() for index in _repeating(entries)}
        found |= {name: (stack, index) for name, stack, index in members if (stack, index) in layers}
        depth += 1


def _repeating(entries: dict[int, set]) -> list[int]:
    """The indices of the layers in a numbered list, given the (name, shape) pairs of each entry; none if it is no stack."""
    layers = [index for index, pairs in entries.items() if any(len(inner) > 1 for inner, _ in pairs)]

    def has_twin(index: int) -> bool:
        pairs = entries[index]
        return any(other != index and 2 * len(pairs & entries[other]) >= len(pairs) for other in layers)

    repeats = len(layers) == 1 or 2 * sum(map(has_twin, layers)) >= len(layers)
    return layers if repeats else []


def _label(stack: str, index: int) -> str:
    return f"{stack}.{index}" if stack else str(index)


def _layer_order(layers: dict[str, tuple[str, int]]) -> list[str]:
    """Labels of the layers: stacks as they first appear, their layers by number."""
    stacks = list(dict.fromkeys(stack for stack, _ in layers.values()))
    ordered = sorted(set(layers.values()), key=lambda layer: (stacks.index(layer[0]), layer[1]))
    return [_label(*layer) for layer in ordered]


def _named_role(name: str) -> str | None:
    """What the words of a name alone say."""
    parts = {part.lower() for part in _core(name)}
    words = {word for part in parts for word in part.split("_")}
    if parts & _HEAD_MODULES or words & {"head", "heads"}:
        return "head"
    if parts & _EMBEDDING_MODULES or any(word.startswith("emb") for word in words):
        return "embeddings"
    return None


def _roles(params: list[_Param], layers: dict[str, tuple[str, int]]) -> dict[str, str]:
    """{name: "embeddings", "head" or "tied"} for the parameters outside the layers; OUTSIDE if there are no layers to tell.

    The name decides if it can; a norm beside a stack, or beside a module around it, is a final norm and goes with the head;
    anything else feeds the layers if it is listed before the last of them, and follows them if not.
    """
    last = max((i for i, p in enumerate(params) if p.name in layers), default=-1)
    around: set[tuple[str, ...]] = set()
    for stack in {stack for stack, _ in layers.values()}:
        parts = _core(stack)
        around |= {tuple(parts[:i]) for i in range(len(parts) + 1)}
    roles = {}
    for position, param in enumerate(params):
        if param.name in layers:
            continue
        modules = _core(param.name)[:-1]
        norm = modules[-1].lower() if modules else ""
        is_norm = "norm" in norm or re.fullmatch(r"ln(_\w+)?", norm)
        role = _named_role(param.name)
        if role is None and is_norm and tuple(modules[:-1]) in around and not norm.startswith("pre"):
            role = "head"
        if role is None:
            role = OUTSIDE if last < 0 else "embeddings" if position < last else "head"
        roles[param.name] = role
    tied = _tied(params, roles, last)
    return roles | ({tied: "tied"} if tied else {})


def _tied(params: list[_Param], roles: dict[str, str], last: int) -> str | None:
    """The name of the matrix that is both token embeddings and head, if there is one.

    It shows as one tensor under two names or, where those were removed (`named_parameters()` does so), as a model
    with token embeddings and nothing behind the layers that could be the head: no matrix, or a bias for each token.
    """
    embedded = [p for p in params if roles.get(p.name) == "embeddings"]
    for param in embedded:
        if any(_named_role(alias) != "embeddings" for alias in param.names[1:]):
            return param.name
    tokens = [
        p
        for p in embedded
        if len(p.shape) == 2 and _named_role(p.name) and not _NOT_VOCABULARY & set(re.split(r"[._]", p.name))
    ]
    if not tokens or last < 0:
        return None
    token = max(tokens, key=lambda p: p.numel)
    behind = [p.shape for p in params[last + 1 :] if roles.get(p.name) == "head"]
    return token.name if token.shape[:1] in behind or not any(len(shape) > 1 for shape in behind) else None


# Prefixes


def _starts_with(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def _matching(params: list[_Param], prefixes: Sequence[str], what: str) -> list[str]:
    """First names of the parameters that have a name under one of `prefixes`; ValueError for a prefix that has none."""
    if isinstance(prefixes, str):
        raise TypeError(f"{what} must be a list of prefixes; got the string {prefixes!r}")
    matches: dict[str, None] = {}
    for prefix in prefixes:
        if not isinstance(prefix, str):
            raise TypeError(f"{what} must be a list of prefixes; got {prefix!r} in it")
        stem = prefix.rstrip(".")
        here = [p.name for p in params if stem and any(_starts_with(name, stem) for name in p.names)]
        if not here:
            raise ValueError(f"the prefix {prefix!r} in {what} matches no parameter. {_suggestion(params, stem)}")
        matches |= dict.fromkeys(here)
    return list(matches)


def _suggestion(params: list[_Param], stem: str) -> str:
    inside = rf"(.*\.{re.escape(stem)})(\..*)?"
    full = dict.fromkeys(match[1] for p in params if stem and (match := re.fullmatch(inside, p.name)))
    if full:
        return f"A prefix starts at the start of the name: did you mean {' or '.join(repr(f + '.') for f in list(full)[:3])}?"
    return f"The names are {_shown([p.name for p in params])}."


def _by_prefixes(params: list[_Param], by: Sequence[Sequence[str]]) -> tuple[list[str], dict[str, str]]:
    """Labels of the blocks in order, and {name: label}. A tied parameter goes where its first matched name says."""
    labels: list[str] = []
    chosen: dict[str, str] = {}
    names = {p.name: p.names for p in params}
    stems = [[prefix.rstrip(".") for prefix in prefixes if isinstance(prefix, str)] for prefixes in by]
    for i, prefixes in enumerate(by):
        labels.append(" + ".join(stems[i][:3]) + (f" + {len(stems[i]) - 3} more" if len(stems[i]) > 3 else ""))
        for name in _matching(params, prefixes, f"block {i}"):
            for alias in names[name]:
                owners = [j for j, block in enumerate(stems) if any(_starts_with(alias, stem) for stem in block)]
                if owners:
                    break
            if len(owners) > 1:
                raise ValueError(f"expected each parameter in one block; {name!r} is in blocks {owners}. Use always=[...] for all.")
            if owners == [i]:
                chosen[name] = labels[i]
    return labels, chosen


# Sizes


def _whole(params: list[_Param]) -> tuple[Span, ...]:
    return tuple(Span(p.name, 0, p.numel) for p in params)


def _by_ratio(params: list[_Param], ratio: float) -> list[Block]:
    count = math.ceil(1 / ratio - 1e-9)
    blocks = []
    for i in range(count):
        spans = (Span(p.name, p.numel * i // count, p.numel * (i + 1) // count) for p in params)
        blocks.append(Block(f"range {i} of {count}", tuple(span for span in spans if span.numel)))
    return [block for block in blocks if block.spans]


def _by_size(groups: dict[str, list[_Param]], layers: dict[str, tuple[str, int]], max_bytes: int) -> list[Block]:
    """Merges neighbouring layers while they fit, splits what does not fit alone. Explicit blocks are split only."""
    merged: list[tuple[list[str], list[_Param], int]] = []
    for label, params in groups.items():
        size = sum(p.numel * p.itemsize for p in params)
        labels, members, total = merged[-1] if merged else ([], [], 0)
        stack = layers[label][0] if label in layers else None
        if stack is not None and labels and labels[0] in layers and layers[labels[0]][0] == stack and total + size <= max_bytes:
            merged[-1] = (labels + [label], members + params, total + size)
        else:
            merged.append(([label], params, size))
    blocks: list[Block] = []
    for labels, params, size in merged:
        if size <= max_bytes:
            blocks.append(Block(_merged_name(labels, layers), _whole(params)))
        else:
            blocks += _split(labels[0], params, max_bytes)
    return blocks


def _merged_name(labels: list[str], layers: dict[str, tuple[str, int]]) -> str:
    """model.layers.0-3; with frozen layers between, model.layers.0,2-3."""
    if len(labels) == 1:
        return labels[0]
    runs: list[list[int]] = []
    for label in labels:
        index = layers[label][1]
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    stack = layers[labels[0]][0]
    numbers = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{stack}.{numbers}" if stack else numbers


def _split(label: str, params: list[_Param], max_bytes: int) -> list[Block]:
    pieces: list[list[Span]] = []
    names: list[str] = []
    room = 0
    for param in params:
        for span, name in _cut(param, max_bytes):
            size = span.numel * param.itemsize
            if size > room:
                pieces.append([])
                names.append(name)
                room = max_bytes
            pieces[-1].append(span)
            room -= size
    return [
        Block(name if len(piece) == 1 else f"{label} ({i} of {len(pieces)})", tuple(piece))
        for i, (name, piece) in enumerate(zip(names, pieces), 1)
    ]


def _cut(param: _Param, max_bytes: int) -> list[tuple[Span, str]]:
    """The parameter as spans of at most `max_bytes`, of whole rows if a row fits, equal within one row, with their names."""
    if param.numel * param.itemsize <= max_bytes:
        return [(Span(param.name, 0, param.numel), param.name)]
    row = param.numel // param.shape[0]
    fits = row * param.itemsize <= max_bytes
    unit = row if fits else 1
    units = param.numel // unit
    count = math.ceil(units / (max_bytes // (unit * param.itemsize)))
    edges = [units * i // count for i in range(count + 1)]
    view = param.name if fits else f"{param.name}.flat"
    return [(Span(param.name, a * unit, b * unit), f"{view}[{a}:{b}]") for a, b in zip(edges, edges[1:])]


def _shown(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
