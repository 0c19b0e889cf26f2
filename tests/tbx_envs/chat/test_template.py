"""The oracle is the tokenizer's own `apply_chat_template` on the entire conversation."""

import functools
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbx_envs.chat.interpretation import interpret
from tbx_envs.chat.ledger import TokenLedger
from tbx_envs.chat.template import ChatTemplate
from tbx_envs.chat.template_bounds import excess
from tbx_envs.errors import ConfigError
from tbx_envs.messages import Text, ToolCall, ToolResult, Turn, to_chat
from tbx_envs.testing.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer

TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]


@functools.cache
def tokenizer():
    return byte_tokenizer()


@functools.cache
def template():
    return ChatTemplate(tokenizer())


def whole_ids(messages, tools=None, generation_prompt=False):
    return list(
        tokenizer().apply_chat_template(
            to_chat(messages), tools=tools, add_generation_prompt=generation_prompt, return_dict=False
        )
    )


def test_byte_tokenizer_gives_back_any_text():
    text = "Åse said: <tool_call>{\"a\": '😀'}</tool_call>\n\x00 <|im_end|>"
    ids = tokenizer().encode(text)
    assert tokenizer().decode(ids) == text
    assert len(tokenizer().encode("é")) == 2


SPACED = "x != y , I 'm not , do n't . <|im_start|>ok ?"


def test_a_tokenizers_own_settings_change_neither_what_is_read_nor_what_is_written():
    """Those of Llama 3.1 and of tokenizers that were saved in the middle of a training."""
    tokenizer = byte_tokenizer(CHAT_TEMPLATE)
    plain = ChatTemplate(tokenizer)
    ids = plain.encode(SPACED)
    opening = plain.opening([Text("user", SPACED)])
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    tokenizer.split_special_tokens = True
    tokenizer.truncation_side = tokenizer.padding_side = "left"
    tokenizer.model_max_length = 4
    tokenizer.backend_tokenizer.enable_truncation(max_length=4)
    tokenizer.backend_tokenizer.enable_padding(length=999)
    assert tokenizer.decode(ids) != SPACED  # what the defaults would give
    changed = ChatTemplate(tokenizer)
    assert changed.decode(ids) == SPACED
    assert (changed.encode(SPACED), changed.opening([Text("user", SPACED)])) == (ids, opening)


def test_the_opening_is_the_rendered_prompt_with_tools():
    messages = [Text("system", "Rules."), Text("user", "Hi é")]
    assert template().opening(messages, TOOLS) == whole_ids(messages, TOOLS, generation_prompt=True)


def test_the_separator_behind_the_end_of_turn_token_belongs_to_the_continuation():
    ids = template().continuation([Text("user", "b")])
    assert tokenizer().decode(ids) == "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"


def test_a_decoded_turn_loses_its_end_of_turn_token_and_keeps_its_markers():
    text = '<think>x</think><tool_call>{"name": "a"}</tool_call>'
    ids = [*tokenizer().encode(text), tokenizer().eos_token_id]
    assert template().end_of_turn_ids == {tokenizer().eos_token_id}
    assert template().decode(ids) == text
    assert template().decode(ids[:-1]) == text


def test_the_end_of_the_text_ends_a_turn_too_and_is_no_part_of_it():
    made = byte_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|endoftext|>"]})
    chat = ChatTemplate(made)
    assert {made.decode([number]) for number in chat.end_of_turn_ids} == {"<|im_end|>", "<|endoftext|>"}
    assert chat.decode(made.encode("ok<|endoftext|>")) == "ok"


words = st.text(max_size=12)
calls = st.lists(st.dictionaries(words, words | st.integers() | st.none(), max_size=2), min_size=1, max_size=3)


