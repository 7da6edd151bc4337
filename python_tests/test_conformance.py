"""Every backend x rule x codec x gradient dtype x size x place does one step as exactly as torch's own fp32 optimizer.

The matrix is generated from the tables of floor 0 and of `backends`; a new row there is tested without a word here.
"""

from dataclasses import replace

import checks
import oracle
import patterns
import pytest
import torch
from cases import CODECS, GROUPS, LARGE, Case, RowCase, codec_id, dtype_id, every_size_and_place
from mutants import MUTANTS

from badam_kernels.backends import reference
from badam_kernels.blocks import Span
from badam_kernels.formats import FP32, MASTER_BF16, MASTER_FP16, PARAM_DTYPES, SPLIT_BF16
from badam_kernels.rules import ADAM, ADAMW, RULES, SGD

SCALES = [(None, None), (0.37, None), (0.37, 0.5), (None, 1e9)]
"""(scale, max_norm): no norm pass, unscaling, unscaling and clipping, a threshold that is not reached."""

per_codec = pytest.mark.parametrize("codec", CODECS, ids=codec_id)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
@per_codec
@pytest.mark.parametrize("grad_dtype", PARAM_DTYPES, ids=lambda dtype: f"grad_{dtype_id(dtype)}")
def test_one_step_is_as_exact_as_torch(backend, device, rule, codec, grad_dtype):
    for seed, (scale, max_norm) in enumerate(SCALES[1:3]):
        case = Case(rule, every_size_and_place(codec, grad_dtype), seed=seed, device=device)
        checks.check_step(backend, case, scale, max_norm)


@pytest.mark.parametrize(
    "rule, codec, grad_dtype",
    [(ADAMW, SPLIT_BF16, torch.bfloat16), (ADAM, MASTER_FP16, torch.float16), (SGD, FP32, torch.float32)],
    ids=["adamw-split", "adam-master_fp16", "sgd-fp32"],
)
def test_a_large_row_is_as_exact_as_torch(backend, device, rule, codec, grad_dtype):
    case = Case(rule, [RowCase(LARGE, codec, grad_dtype, start=3, offset=2, step=2)], device=device)
    checks.check_step(backend, case, 0.5, 1.0)


def mixed_block() -> list[RowCase]:
    """Rows that differ in everything a row can differ in, some without a gradient."""
    grads = (*PARAM_DTYPES, None)
    return [
        RowCase(17 + 64 * i, codec, grads[(i + j) % 4], start=i % 3, offset=j % 2, group=(i + j) % len(GROUPS), step=i * j)
        for i in range(4)
        for j, codec in enumerate(CODECS)
    ]


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
@pytest.mark.parametrize("scale, max_norm", SCALES)
def test_rows_of_one_block_may_differ_in_dtypes_groups_steps_and_lack_gradients(backend, device, rule, scale, max_norm):
    checks.check_step(backend, Case(rule, mixed_block(), device=device), scale, max_norm)


def test_a_later_step_follows_new_hyper_parameters_and_gradients(backend, device):
    case = Case(ADAMW, mixed_block(), device=device)
    checks.check_step(backend, case)
    for i, group in enumerate(case.groups):
        group.update(lr=group["lr"] / (2 + i), betas=(0.7, 0.98), eps=1e-7, weight_decay=0.3)
    for i, row in enumerate(case.visit.rows):
        grad = row.param.grad
        if grad is not None:
            row.param.grad = None if i % 3 == 0 else grad.neg().to(PARAM_DTYPES[i % 3])
    checks.check_step(backend, case, 2.0, 0.1)


@pytest.mark.parametrize("scale, max_norm", SCALES)
def test_a_block_without_any_gradient_stays_as_it_is(backend, device, scale, max_norm):
    case = Case(ADAMW, [RowCase(5, codec, None) for codec in CODECS], device=device)
    checks.check_step(backend, case, scale, max_norm)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("scale, max_norm", [(0.5, None), (None, 1.0), (0.5, 1e9)])
def test_a_non_finite_gradient_changes_no_byte(backend, device, bad, scale, max_norm):
    for at in [(0, 0), (1, 0), (1, 16), (2, 0), (2, 512), (2, 1023), (2, 1024)]:
        checks.check_nonfinite(backend, bad, at, scale, max_norm, device)


def test_a_large_finite_gradient_is_not_taken_for_an_overflow(backend, device):
    case = Case(ADAMW, [RowCase(1025, SPLIT_BF16, torch.bfloat16, step=1)], device=device)
    (row,) = case.visit.rows
    row.param.grad.mul_(1e12)
    checks.check_step(backend, case, None, 1.0)


@per_codec
def test_storage_is_bitwise_the_encoding_of_the_weight(backend, device, codec):
    for x in patterns.hard(codec):
        checks.check_storage(backend, codec, x, device)


