import copy
import dataclasses
import json
import random

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from tbx_envs.domains.worlds import lend_world, return_world, rows_of, template_for
from tbx_envs.env import ToolEnv
from tbx_envs.episode import FinishReason
from tbx_envs.errors import ActionError, ConfigError, DomainError
from tbx_envs.messages import BadCall, Text, ToolCall, ToolResult, Turn
from tbx_envs.spaces import AnyText
from tbx_envs.task import Limits

UID = "kiosk/order/000"
ORDER = {"item": "tea", "quantity": 1, "code": "1000"}
ORDER_TEXT = (
    '<tool_call>{"name": "place_order", "arguments": {"item": "tea", "quantity": 1, "code": "1000"}}</tool_call>'
)


@pytest.fixture
def env(kiosk):
    env = ToolEnv(UID)
    env.reset(seed=0)
    yield env
    env.close()


def call(name, arguments):
    return Turn(calls=(ToolCall("of the caller", name, arguments),))


def notes_of(env):
    return rows_of(env._runtime.world.raw, env.source.domain.metadata)["notes"]


# --- reset --------------------------------------------------------------------------------------------------------


def test_reset_gives_the_users_first_message_the_rules_and_the_tools(kiosk):
    env = ToolEnv(UID)
    observation, info = env.reset(seed=3)
    assert observation == env.task.query
    assert info["uid"] == UID and info["finish_reason"] is None
    assert info["messages"] == [
        {"role": "system", "content": kiosk.rules},
        {"role": "user", "content": env.task.query},
    ]
    assert [tool["function"]["name"] for tool in info["tools"]] == [tool.name for tool in kiosk.tools]
    assert "check" not in info


def test_the_same_seed_gives_the_same_user_and_none_draws_one(kiosk):
    def answers(*seeds):
        env = ToolEnv(UID)
        said = []
        for seed in seeds:
            env.reset(seed=seed)
            said.append("".join(env.step("What is your code?")[0] for _ in range(6)))
        return said

    assert answers(7, 7)[0] == answers(7, 7)[1]
    assert answers(7, None, None) == answers(7, None, None)
    assert len(set(answers(7, None, None, None))) > 1


def test_an_unknown_task_is_answered_with_near_names(kiosk):
    with pytest.raises(DomainError, match="'kiosk/order/000'"):
        ToolEnv("kiosk/ordr/000")
    with pytest.raises(DomainError, match=r"unknown domain 'clinc'.*clinic"):
        ToolEnv("clinc/cancel_visit/000")


# --- turns --------------------------------------------------------------------------------------------------------


def test_an_episode_that_does_what_is_expected_is_rewarded_at_its_end(env):
    assert "1000" in env.step("What is your code?")[0]
    observation, reward, terminated, truncated, info = env.step(ORDER_TEXT)
    assert observation == '{"order_id": "O2", "left": 8}'
    assert (reward, terminated, truncated) == (0.0, False, False)
    observation, reward, terminated, truncated, info = env.step("Here you are. <DONE>")
    assert (observation, reward, terminated, truncated) == ("", 1.0, True, False)
    assert info["finish_reason"] == "done"
    assert info["check"] == {"passed": True, "check": "state", "differences": []}


def test_doing_nothing_is_not_rewarded_and_the_differences_are_told(env):
    *_, info = env.step("<DONE>")
    assert info["check"]["passed"] is False
    assert "orders: O2 is missing (item='tea', quantity=1, code='1000', status='open')" in info["check"]["differences"]
    assert env.episode(4).reward == 0.0


def test_calls_of_a_turn_run_in_order_and_a_malformed_one_does_not_stop_the_others(env):
    one, other = (f'<tool_call>{{"name": "note", "arguments": {{"text": "{word}"}}}}</tool_call>' for word in "ab")
    observation, *_, info = env.step(one + '<tool_call>{"name": "note", }</tool_call>' + other)
    assert [message["role"] for message in info["messages"]] == ["tool"] * 3
    assert observation == "\n".join(message["content"] for message in info["messages"])
    assert notes_of(env) == [("a",), ("b",)]
    statuses = [message.status for message in env.transcript if isinstance(message, ToolResult)]
    assert statuses == ["ok", "invalid", "ok"]


