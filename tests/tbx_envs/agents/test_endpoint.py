import dataclasses
import json
import logging
import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tbx_envs.agents import Attempt, Opening
from tbx_envs.agents.endpoint import (
    EndpointAgent,
    EndpointUse,
    endpoint_agent,
    turn_of,
    wire_ids,
    wire_messages,
    wire_turn,
)
from tbx_envs.agents.oracle import OracleAgent
from tbx_envs.chat import hermes
from tbx_envs.domains import load_domain
from tbx_envs.endpoints.client import ChatEndpoint, EndpointConfig
from tbx_envs.endpoints.costs import TokenUsage
from tbx_envs.endpoints.responses import Completion, EndpointCall
from tbx_envs.episode import FinishReason
from tbx_envs.errors import PolicyFault
from tbx_envs.evaluation.task_lists import find_task
from tbx_envs.evaluation.transcripts import episode_record
from tbx_envs.messages import DONE_MARK, BadCall, Text, ToolCall, ToolResult, Turn
from tbx_envs.runtime import EpisodeOptions
from tbx_envs.testing.loopback_endpoint import (
    Answers,
    EchoesKey,
    LoopbackEndpoint,
    Says,
    Silence,
    in_order,
)

KEY = "sk-loopback/0123456789+abc"
UID = "kiosk/order/000"
CLINIC = load_domain("clinic").uids("heldout")[::11]  # a dozen, of every family


@pytest.fixture
def agent_of(kiosk):
    """An agent of a server with this script, and the server; everything is closed at the end."""
    opened = []

    def make(reply, *, endpoint_settings=None, concurrency=None, **options):
        server = LoopbackEndpoint(checked(reply))
        settings = {"max_retries": 0, "concurrency": 4, **(endpoint_settings or {})}
        endpoint = ChatEndpoint(EndpointConfig(server.base_url, "small", **settings), sleep=lambda seconds: None)
        opened.extend([server, endpoint])
        return EndpointAgent(endpoint, concurrency=concurrency, options=EpisodeOptions(**options)), server

    yield make
    for one in reversed(opened):
        one.close()


def checked(reply):
    """The script behind a server that is as strict as OpenAI's about what it is sent."""

    def strict(asked):
        problem = problem_of(asked.body)
        return Answers(400, {"error": {"message": problem}}) if problem else reply(asked)

    return strict


def problem_of(body):
    """What OpenAI's server would reject, according to its documentation; "" when it would accept it."""
    waiting, known = [], set()
    for message in body["messages"]:
        role = message["role"]
        if role == "tool":
            if message["tool_call_id"] not in waiting:
                return f"a result without its call: {message}"
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            return f"calls without results: {waiting}"
        if role == "assistant":
            for call in message.get("tool_calls", ()):
                if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", call["function"]["name"]):
                    return f"a name that is none: {call}"
                if not isinstance(json.loads(call["function"]["arguments"]), dict):
                    return f"arguments that are no object: {call}"
                if call["id"] in known:
                    return f"a second call with the id of another: {call}"
                known.add(call["id"])
                waiting.append(call["id"])
        if not isinstance(message["content"], str) and not message.get("tool_calls"):
            return f"no content: {message}"
    return f"calls without results: {waiting}" if waiting else ""


def num_results(asked):
    return sum(message["role"] == "tool" for message in asked.body["messages"])


def play_one(agent, uid=UID, seed=0):
    (episode,) = agent.run([Attempt(uid, 0, seed)])
    return episode


def said(episode, kind):
    return [message for message in episode.transcript if isinstance(message, kind)]


# --- the same episodes as the oracle ------------------------------------------------------------------------


def replayed(asked):
    """The next turn of the oracle, for the task that was asked about."""
    query = next(message["content"] for message in asked.body["messages"] if message["role"] == "user")
    task = next(task for task in map(find_task, CLINIC) if task.query == query)
    if num_results(asked) == len(task.expected_calls):
        return Turn("<DONE>")
    call = task.expected_calls[num_results(asked)]
    return Turn(calls=(ToolCall("", call.tool, call.arguments),))


def structured(asked):
    turn = replayed(asked)
    return Says(turn.text, tuple((call.name, json.dumps(dict(call.arguments))) for call in turn.calls))


def raw(asked):
    return Says(hermes.render(replayed(asked)))


