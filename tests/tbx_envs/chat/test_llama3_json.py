import json

import pytest

from tbx_envs.chat.interpretation import interpret
from tbx_envs.messages import BadCall, ToolCall, Turn


def call(name, parameters):
    return json.dumps({"name": name, "parameters": parameters}, ensure_ascii=False)


def read(raw, **options):
    return interpret(raw, "llama3_json", **options)


def only_call(raw):
    (found,) = read(raw).calls
    return found


def test_a_whole_message_that_is_a_call_is_one():
    assert read(f"\n{call('find', {'n': 1})} ") == Turn(calls=(ToolCall("call_0", "find", {"n": 1}),))


@pytest.mark.parametrize("between", [";", "; ", "\n", " ;\n", "<|python_tag|>"])
def test_several_calls_follow_each_other(between):
    turn = read(between.join([call("a", {}), call("b", {"t": "; }"}), call("c", {})]), first_call=4)
    assert turn.calls == (
        ToolCall("call_4", "a", {}),
        ToolCall("call_5", "b", {"t": "; }"}),
        ToolCall("call_6", "c", {}),
    )


def test_what_follows_the_python_tag_is_calls_and_what_stands_before_it_is_words():
    turn = read(f"Let me look.<|python_tag|>{call('a', {})}; {call('b', {})};")
    assert turn.text == "Let me look."
    assert [c.name for c in turn.calls] == ["a", "b"]


@pytest.mark.parametrize(
    "prose",
    [
        "Sure (done)",
        'I would write {"name": "delete", "parameters": {}}',
        '["a"]',
        '{"id": 3, "name": "Ada"}',
        "{name}",
        "{'name': 'find', 'parameters': {}}",
        '{"type": "bike", "name": "a"}',
        'Then <tool_call>{"name": "a",}</tool_call> comes.',
    ],
)
def test_prose_is_never_a_call(prose):
    assert read(prose) == Turn(text=prose)


def test_braces_quotes_and_tags_inside_strings_are_data():
    arguments = {"text": 'a } ; "b" <|python_tag|> {"name": "x"} \\ é 😀 </think>', "nested": {"l": [{}, [1.5, None]]}}
    assert only_call(call("note", arguments)).arguments == arguments
    turn = read(f"<think>I will.</think>\n\n{call('note', arguments)}")
    assert turn == Turn(calls=(ToolCall("call_0", "note", arguments),), reasoning="I will.")


def test_other_spellings_that_models_use_are_read():
    assert only_call('{"name": "a", "arguments": {"b": 1}}').arguments == {"b": 1}
    assert only_call('{"type": "function", "name": "a", "parameters": {"b": 1}}').arguments == {"b": 1}
    assert only_call('{"parameters": {"b": 1}, "name": "a"}').arguments == {"b": 1}
    assert only_call('{"name": "a"}').arguments == {}
    assert only_call('{"name": "a", "parameters": null}').arguments == {}
    assert only_call('{"name": "a", "parameters": "{\\"b\\": 1}"}').arguments == {"b": 1}


def test_a_call_drafted_inside_reasoning_is_never_executed():
    assert read(f"<think>{call('delete', {})}</think>I will wait.").calls == ()
    assert read(f"<think>{call('delete', {})}").calls == ()
    opened = read(f"{call('delete', {})} no</think>{call('find', {})}")
    assert [c.name for c in opened.calls] == ["find"]


# The words are read by the model: changing one is changing the benchmark, so they stand here in full.
NOT_COMPLETE = "The call is not a complete JSON object. Use double quotes, no trailing commas, and close every brace."
MORE_TEXT = "There is more text after the JSON object. Write calls only, with ; between them."
PROBLEMS = {
    '{"name": "a", "parameters": {"b": "c': NOT_COMPLETE,
    '{"name": "a",}': NOT_COMPLETE,
    '{"name": "a"} is what I would do.': MORE_TEXT,
    '{"name": "Ada", "age": 3}': "A call has only the keys name and parameters, not 'age'.",
    '{"name": "a", "parameters": {}, "arguments": {}}': (
        "A call has only the keys name and parameters, not 'arguments'."
    ),
    '{"name": "a", "parameters": [1]}': "The parameters are one JSON object, not a list.",
    '{"name": "a", "arguments": 1}': "The arguments are one JSON object, not a number.",
    '{"name": "a", "parameters": "b"}': (
        "The parameters are a string that holds no JSON object. Write the object itself."
    ),
    '{"name": 3}': "The call has no name. Give the tool's name as a string.",
    '{"parameters": {}}': "The call has no name. Give the tool's name as a string.",
    '{"name": "a", "parameters": {"b": 1, "b": 2}}': "The key 'b' is given twice.",
}


@pytest.mark.parametrize(("raw", "problem"), PROBLEMS.items(), ids=range(len(PROBLEMS)))
def test_what_cannot_be_read_is_answered_in_our_words(raw, problem):
    assert only_call(raw) == BadCall("call_0", raw, problem)


@pytest.mark.parametrize(
    ("raw", "problem"),
    {
        "": "The call is empty. Write a JSON object with a name and parameters.",
        'brave_search.call(query="a")': NOT_COMPLETE,
        "[1]": "A call is one JSON object with a name and parameters, not a list.",
    }.items(),
)
def test_what_follows_the_python_tag_must_be_a_call(raw, problem):
    bad = only_call("<|python_tag|>" + raw)
    assert isinstance(bad, BadCall)
    assert bad.problem == problem


def test_one_wrong_call_does_not_take_the_others_with_it():
    turn = read(f'{call("a", {})}; {{"name": 3}}; {call("c", {})}')
    assert [type(c) for c in turn.calls] == [ToolCall, BadCall, ToolCall]


def test_what_is_quoted_behind_a_broken_call_is_not_executed():
    turn = read(f'{{"name": "note", "parameters": {{"t": "not {call("delete", {})}"}}')
    assert [type(c) for c in turn.calls] == [BadCall]