def test_a_call_inside_reasoning_is_never_executed(env):
    env.step(f"<think>{ORDER_TEXT}</think>Hello")
    assert not notes_of(env)
    assert env.transcript[-2].reasoning and isinstance(env.transcript[-1], Text)


def test_a_done_mark_next_to_a_call_does_not_end_the_episode(env):
    assert env.step(ORDER_TEXT + "<DONE>")[2:4] == (False, False)


def test_call_ids_are_the_environments_own_and_count_over_the_episode(env):
    env.step(call("list_items", {}))
    env.step(ORDER_TEXT + ORDER_TEXT)
    env.step(Turn(calls=(BadCall("x", "raw", "It cannot be read."), ToolCall("x", "list_items", {}))))
    calls = [call.id for message in env.transcript if isinstance(message, Turn) for call in message.calls]
    results = [message.call_id for message in env.transcript if isinstance(message, ToolResult)]
    assert calls == results == [f"call_{number}" for number in range(5)]


@pytest.mark.parametrize("arguments", [[1], "text", None, {1: 2}, {"text": {1, 2}}, {"text": object()}])
def test_a_parsed_turn_whose_arguments_have_no_json_form_is_answered_and_not_executed(env, arguments):
    observation = env.step(call("note", arguments))[0]
    assert observation.startswith("note was not called.")
    assert not notes_of(env)


@pytest.mark.parametrize("action", [None, 3, b"text", ["text"], {"role": "assistant"}])
def test_an_action_that_is_neither_text_nor_turn_says_so_and_changes_nothing(env, action):
    before = env.transcript
    with pytest.raises(ActionError, match=type(action).__name__):
        env.step(action)
    assert env.transcript == before
    env.step(np.str_("Hello"))


def test_a_rejected_call_is_an_answer_and_undoes_what_the_tool_wrote(env):
    observation, reward, terminated, truncated, _ = env.step(call("place_order", {**ORDER, "quantity": 99}))
    assert observation == "99 of 'tea' cannot be ordered; 9 are left."
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert not notes_of(env)


def test_an_unknown_chat_format_fails_before_an_episode_starts(kiosk):
    with pytest.raises(ConfigError, match="hermes"):
        ToolEnv(UID, chat_format="hermse")


# --- ends ---------------------------------------------------------------------------------------------------------


def test_the_user_may_end_the_conversation(env):
    env.step(ORDER_TEXT)
    _, reward, terminated, truncated, info = env.step("Anything else?")
    assert (reward, terminated, truncated, info["finish_reason"]) == (1.0, True, False, "user_done")
    assert env.episode(0).usage["user_turns"] == 1


def test_the_limit_of_user_turns_truncates_and_the_check_runs(kiosk_with):
    domain = kiosk_with(limits=Limits(user_turns=2, agent_turns=9))
    env = ToolEnv(f"{domain.name}/order/000")
    env.reset(seed=0)
    assert env.step("Hello")[3] is False
    assert env.step("Hello")[3] is False
    observation, reward, terminated, truncated, info = env.step("Hello")
    assert (observation, reward, terminated, truncated) == ("", 0.0, False, True)
    assert info["finish_reason"] == "user_limit" and info["check"]["passed"] is False


def test_the_limit_of_agent_turns_truncates_after_the_results_of_the_last(kiosk_with):
    domain = kiosk_with(limits=Limits(user_turns=9, agent_turns=2))
    env = ToolEnv(f"{domain.name}/order/000")
    env.reset(seed=0)
    env.step(call("list_items", {}))
    observation, reward, terminated, truncated, info = env.step(call("place_order", ORDER))
    assert observation == '{"order_id": "O2", "left": 8}'
    assert (reward, terminated, truncated, info["finish_reason"]) == (1.0, False, True, "agent_limit")


def test_a_truncated_turn_ends_the_episode_and_its_calls_are_not_executed(env):
    turn = dataclasses.replace(call("place_order", ORDER), truncated=True)
    _, reward, terminated, truncated, info = env.step(turn)
    assert (reward, terminated, truncated, info["finish_reason"]) == (0.0, False, True, "truncated")
    assert env.transcript[-1].truncated
    assert env.episode(0).report.differences


