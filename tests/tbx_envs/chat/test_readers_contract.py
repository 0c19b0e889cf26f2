"""The reader's contract (`tbx_envs.chat`), for every format.

The writers below are the oracle of what a call looks like: they render what the templates of each format render
(`test_real_templates.py` has the templates themselves).
"""

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbx_envs.chat import function_block, parts, payload, reasoning, turn_reader
from tbx_envs.chat import llama3_json as llama3_json_reader
from tbx_envs.chat.interpretation import interpret, known_formats
from tbx_envs.messages import BadCall, ToolCall

TOOLS = {
    "note": {"properties": {"text": {"type": "string"}, "cup": {"type": "string"}, "count": {"type": "integer"}}},
    "cancel": {"properties": {"code": {"type": "string"}}},
}


def hermes(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def llama3_json(name, arguments):
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


def qwen3_coder(name, arguments):
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


WRITERS = {"hermes": hermes, "llama3_json": llama3_json, "qwen3_coder": qwen3_coder}
BETWEEN = {"hermes": "\n", "llama3_json": "; ", "qwen3_coder": "\n"}
every_format = pytest.mark.parametrize("chat_format", WRITERS)


def read(raw, chat_format):
    return interpret(raw, chat_format, schemas=TOOLS)


def made(turn):
    return [(call.name, dict(call.arguments)) for call in turn.calls if isinstance(call, ToolCall)]


def test_every_known_format_is_held_to_the_contract():
    assert set(known_formats()) == set(WRITERS)


# --- (a) never raises, (c) executes only what has one reading, (d) what is none says what is wrong ------------------

CALLS = [
    ("note", {"text": "bun, please", "cup": "own", "count": 2}),
    ("cancel", {"code": "1037"}),
    ("note", {"text": "two\nlines", "count": 3}),
]
# A tag, a quote with a brace, or one character of syntax: what models leave out, double, misspell or add.
PIECE = re.compile(r"</?[a-z_]+(?:=[a-z_]+)?>|[{}\[\]\",:;]|\n")
ADDED = ("<tool_call>", "</tool_call>", "</parameter>", "</paramter>", "<parameter=cup>", "</function>",
         "<function=note>", "<think>", "</think>", '"', "{", "}", "\n", "```json\n",
         "<|python_tag|>", "so ")  # fmt: skip


def damaged(text):
    """(what was done, text): `text` with each piece of markup left out, doubled, misspelt, or replaced by another."""
    for piece in PIECE.finditer(text):
        before, tag, after = text[: piece.start()], piece[0], text[piece.end() :]
        yield f"without {tag!r} at {piece.start()}", before + after
        yield f"twice {tag!r} at {piece.start()}", before + tag * 2 + after
        if len(tag) > 3:
            yield f"misspelt {tag!r} at {piece.start()}", before + tag[:4] + tag[5:] + after
        for other in ADDED:
            yield f"{other!r} before {tag!r} at {piece.start()}", before + other + tag + after


@every_format
def test_a_damaged_call_is_read_as_it_was_meant_or_not_at_all(chat_format):
    whole = BETWEEN[chat_format].join(WRITERS[chat_format](*call) for call in CALLS)
    assert made(read(whole, chat_format)) == CALLS
    silent = 0
    for done, text in damaged(whole):
        turn = read(text, chat_format)
        for _, arguments in made(turn):
            for value in map(str, arguments.values()):  # a value takes in no other value and no other call
                assert sum(word in value for word in ("bun", "own", "1037", "lines")) <= 1, (done, text)
                assert len(value) <= 11 + max(map(len, ADDED)), (done, text)
        for call in turn.calls:
            assert isinstance(call, ToolCall) or call.problem.endswith("."), (done, text)
        silent += not turn.calls and not turn.reasoning
    assert silent == 0


@every_format
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*ADDED, *map(str, "abc<>/="), "<parameter=text>\n", "note", '"name":']), max_size=25))
def test_no_text_makes_a_reader_raise(chat_format, pieces):
    for call in read("".join(pieces), chat_format).calls:
        assert isinstance(call, ToolCall) or call.problem


