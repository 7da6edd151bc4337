"""Tests run again with other versions of a package, which lie in a folder of the environment of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def environment_with(name: str) -> dict[str, str]:
    """The environment in which what `make test` installed from requirements-`name`.txt comes first. Skips without it."""
    folder = Path(sys.prefix) / name
    if not folder.is_dir():
        pytest.skip(f"needs {folder.name}, which `make test` installs beside the rest")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(HERE), str(HERE.parent)])}


def check_version(name: str, package: str, environment: dict[str, str]) -> None:
    """That `package` is there in the version of requirements-`name`.txt."""
    ask = f"import {package}; print({package}.__version__)"
    found = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert f"{package}=={found.stdout.strip()}" in (HERE.parent / f"requirements-{name}.txt").read_text()


def run_tests(environment: dict[str, str], *arguments: str) -> str:
    """What pytest says of `arguments`, which must pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    run = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    return run.stdout
