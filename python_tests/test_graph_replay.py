"""A step recorded into a CUDA graph: what capture leaves out, what a replay brings along, and what is refused.

Without a GPU: launches are recorded, and a "graph" is the list of them. The kernels themselves replay in test_triton_ptxsim.py
and, as a CUDA graph, in test_triton_gpu.py.
"""

from __future__ import annotations

import pytest
import torch
from models import set_gradients, tiny
from test_static_grads import Calls

from badam_kernels import BlockAdam, optimizer as module

pytest.importorskip("triton")
from badam_kernels.backends import reference
from badam_kernels.backends import triton as backend


class Graph:
    """Stands in for torch.cuda.CUDAGraph: capture is what happens inside `with`."""

    def __init__(self):
        self.replays = 0

    def __enter__(self):
        Graph.capturing = True
        return self

    def __exit__(self, *_):
        Graph.capturing = False

    def replay(self):
        self.replays += 1


class Kernel:
    def __init__(self, name, launches):
        self.name, self.launches = name, launches

    def __getitem__(self, grid):
        return lambda *args, **constants: self.launches.append(self.name)


@pytest.fixture
def launches(monkeypatch):
    launches: list[str] = []
    for name in ("norm", "finish", "update"):
        monkeypatch.setattr(backend.kernels, name, Kernel(name, launches))
    monkeypatch.setattr(backend, "_interpreted", lambda: False)
    monkeypatch.setattr(backend._Triton, "unavailable", lambda self, device: None)
    monkeypatch.setattr(Graph, "capturing", False, raising=False)
    monkeypatch.setattr(module, "_capturing", lambda device: Graph.capturing)
    return launches


def make(**settings) -> BlockAdam:
    settings = dict(switch_every=4, schedule="ascending", static_grads=True, backend="triton") | settings
    optimizer = BlockAdam(tiny().named_parameters(), **settings)
    optimizer.scale(torch.ones(()))
    return optimizer


def captured(optimizer: BlockAdam) -> Graph:
    """One eager step, then one that is captured."""
    optimizer.step()
    with Graph() as graph:
        optimizer.zero_grad()
        optimizer.step()
    return graph


@pytest.mark.parametrize("clip, expected", [(None, ["finish", "update"]), (1.0, ["norm", "finish", "update"])], ids=str)
def test_capture_takes_the_kernels_and_nothing_else(launches, clip, expected):
    optimizer = make(max_grad_norm=clip)
    optimizer.step()
    launches.clear()
    with Graph(), Calls() as calls:
        optimizer.step()
    assert launches == expected and calls.names == []
    assert optimizer.global_step == 1


def test_a_new_lr_before_the_capture_is_no_obstacle(launches):
    optimizer = make()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    with Graph() as graph:
        optimizer.step()
    optimizer.replay(graph)
    assert optimizer._visit.state.hyper.tensor[2] == 0.5


def test_a_replay_brings_new_hyper_parameters_and_counts(launches):
    optimizer = make(max_grad_norm=1.0, loss_scale=8.0)
    graph = captured(optimizer)
    versions = [p._version for p in optimizer._written]
    launches.clear()
    optimizer.param_groups[0].update(lr=0.25, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.125)
    optimizer.max_grad_norm = 2.0
    optimizer.replay(graph)
    assert launches == [] and graph.replays == 1
    assert optimizer._visit.state.hyper.tensor.tolist() == [1 / 8, 2.0, 0.25, 0.5, 0.75, 1e-3, 0.125]
    assert optimizer.global_step == 2
    assert [p._version for p in optimizer._written] == [version + 1 for version in versions]


def test_a_replay_with_nothing_new_uploads_nothing(launches):
    optimizer = make()
    graph = captured(optimizer)
    with Calls() as calls:
        optimizer.replay(graph)
    assert calls.names == []


def test_replays_switch_when_it_is_due_and_skipped_ones_do_not_count(launches):
    optimizer = make(max_grad_norm=1.0)
    graph = captured(optimizer)
    seen = []
    optimizer.register_switch_hook(lambda opt, old, new: seen.append(opt.global_step))
    for skipped in (0.0, 1.0, 0.0):
        optimizer._visit.state.found_inf.fill_(skipped)
        optimizer.replay(graph)
        assert optimizer.active_block_index == 0
    optimizer._visit.state.found_inf.fill_(0.0)
    optimizer.replay(graph)
    assert (optimizer.global_step, optimizer.active_block_index, seen) == (4, 1, [4])


def refused(optimizer: BlockAdam, graph: Graph) -> None:
    before, replays = optimizer._progress.at_most, graph.replays
    with pytest.raises(RuntimeError, match="holds no step of this visit .* capture again"):
        optimizer.replay(graph)
    assert (optimizer._progress.at_most, graph.replays) == (before, replays)


def test_a_graph_serves_the_visit_that_it_was_captured_in(launches):
    optimizer = make(switch_every=2)
    refused(optimizer, Graph())
    optimizer.step()
    refused(optimizer, Graph())
    with Graph() as graph:
        optimizer.step()
    optimizer.replay(graph)
    assert optimizer.active_block_index == 1
    refused(optimizer, graph)
    optimizer.step()
    refused(optimizer, graph)


def test_a_graph_is_refused_when_gradients_have_moved(launches):
    optimizer = make(switch_every=None)
    graph = captured(optimizer)
    set_gradients(optimizer, 0)
    optimizer.step()
    refused(optimizer, graph)


def test_gradients_that_move_cannot_be_captured(launches):
    optimizer = make(static_grads=False)
    set_gradients(optimizer, 0)
    optimizer.step()
    kept = [p.grad for p in optimizer._written]
    set_gradients(optimizer, 1)
    with pytest.raises(RuntimeError, match="lie elsewhere than at the last step.*static_grads=True"), Graph():
        optimizer.step()
    assert len(kept) == len(optimizer._written)


def test_the_first_step_of_a_visit_cannot_be_captured(launches):
    with pytest.raises(RuntimeError, match="before the first step of a visit"), Graph():
        make().step()


def test_a_backend_that_no_graph_can_record_says_so(launches):
    optimizer = make(backend=reference.BACKEND.name)
    optimizer.step()
    with pytest.raises(RuntimeError, match="cannot record a step of backend 'reference': use backend='triton'"), Graph():
        optimizer.step()
