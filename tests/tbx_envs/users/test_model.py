import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tbx_envs.agents import Attempt
from tbx_envs.agents.turns import play_turns
from tbx_envs.domains import load_domain
from tbx_envs.endpoints.client import ChatEndpoint, EndpointConfig
from tbx_envs.endpoints.costs import NOTHING_USED, TokenUsage
from tbx_envs.episode import FinishReason
from tbx_envs.errors import ConfigError, UserFault
from tbx_envs.messages import DONE_MARK, Text, ToolCall, ToolResult, Turn
from tbx_envs.runtime import EpisodeOptions
from tbx_envs.testing.loopback_endpoint import Answers, LoopbackEndpoint, Says
from tbx_envs.users.model import (
    CONVERSATION,
    KNOWLEDGE,
    MESSAGE,
    NOTHING,
    UNKNOWN,
    ModelUser,
    user_context_of,
    user_prompt,
)

OPENING = (Text("system", "The rules of the shop."), Text("user", "I want a bike."))
CONTEXT = "Your email is ana@example.org."
MARKS = [f"<{slash}{name}>" for name in (CONVERSATION, KNOWLEDGE, MESSAGE) for slash in ("", "/")]

# Text that is likely to hold what could break the prompt.
NASTY = st.lists(
    st.sampled_from([*MARKS, DONE_MARK, "< / conversation >", "</CONVERSATION", "<", ">", "DONE", "User: ", "\n", "\r"])
    | st.text(max_size=4),
    max_size=8,
).map("".join)


@pytest.fixture
def user_of():
    """Makes a user whose model answers with these words, or with this reply; gives the server too."""
    opened = []

    def make(reply, **options):
        replies = reply if callable(reply) else lambda asked: Says(reply) if isinstance(reply, str) else reply
        server = LoopbackEndpoint(replies)
        endpoint = ChatEndpoint(EndpointConfig(server.base_url, "user", max_retries=0))
        opened.extend([server, endpoint])
        return ModelUser(endpoint, CONTEXT, **options), server

    yield make
    for one in reversed(opened):
        one.close()


def blocks(prompt):
    """The three parts of the second message, read back by its marks alone."""
    text = prompt[1]["content"]
    return {
        name: re.fullmatch(rf".*<{name}>\n(.*)\n</{name}>.*", text, re.DOTALL)[1]
        for name in (CONVERSATION, KNOWLEDGE, MESSAGE)
    }


# --- the prompt ---------------------------------------------------------------------------------------------


def test_the_prompt_shows_what_the_user_could_see_and_nothing_else():
    transcript = (
        *OPENING,
        Turn("Let me look.", (ToolCall("call_0", "list_bikes", {}),), reasoning="I must not say 7."),
        ToolResult("call_0", "list_bikes", "[secret rows]"),
        Text("assistant", "There are 3 bikes."),
        Turn(reasoning="only thinking"),
        Text("user", "Fine."),
        Turn("What is\nyour email?"),
    )
    prompt = user_prompt(transcript, CONTEXT, can_end=False)
    assert [message["role"] for message in prompt] == ["system", "user"]
    assert blocks(prompt) == {
        CONVERSATION: (
            "User: I want a bike.\nAssistant: Let me look.\nAssistant: There are 3 bikes.\nUser: Fine.\n"
            "Assistant: What is\n  your email?"
        ),
        KNOWLEDGE: CONTEXT,
        MESSAGE: "What is\nyour email?",
    }
    whole = "".join(message["content"] for message in prompt)
    assert not [words for words in ("rules of the shop", "secret rows", "must not", "only thinking") if words in whole]


def test_only_a_user_who_may_end_is_told_how():
    may, may_not = (user_prompt(OPENING, CONTEXT, can_end=can_end)[0]["content"] for can_end in (True, False))
    assert DONE_MARK in may and DONE_MARK not in may_not


def test_what_is_missing_is_shown_as_nothing():
    found = blocks(user_prompt((), None, can_end=False))
    assert set(found.values()) == {NOTHING}
    assert blocks(user_prompt(OPENING, "", can_end=False))[MESSAGE] == NOTHING  # the user spoke last


@given(said=NASTY, heard=NASTY, context=NASTY, can_end=st.booleans())
def test_nothing_that_is_put_in_can_break_out_of_its_place(said, heard, context, can_end):
    transcript = (Text("user", said), Turn(heard), Text("user", said), Turn(heard))
    prompt = user_prompt(transcript, context, can_end=can_end)
    text = prompt[1]["content"]
    for mark in MARKS:
        assert text.lower().count(mark) == 1
    assert DONE_MARK not in text
    assert prompt[0] == user_prompt(OPENING, CONTEXT, can_end=can_end)[0]
    spoken = [m for m in transcript if m.text.strip()]
    conversation = blocks(prompt)[CONVERSATION]
    begun = [line for line in conversation.splitlines() if line.startswith(("User:", "Assistant:"))]
    assert len(begun) == len(spoken)
    assert not spoken or all(line.startswith(("User: ", "Assistant: ", "  ")) for line in conversation.split("\n"))


