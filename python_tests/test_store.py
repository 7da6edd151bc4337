"""The store's memory: exact, budgeted, zero until written, alive as long as a tensor, given back."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from badam_kernels import hostmem, store
from badam_kernels.blocks import Span
from badam_kernels.store import Store

BF16_LAYER = {"q": 4096 * 4096, "k": 1024 * 4096, "v": 1024 * 4096, "o": 4096 * 4096, "gate": 14336 * 4096, "up": 14336 * 4096}
BF16_LAYER |= {"down": 4096 * 14336, "norm": 4096, "norm2": 4096}  # one of Llama-3-8B's 32
needs_extension = pytest.mark.skipif(store._C is None, reason="needs the compiled extension")
MiB = 1 << 20


def llama(layers: int, dtype: torch.dtype) -> dict[Span, dict[str, torch.dtype]]:
    return {Span(f"{i}.{name}", 0, numel): {"w": dtype} for i in range(layers) for name, numel in BF16_LAYER.items()}


def small(count: int = 3, numel: int = 100) -> dict[Span, dict[str, torch.dtype]]:
    return {Span(f"p{i}", 5, 5 + numel + i): {"w": torch.int16, "m": torch.float32} for i in range(count)}


@pytest.fixture(params=["extension", "plain"])
def any_store(request, monkeypatch):
    """`Store` with and without the compiled extension."""
    if request.param == "plain":
        monkeypatch.setattr(store, "_C", None)
    elif store._C is None:
        pytest.skip("needs the compiled extension")
    return Store


# --- what the memory holds ----------------------------------------------------------------------------------------------


def test_slots_are_zero_aligned_and_apart(any_store):
    slots = any_store(small())
    tensors = [tensor for span in small() for tensor in slots.read(span).values()]
    for i, tensor in enumerate(tensors):
        assert not tensor.any() and tensor.data_ptr() % 64 == 0
        tensor.fill_(i + 1)
    assert all((tensor == i + 1).all() for i, tensor in enumerate(tensors))


def test_on_the_cpu_a_fetch_is_the_store_itself(any_store):
    slots, (span, *_) = any_store(small()), small()
    fetched = slots.fetch([span], torch.device("cpu"))[span]
    fetched["w"].fill_(7)
    slots.prefetch([span], torch.device("cpu"))
    slots.flush([span])
    assert slots.read(span)["w"].data_ptr() == fetched["w"].data_ptr() and (slots.read(span)["w"] == 7).all()


def test_empty_slots_and_an_empty_store_are_fine(any_store):
    empty = Span("none", 3, 3)
    assert any_store({empty: {"w": torch.int16}}).read(empty)["w"].shape == (0,)
    assert any_store({}).reservation() == {"asked": 0, "reserved": 0, "touched": 0}


def test_write_touched_and_drop(any_store):
    slots, (first, second, _) = any_store(small()), small()
    slots.write(second, {"w": torch.arange(second.numel, dtype=torch.int16), "m": torch.ones(second.numel)})
    assert slots.touched() == [second] and slots.read(second)["m"].all()
    slots.fetch([first], torch.device("cpu"))[first]["m"].fill_(3.0)
    assert slots.touched() == [first, second]
    slots.drop()
    assert slots.touched() == [] and not any(t.any() for span in small() for t in slots.read(span).values())


def test_saving_one_slot_writes_no_other(any_store):
    slots, (span, *_) = any_store(small(numel=100_000)), small(numel=100_000)
    file = io.BytesIO()
    torch.save(slots.read(span), file)
    assert file.tell() < 6 * span.numel + 10_000


# --- how much it is ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, expected", [(torch.int16, 13.96e9), (torch.float32, 27.92e9)])
def test_the_size_of_llama_3_8b_is_exact_within_a_thousandth(dtype, expected):
    layout = llama(32, dtype)
    exact = sum(span.numel for span in layout) * dtype.itemsize
    slabs = store._place(layout)[1]
    assert abs(exact - expected) < 0.001 * expected
    assert exact <= sum(slabs) <= exact + 64 * len(layout)


def test_padding_is_at_most_64_bytes_a_tensor_and_a_page_a_slab(any_store):
    layout = {Span(f"p{i}", 0, n): {"w": torch.int16, "m": torch.float32} for i, n in enumerate((1, 31, 32, 33, 5000))}
    sizes = any_store(layout).reservation()
    assert sizes["asked"] == 6 * (1 + 31 + 32 + 33 + 5000)
    assert sizes["asked"] <= sizes["reserved"] <= sizes["asked"] + 64 * 10 + 4096


def test_slabs_stay_below_their_limit_and_no_slot_straddles(monkeypatch):
    monkeypatch.setattr(store, "_SLAB_BYTES", 1000)
    layout = {Span(f"p{i}", 0, n): {"w": torch.float32} for i, n in enumerate((100, 140, 20, 700, 16))}
    places, slabs = store._place(layout)
    assert slabs == [448, 576 + 128, 2816, 64]  # only a slot that is larger than the limit exceeds it
    assert [place for place in places.values()] == [(0, 0), (1, 0), (1, 576), (2, 0), (3, 0)]
    slots = Store(layout)
    for span in layout:
        slots.read(span)["w"].fill_(span.numel)
    assert all((slots.read(span)["w"] == span.numel).all() for span in layout)


@needs_extension
def test_llama_3_8b_is_reserved_within_a_thousandth_of_its_exact_size_and_costs_nothing_yet():
    layout = llama(32, torch.int16)
    exact = 2 * sum(span.numel for span in layout)
    if (hostmem.available_bytes() or 0) < exact:
        pytest.skip(f"needs {exact:,} bytes of free host memory")
    before = resident()
    slots = Store(layout)
    sizes = slots.reservation()
    assert sizes["asked"] == exact and exact <= sizes["reserved"] < 1.001 * exact
    assert sizes["touched"] < MiB and resident() - before < 64 * MiB
    last = slots.read(list(layout)[-1])["w"]
    last[-1] = 7
    assert last[-1] == 7 and not last[:-1].any()
    slots.close()


@needs_extension
def test_memory_costs_nothing_until_written_and_is_all_there_is():
    layout = llama(2, torch.int16)  # 0.87 GB, of which one eighth is written
    slots = Store(layout)
    asked = slots.reservation()["asked"]
    assert slots.reservation()["touched"] < MiB
    before, written = resident(), 0
    for span in list(layout)[:4]:
        slots.fetch([span], torch.device("cpu"))[span]["w"].fill_(1)
        written += 2 * span.numel
    huge_pages = 2 * 2 * MiB
    assert written <= slots.reservation()["touched"] <= written + huge_pages
    assert abs(resident() - before - written) < 0.05 * asked
    slots.close()
    gc.collect()
    assert resident() - before < 0.02 * asked


def resident() -> int:
    """Bytes of this process in physical memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_memory_reports_every_byte_once(any_store):
    slots, (first, *_) = any_store(small()), small()
    report, sizes = slots.memory(), slots.reservation()
    assert report["w"] == {"host_pageable": 2 * 303} and report["m"] == {"host_pageable": 4 * 303}
    assert sum(sum(places.values()) for places in report.values()) == sizes["reserved"]
    assert report.asked == 6 * 303 and report["padding"] == {"host_pageable": report.reserved - report.asked}
    assert {"asked": report.asked, "reserved": report.reserved, "touched": report.touched} == sizes
    slots.close()
    report = slots.memory()
    assert sum(sum(places.values()) for places in report.values()) == 0
    assert (report.asked, report.reserved, report.touched) == (0, 0, 0)


