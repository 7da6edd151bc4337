"""What the names and shapes of a model's parameters say: which are layers, which embeddings, which head."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["EMBEDDINGS", "HEAD", "TIED", "UNKNOWN", "Layer", "Param", "find_layers", "find_roles"]

EMBEDDINGS = "embeddings"
HEAD = "head"
TIED = "tied"
UNKNOWN = "unknown"
"""Roles of parameters outside the layers; TIED is embeddings and head in one, UNKNOWN only in a model without layers."""

_HEAD_MODULES = {"classifier", "embed_out", "pooler", "proj_out", "project_out", "qa_outputs", "score"}
_EMBEDDING_MODULES = {"shared", "wpe", "wte"}
_NOT_VOCABULARY = {"patch", "pos", "position", "positions", "type", "wpe"}
_WRAPPERS = {"_orig_mod", "base_layer", "original_module"}


@dataclass(frozen=True)
class Param:
    """What a partition may know of a parameter. `names` has the first name and, for a tied one, the others."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    numel: int
    itemsize: int
    device: torch.device
    trainable: bool

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Layer:
    """Entry `index` of the module list called `stack`."""

    stack: str
    index: int

    @property
    def name(self) -> str:
        return f"{self.stack}.{self.index}" if self.stack else str(self.index)


def _core(name: str) -> list[str]:
    """The dotted components of `name` without those that torch.compile and PEFT put between module and parameter."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    for i, part in enumerate(parts):
        if part == "modules_to_save" or part.startswith("lora_"):
            return parts[:i] + parts[-1:]
    return parts


def find_layers(params: Sequence[Param]) -> dict[str, Layer]:
    """{parameter name: its layer} for the parameters of repeated layers.

    A stack is a list of modules, `stack.0`, `stack.1`, ..., whose entries have submodules and repeat: at least half of them
    share at least half of their (name, shape) pairs with another entry, or there is only one. The outermost such number of a
    name decides, so experts belong to their layer. The plain modules of an `nn.Sequential` (a projector, a classifier, a
    convolutional stem) are no layers; stages of unlike widths are none either, but the layers within them are. A model that
    has only plain numbered modules has those as layers.
    """
    found: dict[str, Layer] = {}
    depth = 0
    while True:
        members: dict[str, Layer] = {}
        stacks: dict[str, dict[int, set]] = defaultdict(lambda: defaultdict(set))
        for param in params:
            parts = param.name.split(".")
            numbers = [i for i, part in enumerate(parts[:-1]) if part.isdecimal()]
            if param.name in found or len(numbers) <= depth:
                continue
            at = numbers[depth]
            layer = Layer(".".join(parts[:at]), int(parts[at]))
            inner = _core(".".join(parts[at + 1 :]))
            stacks[layer.stack][layer.index].add((tuple(inner), param.shape))
            members[param.name] = layer
        if not members:
            return found or _plain_layers(params)
        layers = {Layer(stack, index) for stack, entries in stacks.items() for index in _repeating(entries)}
        found |= {name: layer for name, layer in members.items() if layer in layers}
        depth += 1


def _plain_layers(params: Sequence[Param]) -> dict[str, Layer]:
    """{parameter name: its outermost numbered module}."""
    numbered = (re.fullmatch(r"(?:(.*?)\.)??(\d+)\..+", param.name) for param in params)
    return {found[0]: Layer(found[1] or "", int(found[2])) for found in numbered if found}


def _repeating(entries: dict[int, set]) -> list[int]:
    """The indices of the layers in a numbered list, given the (name, shape) pairs of each entry; none if it is no stack."""
    layers = [index for index, pairs in entries.items() if any(len(inner) > 1 for inner, _ in pairs)]

    def has_twin(index: int) -> bool:
        pairs = entries[index]
        return any(other != index and 2 * len(pairs & entries[other]) >= len(pairs) for other in layers)

    repeats = len(layers) == 1 or 2 * sum(map(has_twin, layers)) >= len(layers)
    return layers if repeats else []


def find_roles(params: Sequence[Param], layers: dict[str, Layer]) -> dict[str, str]:
    """{name: role} for the parameters outside the layers.

    The name decides if it can; a norm beside a stack, or beside a module around it, is a final norm and goes with the head;
    anything else feeds the layers if its module is listed before the last stack, and follows them if not.
    """
    first_listed: dict[str, int] = {}
    for position, param in enumerate(params):
        owner = layers[param.name].stack if param.name in layers else param.name.rpartition(".")[0]
        first_listed.setdefault(owner, position)
    stacks = {layer.stack for layer in layers.values()}
    last_stack = max((first_listed[stack] for stack in stacks), default=None)
    around = {tuple(_core(stack)[:i]) for stack in stacks for i in range(len(_core(stack)) + 1)}

    roles = {}
    for param in params:
        if param.name in layers:
            continue
        role = _named_role(param.name)
        if role is None and _is_final_norm(_core(param.name)[:-1], around):
            role = HEAD
        if role is None and last_stack is None:
            role = UNKNOWN
        if role is None:
            role = EMBEDDINGS if first_listed[param.name.rpartition(".")[0]] < last_stack else HEAD
        roles[param.name] = role
    tied = _tied(params, roles, last_stack)
    return roles | ({tied: TIED} if tied else {})


def _named_role(name: str) -> str | None:
    """What the words of a name alone say."""
    parts = {part.lower() for part in _core(name)}
    words = {word for part in parts for word in part.split("_")}
    if parts & _HEAD_MODULES or words & {"head", "heads"}:
        return HEAD
    if parts & _EMBEDDING_MODULES or any(word.startswith("emb") for word in words):
        return EMBEDDINGS
    return None


def _is_final_norm(modules: list[str], around: set[tuple[str, ...]]) -> bool:
    if not modules or tuple(modules[:-1]) not in around:
        return False
    name = modules[-1].lower()
    return ("norm" in name or re.fullmatch(r"ln(_\w+)?", name) is not None) and not name.startswith("pre")


def _tied(params: Sequence[Param], roles: dict[str, str], last_stack: int | None) -> str | None:
    """The name of the matrix that is both token embeddings and head, if there is one.

    It shows as one tensor under two names or, where those were removed (`named_parameters()` does so), as a model
    with token embeddings and nothing behind the layers that could be the head: no matrix, or a bias for each token.
    """
    embedded = [p for p in params if roles.get(p.name) == EMBEDDINGS]
    for param in embedded:
        if any(_named_role(alias) != EMBEDDINGS for alias in param.names[1:]):
            return param.name
    tokens = [
        p
        for p in embedded
        if len(p.shape) == 2 and _named_role(p.name) and not _NOT_VOCABULARY & set(re.split(r"[._]", p.name))
    ]
    if not tokens or last_stack is None:
        return None
    token = max(tokens, key=lambda p: p.numel)
    behind = [p.shape for p in params[last_stack:] if roles.get(p.name) == HEAD]
    return token.name if token.shape[:1] in behind or not any(len(shape) > 1 for shape in behind) else None
