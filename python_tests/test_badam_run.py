"""`python -m badam_kernels run -- PROGRAM` and `patch_badam`: who imports badam gets the drop-in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from badam_kernels.integrations import run

SEEN = """
import badam, badam.utils, badam.block_optim
from badam import BlockOptimizer, BlockOptimizerRatio, BAdamCallback, clip_grad_norm_old_version
from badam.utils import clip_grad_norm_old_version as same
from badam.block_optim import BlockOptimizer as also
from importlib.metadata import version
from packaging.version import Version
assert same is clip_grad_norm_old_version and also is BlockOptimizer
assert Version(version("badam")) >= Version("1.2.1")
print(BlockOptimizer.__module__, version("badam"))
"""
OURS = "badam_kernels.integrations.badam 1.4+badam.kernels"


def started(*command, env=None):
    return subprocess.run(
        [sys.executable, "-m", "badam_kernels", "run", "--", *command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(run.__file__).parents[2]), **(env or {})},
    )


def test_a_console_script_and_its_children_import_the_drop_in_although_badam_is_installed(tmp_path):
    pytest.importorskip("badam", reason="needs badam beside the drop-in")
    script = tmp_path / "trainer"
    child = f"subprocess.run([sys.executable, '-c', {SEEN!r}])"
    script.write_text(f"#!{sys.executable}\nimport subprocess, sys\nsys.exit({child}.returncode)")
    script.chmod(0o755)
    done = started("trainer", env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    assert (done.returncode, done.stdout.strip()) == (0, OURS), done.stderr


def test_torchrun_workers_import_the_drop_in(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(SEEN)
    done = started("torchrun", "--nproc-per-node=2", "--master-port=0", str(script))
    assert (done.returncode, done.stdout.split("\n")[:2]) == (0, [OURS, OURS]), done.stderr


def test_the_exit_status_is_the_programs():
    assert started("python", "-c", "raise SystemExit(3)").returncode == 3


def test_a_missing_program_is_named():
    done = started("no-such-program")
    assert done.returncode == 1 and "no program 'no-such-program'" in done.stderr


def child(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_patch_badam_serves_this_process():
    done = child("import badam_kernels\nbadam_kernels.patch_badam()\nbadam_kernels.patch_badam()\n" + SEEN)
    assert (done.returncode, done.stdout.strip()) == (0, OURS), done.stderr


def test_patch_badam_after_badam_is_refused():
    loaded = "import sys, types\nsys.modules['badam'] = types.ModuleType('badam')\n"
    done = child(loaded + "import badam_kernels\nbadam_kernels.patch_badam()")
    assert done.returncode == 1 and "badam is imported already" in done.stderr
