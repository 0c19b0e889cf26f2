import pytest

from tbx_envs.chat.interpretation import interpret
from tbx_envs.messages import BadCall, ToolCall, Turn

SCHEMAS = {"note": {"properties": {"text": {"type": "string"}, "count": {"type": "integer"}}}}


def call(name, **values):
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def read(raw, **options):
    return interpret(raw, "qwen3_coder", schemas=SCHEMAS, **options)


def only_call(raw):
    (found,) = read(raw).calls
    return found


def test_values_get_the_types_of_the_tools_schema_and_stay_text_without_one():
    assert only_call(call("note", text="35", count="35")).arguments == {"text": "35", "count": 35}
    assert only_call(call("unknown", count="35")).arguments == {"count": "35"}
    assert only_call(call("note", other="true")).arguments == {"other": "true"}


def test_a_call_without_parameters_has_no_arguments():
    assert only_call("<tool_call>\n<function=list>\n</function>\n</tool_call>") == ToolCall("call_0", "list", {})


@pytest.mark.parametrize("value", ["", "a", "two\nlines", "a\r"])
def test_line_breaks_of_windows_at_the_tags_are_no_part_of_the_value(value):
    assert only_call(call("note", text=value).replace("\n", "\r\n")).arguments == {"text": value.replace("\n", "\r\n")}
    assert only_call(call("note", text=value)).arguments == {"text": value}


def test_several_calls_keep_their_order_and_the_words_around_them():
    turn = read(f"First.\n\n{call('a')}\n{call('b', x='1')}Then.", first_call=7)
    assert turn.text == "First.\nThen."
    assert turn.calls == (ToolCall("call_7", "a", {}), ToolCall("call_8", "b", {"x": "1"}))


@pytest.mark.parametrize(
    "value",
    [
        "",
        "\n",
        "  two\nlines  ",
        "\nfirst line empty, last too\n",
        "a </parameter> b",
        "use <parameter=text> or </function> here",
        "<b>bold</b>\n<p>\n</pre>",
        "<think>no</think>",
        "</think>",
        '{"a": "b"}',
        "é 😀 <|im_end|>",
    ],
)
def test_whatever_stands_on_lines_of_its_own_is_the_value(value):
    turn = read(call("note", text=value, count=2) + "\n" + call("note", text="other"))
    assert [c.arguments for c in turn.calls] == [{"text": value, "count": 2}, {"text": "other"}]


@pytest.mark.parametrize(
    "value",
    [
        "</parameter>",
        "a</parameter>\n<parameter=count>b",
        "x\n</parameter>",
        "a</parameter>",
        "1037\n<parameter=cup>\nown",
        "1037 <parameter=cup>\nown",
        "1037\n<param=cup>\nown",
        "1037\n  <PARAMETER=cup>\nown",
        "a\n  <function=delete>",
        "</function>\n</tool_call>",
        call("delete"),
        "<tool_call>",
        *(
            f"a\n{tag}\nb"
            for tag in ("</paramter>", "</param>", "</parameters>", "< /parameter>", "</parameter", "</text>")
        ),
        *(f"a\n{tag}\nb" for tag in ("<parameter>", "<\\parameter>", "</Parameter>", "[/parameter]", "</funtion>")),
    ],
)
def test_a_value_in_which_a_line_is_markup_has_two_readings_and_neither_is_executed(value):
    for turn in (read(call("note", text=value, count=2) + call("note", text="other")), read(call("note", text=value))):
        assert [type(c) for c in turn.calls] == [BadCall]
        assert "'text'" in turn.calls[0].problem
        assert turn.text == ""


PLACE = """<tool_call>
<function=place_order>
<parameter=item>
bun
</parameter>
<parameter=code>
1037
<parameter=cup>
own
</parameter>
</function>
</tool_call>"""


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        (PLACE, "code"),
        (PLACE.replace(">\n", ">").replace("\n<", "<"), "code"),
        (PLACE.replace("1037\n", "1037 "), "code"),
        (PLACE.replace("<parameter=cup>\nown\n</parameter>\n", "") + call("cancel_order", id="1"), "code"),
        (PLACE.replace("own\n</parameter>\n", "own\n") + call("cancel_order", id="1"), "code"),
    ],
)
def test_a_parameter_that_is_not_closed_swallows_neither_the_next_one_nor_the_next_call(raw, key):
    (bad,) = read(raw).calls
    assert isinstance(bad, BadCall)
    assert repr(key) in bad.problem


