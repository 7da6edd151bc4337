"""What a BlockAdam saves: its state dict, keyed by parameter name, and the fp32 masters as safetensors."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .blocks import Span
from .formats import PARAM_DTYPES
from .groups import check_hyper
from .schedule import Schedule

if TYPE_CHECKING:
    from .optimizer import BlockAdam

__all__ = ["export_fp32", "pack", "unpack"]

_VERSION = 1
_MOMENT_KEYS = {"m": "exp_avg", "v": "exp_avg_sq"}
_HEADER = "badam_kernels"


def _keys(optimizer: BlockAdam) -> dict[str, Span]:
    """Every span by its key in the state dict: the parameter's name, with the range if it is a part."""
    keys = {}
    for span in (span for block in optimizer.blocks for span in block.spans):
        whole = span.numel == optimizer._params[span.name].numel()
        keys[span.name if whole else f"{span.name}[{span.start}:{span.stop}]"] = span
    return keys


def _slot_key(optimizer: BlockAdam, span: Span, slot: str) -> str:
    """A slot's key in the state dict: torch's for moments, the codec's name for what extends the weight."""
    return _MOMENT_KEYS.get(slot) or optimizer._codecs[span.name].name


def _header(optimizer: BlockAdam) -> dict[str, Any]:
    key_of = {span: key for key, span in _keys(optimizer).items()}
    schedule = dataclasses.asdict(optimizer._schedule)
    if callable(schedule["order"]):
        schedule["order"] = "callable"
    return {
        "version": _VERSION,
        "global_step": optimizer.global_step,
        "rule": optimizer._rule.name,
        "moments": optimizer._moments,
        "schedule": schedule,
        "loss_scale": optimizer._loss_scale and optimizer._loss_scale.state(),
        "blocks": [[block.name, [key_of[span] for span in block.spans]] for block in optimizer.blocks],
    }


def pack(optimizer: BlockAdam) -> dict[str, Any]:
    """The state dict of `optimizer`. Spans that no visit reached yet have no entry: all their slots are zeros."""
    key_of = {span: key for key, span in _keys(optimizer).items()}
    state: dict[str, dict[str, Any]] = {}

    def put(span: Span, slot: str, value: Tensor) -> None:
        param = optimizer._params[span.name]
        whole = span.numel == param.numel()
        state.setdefault(key_of[span], {})[_slot_key(optimizer, span, slot)] = value.view(param.shape) if whole else value

    for span in optimizer._store.touched():
        for slot, value in optimizer._store.read(span).items():
            put(span, slot, value)
    steps = dict(optimizer._row_steps)
    visit = optimizer._visit
    if visit is not None:
        for row, step in zip(visit.rows, visit.steps):
            steps[row.span] = step
            if optimizer._moments == "visit":
                for slot, value in zip(visit.rule.moments, row.moments):
                    put(row.span, slot, value.clone())  # the buffer they lie in is as large as the largest block
    for span, step in steps.items():
        state.setdefault(key_of[span], {})["step"] = step
    groups = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")} | {"params": list(group["param_names"])}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups, _HEADER: _header(optimizer)}


def unpack(optimizer: BlockAdam, state_dict: dict[str, Any]) -> None:
    """Set `optimizer` to `state_dict`. Everything is checked before anything is changed."""
    header = _checked_header(state_dict)
    _check_header(optimizer, header)
    _check_groups(optimizer, state_dict["param_groups"])
    _check_state(optimizer, state_dict["state"])
    schedule = _checked_schedule(optimizer, state_dict)

    keys = _keys(optimizer)
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"]):
        group.update({k: copy.deepcopy(v) for k, v in saved.items() if k != "params"})
    if optimizer._loss_scale is not None:
        optimizer._loss_scale.load(header.get("loss_scale"))
    optimizer._visit = None
    optimizer._row_steps.clear()
    # The state's tensors may be this store's own: those that are written next must not be cleared first.
    optimizer._store.drop(keep=[keys[key] for key, entry in state_dict["state"].items() if _stored(entry)])
    moments: dict[Span, dict[str, Tensor]] = {}
    for key, entry in state_dict["state"].items():
        span = keys[key]
        slots = {slot: entry[_slot_key(optimizer, span, slot)] for slot in optimizer._run_slots(span)} if _stored(entry) else {}
        if slots:
            optimizer._store.write(span, slots)
        if "step" in entry:
            optimizer._row_steps[span] = entry["step"]
        if "step" in entry and optimizer._moments == "visit":
            moments[span] = {slot: entry[_MOMENT_KEYS[slot]] for slot in optimizer._rule.moments}
    optimizer._resume(header["global_step"], schedule, moments)


