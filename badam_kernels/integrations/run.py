"""Programs that import badam, run on this package: `import badam` and badam's version check find the drop-in instead."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["SHIM", "environment", "patch_badam", "run"]

SHIM = str(Path(__file__).with_name("shim"))
"""A folder with a package `badam` and the metadata of a distribution of that name. First on the path, it comes before
an installed badam."""


def environment() -> dict[str, str]:
    """The environment in which every Python that is started, by whomever, imports the drop-in as `badam`."""
    paths = [SHIM, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def run(command: Sequence[str]) -> None:
    """Become the program `command`. Does not return; raises FileNotFoundError if there is no such program.

    A name is looked up beside this Python first, so that ``python -m badam_kernels run -- torchrun`` needs no activated
    environment.
    """
    beside = os.path.dirname(sys.executable)
    program = shutil.which(command[0], path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]))
    if program is None:
        raise FileNotFoundError(f"there is no program {command[0]!r} on the PATH")
    sys.stdout.flush()
    os.execve(program, list(command), environment())


def patch_badam() -> None:
    """From now on `import badam` in this process gives the drop-in; call it before anything imports badam.

    Raises RuntimeError if badam itself was imported already: names taken from it would go on meaning badam's classes.
    """
    loaded = sys.modules.get("badam")
    if loaded is not None and not str(getattr(loaded, "__file__", "")).startswith(SHIM):
        raise RuntimeError("badam is imported already: call badam_kernels.patch_badam() before whatever imports it")
    if SHIM not in sys.path:
        sys.path.insert(0, SHIM)
        importlib.invalidate_caches()