@pytest.mark.parametrize("reply", [structured, raw], ids=["structured", "raw"])
def test_a_server_that_makes_the_expected_calls_gives_the_oracles_episodes(agent_of, reply):
    attempts = [Attempt(uid, number % 2, number) for number, uid in enumerate(CLINIC)]
    wanted = {episode.uid: episode for episode in OracleAgent().run(attempts)}
    agent, server = agent_of(reply)
    played = list(agent.run(attempts))
    assert len(played) == len(CLINIC) >= 12
    for episode in played:
        oracle = wanted[episode.uid]
        assert episode.passed
        assert episode.seconds["policy"] > 0
        num_turns = oracle.usage["agent_turns"]
        tokens = {"sampled_tokens": 10 * num_turns, "given_tokens": 100 * num_turns, "cached_tokens": 60 * num_turns}
        assert dataclasses.replace(episode, seconds={}) == dataclasses.replace(
            oracle, seconds={}, usage={**oracle.usage, **tokens}
        )
    tools = {json.dumps(asked.body["tools"]) for asked in server.asked}
    assert len(tools) == 1 and "parameters" in tools.pop()


def test_a_conversation_goes_back_as_it_came_with_the_servers_ids_and_the_users_words(agent_of):
    replies = in_order(
        Says("Which code?", reasoning="I must ask."),
        Says("Looking.", (("list_items", ""), ("no_such.tool", '{"a": é}')), reasoning="Two at once."),
        Says("<DONE>"),
    )
    agent, server = agent_of(replies)
    episode = play_one(agent)
    words = [message.text for message in said(episode, Text)]
    listed, unreadable = said(episode, ToolResult)
    assert server.asked[2].body["messages"] == [
        {"role": "system", "content": words[0]},
        {"role": "user", "content": words[1]},
        {"role": "assistant", "content": "Which code?", "reasoning_content": "I must ask."},
        {"role": "user", "content": words[2]},
        {
            "role": "assistant",
            "content": "Looking.",
            "reasoning_content": "Two at once.",
            "tool_calls": [
                {"id": "sent_1_0", "type": "function", "function": {"name": "list_items", "arguments": "{}"}},
                {
                    "id": "sent_1_1",
                    "type": "function",
                    "function": {
                        "name": "no_such_tool",
                        "arguments": json.dumps({"text": 'no_such.tool({"a": é})'}, ensure_ascii=False),
                    },
                },
            ],
        },
        {"role": "tool", "tool_call_id": "sent_1_0", "name": "list_items", "content": listed.text},
        {"role": "tool", "tool_call_id": "sent_1_1", "content": unreadable.text},
    ]
    assert (listed.status, unreadable.status) == ("ok", "invalid")
    assert [turn.reasoning for turn in said(episode, Turn)] == ["I must ask.", "Two at once.", ""]


def test_a_history_is_sent_as_it_was_and_calls_are_counted_on_from_it(kiosk):
    call = ToolCall("call_0", "list_items", {"a": "é"})
    history = (Turn("Looking.", (call,)), ToolResult("call_0", "list_items", "tea"), Text("assistant", "We have tea."))
    messages = (Text("system", "Rules."), Text("user", "Hello"), *history, Text("user", "And cups?"))
    attempt = Attempt(UID, 0, 0)
    with (
        LoopbackEndpoint(checked(lambda asked: Says("", (("list_items", "{}"),)))) as server,
        ChatEndpoint(EndpointConfig(server.base_url, "m")) as endpoint,
    ):
        agent = endpoint_agent(endpoint, attempt, Opening(find_task(UID), messages, []), EndpointUse())
        assert next(agent) == Turn(calls=(ToolCall("call_1", "list_items", {}),))
        agent.send((ToolResult("call_1", "list_items", "cups"),))
        agent.close()
    function = {"name": "list_items", "arguments": '{"a": "é"}'}
    assert server.asked[0].body["messages"][2:] == [
        {
            "role": "assistant",
            "content": "Looking.",
            "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_0", "name": "list_items", "content": "tea"},
        {"role": "assistant", "content": "We have tea."},
        {"role": "user", "content": "And cups?"},
    ]
    assert "tools" not in server.asked[0].body
    assert [message.get("tool_call_id") for message in server.asked[1].body["messages"]][-1] == "sent_0_0"


