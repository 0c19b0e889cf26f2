"""The task order: complete epochs, the same from any position."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tbx_envs.errors import ConfigError
from tbx_jax.plan import TaskPlan

UIDS = tuple(f"clinic/family/{number:03d}" for number in range(12))


def test_an_epoch_has_every_task_once_and_the_next_has_another_order():
    plan = TaskPlan(UIDS, seed=0)
    first, position = plan.take(0, 12)
    second, _ = plan.take(position, 12)
    assert sorted(first) == sorted(second) == sorted(UIDS)
    assert first != second


@given(count=st.integers(1, 15), rounds=st.integers(1, 12), seed=st.integers(0, 5))
def test_a_round_never_has_a_task_twice(count, rounds, seed):
    plan, position = TaskPlan(UIDS, seed), 0
    for _ in range(rounds):
        uids, position = plan.take(position, count)
        assert len(set(uids)) == len(uids) == min(count, len(UIDS))


def test_the_order_goes_on_from_a_position_as_if_it_had_never_stopped():
    unbroken, position = [], 0
    for _ in range(9):
        uids, position = TaskPlan(UIDS, 7).take(position, 5)
        unbroken.append((uids, position))
    at_step_4 = unbroken[3][1]
    assert TaskPlan(tuple(reversed(UIDS)), 7).take(at_step_4, 5) == unbroken[4]


def test_another_seed_gives_another_order():
    assert TaskPlan(UIDS, 0).take(0, 12) != TaskPlan(UIDS, 1).take(0, 12)


def test_a_pool_without_tasks_or_with_a_task_twice_is_refused():
    with pytest.raises(ConfigError, match="0 tasks"):
        TaskPlan((), 0)
    with pytest.raises(ConfigError, match=UIDS[3]):
        TaskPlan((*UIDS, UIDS[3]), 0)
