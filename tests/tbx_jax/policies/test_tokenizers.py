"""The nano tokenizer: lossless, and the same piece is the same token wherever it stands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tbx_envs.chat.template import ChatTemplate
from tbx_envs.errors import ConfigError
from tbx_envs.messages import Text, ToolCall, ToolResult, Turn
from tbx_jax.policies.tokenizers import train_tokenizer

SAID = (
    "Hi, Nora Quist here. I was born on 1984-03-12.",
    '{"name": "find_patient", "arguments": {"name": "Nora Quist"}}',
    '{"patients": [{"name": "Nora Quist", "patient_id": "P12"}]}',
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(SAID * 3, vocabulary=340)


@given(text=st.text())
def test_any_text_comes_back_unchanged(tokenizer, text):
    # Lone surrogates have no bytes; no message can carry one either.
    text = text.encode("utf-8", "ignore").decode()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_name_is_the_same_tokens_in_a_sentence_a_call_and_a_result(tokenizer):
    name = tokenizer.encode("Nora Quist")
    assert len(name) == 3  # two words and a space
    for text in SAID:
        ids = tokenizer.encode(text)
        assert any(ids[start : start + 3] == name for start in range(len(ids)))


def test_each_digit_is_a_token_of_its_own(tokenizer):
    assert [tokenizer.decode([i]) for i in tokenizer.encode("P1984")] == ["P", "1", "9", "8", "4"]


def test_the_opening_of_a_known_call_is_one_token(tokenizer):
    assert len(tokenizer.encode('{"name": "find_patient", "arguments": {')) == 1


def test_the_template_renders_roles_turns_and_calls_and_no_system_text(tokenizer):
    chat = ChatTemplate(tokenizer)
    call = ToolCall("call_0", "find_patient", {"name": "Nora Quist"})
    ids = chat.opening([Text("system", "Rules."), Text("user", "Hi")], ())
    ids += chat.policy_turn(Turn(calls=(call,)))
    ids += chat.continuation([ToolResult("call_0", "find_patient", "{}")])
    assert tokenizer.decode(ids) == (
        '<|user|>Hi<|end|><|assistant|><tool_call>{"name": "find_patient", "arguments": {"name": "Nora Quist"}}'
        "</tool_call><|end|><|tool|>{}<|end|><|assistant|>"
    )


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ConfigError, match="Raise vocabulary"):
        train_tokenizer(SAID, vocabulary=200)


def test_training_twice_gives_the_same_tokenizer():
    assert train_tokenizer(SAID, vocabulary=340).get_vocab() == train_tokenizer(SAID, vocabulary=340).get_vocab()