def test_what_the_model_draws_follows_the_attempts_seed_and_its_turn(agent_of):
    agent, server = agent_of(lambda asked: Says("Hello" if asked.number % 2 == 0 else "<DONE>"), concurrency=1)
    list(agent.run([Attempt(UID, 0, 1), Attempt(UID, 1, 2), Attempt(UID, 2, 1)]))
    seeds = [asked.body["seed"] for asked in server.asked]
    assert seeds[0:2] == seeds[4:6] and len(set(seeds)) == 4
    assert all(0 <= seed < 2**31 for seed in seeds)


# --- reading what came --------------------------------------------------------------------------------------


def completion(text="", calls=(), **more):
    calls = tuple(EndpointCall(f"id_{n}", *call) for n, call in enumerate(calls))
    fields = {"reasoning": "", "reasoning_field": "", "finish_reason": "stop", "usage": TokenUsage(), **more}
    return Completion(text=text, tool_calls=calls, **fields)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('{"a": 1}', {"a": 1}),
        (' {"a": "}"}\n', {"a": "}"}),
        ("", {}),
        ("  ", {}),
        ("null", {}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ('{"a": 9223372036854775807}', {"a": 2**63 - 1}),
        ("{", "The arguments are not valid JSON. Use double quotes and no trailing commas."),
        ("{'a': 1}", "The arguments are not valid JSON. Use double quotes and no trailing commas."),
        ('{"a": 1,}', "The arguments are not valid JSON. Use double quotes and no trailing commas."),
        ('{"a": 1} {"b": 2}', "There is more text after the arguments. Give one JSON object."),
        ("[1]", "The arguments are one JSON object, not a list."),
        ("7", "The arguments are one JSON object, not a number."),
        ('"x"', "The arguments are a string that holds no JSON object. Write the object itself."),
        ('{"a": 1, "a": 2}', "The key 'a' is given twice."),
        ('{"a": 9223372036854775808}', "The number 9223372036854775808 is too large."),
        ('{"a": NaN}', "NaN is not a JSON number."),
        ('{"a": "\\ud800"}', "A string holds half of a character (a lone surrogate)."),
        ('{"a": ' * 40 + "1" + "}" * 40, "The call is nested deeper than 32 levels."),
        ("[" * 100_000, "The call is nested deeper than 32 levels."),
    ],
)
def test_arguments_are_read_as_strictly_as_in_text_and_never_raise(arguments, wanted):
    (call,) = turn_of(completion(calls=[("find", arguments)]), first_call=4).calls
    if isinstance(wanted, str):
        assert call == BadCall("call_4", f"find({arguments})", wanted)
    else:
        assert call == ToolCall("call_4", "find", wanted)


def test_a_call_without_a_name_is_answered_and_not_raised():
    (call,) = turn_of(completion(calls=[(" ", "{}")])).calls
    assert call.problem == "The call has no name. Give the tool's name as a string."


@given(st.text(), st.lists(st.tuples(st.text(), st.text() | st.sampled_from(['{"a": 1}', "{}"])), max_size=4))
def test_nothing_that_a_model_writes_raises_and_a_strict_server_takes_it_back(text, calls):
    written = completion(text, calls)
    turn = turn_of(written)
    sent_ids = wire_ids(turn, written, ())
    results = [ToolResult(call.id, getattr(call, "name", ""), "x") for call in turn.calls]
    chat = [wire_turn(turn, written, ["find"], sent_ids), *wire_messages(results, sent_ids)]
    assert problem_of({"messages": json.loads(json.dumps(chat))}) == ""


def test_calls_left_in_the_words_are_not_made_twice():
    text = 'Look.<tool_call>{"name": "pay", "arguments": {}}</tool_call>'
    assert [call.name for call in turn_of(completion(text)).calls] == ["pay"]
    turn = turn_of(completion(text, [("pay", "{}")]))
    assert [call.name for call in turn.calls] == ["pay"]


def test_reasoning_is_taken_from_its_field_and_from_the_words():
    turn = turn_of(completion("<think>\nSecond.\n</think>\n\nHello", reasoning="First."))
    assert (turn.text, turn.reasoning) == ("Hello", "First.\nSecond.")
    with_call = turn_of(completion("<think>Hm.</think>", [("find", "{}")]))
    assert (with_call.text, with_call.reasoning, len(with_call.calls)) == ("", "Hm.", 1)


