"""Requests as clients send them, and the answers they get."""

import json

import pytest

from tbx_envs.messages import BadCall, Text, ToolCall, ToolResult, Turn
from tbx_envs.testing.byte_tokenizer import byte_tokenizer
from tbx_jax.policies.tokenizers import token_bytes
from tbx_jax.serving.chat_requests import RequestError, Served, completion, read_request, token_logprobs, up_to_stop

SERVED = Served("nano", top_k=None, top_p=1.0)
HELLO = {"role": "user", "content": "Hello"}
FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}


def read(served=SERVED, **body):
    return read_request(json.dumps({"model": "nano", "messages": [HELLO], **body}).encode(), served)


def refusal(**body):
    with pytest.raises(RequestError) as refused:
        read(**body)
    return refused.value


def called(call_id="call_0", arguments='{"name": "Ada"}', name="find"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("ids", "number"), [([], 0), (["call_0"], 1), (["call_7"], 8), (["x", "y"], 2), (["call_0", "call_0"], 2)]
)
def test_the_answers_calls_get_ids_that_the_conversation_does_not_have(ids, number):
    messages = [{"role": "user", "content": "Find Ada"}]
    for call_id in ids:
        call = {**called(), "id": call_id}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "content": "[]"},
        ]
    assert read(messages=messages).first_call == number


def test_a_request_with_many_problems_is_answered_with_a_short_list():
    messages = [{"role": "tool", "tool_call_id": "x" * 100, "content": ""}] * 5000
    with pytest.raises(RequestError) as raised:
        read(messages=messages)
    assert "4980 more problems" in str(raised.value) and len(str(raised.value)) < 10_000


def test_a_conversation_with_calls_is_read_as_it_was_said():
    asked = read(
        messages=[
            {"role": "developer", "content": "Rules."},
            {"role": "user", "content": [{"type": "text", "text": "Find "}, {"type": "text", "text": "Ada"}]},
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [called()]},
            {"role": "tool", "tool_call_id": "call_0", "content": "[]"},
        ],
        tools=[FIND],
    )
    assert asked.messages == (
        Text("system", "Rules."),
        Text("user", "Find Ada"),
        Turn(calls=(ToolCall("call_0", "find", {"name": "Ada"}),), reasoning="Hm."),
        ToolResult("call_0", "find", "[]"),
    )
    assert asked.tools == (FIND,) and asked.first_call == 1


