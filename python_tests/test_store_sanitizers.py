"""The store's C++ under sanitizers, and without each of its synchronisation edges in turn."""

import os
import subprocess

import pytest
import standin

pytestmark = standin.needs_compiler
MODES = ["pinned", "registered", "ring", "unpinned"]


@pytest.fixture(scope="module")
def address_build(tmp_path_factory):
    """(directory, flags, library, program) under AddressSanitizer and UndefinedBehaviorSanitizer."""
    return _build(tmp_path_factory.mktemp("address"), "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def thread_build(tmp_path_factory):
    return _build(tmp_path_factory.mktemp("thread"), "-fsanitize=thread")


def _build(directory, *flags):
    return directory, flags, standin.build_library(directory, *flags), standin.build_stress(directory, *flags)


def _run(program, *arguments, missing=None):
    environment = os.environ | ({} if missing is None else {"MISSING_EDGE": str(missing)})
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize("mode", MODES)
def test_streams_keep_every_byte_under_address_and_undefined_sanitizers(address_build, mode):
    _, _, library, program = address_build
    done = _run(program, library, mode, 0, 12, 200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", MODES)
def test_streams_keep_every_byte_under_thread_sanitizer(thread_build, mode):
    _, _, library, program = thread_build
    done = _run(program, library, mode, 100, 6, 50)
    assert done.returncode == 0, done.stderr


def test_worker_threads_keep_every_byte_under_both_sanitizers(address_build, thread_build):
    for *_, program in (address_build, thread_build):
        done = _run(program, "threads", "unpinned", 0, 10, 0)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def mutant_build(address_build, tmp_path_factory):
    directory, flags, library, _ = address_build
    source, compiled = directory / "mutant.cpp", directory / "mutant.o"
    standin.write_mutant(source)
    standin.compile_(*flags, "-c", source, "-o", compiled)
    return library, standin.link_stress(directory, "mutant", *flags, stager=compiled)


def test_the_mutant_without_a_missing_edge_is_right(mutant_build):
    library, program = mutant_build
    assert _run(program, library, "ring", 0, 2, 200, missing=-1).returncode == 0


@pytest.mark.parametrize("edge", range(len(standin.edges())), ids=lambda i: standin.edges()[i])
def test_a_missing_edge_shows(mutant_build, edge):
    library, program = mutant_build
    for seed in range(0, 400, 20):
        for mode in ("pinned", "ring"):
            done = _run(program, library, mode, seed, 20, 400, missing=edge)
            if done.returncode:
                assert "expected" in done.stderr
                return
    pytest.fail("400 runs without this edge went well")
