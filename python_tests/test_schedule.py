"""A schedule is a pure function of the step."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from badam_kernels.schedule import ORDERS, Schedule

sizes = st.integers(1, 7)
intervals = st.integers(1, 5)


def visits(schedule: Schedule, n: int) -> list[int]:
    """The blocks of the first n visits."""
    return [schedule(k * schedule.switch_every) for k in range(n)]


def blocks(n: int, order: str, every: int | None, steps: int, **options) -> str:
    schedule = Schedule(n, order, every, **options)
    return "".join(str(schedule(step)) for step in range(steps))


def test_every_visit_has_k_steps_the_first_one_too():
    assert blocks(3, "ascending", 4, 13) == "0000" "1111" "2222" "0"
    assert blocks(3, "descending", 2, 8) == "22" "11" "00" "22"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("never", [-1, None])
def test_an_interval_of_minus_one_or_none_never_switches(order, never):
    schedule = Schedule(5, order, never)
    assert {schedule(step) for step in (*range(300), 10**9)} == {schedule(0)}


@pytest.mark.parametrize("every", [0, -2, -100])
def test_other_intervals_are_refused(every):
    with pytest.raises(ValueError, match=rf"at least 1, or -1 or None to never switch; got {every}"):
        Schedule(3, "random", every)


@pytest.mark.parametrize("every", [True, 1.0, "10"])
def test_an_interval_of_another_type_is_refused(every):
    with pytest.raises(TypeError, match="switch_every must be an int or None"):
        Schedule(3, "random", every)


def test_fixed_trains_block_zero_or_the_one_asked_for():
    assert blocks(3, "fixed", 2, 9) == "000000000"
    assert blocks(3, "fixed", 2, 9, start_block=2) == "222222222"


def test_orders_start_where_asked_and_go_on_from_there():
    assert blocks(4, "ascending", 1, 6, start_block=2) == "230123"
    assert blocks(4, "descending", 1, 6, start_block=1) == "103210"


@given(sizes, intervals, st.integers(0, 2**40), st.data())
def test_random_with_a_start_trains_that_block_first_then_the_rest_of_the_sweep(n, every, seed, data):
    start = data.draw(st.integers(0, n - 1))
    first, *rest = visits(Schedule(n, "random", every, start, seed), n)
    without = visits(Schedule(n, "random", every, None, seed), n)
    assert first == start
    assert rest == [block for block in without if block != start]


@pytest.mark.parametrize("start", [-1, 3, 100])
def test_a_start_out_of_range_is_refused(start):
    for order in ORDERS:
        with pytest.raises(ValueError, match=rf"start_block must be in \[0, 3\), there are 3 blocks; got {start}"):
            Schedule(3, order, 5, start)


@pytest.mark.parametrize("start", [True, 1.0, "0"])
def test_a_start_of_another_type_is_refused(start):
    with pytest.raises(TypeError, match="start_block must be an int or None"):
        Schedule(3, "random", 5, start)


@given(sizes, intervals, st.integers(0, 2**40), st.integers(0, 1000))
def test_every_random_sweep_is_a_permutation(n, every, seed, sweep):
    schedule = Schedule(n, "random", every, None, seed)
    steps = range(sweep * n * every, (sweep + 1) * n * every)
    trained = [schedule(step) for step in steps]
    assert sorted(trained[::every]) == list(range(n))
    assert trained == [block for block in trained[::every] for _ in range(every)]


def test_random_sweeps_and_seeds_differ():
    sweeps = [tuple(visits(Schedule(6, "random", 1, None, seed), 12)[k : k + 6]) for seed in range(20) for k in (0, 6)]
    assert len(set(sweeps)) > 30


@given(st.sampled_from(ORDERS), sizes, intervals, st.integers(0, 9), st.lists(st.integers(0, 10**6), max_size=20))
def test_the_answer_depends_on_nothing_but_the_step(order, n, every, seed, steps):
    asked = Schedule(n, order, every, None, seed)
    for step in steps:
        assert asked(step) == asked(step) == Schedule(n, order, every, None, seed)(step)


def test_no_global_random_state_is_read_or_moved():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    answers = visits(Schedule(9, "random", 2, None, 3), 40)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert visits(Schedule(9, "random", 2, None, 3), 40) == answers


def test_random_orders_are_the_same_in_every_run_and_on_every_rank():
    """A resumed run and another rank must meet the order that was saved, so it is part of the format."""
    assert visits(Schedule(5, "random", 10, None, 0), 10) == [0, 1, 4, 3, 2, 0, 1, 2, 3, 4]


def test_a_callable_decides_alone():
    assert blocks(3, lambda step: step % 2, 100, 5) == "01010"


# --- the future -----------------------------------------------------------------------------------------------------------


@given(st.sampled_from(ORDERS), sizes, intervals, st.integers(0, 200), st.integers(0, 9), st.integers(0, 3), st.booleans())
def test_upcoming_blocks_are_those_that_come_in_their_order_each_once(order, n, every, step, count, first_step, as_callable):
    schedule = Schedule(n, order, every, first_step=first_step)
    come = [schedule(later) for later in range(step, step + 2 * n * every)]  # every block of a sweep is in there
    if as_callable:
        schedule = Schedule(n, schedule)
    assert schedule.upcoming(step, count) == list(dict.fromkeys(come))[:count]


def test_upcoming_ends_where_a_callable_ends_or_stays_for_long():
    plan = [0, 0, 1, 2]
    assert Schedule(3, plan.__getitem__).upcoming(1, 3) == [0, 1, 2]
    assert Schedule(4, plan.__getitem__).upcoming(1, 4) == [0, 1, 2]
    assert Schedule(2, lambda step: 0 if step < 10 else 7).upcoming(0, 2) == [0]  # and step 10 will say what is wrong
    asked = []
    assert Schedule(2, lambda step: asked.append(step) or step // 1000).upcoming(0, 2) == [0]
    assert len(asked) < 500


@pytest.mark.parametrize("never", [-1, None])
def test_upcoming_is_the_one_block_of_a_schedule_that_never_switches(never):
    assert Schedule(3, "ascending", never).upcoming(5, 3) == [0]


@pytest.mark.parametrize("answer", [3, -1, 1.0, None])
def test_an_answer_that_is_no_block_is_refused(answer):
    with pytest.raises(ValueError, match=r"the schedule returned .* for step 7; expected an int in \[0, 3\)"):
        Schedule(3, lambda step: answer)(7)


def test_wrong_orders_are_refused():
    with pytest.raises(ValueError, match="'ascending', 'descending', 'random', 'fixed' or a callable; got 'cyclic'"):
        Schedule(3, "cyclic")
    with pytest.raises(ValueError, match="start_block cannot be combined with a callable"):
        Schedule(3, lambda step: 0, start_block=1)
    with pytest.raises(ValueError, match="at least one block; got 0"):
        Schedule(0)
