"""A dataset's tasks as environments, end to end: servers in processes, the check in its worker, nothing faked."""

import contextlib
import datetime
import pathlib

import gymnasium
import pytest
from gymnasium.envs.registration import registry
from gymnasium.utils.env_checker import check_env

import tbx_envs
from tbx_envs.agents.idle import IdleAgent
from tbx_envs.agents.oracle import OracleAgent
from tbx_envs.env import ToolEnv
from tbx_envs.episode import FinishReason
from tbx_envs.errors import ActionError, ConfigError, EnvironmentFault
from tbx_envs.evaluation.regrade import regrade
from tbx_envs.evaluation.run import run
from tbx_envs.evaluation.task_lists import find_task, select_tasks
from tbx_envs.messages import BadCall, Text, ToolCall, ToolResult, Turn
from tbx_envs.runtime import EpisodeOptions
from tbx_envs.thinkingbox import dataset as datasets
from tbx_envs.thinkingbox.runtime import close_shared
from tbx_envs.vector import EpisodeSlots, ToolVectorEnv

BIKESHOP = pathlib.Path(__file__).parents[2] / "data" / "bikeshop"
END_RENTAL = "rentals_main.py:test_end_rental"
DONE = Turn("Done. <DONE>")


@pytest.fixture(scope="module", autouse=True)
def bikeshop():
    before = dict(registry)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_registered", "_owners", "_broken"):
            patch.setattr(datasets, name, {})
        yield tbx_envs.register_dataset(BIKESHOP)
        close_shared()
    registry.clear()
    registry.update(before)


def call(name, **arguments):
    return Turn(calls=(ToolCall("", name, arguments),))


@contextlib.contextmanager
def running(uid, **options):
    env = ToolEnv(uid, **options)
    try:
        env.reset(seed=0)
        yield env
    finally:
        env.close()


