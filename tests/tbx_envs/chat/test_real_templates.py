"""The oracle is transformers' `apply_chat_template` on the entire conversation, with the model's own template.

Where that drops earlier reasoning, the oracle is the template for training that its package has beside it: the same
conversation with all reasoning kept.
"""

import datetime
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_templates import KEEPING, SUPPORTED, faithful_template, real_template, real_tokenizer, template_source

from tbx_envs.chat.chatml import CHATML_WITH_TOOLS
from tbx_envs.chat.detection import format_of_template
from tbx_envs.chat.interpretation import interpret, schemas_of
from tbx_envs.chat.ledger import TokenLedger
from tbx_envs.chat.template import ChatTemplate
from tbx_envs.errors import ConfigError
from tbx_envs.messages import BadCall, Text, ToolCall, ToolResult, Turn, to_chat
from tbx_envs.testing.byte_tokenizer import byte_tokenizer

every_template = pytest.mark.parametrize("name", SUPPORTED)

TYPES = {
    "text": {"type": "string"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "urgent": {"type": "boolean"},
    "tags": {"type": "array"},
    "extra": {"type": "object"},
    "size": {"$ref": "#/$defs/Size"},
}
PARAMETERS = {"type": "object", "properties": TYPES, "$defs": {"Size": {"type": ["integer", "null"]}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": 'é "a" <b> {c}', "parameters": PARAMETERS}}
    for name in ("note", "find_patient")
]
SCHEMAS = schemas_of(TOOLS)

# Values that look like markup of some format, alone and in the middle of others.
TAGS = ("</tool_call>", "<tool_call>", "</parameter>", "</function>", "<parameter=text>", "<think>", "</think>")
ODD = (
    *TAGS,
    "<|im_end|>",
    "<|eot_id|>",
    '"}',
    "{",
    "}]",
    "é",
    "😀",
    "\\",
    "\n",
    "",
    "null",
    "3",
    "true",
    "<DONE>",
    ";",
)
odd_text = st.lists(st.sampled_from(ODD) | st.text(max_size=8), max_size=5).map("".join)
# An end of a parameter has two readings wherever it stands; JSON has no lines.
ENDS_A_PARAMETER = re.compile(r"</parameter>\s*(<parameter=|</function>\s*</?tool_call>)")
json_text = odd_text.filter(lambda text: not ENDS_A_PARAMETER.search(text))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | json_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(json_text, inner, max_size=3),
    max_leaves=6,
)
# The format has no escapes, so its strings hold no line that begins with a tag of the format, none that ends with a tag
# that opens or that closes a parameter, and no end of a parameter; nor are they "null" where null is allowed too.
AMBIGUOUS = re.compile(
    rf"{ENDS_A_PARAMETER.pattern}|(?m:^)[ \t]*</?(tool_call|parameter|function)"
    r"|(<tool_call>|<parameter=text>|</parameter>)[ \t\r]*(?m:$)"
)
said_text = odd_text.filter(lambda text: not AMBIGUOUS.search(text))
VALUES = {
    "text": said_text,
    "maybe": st.none() | said_text.filter(lambda text: text.strip() not in ("null", "None")),
    "count": st.integers(-(2**63) + 1, 2**63 - 1),
    "ratio": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-5, 5),
    "urgent": st.booleans(),
    "tags": st.lists(json_values, max_size=3),
    "extra": st.dictionaries(json_text, json_values, max_size=3),
    "size": st.none() | st.integers(-5, 5),
}
arguments = st.fixed_dictionaries({}, optional=VALUES)
words = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<{|"), max_size=12).map(str.strip)


def made(turn):
    return [(call.name, call.arguments) for call in turn.calls]


def whole(name, messages, tools=None, source=None):
    """By transformers, the generation prompt at the end."""
    return real_tokenizer(name).apply_chat_template(
        to_chat(messages), tools=tools, chat_template=source, add_generation_prompt=True, tokenize=False
    )


@every_template
def test_the_format_and_the_treatment_of_reasoning_are_read_off_the_template(name):
    chat = real_template(name)
    assert (chat.chat_format, chat.reasoning, chat.opens_reasoning) == SUPPORTED[name]
    assert format_of_template(template_source(name), bos_token="<s>") == chat.chat_format


@every_template
@settings(max_examples=40, deadline=None)
@given(calls=st.lists(st.tuples(st.sampled_from(["note", "find_patient"]), arguments), max_size=3), text=words)
def test_a_turn_as_the_template_writes_it_reads_back_the_same(name, calls, text):
    chat = real_template(name)
    reasoning = "I </tool_call> think." if chat.may_reason and chat.reasoning != "ignored" else ""
    if SUPPORTED[name][0] == "llama3_json":
        calls, text = calls[:1], "" if calls else text
    turn = Turn(
        text=text,
        calls=tuple(ToolCall(f"call_{i}", called, values) for i, (called, values) in enumerate(calls)),
        reasoning=reasoning,
    )
    raw = ("<think>" if chat.opens_reasoning else "") + chat.turn_text(turn)[: -len(chat_end(name))]
    read = interpret(raw, chat.chat_format, schemas=SCHEMAS)
    assert made(read) == made(turn)
    assert read == turn
    assert chat.decode(chat.policy_turn(turn)) == raw


def chat_end(name):
    return "<|eot_id|>" if name.startswith("llama") else "<|im_end|>"


@st.composite
def conversations(draw, one_call=False):
    """System twice and user, then turns of the policy, each answered by results or by the user."""
    messages = [Text("system", "Rules."), Text("system", draw(words) or "r"), Text("user", draw(words) or "u")]
    number = 0
    for _ in range(draw(st.integers(1, 4))):
        values = draw(st.lists(arguments, max_size=1 if one_call else 2))
        calls = tuple(ToolCall(f"call_{number + i}", "note", value) for i, value in enumerate(values))
        number += len(calls)
        text = "" if one_call and calls else draw(words)
        messages.append(Turn(text=text or ("" if calls else "w"), calls=calls, reasoning=draw(words) or "hm"))
        messages += [ToolResult(call.id, "note", draw(odd_text)) for call in calls] or [
            Text("user", draw(words) or "u")
        ]
    return messages


def ledger_of(chat, messages, tools):
    ledger = TokenLedger()
    start = 0
    for place, message in enumerate(messages):
        if isinstance(message, Turn):
            new = messages[start:place]
            ledger.give(chat.continuation(new) if len(ledger) else chat.opening(new, tools))
            ids = chat.policy_turn(message)
            ledger.write(ids, [-0.5] * len(ids))
            start = place + 1
    ledger.give(chat.continuation(messages[start:]))
    return ledger


def without_reasoning(messages):
    return [
        Turn(text=message.text, calls=message.calls) if isinstance(message, Turn) else message for message in messages
    ]


@pytest.mark.parametrize("name", KEEPING)
@settings(max_examples=15, deadline=None)
@given(messages=conversations())
def test_an_episode_is_the_whole_conversation_with_all_reasoning_kept(name, messages):
    chat = real_template(name)
    if not chat.may_reason:
        messages = without_reasoning(messages)
    ledger = ledger_of(chat, messages, TOOLS)
    oracle = template_source(f"{name}_training")
    assert real_tokenizer(name).decode(ledger.tokens) == whole(name, joined(name, messages), TOOLS, oracle)
    as_rendered = ledger_of(faithful_template(name), messages, TOOLS)  # with tokens for tags in given text
    assert as_rendered.tokens.tolist() == chat.encode(whole(name, joined(name, messages), TOOLS, oracle))


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2", "qwen3_vl"])
@settings(max_examples=15, deadline=None)
@given(messages=conversations(one_call=True))
def test_an_episode_without_reasoning_is_the_whole_conversation_by_the_model_s_own_template(name, messages):
    messages = without_reasoning(messages)
    ledger = ledger_of(faithful_template(name), messages, TOOLS)
    rendered = real_tokenizer(name).apply_chat_template(
        to_chat(joined(name, messages)),
        tools=TOOLS,
        add_generation_prompt=True,
        tokenize=False,
        date_string="26 Jul 2024",
    )
    assert ledger.tokens.tolist() == real_template(name).encode(rendered)


def joined(name, messages):
    """System messages joined by hand, where the template takes one only."""
    if name in ("qwen2_5", "qwen3", "qwen3_instruct_2507"):
        return messages
    return [Text("system", f"{messages[0].text}\n\n{messages[1].text}"), *messages[2:]]


@every_template
def test_the_separator_behind_the_end_of_turn_token_is_given_not_sampled(name):
    chat = real_template(name)
    continuation = chat.continuation_text([Text("user", "b")])
    between = "" if name.startswith("llama") else "\n"
    assert continuation.startswith(f"{between}<|start_header_id|>user" if not between else "\n<|im_start|>user\nb")
    ids = chat.policy_turn(Turn(text="a"))
    assert ids[-1] in chat.end_of_turn_ids
    assert not chat.end_of_turn_ids & set(ids[:-1])


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_6"])
def test_what_was_given_stays_the_same_whatever_reasoning_is_dropped_later(name):
    chat = real_template(name)
    said = [
        Text("user", "Hi"),
        Turn(calls=(ToolCall("call_0", "note", {}),), reasoning="Who?"),
        ToolResult("call_0", "note", "Ada"),
        Turn(text="Found.", reasoning="Good."),
        Text("user", "Bye"),
    ]
    kept = real_tokenizer(name).decode(ledger_of(chat, said, TOOLS).tokens)
    dropped = whole(name, said, TOOLS)
    for reasoning in ("Who?", "Good."):
        assert reasoning in kept
        assert reasoning not in dropped
        kept = kept.replace(f"<think>\n{reasoning}\n</think>\n\n", "")
    assert kept == dropped


@every_template
@pytest.mark.parametrize("results", [1, 2])
def test_results_of_an_unreadable_call_and_of_several_calls_follow_what_was_sampled(name, results):
    chat = real_template(name)
    ledger = TokenLedger()
    ledger.give(chat.opening([Text("user", "Hi")], TOOLS))
    sampled = chat.encode(("hm\n</think>\n\n" if chat.opens_reasoning else "") + '<tool_call>{"name":' + chat_end(name))
    ledger.write(sampled, [-1.0] * len(sampled))
    answers = [ToolResult(f"call_{i}", ["", "find"][i], f"answer {i}", "invalid") for i in range(results)]
    ledger.give(chat.continuation(answers))
    text = real_tokenizer(name).decode(ledger.tokens)
    bad = Turn(text='<tool_call>{"name":', reasoning="hm" if chat.opens_reasoning else "")
    oracle = f"{name}_training" if name in KEEPING and name != "qwen3" else name  # qwen3's adds an empty reasoning
    rendered = real_tokenizer(name).apply_chat_template(
        to_chat([Text("user", "Hi"), bad, *answers]),
        tools=TOOLS,
        chat_template=template_source(oracle),
        add_generation_prompt=True,
        tokenize=False,
        date_string="26 Jul 2024",
    )
    assert text == rendered
    assert ledger.tokens[ledger.wrote].tolist() == sampled


@every_template
def test_words_given_in_the_assistant_s_name_are_rendered_as_its_message_and_not_sampled(name):
    chat = real_template(name)
    given_words = [ToolResult("call_0", "note", "lost"), Text("assistant", "Your parcel is lost.")]
    turn = Turn(calls=(ToolCall("call_0", "note", {"text": "p"}),), reasoning="hm" if chat.may_reason else "")
    if chat.reasoning == "ignored":
        turn = Turn(calls=turn.calls)
    said = [Text("user", "Hi"), turn, *given_words]
    ids = chat.opening(said[:1], TOOLS) + chat.policy_turn(turn) + chat.continuation(given_words)
    rendered = real_tokenizer(name).apply_chat_template(
        to_chat(said), tools=TOOLS, add_generation_prompt=True, tokenize=False, date_string="26 Jul 2024"
    )
    assert real_tokenizer(name).decode(ids) == rendered


@every_template
def test_a_history_opens_a_conversation_and_loses_nothing(name):
    chat = real_template(name)
    calls = (ToolCall("call_0", "note", {"text": "p"}), ToolCall("call_1", "find_patient", {}))
    history = [
        Text("system", "Rules."),
        Text("system", "More rules."),
        Text("user", "Hi"),
        Turn(text="Let me look.", calls=calls),
        ToolResult("call_0", "note", "first result"),
        ToolResult("call_1", "find_patient", "second result"),
        Text("user", "And?"),
    ]
    text = real_tokenizer(name).decode(chat.opening(history, TOOLS))
    places = [text.index(words) for words in ("Rules.", "More rules.", "Hi", "Let me look.")]
    places += [text.rindex(words) for words in ("first result", "second result", "And?")]
    assert places == sorted(places)
    assert "find_patient" in text[places[3] :]
    # Both system messages stand in the system's part, none was taken for the user's.
    assert text[: places[1]].count("user<|end_header_id|>") + text[: places[1]].count("<|im_start|>user") == 0


def test_llama_takes_the_calls_of_a_history_one_by_one_each_with_its_result():
    chat = real_template("llama3_1")
    one, two = ToolCall("call_0", "note", {}), ToolCall("call_1", "find_patient", {})
    results = [ToolResult("call_0", "note", "r0"), ToolResult("call_1", "find_patient", "r1")]
    said = [Text("user", "Hi"), Turn(text="Look.", calls=(one, two)), *results, Text("user", "And?")]
    assert chat.adapted(said) == [
        Text("user", "Hi"),
        Turn(text="Look."),
        Turn(calls=(one,)),
        results[0],
        Turn(calls=(two,)),
        results[1],
        Text("user", "And?"),
    ]


@pytest.mark.parametrize(
    "turn",
    [
        Turn(calls=(ToolCall("call_0", "note", {}), ToolCall("call_1", "note", {}))),
        Turn(text="Look.", calls=(ToolCall("call_0", "note", {}),)),
    ],
)
def test_a_demonstration_that_llama_s_template_cannot_show_is_rejected(turn):
    with pytest.raises(ConfigError, match="takes one call a turn, and the turn has"):
        real_template("llama3_1").policy_turn(turn)


def test_llama_may_end_a_turn_with_either_of_its_tokens():
    chat, tokenizer = real_template("llama3_1"), real_tokenizer("llama3_1")
    ends = {tokenizer.convert_tokens_to_ids(token) for token in ("<|eot_id|>", "<|eom_id|>")}
    assert chat.end_of_turn_ids == ends
    raw = '<|python_tag|>{"name": "note", "parameters": {}}'
    assert chat.decode(chat.encode(raw + "<|eom_id|>")) == raw


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2"])
def test_the_date_in_a_prompt_is_never_today(name):
    moment = datetime.datetime(2025, 10, 1, 9)
    tokenizer = real_tokenizer(name)

    def prompt(chat, **now):
        return tokenizer.decode(chat.opening([Text("user", "Hi")], TOOLS, **now))

    assert "Today Date: 26 Jul 2024\n" in prompt(real_template(name))
    assert "Today Date: 01 Oct 2025\n" in prompt(ChatTemplate(tokenizer, now=moment))
    assert "Today Date: 01 Oct 2025\n" in prompt(real_template(name), now=moment)
    assert "Today Date: 5 May\n" in prompt(ChatTemplate(tokenizer, options={"date_string": "5 May"}))


def test_reasoning_can_be_switched_off_by_the_template_s_own_option():
    chat = ChatTemplate(real_tokenizer("qwen3"), options={"enable_thinking": False})
    assert not chat.may_reason
    assert chat.continuation_text([Text("user", "b")]).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    kept = ChatTemplate(real_tokenizer("qwen3_6"), options={"preserve_thinking": True})
    assert kept.reasoning == "kept"


@pytest.mark.parametrize("name", ["llama3", "qwen2_5_vl", "phi3_5", "gemma3"])
def test_a_template_without_tools_is_rejected(name):
    with pytest.raises(ConfigError, match="leaves out tool calls"):
        format_of_template(template_source(name), bos_token="<s>")


def test_a_template_that_takes_no_text_is_rejected():
    with pytest.raises(ConfigError, match="cannot render a user and an answer"):
        format_of_template(template_source("idefics3"))


@pytest.mark.parametrize("name", ["glm4moe", "gptoss", "lfm2_2_5", "gemma4_v5"])
def test_a_template_of_an_unknown_format_is_rejected_with_what_it_writes(name):
    with pytest.raises(ConfigError, match=r"writes a call as .*find.* which no known format reads back: hermes, "):
        format_of_template(template_source(name), bos_token="<s>")


def test_chatml_with_tools_is_a_template_like_others():
    chat = ChatTemplate(byte_tokenizer(CHATML_WITH_TOOLS))
    assert (chat.chat_format, chat.reasoning) == ("hermes", "kept")
    calls = (ToolCall("call_0", "note", {"text": "é </tool_call>"}), ToolCall("call_1", "note", {}))
    turn = Turn(text="Ok.", calls=calls, reasoning="hm")
    assert interpret(chat.decode(chat.policy_turn(turn))) == turn
    text = chat.render([Text("system", "Rules."), Text("user", "Hi")], TOOLS)
    assert text.startswith("<|im_start|>system\nRules.\n\nYou can call these tools:")
    assert text.count("<|im_start|>system") == 1
    assert '"description": "é \\"a\\" <b> {c}"' in text


def test_a_format_can_be_chosen_by_name_if_the_template_writes_it():
    assert ChatTemplate(byte_tokenizer(), chat_format="hermes").chat_format == "hermes"
    with pytest.raises(ConfigError, match="which the format 'qwen3_coder' reads as"):
        ChatTemplate(byte_tokenizer(), chat_format="qwen3_coder")
    with pytest.raises(ConfigError, match="Did you mean 'hermes'"):
        ChatTemplate(byte_tokenizer(), chat_format="hermse")


def test_bad_calls_of_a_history_are_rendered_as_they_were_written():
    bad = Turn(text="Look.", calls=(BadCall("call_0", "<tool_call>{", "The call breaks off."),))
    said = [Text("user", "Hi"), bad, ToolResult("call_0", "", "The call breaks off.", "invalid"), Text("user", "b")]
    for name in SUPPORTED:
        text = real_tokenizer(name).decode(real_template(name).opening(said))
        assert "Look." in text
        assert "<tool_call>{" in text
