"""Environments and domains travel to other processes."""

import copy
import dataclasses
import pickle
import subprocess
import sys

import gymnasium
import pytest

from tbx_envs.domains import load_domain
from tbx_envs.env import ToolEnv
from tbx_envs.errors import ActionError
from tbx_envs.messages import DONE_MARK, ToolCall, Turn
from tbx_envs.registration import env_id
from tbx_envs.runtime import EpisodeOptions
from tbx_envs.vector import ToolVectorEnv

UID = "clinic/cancel_visit/000"

IN_ANOTHER_PROCESS = """
import pickle, sys
env, turns = pickle.load(sys.stdin.buffer)
first, _ = env.reset(seed=3)
steps = [env.step(turn) for turn in turns]
sys.stdout.buffer.write(pickle.dumps([first, *((step[0], *step[1:4]) for step in steps)]))
"""


def solution():
    calls = load_domain("clinic").task(UID).expected_calls
    return [*(Turn(calls=(ToolCall("", call.tool, call.arguments),)) for call in calls), Turn(DONE_MARK)]


def test_a_pickled_environment_plays_the_same_episode_in_a_fresh_process():
    env = gymnasium.make(env_id(UID))
    sent = pickle.dumps((env, solution()))
    made = subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS], input=sent, capture_output=True, check=True)
    first, _ = env.reset(seed=3)
    steps = [env.step(turn) for turn in solution()]
    assert pickle.loads(made.stdout) == [first, *((step[0], *step[1:4]) for step in steps)]
    assert steps[-1][1:3] == (1.0, True)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["copy", "pickle"])
def test_an_environment_is_made_again_with_its_task_and_options_and_no_episode(again):
    env = ToolEnv(UID, render_mode="ansi", chat_format="qwen3_coder", tool_timeout_s=3.0)
    env.reset(seed=0)
    other = again(env)
    assert (other.task, other.render_mode, other._options) == (env.task, "ansi", env._options)
    assert other.transcript == () and env.transcript != ()
    with pytest.raises(ActionError, match="has not started"):
        other.step(DONE_MARK)


def test_a_pickled_vector_environment_has_the_same_slots():
    vector = ToolVectorEnv(uids=[UID, "clinic/cancel_visit/001"], chat_format="qwen3_coder")
    other = pickle.loads(pickle.dumps(vector))
    assert other.reset(seed=1)[0] == vector.reset(seed=1)[0]
    assert [env._options for env in other.envs] == [EpisodeOptions(chat_format="qwen3_coder")] * 2


def test_a_domain_is_pickled_by_its_name_and_one_that_nobody_can_find_is_refused():
    clinic = load_domain("clinic")
    assert pickle.loads(pickle.dumps(clinic)) is clinic
    for stranger in (dataclasses.replace(clinic, name="nowhere"), dataclasses.replace(clinic, version=99)):
        with pytest.raises(pickle.PicklingError, match="pickled by its name"):
            pickle.dumps(stranger)