@given(st.text(alphabet=st.characters(exclude_characters="<")))
def test_text_without_marks_reaches_the_model_as_it_is(text):
    found = blocks(user_prompt((Text("user", "Hi"), Turn(text)), text, can_end=False))
    assert found[KNOWLEDGE] == found[MESSAGE] == (text.strip() or NOTHING)


# --- what the model wrote -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("  It is ana@example.org.\n", "It is ana@example.org."),
        ("User: It is ana.", "It is ana."),
        ("USER:It is ana.", "It is ana."),
        ("Assistant: User: twice", "User: twice"),
        ('"It is ana."', "It is ana."),
        ("User: 'It is ana.'", "It is ana."),
        ("“It is ana.”", "It is ana."),
        ('"It" is "ana"', 'It" is "ana'),
        ("'tis ana", "'tis ana"),
        ('"', '"'),
        ("", UNKNOWN),
        ("   \n", UNKNOWN),
        ('""', UNKNOWN),
        ("User:", UNKNOWN),
        ("<think>\nI am the user.\n</think>\n\nIt is ana.", "It is ana."),
        ("I am the user.</think>It is ana.", "It is ana."),
        ("The user: nobody", "The user: nobody"),
    ],
)
def test_what_the_model_wrote_is_cleaned_up(user_of, written, said):
    user, _ = user_of(written)
    assert user.answer((*OPENING, Turn("Your email?"))) == said


@pytest.mark.parametrize("written", ["Thanks! <DONE>", '"Thanks! <DONE>"', "User: Thanks! <DONE>"])
def test_a_user_who_may_end_the_conversation_ends_it_with_the_mark_last(user_of, written):
    user, _ = user_of(written, can_end=True)
    assert user.answer((*OPENING, Turn("Anything else?"))) == "Thanks! <DONE>"
    assert user.can_end


@pytest.mark.parametrize(("written", "said"), [("Thanks! <DONE>", "Thanks!"), ("<DONE>", UNKNOWN)])
def test_a_user_who_may_not_end_the_conversation_cannot(user_of, written, said):
    user, _ = user_of(written)
    assert user.answer((*OPENING, Turn("Anything else?"))) == said


@pytest.mark.parametrize(
    "silent", [Says(""), Says("", reasoning="I am the user."), Says("<think>Hm.</think>"), Says("User:")], ids=str
)
@pytest.mark.parametrize(
    ("answers", "share", "is_void"), [("s", 0.1, True), ("s" + 8 * "w", 0.1, True), ("s" + 9 * "w", 0.1, False)]
)
def test_a_user_that_says_nothing_too_often_voids_the_episode(user_of, silent, answers, share, is_void):
    replies = iter(silent if answer == "s" else Says("Fine.") for answer in answers)
    user, _ = user_of(lambda asked: next(replies), max_silent_share=share)
    for answer in answers:
        assert user.answer((*OPENING, Turn("Your email?"))) == (UNKNOWN if answer == "s" else "Fine.")
    assert user.silences == 1
    if not is_void:
        user.conclude()
        return
    with pytest.raises(UserFault, match=f"said nothing in 1 of {len(answers)} answers"):
        user.conclude()


def test_silences_are_in_the_usage_and_void_before_the_check(user_of):
    def fault_and_silences(share):
        user, _ = user_of("", max_silent_share=share)
        options = EpisodeOptions(user=lambda task, domain, seed: user)
        (episode,) = play_turns(
            [Attempt(load_domain("clinic").uids()[0], 0, 0)], lambda attempt, opening: asking(), options=options
        )
        return episode.fault and episode.fault.kind, episode.report is None, episode.usage["user_silences"]

    def asking():
        yield Turn("Your email?")
        yield Turn(DONE_MARK)

    assert fault_and_silences(0.5) == ("user", True, 1)
    assert fault_and_silences(1.0) == (None, False, 1)


def test_every_answer_is_asked_for_anew_with_two_messages_and_its_own_seed(user_of):
    user, server = user_of("Fine.", seed=5)
    transcript = (*OPENING, Turn("Your email?"))
    user.answer(transcript)
    user.answer((*transcript, Text("user", "Fine."), Turn("And your name?")))
    user.answer(transcript)
    assert [len(asked.body["messages"]) for asked in server.asked] == [2, 2, 2]
    seeds = [asked.body["seed"] for asked in server.asked]
    assert seeds[0] == seeds[2] != seeds[1] and all(0 <= seed < 2**31 for seed in seeds)
    unseeded, other = user_of("Fine.")
    unseeded.answer(transcript)
    assert "seed" not in other.asked[0].body