def test_settings_are_read_and_fields_that_say_nothing_or_are_null_change_nothing():
    asked = read(
        max_tokens=7, temperature=0, seed=-3, stop="x", logprobs=True, user="me", n=1, stream=False, top_p=1, tools=None
    )
    assert (asked.max_tokens, asked.temperature, asked.seed, asked.stop, asked.logprobs) == (7, 0, -3, ("x",), True)
    assert read(max_completion_tokens=5, stop=["a", "b"]).max_tokens == 5
    plain = read(temperature=None, response_format={"type": "text"}, tool_choice="auto", stream_options=None)
    assert (plain.max_tokens, plain.temperature, plain.seed, plain.stop, plain.logprobs) == (
        None,
        None,
        None,
        (),
        False,
    )
    assert read(Served("nano", top_k=5, top_p=0.9), top_k=5, top_p=0.9).tools == ()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("stream", True, "only False is served; answers are not streamed here"),
        ("n", 2, "ask once for each answer"),
        ("top_p", 0.5, r"top_p 0.5: only 1.0 is served"),
        ("top_k", 5, "top_k 5: only -1 is served"),
        ("tool_choice", "required", "tool_choice 'required': only 'auto' is served"),
        ("response_format", {"type": "json_object"}, "only {'type': 'text'} is served"),
        ("presence_penalty", 0.5, "only 0 is served"),
        ("top_logprobs", 3, "only 0 is served"),
        ("max_tokens", 0, "max_tokens 0: wanted a positive integer"),
        ("max_completion_tokens", "5", "wanted a positive integer"),
        ("max_tokens", True, "wanted a positive integer"),
        ("temperature", -0.1, "wanted a number from 0 to 100"),
        ("temperature", "hot", "wanted a number from 0 to 100"),
        ("seed", 1.5, "wanted an integer of 64 bits"),
        ("seed", 2**63, "wanted an integer of 64 bits"),
        ("logprobs", 1, "wanted true or false"),
        ("stop", [""], "none of them empty"),
        ("stop", ["x"] * 17, "17 texts; 16 are served"),
        ("stop", 5, "wanted a text or a list of texts"),
        ("best_of", 2, "best_of: no such field is served"),
        ("tools", "find", "tools: a text; wanted a list"),
        ("tools", [{"type": "retrieval"}], r"tools\[0\]: wanted"),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": []}}], "wanted a JSON schema"),
        ("tools", [FIND, FIND], r"tools\[1\]: there is a tool 'find' already"),
        ("messages", [], "messages: an empty list; wanted a list of at least one message"),
        ("messages", "Hello", "messages: a text"),
        ("messages", ["Hello"], r"messages\[0\]: a text; wanted an object"),
        ("messages", [{"role": "critic", "content": ""}], "role 'critic'; wanted system"),
        ("messages", [{"role": "user"}], "content is missing"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "parts of type text"),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], "parts of type text"),
        ("messages", [HELLO, {"role": "assistant", "content": "Hi"}], "the last message is the assistant's"),
        ("messages", [{"role": "assistant"}, HELLO], "content is missing"),
        ("messages", [{"role": "assistant", "content": "", "tool_calls": 3}, HELLO], "tool_calls is a number"),
        ("messages", [{"role": "assistant", "content": "", "tool_calls": [{}]}, HELLO], "a call wants"),
        ("messages", [{"role": "assistant", "content": "", "reasoning": [1]}, HELLO], "reasoning_content is a list"),
        (
            "messages",
            [{"role": "tool", "tool_call_id": "x", "content": ""}],
            r"answers no call before it \(unanswered: none",
        ),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_with_its_field_and_what_to_do(field, value, words):
    error = refusal(**{field: value})
    assert (error.status, error.param, error.kind) == (400, field, "invalid_request_error")
    with pytest.raises(RequestError, match=words):
        raise error
    assert error.body["error"]["message"] == str(error)


def test_two_calls_of_one_id_and_two_results_of_one_call_are_refused():
    turn = {"role": "assistant", "content": "", "tool_calls": [called(), called()]}
    result = {"role": "tool", "tool_call_id": "call_0", "content": "ok"}
    assert "there is a call 'call_0' already" in str(refusal(messages=[turn, result]))
    turn = {"role": "assistant", "content": "", "tool_calls": [called()]}
    assert "messages[2]: tool_call_id 'call_0' answers no call" in str(refusal(messages=[turn, result, result]))


@pytest.mark.parametrize("wrong", [{"content": 5}, {"content": "", "tool_calls": [{}, called()]}], ids=str)
def test_a_fault_of_one_message_is_not_held_against_the_results_that_follow(wrong):
    turn = {"role": "assistant", "tool_calls": [called()], **wrong}
    error = refusal(messages=[turn, {"role": "tool", "tool_call_id": "call_0", "content": "ok"}])
    assert "messages[0]" in str(error) and "messages[1]" not in str(error)


def test_all_problems_of_a_request_come_in_one_message():
    error = refusal(n=3, stream=True, messages=[{"role": "user"}, {"role": "critic"}], tools={})
    for field in ("n 3", "stream True", "messages[0]", "messages[1]", "tools: an object"):
        assert field in str(error)
    assert error.param is None


def test_another_model_is_not_found_and_none_is_asked_for():
    error = refusal(model="gpt")
    assert (error.status, error.code) == (404, "model_not_found") and "there is 'nano'" in str(error)
    assert refusal(model=None).status == 400


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b'"text"', b"\xff"])
def test_a_body_that_is_no_json_object_is_refused(content):
    with pytest.raises(RequestError, match="the body is"):
        read_request(content, SERVED)


