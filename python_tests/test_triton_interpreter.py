"""The Triton kernels, interpreted on the CPU, pass the conformance matrix of every backend."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

HERE = pathlib.Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs a torch with Tensor.grad_dtype")
def test_the_interpreted_kernels_pass_the_conformance_matrix():
    options = ["-p", "interpreter_plugin", "-p", "no:cacheprovider", "-q", "-x"]
    command = [sys.executable, "-m", "pytest", *options, "test_conformance.py", "test_grad_scaler.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    run = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    passed = int(re.search(r"(\d+) passed", run.stdout)[1])
    assert passed > 40 and "skipped" not in run.stdout, run.stdout[-2000:]
