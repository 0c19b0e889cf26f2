import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tbx_envs.chat import hermes
from tbx_envs.chat.interpretation import interpret, known_formats, register_format
from tbx_envs.errors import ConfigError
from tbx_envs.messages import BadCall, ToolCall, Turn


def call(name, arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def only_call(raw):
    (found,) = interpret(raw).calls
    return found


def test_plain_words_are_a_message_and_stripped():
    assert interpret("  Hello there.\n") == Turn(text="Hello there.")


@pytest.mark.parametrize(
    "prose", ["Sure (done)", "find_patient(name='Ada')", '{"name": "find"}', "< tool_call >", "a < b"]
)
def test_prose_is_never_a_call(prose):
    assert interpret(prose) == Turn(text=prose)


def test_several_calls_keep_their_order_and_the_words_around_them():
    turn = interpret(f"First.{call('a', {'n': 1})}Then.\n{call('b', {})}", first_call=7)
    assert turn.text == "First.\nThen."
    assert turn.calls == (ToolCall("call_7", "a", {"n": 1}), ToolCall("call_8", "b", {}))


def test_braces_quotes_and_closing_tags_inside_strings_are_data():
    arguments = {
        "text": 'a } ] </tool_call> "b" <tool_call> {"name": "x"} \\ é 😀',
        "nested": {"l": [{}, [1.5, None]]},
    }
    assert only_call(call("note", arguments)).arguments == arguments


def test_a_call_drafted_inside_reasoning_is_never_executed():
    turn = interpret(f"<think>maybe {call('delete', {})}</think>I will wait.")
    assert turn.calls == ()
    assert turn.text == "I will wait."
    assert "delete" in turn.reasoning


def test_unclosed_reasoning_takes_all_the_rest():
    turn = interpret(f"Wait.<think>hm {call('delete', {})} and <DONE>")
    assert turn.text == "Wait."
    assert turn.calls == ()
    assert not turn.is_done


def test_reasoning_that_the_prompt_opened_is_split_off():
    turn = interpret(f"maybe {call('delete', {})} no</think>{call('find', {})}")
    assert [c.name for c in turn.calls] == ["find"]
    assert turn.reasoning.startswith("maybe")


def test_nested_reasoning_is_reasoning_up_to_its_last_end():
    turn = interpret(f"<think>a<think>b</think>{call('delete', {})}</think>done")
    assert turn.calls == ()
    assert turn.text == "done"


def test_reasoning_tags_inside_the_arguments_of_a_call_are_data():
    arguments = {"text": "</think> and <think>"}
    turn = interpret(call("note", arguments) + "ok")
    assert turn == Turn(text="ok", calls=(ToolCall("call_0", "note", arguments),))


def test_taking_out_reasoning_never_joins_two_halves_of_a_tag():
    turn = interpret('<tool_<think>x</think>call>{"name": "delete"}</tool_call>')
    assert turn.calls == ()


def test_missing_null_and_stringified_arguments_are_accepted():
    assert only_call('<tool_call>{"name": "a"}</tool_call>').arguments == {}
    assert only_call('<tool_call>{"name": "a", "arguments": null}</tool_call>').arguments == {}
    nested = json.dumps({"name": "a", "arguments": json.dumps({"n": 1, "t": "}"})})
    assert only_call(f"<tool_call>{nested}</tool_call>").arguments == {"n": 1, "t": "}"}


def test_a_complete_call_without_its_closing_tag_is_accepted_at_the_end_and_before_another():
    turn = interpret('<tool_call>{"name": "a"}\n<tool_call>\n{"name": "b"}\n')
    assert [c.name for c in turn.calls] == ["a", "b"]


# The words are read by the model: changing one is changing the benchmark, so they stand here in full.
BREAKS_OFF = "The call breaks off: no complete JSON object and no </tool_call>."
MORE_TEXT = "There is more text after the JSON object. Close the call with </tool_call>."
PROBLEMS = {
    "": "The call is empty. Write a JSON object with a name and arguments.",
    "</tool_call>": "The call is empty. Write a JSON object with a name and arguments.",
    '{"name": "a", "arguments": {"b": "c': BREAKS_OFF,
    '{"name": "a",}</tool_call>': "The call is not valid JSON. Use double quotes and no trailing commas.",
    "{'name': 'a'}</tool_call>": "The call is not valid JSON. Use double quotes and no trailing commas.",
    '{"name": "a"} so</tool_call>': MORE_TEXT,
    '{"name": "a"} I will wait.': MORE_TEXT,
    '[{"name": "a"}]</tool_call>': "A call is one JSON object with a name and arguments, not a list.",
    "7</tool_call>": "A call is one JSON object with a name and arguments, not a number.",
    "true</tool_call>": "A call is one JSON object with a name and arguments, not true or false.",
    "null</tool_call>": "A call is one JSON object with a name and arguments, not null.",
    '"a"</tool_call>': "A call is one JSON object with a name and arguments, not a string.",
    '{"arguments": {}}</tool_call>': "The call has no name. Give the tool's name as a string.",
    '{"name": 3}</tool_call>': "The call has no name. Give the tool's name as a string.",
    '{"name": "a", "args": {}}</tool_call>': "A call has only the keys name and arguments, not 'args'.",
    '{"name": "a", "arguments": [1]}</tool_call>': "The arguments are one JSON object, not a list.",
    '{"name": "a", "arguments": 0}</tool_call>': "The arguments are one JSON object, not a number.",
    '{"name": "a", "arguments": "b"}</tool_call>': (
        "The arguments are a string that holds no JSON object. Write the object itself."
    ),
    '{"name": "a", "arguments": {"b": 1, "b": 2}}</tool_call>': "The key 'b' is given twice.",
    '{"name": "a", "arguments": {"b": NaN}}</tool_call>': "NaN is not a JSON number.",
    '{"name": "a", "arguments": {"b": -Infinity}}</tool_call>': "-Infinity is not a JSON number.",
    '{"name": "a", "arguments": {"b": 1e999}}</tool_call>': "The number 1e999 is too large.",
    '{"name": "a", "arguments": {"b": 9223372036854775808}}</tool_call>': (
        "The number 9223372036854775808 is too large."
    ),
    '{"name": "a", "arguments": {"b": ["\\ud800"]}}</tool_call>': (
        "A string holds half of a character (a lone surrogate)."
    ),
    '{"name": "a", "arguments": ' + '{"a": ' * 40 + "1" + "}" * 41 + "</tool_call>": (
        "The call is nested deeper than 32 levels."
    ),
    "[" * 100_000: "The call is nested deeper than 32 levels.",
    '{"name": "a", "arguments": {"b": ' + "9" * 100_000 + "}}</tool_call>": (
        "The number 99999999999999999999 is too large."
    ),
}


@pytest.mark.parametrize(("payload", "problem"), PROBLEMS.items(), ids=range(len(PROBLEMS)))
def test_what_cannot_be_read_is_answered_in_our_words(payload, problem):
    bad = only_call("<tool_call>" + payload)
    assert isinstance(bad, BadCall)
    assert bad.problem == problem
    assert bad.raw == "<tool_call>" + payload


def test_one_unreadable_call_does_not_take_the_others_with_it():
    turn = interpret(f'{call("a", {})}<tool_call>{{"name": "b",}}</tool_call>{call("c", {})}')
    assert [type(c) for c in turn.calls] == [ToolCall, BadCall, ToolCall]
    assert [c.id for c in turn.calls] == ["call_0", "call_1", "call_2"]


def test_a_call_quoted_inside_an_unreadable_one_is_not_executed():
    turn = interpret(f'<tool_call>{{"name": "note", "arguments": {{"t": "not {call("delete", {})}"}}}}')
    assert [type(c) for c in turn.calls] == [BadCall]


@pytest.mark.parametrize(
    ("chat_format", "whole", "half"),
    [
        ("hermes", call("a", {}), '<tool_call>{"name": "delete", "argum'),
        (
            "qwen3_coder",
            "<tool_call>\n<function=a>\n</function>\n</tool_call>",
            "<tool_call>\n<function=delete>\n<parameter=x>\nA-1",
        ),
        ("llama3_json", '{"name": "a", "parameters": {}}', '; {"name": "delete", "parame'),
    ],
)
def test_a_call_that_a_token_limit_cut_off_is_no_mistake_of_the_policy(chat_format, whole, half):
    turn = interpret(whole + half, chat_format, truncated=True)
    assert turn.truncated
    assert turn.calls == (ToolCall("call_0", "a", {}),)
    assert turn.text == half.removeprefix("; ")
    assert [type(c) for c in interpret(whole + half, chat_format).calls] == [ToolCall, BadCall]


def test_an_unreadable_call_before_the_cut_stays_one():
    turn = interpret('<tool_call>{"name": "b",}</tool_call>And then I', truncated=True)
    assert [type(c) for c in turn.calls] == [BadCall]
    assert turn.text == "And then I"
    assert turn.truncated


def test_an_unknown_format_is_answered_with_near_names():
    with pytest.raises(ConfigError, match=re.escape("unknown chat format 'herms'. Did you mean 'hermes'?")):
        interpret("hi", "herms")


def test_a_format_is_registered_once_and_never_replaced(monkeypatch):
    monkeypatch.setattr("tbx_envs.chat.interpretation._FORMATS", {"hermes": hermes.parse})
    register_format("shout", lambda raw, ids, schemas: Turn(text=raw.upper()))
    assert interpret("hi", "shout").text == "HI"
    assert known_formats() == ("hermes", "shout")
    with pytest.raises(ConfigError, match="registered already"):
        register_format("hermes", hermes.parse)


any_text = st.text(st.characters(exclude_categories=()), max_size=60)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<DONE>", "<|python_tag|>")
BLOCKS = ("<function=", "a>", "</function>", "<parameter=", "b>\n", "\n</parameter>", "</parameter>")
SYNTAX = (
    *BLOCKS,
    '{"name":',
    '"parameters":',
    '{"type": "function",',
    ";",
    '"a"',
    '"arguments":',
    "{",
    "}",
    "[",
    "]",
    ",",
    '"',
    "\\",
    "\\ud800",
    "NaN",
    "1e999",
    "9" * 30,
)
pieces = st.sampled_from([*MARKERS, *SYNTAX, " ", "\n", "é", "😀", "\x00", "\ud800"])


FORMATS = ("hermes", "llama3_json", "qwen3_coder")
SCHEMAS = {"a": {"properties": {"b": {"type": ["integer", "array", "null"]}}}}
raw_text = st.lists(st.one_of(pieces, any_text), max_size=30).map("".join)


@pytest.mark.parametrize("chat_format", FORMATS)
@given(raw_text, st.booleans())
def test_no_text_whatever_raises_and_everything_read_can_be_encoded(chat_format, raw, truncated):
    turn = interpret(raw, chat_format, truncated=truncated, schemas=SCHEMAS)
    for found in turn.calls:
        text = (
            json.dumps(found.arguments, ensure_ascii=False, allow_nan=False)
            if isinstance(found, ToolCall)
            else found.problem
        )
        text.encode()
    (turn.text + turn.reasoning).encode()


@pytest.mark.parametrize("chat_format", FORMATS)
@given(raw_text)
def test_nothing_inside_closed_or_unclosed_reasoning_is_ever_a_call(chat_format, draft):
    draft = draft.replace("</think>", "")
    assert interpret("<think>" + draft, chat_format).calls == ()
    assert interpret("<think>" + draft + "</think>bye", chat_format).calls == ()


BLOCK = "<tool_call>\n<function=a>\n<parameter=b>\n[1]\n</parameter>\n</function>\n</tool_call>"
WELL_FORMED = {
    "hermes": '<think>hm</think>Ok.<tool_call>\n{"name": "a", "arguments": {"b": [1, "\\"}</c>"]}}\n</tool_call>' * 2,
    "llama3_json": '<|python_tag|>{"name": "a", "parameters": {"b": [1, "\\"};"]}}; {"name": "a", "parameters": null}',
    "qwen3_coder": f"<think>hm</think>Ok.\n\n{BLOCK}\n{BLOCK}",
}
mutations = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 4), pieces | st.characters()), min_size=1, max_size=4
)