@every_format
def test_a_call_in_reasoning_is_never_executed_closed_or_not(chat_format):
    call = WRITERS[chat_format](*CALLS[0])
    for draft in (call, call[:-3], call + call, "so " + call):
        assert made(read(f"<think>{draft}", chat_format)) == []
        assert made(read(f"<think>{draft}</think>done", chat_format)) == []
        assert made(read(f"{draft}</think>{WRITERS[chat_format](*CALLS[1])}", chat_format)) == [CALLS[1]]


BLOCK = "<function=cancel>\n<parameter=code>\n1\n</parameter>\n</function>"
OBJECT = '{"name": "cancel", "arguments": {"code": "1"}}'
OTHER = '{"name": "cancel", "parameters": {"code": "1"}}'
NEARLY = [
    BLOCK + "\n</tool_call>",
    BLOCK,
    f"Let me see.\n\n{BLOCK}\n</tool_call>",
    f"```xml\n{BLOCK}\n```",
    f"<tool_call>\n{BLOCK}\n</tool_call>",
    f"<tool_call>{OBJECT}</tool_call>",
    f"<tool_call>{OTHER}</tool_call>",
    f"<tool_call>\n```json\n{OBJECT}\n```\n</tool_call>",
    OBJECT + "\n</tool_call>",
    f"Let me see.\n{OBJECT}",
    f"Let me see.\n{OTHER}",
    f"```json\n{OTHER}\n```",
    f"```\n{OBJECT}\n```",
    f"[{OBJECT}]",
    f'{{"type": "function", "function": {OBJECT}}}',
    f"<|python_tag|>{OTHER}",
    f"<|python_tag|>[{OTHER}]",
    f'{{"id": "call_0", "type": "function", "function": {OBJECT}}}',
]


@every_format
@pytest.mark.parametrize("text", NEARLY)
def test_a_call_that_is_nearly_right_and_has_one_reading_is_read_and_counted(chat_format, text):
    turn = read(text, chat_format)
    assert made(turn) == [("cancel", {"code": "1"})] and len(turn.calls) == 1
    windows = read(text.replace("\n", "\r\n"), chat_format)
    assert (made(windows), windows.text) == (made(turn), turn.text)
    own = {"hermes": [NEARLY[5]], "qwen3_coder": [NEARLY[4]], "llama3_json": [NEARLY[15]]}[chat_format]
    assert turn.num_lenient == (text not in own)
    assert turn.text == ("Let me see." if text.startswith("Let") else "")


@every_format
@pytest.mark.parametrize("text", [*NEARLY, "  " + BLOCK, f"[{OBJECT}, {OBJECT}]", f"A.\n{OBJECT}</tool_call> {BLOCK}"])
def test_tags_of_reasoning_in_a_value_of_a_call_are_data_however_the_call_is_written(chat_format, text):
    value = "a <think>b</think> c"
    text = text.replace('"1"', f'"{value}"').replace("\n1\n", f"\n{value}\n")
    turn = read(text, chat_format)
    assert {arguments["code"] for _, arguments in made(turn)} == {value} and not turn.reasoning


@every_format
@pytest.mark.parametrize("text", NEARLY)
def test_a_call_that_is_complete_only_without_the_reasoning_in_it_is_not_made(chat_format, text):
    """Quotes in the reasoning end the value, so it is no data; and the value without it is not what was written."""
    for within in ('a <think>say "it"</think> c', "a <think>\n</parameter>\n</think> c"):
        written = text.replace('"1"', f'"{within}"').replace("\n1\n", f"\n{within}\n")
        turn = read(written, chat_format)
        assert made(turn) == [] or {arguments["code"] for _, arguments in made(turn)} == {within}
        assert turn.calls


