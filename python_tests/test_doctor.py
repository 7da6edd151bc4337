"""`python -m badam_kernels doctor`: complete, true, and unbreakable."""

import ctypes
import gc
import subprocess
import sys

import pytest
import standin
import torch

import badam_kernels
from badam_kernels import backends, cli, doctor, hostmem, store
from badam_kernels.backends import cpu


def findings():
    return dict(doctor.findings())


def test_it_tells_versions_extension_driver_pinning_and_every_device(capsys):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [line.partition(":")[0] for line in lines]
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    assert titles == [
        *("badam_kernels", "python", "torch", "triton", "compiled extension", "CUDA driver", "host memory", "pinned memory"),
        *(title for device in devices for title in (f"backend for {device}", f"memory of {device}") if title != "memory of cpu"),
    ]
    assert badam_kernels.__version__ in lines[0] and torch.__version__ in lines[2]
    assert all(line.partition(":")[2].strip() for line in lines)


def test_the_backend_named_for_the_cpu_is_the_one_that_serves_it_and_the_others_say_why_not():
    found = findings()["backend for cpu"]
    assert found.split(";")[0] == backends.resolve("auto", torch.device("cpu")).name
    for name, why_not in backends.candidates(torch.device("cpu")):
        assert why_not is None or f"{name} not: {why_not}" in found


def test_without_extension_it_says_so_and_what_to_do(monkeypatch):
    monkeypatch.setattr(cpu.BACKEND, "_problem", "no extension; install a compiler")
    found = findings()
    assert found["compiled extension"] == "none: no extension; install a compiler"
    assert found["backend for cpu"].startswith("reference; ") and "cpu not: no extension" in found["backend for cpu"]


def test_with_extension_it_names_the_instruction_set_in_use():
    if not cpu.isas():
        pytest.skip("the extension is not built")
    assert findings()["compiled extension"].startswith(f"uses {cpu.isas()[-1]};")


def test_without_triton_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in findings()["triton"]


@pytest.mark.parametrize("status, said", [(0, "for CUDA up to 12.4, but torch"), (100, "cuInit fails with code 100")])
def test_a_driver_is_described_as_it_answers(monkeypatch, status, said):
    class Driver:
        def cuInit(self, flags):
            return status

        def cuDriverGetVersion(self, version):
            version._obj.value = 12040

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert said in findings()["CUDA driver"]


def test_it_tells_how_much_host_memory_is_left_if_the_system_says(monkeypatch):
    monkeypatch.setattr(hostmem, "available_bytes", lambda: 12_300_000_000)
    assert findings()["host memory"].startswith("12.3 GB left")
    monkeypatch.setattr(hostmem, "available_bytes", lambda: None)
    assert findings()["host memory"] == "the system does not say"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if standin.COMPILER is None or store._C is None:
        pytest.skip("needs a C++ compiler and the extension")
    return standin.StandIn(standin.build_library(tmp_path_factory.mktemp("standin")))


@pytest.mark.parametrize(
    "limit, place, said",
    [
        (0, "host_pinned", "works, by the driver's own allocation (memlock limit "),
        (1000, "host_pageable", r"cuMemHostAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"),
    ],
)
def test_it_pins_a_probe_as_the_store_does_and_tells_by_which_way_or_why_not(library, monkeypatch, limit, place, said):
    library.reset(pinned_limit=limit)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(store.Store, "_context", lambda self, device: store._C.Context(0, library.path))
    found = findings()["pinned memory"]
    assert said in found and f"a probe asked for 1.05 MB, reserved 1.05 MB: 1.05 MB {place}" in found
    assert found.startswith("works" if place == "host_pinned" else "fails")
    assert place == "host_pinned" or "--ulimit memlock=-1" in found
    gc.collect()
    assert library.counts()["pinned"] == 0


def test_a_probe_that_fails_is_a_finding(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setattr(backends, "candidates", broken)
    found = findings()
    assert found["pinned memory"] == found["backend for cpu"] == "cannot tell (RuntimeError: out of luck)"


def test_finetune_is_not_needed_for_it():
    code = (
        "import sys; sys.modules['transformers'] = sys.modules['matplotlib'] = sys.modules['triton'] = None\n"
        "from badam_kernels import cli; sys.exit(cli.main(['doctor']))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).returncode == 0
