import datetime

import pytest

from tbx_envs.chat.template_text import TemplateText
from tbx_envs.errors import ConfigError
from tbx_envs.testing.byte_tokenizer import byte_tokenizer

MOMENT = datetime.datetime(2025, 10, 1, 14, 5)
HELLO = [{"role": "user", "content": "Hi"}]


def text_of(source, moment=MOMENT, **options):
    return TemplateText(byte_tokenizer(source), options, moment)


@pytest.mark.parametrize("start", ["", "\n", "  \n", "x\n"])
def test_a_template_that_asks_for_today_gets_the_fixed_date_and_is_otherwise_untouched(start):
    source = start + "{{ strftime_now('%d %B %Y') }}, {{ strftime_now( \"%H:%M\" ) }}\n{{ messages[0].content }}\n"
    plain = start + "{{ '01 October 2025' }}, {{ '14:05' }}\n{{ messages[0].content }}\n"
    expected = byte_tokenizer(plain).apply_chat_template(HELLO, tokenize=False)
    assert text_of(source).render(HELLO) == expected
    assert "02 October 2025" in text_of(source).render(HELLO, now=datetime.datetime(2025, 10, 2))


def test_the_fixed_date_can_be_used_like_any_text():
    source = "{%- if strftime_now is defined %}{{- 'Day: ' + strftime_now('%d') ~ '.' }}{% endif %}"
    assert text_of(source).render(HELLO) == "Day: 01."


def test_a_date_in_a_computed_format_is_rejected():
    with pytest.raises(ConfigError, match="in a format that is computed"):
        text_of("{% set f = '%d' %}{{ strftime_now(f) }}")


def test_an_option_must_be_a_variable_that_the_template_reads():
    source = "{{ enable_thinking }}{{ messages }}{{ tools }}"
    assert text_of(source, enable_thinking=False)
    with pytest.raises(ConfigError, match=r"'enable_thinkng' is not read by it. Did you mean 'enable_thinking'\?"):
        text_of(source, enable_thinkng=False)
    with pytest.raises(ConfigError, match=r"'messages' is not its own. 'tools' is not its own."):
        text_of(source, messages=[], tools=[])


def test_a_tokenizer_without_a_template_is_rejected():
    with pytest.raises(ConfigError, match="has no chat template"):
        text_of(None)


def test_of_several_templates_the_one_for_tools_is_used():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    assert TemplateText(tokenizer, {}, MOMENT).render(HELLO) == "with tools"


def test_a_refusal_of_the_template_names_the_roles():
    with pytest.raises(ConfigError, match=r"cannot render \[user\]: not today"):
        text_of("{{ raise_exception('not today') }}").render(HELLO)
