"""Messages of a `.meta.yaml` file become messages of ours."""

import pytest

from tbx_envs.messages import BadCall, Text, ToolCall, ToolResult, Turn
from tbx_envs.thinkingbox.dataset.file_records import HistoryReference
from tbx_envs.thinkingbox.dataset.history import load_history, messages_of, meta_file_of
from tbx_envs.thinkingbox.dataset.problems import DatasetProblems
from tbx_envs.thinkingbox.dataset.yaml_files import YamlText

SPEECH = """
$history:
  "# left out": not even a list
  empty:
  "a: b":
  - {T: Text, role: user, content: zero, message_id: t0}
  - {T: Text, role: assistant, content: one}
  - {T: Text, role: user, content: two, message_id: t2}
  - {T: Text, role: assistant, content: three, message_id: t3, surprise: left alone}
something_else: of no concern
"""


def converted(*raw):
    return messages_of([dict(item) for item in raw], YamlText(None, ""))


def text(content, role="assistant", **metadata):
    return {"T": "Text", "role": role, "content": content, "metadata": metadata}


def call(name, id=None, **metadata):
    return {"T": "ToolCall", "name": name, "arguments": {"n": 1}, "metadata": metadata} | ({"id": id} if id else {})


def calls(*made):
    return {"T": "ParallelToolCall", "tool_calls": list(made)}


def result(name, content, id=None):
    return {"T": "ToolResponse", "name": name, "content": content} | ({"id": id} if id else {})


def made(name, id):
    return ToolCall(id, name, {"n": 1})


@pytest.mark.parametrize(
    ("raw", "messages"),
    [
        ([], ()),
        ([text("Rules.", "system"), text("Hi.", "user")], (Text("system", "Rules."), Text("user", "Hi."))),
        ([text(" Hello. \n")], (Turn("Hello."),)),
        ([text("Hm.", tag="think"), text("So.", tag="think"), text("Hello.")], (Turn("Hello.", reasoning="Hm.\nSo."),)),
        (
            [
                text("Wait."),
                calls(call("f", "1"), call("g", "2")),
                result("f", "F", "1"),
                result("g", "G", "2"),
                text("Done."),
            ],
            (
                Turn("Wait.", (made("f", "1"), made("g", "2"))),
                ToolResult("1", "f", "F"),
                ToolResult("2", "g", "G"),
                Turn("Done."),
            ),
        ),
        ([call("f", "1"), call("g", "2")], (Turn("", (made("f", "1"), made("g", "2"))),)),
        (
            [call("f", "1"), result("f", "F", "1"), text("F it is.", tag="direct"), text("Bye.")],
            (Turn("", (made("f", "1"),)), ToolResult("1", "f", "F"), Text("assistant", "F it is."), Turn("Bye.")),
        ),
        (
            [call("f", "1"), text("Hm.", tag="think"), text("a")],
            (Turn("", (made("f", "1"),)), Turn("a", reasoning="Hm.")),
        ),
        ([text("a"), text("b")], (Turn("a"), Turn("b"))),
        (
            [text("Hm.", tag="think"), text("", is_dummy=True), text("?", "user")],
            (Turn(reasoning="Hm."), Text("user", "?")),
        ),
    ],
)
def test_what_the_agent_says_and_calls_in_one_go_is_one_turn(raw, messages):
    assert converted(*raw) == messages


def test_a_call_that_could_not_be_read_stays_one():
    turn, answer = converted(call("f", "1", error="Error: no object"), result("f", "Error: no object", "1"))
    assert turn.calls == (BadCall("1", '{"name": "f", "arguments": {"n": 1}}', "Error: no object"),)
    assert answer == ToolResult("1", "", "Error: no object", "invalid")


def test_results_without_ids_belong_to_the_calls_in_their_order():
    turn, *answers = converted(
        calls(call("f"), call("f")), result("f", "first"), result("f", "second"), result("g", "of nothing")
    )
    ids = [item.id for item in turn.calls]
    assert len(set(ids)) == 2
    assert [(item.call_id, item.text) for item in answers[:2]] == [(ids[0], "first"), (ids[1], "second")]
    assert answers[2].call_id not in ids


WRONG = """
$history:
  a:
  - {T: Text, role: nobody, content: x}
  - {T: Text, role: user, content: x}
  - {T: Song}
  - {T: ToolResponse, name: f}
"""


def test_all_messages_that_are_none_are_told_with_their_lines(tmp_path):
    (tmp_path / "a.meta.yaml").write_text(WRONG)
    with pytest.raises(DatasetProblems) as raised:
        load_history(tmp_path / "a.meta.yaml", HistoryReference(key="a", start=0, end=""), (tmp_path / "a.py", 1))
    assert [problem.line for problem in raised.value.problems] == [4, 6, 7]


@pytest.fixture
def speech(tmp_path):
    path = tmp_path / "shop.meta.yaml"
    path.write_text(SPEECH)
    return path


def load(speech, reference):
    return load_history(speech, HistoryReference.model_validate(reference), (speech.with_name("shop.py"), 12))


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("a: b:0:", ["zero", "one", "two", "three"]),
        ("a: b:1:t3", ["one", "two"]),
        ("a: b:t2:", ["two", "three"]),
        ("a: b:t0:t2", ["zero", "one"]),
        ("a: b:4:", []),
        ({"key": "a: b", "start": "t2", "end": "t3"}, ["two"]),
        ({"key": "a: b", "start": 3, "end": ""}, ["three"]),
    ],
)
def test_a_reference_names_a_part_of_a_group(speech, reference, words):
    assert [message.text for message in load(speech, reference)] == words


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("a: c:0:", r"no group 'a: c'.*Did you mean 'a: b'"),
        ("empty:0:", r"no group 'empty'"),
        ("# left out:0:", "no group"),
        ("a: b:5:", "the group has 4 messages, counted from 0"),
        ("a: b:-1:", "begins at -1"),
        ("a: b:t9:", "no message has the message_id 't9'; there are: t0, t2, t3"),
        ("a: b:0:t9", "no message has the message_id 't9'"),
        ("a: b:2:t2", "ends before message 2 and begins at message 2"),
    ],
)
def test_a_reference_to_nothing_is_told_where_it_stands(speech, reference, said):
    with pytest.raises(DatasetProblems, match=rf"shop\.py line 12: history .*{said}"):
        load(speech, reference)


@pytest.mark.parametrize("reference", ["a", "a:0", ":0:", "", 5, {"key": "a"}, {"key": "a", "start": 1.5, "end": ""}])
def test_a_reference_that_is_none_is_rejected(reference):
    with pytest.raises(ValueError, match=r"HistoryReference"):
        HistoryReference.model_validate(reference)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a", "must be a mapping"),
        ("$history: [1]", r"history"),
        ("$history: {a: 5}", r"history\.a"),
        ("$history: {a: [5]}", "history"),
    ],
)
def test_a_file_of_messages_that_is_none_is_rejected(tmp_path, text, said):
    (tmp_path / "a.meta.yaml").write_text(text)
    with pytest.raises(DatasetProblems, match=said):
        load(tmp_path / "a.meta.yaml", "a:0:")


def test_messages_stand_beside_their_tests(tmp_path):
    assert meta_file_of(tmp_path / "shop.py") == meta_file_of(tmp_path / "shop.yaml") == tmp_path / "shop.meta.yaml"
    with pytest.raises(DatasetProblems, match=r"needs the file none\.meta\.yaml beside the test file"):
        load(tmp_path / "none.meta.yaml", "a:0:")
