import dataclasses

import pytest

from tbx_envs.messages import DONE_MARK, Text, ToolResult, Turn
from tbx_envs.users.scripted import ScriptedUser

CALLED = (Turn(), ToolResult("call_0", "note", "noted"))


@pytest.fixture
def task(kiosk):
    return kiosk.task("kiosk/order/000")


@pytest.fixture
def says(task, kiosk):
    """What the user says to words of the agent, after some other messages."""

    def answer(words, *between, seed=0, task=task):
        opening = (Text("system", kiosk.rules), Text("user", task.query))
        return ScriptedUser(task, kiosk, seed).answer((*opening, *between, Turn(words)))

    return answer


def test_a_topic_that_is_asked_for_is_answered_with_its_fact(says):
    assert "1000" in says("What is your pickup CODE?")


def test_several_topics_are_answered_in_the_order_asked(says):
    answer = says("Which cup, and which code?")
    assert 0 <= answer.index("own") < answer.index("1000")


def test_a_topic_that_the_user_does_not_know_is_not_invented(says):
    answers = {says("Your name?", seed=seed) for seed in range(20)}
    assert len(answers) > 1
    assert all("don't know" in answer for answer in answers)


def test_nothing_but_the_facts_asked_for_is_said(says, task):
    for words in ["Hello!", "Which cup?", "Shall I?", "", "Anything else?", "Paper ok?"]:
        for seed in range(20):
            answer = says(words, seed=seed)
            assert task.user.facts["code"] not in answer
            assert words == "Which cup?" or task.user.facts["cup"] not in answer.split()


def test_wording_varies_with_the_seed_and_follows_it(says):
    answers = [says("Your code?", seed=seed) for seed in range(30)]
    assert len(set(answers)) == 3
    assert answers == [says("Your code?", seed=seed) for seed in range(30)]


@pytest.mark.parametrize(
    ("words", "start"),
    [("Is paper fine?", "No"), ("Do you want a receipt?", "Yes"), ("I order it, is that right?", "Yes")],
)
def test_a_request_to_confirm_is_answered_as_the_context_says(says, words, start):
    for seed in range(20):
        assert says(words, seed=seed).startswith(start)


def test_decisions_that_differ_each_say_what_they_are_about(says):
    answer = says("Is paper fine? Do you want a receipt?")
    assert answer.index("paper: No") < answer.index("receipt: Yes")


def test_a_consent_without_a_decision_is_neither_yes_nor_no(says, task):
    undecided = dataclasses.replace(task, user=dataclasses.replace(task.user, consents={}))
    for seed in range(20):
        assert not says("Is paper fine?", seed=seed, task=undecided).startswith(("Yes", "No"))


def test_the_request_is_said_again_when_nothing_can_be_answered(says, task):
    assert all(task.user.request in says("Good morning.", seed=seed) for seed in range(20))


@pytest.mark.parametrize("words", ["Anything else?", "Would you like anything else?", "Shall I do something else?"])
def test_the_conversation_ends_when_asked_after_a_call(says, words):
    answers = {says(words, *CALLED, seed=seed) for seed in range(20)}
    assert len(answers) > 1
    assert all(answer.endswith(DONE_MARK) for answer in answers)


def test_the_conversation_does_not_end_before_the_agent_acted_on_the_last_answer(says):
    acted_before = (*CALLED, Turn("Your code?"), Text("user", "1000."))
    for between in [(), acted_before, (Turn(), ToolResult("call_0", "x", "There is no tool.", "invalid"))]:
        assert DONE_MARK not in says("Anything else?", *between)


def test_a_question_comes_before_the_end(says):
    assert DONE_MARK not in says("Which code? And is there anything else?", *CALLED)
