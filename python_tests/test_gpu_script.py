"""`make gpu`, on the machines that have no GPU: it says so, and it knows which tests need one."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_without_a_device_it_ends_at_once_and_says_why(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "RESULTS": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([ROOT / ".ci/gpu"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search("make gpu: .* cannot use a GPU: .*finds no CUDA device", done.stderr)
    assert not list(tmp_path.iterdir())


def test_it_names_every_file_with_tests_of_a_gpu():
    """Its own search of the sources finds what pytest does."""
    script = (ROOT / ".ci/gpu").read_text()
    named = set(re.findall(r"python_tests/test_\w+_gpu\.py", script))
    search = re.search(r"\$\((grep -l.*?)\)", script)[1]
    named |= set(subprocess.run(["bash", "-c", search], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())
    marked = re.compile(r"^pytestmark = pytest\.mark\.gpu|^@pytest\.mark\.gpu|^def test_.*\bdevice\b", re.M)
    tests = (ROOT / "python_tests").glob("test_*.py")
    assert named == {f"python_tests/{path.name}" for path in tests if marked.search(path.read_text())}