@needs_extension
def test_touched_counts_the_pages_that_were_written():
    layout = {Span(f"p{i}", 0, 40_000): {"w": torch.int16} for i in range(3)}  # too little for huge pages
    slots, page = Store(layout), os.sysconf("SC_PAGESIZE")
    assert slots.memory().touched == 0
    slots.read(list(layout)[0])["w"][:1] = 1
    assert slots.memory().touched == page
    slots.read(list(layout)[2])["w"][-1:] = 1
    assert slots.memory().touched == 2 * page < slots.memory().reserved
    for span in layout:
        slots.read(span)["w"].fill_(1)
    assert slots.memory().touched == slots.memory().reserved


# --- what does not fit ---------------------------------------------------------------------------------------------------


def test_masters_that_do_not_fit_are_refused_up_front_with_both_numbers_and_the_smaller_format(monkeypatch):
    monkeypatch.setattr(hostmem, "available_bytes", lambda: 24 << 30)
    monkeypatch.setattr(store.Store, "_reserve", lambda *_: pytest.fail("allocated before it was refused"))
    needed = 4 * 32 * 218_112_000
    numbers = rf"need {needed:,} bytes \(27.92 GB\).*{24 << 30:,} \(25.77 GB\) are left"
    with pytest.raises(MemoryError, match=rf"{numbers}.*format='split'"):
        Store(llama(32, torch.float32))


