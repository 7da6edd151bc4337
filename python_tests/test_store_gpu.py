"""The store on a CUDA device: pinned, in place, beside the compute, and bit for bit what it is on the CPU."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys

import pytest
import torch
from models import flat_state, set_gradients, tiny

from badam_kernels import BlockAdam, store as store_module
from badam_kernels.blocks import Span
from badam_kernels.store import Store

pytestmark = pytest.mark.gpu
MB = 1_000_000


def two_blocks(numel):
    return {Span(f"p{i}", 0, numel): {"w": torch.int16, "m": torch.float32} for i in range(2)}


@pytest.fixture
def cuda():
    return torch.device("cuda", torch.cuda.current_device())


def test_views_are_pinned_and_exact(cuda):
    store = Store(two_blocks(MB + 1), [cuda])
    for span in two_blocks(MB + 1):
        for slot, value in store.read(span).items():
            assert value.is_pinned() and not value.any(), slot
    assert set(store.memory()["w"]) == {"host_pinned"}
    assert store.reservation()["reserved"] <= 2 * 6 * (MB + 1) + 4 * 64 + 4096
    store.close()


@pytest.mark.parametrize("pinned", [True, False])
def test_switches_change_no_bit_and_use_one_room(cuda, pinned):
    layout = two_blocks(9 * MB + 7)
    store = Store(layout, [cuda] if pinned else [])
    expected = {span: {slot: value.clone() for slot, value in store.read(span).items()} for span in layout}
    addresses = set()
    for step in range(12):
        span = list(layout)[step % 2]
        store.prefetch([span], cuda)
        for slot, live in store.fetch([span], cuda)[span].items():
            assert torch.equal(live.cpu(), expected[span][slot])
            live.add_(step + 1)
            expected[span][slot] += step + 1
            addresses.add((slot, live.data_ptr()))
        store.flush([span])
    assert len(addresses) == 2
    for span in layout:
        for slot, value in store.read(span).items():
            assert torch.equal(value, expected[span][slot])
    store.close()


def test_a_switch_does_not_make_the_host_wait(cuda):
    """With the computing stream held for a second, a whole switch is given to the device at once."""
    first, second = layout = two_blocks(20 * MB)
    store = Store(layout, [cuda])
    store.fetch([first], cuda)[first]["m"].add_(1)  # loads the kernel, for which the driver may wait for the device
    torch.cuda.synchronize()
    held = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    held.record()
    store.flush([first])
    store.prefetch([second], cuda)
    store.fetch([second], cuda)[second]["m"].add_(1)
    assert not held.query(), "the host waited for the device"
    torch.cuda.synchronize()
    store.close()


def test_training_is_the_same_with_slots_pinned_or_not_and_brought_ahead_or_not(cuda, monkeypatch):
    states = []
    for pinned, depth in ((True, 0), (True, 1), (True, 9), (False, 0), (False, 2)):
        model = tiny(torch.bfloat16, layers=4).to(cuda)
        if not pinned:
            monkeypatch.setattr(Store, "_reserve", lambda self, sizes, _, reserve=Store._reserve: reserve(self, sizes, None))
        given = {"moments": "run", "backend": "reference", "prefetch_depth": depth}
        optimizer = BlockAdam(model.named_parameters(), lr=1e-2, switch_every=2, seed=1, **given)
        for step in range(20):
            set_gradients(optimizer, step)
            optimizer.step()
        states.append(flat_state(optimizer.state_dict()))
        optimizer.close()
    assert all(state == states[0] for state in states)


def test_close_returns_device_and_host_memory(cuda):
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        store = Store(two_blocks(5 * MB), [cuda])
        store.fetch(list(two_blocks(5 * MB))[:1], cuda)
        assert torch.cuda.memory_allocated() > before
        store.close()
        del store
        gc.collect()
        assert torch.cuda.memory_allocated() == before


def test_a_pin_that_is_refused_leaves_no_error_behind(cuda, monkeypatch):
    real = store_module._C

    class Refused:
        """The extension, but pinned memory is asked for that no machine has."""

        def __getattr__(self, name):
            return getattr(real, name)

        def Slab(self, size, context=None):
            return real.Slab(1 << 60 if context else size, context)

    monkeypatch.setattr(store_module, "_C", Refused())
    with pytest.warns(RuntimeWarning, match="could not pin"):
        store = Store(two_blocks(MB), [cuda])
    torch.ones(10, device=cuda).sum().item()
    torch.cuda.synchronize()
    store.close()


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
def test_compute_sanitizer_finds_nothing():
    code = (
        "import torch; from badam_kernels.blocks import Span; from badam_kernels.store import Store\n"
        "d = torch.device('cuda', 0); a, b = (Span(n, 0, 300_001) for n in 'ab')\n"
        "s = Store({a: {'w': torch.int16}, b: {'w': torch.int16}}, [d])\n"
        "for x in (a, b, a, b):\n    s.fetch([x], d)[x]['w'].add_(1)\n    s.flush([x])\n"
        "assert (s.read(a)['w'] == 2).all(); s.close()\n"
    )
    # Calls that fail are our own checks' business; torch's libraries ask the driver for functions that it may not have.
    checker = ["compute-sanitizer", "--error-exitcode", "9", "--report-api-errors", "no"]
    done = subprocess.run([*checker, sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