@st.composite
def conversations(draw):
    """System and user, then turns of the policy, each answered by results or by the user."""
    messages = [Text("system", draw(words)), Text("user", draw(words))]
    number = 0
    for _ in range(draw(st.integers(1, 4))):
        arguments = draw(st.just([]) | calls)
        made = tuple(ToolCall(f"call_{number + i}", "find", a) for i, a in enumerate(arguments))
        number += len(made)
        messages.append(Turn(text=draw(words), calls=made, reasoning=draw(words)))
        answers = [ToolResult(call.id, "find", draw(words)) for call in made]
        messages += answers or [Text("user", draw(words))]
    return messages


@settings(max_examples=60)
@given(conversations())
def test_the_ledger_of_an_episode_is_the_tokenisation_of_the_whole_conversation(messages):
    ledger = TokenLedger()
    start = 0
    for place, message in enumerate(messages):
        if isinstance(message, Turn):
            new = messages[start:place]
            ledger.give(template().continuation(new) if len(ledger) else template().opening(new, TOOLS))
            ids = template().policy_turn(message)
            ledger.write(ids, [-0.5] * len(ids))
            start = place + 1
    ledger.give(template().continuation(messages[start:]))
    assert ledger.tokens.tolist() == whole_ids(messages, TOOLS, generation_prompt=True)
    turns = sum(isinstance(message, Turn) for message in messages)
    assert sum(ledger.tokens[ledger.wrote] == tokenizer().eos_token_id) >= turns


def test_sampled_ids_stay_as_sampled_when_their_text_has_another_spelling():
    spelled = [token for byte in '<tool_call>{"name": "find"}' for token in tokenizer().encode(byte)]
    sampled = [*spelled, tokenizer().eos_token_id]
    assert tokenizer().encode(tokenizer().decode(sampled)) != sampled  # encoding again would change them
    ledger = TokenLedger()
    ledger.give(template().opening([Text("user", "Hi")]))
    ledger.write(sampled, [-1.0] * len(sampled))
    turn = interpret(template().decode(sampled))
    ledger.give(template().continuation([ToolResult(turn.calls[0].id, turn.calls[0].name, "none")]))
    assert ledger.tokens[ledger.wrote].tolist() == sampled


DROPS_REASONING = CHAT_TEMPLATE.replace(
    "{% if message.reasoning_content %}", "{% if message.reasoning_content and loop.last %}"
)


def test_reasoning_that_a_template_drops_later_stays_in_the_ledger_and_all_else_is_as_rendered():
    made = ChatTemplate(byte_tokenizer(DROPS_REASONING))
    assert made.reasoning == "dropped"
    said = [
        Text("user", "Hi"),
        Turn(calls=(ToolCall("call_0", "find", {}),), reasoning="Who?"),
        ToolResult("call_0", "find", "Ada"),
        Turn(text="Found.", reasoning="Good."),
        Text("user", "Bye"),
    ]
    ids = made.opening(said[:1]) + made.policy_turn(said[1]) + made.continuation(said[2:3])
    ids += made.policy_turn(said[3]) + made.continuation(said[4:])
    assert ids == whole_ids(said, generation_prompt=True)  # by the template that keeps it
    without = tokenizer().decode(ids).replace("<think>\nWho?\n</think>\n", "").replace("<think>\nGood.\n</think>\n", "")
    assert without == made.render(said, generation_prompt=True)


def test_a_template_that_changes_earlier_words_is_rejected():
    shouts = CHAT_TEMPLATE.replace(
        "{{ message.content }}", "{{ message.content if loop.last else message.content | upper }}"
    )
    with pytest.raises(ConfigError, match="leaves earlier messages as they were"):
        ChatTemplate(byte_tokenizer(shouts))


def test_a_template_that_adds_text_after_the_generation_prompt_only_later_is_rejected():
    late = CHAT_TEMPLATE + "{% if messages | length > 6 and add_generation_prompt %}Well:{% endif %}"
    with pytest.raises(ConfigError, match="it adds 'Well:' at the end"):
        ChatTemplate(byte_tokenizer(late))