def test_residuals_that_do_not_fit_are_refused_without_advice_that_does_not_help(monkeypatch):
    monkeypatch.setattr(hostmem, "available_bytes", lambda: 8 << 30)
    with pytest.raises(MemoryError) as refused:
        Store(llama(32, torch.int16))
    assert "13.96 GB" in str(refused.value) and "split" not in str(refused.value)


@needs_extension
def test_memory_that_the_system_refuses_is_a_memory_error():
    with pytest.raises(MemoryError, match="refused .* bytes of host memory"):
        store._C.Slab(1 << 60)


def fake_system(root, meminfo, cgroup, files):
    for path, text in {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup, **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return hostmem.available_bytes(root)


V2 = {"memory.max": "3000\n", "memory.current": "2500\n", "memory.stat": "anon 2000\ninactive_file 400\n"}
V1 = {"memory.limit_in_bytes": "3000", "memory.usage_in_bytes": "2500", "memory.stat": "cache 9\ntotal_inactive_file 300\n"}


@pytest.mark.parametrize(
    "cgroup, directory, files, expected",
    [
        ("0::/a/b\n", "sys/fs/cgroup/a/b", {"memory.max": "max\n", "memory.current": "5", "memory.stat": ""}, 8192),
        ("0::/a/b\n", "sys/fs/cgroup/a/b", V2, 900),
        ("0::/a/b\n", "sys/fs/cgroup/a", V2, 900),
        ("0::/not/here\n", "sys/fs/cgroup", V2, 900),
        ("5:cpu,memory:/docker/x\n", "sys/fs/cgroup/memory/docker/x", V1, 800),
        ("5:cpu:/docker/x\n", "sys/fs/cgroup/memory/docker/x", V1, 8192),
    ],
)
def test_what_is_left_is_the_least_of_system_and_control_groups(tmp_path, cgroup, directory, files, expected):
    files = {f"{directory}/{name}": text for name, text in files.items()}
    assert fake_system(tmp_path, "MemTotal: 9 kB\nMemAvailable: 8 kB\n", cgroup, files) == expected


def test_a_system_that_does_not_say_what_is_left_refuses_nothing(tmp_path, monkeypatch):
    assert hostmem.available_bytes(tmp_path) is None
    monkeypatch.setattr(hostmem, "available_bytes", lambda: None)
    Store(small())


# --- how long it lives ---------------------------------------------------------------------------------------------------


def test_a_tensor_outlives_the_store(any_store):
    slots, (span, *_) = any_store(small(numel=MiB)), small(numel=MiB)
    held = slots.read(span)["m"]
    held.fill_(5.0)
    slots.close()
    del slots
    gc.collect()
    torch.zeros(8 * MiB)  # whatever was freed is overwritten
    assert (held == 5.0).all()


@needs_extension
def test_all_memory_is_given_back_when_the_last_tensor_goes():
    layout = llama(1, torch.int16)
    exact = 2 * sum(span.numel for span in layout)

    def mapped():
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")

    before = mapped()
    slots = Store(layout)
    held = slots.read(next(iter(layout)))["w"][5:9]
    assert exact <= mapped() - before
    slots.close()
    gc.collect()
    assert exact <= mapped() - before  # a view of one slot holds its slab
    del held
    gc.collect()
    assert mapped() - before < 0.01 * exact
    Store(layout)  # garbage at once: no close
    gc.collect()
    assert mapped() - before < 0.01 * exact


def _write_in_child(slots, span, pipe):
    slots.read(span)["w"].fill_(9)
    slots.close()
    pipe.send(True)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_its_own_copy(any_store):
    slots, (span, *_) = any_store(small()), small()
    slots.read(span)["w"].fill_(4)
    here, there = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=_write_in_child, args=(slots, span, there))
    child.start()
    child.join(30)
    assert child.exitcode == 0 and here.poll() and (slots.read(span)["w"] == 4).all()


EXIT = """
import torch
from badam_kernels import _C
from badam_kernels.blocks import Span
from badam_kernels.store import Store
span = Span("p", 0, 1 << 20)
slots = Store({span: {"w": torch.int16}})
held = slots.read(span)["w"].fill_(3)
stager = _C.Stager(None, 1 << 16, True)
room = torch.empty(2 << 20, dtype=torch.uint8)
stager.prefetch([(room.data_ptr(), held.data_ptr(), 2 << 20)], 0)
"""


@needs_extension
def test_an_exit_in_mid_flight_is_clean():
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