def _stored(entry: dict[str, Any]) -> bool:
    """Whether a state entry holds tensors."""
    return any(isinstance(value, Tensor) for value in entry.values())


def _checked_header(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The header, if `state_dict` has all its parts."""
    header = state_dict.get(_HEADER) if isinstance(state_dict, dict) else None
    if not isinstance(header, dict) or header.get("version") != _VERSION:
        got = f"one with keys {sorted(map(str, state_dict))}" if isinstance(state_dict, dict) else type(state_dict).__name__
        raise ValueError(f"expected a state dict of BlockAdam, version {_VERSION}; got {got}")
    wanted = {"state", "param_groups"} - state_dict.keys()
    wanted |= {"global_step", "rule", "moments", "schedule", "blocks"} - header.keys()
    if wanted:
        raise ValueError(f"the state dict is damaged: it lacks {_some(wanted)}")
    return header


def _checked_schedule(optimizer: BlockAdam, state_dict: dict[str, Any]) -> Schedule:
    """The state's schedule, if it fits this optimizer and the moments that the state holds."""
    header, keys = state_dict[_HEADER], _keys(optimizer)
    saved, step = dict(header["schedule"]), header["global_step"]
    if saved.get("order") == "callable":
        saved["order"] = optimizer._schedule.order
    if type(step) is not int or step < 0 or saved.get("num_blocks") != len(optimizer.blocks):
        raise ValueError(f"the state dict is damaged: it has global_step {step!r} and {saved.get('num_blocks')!r} blocks")
    try:
        schedule = dataclasses.replace(optimizer._schedule, **saved)
        block = optimizer.blocks[schedule(step)]
    except (TypeError, ValueError) as error:
        raise ValueError(f"the state's schedule does not fit: {error}") from error
    begun = {keys[key] for key, entry in state_dict["state"].items() if "step" in entry}
    if optimizer._moments == "visit" and begun and begun != set(block.spans):
        raise ValueError(
            f"the schedule trains {block.name!r} at step {step}, but the state has moments of other parameters: "
            f"{_some(span.name for span in begun ^ set(block.spans))}"
        )
    return schedule


def _check_header(optimizer: BlockAdam, header: dict[str, Any]) -> None:
    own = _header(optimizer)
    for what in ("rule", "moments"):
        if header[what] != own[what]:
            raise ValueError(f"the state was saved with {what}={header[what]!r}, this optimizer has {own[what]!r}")
    if (header["schedule"]["order"] == "callable") != (own["schedule"]["order"] == "callable"):
        raise ValueError(
            f"the state was saved with schedule {header['schedule']['order']!r}, this optimizer has "
            f"{own['schedule']['order']!r}: a callable schedule resumes only under a callable"
        )
    saved, mine = ({key for _, spans in h["blocks"] for key in spans} for h in (header, own))
    if saved != mine:
        raise ValueError(
            "the state is for another partition or model. Only in the state: "
            f"{_some(saved - mine)}. Only in this optimizer: {_some(mine - saved)}. Use the partition it was saved with."
        )
    saved_blocks, own_blocks = ([[name, list(spans)] for name, spans in h["blocks"]] for h in (header, own))
    if saved_blocks != own_blocks:
        differing = [f"{a[0]} / {b[0]}" for a, b in zip(saved_blocks, own_blocks) if a != b]
        differing = differing or [f"{len(saved_blocks)} blocks / {len(own_blocks)} blocks"]
        raise ValueError(f"the state is for another partition; blocks that differ (saved / here): {_some(differing)}")


def _check_groups(optimizer: BlockAdam, saved: list[dict[str, Any]]) -> None:
    own = optimizer.param_groups
    if len(saved) != len(own):
        raise ValueError(f"the state has {len(saved)} parameter groups, this optimizer {len(own)}")
    for i, (theirs, group) in enumerate(zip(saved, own)):
        difference = set(theirs["params"]) ^ set(group["param_names"])
        if difference:
            raise ValueError(f"parameter group {i} differs from the state's in: {_some(difference)}")
        check_hyper(theirs)


def _check_state(optimizer: BlockAdam, state: dict[str, dict[str, Any]]) -> None:
    keys = _keys(optimizer)
    for key, entry in state.items():
        span = keys.get(key)
        if span is None:
            raise ValueError(f"the state has an entry for {key!r}, which is in no block of this optimizer")
        if "step" in entry and (type(entry["step"]) is not int or entry["step"] < 0):
            raise ValueError(f"expected the step of {key!r} to be an int of at least 0; got {entry['step']!r}")
        run = optimizer._run_slots(span)
        wanted = {slot: dtype for slot, dtype in run.items() if _stored(entry)}
        if "step" in entry:
            wanted |= dict.fromkeys(optimizer._rule.moments, optimizer._format.moment.primary)
        for slot, dtype in wanted.items():
            name = _slot_key(optimizer, span, slot)
            value = entry.get(name)
            if not isinstance(value, Tensor) or value.numel() != span.numel or value.dtype is not dtype:
                got = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"keys {sorted(entry)}"
                raise ValueError(f"expected state {key!r} to hold {name!r}, {span.numel} elements of {dtype}; got {got}")


def _some(names: Any) -> str:
    """The first few of `names`, sorted."""
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"


# --- export ---------------------------------------------------------------------------------------------------------


def _fp32(optimizer: BlockAdam, name: str, spans: list[Span]) -> Tensor:
    """The exact fp32 value of a parameter, on the CPU."""
    param = optimizer._params[name].detach()
    value = param.float().cpu().contiguous()
    for span in spans:
        auxiliary = optimizer._store.read(span).get("w")
        if auxiliary is not None:
            primary = param.reshape(-1)[span.start : span.stop].cpu()
            value.view(-1)[span.start : span.stop] = optimizer._codecs[name].decode(primary, auxiliary.cpu())
    return value


@torch.no_grad()
def export_fp32(optimizer: BlockAdam, path: Any) -> None:
    """Write all fp32, bf16 and fp16 parameters of `optimizer` in fp32 to the safetensors file `path`.

    Streams one parameter at a time into a temporary file beside `path` and renames it, so that memory stays small and a
    crash leaves the old file. The format (8-byte length, JSON header, data) is that of the safetensors specification.
    """
    params = {name: param for name, param in optimizer._params.items() if param.dtype in PARAM_DTYPES}
    if "__metadata__" in params:
        raise ValueError("safetensors reserves the name '__metadata__': rename that parameter")
    spans: dict[str, list[Span]] = {name: [] for name in params}
    for span in _keys(optimizer).values():
        spans[span.name].append(span)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, param in params.items():
        start, end = end, end + 4 * param.numel()
        header[name] = {"dtype": "F32", "shape": list(param.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = f"{os.fspath(path)}.partial"
    try:
        with open(partial, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in params:
                value = _fp32(optimizer, name, spans[name]).reshape(-1)
                file.write(memoryview(value.view(torch.uint8).numpy()) if value.numel() else b"")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)