def test_a_value_may_stand_on_the_line_of_its_tags():
    raw = "<tool_call><function=note><parameter=text>a </b> c</parameter><parameter=count>3</parameter></function>"
    assert only_call(raw + "</tool_call>").arguments == {"text": "a </b> c", "count": 3}


def test_a_value_may_end_on_its_last_line():
    raw = "<tool_call>\n<function=note>\n<parameter=text>\na\nb</parameter>\n</function>\n</tool_call>"
    assert only_call(raw).arguments == {"text": "a\nb"}


def test_an_empty_value_may_have_no_line():
    raw = "<tool_call>\n<function=note>\n<parameter=text>\n</parameter>\n</function>\n</tool_call>"
    assert only_call(raw).arguments == {"text": ""}


def test_a_complete_block_without_its_closing_tag_is_accepted_at_the_end_and_before_another():
    turn = read("<tool_call>\n<function=a>\n</function>\n<tool_call>\n<function=b>\n</function>\n")
    assert [c.name for c in turn.calls] == ["a", "b"]


@pytest.mark.parametrize(
    "prose",
    [
        "Sure (done)",
        '{"name": "find"}',
        "I would use <function=find>.",
        "< tool_call >",
    ],
)
def test_prose_is_never_a_call(prose):
    assert read(prose) == Turn(text=prose)


def test_a_call_drafted_inside_reasoning_is_never_executed():
    turn = read(f"<think>maybe {call('delete', x='1')}</think>I will wait.")
    assert turn == Turn(text="I will wait.", reasoning="maybe " + call("delete", x="1"))
    opened = read(f"maybe {call('delete')} no</think>\n\n{call('find')}")
    assert [c.name for c in opened.calls] == ["find"]
    assert read(f"<think>hm {call('delete')}").calls == ()


# The words are read by the model: changing one is changing the benchmark, so they stand here in full.
NO_BLOCK = "The call has no function block. Write <function=name>, its parameters and </function>."
PROBLEMS = {
    "": NO_BLOCK,
    "</tool_call>": NO_BLOCK,
    '\n{"name": "a", "arguments": {},}\n</tool_call>': NO_BLOCK,
    "<function=a": NO_BLOCK,
    "<function=>\n</function>": "The call has no name. Give the tool's name in <function=name>.",
    "<function=a>": "The call breaks off: no </function>.",
    "<function=a>\n<parameter=b>\nhalf": "The call breaks off: the parameter 'b' does not end.",
    "<function=a>\n<parameter=b>\n1\n</parameter>\n": "The call breaks off: the parameter 'b' does not end.",
    "<function=a>\nb=1\n</function></tool_call>": "Between <function=a> and </function> stand only parameters.",
    "<function=a>\n</tool_call>": "Between <function=a> and </function> stand only parameters.",
    "<function=a><parameter=b>1</parameter><parameter=b>2</parameter></function>": "The parameter 'b' is given twice.",
    "<function=a>\n</function>\nso</tool_call>": (
        "There is more text after </function>. Close the call with </tool_call>."
    ),
}


@pytest.mark.parametrize(("block", "problem"), PROBLEMS.items(), ids=range(len(PROBLEMS)))
def test_what_cannot_be_read_is_answered_in_our_words(block, problem):
    bad = only_call("<tool_call>" + block)
    assert isinstance(bad, BadCall)
    assert bad.problem == problem
    assert bad.raw == "<tool_call>" + block


def test_one_unreadable_call_does_not_take_the_others_with_it():
    turn = read(f"{call('a')}<tool_call>b()</tool_call>{call('c')}")
    assert [type(c) for c in turn.calls] == [ToolCall, BadCall, ToolCall]