def test_a_tokenizer_whose_marker_swallows_the_separator_is_rejected():
    from tokenizers import AddedToken

    made = byte_tokenizer(CHAT_TEMPLATE.replace("{%- endfor -%}\n<|im_end|>", "{%- endfor -%}\n<|end|>"))
    made.add_tokens([AddedToken("<|end|>", special=True, rstrip=True)])
    with pytest.raises(ConfigError, match="differently after the text before it"):
        ChatTemplate(made)


def test_a_template_that_looks_ahead_in_a_way_that_the_check_did_not_meet_is_rejected_when_it_does():
    made = ChatTemplate(byte_tokenizer("{% if messages[-1].content == 'secret' %}!{% endif -%}\n" + CHAT_TEMPLATE))
    with pytest.raises(ConfigError, match="and differently once"):
        made.continuation([Text("user", "secret")])


def test_a_demonstration_that_reasons_where_the_prompt_asks_for_none_is_rejected():
    empty = "<|im_start|>assistant\n<think></think>{% endif -%}"
    made = ChatTemplate(
        byte_tokenizer(
            CHAT_TEMPLATE.replace("<|im_start|>assistant\n{% endif -%}", empty).replace(
                "{% if message.reasoning_content %}<think>",
                "{% if message.role == 'assistant' and not message.reasoning_content %}<think></think>{% endif -%}"
                "{% if message.reasoning_content %}<think>",
            )
        )
    )
    assert made.decode(made.policy_turn(Turn(text="ok"))) == "ok"
    with pytest.raises(ConfigError, match="does not start where its generation prompt"):
        made.policy_turn(Turn(text="ok", reasoning="hm"))


def test_a_template_that_renders_the_number_of_messages_is_rejected():
    counts = "{{ messages | length }}" + CHAT_TEMPLATE
    with pytest.raises(ConfigError, match="leaves earlier messages"):
        ChatTemplate(byte_tokenizer(counts))


def test_a_template_without_an_end_of_turn_token_is_rejected():
    endless = CHAT_TEMPLATE.replace("{%- endfor -%}\n<|im_end|>", "{%- endfor -%}")
    with pytest.raises(ConfigError, match="could not end its turn"):
        ChatTemplate(byte_tokenizer(endless))


def test_a_template_that_closes_a_conversation_that_is_not_to_go_on_is_rejected():
    closes = CHAT_TEMPLATE + "{%- if not add_generation_prompt -%}<|im_end|>{%- endif -%}"
    with pytest.raises(ConfigError, match="when the policy is to continue"):
        ChatTemplate(byte_tokenizer(closes))


def test_a_template_that_knows_no_tool_results_is_rejected():
    silent = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"cannot render \[.*tool.*\]: no tools"):
        ChatTemplate(byte_tokenizer(silent + CHAT_TEMPLATE))


def test_a_separator_that_depends_on_the_next_role_is_taken_from_the_whole_conversation():
    separator = """{{ "##\\n" if loop.nextitem and loop.nextitem.role == "tool" else "\\n" }}{% endfor -%}"""
    depends = CHAT_TEMPLATE.replace("<|im_end|>\n{% endfor -%}\n{%- if add", f"<|im_end|>{separator}\n{{%- if add")
    made = ChatTemplate(byte_tokenizer(depends))
    assert tokenizer().decode(made.continuation([ToolResult("call_0", "find", "x")])).startswith("##\n<|im_start|>")
    assert tokenizer().decode(made.continuation([Text("user", "x")])).startswith("\n<|im_start|>")


def test_reasoning_that_the_prompt_opens_is_reasoning_even_when_never_closed():
    opened = CHAT_TEMPLATE.replace(
        "<|im_start|>assistant\n{% endif -%}", "<|im_start|>assistant\n<think>\n{% endif -%}"
    )
    made = ChatTemplate(byte_tokenizer(opened))
    assert made.opens_reasoning
    ids = tokenizer().encode('I will <tool_call>{"name": "delete"}</tool_call>')
    assert interpret(made.decode([*ids, tokenizer().eos_token_id])).calls == ()
    closed = tokenizer().encode('hm</think><tool_call>{"name": "find"}</tool_call>')
    assert [call.name for call in interpret(made.decode(closed)).calls] == ["find"]


