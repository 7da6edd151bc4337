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
    """Keep what runs on triton on the CPU."""
    ours = {"backend": "triton", "device": "cpu"}
    kept = [item for item in items if ours.items() <= _params(item).items()]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _params(item):
    return item.callspec.params if hasattr(item, "callspec") else {}
