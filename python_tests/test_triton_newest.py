"""The kernels compile, with the same machine code checks, under the newest Triton too."""

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
NEWEST = pathlib.Path(sys.prefix) / "newest-triton"


@pytest.mark.skipif(not NEWEST.is_dir(), reason="needs a second Triton, which `make test` installs beside the first")
def test_the_newest_triton_compiles_every_variant_as_well():
    path = [str(NEWEST), str(HERE), str(HERE.parent)]
    version = "import triton; print(triton.__version__)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    loaded = subprocess.run([sys.executable, "-c", version], env=environment, capture_output=True, text=True, check=True)
    assert f"triton=={loaded.stdout.strip()}" in (HERE.parent / "requirements-newest-triton.txt").read_text()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "test_triton_compile.py"]
    run = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
