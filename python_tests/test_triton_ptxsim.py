"""The compiled PTX itself, run instruction by instruction on the CPU: bounds, alignment and races checked, bytes counted.

Runs where the environment variable BADAM_PTXSIM names a folder that holds the package ``ptxsim``, a simulator of NVIDIA GPUs.
"""

import os
import sys

import checks
import numpy as np
import pytest
import torch
from cases import CODECS, Case, RowCase, codec_id, dtype_id, every_size_and_place
from test_conformance import SCALES, mixed_block

pytest.importorskip("triton", "3.3", reason="compiles ahead of time as Triton 3.3 and later do")
if "BADAM_PTXSIM" not in os.environ:
    pytest.skip("BADAM_PTXSIM does not name the folder of a PTX simulator", allow_module_level=True)
sys.path.append(os.environ["BADAM_PTXSIM"])
ptxsim = pytest.importorskip("ptxsim")

from badam_kernels import BlockAdam, formats
from badam_kernels import optimizer as optimizer_module
from badam_kernels.backends import _triton_kernels as kernels
from badam_kernels.backends import load
from badam_kernels.backends import triton as triton_backend
from badam_kernels.formats import FP32, MASTER_BF16, PARAM_DTYPES, SPLIT_BF16
from badam_kernels.rules import ADAMW, RULES

BACKEND = load("triton")
TABLES = {"table", "scalars", "result", "chunks"}
"""Arguments of the update kernel; whatever else it touches is the block."""


@pytest.fixture(params=[80, 90, 100], ids=lambda cc: f"sm_{cc}")
def simulator(request):
    with ptxsim.Simulator(request.param, pretend_cuda=True, order=7) as simulator:
        yield simulator


@pytest.fixture(autouse=True)
def no_deterministic_fill(poisoned_memory):
    """torch's deterministic mode asks for a cuBLAS configuration as soon as tensors say that they are on a GPU."""
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
@pytest.mark.parametrize("codec", CODECS, ids=codec_id)
@pytest.mark.parametrize("grad_dtype", PARAM_DTYPES, ids=lambda dtype: f"grad_{dtype_id(dtype)}")
def test_one_step_is_as_exact_as_torch(simulator, rule, codec, grad_dtype):
    assert BACKEND.unavailable(torch.device("cpu")) is None
    for seed, (scale, max_norm) in enumerate(SCALES):
        checks.check_step(BACKEND, Case(rule, every_size_and_place(codec, grad_dtype), seed=seed), scale, max_norm)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_rows_of_one_block_may_differ(simulator, rule):
    checks.check_step(BACKEND, Case(rule, mixed_block()), 0.37, 0.5)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan], ids=str)
def test_a_non_finite_gradient_changes_no_byte(simulator, bad):
    for at in [(0, 0), (1, 16), (2, 1023)]:
        checks.check_nonfinite(BACKEND, bad, at, 0.5, 1.0, torch.device("cpu"))


