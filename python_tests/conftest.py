"""What every test shares: where it runs, which backend, and memory that is poisoned before it is written."""

import gc
import importlib.util
import warnings

import pytest
import torch

from badam_kernels import backends

if importlib.util.find_spec("hypothesis"):  # the tests of a GPU do without
    import hypothesis

    hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, database=None)
    hypothesis.settings.load_profile("suite")
torch.set_num_threads(1)  # the models are tiny; spinning threads only get into each other's way


FOREIGN = [pytest.mark.filterwarnings(f"default::{kind}") for kind in ("UserWarning", "FutureWarning", "DeprecationWarning")]
"""What torch, Triton and the driver say of themselves on a GPU (of a prototype feature, of a graph without nodes) is shown and
fails nothing. The store's own RuntimeWarning, that it could not pin memory, stays an error."""


def pytest_collection_modifyitems(items):
    missing = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            for mark in FOREIGN if torch.cuda.is_available() else [missing]:
                item.add_marker(mark)


@pytest.fixture(autouse=True)
def poisoned_memory(request):
    """torch.empty and its kin return NaN (integers: the largest), so that a read of unwritten memory shows.

    Deterministic mode does this; on a GPU it also forbids cuBLAS calls that the tests there make.
    """
    torch.use_deterministic_algorithms(not request.node.get_closest_marker("gpu"))
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


@pytest.fixture(params=backends.BACKENDS)
def backend(request, device):
    """Each backend that can serve `device`."""
    backend = backends.load(request.param)
    why_not = backend.unavailable(device)
    if why_not is not None:
        pytest.skip(f"{request.param} on {device}: {why_not}")
    with warnings.catch_warnings():
        # Triton's interpreter warns about its own use of NumPy, and where numbers become infinite, as some here must.
        warnings.filterwarnings("ignore", module=r"triton\.runtime\.interpreter")
        yield backend


@pytest.fixture(scope="module")
def little_garbage():
    """For tests that run badam, which collects garbage at every switch: that takes long in a process this full."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
