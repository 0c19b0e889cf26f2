"""Evidence is what the original's test context holds for the same episode."""

import json
import types

import pytest

from tbx_envs.messages import BadCall, Text, ToolCall, ToolResult, Turn
from tbx_envs.thinkingbox.grading.evidence import evidence_of

EPISODE = (
    Text("system", "Be kind."),
    Text("user", "Lend me a bike é"),
    Turn(
        "One moment.", (ToolCall("call_0", "find", {"kind": "cargo"}), BadCall("call_1", "{oops", "no JSON")), "Which?"
    ),
    ToolResult("call_0", "find", '{"bike": 7}'),
    ToolResult("call_1", "", "no JSON", "invalid"),
    Text("assistant", "Bike 7 is free."),
    Turn("Shall I lend you bike 7?"),
    Text("user", "Yes."),
    Turn(calls=(ToolCall("call_2", "lend", {"bike": 7}),)),
    ToolResult("call_2", "lend", "lent"),
    Turn("It is yours. <DONE>"),
)
EVIDENCE_OPTIONS = {
    "effects": {"bikes": {"result_db_hash": "a", "golden_db_hash": "a"}},
    "init_result": {"bikes": {"day": 3}},
    "session_id": "s-1",
    "metadata": {},
}


def evidence(transcript, **options):
    return evidence_of(transcript, **{**EVIDENCE_OPTIONS, **options})


def text(role, content, **metadata):
    return {"T": "Text", "metadata": metadata, "role": role, "content": content}


def call(id, name, arguments, **metadata):
    return {"T": "ToolCall", "metadata": metadata, "name": name, "arguments": arguments, "id": id}


def response(id, name, content):
    return {"T": "ToolResponse", "metadata": {}, "name": name, "content": content, "id": id}


def calls(*made, **metadata):
    return {"T": "ParallelToolCall", "metadata": metadata, "tool_calls": list(made)}


FIND = call("call_0", "find", {"kind": "cargo"})
UNREADABLE = call("call_1", "", {}, error="no JSON", raw="{oops")
LEND = call("call_2", "lend", {"bike": 7})


def test_an_episode_becomes_the_originals_messages_in_the_originals_order():
    assert evidence(EPISODE) == {
        **EVIDENCE_OPTIONS,
        "response": "It is yours. <DONE>",
        "tool_direct_responses": ["Bike 7 is free."],
        "tool_calls": [
            {"tool_call": FIND, "tool_response": response("call_0", "find", '{"bike": 7}')},
            {"tool_call": UNREADABLE, "tool_response": response("call_1", "", "no JSON")},
            {"tool_call": LEND, "tool_response": response("call_2", "lend", "lent")},
        ],
        "messages": [
            text("system", "Be kind."),
            text("user", "Lend me a bike é"),
            text("assistant", "Which?", tag="think"),
            text("assistant", "One moment.", tag="text"),
            calls(FIND, UNREADABLE),
            response("call_0", "find", '{"bike": 7}'),
            response("call_1", "", "no JSON"),
            text("assistant", "Bike 7 is free.", tag="direct"),
            text("assistant", "Shall I lend you bike 7?", tag="text"),
            text("user", "Yes.", is_user_llm=True),
            calls(LEND),
            response("call_2", "lend", "lent"),
            text("assistant", "It is yours. <DONE>", tag="text", is_done=True),
        ],
    }


def test_evidence_survives_a_file_and_shares_nothing_with_what_it_was_made_of():
    arguments = {"when": [1, 2]}
    effects = types.MappingProxyType({"bikes": types.MappingProxyType({"rows": (1, 2)})})
    made = evidence(
        (Turn(calls=(ToolCall("call_0", "find", arguments),)), ToolResult("call_0", "find", "")), effects=effects
    )
    assert json.loads(json.dumps(made)) == made
    arguments["when"].append(3)
    assert made["tool_calls"][0]["tool_call"]["arguments"] == {"when": [1, 2]}
    assert made["effects"] == {"bikes": {"rows": [1, 2]}}


