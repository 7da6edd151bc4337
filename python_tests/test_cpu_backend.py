"""The compiled backend: the same bits as the specification, whatever computes them."""

import contextlib
import hashlib
import math
import multiprocessing
import os
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import CODECS, GROUPS, Case, RowCase, codec_id, dtype_id

from badam_kernels import rules
from badam_kernels.backends import cpu, reference
from badam_kernels.blocks import Span
from badam_kernels.formats import FP32, PARAM_DTYPES, WEIGHT_CODECS
from badam_kernels.visit import COLUMNS, Row, Visit

pytestmark = pytest.mark.skipif(
    cpu.BACKEND.unavailable(torch.device("cpu")) is not None, reason=str(cpu.BACKEND.unavailable(torch.device("cpu")))
)

PART = 1 << 15  # elements that one thread takes at a time, csrc/step.cpp
SIZES = (2 * PART + 5, 0, 1025)
BEST = cpu.isas()[-1] if cpu.isas() else None


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def mixed_case(rule, grad_dtype=torch.bfloat16, seed=0):
    """Every codec in one block, in rows that are larger and smaller than what one thread takes; one row without gradient."""
    specs = [
        RowCase(size, codec, grad_dtype, start=i % 2, group=i % len(GROUPS), step=(0, 3, 1000)[i % 3])
        for i, (size, codec) in enumerate((size, codec) for size in SIZES for codec in CODECS)
    ]
    specs[1] = RowCase(100, CODECS[1], None)
    return Case(rule, specs, seed=seed)


def step(case, backend=cpu.BACKEND, scale=0.5, max_norm=1.0, **options):
    case.visit.refresh()
    return backend.apply(case.visit, scale, max_norm, **options)


def outcome(case, result):
    return result, case.visit.steps, [buffer.numpy().tobytes() for buffer in case.snapshot()]


# --- the same bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad_dtype", PARAM_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("codec", CODECS, ids=codec_id)
@pytest.mark.parametrize("rule", rules.RULES.values(), ids=rules.RULES)
@pytest.mark.parametrize("isa", cpu.isas())
def test_every_instruction_set_gives_the_bits_of_the_specification(rule, codec, grad_dtype, isa):
    specs = [RowCase(size, codec, grad_dtype, group=i % 3, step=i) for i, size in enumerate((1, 31, 255, 256, 257, 5003))]
    ours, specified = Case(rule, specs), Case(rule, specs)
    for _ in range(2):
        step(ours, scale=None, max_norm=None, isa=isa)
        step(specified, reference.BACKEND, scale=None, max_norm=None)
    for row, expected in zip(ours.visit.rows, specified.visit.rows):
        for got, want in zip(Case.written(row), Case.written(expected), strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), f"{row.span} differs"
    assert ours.visit.steps == specified.visit.steps


