"""The README tells the truth: its tables are generated, its code runs, its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from readme_tables import ROOT, filled

TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)


def test_the_tables_are_those_of_the_code_and_of_the_measured_results():
    assert filled(TEXT) == TEXT, "run python python_tests/readme_tables.py"


@pytest.mark.parametrize("code", [code for kind, code in BLOCKS if kind == "python"])
def test_python_blocks_run(code, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:badam_kernels", "-c", code],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", [line for kind, code in BLOCKS if kind == "bash" for line in code.splitlines()])
def test_commands_exist(line):
    """`make` targets in a dry run, options of our command line in its help; installing is the build test's job."""
    words = line.split()
    if words[0] == "make":
        subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    elif words[:3] == ["python", "-m", "badam_kernels"]:
        known = subprocess.run(
            [sys.executable, "-m", "badam_kernels", words[3], "--help"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
        assert all(word.split("=")[0] in known for word in words[4:] if word.startswith("--")), known
    else:
        assert words[:2] == ["pip", "install"], f"no test knows how to try {line!r}"