def test_reasoning_goes_back_where_it_stood():
    in_words = completion("<think>\nHm.\n</think>\n\nHello")
    assert wire_turn(turn_of(in_words), in_words) == {"role": "assistant", "content": in_words.text}
    in_field = completion("Hello", reasoning="Hm.", reasoning_field="reasoning")
    assert wire_turn(turn_of(in_field), in_field) == {"role": "assistant", "content": "Hello", "reasoning": "Hm."}


@pytest.mark.parametrize("ids", [("", ""), ("same", "same")])
def test_ids_that_tell_no_calls_apart_are_replaced_by_those_of_the_episode(ids):
    written = dataclasses.replace(completion(), tool_calls=tuple(EndpointCall(i, "find", "{}") for i in ids))
    assert wire_ids(turn_of(written, first_call=3), written, ()) == {"call_3": "call_3", "call_4": "call_4"}


@pytest.mark.parametrize(
    ("given", "sent", "wanted"),
    [
        (["x"], {"y"}, ["x"]),
        (["x", "y"], {"y"}, ["call_7", "call_8"]),
        ([""], {"call_7"}, ["call_7_2"]),
        (["call_7"], {"call_7", "call_7_2"}, ["call_7_3"]),
        (["same", "same"], {"call_8", "call_7_2"}, ["call_7", "call_8_2"]),
    ],
)
def test_an_id_is_sent_once_in_a_conversation_whoever_gave_it(given, sent, wanted):
    written = dataclasses.replace(completion(), tool_calls=tuple(EndpointCall(i, "find", "{}") for i in given))
    assert list(wire_ids(turn_of(written, first_call=7), written, sent).values()) == wanted


@pytest.mark.parametrize("number", [lambda asked: 0, lambda asked: num_results(asked) % 2, num_results])
def test_a_server_that_numbers_its_calls_anew_is_sent_no_id_twice(agent_of, number):
    """The server of these tests rejects an id that it has seen; `call_1` is also an id of the episode's own."""

    def reply(asked):
        if num_results(asked) == 4:
            return Says(DONE_MARK)
        call = {"id": f"call_{number(asked)}", "function": {"name": "list_items", "arguments": "{}"}}
        if num_results(asked) == 1:  # and one answer gives no ids at all
            call["id"] = ""
        return Answers(body={"choices": [{"message": {"content": None, "tool_calls": [call]}}]})

    agent, server = agent_of(reply)
    episode = play_one(agent)
    assert (episode.fault, len(said(episode, ToolResult)), len(server.asked)) == (None, 4, 5)


def test_other_formats_of_calls_are_read_with_the_types_of_the_tools():
    text = "<tool_call>\n<function=find>\n<parameter=number>\n7\n</parameter>\n</function>\n</tool_call>"
    schemas = {"find": {"type": "object", "properties": {"number": {"type": "integer"}}}}
    (call,) = turn_of(completion(text), "qwen3_coder", schemas=schemas).calls
    assert dict(call.arguments) == {"number": 7}


# --- ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cut",
    [
        Says('<tool_call>{"name": "list_items", "arguments": {}}</tool_call><tool_c', finish_reason="length"),
        Says("", (("list_items", "{}"), ("list_items", '{"a')), finish_reason="length"),
        Says("I think that", finish_reason="length"),
    ],
)
def test_a_turn_that_was_cut_off_ends_the_episode_and_executes_nothing(agent_of, cut):
    agent, _ = agent_of(lambda asked: cut)
    episode = play_one(agent)
    assert (episode.finish_reason, episode.passed, episode.fault) == (FinishReason.TRUNCATED, False, None)
    assert said(episode, ToolResult) == []
    (turn,) = said(episode, Turn)
    assert not [call for call in turn.calls if isinstance(call, BadCall)]


def test_a_conversation_that_outgrows_the_context_is_cut_off_and_scored(agent_of):
    too_long = Answers(400, {"error": {"code": "context_length_exceeded", "message": "9 of 8"}})
    agent, _ = agent_of(in_order(Says("Hello"), too_long))
    episode = play_one(agent)
    assert (episode.finish_reason, episode.passed) == (FinishReason.TRUNCATED, False)
    assert episode.usage["sampled_tokens"] == 10