class Says:
    """A user who says these words, one after the other."""

    can_end = False

    def __init__(self, *words):
        self.words = iter(words)

    def answer(self, transcript):
        return next(self.words)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Folder and rows of an evaluation run of the oracle over all tasks, several at a time."""
    folder = tmp_path_factory.mktemp("oracle")
    agent = OracleAgent(concurrency=3, options=EpisodeOptions(judge="yes"))
    rows = run(agent, select_tasks("bikeshop"), attempts=1, seed=0, rows_path=folder / "rows.jsonl", max_void_retries=1)
    return folder, rows


def test_the_expected_calls_pass_every_task_but_the_one_whose_server_dies(played):
    _, rows = played
    assert {row["uid"]: row["passed"] for row in rows} == {
        uid: None if uid == "desk_list.yaml:trouble_dies" else True for uid in select_tasks("bikeshop")
    }
    (void,) = [row for row in rows if row["fault"]]
    assert (void["fault"], void["reward"], void["retry"]) == ("tool", None, 1)


def test_doing_nothing_passes_only_the_task_where_it_is_right(tmp_path):
    rows = run(
        IdleAgent(concurrency=3, options=EpisodeOptions(judge="yes")),
        select_tasks("rentals_main.py:*"),
        attempts=1,
        seed=0,
        rows_path=tmp_path / "rows.jsonl",
        max_void_retries=0,
    )
    assert [row["uid"] for row in rows if row["passed"]] == ["rentals_main.py:test_question_alone"]
    assert not any(row["fault"] for row in rows)


def test_episodes_can_be_graded_again_from_what_was_saved(played, tmp_path):
    folder, rows = played
    again = regrade(folder, tmp_path / "rows.jsonl", judge="yes")
    assert [(row["uid"], row["passed"], row["reward"]) for row in again] == [
        (row["uid"], row["passed"], row["reward"]) for row in rows
    ]
    without_judge = regrade(folder, tmp_path / "none" / "rows.jsonl", judge="none")
    faults = {row["uid"]: row["fault"] for row in without_judge if row["fault"]}
    assert faults == {"desk_list.yaml:trouble_dies": "tool", "rentals_main.py:test_friendly_answer": "check"}
    # What only the check was at fault for can be graded again; what the tools were at fault for cannot.
    with_judge = regrade(tmp_path / "none", tmp_path / "yes" / "rows.jsonl", judge="yes")
    assert [(row["passed"], row["finish_reason"]) for row in with_judge] == [
        (row["passed"], row["finish_reason"]) for row in rows
    ]


def test_gymnasium_makes_a_task_by_its_id():
    env = gymnasium.make("ThinkingBox/rentals_main.py.test_end_rental-v0")
    observation, info = env.reset(seed=0)
    assert observation == find_task(END_RENTAL).query
    assert [message["role"] for message in info["messages"]][-1] == "user"
    assert {tool["function"]["name"] for tool in info["tools"]} >= {"find_customer", "end_rental"}
    for action in (
        '<tool_call>{"name": "find_customer", "arguments": {"email": "ada@example.org"}}</tool_call>',
        '<tool_call>{"name": "end_rental", "arguments": {"rental_id": "R1", "damage": false}}</tool_call>',
    ):
        assert env.step(action)[1:4] == (0.0, False, False)
    assert env.step("It is back. <DONE>")[1:4] == (1.0, True, False)
    env.close()


def test_an_environment_of_a_dataset_passes_gymnasiums_own_check():
    env = ToolEnv(END_RENTAL, user=lambda task, domain, seed: Says(*["Yes."] * 99))
    check_env(env, skip_render_check=True)
    env.close()


def test_a_wrong_call_fails_and_says_which_rows_differ():
    with running(END_RENTAL) as env:
        env.step(call("end_rental", rental_id="R1", damage=True))
        *_, info = env.step(DONE)
    assert not info["check"]["passed"]
    assert "bikes B2" in "\n".join(info["check"]["differences"])


def test_without_a_user_the_conversation_ends_when_the_agent_speaks():
    with running(END_RENTAL) as env:
        *_, terminated, truncated, info = env.step(Turn("Which rental?"))
    assert (terminated, truncated, info["finish_reason"]) == (False, True, "no_user_llm")


def test_a_user_gets_the_tasks_context_and_answers_as_often_as_the_limit_says():
    contexts = []

    def user(task, domain, seed):
        contexts.append((task.user_context, domain))
        return Says(*["I do not know. <DONE>"] * 99)

    with running("rentals_main.py:test_few_turns", user=user) as env:
        limits = env.task.limits
        for _ in range(99):
            *_, terminated, truncated, info = env.step(call("get_today"))
            if terminated or truncated:
                break
    assert info["finish_reason"] == "agent_limit" and env.episode(0).usage["agent_turns"] == limits.agent_turns
    assert contexts == [(find_task("rentals_main.py:test_few_turns").user_context, None)]
    with running(END_RENTAL, user=user) as env:
        for _ in range(99):
            *_, truncated, info = env.step(Turn("Which rental?"))
            if truncated:
                break
    # This user may not end the conversation, so its <DONE> is words like others.
    assert (info["finish_reason"], env.episode(0).usage["user_turns"]) == ("user_limit", 10)


def test_a_history_comes_first_and_its_calls_are_made_again():
    with running("front_desk.py:test_next_turn") as env:
        *before, query = env.transcript
        assert query == Text("user", "No, make it 555-0178 instead.")
        made = [entry for turn in before if isinstance(turn, Turn) for entry in turn.calls]
        assert [type(entry) for entry in made] == [ToolCall, BadCall, ToolCall]
        assert any(isinstance(message, ToolResult) for message in before)
        found = env.step(call("find_customer", email="ada@example.org"))[0]
        assert "555-0177" in found  # what the history's last call wrote
        env.step(call("update_customer", customer_id="C1", phone="555-0178"))
        assert env.step(DONE)[1] == 1.0
        episode = env.episode(0)
    assert episode.evidence["opening"] == len(before) + 1


def test_texts_are_filled_with_what_init_answered():
    with running("desk_list.yaml:greeting") as env:
        assert env.transcript[-1].text == "Good morning! The sign says open, is that so?"
        assert any("The shop is open." in message.text for message in env.transcript[:-1])


def test_a_direct_response_is_told_to_the_user_and_a_tool_may_end_the_conversation():
    with running("front_desk.py:test_refund_is_told") as env:
        env.step(call("refund", rental_id="R1", amount=4))
        assert env.transcript[-1] == Text("assistant", "4.0 was paid back for rental R1.")
        _, reward, terminated, _, info = env.step(call("get_today"))
    assert (reward, terminated, info["finish_reason"]) == (1.0, True, "end_turn_tool")


def test_of_two_servers_tools_the_later_wins_at_the_first_ones_place():
    with running("front_desk.py:test_note_on_the_second_server") as env:
        names = [tool["function"]["name"] for tool in env.tools]
        by_name = {tool["function"]["name"]: tool["function"] for tool in env.tools}
    assert names.count("add_note") == 1 and names.index("add_note") < names.index("list_notes")
    assert by_name["find_customer"]["description"] == "Looks a customer up."
    assert by_name["find_customer"]["parameters"]["properties"]["email"]["description"] == "as the customer gave it"


def test_the_clock_of_a_task_goes_before_the_one_of_the_run():
    clock = datetime.datetime(2030, 1, 2, 3, 4, 5)
    with running("rentals_main.py:test_rental_of_today", clock=clock) as env:
        assert "2025-10-01" in env.step(call("get_today"))[0]
    with running("rentals_main.py:test_few_turns", clock=clock) as env:
        assert "2030-01-02" in env.step(call("get_today"))[0]


def test_no_call_of_the_agent_reaches_a_reserved_tool():
    with running(END_RENTAL) as env:
        for name in ("__reserved__geteffects", "__reserved__init", "__reserved__server_tool"):
            assert env.step(call(name))[0] == f"Error: function '{name}' does not exist"


def test_a_fault_in_one_slot_leaves_the_others_alone():
    slots = EpisodeSlots(3)
    with contextlib.closing(slots):
        for slot, uid in enumerate((END_RENTAL, "desk_list.yaml:trouble_dies", END_RENTAL)):
            assert slots.start(slot, uid, seed=slot).fault is None
        outcomes = slots.advance({slot: call("die") for slot in range(3)})
        assert [outcome.fault and outcome.fault.kind for outcome in outcomes.values()] == [None, "tool", None]
        slots.advance({0: call("end_rental", rental_id="R1", damage=False), 2: call("find_customer", email="x")})
        slots.advance({0: DONE, 2: DONE})
        assert [slots.episode(slot, 0).passed for slot in range(3)] == [True, None, False]


def test_a_vector_environment_steps_tasks_of_a_dataset():
    envs = ToolVectorEnv(uids=[END_RENTAL, END_RENTAL])
    with contextlib.closing(envs):
        envs.reset(seed=0)
        envs.step([call("end_rental", rental_id="R1", damage=False), None])
        assert envs.step([DONE, DONE])[1].tolist() == [1.0, 0.0]


def test_what_cannot_be_is_said_before_anything_starts():
    with pytest.raises(ActionError, match="servers have not been started"):
        ToolEnv(END_RENTAL).tools  # noqa: B018
    with pytest.raises(ActionError, match=r"no option 'jugde'.*Did you mean 'judge'"):
        ToolEnv(END_RENTAL, jugde="yes")
    with pytest.raises(ActionError, match="'fork' or by 'spawn'"):
        ToolEnv(END_RENTAL, start="forked")
    with pytest.raises(ActionError, match=r"give a datetime\.datetime"):
        ToolEnv(END_RENTAL, clock="2025-10-01")
    with pytest.raises(ConfigError, match="unknown judge 'maybe'"):
        ToolEnv(END_RENTAL, judge="maybe").reset(seed=0)


def test_a_user_that_cannot_be_made_voids_the_episode_and_leaves_no_session():
    def broken(task, domain, seed):
        raise KeyError("no such customer")

    env = ToolEnv(END_RENTAL, user=broken)
    with pytest.raises(EnvironmentFault, match="making the simulated user raised KeyError"):
        env.reset(seed=0)
    assert env.episode(0).fault.kind == "user"
    assert FinishReason.NO_USER not in (env.episode(0).finish_reason,)
