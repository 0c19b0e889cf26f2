import functools

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from tbx_envs.env import ToolEnv
from tbx_envs.errors import ActionError, DomainError
from tbx_envs.messages import Text, ToolCall, ToolResult, Turn
from tbx_envs.registration import env_id, frozen_uids
from tbx_envs.runtime import EpisodeOptions
from tbx_envs.tools.tool import ToolContext, tool
from tbx_envs.vector import EpisodeSlots, ToolVectorEnv


@tool(mutates=True)
def explode(context: ToolContext) -> str:
    """Break."""
    raise ZeroDivisionError("boom")


def order(env):
    call = env.task.expected_calls[-1]
    return Turn(calls=(ToolCall("", call.tool, call.arguments),))


EXPLODE = Turn(calls=(ToolCall("", "explode", {}),))


@pytest.fixture
def slots(kiosk):
    slots = EpisodeSlots(3)
    yield slots
    slots.close()


# --- EpisodeSlots -------------------------------------------------------------------------------------------------


def test_a_started_slot_gives_what_the_agent_reads_first(slots, kiosk):
    outcome = slots.start(0, "kiosk/order/001", seed=4)
    assert outcome.messages == (Text("system", kiosk.rules), Text("user", slots.env(0).task.query))
    assert (outcome.ended, outcome.fault) == (False, None)
    assert slots.tools(0) == ToolEnv("kiosk/order/001").tools


def test_slots_step_and_end_independently(slots):
    for slot in range(3):
        slots.start(slot, f"kiosk/order/00{slot}", seed=slot)
    outcomes = slots.advance({2: order(slots.env(2)), 0: "What is your code?"})
    assert list(outcomes) == [2, 0]
    assert isinstance(outcomes[2].messages[0], ToolResult) and outcomes[2].messages[0].status == "ok"
    assert isinstance(outcomes[0].messages[0], Text)
    outcomes = slots.advance({2: "<DONE>", 1: "<DONE>"})
    assert [outcome.ended for outcome in outcomes.values()] == [True, True]
    assert outcomes[2].messages == ()
    assert [slots.episode(slot, 7).reward for slot in (2, 1)] == [1.0, 0.0]
    with pytest.raises(ActionError, match=r"\[1, 2\].*start"):
        slots.advance({0: "Hello", 1: "Hello", 2: "Hello"})
    with pytest.raises(ActionError, match="is still running"):
        slots.episode(0, 0)
    assert slots.start(2, "kiosk/order/002", seed=0).ended is False
    assert slots.episode  # the slot is in use again
    slots.advance({0: "Hello", 2: "Hello"})


def test_a_slot_steps_exactly_like_an_environment(slots):
    env = ToolEnv("kiosk/order/003")
    env.reset(seed=11)
    slots.start(1, "kiosk/order/003", seed=11)
    for action in ["Code?", order(env), "Paper?", "<tool_call>{}</tool_call>", "Anything else?", order(env), "<DONE>"]:
        env.step(action)
        slots.advance({1: action})
    one, other = env.episode(0), slots.episode(1, 0)
    assert (one.transcript, one.report, one.usage) == (other.transcript, other.report, other.usage)


def test_a_fault_voids_its_slot_and_does_not_disturb_the_others(kiosk_with):
    domain = kiosk_with(explode)
    uid = f"{domain.name}/order/000"
    slots = EpisodeSlots(3)
    for slot in range(3):
        slots.start(slot, uid, seed=0)
    slots.advance({slot: order(slots.env(slot)) for slot in range(3)})
    outcomes = slots.advance({0: "<DONE>", 1: EXPLODE, 2: "<DONE>"})
    assert [outcome.ended for outcome in outcomes.values()] == [True, True, True]
    assert outcomes[1].fault.kind == "tool" and "boom" in outcomes[1].fault.message
    assert [slots.episode(slot, 0).reward for slot in range(3)] == [1.0, None, 1.0]
    assert slots.start(1, uid, seed=0).fault is None
    slots.close()
    slots.close()


def test_a_fault_at_the_start_is_an_outcome_too(kiosk):
    def no_user(task, domain, seed):
        raise ConnectionError("refused")

    slots = EpisodeSlots(1, EpisodeOptions(user=no_user))
    outcome = slots.start(0, "kiosk/order/000", seed=0)
    assert outcome.ended and outcome.fault.kind == "user"
    assert slots.episode(0, 0).reward is None


def test_a_task_that_does_not_exist_is_no_fault(slots):
    with pytest.raises(DomainError):
        slots.start(0, "kiosk/ordr/000", seed=0)


# --- ToolVectorEnv ------------------------------------------------------------------------------------------------


def test_the_vector_environment_keeps_outcomes_apart(kiosk_with):
    domain = kiosk_with(explode)
    uids = [f"{domain.name}/order/00{number}" for number in range(4)]
    envs = ToolVectorEnv(uids=uids)
    observations, infos = envs.reset(seed=3)
    assert observations == tuple(domain.task(uid).query for uid in uids)
    assert observations in envs.observation_space
    assert list(infos["uid"]) == uids

    actions = [*(order(env) for env in envs.envs[:2]), EXPLODE, None]
    observations, rewards, terminated, truncated, infos = envs.step(actions)
    assert observations[3] == "" and observations[0] != ""
    assert list(infos["_fault"]) == [False, False, True, False]
    assert infos["fault"]["kind"][2] == "tool"
    assert np.isnan(rewards[2]) and not rewards[[0, 1, 3]].any()
    assert list(terminated) == [False] * 4 and list(truncated) == [False, False, True, False]

    with pytest.raises(ActionError, match=r"slots \[2\]"):
        envs.step(["<DONE>"] * 4)
    _, rewards, terminated, truncated, infos = envs.step(["<DONE>", "Hello", None, "<DONE>"])
    assert list(rewards) == [1.0, 0.0, 0.0, 0.0]
    assert list(terminated) == [True, False, False, True] and not truncated.any()  # slot 2 was over before
    assert list(infos["check"]["passed"]) == [True, False, False, False]
    assert list(infos["_check"]) == [True, False, False, True]

    observations, infos = envs.reset(seed=9, options={"reset_mask": np.array([False, False, True, False])})
    assert [bool(observation) for observation in observations] == [False, False, True, False]
    _, _, terminated, truncated, _ = envs.step([None, None, "Hello", None])
    assert not terminated.any() and not truncated.any()
    envs.close()


