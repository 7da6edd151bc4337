"""Pinned memory lies on its device's own memory node, where the machine has several and lets us say so."""

import subprocess

import pytest
import standin
import torch

from badam_kernels import store as store_module

pytestmark = standin.needs_compiler
PREFERRED, INTERLEAVE = 1, 3  # as the kernel numbers them


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """Runs csrc/tests/numa_check.cpp; the lines that it prints."""
    program = tmp_path_factory.mktemp("numa") / "numa_check"
    sources = [standin.ROOT / f"csrc/{name}.cpp" for name in ("numa", "tests/numa_check")]
    standin.compile_("-fsanitize=address,undefined", *sources, "-o", program)

    def run(*arguments):
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


@pytest.mark.parametrize("text, node", [("1\n", 1), ("0\n", 0), ("-1\n", -1), ("", -1), ("what?\n", -1), ("99999\n", -1)])
def test_the_node_of_a_device_is_what_the_system_says_if_it_does(check, tmp_path, text, node):
    directory = tmp_path / "bus/pci/devices/0000:3b:00.0"
    directory.mkdir(parents=True)
    (directory / "numa_node").write_text(text)
    assert check("node", tmp_path, "0000:3B:00.0") == [str(node)]
    assert check("node", tmp_path, "0000:5E:00.0") == check("node", tmp_path, "") == ["-1"]


def test_pages_and_threads_prefer_the_node_and_nothing_beside_them_changes(check):
    told = check("policy")
    if told == ["refused"]:
        pytest.skip("this system lets nobody say where memory comes from")
    preferred, interleave = f"{PREFERRED} 1", f"{INTERLEAVE} 1"
    pages = ["untold 0 0", "before 0 0", f"first {preferred}", f"last {preferred}", "after 0 0"]
    assert told == [*pages, f"untold {interleave}", f"inside {preferred}", f"outside {interleave}"]


@pytest.mark.skipif(store_module._C is None, reason="needs the compiled extension")
@pytest.mark.parametrize("registered", [False, True])
def test_the_driver_is_asked_where_its_device_is_and_may_not_know(tmp_path, registered):
    driver = standin.StandIn(standin.build_library(tmp_path))
    driver.reset()
    context = store_module._C.Context(0, driver.path)
    for code in (2, 999):
        driver.fail("cuDeviceGetPCIBusId", code=code)
        slab = store_module._C.Slab(10_000, context, registered=registered)
        assert driver.skipped() == -1, "the driver was not asked"
        assert driver.counts()["pinned"] == 1 and not torch.frombuffer(slab, dtype=torch.uint8).any()
        del slab
    assert driver.counts()["pinned"] == 0