@every_format
@pytest.mark.parametrize(
    "text",
    [
        f"I would write {OBJECT}",
        f"Use {BLOCK} for that.",
        f"Write\n{OBJECT}\nto cancel it.",
        f"```json\n{OBJECT}\n```\nThat is how.",
        f"[{OBJECT}, 3]",
        '{"name": "cancel", "args": {"code": "1"}}',
        OBJECT[:-1],
        OBJECT.replace('"', "'"),
        BLOCK.replace("</parameter>\n", ""),
        "<function=cancel>\n<parameter=code>\n1",
        "Done.\n</tool_call>",
    ],
)
def test_what_was_meant_as_a_call_and_is_none_is_answered_and_never_executed(chat_format, text):
    turn = read(text, chat_format)
    assert [type(call) for call in turn.calls] == [BadCall]
    assert turn.calls[0].problem.endswith(".")
    assert turn.num_lenient == 0


@every_format
@pytest.mark.parametrize(
    "prose",
    [
        "I would use <function=cancel> here.",
        'The record is [{"id": 3}] and {name}.',
        'Here it is:\n{"id": 3, "name": "Ada"}',
        'Here it is:\n{"name": "Ada", "arguments": "none"}',
        'Here it is:\n[{"name": "cancel"}]',
        "cancel(code='1')",
        "a < b, c > d; [x]",
        "```python\nprint({})\n```",
    ],
)
def test_words_about_tools_and_other_json_stay_words(chat_format, prose):
    turn = read(prose, chat_format)
    assert (turn.text, turn.calls) == (prose, ())


@every_format
def test_of_more_calls_than_a_turn_may_have_none_is_made_and_the_answer_is_short(chat_format):
    call = WRITERS[chat_format]("cancel", {"code": "1"})
    most = BETWEEN[chat_format].join([call] * parts.MAX_CALLS)
    assert len(made(read(most, chat_format))) == parts.MAX_CALLS
    (bad,) = read(most + BETWEEN[chat_format] + call, chat_format).calls
    assert bad.problem == "The turn has more than 64 calls, so none of them was made. Make fewer calls at once."


# --- (e) what a template wrote is read back -------------------------------------------------------------------------

WORDS = ("a", " ", "\n", '"', "\\", "{", "}", "</b>", "<p>", "é", "😀", ";", "<DONE>", "null", "use <tool_call> here ")
TAGS = ("<tool_call>", "</tool_call>", "</think>", "<think>", "<parameter=cup>", "</parameter>", "</function>")


@every_format
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_written_as_templates_write_it_is_read_back_to_the_same_calls(chat_format, data):
    """JSON escapes everything; a format without escapes has no values with its tags at the edges of a line."""
    pieces = WORDS if chat_format == "qwen3_coder" else WORDS + TAGS
    text = st.lists(st.sampled_from(pieces), max_size=8).map("".join)
    arguments = st.fixed_dictionaries({}, optional={"text": text, "cup": text, "count": st.integers(-9, 9)})
    calls = data.draw(st.lists(st.tuples(st.sampled_from(["note", "nothing"]), arguments), min_size=1, max_size=3))
    if chat_format == "qwen3_coder":
        text_of = {"note": lambda value: value, "nothing": str}  # without a schema, values are text
        meant = [(name, {key: text_of[name](value) for key, value in given_.items()}) for name, given_ in calls]
        if any("use <tool_call> here" in str(v) and starts_line(v) for _, g in calls for v in g.values()):
            return
    else:
        meant = calls
    turn = read(BETWEEN[chat_format].join(WRITERS[chat_format](*call) for call in calls), chat_format)
    assert made(turn) == meant and turn.num_lenient == 0 and not turn.text


def starts_line(value):
    return re.search(r"(?m)^[ \t]*<tool_call>|<tool_call>[ \t]*$", str(value)) is not None


# --- (b) linear -----------------------------------------------------------------------------------------------------