def test_wrong_numbers_of_tasks_seeds_or_actions_are_named(kiosk):
    with pytest.raises(ActionError, match="2 uids for num_envs=3"):
        ToolVectorEnv(3, uids=["kiosk/order/000"] * 2)
    with pytest.raises(ActionError, match="neither uid nor uids"):
        ToolVectorEnv(3)
    envs = ToolVectorEnv(2, uid="kiosk/order/000")
    with pytest.raises(ActionError, match="1 seeds"):
        envs.reset(seed=[1])
    with pytest.raises(ActionError, match=r"slots \[0, 1\] run no episode"):
        envs.step(["Hello", "Hello"])
    envs.reset()
    with pytest.raises(ActionError, match="got 1 actions"):
        envs.step(["Hello"])
    with pytest.raises(ActionError, match="give a list of task ids"):
        ToolVectorEnv(uids="kiosk/order/000")
    with pytest.raises(ActionError, match="no slot; give num_envs=1 or more"):
        ToolVectorEnv(0, uid="kiosk/order/000")


@pytest.mark.parametrize(
    "actions", ["Hi", None, {"0": "Hello", "1": "Hello"}, ["Hello", 5], ["Hello", Turn(text=None)]]
)
def test_what_is_no_action_is_refused_before_any_slot_is_stepped(kiosk, slots, actions):
    envs = ToolVectorEnv(2, uid="kiosk/order/000")
    envs.reset(seed=0)
    with pytest.raises(ActionError, match=r"one action for each slot|the action of slot 1 is a .*No slot was stepped"):
        envs.step(actions)
    assert [len(env.transcript) for env in envs.envs] == [2, 2]
    if isinstance(actions, list):
        for slot in (0, 1):
            slots.start(slot, "kiosk/order/000", seed=0)
        with pytest.raises(ActionError, match="slot 1 is a "):
            slots.advance(dict(enumerate(actions)))
        assert len(slots.env(0).transcript) == 2


def test_make_vec_gives_the_vector_environment_also_with_a_task_per_slot():
    uids = frozen_uids("clinic")[:3]
    envs = gymnasium.make_vec(env_id(uids[0]), num_envs=2, vectorization_mode="vector_entry_point")
    assert isinstance(envs.unwrapped, ToolVectorEnv) and envs.unwrapped.uids == (uids[0],) * 2
    assert envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    envs.close()
    envs = gymnasium.make_vec(env_id(uids[0]), num_envs=3, vectorization_mode="vector_entry_point", uids=uids)
    observations, _ = envs.reset(seed=0)
    assert len(set(observations)) == 3
    envs.close()


def make_env(uid):
    return gymnasium.make("tbx_envs:" + env_id(uid))


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_gymnasiums_own_vector_environments_work_and_spawned_workers_know_the_ids(kind):
    uids = frozen_uids("clinic")[:2]
    creators = [functools.partial(make_env, uid) for uid in uids]
    if kind == "sync":
        envs = SyncVectorEnv(creators, autoreset_mode=AutoresetMode.DISABLED)
    else:
        envs = AsyncVectorEnv(creators, shared_memory=False, context="spawn", autoreset_mode=AutoresetMode.DISABLED)
    ours = ToolVectorEnv(uids=uids)
    try:
        for theirs, mine in [
            (envs.reset(seed=5), ours.reset(seed=5)),
            (envs.step(("Birth date?", "é 🙂")), ours.step(("Birth date?", "é 🙂"))),
            (envs.step(("<DONE>", "")), ours.step(("<DONE>", ""))),
        ]:
            assert tuple(theirs[0]) == mine[0]
            for one, other in zip(theirs[1:-1], mine[1:-1], strict=True):
                assert list(one) == list(other)
            assert list(theirs[-1]["uid"]) == list(mine[-1]["uid"])
            assert list(theirs[-1]["finish_reason"]) == list(mine[-1]["finish_reason"])
    finally:
        envs.close()
        ours.close()


@pytest.mark.parametrize("mode", ["vector_entry_point", "sync"])
def test_wrappers_that_count_episodes_count_each_once(mode):
    envs = gymnasium.make_vec(env_id(frozen_uids("clinic")[0]), num_envs=3, vectorization_mode=mode)
    counted = RecordEpisodeStatistics(envs)
    counted.reset(seed=0)
    counted.step(["Hello", "<DONE>", "Hello"])
    left = "" if mode == "sync" else None  # Gymnasium's own starts again by itself
    counted.step(["<DONE>", left, "Hello"])
    counted.step([left, left, "<DONE>"])
    assert counted.episode_count == 3
    assert list(counted.length_queue) == [1, 2, 3] and list(counted.return_queue) == [0.0] * 3
    if mode == "vector_entry_point":  # the slots that are reset go on with a count of their own
        counted.reset(seed=1, options={"reset_mask": np.array([True, False, True])})
        counted.step(["Hello", None, "<DONE>"])
        counted.step(["<DONE>", None, None])
        assert counted.episode_count == 5 and list(counted.length_queue)[3:] == [1, 2]
    counted.close()