def test_the_tokens_of_all_answers_are_counted(user_of):
    user, _ = user_of("Fine.")
    assert user.usage == NOTHING_USED
    for _ in range(3):
        user.answer((*OPENING, Turn("Your email?")))
    assert user.usage == TokenUsage(prompt=300, cached=180, completion=30, reasoning=12)


# --- failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [Answers(500, {"error": {"message": "no memory"}}), Answers(400, {"error": {"message": "context length"}})],
)
def test_a_model_that_does_not_answer_is_a_fault_of_the_user(user_of, reply):
    user, _ = user_of(reply)
    with pytest.raises(UserFault, match=r"the simulated user: POST .*(no memory|context length)"):
        user.answer((*OPENING, Turn("Your email?")))


def test_an_answer_that_was_cut_off_is_no_answer(user_of):
    user, _ = user_of(Says("It is an", finish_reason="length"))
    with pytest.raises(UserFault, match="Raise max_tokens"):
        user.answer((*OPENING, Turn("Your email?")))
    assert user.usage.completion == 10


# --- built-in tasks -----------------------------------------------------------------------------------------


def test_the_context_of_a_built_in_task_has_everything_its_user_knows_and_decides():
    domain = load_domain("clinic")
    for uid in domain.uids("heldout")[::9]:
        task = domain.task(uid)
        context = user_context_of(task)
        assert task.user.request in context
        assert all(value in context for value in task.user.facts.values())
        assert context.count("agree\n") + context.endswith("agree") == sum(task.user.consents.values())


def test_a_user_without_facts_and_decisions_has_only_its_request(kiosk):
    task = kiosk.task("kiosk/order/000")
    bare = dataclasses.replace(task, user=dataclasses.replace(task.user, facts={}, consents={}))
    assert user_context_of(bare) == f"You want this: {task.user.request}"


def test_a_model_plays_the_user_of_a_built_in_task_to_its_end(kiosk):
    task = kiosk.task("kiosk/order/000")
    words = iter([f"My code is {task.user.facts['code']}.", f"That is all. {DONE_MARK}"])

    def agent(attempt, opening):
        answers = yield Turn("What is your pickup code?")
        assert answers == (Text("user", "My code is 1000."),)
        yield Turn("Anything else?")

    with (
        LoopbackEndpoint(lambda asked: Says(next(words))) as server,
        ChatEndpoint(EndpointConfig(server.base_url, "user")) as endpoint,
    ):
        (episode,) = play_turns(
            [Attempt(task.uid, 0, 0)],
            agent,
            options=EpisodeOptions(
                user=lambda task, domain, seed: ModelUser(endpoint, user_context_of(task), can_end=True)
            ),
        )
    assert episode.fault is None and episode.finish_reason == FinishReason.USER_DONE
    assert "1000" in server.asked[0].body["messages"][1]["content"]


def test_a_users_model_that_is_down_voids_the_episode_and_scores_nothing(kiosk):
    def agent(attempt, opening):
        yield Turn("What is your pickup code?")

    with (
        LoopbackEndpoint(lambda asked: Answers(500)) as server,
        ChatEndpoint(EndpointConfig(server.base_url, "user", max_retries=0)) as endpoint,
    ):
        (episode,) = play_turns(
            [Attempt("kiosk/order/000", 0, 0)],
            agent,
            options=EpisodeOptions(user=lambda task, domain, seed: ModelUser(endpoint, "")),
        )
    assert (episode.reward, episode.fault.kind) == (None, "user")


@pytest.mark.parametrize("concurrency", [1, 2])
def test_an_endpoint_that_answers_no_request_ends_the_run_and_voids_no_episode(user_of, kiosk, concurrency):
    user, server = user_of(Answers(401, {"error": "no"}))
    started, ended = [], []

    def attempts():
        for number in range(100):
            started.append(number)
            yield Attempt("kiosk/order/000", number, 0)

    def speaking(attempt, opening):
        while True:
            yield Turn("Hello")

    episodes = play_turns(
        attempts(), speaking, concurrency=concurrency, options=EpisodeOptions(user=lambda task, domain, seed: user)
    )
    with pytest.raises(ConfigError, match=r"the simulated user: POST .* answered 401 \(no\)"):
        ended.extend(episodes)
    assert not ended and len(started) < 10 and len(server.asked) < 10
