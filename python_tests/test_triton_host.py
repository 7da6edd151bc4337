"""The host side of the Triton backend, with the launches recorded instead of done: what a step costs before the device starts."""


import pytest
import torch
from cases import Case, RowCase
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from badam_kernels.backends import resolve
from badam_kernels.backends import triton as backend
from badam_kernels.formats import FP32, SPLIT_BF16
from badam_kernels.progress import Progress
from badam_kernels.rules import ADAMW

ATEN_CALLS = 12
"""The budget of a step for 1,200 tensors as for one."""


class Recorder:
    """Stands in for a kernel."""

    def __init__(self, name, launches):
        self.name, self.launches = name, launches

    def __getitem__(self, grid):
        return lambda *args, **constants: self.launches.append((self.name, grid, args, constants))


@pytest.fixture
def launches(monkeypatch):
    launches = []
    for name in ("norm", "finish", "update"):
        monkeypatch.setattr(backend.kernels, name, Recorder(name, launches))
    monkeypatch.setattr(backend, "_interpreted", lambda: False)
    return launches


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def block(rows, offset=0, codec=SPLIT_BF16, dtype=torch.bfloat16):
    return Case(ADAMW, [RowCase(20 + i % 7, codec, dtype, offset=offset * (i % 2)) for i in range(rows)])


def step(case, scale=None, max_norm=None, **kwargs):
    case.visit.refresh()
    return backend.BACKEND.apply(case.visit, scale, max_norm, **kwargs)


@pytest.mark.parametrize("rows", [1, 9, 1200])
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
def test_launches_do_not_grow_with_the_number_of_tensors(launches, rows, offset):
    case = block(rows, offset)
    step(case)
    assert [launch[0] for launch in launches] == ["finish", "update"]
    launches.clear()
    step(case, 0.5, 1.0)
    assert [launch[0] for launch in launches] == ["norm", "finish", "update"]


def test_a_block_of_two_classes_takes_one_update_for_each(launches):
    case = Case(ADAMW, [RowCase(50, (SPLIT_BF16, FP32)[i % 2], torch.bfloat16) for i in range(10)])
    step(case, None, 1.0)
    assert [launch[0] for launch in launches] == ["norm", "finish", "update", "update"]
    assert sum(grid[0] for name, grid, *_ in launches if name == "update") == 10


@pytest.mark.parametrize("rows", [9, 1200])
@pytest.mark.parametrize("change", ["nothing", "lr", "gradients", "both"])
def test_a_later_step_costs_few_aten_calls_and_reads_nothing_back(launches, rows, change):
    case = block(rows)
    step(case, None, 1.0)
    if change in ("lr", "both"):
        case.groups[0]["lr"] /= 2
    if change in ("gradients", "both"):
        kept = [row.param.grad for row in case.visit.rows]  # else their memory is used again
        for row, grad in zip(case.visit.rows, kept):
            row.param.grad = grad.clone()
    with Calls() as calls:
        step(case, None, 1.0)
    assert len(calls.names) <= (0 if change == "nothing" else ATEN_CALLS), calls.names
    assert "aten._local_scalar_dense.default" not in calls.names and "aten.nonzero.default" not in calls.names


def test_a_gradient_that_comes_and_goes_makes_no_new_plan(launches):
    case = block(8)
    step(case)
    plan = case.visit.state.launches
    grads = [row.param.grad for row in case.visit.rows]
    for missing in ((0, 3), (1,), ()):
        for i, row in enumerate(case.visit.rows):
            row.param.grad = None if i in missing else grads[i]
        step(case)
        assert case.visit.state.launches is plan


@pytest.mark.parametrize("change", [{"lr": 3e-6}, {"betas": (0.5, 0.6)}, {"eps": 1e-3}, {"weight_decay": 0.7}], ids=str)
def test_hyper_parameters_travel_in_memory_not_in_arguments(launches, change):
    case = block(3)
    step(case, 0.5, 1.0)
    before = [_constants(launch) for launch in launches]
    launches.clear()
    for group in case.groups:
        group.update(change)
    step(case, 0.25, 2.0)
    assert [_constants(launch) for launch in launches] == before
    held = case.visit.state.hyper.tensor.tolist()
    assert held == [0.25, 2.0, *case.visit.hyper]