@per_codec
def test_infinity_and_nan_are_stored_as_such(backend, device, codec):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan] * 7)
    group = {"lr": 1.0, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0}
    case = Case(SGD, [RowCase(len(x), codec, torch.float32)], [group], device=device)
    (row,) = case.visit.rows
    for tensor in case.written(row):
        tensor.zero_()
    row.param.grad.copy_(-x)
    checks.apply(backend, case.visit)
    for got in (row.flat(row.param).cpu().float(), case.weight(row)):
        torch.testing.assert_close(got, x, rtol=0, atol=0, equal_nan=True)


@per_codec
def test_an_edited_parameter_wins_over_a_stale_auxiliary(backend, device, codec):
    """A step of size zero stores what the reference decodes: the parameter, refined only by a residual that fits it."""
    group = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    case = Case(ADAMW, [RowCase(2**16, codec, torch.float32, offset=1)], [group], device=device)
    (row,) = case.visit.rows
    edited = torch.randn(2**16)
    if codec.primary.itemsize == 2:
        edited = torch.arange(2**16).to(torch.int16).view(codec.primary).float()
        edited = torch.where(edited.isfinite(), edited, 0)
    row.param.data.copy_(edited)
    row.param.grad.zero_()
    before = row.param.detach().clone()
    auxiliary = None if row.auxiliary is None else row.auxiliary.clone()
    checks.apply(backend, case.visit)
    assert torch.equal(row.param.detach(), before)
    expected = codec.decode(before, auxiliary).cpu()
    checks.assert_same_bits(case.weight(row), oracle.decode(codec, *oracle.encode(codec, expected)), edited, "weight")


@per_codec
def test_a_row_cut_into_spans_gets_the_same_bits(backend, device, codec):
    """So an optimizer may slice, merge and thread as it likes. Without a norm: that one belongs to the whole block."""
    whole = Case(ADAMW, [RowCase(1025, codec, torch.bfloat16, step=3)], device=device)
    parts = Case(ADAMW, [RowCase(1025, codec, torch.bfloat16, step=3)], device=device)
    (row,) = parts.visit.rows
    cuts = [0, 1, 16, 17, 500, 1025]
    parts.visit = type(parts.visit)(ADAMW, [_part(row, a, b) for a, b in zip(cuts, cuts[1:])], parts.groups)
    for case in (whole, parts):
        checks.apply(backend, case.visit, 0.5, None)
    checks.assert_same_bytes(parts.snapshot(), whole.snapshot(), "spans of a row")


def _part(row, start, stop):
    return replace(
        row,
        span=Span(row.span.name, start, stop),
        auxiliary=None if row.auxiliary is None else row.auxiliary[start:stop],
        moments=tuple(moment[start:stop] for moment in row.moments),
    )


def test_any_number_of_threads_gets_the_same_bits(backend, device):
    if backend.name == "reference":
        pytest.skip("torch's own sums follow the number of threads")
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2, 3, 7):
            torch.set_num_threads(n)
            case = Case(ADAMW, mixed_block() + [RowCase(40_001, SPLIT_BF16, torch.bfloat16)], device=device)
            norm, _ = checks.apply(backend, case.visit, 0.5, 1.0)
            results.append((norm, case.snapshot()))
    finally:
        torch.set_num_threads(threads)
    for norm, snapshot in results[1:]:
        checks.assert_same_bytes(snapshot, results[0][1], "threads")
        assert norm == results[0][0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_in_any_memory_layout_is_read_in_the_order_of_the_parameter(backend, device, dtype):
    snapshots = []
    for layout in (lambda g: g, lambda g: g.t().contiguous().t(), lambda g: torch.stack([g, g], 2)[:, :, 0]):
        case = Case(ADAMW, [RowCase(12 * 20, MASTER_BF16, dtype)], device=device)
        (row,) = case.visit.rows
        row.param.data, grad = row.param.data.view(12, 20), row.param.grad
        row.param.grad = None
        row.param.grad = layout(grad.view(12, 20))
        checks.apply(backend, case.visit, None, 1.0)
        snapshots.append(case.snapshot())
    checks.assert_same_bytes(snapshots[1], snapshots[0], "a transposed gradient")
    checks.assert_same_bytes(snapshots[2], snapshots[0], "a strided gradient")


def run_check(check: str, backend) -> None:
    """The checks above, on the cases that tell mutants apart."""
    if check == "step":
        checks.check_step(backend, Case(ADAMW, mixed_block()), 0.37, 0.5)
        checks.check_step(backend, Case(ADAMW, mixed_block()), 0.37, 1e9)
    elif check == "storage":
        for codec in (SPLIT_BF16, MASTER_FP16):
            ties, _ = patterns.hard(codec)
            checks.check_storage(backend, codec, ties)
    else:
        checks.check_nonfinite(backend, torch.inf, (1, 16), None, 1.0)


@pytest.mark.parametrize("check", ["step", "storage", "nonfinite"])
def test_the_unbroken_backend_passes_what_the_mutants_fail(check):
    run_check(check, reference.BACKEND)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_refused(name, monkeypatch):
    check, mutate = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        run_check(check, reference.BACKEND)