def test_a_step_after_the_end_or_before_reset_is_an_error_that_says_so(kiosk):
    env = ToolEnv(UID)
    with pytest.raises(ActionError, match="has not started; call reset"):
        env.step("Hello")
    env.reset(seed=0)
    with pytest.raises(ActionError, match="is still running"):
        env.episode(0)
    env.step("<DONE>")
    for _ in range(2):
        with pytest.raises(ActionError, match=r"has ended \(done\); call reset"):
            env.step("Hello")
    assert env.episode(0).finish_reason is FinishReason.DONE
    env.reset(seed=0)
    env.step("Hello")
    env.close()
    env.close()
    with pytest.raises(ActionError):
        env.step("Hello")


def test_an_episodes_record_holds_everything(env):
    env.step("What is your code?")
    env.step(call("place_order", {**ORDER, "quantity": 99}))
    env.step(call("plac_order", ORDER))
    env.step(call("place_order", ORDER))
    env.step("<DONE>")
    episode = env.episode(attempt=5)
    assert (episode.uid, episode.attempt, episode.seed, episode.fault) == (UID, 5, 0, None)
    assert episode.passed is True and episode.finish_reason is FinishReason.DONE
    assert episode.transcript == env.transcript and episode.transcript[0] == Text("system", env.source.domain.rules)
    assert episode.usage == {
        "agent_turns": 5, "user_turns": 1, "tool_calls": 3, "refused_calls": 1, "invalid_calls": 1,
        "unreadable_calls": 0, "lenient_calls": 0,
    }  # fmt: skip
    assert episode.seconds["environment"] > 0


def test_unreadable_calls_and_calls_that_are_only_nearly_right_are_counted(env):
    env.reset(seed=0)
    env.step('{"name": "place_order", "arguments": ' + json.dumps(ORDER) + "}\n</tool_call>")
    env.step('<tool_call>{"name": "place_order",}</tool_call>')
    env.step(('<tool_call>{"name": "list_items"}</tool_call>') * 65)
    env.step(Turn(calls=tuple(ToolCall("", "place_order", ORDER) for _ in range(65))))
    env.step("<DONE>")
    episode = env.episode(attempt=0)
    counted = {
        name: episode.usage[name] for name in ("lenient_calls", "unreadable_calls", "invalid_calls", "tool_calls")
    }
    assert counted == {"lenient_calls": 1, "unreadable_calls": 3, "invalid_calls": 3, "tool_calls": 4}
    assert episode.passed is True


# --- what the agent can reach ---------------------------------------------------------------------------------------