def _constants(launch):
    """All of a launch that Triton could specialise on: scalars, constants, and which arguments are tensors."""
    name, grid, args, constants = launch
    return name, grid, [(a.data_ptr(), a.dtype) if isinstance(a, torch.Tensor) else a for a in args], constants


def test_scale_and_found_inf_may_be_tensors(launches):
    case = block(3)
    scale, found_inf = torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.0)
    norm, overflow = step(case, scale, None, found_inf=found_inf)
    finish = next(args for name, _, args, _ in launches if name == "finish")
    assert any(a is scale for a in finish) and any(a is found_inf for a in finish)
    assert isinstance(norm, torch.Tensor) and isinstance(overflow, torch.Tensor)
    launches.clear()
    norm, overflow = step(case, None, None, found_inf=found_inf)
    assert norm is None and isinstance(overflow, torch.Tensor)
    assert [launch[0] for launch in launches] == ["finish", "update"]


def test_auto_never_takes_the_interpreter(monkeypatch):
    monkeypatch.setattr(backend, "_interpreted", lambda: True)
    cpu = torch.device("cpu")
    assert backend.BACKEND.unavailable(cpu) is None
    assert resolve("auto", cpu).name != "triton"
    assert resolve("triton", cpu).name == "triton"


def test_an_explicit_wish_that_cannot_be_served_fails_loudly(monkeypatch):
    with pytest.raises(RuntimeError, match="serves CUDA and ROCm GPUs, not cpu.*backend='auto'"):
        resolve("triton", torch.device("cpu"))
    monkeypatch.setattr(backend, "triton", None)
    monkeypatch.setattr(backend, "_IMPORT_ERROR", "No module named 'triton'", raising=False)
    with pytest.raises(RuntimeError, match="pip install triton"):
        resolve("triton", torch.device("cpu"))


def test_auto_says_that_a_device_gets_the_slow_backend():
    with pytest.warns(UserWarning, match="run on the slow 'reference' backend .*triton: it serves CUDA"):
        assert resolve("auto", torch.device("meta")).name == "reference"


def test_bound_is_zero_exactly_where_an_address_is_not_aligned(launches):
    case = Case(ADAMW, [RowCase(100, SPLIT_BF16, torch.bfloat16, offset=offset) for offset in (0, 1, 8, 4)])
    step(case)
    bounds = case.visit.state.table.tensor[:, backend.kernels.BOUND.value].tolist()
    assert bounds == [6, 0, 6 if all(t.data_ptr() % 16 == 0 for t in Case.written(case.visit.rows[2])) else 0, 0]


def test_progress_counts_what_was_not_skipped_and_waits_only_when_asked():
    progress = Progress(3)
    for skipped in (False, True, torch.tensor(0.0), torch.tensor(1.0), torch.tensor(0.0)):
        progress.add(skipped)
    assert progress.at_most == 3 + 1 + 3
    assert progress.settle() == 6 == progress.at_most == progress.settle()
    progress.add(torch.tensor(1.0))
    assert progress.at_most == 7 and progress.settle() == 6


def test_progress_reads_the_device_only_in_settle():
    progress = Progress()
    progress.add(torch.tensor(0.0))
    with Calls() as calls:
        progress.add(torch.tensor(0.0))
        assert progress.at_most == 2
    assert "aten._local_scalar_dense.default" not in calls.names




class Event:
    """Stands in for a CUDA event; knows how often it was waited for and recorded."""

    def __init__(self):
        self.waits = self.records = 0

    def synchronize(self):
        self.waits += 1

    def record(self):
        self.records += 1


def test_values_go_to_the_device_through_slots_that_are_waited_for_with_one_torch_call(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(backend, "_SLOTS", 2)
    mirror = backend._Mirror(torch.zeros(3, dtype=torch.float64), torch.device("cpu"))
    mirror._slots = [torch.zeros(3, dtype=torch.float64) for _ in range(2)]
    mirror._events = [Event(), Event()]
    for i in range(5):
        values = torch.tensor([i, i + 0.5, -1.0], dtype=torch.float64)
        with Calls() as calls:
            mirror.send(values)
        assert torch.equal(mirror.tensor, values) and torch.equal(mirror._slots[i % 2], values)
        assert calls.names == ["aten.copy_.default"]
    assert [(event.waits, event.records) for event in mirror._events] == [(3, 3), (2, 2)]
