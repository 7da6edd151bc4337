"""The package installs, and says so, where its extension cannot be built."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("pybind11", reason="installing from source needs the build requirements of pyproject.toml")

ROOT = Path(__file__).resolve().parents[1]
STEP = """
import sys
# An editable install would lend its extension to the one under test.
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
import torch, badam_kernels
from badam_kernels import backends
from badam_kernels.backends import cpu
assert "compiled extension is missing" in cpu.BACKEND.unavailable(torch.device("cpu")), badam_kernels.__file__
assert backends.resolve("auto", torch.device("cpu")).name == "reference"
model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(4, 4)])}).to(torch.bfloat16)
optimizer = badam_kernels.BlockAdam(model.named_parameters(), lr=0.1)
before = model.layers[0].weight.detach().clone()
model.layers[0](torch.ones(4, dtype=torch.bfloat16)).sum().backward()
optimizer.step()
assert (model.layers[0].weight != before).all()
"""


@pytest.fixture
def source(tmp_path):
    """A copy of what a checkout holds, without anything built."""
    copy = tmp_path / "source"
    built = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", "build", "dist", ".*", "results", "runs")
    shutil.copytree(ROOT, copy, ignore=built)
    return copy


def test_without_a_working_compiler_it_installs_says_so_and_steps(source, tmp_path):
    target = tmp_path / "target"
    install = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "-v"]
    done = subprocess.run(
        [*install, "--target", str(target), str(source)],
        env={**os.environ, "CC": "/bin/false", "CXX": "/bin/false"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "installed WITHOUT its compiled extension" in done.stdout + done.stderr
    assert (target / "badam_kernels" / "optimizer.py").exists()
    assert not list(target.rglob("_C*"))
    environment = {**os.environ, "PYTHONPATH": str(target)}
    step = subprocess.run([sys.executable, "-c", STEP], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert step.returncode == 0, step.stdout + step.stderr


def test_an_extension_left_by_an_earlier_build_does_not_pass_for_this_one(source, tmp_path):
    build = ["build_ext", "--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    stale = tmp_path / "lib" / "badam_kernels" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"stale")
    environment = {**os.environ, "CC": "/bin/false", "CXX": "/bin/false"}
    subprocess.run([sys.executable, "setup.py", *build], cwd=source, env=environment, capture_output=True, check=True)
    assert not stale.exists()