UNITS = [
    "<parameter=p{n}>\nx</parameter>",
    "<tool_call>x</tool_call>",
    "<tool_call>[",
    "<tool_call>{{",
    '<tool_call>{{"name": ',
    "<tool_call>",
    "</tool_call>",
    "<tool_call>\n<function=note>\n<parameter=p{n}>\nx\n</parameter>\n",
    "<tool_call><function=a><parameter=p{n}>\nx\n</parameter>\n<parameter=q{n}>",
    "\n<function=note>\n<parameter=text>\n",
    "\n<function=a></function> so ",
    "<function=",
    "<parameter=",
    "</parameter>",
    "\n</parameter>\n",
    "</parameter>      ",
    "<think>",
    "</think>",
    "<think></think>",
    '\n{{"name": "note", ',
    '\n{{"name": "cup", "arguments": ',
    '[{{"name":',
    '\n{{"name": 1}} so',
    '{{"name": "note", "parameters": {{}}}}; ',
    "{{",
    "[",
    '"',
    "\\",
    "```json\n",
    "<|python_tag|>",
    "< ",
    "</",
    " ",
    "\n",
    ";",
]


class Visits:
    """Counts the characters that readers visit: in strings, patterns and JSON."""

    def __init__(self, monkeypatch):
        self.count = 0
        for module in (turn_reader, function_block, parts, reasoning, llama3_json_reader):
            for name, value in list(vars(module).items()):
                if isinstance(value, re.Pattern):
                    monkeypatch.setattr(module, name, CountedPattern(value, self))
        monkeypatch.setattr(payload, "_DECODER", CountedDecoder(payload._DECODER, self))

    def text(self, text):
        counted = CountedText(text)
        counted.visits = self
        return counted


class CountedText(str):
    def find(self, what, start=0, *end):
        found = super().find(what, start, *end)
        self.visits.count += (found if found >= 0 else len(self)) - start
        return found

    def startswith(self, what, *places):
        self.visits.count += len(max(what, key=len)) if isinstance(what, tuple) else len(what)
        return super().startswith(what, *places)

    def __getitem__(self, place):
        part = super().__getitem__(place)
        self.visits.count += len(part)
        if isinstance(place, int):
            return part
        return self.visits.text(part)

    def strip(self, *characters):
        return self.visits.text(super().strip(*characters))


class CountedPattern:
    def __init__(self, pattern, visits):
        self.pattern, self._pattern, self._visits = pattern.pattern, pattern, visits

    def _counted(self, found, text, start=0, *end):
        self._visits.count += (found.end() if found else min([len(text), *end])) - start
        return found

    def search(self, text, *places):
        return self._counted(self._pattern.search(text, *places), text, *places)

    def match(self, text, *places):
        found = self._pattern.match(text, *places)
        self._visits.count += found.end() - found.start() if found else 1
        return found

    def finditer(self, text, start=0):
        self._visits.count += len(text) - start
        return self._pattern.finditer(text, start)


class CountedDecoder:
    def __init__(self, decoder, visits):
        self._decoder, self._visits = decoder, visits

    def raw_decode(self, text, start):
        try:
            value, end = self._decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            self._visits.count += max(error.pos - start, 0) + error.pos  # its line number is counted from the beginning
            raise
        self._visits.count += end - start
        return value, end


def test_reading_visits_each_character_a_bounded_number_of_times_at_every_size(monkeypatch):
    """Twice for each of the unreadable calls that are allowed, and a few times more, however long the text is."""
    visits = Visits(monkeypatch)
    for chat_format, unit, tail in itertools.product(WRITERS, UNITS, ("", "\n</parameter>\n</function></think>ok")):
        per_character = []
        for length in (200, 2_000, 20_000):
            repeated = "".join(unit.format(n=n) for n in range(length // len(unit) + 1))
            text = ("<tool_call>\n<function=note>\n" if unit.startswith("<param") else "") + repeated + tail
            visits.count = 0
            read(visits.text(text), chat_format)
            per_character.append(visits.count / len(text))
        assert per_character[2] <= 2 * parts.MAX_CALLS + 20, (chat_format, unit, tail, per_character)