def test_a_task_that_never_fitted_the_context_is_a_fault(agent_of):
    agent, _ = agent_of(lambda asked: Answers(400, {"error": {"message": "maximum context length is 8"}}))
    episode = play_one(agent)
    assert episode.fault.kind == "policy" and "from the beginning" in episode.fault.message


def test_tokens_that_one_completion_did_not_count_are_unknown_for_the_episode(agent_of):
    agent, _ = agent_of(in_order(Says("Hello"), Says("<DONE>", usage={"prompt_tokens": 7})))
    usage = play_one(agent).usage
    assert usage["given_tokens"] == 107
    assert "sampled_tokens" not in usage and "cached_tokens" not in usage


# --- failures -----------------------------------------------------------------------------------------------


def test_an_endpoint_that_fails_voids_that_episode_and_disturbs_no_other(agent_of):
    def reply(asked):
        return Answers(500, {"error": {"message": "no memory"}}) if asked.number == 1 else Says("<DONE>")

    agent, _ = agent_of(reply, concurrency=1)
    episodes = list(agent.run([Attempt(UID, number, 0) for number in range(3)]))
    assert [episode.passed for episode in episodes] == [False, None, False]
    void = episodes[1]
    assert (void.reward, void.report, void.fault.kind) == (None, None, "policy")
    assert f"task {UID}: POST" in void.fault.message and "no memory" in void.fault.message
    assert void.usage["sampled_tokens"] == 0 and void.seconds["policy"] > 0


def test_the_tokens_of_a_void_episode_are_counted_too(agent_of):
    agent, _ = agent_of(in_order(Says("Hello"), Answers(500)))
    assert play_one(agent).usage["sampled_tokens"] == 10


def test_an_endpoint_that_answers_no_request_stops_the_agent_at_once(agent_of):
    agent, server = agent_of(lambda asked: Answers(401, {"error": "no"}), concurrency=2)
    asked_for = []

    def attempts():
        for number in range(100):
            asked_for.append(number)
            yield Attempt(UID, number, 0)

    with pytest.raises(PolicyFault, match=r"answered 401 \(no\)"):
        list(agent.run(attempts()))
    assert len(asked_for) < 10 and len(server.asked) < 10


def test_the_key_is_in_no_episode_and_no_log(agent_of, monkeypatch, caplog):
    monkeypatch.setenv("LOOPBACK_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    settings = {"api_key_env": "LOOPBACK_KEY"}
    calls = (("list_items", json.dumps({"key": KEY})),)
    replies = (Says(KEY, reasoning=KEY), Says("", calls), EchoesKey(400), EchoesKey(500))
    agent, server = agent_of(in_order(*replies), endpoint_settings=settings)
    episodes = [play_one(agent), play_one(agent)]
    assert server.asked[0].headers["authorization"] == f"Bearer {KEY}"
    assert [episode.fault.kind for episode in episodes] == ["policy", "policy"]
    written = json.dumps([episode_record(episode) for episode in episodes]) + repr(episodes) + caplog.text
    assert "[key]" in written and KEY not in written and json.dumps(KEY)[1:-1] not in written


# --- many at once -------------------------------------------------------------------------------------------


def test_as_many_episodes_run_at_the_same_time_as_the_endpoint_takes(agent_of):
    meeting = threading.Barrier(4)

    def reply(asked):
        meeting.wait(timeout=10)
        return Says("<DONE>")

    agent, server = agent_of(reply)
    episodes = list(agent.run([Attempt(UID, number, 0) for number in range(8)]))
    assert sorted(episode.attempt for episode in episodes) == list(range(8))
    assert not [episode for episode in episodes if episode.fault is not None]
    assert server.most_at_once == 4


def test_a_caller_that_stops_early_leaves_no_request_and_no_thread_behind(agent_of):
    def reply(asked):
        return Says("<DONE>") if asked.number == 0 else Silence()

    agent, server = agent_of(reply, concurrency=3, endpoint_settings={"timeout_s": 60.0})
    episodes = agent.run([Attempt(UID, number, 0) for number in range(50)])
    assert next(episodes).finish_reason == FinishReason.DONE
    episodes.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tbx-episodes")]
    assert len(server.asked) <= 4


def test_attempts_that_are_equal_each_give_an_episode(agent_of):
    agent, _ = agent_of(lambda asked: Says("<DONE>"))
    assert len(list(agent.run([Attempt(UID, 0, 0)] * 5))) == 5
