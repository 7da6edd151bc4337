"""The stand-in CUDA driver, and the stress program of csrc/tests, built with whatever C++ compiler there is."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_SOURCES = ["arena", "driver", "driver_copier", "numa", "thread_copier", "stager", "threads", "tests/store_stress"]
_STAND_IN = Path(__file__).parent / "standin_driver/standin.cpp"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-pthread", "-Wall", "-Wextra"]
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def compile_(*arguments) -> None:
    done = subprocess.run([COMPILER, *FLAGS, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def build_library(directory: Path, *flags: str) -> Path:
    """The stand-in driver as a shared library."""
    compile_(*flags, "-shared", _STAND_IN, "-o", directory / "libstandin.so")
    return directory / "libstandin.so"


def build_stress(directory: Path, *flags: str) -> Path:
    """The stress program; its objects stay in `directory`."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: compile_(*flags, "-c", ROOT / f"csrc/{name}.cpp", "-o", _object(directory, name)), _SOURCES))
    return link_stress(directory, "stress", *flags)


def link_stress(directory: Path, program: str, *flags: str, **instead: Path) -> Path:
    """The stress program from the objects in `directory`, with some of them replaced."""
    objects = [instead.get(name, _object(directory, name)) for name in _SOURCES]
    compile_(*flags, *objects, "-ldl", "-o", directory / program)
    return directory / program


def _object(directory: Path, name: str) -> Path:
    return directory / f"{Path(name).name}.o"


def edges() -> list[str]:
    """What csrc/stager.cpp calls its synchronisation edges."""
    return re.findall(r"// edge: (.*)", (ROOT / "csrc/stager.cpp").read_text())


def write_mutant(path: Path) -> None:
    """csrc/stager.cpp, where the environment of a test says which edge is missing."""
    names = iter(range(len(edges())))
    include = f'#include "{ROOT}/csrc/stager.h"\n#include <cstdlib>'
    source = (ROOT / "csrc/stager.cpp").read_text().replace('#include "stager.h"', include)

    def guarded(line: re.Match) -> str:
        return f"{line[1]}if (missing != {next(names)}) {{ {line[2]} }}"

    source = re.sub(r"^( *)(.*;)  // edge: .*$", guarded, source, flags=re.M)
    head = 'namespace { const int missing = std::atoi(std::getenv("MISSING_EDGE")); }\nnamespace badam {'
    path.write_text(source.replace("namespace badam {", head, 1))
    assert next(names, None) is None, "an edge is not on a line of its own"


class StandIn:
    """The library, loaded into this process."""

    COUNTS = ("calls", "pageable_copies", "without_context", "broken_captures", "contexts", "streams", "events", "pinned")

    def __init__(self, path: Path):
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.standin_stream.restype = ctypes.c_void_p
        self._library.standin_until_failure.restype = ctypes.c_long

    def reset(self, seed: int = 0, longest_delay_us: int = 200, pinned_limit: int = 0) -> None:
        """Forget failures; be late by up to `longest_delay_us`; pin no more than `pinned_limit` bytes (0: any)."""
        self._library.standin_reset(ctypes.c_uint64(seed), longest_delay_us, ctypes.c_size_t(pinned_limit))

    def fail(self, call: str, skipped: int = 0, code: int = 2) -> None:
        """Let the call to `call` (empty: any) after `skipped` others fail."""
        self._library.standin_fail(call.encode(), ctypes.c_long(skipped), code)

    def skipped(self) -> int:
        """How many more calls are skipped until the one that fails."""
        return self._library.standin_until_failure()

    def lose(self, skipped: int = 0) -> None:
        """Lose the device in the middle of the copy after `skipped` others."""
        self._library.standin_lose(ctypes.c_long(skipped))

    def capture(self, capturing: bool) -> None:
        """Let a CUDA graph be captured from now on, or no longer."""
        self._library.standin_capturing(int(capturing))

    def counts(self) -> dict[str, int]:
        counts = (ctypes.c_long * len(self.COUNTS))()
        self._library.standin_counts(counts)
        return dict(zip(self.COUNTS, counts))

    def stream(self) -> int:
        return self._library.standin_stream()

    def drop_stream(self, stream: int) -> None:
        self._library.standin_drop_stream(ctypes.c_void_p(stream))

    def finish(self, stream: int) -> None:
        """Wait for all work in `stream`."""
        self._library.standin_finish(ctypes.c_void_p(stream))

    def add(self, stream: int, tensor, amount: int) -> None:
        """Give `stream` a kernel that adds `amount` to every byte of `tensor`."""
        self._library.standin_add(
            ctypes.c_void_p(stream), ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), amount
        )

    def observe(self, stream: int, to, tensor) -> None:
        """Give `stream` a kernel that copies `tensor` to `to`."""
        addresses = (ctypes.c_void_p(address) for address in (stream, to.data_ptr(), tensor.data_ptr()))
        self._library.standin_observe(*addresses, ctypes.c_size_t(to.nbytes))

    def call(self, stream: int, function) -> None:
        """Give `stream` a kernel that calls `function`, a ctypes function."""
        self._library.standin_call(ctypes.c_void_p(stream), function)
