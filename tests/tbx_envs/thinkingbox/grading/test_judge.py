"""Judges: how they are asked, how their answers are read, and that no answer is never a no."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from saying import SayingEndpoint, reply

from tbx_envs.errors import EndpointError
from tbx_envs.thinkingbox.grading.judge import EndpointJudge, Opinion, YesJudge, escaped, is_yes, opinion_of


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("Yes", True),
        ("yes.", True),
        ("YES!", False),  # the exclamation mark is no separator of the original's
        ("Yes, it does.", True),
        ("Yes\nIt does", True),
        ("yes;no", True),
        ("The answer is: yes", True),
        ("So: yes.", True),
        ("I say yes to that", False),
        ("Yesterday", False),
        ("No", False),
        ("no, not yes", True),  # as in the original: the last word counts
        ("No. Yes, but no", False),
        ("maybe", False),
        ("**Yes**", False),
        ("...", False),
    ],
)
def test_an_answer_is_yes_when_its_first_or_last_word_is(said, answer):
    assert is_yes(said) is answer
    assert EndpointJudge(SayingEndpoint(said)).yesno("Is it?") is answer


def test_a_question_about_a_text_is_asked_at_temperature_zero_with_the_text_in_its_tag():
    endpoint = SayingEndpoint("Yes")
    assert EndpointJudge(endpoint).text_yesno("I <b>refunded</b> {it}", "Is <it> polite?") is True
    ((messages, temperature, max_tokens),) = endpoint.asked
    assert (temperature, max_tokens) == (0.0, 128)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[1]["content"] == ("<message>\nI &lt;b&gt;refunded&lt;/b&gt; {it}\n</message>\nIs <it> polite?")


def test_a_comparison_shows_both_texts():
    endpoint = SayingEndpoint("No")
    assert EndpointJudge(endpoint).compare_yesno("a<", ">b", "Same?") is False
    assert endpoint.asked[0][0][1]["content"] == "<first>\na&lt;\n</first>\n<second>\n&gt;b\n</second>\nSame?"


def test_no_repeat_stops_at_the_first_repetition():
    endpoint = SayingEndpoint("No", "Yes", "No")
    assert EndpointJudge(endpoint).no_repeat("a", ["b", "c", "d"]) is False
    assert len(endpoint.asked) == 2
    assert EndpointJudge(SayingEndpoint("No")).no_repeat("a", ["b", "c"]) is True
    assert EndpointJudge(SayingEndpoint("Yes")).no_repeat("a", []) is True


def test_a_prompt_of_a_tests_own_is_sent_as_it_is():
    endpoint = SayingEndpoint("Yes")
    assert EndpointJudge(endpoint, kind="motivation").evaluate_bool("You <judge>.", "Is {it}?") is True
    assert endpoint.asked[0][0] == [
        {"role": "system", "content": "You <judge>."},
        {"role": "user", "content": "Is {it}?"},
    ]


@given(st.text(), st.text())
def test_no_text_can_close_the_tag_that_it_is_put_into(text, other):
    endpoint = SayingEndpoint("Yes")
    judge = EndpointJudge(endpoint)
    judge.text_yesno(text, "?")
    judge.compare_yesno(text, other, "?")
    for messages, _, _ in endpoint.asked:
        user = messages[1]["content"]
        assert user.count("<") == user.count(">") == 2 * (1 + user.startswith("<first>"))
    assert "<" not in escaped(text) and ">" not in escaped(text)
    if "&" not in text:
        assert escaped(text).replace("&lt;", "<").replace("&gt;", ">") == text


# --- motivations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "opinion"),
    [
        ('{"motivation": "It greets.", "answer": "Yes"}', Opinion(True, "It greets.")),
        ('{"answer": "no.", "motivation": "It does not."}', Opinion(False, "It does not.")),
        ('```json\n{"motivation": "a", "answer": "Yes"}\n```', Opinion(True, "a")),
        ("{'motivation': \"Looks good\", 'answer': \"Yes\"}", Opinion(True, "Looks good")),
        ('{motivation: "Clear", answer: "Yes"}', Opinion(True, "Clear")),
        ('{"motivation": "line\nbreak", "answer": true}', Opinion(True, "line\nbreak")),
        ('{"motivation": "he said, answer: yes", "answer": "No"}', Opinion(False, "he said, answer: yes")),
        ('{"answer": "Yes"}', Opinion(True, "")),
        ('{"answer": "Yes", "motivation": null}', Opinion(True, "")),
    ],
)
def test_an_answer_with_a_motivation_is_read_also_with_bad_quotes(said, opinion):
    assert opinion_of(said) == opinion
    assert EndpointJudge(SayingEndpoint(said), kind="motivation").text_yesno("a", "?") is opinion.answer


@pytest.mark.parametrize(
    "said", ["Yes", "{}", '{"answer": 3}', '{"answer": ""}', '{"answer": "Yes"', "}{", '["answer"]']
)
def test_what_is_no_answer_with_a_motivation_is_asked_once_more_and_then_an_error(said):
    good = '{"motivation": "a", "answer": "Yes"}'
    assert EndpointJudge(SayingEndpoint(said, good)).text_yesno_with_motivation("a", "?") == Opinion(True, "a")
    endpoint = SayingEndpoint(said)
    with pytest.raises(EndpointError, match=r"asked 'Polite\?' and did not answer with the JSON object .* 2 times"):
        EndpointJudge(endpoint, kind="motivation").text_yesno("a", "Polite?")
    assert endpoint.asked[0] == endpoint.asked[1] and len(endpoint.asked) == 2


# --- no answer is never a no --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "motivation"])
@pytest.mark.parametrize("said", ["", "  \n", reply(None)])
def test_silence_is_an_error(said, kind):
    with pytest.raises(EndpointError, match="the judge said nothing"):
        EndpointJudge(SayingEndpoint(said), kind=kind).text_yesno("a", "?")


def test_an_answer_that_was_cut_off_counts_only_when_it_began_with_yes_or_no():
    for said, answer in (("Yes, since", True), ("No, since", False)):
        assert EndpointJudge(SayingEndpoint(reply(said, "length"))).yesno("?") is answer
    with pytest.raises(EndpointError, match="cut off after 128 tokens"):
        EndpointJudge(SayingEndpoint(reply("Well, one might say", "length"))).yesno("?")


def test_an_error_of_the_endpoint_goes_through():
    with pytest.raises(EndpointError, match="down"):
        EndpointJudge(SayingEndpoint(EndpointError("down"))).no_repeat("a", ["b"])


def test_the_judge_without_a_model_says_yes_to_everything():
    judge = YesJudge()
    answers = [
        judge.text_yesno("a", "?"),
        judge.text_yesno_with_motivation("a", "?").answer,
        judge.compare_yesno("a", "b", "?"),
        judge.yesno("?"),
        judge.no_repeat("a", ["b"]),
        judge.evaluate_bool("a", "b"),
    ]
    assert answers == [True] * 6


def test_a_judge_counts_the_tokens_of_its_episode_and_no_other():
    judge = EndpointJudge(SayingEndpoint("Yes"))
    first, second = judge.for_episode(), judge.for_episode()
    first.yesno("?")
    first.text_yesno("Hello", "?")
    second.yesno("?")
    assert [each.usage.prompt for each in (judge, first, second)] == [0, 20, 10]