@pytest.mark.parametrize(
    ("said", "response"),
    [
        ((), ""),
        ((Turn(reasoning="hm"),), ""),
        ((Turn("a"), Text("user", "b"), Turn(calls=(ToolCall("call_0", "find", {}),))), "a"),
        ((Turn("a"), Text("user", "b"), Turn("c", (ToolCall("call_0", "find", {}),))), "c"),
        ((Turn("a"), Text("assistant", "told")), "a"),
        ((Turn("a <DONE>"),), "a <DONE>"),
    ],
)
def test_the_response_is_the_last_thing_the_agent_wrote_to_the_user(said, response):
    assert evidence((Text("user", "Hello"), *said))["response"] == response


def test_a_call_that_ends_the_conversation_is_recorded_with_an_empty_response_and_no_message():
    turn = Turn(calls=(ToolCall("call_0", "find", {}), ToolCall("call_1", "hand_over", {"to": "desk"})))
    ended = call("call_1", "hand_over", {"to": "desk"}, is_end_turn_tool=True)
    for answered in ((), (ToolResult("call_1", "hand_over", ""),)):
        made = evidence((Text("user", "Hello"), turn, *answered), ends_turn={"hand_over"})
        assert made["messages"][1:] == [calls(call("call_0", "find", {}), ended, is_end_turn_tool=True)]
        assert made["tool_calls"] == [{"tool_call": ended, "tool_response": response("call_1", "hand_over", "")}]


def test_an_empty_answer_of_another_tool_is_a_message():
    said = (Text("user", "Hello"), Turn(calls=(ToolCall("call_0", "find", {}),)), ToolResult("call_0", "find", ""))
    assert evidence(said, ends_turn={"hand_over"})["messages"][-1] == response("call_0", "find", "")


def test_calls_that_were_cut_off_or_not_executed_are_said_and_not_done():
    for turn in (
        Turn(calls=(ToolCall("call_0", "hand_over", {}),), truncated=True),
        Turn(calls=(ToolCall("call_0", "a", {}),)),
    ):
        made = evidence((Text("user", "Hello"), turn), ends_turn={"hand_over"})
        assert made["tool_calls"] == []
        assert made["messages"][1]["tool_calls"][0]["metadata"] == {}


def test_the_calls_of_a_history_are_no_calls_of_the_episode_though_their_ids_are_alike():
    history = (
        Text("user", "Earlier"),
        Turn("Looking.", (ToolCall("call_0", "hand_over", {"old": 1}),)),
        ToolResult("call_0", "hand_over", "done"),
        Text("assistant", "Told before."),
        Turn("That was it."),
    )
    opening = (Text("system", "Be kind."), *history, Text("user", "Now this"))
    episode = (*opening, Turn(calls=(ToolCall("call_0", "find", {"new": 1}),)), ToolResult("call_0", "find", "found"))
    made = evidence((*episode, Turn("ok"), Text("user", "And?")), opening=len(opening), ends_turn=["hand_over"])
    new = {"tool_call": call("call_0", "find", {"new": 1}), "tool_response": response("call_0", "find", "found")}
    assert made["tool_calls"] == [new]
    assert made["messages"][2:4] == [
        text("assistant", "Looking.", tag="text"),
        calls(call("call_0", "hand_over", {"old": 1})),
    ]
    assert made["messages"][4] == response("call_0", "hand_over", "done")
    assert made["tool_direct_responses"] == ["Told before."]
    said_by_user = [message for message in made["messages"] if message.get("role") == "user"]
    assert [(m["content"], m["metadata"]) for m in said_by_user] == [
        ("Earlier", {}),
        ("Now this", {}),
        ("And?", {"is_user_llm": True}),
    ]


def test_evidence_read_from_a_file_is_graded_as_when_it_was_fresh(worker):
    code = "def __tb_test_fn(x, judge):\n    assert x.effects['bikes']['result_db_hash'] == 'a'\n    return 0.5\n"
    fresh = evidence(EPISODE)
    kept = json.loads(json.dumps(fresh))
    reports = [worker.grade(code, e, fixtures={}, judge=None, session=None, uid="a.py:b") for e in (fresh, kept)]
    assert reports[0] == reports[1] and reports[0].score == 0.5
