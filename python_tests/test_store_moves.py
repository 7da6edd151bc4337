"""Slots that move: every bit is what it was, whatever the order, the delays and the failures; nothing leaks."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import functools
import gc
import os
import threading
from pathlib import Path

import pytest
import standin as stand_ins
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from models import assert_same_bits, flat_state, set_gradients, tiny, weights

from badam_kernels import BlockAdam, optimizer as optimizer_module, store as store_module
from badam_kernels.blocks import Span
from badam_kernels.room import BlockingRoom, aligned
from badam_kernels.store import Store

pytestmark = pytest.mark.skipif(store_module._C is None, reason="needs the compiled extension")
if store_module._C is not None:
    from moving import MovingStore

CPU = torch.device("cpu")
DTYPES = (torch.int16, torch.float32, torch.uint8)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if stand_ins.COMPILER is None:
        pytest.skip("needs a C++ compiler")
    return stand_ins.StandIn(stand_ins.build_library(tmp_path_factory.mktemp("standin")))


@pytest.fixture
def driver(library):
    """The stand-in driver; that nothing of it is left at the end, and that a CUDA graph could be captured beside it all."""
    gc.collect()
    library.reset()
    library.capture(True)
    before = library.counts()
    yield library
    gc.collect()
    after, never_more = library.counts(), set(library.COUNTS) - {"calls", "pageable_copies"}
    assert all(after[name] <= before[name] for name in never_more), after
    library.capture(False)


@pytest.fixture(params=["threads", "pinned", "ring", "unpinned"])
def make_store(request):
    """What makes stores that move slots by threads; or on streams, from pinned memory, through a ring, or without either."""
    if request.param == "threads":
        return MovingStore
    driver = request.getfixturevalue("driver")
    if request.param == "unpinned":
        driver.reset(pinned_limit=1)
    return functools.partial(MovingStore, standin=driver, pinned=request.param == "pinned")


@pytest.fixture(params=["pinned", "ring"])
def make_driver_store(request, driver):
    return functools.partial(MovingStore, standin=driver, pinned=request.param == "pinned")


def bits(tensor):
    return tensor.view(torch.uint8).clone()


# --- switches --------------------------------------------------------------------------------------------------------------


@st.composite
def stores(draw):
    """A layout, blocks of its spans that may overlap, switches: (block, foretold?, written?), and a prefetch depth."""
    sizes = draw(st.lists(st.integers(0, 700), min_size=1, max_size=7))
    layout = {
        Span(f"p{i}", i, i + size): dict(zip("wmv", draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))))
        for i, size in enumerate(sizes)
    }
    some_spans = st.lists(st.sampled_from(list(layout)), min_size=1, max_size=5, unique=True)
    blocks = draw(st.lists(some_spans, min_size=1, max_size=4))
    switch = st.tuples(st.integers(0, len(blocks) - 1), st.booleans(), st.booleans())
    return layout, blocks, draw(st.lists(switch, min_size=10, max_size=30)), draw(st.integers(0, 2))


def switch_at_random(make, plan, seed):
    layout, blocks, switches, depth = plan
    random = torch.Generator().manual_seed(seed)
    slots = make(layout, prefetch_depth=depth)
    zeros = {span: {slot: bits(value) for slot, value in slots.read(span).items()} for span in layout}
    expected = zeros
    for count, (index, foretold, written) in enumerate(switches):
        spans = blocks[index]
        for announced, *_ in switches[count : count + 1 + depth] if foretold else ():
            slots.prefetch(blocks[count % len(blocks) if count % 3 == 0 else announced], CPU)
        if count % 11 == 5:
            slots.drop()
            expected = zeros
        if count % 7 == 6:
            span = list(layout)[count % len(layout)]
            values = {slot: torch.randint(256, value.shape, generator=random).byte() for slot, value in expected[span].items()}
            slots.write(span, {slot: value.view(layout[span][slot]) for slot, value in values.items()})
            expected = expected | {span: values}
        for span, fetched in slots.fetch(spans, CPU).items():
            for slot, value in fetched.items():
                assert torch.equal(bits(value), expected[span][slot]), (count, span, slot)
                if written:
                    value.view(torch.uint8).random_(0, 256, generator=random)
                    expected = expected | {span: expected[span] | {slot: bits(value)}}
        if count % 5 == 4:
            slots.prefetch(blocks[count % len(blocks)], CPU)
        if count % 11 == 10:
            slots.drop()
            expected = zeros
        else:
            slots.flush(spans)
    for span in layout:
        for slot, value in slots.read(span).items():
            assert torch.equal(bits(value), expected[span][slot])
    slots.close()


def many(examples):
    return settings(max_examples=examples, suppress_health_check=[HealthCheck.function_scoped_fixture])


@many(60)
@given(plan=stores(), seed=st.integers(0, 2**32))
def test_switches_change_no_bit_on_threads(plan, seed):
    switch_at_random(MovingStore, plan, seed)


@many(50)
@given(plan=stores(), seed=st.integers(0, 2**32), pinned=st.booleans())
def test_switches_change_no_bit_on_streams(driver, plan, seed, pinned):
    driver.reset(seed, longest_delay_us=60)
    switch_at_random(functools.partial(MovingStore, standin=driver, pinned=pinned), plan, seed)


@many(25)
@given(plan=stores(), seed=st.integers(0, 2**32))
def test_switches_change_no_bit_without_extension_or_driver(plan, seed):
    class Blocking(Store):
        def _rooms_on(self, device):
            return self._rooms.setdefault(device, BlockingRoom(device))

    switch_at_random(Blocking, plan, seed)


# --- as the optimizer drives it ------------------------------------------------------------------------------------------


def make_optimizer(monkeypatch, make, **given):
    monkeypatch.setattr(optimizer_module, "Store", make)
    model = tiny(torch.bfloat16, layers=4)
    kwargs = {"lr": 1e-2, "blocks": "layers", "switch_every": 2, "seed": 3, **given}
    return model, BlockAdam(model.named_parameters(), **kwargs)


def steps(model, optimizer, first, last):
    for step in range(first, last):
        set_gradients(optimizer, step)
        optimizer.step()


def assert_same_state(one, other):
    assert flat_state(one.state_dict()) == flat_state(other.state_dict())


VARIANTS = [
    {},
    {"moments": "run"},
    {"format": "master", "switch_every": 1},
    {"moments": "run", "switch_every": 1, "prefetch_depth": 1},
    {"prefetch_depth": 2, "schedule": lambda step: (0, 1, 1, 3, 2, 1)[step % 6]},
    {"moments": "run", "switch_every": 1, "schedule": "ascending", "prefetch_depth": 9},
]


@pytest.mark.parametrize("given", VARIANTS, ids=lambda given: ",".join(given) or "plain")
def test_training_with_moving_slots_is_bitwise_training_without(make_store, monkeypatch, given):
    resting = make_optimizer(monkeypatch, Store, **given)
    moving = make_optimizer(monkeypatch, make_store, **given)
    for first in range(0, 24, 6):
        for pair in (resting, moving):
            steps(*pair, first, first + 6)
        assert_same_bits(weights(resting[0]), weights(moving[0]))
        assert_same_state(resting[1], moving[1])
    moving[1].load_state_dict(copy.deepcopy(moving[1].state_dict()))
    for pair in (resting, moving):
        steps(*pair, 24, 30)
    assert_same_state(resting[1], moving[1])
    moving[1].close()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("moments", ["visit", "run"])
def test_announcements_that_do_not_come_true_cost_no_bit(make_store, monkeypatch, moments, depth):
    """After a skipped step, a visit ended by hand, and a state from another time."""
    given = {"moments": moments, "switch_every": 1, "max_grad_norm": 1.0, "prefetch_depth": depth}
    pairs = [make_optimizer(monkeypatch, kind, **given) for kind in (Store, make_store)]
    for model, optimizer in pairs:
        steps(model, optimizer, 0, 5)
        before = copy.deepcopy(optimizer.state_dict())
        set_gradients(optimizer, 5)
        next(p for p in model.parameters() if p.grad is not None).grad.fill_(float("nan"))
        optimizer.step()
        assert optimizer.global_step == 5
        steps(model, optimizer, 6, 8)
        ended = dataclasses.replace(optimizer._schedule, first_step=optimizer.global_step, first_visit=12)
        optimizer._schedule = ended
        optimizer._switch(ended(optimizer.global_step))
        steps(model, optimizer, 8, 12)
        optimizer.load_state_dict(before)
        steps(model, optimizer, 12, 20)
    assert_same_bits(weights(pairs[0][0]), weights(pairs[1][0]))
    assert_same_state(pairs[0][1], pairs[1][1])
    pairs[1][1].close()


def test_two_optimizers_at_once(make_store, monkeypatch):
    pairs = [make_optimizer(monkeypatch, kind, moments="run") for kind in (Store, make_store, make_store)]
    for step in range(12):
        for pair in pairs:
            steps(*pair, step, step + 1)
    for model, optimizer in pairs[1:]:
        assert_same_bits(weights(pairs[0][0]), weights(model))
        assert_same_state(pairs[0][1], optimizer)
        optimizer.close()


def test_weights_edited_outside_win_over_moving_slots(make_store, monkeypatch):
    for format, depth in (("split", 0), ("master", 0), ("split", 1), ("master", 1)):
        given = {"format": format, "prefetch_depth": depth}
        model, optimizer = make_optimizer(monkeypatch, make_store, **given, switch_every=1, schedule="ascending")
        steps(model, optimizer, 0, 4)  # every block has residuals now, and block 0 is about to be visited again
        edited = {name: torch.full_like(p, 0.5) for name, p in model.named_parameters() if "layers" in name}
        model.load_state_dict(edited, strict=False)
        exported = {name: value.float() for name, value in edited.items()}
        for block in optimizer.blocks:
            for span in block.spans:
                exact = optimizer._codecs[span.name].decode(
                    edited[span.name].view(-1)[span.start : span.stop], optimizer._store.read(span)["w"]
                )
                # SPLIT adds the old low half: at most half a unit in the last place of the bf16 weight, here 2**-8
                bound = 0.0 if format == "master" else 2.0**-9
                assert (exact - exported[span.name].view(-1)[span.start : span.stop]).abs().max() <= bound
        optimizer.close()


def test_a_switch_exchanges_in_place_and_returns_before_anything_moves(driver):
    layout = {Span(f"p{i}", 0, 5000): {"w": torch.uint8} for i in range(2)}
    old, new = layout
    driver.reset(pinned_limit=0, longest_delay_us=0)
    compute = driver.stream()
    slots = MovingStore(layout, standin=driver, compute=compute)
    slots.write(new, {"w": torch.full((5000,), 9, dtype=torch.uint8)})
    live = slots.fetch([old], CPU)[old]["w"]
    room = slots.memory()["w"]["cpu"]
    gate = threading.Event()
    held = _hold(driver, compute, gate)
    driver.add(compute, live, 5)
    slots.flush([old])
    slots.prefetch([new], CPU)
    came = slots.fetch([new], CPU)[new]["w"]
    seen = torch.zeros_like(came)
    driver.observe(compute, seen, came)
    assert came.data_ptr() == live.data_ptr() and slots.memory()["w"]["cpu"] == room
    assert not slots._host[old]["w"].any() and not seen.any()  # the stream that computes is held, so nothing has moved
    gate.set()
    driver.finish(compute)
    assert (seen == 9).all() and (slots.read(old)["w"] == 5).all()
    slots.flush([new])
    slots.close()
    driver.drop_stream(compute)
    del held


def _hold(driver, stream, gate):
    """Give `stream` work that ends when `gate` is set."""
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: gate.wait(60) and None)
    driver.call(stream, function)
    return function


# --- ahead of the visit ----------------------------------------------------------------------------------------------------


def copies(driver, move):
    """How many copies `move` gives to the driver."""
    driver.fail("cuMemcpyHtoDAsync", skipped=1_000_000)
    move()
    return 1_000_000 - driver.skipped()


def four_blocks(**slots):
    return {Span(f"p{i}", 0, 1000 * (i + 1)): slots or {"w": torch.uint8} for i in range(4)}


def test_a_block_brought_ahead_is_not_moved_again(driver):
    first, second, third, _ = layout = four_blocks()
    slots = MovingStore(layout, prefetch_depth=1, standin=driver, chunk_bytes=4096)
    slots.fetch([first], CPU)
    assert copies(driver, lambda: slots.prefetch([second], CPU)) == 1
    slots.flush([first])
    assert copies(driver, lambda: (slots.prefetch([second], CPU), slots.prefetch([third], CPU))) == 1
    assert copies(driver, lambda: slots.fetch([second], CPU)) == 0
    slots.close()


def test_of_more_blocks_than_there_are_rooms_those_announced_last_stay(driver):
    first, second, third, fourth = layout = four_blocks()
    slots = MovingStore(layout, prefetch_depth=1, standin=driver, chunk_bytes=4096)
    for span, moved in ((first, 1), (second, 1), (first, 0), (third, 1), (third, 0)):
        assert copies(driver, lambda: slots.prefetch([span], CPU)) == moved
    assert copies(driver, lambda: slots.fetch([first], CPU)) == 0  # the second has made way for the third
    assert copies(driver, lambda: slots.prefetch([fourth], CPU)) == 1
    slots.flush([first])
    assert copies(driver, lambda: slots.fetch([third], CPU)) == 1  # it has made way, since the first was in use
    slots.flush([third])
    slots.close()


def test_a_fetched_block_does_not_wait_for_those_that_come_later(driver):
    """The third block cannot come before the first has left, which waits for a kernel; the second is there."""
    third, second, first, _ = layout = four_blocks()
    held, free = driver.stream(), driver.stream()
    slots = MovingStore(layout, prefetch_depth=1, standin=driver, compute=held)
    slots.write(second, {"w": torch.full((2000,), 9, dtype=torch.uint8)})
    slots.fetch([first], CPU)
    slots.prefetch([second], CPU)
    gate, ended, passed = threading.Event(), threading.Event(), threading.Event()
    kernels = [_hold(driver, held, gate), _tell(driver, held, ended)]
    slots.flush([first])
    slots.prefetch([second], CPU)
    slots.prefetch([third], CPU)
    slots._rooms_on(CPU).stream = free
    came = slots.fetch([second], CPU)[second]["w"]
    seen = torch.zeros_like(came)
    driver.observe(free, seen, came)
    kernels.append(_tell(driver, free, passed))
    assert passed.wait(30) and not ended.is_set() and (seen == 9).all()
    gate.set()
    slots.flush([second])
    slots.close()
    driver.drop_stream(held)
    driver.drop_stream(free)


def _tell(driver, stream, event):
    """Let `stream` set `event` when it comes there."""
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: event.set())
    driver.call(stream, function)
    return function


def test_a_span_of_two_blocks_is_brought_ahead_once_and_its_last_value_counts(driver):
    first, second, shared, _ = layout = four_blocks()
    slots = MovingStore(layout, prefetch_depth=2, standin=driver, chunk_bytes=4096)
    slots.fetch([first, shared], CPU)[shared]["w"].fill_(1)
    assert copies(driver, lambda: slots.prefetch([second, shared], CPU)) == 1
    assert copies(driver, lambda: slots.prefetch([shared], CPU)) == 0
    slots.flush([first, shared])
    fetched = {}
    assert copies(driver, lambda: fetched.update(slots.fetch([second, shared], CPU))) == 1
    assert (fetched[shared]["w"] == 1).all()
    slots.flush([second, shared])
    slots.prefetch([second, shared], CPU)
    slots.prefetch([shared], CPU)
    slots.fetch([shared], CPU)[shared]["w"].fill_(2)  # not in the order that was announced
    slots.flush([shared])
    assert (slots.fetch([second, shared], CPU)[shared]["w"] == 2).all()
    slots.flush([second, shared])
    slots.close()


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
def test_each_unit_of_depth_costs_one_room_as_large_as_the_blocks_in_it_and_no_more_than_there_are(make_store, depth):
    layout = four_blocks(w=torch.int16, m=torch.float32)
    sizes = 9 * [aligned(2 * span.numel) + aligned(4 * span.numel) for span in layout]
    slots = make_store(layout, prefetch_depth=depth)
    for visit in range(24):
        come = [[list(layout)[(visit + i) % 4]] for i in range(min(1 + depth, 4))]
        for spans in come:
            slots.prefetch(spans, CPU)
        slots.fetch(come[0], CPU)
        memory = slots.memory()
        on_device = {slot: places["cpu"] for slot, places in memory.items() if "cpu" in places}
        held = sum(spans[0].numel for spans in come)
        assert (on_device["w"], on_device["m"]) == (2 * held, 4 * held)
        slots.flush(come[0])
    rooms = [sizes[room :: len(come)] for room in range(len(come))]  # what came into each
    assert sum(on_device.values()) == sum(map(max, rooms))
    slots.close()


@pytest.mark.parametrize("depth", [-1, 1.0, True, None])
def test_a_depth_that_is_no_count_is_refused(depth):
    with pytest.raises(ValueError, match=f"prefetch_depth must be an int of at least 0; got {depth}"):
        BlockAdam(tiny(torch.bfloat16).named_parameters(), prefetch_depth=depth)


def test_on_the_cpu_nothing_is_brought_anywhere():
    layout = four_blocks()
    slots = Store(layout, [CPU], prefetch_depth=2)
    for span in layout:
        slots.prefetch([span], CPU)
        assert slots.fetch([span], CPU)[span]["w"].data_ptr() == slots._host[span]["w"].data_ptr()
        slots.flush([span])
    assert set(slots.memory()) == {"w", "padding"}


# --- what can go wrong -----------------------------------------------------------------------------------------------------


def test_memory_that_cannot_be_pinned_is_pageable_with_one_warning_that_names_the_limit(driver):
    layout = {Span(f"p{i}", 0, 5000): {"w": torch.float32} for i in range(4)}
    driver.reset(pinned_limit=30_000)
    message = r"could not pin 80,\d+ bytes .*cuMemHostAlloc.*\(2\): out of memory.*ulimit -l\) is"
    with pytest.warns(RuntimeWarning, match=message) as told:
        slots = MovingStore(layout, standin=driver)
    assert len(told) == 1 and set(slots.memory()["w"]) == {"host_pageable"}
    slots.fetch(list(layout)[:1], CPU)
    assert slots.memory()["ring"] == {"host_pinned": 4 * 256}
    slots.close()


def test_without_a_driver_pinning_says_so_once_and_the_store_works(monkeypatch):
    monkeypatch.setattr(Store, "_context", lambda self, device: store_module._C.Context(0, "libcuda-not-here.so"))
    with pytest.warns(RuntimeWarning, match="no CUDA driver: .*libcuda-not-here.so"):
        slots = Store({Span("p", 0, 10): {"w": torch.float32}}, [torch.device("cuda", 0)])
    assert "host_pageable" in slots.memory()["w"]


def test_memory_counts_every_byte_once_by_slot_and_place(make_store):
    layout = {Span(f"p{i}", 0, 2000 - 1000 * i): {"w": torch.int16, "m": torch.float32} for i in range(2)}
    slots = make_store(layout, chunk_bytes=4096)
    for first, second in (list(layout), reversed(layout)):
        slots.fetch([first], CPU)
        slots.prefetch([second], CPU)
        report, host = slots.memory(), "host_pinned" if slots._pinned else "host_pageable"
        room = aligned(2 * 2000) + aligned(4 * 2000)  # as large as the larger block
        assert report["w"] == {host: 2 * 3000, "cpu": 2 * first.numel}
        assert report["m"] == {host: 4 * 3000, "cpu": 4 * first.numel}
        assert report["padding"] == {host: report.reserved - 6 * 3000, "cpu": room - 6 * first.numel}
        ring = slots._rooms[CPU].ring_bytes
        assert report.get("ring", {}) == ({"host_pinned": ring} if ring else {})
        assert (report.asked, {**report}.keys() - {"ring"}) == (6 * 3000, {"w", "m", "padding"})
        assert report.touched <= report.reserved and (not slots._pinned or report.touched == report.reserved)
        slots.flush([first])
    slots.close()


def test_a_device_that_is_not_there_is_named(driver):
    with pytest.raises(RuntimeError, match=r"cuDeviceGet failed: .* \(101\)"):
        store_module._C.Context(7, driver.path)


def train_through_failures(monkeypatch, make, fail_at, driver, depth):
    """Train, let the driver fail in step `fail_at` after some calls, and repeat every step that raises."""
    model, optimizer = make_optimizer(monkeypatch, make, switch_every=1, moments="run", prefetch_depth=depth)
    raised, skipped = [], 0
    for step in range(10):
        if step >= fail_at:
            driver.fail("", skipped=skipped)
            skipped += 3
        set_gradients(optimizer, step)
        for _ in range(3):
            done = optimizer.global_step
            try:
                optimizer.step()
            except RuntimeError as error:
                raised.append(str(error))
                assert optimizer.global_step == done
            else:
                break
    driver.fail("", skipped=-1)
    return model, optimizer, raised


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("fail_at", range(4))
def test_any_failed_call_surfaces_in_a_step_that_can_be_repeated(make_driver_store, driver, monkeypatch, fail_at, depth):
    whole = make_optimizer(monkeypatch, Store, switch_every=1, moments="run")
    steps(*whole, 0, 10)
    driver.reset(fail_at, longest_delay_us=30)
    model, optimizer, raised = train_through_failures(monkeypatch, make_driver_store, fail_at, driver, depth)
    assert raised and all("call step() again to retry" in text and "(2): out of memory" in text for text in raised)
    assert_same_bits(weights(whole[0]), weights(model))
    assert_same_state(whole[1], optimizer)
    optimizer.close()


EVENT_CALLS = ["cuEventCreate", "cuEventRecord", "cuEventQuery", "cuStreamWaitEvent"]
CALLS = [*EVENT_CALLS, "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuCtxPushCurrent", "cuLaunchHostFunc"]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_the_state_is_whole_after_each_kind_of_failure(make_driver_store, driver, monkeypatch, call, depth):
    """Also without another step: what the failed switch left in the room is read from there."""
    whole = make_optimizer(monkeypatch, Store, switch_every=1, moments="run")
    moving = make_optimizer(monkeypatch, make_driver_store, switch_every=1, moments="run", prefetch_depth=depth)
    for step in range(8):
        steps(*whole, step, step + 1)
        set_gradients(moving[1], step)
        moving[1]._store.prefetch(moving[1].active_block.spans, CPU)
        driver.fail(call, skipped=step)
        try:
            moving[1].step()
        except RuntimeError:
            driver.fail("", skipped=-1)
            moving[1].step()
        driver.fail("", skipped=-1)
        assert_same_state(whole[1], moving[1])
    moving[1].close()


def test_a_lost_device_is_told_and_idle_slots_stay_readable(make_driver_store, driver):
    layout = {Span(f"p{i}", 0, 3000): {"w": torch.uint8} for i in range(3)}
    first, second, third = layout
    slots = make_driver_store(layout)
    slots.fetch([first], CPU)[first]["w"].fill_(1)
    slots.flush([first])
    slots.fetch([second], CPU)[second]["w"].fill_(2)
    slots.flush([second])
    assert (slots.read(second)["w"] == 2).all()
    slots.fetch([third], CPU)[third]["w"].fill_(3)
    driver.lose(skipped=2)
    slots.flush([third])
    slots.prefetch([first], CPU)
    with pytest.raises(RuntimeError, match="uncorrectable ECC error"):
        slots.read(third)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="uncorrectable ECC error"):
            slots.fetch([first], CPU)
    assert (slots.read(first)["w"] == 1).all() and (slots.read(second)["w"] == 2).all()
    driver.reset()  # so that what is left can be counted
    slots.close()


def test_another_block_cannot_be_fetched_before_the_one_that_is_there_is_flushed(make_store):
    one, other = layout = {Span(f"p{i}", 0, 30): {"w": torch.uint8} for i in range(2)}
    slots = make_store(layout)
    fetched = slots.fetch([one], CPU)
    assert slots.fetch([one], CPU)[one]["w"].data_ptr() == fetched[one]["w"].data_ptr()
    with pytest.raises(ValueError, match="flush them first"):
        slots.fetch([other], CPU)
    slots.flush([one])
    slots.close()


def test_a_forked_child_is_told_that_moving_does_not_work_there():
    span = Span("p", 0, 3000)
    slots = MovingStore({span: {"w": torch.uint8}})
    slots.fetch([span], CPU)
    slots.flush([span])
    child = os.fork()
    if child == 0:
        try:
            slots.fetch([span], CPU)
        except RuntimeError as error:
            os._exit(0 if "only in the process that made it" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    slots.close()


# --- nothing grows ---------------------------------------------------------------------------------------------------------


def held_by_process():
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "host": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"),
    }


def test_ten_sweeps_later_nothing_has_grown_and_close_returns_all(make_store, request):
    driver = request.getfixturevalue("library")
    layout = {Span(f"p{i}", 0, 40_000 + 100 * i): {"w": torch.int16, "m": torch.float32} for i in range(4)}
    at_first = held_by_process()
    slots = make_store(layout, chunk_bytes=1 << 15)

    def sweep():
        for span in layout:
            slots.prefetch([span], CPU)
            slots.fetch([span], CPU)[span]["m"].add_(1)
            slots.flush([span])
        slots.read(span)
        return held_by_process(), slots.memory(), driver.counts() | {"calls": 0, "pageable_copies": 0}

    sweep()
    usage, memory, counts = sweep()
    for _ in range(10):
        later = sweep()
    assert later[1] == memory and (later[0]["threads"], later[0]["files"]) == (usage["threads"], usage["files"])
    assert later[0]["host"] - usage["host"] < 2 << 20
    assert all(abs(later[2][name] - count) <= (600 if name == "events" else 0) for name, count in counts.items())
    slots.close()
    gc.collect()
    after = held_by_process()
    assert (after["threads"], after["files"]) == (at_first["threads"], at_first["files"])
