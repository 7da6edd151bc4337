"""What a backend must do, as functions that raise AssertionError: the backends pass them, the mutants must not."""

from __future__ import annotations

from collections.abc import Sequence

import oracle
import torch
from cases import CODECS, GROUPS, Case, RowCase
from torch import Tensor
from tolerances import NORM_ULP, STEP_ULP

from badam_kernels import rules
from badam_kernels.formats import Codec
from badam_kernels.visit import Row, Visit

SLOTS = ("weight", "m", "v")


def apply(backend, visit: Visit, scale: float | None = None, max_norm: float | None = None) -> tuple[float | None, bool]:
    visit.refresh()
    norm, found_inf = backend.apply(visit, scale, max_norm)
    return None if norm is None else float(norm), bool(found_inf)


def assert_same_bytes(got: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if not torch.equal(a, b):
            at = int((a != b).nonzero()[0])
            raise AssertionError(f"{what}: byte {at} of storage {i} is {int(a[at]):#04x}, expected {int(b[at]):#04x}")


def assert_same_bits(got: Tensor, expected: Tensor, inputs: Tensor, what: str) -> None:
    integer = {2: torch.int16, 4: torch.int32}[got.element_size()]
    a, b = got.cpu().contiguous().view(integer), expected.view(integer)
    if not torch.equal(a, b):
        at = int((a != b).nonzero()[0])
        x = int(inputs.view(torch.int32)[at]) & 0xFFFFFFFF
        mask = 2 ** (8 * got.element_size()) - 1
        raise AssertionError(f"{what} of fp32 {x:#010x} at {at}: {int(a[at]) & mask:#x}, expected {int(b[at]) & mask:#x}")


def check_step(backend, case: Case, scale: float | None = None, max_norm: float | None = None) -> None:
    """One step from a common state is as exact as torch's own fp32 optimizer, and writes what it must and nothing else.

    For every slot: max over the elements of the case of our error <= max of torch's + STEP_ULP, in the ulp of tolerances.py.
    """
    visit = case.visit
    grads = [case.gradient(row) for row in visit.rows]
    before = [[case.weight(row), *(m.cpu().clone() for m in row.moments)] for row in visit.rows]
    steps, guards, untouched = visit.steps, case.guards(), [_bytes(case, row) for row in visit.rows]
    present = [g for g in grads if g is not None]
    norm, factor = oracle.norm_and_factor(present, scale, max_norm)

    got_norm, found_inf = apply(backend, visit, scale, max_norm)

    assert found_inf is False
    _check_norm(got_norm, norm, present, 1.0 if scale is None else scale)
    assert_same_bytes(case.guards(), guards, "outside the spans, or in a gradient")
    ours: dict[str, list[Tensor]] = {slot: [] for slot in SLOTS}
    torchs: dict[str, list[Tensor]] = {slot: [] for slot in SLOTS}
    for row, grad, state, step, old, new_step in zip(visit.rows, grads, before, steps, untouched, visit.steps):
        if grad is None:
            assert_same_bytes(_bytes(case, row), old, f"{row.span.name} has no gradient")
        assert new_step == step + (grad is not None) or row.span.numel == 0, f"{row.span.name}: step {new_step} after {step}"
        if grad is None:
            continue
        check_stored(row)
        for slot, our, its in _errors(visit.rule.name, case, row, grad, state, step, factor):
            ours[slot].append(our)
            torchs[slot].append(its)
    for slot in SLOTS:
        if ours[slot]:
            our, its = torch.cat(ours[slot]), torch.cat(torchs[slot])
            assert not our.isnan().any(), f"{slot} is not a number"
            worst = float(our.max()) if our.numel() else 0.0
            bound = (float(its.max()) if its.numel() else 0.0) + STEP_ULP
            assert worst <= bound, f"{slot} is {worst:.2f} ulp from the oracle, torch {bound - STEP_ULP:.2f}"


def _errors(rule: str, case: Case, row: Row, grad: Tensor, state: list[Tensor], step: int, factor: float):
    """(slot, our errors, torch's errors) in ulp."""
    group = case.groups[row.group]
    exact = oracle.step(rule, state[0].double(), grad.double() * factor, [m.double() for m in state[1:]], group, step + 1)
    torchs = oracle.torch_step(rule, state[0], grad.float() * factor, state[1:], group, step + 1)
    ours = [case.weight(row), *(m.cpu() for m in row.moments)]
    for slot, (value, magnitude), our, its in zip(SLOTS, exact, ours, torchs):
        ulp = oracle.ulp(magnitude)
        yield slot, (our.double() - value).abs() / ulp, (its.double() - value).abs() / ulp


def _check_norm(got: float | None, expected: float | None, grads: list[Tensor], scale: float) -> None:
    if expected is None:
        assert got is None
        return
    torchs = float(torch.stack([torch.zeros(()), *(g.float().norm() for g in grads)]).norm()) * scale
    ulp = float(oracle.ulp(torch.tensor(expected, dtype=torch.float64)))
    assert abs(got - expected) <= abs(torchs - expected) + NORM_ULP * ulp, f"norm {got}, expected {expected}"


def _bytes(case: Case, row: Row) -> list[Tensor]:
    return [t.cpu().contiguous().clone().view(torch.uint8) for t in case.written(row)]


def check_stored(row: Row) -> None:
    """What lies in memory is the encoding of the fp32 weight that it decodes to, bit for bit."""
    weight = Case.weight(row)
    primary, auxiliary = oracle.encode(row.codec, weight)
    assert_same_bits(row.flat(row.param), primary, weight, f"{row.span.name}: {row.codec.name} parameter")
    if auxiliary is not None:
        assert_same_bits(row.auxiliary, auxiliary, weight, f"{row.span.name}: {row.codec.name} auxiliary")


def check_storage(backend, codec: Codec, x: Tensor, device="cpu") -> None:
    """A step to known fp32 weights `x` stores their encoding, and a step of size zero then keeps every bit of it.

    sgd at lr 1 without momentum takes the weight 0 to -(gradient) exactly; -0 cannot be reached so.
    """
    x = x[(x != 0) | ~x.signbit()]
    group = {"lr": 1.0, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0}
    case = Case(rules.SGD, [RowCase(len(x), codec, torch.float32, offset=1)], [group], device=device)
    (row,) = case.visit.rows
    for tensor in case.written(row):
        tensor.zero_()
    row.flat(row.param.grad).copy_(-x)
    primary, auxiliary = oracle.encode(codec, x)
    for what in ("encoding", "encoding after a decoding"):
        apply(backend, case.visit)
        assert_same_bits(row.flat(row.param), primary, x, f"{what}: {codec.name} parameter")
        if auxiliary is not None:
            assert_same_bits(row.auxiliary, auxiliary, x, f"{what}: {codec.name} auxiliary")
        row.param.grad.zero_()
        case.groups[0]["lr"] = 0.0


def check_nonfinite(backend, bad: float, at: tuple[int, int], scale: float | None, max_norm: float | None, device="cpu") -> None:
    """With `bad` as element `at` = (row, element) of the gradients no byte of anything changes and no step advances."""
    sizes = (1, 17, 1025)
    specs = [RowCase(n, codec, g, 1, 1, i % len(GROUPS), 2) for i, (n, codec, g) in enumerate(zip(sizes, CODECS, _dtypes()))]
    case = Case(rules.ADAMW, specs, device=device)
    row = case.visit.rows[at[0]]
    row.flat(row.param.grad)[at[1]] = bad
    before, steps = case.snapshot(), case.visit.steps
    norm, found_inf = apply(backend, case.visit, scale, max_norm)
    assert found_inf is True
    assert not torch.tensor(norm).isfinite()
    assert_same_bytes(case.snapshot(), before, f"a gradient of {bad}")
    assert case.visit.steps == steps


def _dtypes() -> tuple[torch.dtype, ...]:
    return torch.float32, torch.bfloat16, torch.float16