def test_arguments_that_are_no_json_object_come_back_to_the_policy_as_written():
    asked = read(
        messages=[
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [called("a", "[1]"), called("b", ""), called("c", {"x": 1})],
            },
            *({"role": "tool", "tool_call_id": call_id, "content": ""} for call_id in "abc"),
        ]
    )
    bad, empty, given = asked.messages[0].calls
    assert isinstance(bad, BadCall) and bad.raw == "find([1])"
    assert (empty.arguments, given.arguments) == ({}, {"x": 1})
    assert [message.name for message in asked.messages[1:]] == ["", "find", "find"]


ABOUT = {
    "request_id": "r", "model": "nano", "created": 5, "prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 3
}  # fmt: skip


def answered(turn, logprobs=None):
    answer = completion(turn, **ABOUT, logprobs=logprobs)
    return answer["choices"][0]["message"], answer["choices"][0]["finish_reason"], answer


def test_words_calls_and_reasoning_are_answered_apart():
    message, reason, answer = answered(Turn("Hi", reasoning="Hm."))
    assert (message, reason) == ({"role": "assistant", "content": "Hi", "reasoning_content": "Hm."}, "stop")
    assert answer["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    message, reason, _ = answered(Turn(calls=(ToolCall("call_0", "find", {"name": "Åse"}),)))
    assert (message["content"], reason) == (None, "tool_calls")
    assert message["tool_calls"] == [called(arguments='{"name": "Åse"}')]


def test_a_call_that_cannot_be_read_stands_in_the_words_and_a_cut_turn_says_length():
    message, reason, _ = answered(Turn("Look:", calls=(BadCall("call_0", "<tool_call>{", "?"),)))
    assert (message["content"], reason, "tool_calls" in message) == ("Look:\n<tool_call>{", "stop", False)
    _, reason, _ = answered(Turn(calls=(ToolCall("call_0", "find", {}),), truncated=True))
    assert reason == "length"


def test_token_logprobs_have_texts_and_ids():
    (entry,) = token_logprobs([7], [-0.5], lambda ids: "é" * len(ids))
    assert entry == {"token": "é", "token_id": 7, "logprob": -0.5, "bytes": [195, 169], "top_logprobs": []}


def test_the_bytes_of_the_parts_of_a_character_make_the_character():
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode("€\ufffd", add_special_tokens=False)
    entries = token_logprobs(
        tokens, [-0.5] * len(tokens), tokenizer.decode, lambda token: token_bytes(tokenizer, token)
    )
    assert len(entries) == 6 and all(entry["token"] == "\ufffd" for entry in entries)
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == "€\ufffd".encode()
    (unknown,) = token_logprobs([7], [-0.5], lambda ids: "\ufffd")
    assert unknown["bytes"] is None


def test_a_call_and_its_result_are_read_in_the_older_form_too():
    older = [
        {"role": "assistant", "content": None, "function_call": {"name": "find", "arguments": '{"x": 1}'}},
        {"role": "function", "name": "find", "content": "Ada"},
        {"role": "assistant", "content": None, "function_call": {"name": "find", "arguments": "{}"}},
        {"role": "function", "name": "find", "content": "Bo"},
    ]
    one, ada, two, bo = read(messages=older).messages
    assert (one.calls[0].name, one.calls[0].arguments) == ("find", {"x": 1})
    assert (ada.call_id, ada.text) == (one.calls[0].id, "Ada")
    assert (bo.call_id, bo.text) == (two.calls[0].id, "Bo") and one.calls[0].id != two.calls[0].id
    with pytest.raises(RequestError, match="answers no call before it"):
        read(messages=[{"role": "function", "name": "find", "content": "Ada"}])


def test_the_first_of_several_stops_ends_a_text():
    assert up_to_stop("abcdef", ("e", "cd")) == "ab"
    assert up_to_stop("abc", ("x",)) is None and up_to_stop("abc", ()) is None