def test_a_template_that_silently_drops_tool_calls_or_results_is_rejected():
    no_calls = CHAT_TEMPLATE.replace("message.tool_calls or []", "[]")
    with pytest.raises(ConfigError, match="leaves out tool calls"):
        ChatTemplate(byte_tokenizer(no_calls))
    no_second_call = CHAT_TEMPLATE.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]")
    with pytest.raises(ConfigError, match="leaves out 'note'"):
        ChatTemplate(byte_tokenizer(no_second_call))
    no_results = CHAT_TEMPLATE.replace("in messages -%}", "in messages if message.role != 'tool' -%}")
    with pytest.raises(ConfigError, match="so the policy would never read it"):
        ChatTemplate(byte_tokenizer(no_results))


def test_a_prompt_that_asks_for_no_reasoning_is_checked_without_any():
    empty = "<think>\n\n</think>\n"
    asks_for_none = CHAT_TEMPLATE.replace(
        "{% if message.reasoning_content %}<think>",
        f"{{% if message.role == 'assistant' and not message.reasoning_content %}}{empty}{{% endif -%}}\n"
        "{% if message.reasoning_content %}<think>",
    ).replace("<|im_start|>assistant\n{% endif -%}", f"<|im_start|>assistant\n{empty}{{% endif -%}}")
    made = ChatTemplate(byte_tokenizer(asks_for_none))
    assert tokenizer().decode(made.policy_turn(Turn(text="ok"))) == "ok<|im_end|>"
    assert made.decode(tokenizer().encode("ok<|im_end|>")) == "ok"


def test_history_with_calls_can_open_a_conversation():
    history = [
        Text("user", "Hi"),
        Turn(calls=(ToolCall("call_0", "find", {"a": [1]}),)),
        ToolResult("call_0", "find", "x"),
    ]
    assert template().opening(history) == whole_ids(history, generation_prompt=True)


def test_a_continuation_can_be_changed_by_its_caller_without_changing_the_next_one():
    first = template().continuation([Text("user", "same")])
    first.append(0)
    assert template().continuation([Text("user", "same")]) == first[:-1]


def test_importing_the_chat_package_imports_no_tokenizer_library():
    code = (
        "import sys, json, tbx_envs.chat.template, tbx_envs.chat.ledger, tbx_envs.chat.interpretation, "
        "tbx_envs.testing.byte_tokenizer; "
        "print(json.dumps([m for m in ('jax', 'transformers', 'tokenizers', 'torch') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


FINE = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    "text",
    [
        "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
        "{% for a in range(99999) %}" + "a" * 1000 + "{% endfor %}",
        "{{ 'x' * 3000000000 }}",
        "{% set n = 3000000000 %}{{ n * [1] }}",
        "{{ '%3000000000d' % 1 }}",
        "{{ '{:>3000000000}'.format(1) }}",
        "{{ 'x'.ljust(3000000000) }}",
        "{{ 'x' | center(3000000000) }}",
        "{{ 9 ** 999999999 }}",
        "{% set n = namespace(x='x' * 99) %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for message in messages if message.role == 'tool' %}{{ 'x' * 3000000000 }}{% endfor %}",
    ],
    ids=lambda text: text[:40],
)
def test_a_template_that_does_not_end_or_takes_gigabytes_is_rejected_before_it_is_rendered(text):
    with pytest.raises(ConfigError, match=r"chat template (takes more than|calls itself)") as error:
        ChatTemplate(byte_tokenizer(FINE + text))
    assert "Put the template of the model's authors" in str(error.value)


@pytest.mark.parametrize(
    "part", ["{% generation %}{{ messages[0].content }}{% endgeneration %}", "{{ no_such() }}", "{% if %}"]
)
def test_what_else_a_template_has_or_lacks_is_not_judged_by_its_size(part):
    assert excess(FINE + part) is None