@pytest.mark.parametrize("n", [100_003, 100_000])
@pytest.mark.parametrize("codec", CODECS, ids=codec_id)
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32], ids=dtype_id)
def test_the_update_moves_the_bytes_of_the_codec_table_and_no_more(simulator, codec, grad_dtype, n):
    checks.check_step(BACKEND, Case(ADAMW, [RowCase(n, codec, grad_dtype)]))
    traffic = [t for name, t in simulator.launches[-1].traffic.items() if name not in TABLES]
    form = formats.SPLIT if codec is SPLIT_BF16 else formats.MASTER
    assert sum(t.loaded + t.stored for t in traffic) == n * form.moved_bytes(codec.primary, grad_dtype)
    for t in traffic:  # vectors of four, then one by one what is left of 16
        for counted, total in ((t.loads, t.loaded), (t.stores, t.stored)):
            size = total // n
            assert not counted or dict(counted) == {4 * size: n // 16 * 4} | ({size: n % 16} if n % 16 else {})


def test_the_norm_reads_every_gradient_once(simulator):
    n = 50_003
    checks.check_step(BACKEND, Case(ADAMW, [RowCase(n, SPLIT_BF16, torch.bfloat16)]), None, 1.0)
    norm = simulator.launches[0]
    assert norm.kernel == "norm"
    assert sum(t.loaded for name, t in norm.traffic.items() if name not in ("table", "chunks", "partials")) == 2 * n


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(
    "max_norm, launches", [(None, ["finish", "update"]), (1.0, ["norm", "finish", "update"])], ids=["plain", "clip"]
)
def test_launches_do_not_grow_with_the_number_of_tensors(simulator, rows, max_norm, launches):
    for offset in (0, 1):  # aligned rows and others
        case = Case(ADAMW, [RowCase(17 + i, SPLIT_BF16, torch.bfloat16, offset=offset * (i % 2)) for i in range(rows)])
        simulator.launches.clear()
        checks.apply(BACKEND, case.visit, None, max_norm)
        assert [launch.kernel for launch in simulator.launches] == launches


def test_nothing_compiles_after_the_first_step(simulator):
    def compiled() -> int:
        caches = [kernel.device_caches for kernel in (kernels.norm, kernels.finish, kernels.update)]
        return sum(len(cache[0]) for by_device in caches for cache in by_device.values())

    case = Case(ADAMW, [RowCase(100, SPLIT_BF16, torch.bfloat16)])
    checks.apply(BACKEND, case.visit, 0.5, 1.0)
    first = compiled()
    for lr, step, sizes in ((1, 0, [1]), (2e-5, 15, [16, 16]), (0.0, 999, [15, 4096, 3]), (1e-3, 2**31, [513] * 16)):
        specs = [RowCase(size, SPLIT_BF16, torch.bfloat16, offset=i % 2, step=step) for i, size in enumerate(sizes)]
        case = Case(ADAMW, specs, [{"lr": lr, "betas": (0.5 + lr / 10, 0.99), "eps": 1e-8 + lr, "weight_decay": lr}] * 3)
        for max_norm in (1.0, 0.3):
            checks.apply(BACKEND, case.visit, 0.25, max_norm)
    assert compiled() == first


def test_a_step_is_bitwise_repeatable_whatever_the_order_of_programs(simulator):
    snapshots = []
    for seed in (1, 2, 3):
        simulator._order = np.random.default_rng(seed).permutation
        case = Case(ADAMW, [RowCase(70_001, MASTER_BF16, torch.bfloat16), RowCase(333, FP32, torch.float32, offset=1)])
        checks.apply(BACKEND, case.visit, 0.5, 0.1)
        snapshots.append(case.snapshot())
    for snapshot in snapshots[1:]:
        checks.assert_same_bytes(snapshot, snapshots[0], "order of programs")


@pytest.mark.parametrize("dtype, format", [(torch.bfloat16, "split"), (torch.bfloat16, "master"), (torch.float16, "master")])
def test_whole_optimizer_steps_equal_the_reference(simulator, dtype, format):
    """Over a switch, with clipping, an overflow and a moving lr: same schedule, weights within an ulp of 16 bits."""
    ours, theirs = _train("triton", dtype, format), _train("reference", dtype, format)
    assert ours[0] == theirs[0]
    for a, b in zip(ours[1], theirs[1]):
        torch.testing.assert_close(a, b, rtol=2**-7 if dtype is torch.bfloat16 else 2**-10, atol=1e-7)


def _train(backend, dtype, format):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(2))}).to(dtype)
    optimizer = BlockAdam(
        model.named_parameters(), lr=1e-2, weight_decay=0.1, switch_every=2, schedule="ascending", format=format,
        max_grad_norm=0.5, backend=backend,
    )  # fmt: skip
    history = []
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        for name, param in model.named_parameters():
            if param.requires_grad:
                generator = torch.Generator().manual_seed(step * 100 + len(name))
                param.grad = torch.randn(param.shape, generator=generator).to(dtype)
                if step == 2:
                    param.grad.view(-1)[3] = torch.inf
        optimizer.step()
        optimizer.zero_grad()
        history.append((optimizer.active_block_index, optimizer.global_step))
    params = [param.detach().float() for param in model.parameters()]
    optimizer.close()
    return history, params


