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
    optimizer.close()  # its memory must not be given back by a garbage collection within the capture of another test


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


@pytest.mark.parametrize("dtype, loss_scale", [(torch.bfloat16, None), (torch.float16, "dynamic")], ids=["bf16", "fp16_scaled"])
def test_forward_backward_and_step_in_one_graph_equal_eager_ones(backend, dtype, loss_scale):
    """20 steps over two visits with clipping, a moving lr and one overflow, which is in the data."""
    eager, captured = _train(dtype, loss_scale, False), _train(dtype, loss_scale, True)
    assert (captured["replays"], eager["replays"]) == (18, 0)
    assert captured["counted"] == eager["counted"] == (19, 1)
    assert captured["scale"] == eager["scale"]
    for got, want in zip(captured["weights"], eager["weights"], strict=True):
        assert torch.equal(got, want)
    assert captured["losses"] == eager["losses"]


def _train(dtype, loss_scale, capture):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))}).to(CUDA, dtype)
    optimizer = BlockAdam(
        model.named_parameters(), switch_every=10, schedule="ascending", max_grad_norm=0.5, weight_decay=0.1, backend="triton",
        static_grads=True, loss_scale=loss_scale,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e3 / (1 + step))
    batch, loss = torch.empty(8, 64, dtype=dtype, device=CUDA), torch.zeros((), device=CUDA)
    graphs, replays, losses = [], 0, []
    optimizer.register_switch_hook(lambda *_: graphs.clear())

    def train_step():
        optimizer.zero_grad()
        x = batch
        for layer in model["layers"]:
            x = torch.tanh(layer(x))
        value = (x.float() ** 2).mean() * 2**-6
        loss.copy_(value.detach())
        optimizer.scale(value).backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(20):
            batch.copy_(torch.randn(8, 64, generator=torch.Generator().manual_seed(step)))
            if step == 5:
                batch[0, 0] = torch.nan
            if graphs:
                optimizer.replay(graphs[0])
                replays += 1
            else:
                train_step()
                if capture:
                    graphs.append(torch.cuda.CUDAGraph())
                    with torch.cuda.graph(graphs[0], stream=stream):
                        train_step()
            losses.append(repr(loss.item()))
            scheduler.step()
    torch.cuda.synchronize()
    scale = None if loss_scale is None else float(optimizer.loss_scale)
    counted = optimizer.global_step, optimizer.active_block_index
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer.close()
    return {"replays": replays, "counted": counted, "scale": scale, "weights": weights, "losses": losses}


def test_a_static_gradient_keeps_its_address_through_a_backward_pass():
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))}).to(CUDA)
    optimizer = BlockAdam(model.named_parameters(), static_grads=True, schedule="ascending", switch_every=2)
    trained = [p for p in model.parameters() if p.requires_grad]
    addresses = [p.grad.data_ptr() for p in trained]
    with no_waiting():
        for _ in range(2):
            model["layers"][0](torch.ones(4, 64, device=CUDA)).sum().backward()
            assert [p.grad.data_ptr() for p in trained] == addresses
            optimizer.zero_grad()
    optimizer.close()


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
