"""Pytest plugin of the process in which test_triton_interpreter.py runs the tests of every backend through Triton's interpreter.

Triton reads TRITON_INTERPRET when a kernel is defined, so the interpreted kernels need a process of their own.
"""

import pytest
import triton.runtime.interpreter as interpreter


def pytest_configure(config):
    # The interpreter meets scalars as arrays of one element, and overflow in lanes that a mask drops.
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:triton")
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton")
    _patch_the_language_once()


def _patch_the_language_once():
    """The interpreter patches triton.language at every call of every function, which is half of its time."""
    patch, patched = interpreter._patch_lang, set()

    class Nothing:
        def restore(self):
            pass

    def once(function):
        modules = frozenset(id(m) for m in function.__globals__.values() if m in (interpreter.tl, interpreter.tl.core))
        if modules not in patched:
            patched.add(modules)
            patch(function)
        return Nothing()

    interpreter._patch_lang = once


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Keep what runs on triton on the CPU: of rule x codec x gradient dtype every pair, not every triple; see `_drawn`."""
    ours = {"backend": "triton", "device": "cpu"}
    kept = [item for item in items if ours.items() <= _params(item).items() and _drawn(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _params(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def _drawn(item):
    """Codec and rule are separate functions in the kernel, and the gradient a cast: a Latin square has every pair of them."""
    params, indices = _params(item), getattr(item.callspec, "indices", {})
    if not {"rule", "codec", "grad_dtype"} <= params.keys() or "as_exact_as_torch" not in item.name or "large" in item.name:
        return True
    return sum(indices[name] for name in ("rule", "codec", "grad_dtype")) % 3 == 0