class _Tape:
    """Stands in for a kernel: runs it, or while a step is captured only remembers the launch."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches, self.capturing = kernel, launches, False

    def __getitem__(self, grid):
        def launch(*args, **constants):
            if self.capturing:
                self.launches.append(lambda: self.kernel[grid](*args, **constants))
            else:
                self.kernel[grid](*args, **constants)

        return launch


class _Graph:
    """Stands in for torch.cuda.CUDAGraph: the launches captured inside `with`."""

    def __init__(self, tapes, launches):
        self.tapes, self.launches = tapes, launches

    def __enter__(self):
        self.launches.clear()
        self.capture(True)
        return self

    def __exit__(self, *_):
        self.capture(False)
        self.held = list(self.launches)

    def capture(self, on):
        for tape in self.tapes:
            tape.capturing = on

    def replay(self):
        for launch in self.held:
            launch()


def test_replayed_steps_are_bitwise_the_eager_ones(simulator, monkeypatch):
    """20 steps over two visits with clipping, a moving lr and an overflow."""
    launches, tapes = [], []
    for name in ("norm", "finish", "update"):
        tapes.append(_Tape(getattr(kernels, name), launches))
        monkeypatch.setattr(kernels, name, tapes[-1])
    monkeypatch.setattr(triton_backend, "_interpreted", lambda: False)
    monkeypatch.setattr(optimizer_module, "_capturing", lambda device: tapes[0].capturing)
    eager = _replay(None)
    replayed = _replay(lambda: _Graph(tapes, launches))
    assert (replayed[0], eager[0]) == (18, 0)
    assert replayed[1:3] == eager[1:3] == (19, 1)
    for a, b in zip(replayed[3], eager[3]):
        assert torch.equal(a, b)


def _replay(capture):
    """(replays, successful steps, active block, weights and state) of 20 steps; with `capture`, all but a visit's first replayed."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(2))}).bfloat16()
    optimizer = BlockAdam(
        model.named_parameters(), switch_every=10, schedule="ascending", max_grad_norm=0.5, weight_decay=0.1,
        backend="triton", static_grads=True,
    )  # fmt: skip
    graphs, replays = [], 0
    optimizer.register_switch_hook(lambda *_: graphs.clear())
    for step in range(20):
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        optimizer.zero_grad()
        for name, param in model.named_parameters():
            if param.requires_grad:
                generator = torch.Generator().manual_seed(step * 100 + len(name))
                param.grad.copy_(torch.randn(param.shape, generator=generator))
                if step == 5:
                    param.grad.view(-1)[3] = torch.inf
        if graphs:
            replays += 1
            optimizer.replay(graphs[0])
            continue
        optimizer.step()
        if capture is not None and optimizer._visit is not None:
            with capture() as graph:
                optimizer.step()
            graphs.append(graph)
    state = [slot.clone() for row in optimizer._visit.rows for slot in (row.auxiliary, *row.moments)]
    weights = [param.detach().clone() for param in model.parameters()]
    counted = optimizer.global_step, optimizer.active_block_index
    optimizer.close()
    return replays, *counted, weights + state


def test_a_dynamic_loss_scale_follows_the_kernels_answers(simulator):
    """As on the reference backend: scale, schedule and weights, over an overflow."""
    ours, theirs = _scaled("triton"), _scaled("reference")
    assert ours[0] == theirs[0] and [scale for scale, _ in ours[0]] == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
    for a, b in zip(ours[1], theirs[1]):
        torch.testing.assert_close(a, b, rtol=2**-10, atol=1e-7)


def _scaled(backend):
    params = {"layers.0.w": torch.nn.Parameter(torch.linspace(-1, 1, 40).half())}
    optimizer = BlockAdam(params.items(), lr=1e-2, loss_scale="dynamic", backend=backend)
    history = []
    for step in range(4):
        optimizer.scale(torch.ones(()))
        params["layers.0.w"].grad = (torch.sin(torch.arange(40.0) + step) * 2.0**-4).half() * (torch.inf if step == 2 else 1.0)
        optimizer.step()
        history.append((float(optimizer.loss_scale), optimizer.global_step))
    return history, [p.detach().float() for p in params.values()]