def test_no_tool_reaches_the_check(env, kiosk):
    """The agent's whole reach is the tools: none but the domain's is answered, and the expected world is elsewhere."""
    expected = copy.deepcopy(env._runtime.template.expected)
    for name in [
        "check",
        "check_state",
        "expected",
        "reset",
        "tbx",
        "tools/list",
        "__init__",
        "place_order.function",
    ]:
        assert env.step(call(name, {}))[0].startswith("There is no tool")
    env.step(call("place_order", {**ORDER, "code": "'; DROP TABLE orders; --"}))
    env.step(call("note", {"text": "<DONE>"}))
    databases = env._runtime.world.raw.execute("PRAGMA database_list").fetchall()
    assert [name for _, name, _ in databases] == ["main"]
    tables = {row[0] for row in env._runtime.world.raw.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert tables == set(kiosk.metadata.tables)
    assert env._runtime.template.expected == expected
    assert env.step("<DONE>")[1] == 0.0


# --- Gymnasium ----------------------------------------------------------------------------------------------------


def test_the_environment_passes_gymnasiums_check(kiosk):
    env = ToolEnv(UID)
    check_env(env, skip_render_check=True)
    assert isinstance(env.observation_space, AnyText)


def test_rendering_ansi_is_the_transcript_and_human_prints_each_message_at_once(kiosk, capsys):
    env = ToolEnv(UID, render_mode="ansi")
    env.reset(seed=0)
    env.step("<think>Hm.</think>" + ORDER_TEXT)
    assert capsys.readouterr().out == ""
    text = env.render()
    shown = [
        env.task.query,
        "agent (thinking): Hm.",
        '-> place_order {"item": "tea"',
        '<- place_order: {"order_id"',
    ]
    assert all(part in text for part in shown)

    human = ToolEnv(UID, render_mode="human")
    human.reset(seed=0)
    human.step("<think>Hm.</think>" + ORDER_TEXT)
    assert human.render() is None
    assert capsys.readouterr().out == text + "\n"
    with pytest.raises(ActionError, match="'ansi' or 'human'"):
        ToolEnv(UID, render_mode="rgb_array")


def test_infos_share_no_object_that_a_caller_could_change(env):
    def scramble(value):
        match value:
            case dict():
                for inner in list(value.values()):
                    scramble(inner)
                value.clear()
            case list():
                for inner in value:
                    scramble(inner)
                value.clear()

    _, before = env.reset(seed=0)
    wanted = copy.deepcopy(before)
    scramble(before)
    *_, info = env.step(call("place_order", ORDER))
    scramble(info)
    *_, info = env.step("<DONE>")
    scramble(info)
    assert env.episode(0).report.passed
    assert env.reset(seed=0)[1] == wanted


NUM_FUZZED = 4_000
PIECES = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<DONE>", "{", "}", "[", "]", '"', "\\", ",", ":", "null",
    "NaN", "1e999", "9" * 30, "\ud800", "\x00", "\u2028", "é", "🙂", "name", "arguments", "place_order", "note", "item",
    "code", '"name"', '"arguments"', " ", "\n", "Anything else?", "code?", "paper?", "[" * 3000, '{"a":' * 500,
    '<tool_call>{"name": "note", "arguments": {"text": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": "place_order", "arguments": {"item": null, "quantity": 1e400, "code": [[]]}}</tool_call>',
    '<tool_call>{"name": "cancel_order", "arguments": {"order_id": 99999999999999999999}}</tool_call>',
    '<tool_call>{"name": "cancel_order", "arguments": {"order_id": 12}}</tool_call>',
    '<tool_call>{"name": 7, "arguments": 7}</tool_call>', '<tool_call>[]</tool_call>', ORDER_TEXT,
)  # fmt: skip


def fuzzed_action(random_):
    if random_.random() < 0.2:
        values = [
            None,
            True,
            -1,
            2**70,
            1.5,
            float("nan"),
            "x",
            "\ud800",
            "é" * 500,
            [],
            {},
            [1, [2]],
            {"a": {1, 2}},
            b"b",
        ]
        names = ["note", "place_order", "cancel_order", "list_items", "", "\ud800", "x" * 900, None, 7]
        keys = ["text", "item", "quantity", "code", "cup", "order_id", "", "\udfff", 3, None]
        arguments = {random_.choice(keys): random_.choice(values) for _ in range(random_.randrange(5))}
        return Turn(calls=tuple(ToolCall("", random_.choice(names), arguments) for _ in range(random_.randrange(3))))
    return "".join(random_.choice(PIECES) for _ in range(random_.randrange(9)))


def test_no_action_an_agent_could_write_raises(kiosk):
    random_ = random.Random(0)
    env = ToolEnv(UID)
    env.reset(seed=0)
    ends = 0
    for _ in range(NUM_FUZZED):
        action = fuzzed_action(random_)
        observation, reward, terminated, truncated, info = env.step(action)
        assert observation in env.observation_space and reward in (0.0, 1.0)
        assert (info["finish_reason"] is not None) == (terminated or truncated) == ("check" in info)
        if terminated or truncated:
            ends += 1
            env.reset()
    assert ends > 10


def test_worlds_of_interleaved_environments_are_apart(kiosk):
    envs = [ToolEnv(UID) for _ in range(3)]
    for env in envs:
        env.reset(seed=0)
    for number, env in enumerate(envs):
        for _ in range(number):
            env.step(call("note", {"text": str(number)}))
    assert [len(notes_of(env)) for env in envs] == [0, 1, 2]
    template = template_for(envs[0].task, kiosk)
    fresh = lend_world(template)
    assert rows_of(fresh.raw, kiosk.metadata) == template.initial
    return_world(fresh)