@pytest.mark.parametrize("grad_dtype", PARAM_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("rule", rules.RULES.values(), ids=rules.RULES)
def test_norm_and_bits_depend_neither_on_threads_nor_on_the_instruction_set(rule, grad_dtype):
    outcomes = []
    for count in (1, 2, 3, 7):
        for isa in cpu.isas() if count < 3 else [BEST]:
            case = mixed_case(rule, grad_dtype)
            with threads(count):
                outcomes.append(outcome(case, step(case, isa=isa)))
    assert all(other == outcomes[0] for other in outcomes[1:])


def test_bits_do_not_depend_on_how_a_row_is_cut_into_spans():
    size, cuts = 2 * PART + 77, (0, 1, 16, 1000, 1023, PART + 5, 2 * PART + 77)
    for codec in CODECS:
        whole, cut = (Case(rules.ADAMW, [RowCase(size, codec, torch.bfloat16)]) for _ in range(2))
        row = cut.visit.rows[0]
        rows = [
            Row(
                Span(row.span.name, start, stop),
                row.param,
                codec,
                None if row.auxiliary is None else row.auxiliary[start:stop],
                tuple(m[start:stop] for m in row.moments),
                row.group,
            )
            for start, stop in zip(cuts, cuts[1:])
        ]
        cut.visit = Visit(rules.ADAMW, rows, cut.groups)
        for case in (whole, cut):
            step(case, max_norm=None, scale=None)
        assert [a.tolist() for a in whole.snapshot()] == [a.tolist() for a in cut.snapshot()], codec_id(codec)


def test_the_norm_is_that_of_the_scaled_gradients():
    case = mixed_case(rules.ADAMW, torch.float32)
    total = sum(float(case.gradient(row).double().square().sum()) for row in case.visit.rows if row.param.grad is not None)
    norm, found_inf = step(case, scale=0.25, max_norm=math.inf)
    assert norm == pytest.approx(0.25 * math.sqrt(total), rel=1e-12) and found_inf is False


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("grad_dtype", PARAM_DTYPES, ids=dtype_id)
def test_one_gradient_that_is_not_finite_leaves_every_byte_as_it_was(grad_dtype, value):
    case = mixed_case(rules.ADAM, grad_dtype)
    last = case.visit.rows[-1]
    last.flat(last.param.grad)[-1] = value
    before, steps = case.snapshot(), case.visit.steps
    norm, found_inf = step(case)
    assert found_inf is True and not math.isfinite(norm)
    assert case.visit.steps == steps
    assert all(torch.equal(a, b) for a, b in zip(case.snapshot(), before, strict=True))


def test_flushing_denormals_on_the_caller_changes_no_bit_and_is_left_as_it_was():
    def tiny_case():
        case = mixed_case(rules.ADAMW, torch.float32)
        for row in case.visit.rows:
            for moment in row.moments:
                moment.mul_(1e-38)  # subnormal
        return case

    plain, flushed = tiny_case(), tiny_case()
    subnormal = torch.tensor([1e-40])
    expected = outcome(plain, step(plain, scale=None, max_norm=None))
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        with threads(2):
            got = outcome(flushed, step(flushed, scale=None, max_norm=None))
        assert float(subnormal * 1.0) == 0.0, "the caller's mode is gone"
    finally:
        torch.set_flush_denormal(False)
    assert got == expected


def test_elements_beyond_two_to_the_31_are_where_they_should_be(tmp_path):
    """A parameter and a gradient of 2^33 bytes each in sparse files, of which only the pages around the span exist."""
    numel, start, size = (1 << 32) + 4096, (1 << 32) - 3000, 6000
    weight, grad = (
        torch.from_file(str(tmp_path / name), shared=True, size=numel, dtype=torch.bfloat16) for name in ("weight", "grad")
    )
    codec = CODECS[1]
    small = Case(rules.ADAMW, [RowCase(size, codec, torch.bfloat16)])
    row = small.visit.rows[0]
    weight[start : start + size] = row.param.detach()
    grad[start : start + size] = row.param.grad
    param = torch.nn.Parameter(weight)
    param.grad = grad
    moments = tuple(m.clone() for m in row.moments)
    far = Row(Span("far", start, start + size), param, codec, row.auxiliary.clone(), moments, 0)
    visit = Visit(rules.ADAMW, [far], small.groups)
    visit.refresh()
    cpu.BACKEND.apply(visit, None, 1.0)
    step(small, scale=None, max_norm=1.0)
    for got, want in zip(Case.written(far), Case.written(row), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert not weight[start - 100 : start].any() and not weight[start + size : start + size + 100].any()


# --- threads and processes -----------------------------------------------------------------------------------------------


def test_concurrent_steps_do_not_disturb_each_other():
    def steps(case):
        for _ in range(100):
            step(case, scale=None, max_norm=None)
        return step(case)

    expected = [outcome(case, steps(case)) for case in (mixed_case(rules.ADAMW, seed=i) for i in range(4))]
    cases = [mixed_case(rules.ADAMW, seed=i) for i in range(4)]
    with threads(3), ThreadPoolExecutor(4) as callers:
        results = list(callers.map(steps, cases))
    assert [outcome(case, result) for case, result in zip(cases, results)] == expected


def digest(seed=0):
    """Of what a step on three threads leaves. The case is made on one: OpenMP's own threads do not survive a fork."""
    with threads(1):
        case = mixed_case(rules.ADAMW, seed=seed)
        with threads(3):
            result = step(case)
        return hashlib.sha256(repr(outcome(case, result)).encode()).hexdigest()


FORKS = """
expected = digest()  # the workers exist from here on
child = os.fork()
if child == 0:
    alone = os.listdir("/proc/self/task")
    os._exit(digest() != expected or len(alone) != 1 or len(os.listdir("/proc/self/task")) != 3)
assert os.waitpid(child, 0)[1] == 0, "os.fork, and workers of the child's own"
assert digest() == expected, "the parent, after a fork"

def work(queue):
    queue.put(digest())

context = multiprocessing.get_context("fork")
queue = context.Queue()
process = context.Process(target=work, args=(queue,))
process.start()
assert queue.get() == expected, "multiprocessing"
process.join()
assert process.exitcode == 0
"""


def test_a_forked_child_steps_like_its_parent_and_both_exit():
    """In a process of its own, whose end with sleeping workers is part of the test."""
    mixed_case(rules.ADAMW)  # what skips it skips here
    path = [os.path.dirname(__file__), *sys.path]
    program = f"import sys; sys.path[:0] = {path!r}\nfrom test_cpu_backend import *\ntorch.set_num_threads(1)\n{FORKS}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def send_digest(queue):
    queue.put(digest())


def test_a_spawned_child_steps_like_its_parent():
    expected = digest()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=send_digest, args=(queue,))
    process.start()
    assert queue.get(timeout=120) == expected
    process.join(timeout=60)
    assert process.exitcode == 0


# --- refusals ------------------------------------------------------------------------------------------------------------


def test_what_it_cannot_do_is_refused_by_name():
    assert "cuda" in cpu.BACKEND.unavailable(torch.device("cuda"))
    case = Case(rules.Rule("lion", ("m", "v"), True, True, rules.ADAMW.update), [RowCase(3, FP32, torch.float32)])
    with pytest.raises(ValueError, match="'lion' is not in the extension"):
        step(case)
    case = Case(rules.ADAMW, [RowCase(3, FP32, torch.float32)])
    with pytest.raises(ValueError, match="isa must be one of"):
        step(case, isa="mmx")
    case.visit.table[0, COLUMNS.index("codec")] = len(WEIGHT_CODECS)
    before = case.snapshot()
    with pytest.raises(ValueError, match="row 0 of the table"):
        step(case)
    assert all(torch.equal(a, b) for a, b in zip(case.snapshot(), before, strict=True))


@pytest.mark.parametrize("table", ["RULES", "CODECS", "GRAD_DTYPES", "COLUMNS", "HYPER"])
def test_an_extension_with_other_tables_is_refused(monkeypatch, table):
    other = types.SimpleNamespace(**{name: value for name, value in vars(cpu._C).items() if name.isupper()})
    setattr(other, table, getattr(other, table)[::-1])
    monkeypatch.setattr(cpu, "_C", other)
    assert table in type(cpu.BACKEND)().unavailable(torch.device("cpu"))