@pytest.mark.parametrize("chat_format", FORMATS)
@given(mutations)
def test_a_mutated_call_is_read_or_answered(chat_format, changes):
    raw = WELL_FORMED[chat_format]
    assert [c.name for c in interpret(raw, chat_format, schemas=SCHEMAS).calls] == ["a", "a"]
    for place, removed, added in changes:
        position = int(place * len(raw))
        raw = raw[:position] + added + raw[position + removed :]
    for found in interpret(raw, chat_format, schemas=SCHEMAS).calls:
        if isinstance(found, BadCall):
            assert found.problem.endswith(".")
        else:
            assert found.name == found.name.strip() != ""
            json.dumps(found.arguments, allow_nan=False).encode()


words = st.text(max_size=20)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words
    | st.sampled_from(["</tool_call>", "<tool_call>", "</think>", "<think>", '"}', "{", "é", "😀", "\\", "<DONE>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
names = st.text(min_size=1, max_size=12).filter(lambda name: name == name.strip())


@given(
    st.lists(st.tuples(names, st.dictionaries(words, json_values, max_size=4)), max_size=4),
    st.sampled_from(["", "Ok."]),
)
def test_what_is_rendered_reads_back_the_same(calls, text):
    turn = Turn(
        text=text,
        calls=tuple(ToolCall(f"call_{i}", name, arguments) for i, (name, arguments) in enumerate(calls)),
        reasoning="Let me see.",
    )
    assert interpret(hermes.render(turn)) == turn


def test_a_broken_call_without_its_opening_tag_does_not_take_the_next_one_with_it():
    schemas = {"a": {}, "b": {}}
    turn = interpret(f'{{"name": "a", "arguments": {{}},}}\n</tool_call>\n{call("b", {})}', schemas=schemas)
    assert [type(c) for c in turn.calls] == [BadCall, ToolCall]


def test_calls_quoted_in_a_broken_one_are_not_executed_however_many_they_are():
    quoted = f"not {call('delete', {})} nor {call('delete', {})}"
    turn = interpret(f'<tool_call>{{"name": "note", "arguments": {{"t": "{quoted}"}}}}</tool_call>{call("a", {})}')
    assert [getattr(c, "name", None) for c in turn.calls] == [None, "a"]
    closed = f'<tool_call>{{"t": "</tool_call>" and {call("delete", {})} so}}</tool_call>'
    assert [type(c) for c in interpret(closed).calls] == [BadCall]
