"""What only a GPU can show of the Triton backend: capture, streams, devices, sizes, repetition, no waiting.

The conformance matrix runs there by itself: `pytest -m gpu`.
"""

import contextlib

import checks
import pytest
import torch
from cases import Case, RowCase
from test_conformance import mixed_block

from badam_kernels import BlockAdam
from badam_kernels.backends import load
from badam_kernels.formats import MASTER_BF16, SPLIT_BF16
from badam_kernels.rules import ADAMW

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture
def backend():
    backend = load("triton")
    why_not = backend.unavailable(CUDA)
    if why_not is not None:
        pytest.skip(why_not)
    return backend


@contextlib.contextmanager
def no_waiting():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def block():
    rows = [RowCase(5_003, MASTER_BF16, torch.bfloat16), RowCase(70_000, SPLIT_BF16, torch.bfloat16, offset=1)]
    return Case(ADAMW, rows, device=CUDA)


def test_a_step_neither_waits_nor_allocates(backend):
    case = block()
    for max_norm in (None, 1.0):
        checks.apply(backend, case.visit, None, max_norm)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_waiting():
        for i in range(20):
            case.groups[0]["lr"] = 1e-3 / (1 + i)
            case.visit.refresh()
            backend.apply(case.visit, None, 1.0)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated


def test_the_optimizer_does_not_wait_before_a_switch_is_due():
    params = {f"layers.{i}.w": torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16, device=CUDA)) for i in range(2)}
    optimizer = BlockAdam(params.items(), switch_every=10, schedule="ascending", max_grad_norm=1.0, backend="triton")
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with no_waiting():
        for _ in range(8):
            optimizer.step()
    assert (optimizer.global_step, optimizer.active_block_index) == (9, 0)
    optimizer.step()
    assert (optimizer.global_step, optimizer.active_block_index) == (10, 1)


def test_a_captured_step_replays_like_eager_steps_with_a_moving_lr(backend):
    eager, captured = block(), block()
    lrs = [1e-3 / (1 + i) for i in range(20)]
    for case in (eager, captured):
        checks.apply(backend, case.visit, None, 1.0)  # the first step of a visit allocates
    for lr in lrs:
        eager.groups[0]["lr"] = lr
        checks.apply(backend, eager.visit, None, 1.0)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        backend.apply(captured.visit, None, 1.0)
    for lr in lrs:
        captured.groups[0]["lr"] = lr
        backend.upload(captured.visit, None, 1.0)
        graph.replay()
    torch.cuda.synchronize()
    assert captured.visit.steps == eager.visit.steps
    checks.assert_same_bytes(captured.snapshot(), eager.snapshot(), "replay")


def test_a_new_lr_during_capture_is_refused(backend):
    case = block()
    checks.apply(backend, case.visit)
    case.groups[0]["lr"] *= 2
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="upload"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        backend.apply(case.visit, None, None)


def test_a_step_on_a_side_stream_follows_the_work_there(backend):
    expected, case = block(), block()
    checks.apply(backend, expected.visit, 0.5, 1.0)
    grads = [row.param.grad.clone() for row in case.visit.rows]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for row in case.visit.rows:
            row.param.grad.zero_()
        torch.cuda._sleep(50_000_000)
        for row, grad in zip(case.visit.rows, grads):
            row.param.grad.copy_(grad)
        checks.apply(backend, case.visit, 0.5, 1.0)
    torch.cuda.current_stream().wait_stream(stream)
    checks.assert_same_bytes(case.snapshot(), expected.snapshot(), "side stream")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_current_device_does_not_matter(backend):
    case = Case(ADAMW, mixed_block(), device=torch.device("cuda:1"))
    with torch.cuda.device(0):
        checks.check_step(backend, case, 0.37, 0.5)


def test_an_element_beyond_two_to_the_31_is_reached(backend):
    """The last elements of a row of 2**31 + 17 move, and those 2**32 bytes before and 2**31 elements before do not."""
    n = 2**31 + 17
    if torch.cuda.mem_get_info()[0] < n * 14 + 2**32:
        pytest.skip("needs 34 GB of GPU memory")
    case = Case(ADAMW, [RowCase(16, SPLIT_BF16, torch.bfloat16)], device=CUDA)
    (row,) = case.visit.rows
    span = type(row.span)(row.span.name, 0, n)
    param = torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16, device=CUDA))
    param.grad = torch.zeros(n, dtype=torch.bfloat16, device=CUDA)
    param.grad[-17:] = 1
    slots = [torch.zeros(n, dtype=dtype, device=CUDA) for dtype in (torch.int16, torch.float32, torch.float32)]
    visit = type(case.visit)(ADAMW, [type(row)(span, param, SPLIT_BF16, slots[0], tuple(slots[1:]), 0)], case.groups)
    norm, _ = checks.apply(backend, visit, None, 1e9)
    assert norm == pytest.approx(17**0.5)
    assert torch.equal(param.detach()[-17:], param.detach()[-1:].expand(17)) and param.detach()[-1] < 0
    assert not param.detach()[:-17].any()


def test_a_hundred_repeats_are_bitwise_equal(backend):
    expected = None
    for _ in range(100):
        case = block()
        checks.apply(backend, case.visit, 0.5, 0.1)
        snapshot = case.snapshot()
        expected = expected or snapshot
        checks.assert_same_bytes(snapshot, expected, "a repeat")
