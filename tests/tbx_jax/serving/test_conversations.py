"""Conversations led through a thread, against the sampler used directly."""

import threading

import pytest
from small_model import SAMPLING, random_tokens, small_model

from tbx_envs.errors import PolicyFault
from tbx_jax.sampler import dispatch_shapes
from tbx_jax.sampler.sampler import Sampler
from tbx_jax.serving.conversations import Conversations, Question

MODEL, PARAMS = small_model()
END = frozenset({3, 11})
TWO_SLOTS = SAMPLING.model_copy(update={"slots": 2})
WAIT_S = 120


@pytest.fixture(autouse=True)
def one_chunk(monkeypatch):
    """Fewer programs to compile."""
    monkeypatch.setattr(dispatch_shapes, "CHUNKS", (16,))


def prompt(number):
    return random_tokens(number, 20 + number).tolist()


def alone(tokens, *turn_key, **settings):
    """What a sampler of its own writes."""
    sampler = Sampler(MODEL, END, TWO_SLOTS, 0)
    sampler.begin(0, tokens, turn_key, **settings)
    while True:
        for turn in sampler.advance(PARAMS):
            return turn.tokens


@pytest.fixture
def table():
    sampler = Sampler(MODEL, END, TWO_SLOTS, 0)
    with Conversations(sampler, PARAMS, most=3) as conversations:
        yield conversations, sampler


def answer(conversations, tokens, *turn_key, **settings):
    return conversations.ask(Question(tokens, turn_key, **settings)).result(WAIT_S)


def test_questions_asked_together_get_what_each_gets_alone(table):
    conversations, _ = table
    heat = [1.0 + number for number in range(7)]
    asked = [conversations.ask(Question(prompt(n), (n,), temperature=heat[n])) for n in range(7)]
    for number, future in enumerate(asked):
        assert future.result(WAIT_S).turn.tokens == alone(prompt(number), number, temperature=heat[number])


def test_a_conversation_goes_on_from_what_is_held_of_it(table):
    conversations, _ = table
    first = answer(conversations, prompt(1), "a")
    assert first.cached_tokens == 0
    longer = [*prompt(1), *first.turn.tokens, 4, 5]
    second = answer(conversations, longer, "b")
    assert second.cached_tokens == len(prompt(1)) + len(first.turn.tokens) - 1
    assert second.turn.tokens == alone(longer, "b")
    # As a client sees it that spells the last answer otherwise: what was asked before is kept.
    other = [*prompt(1), *first.turn.tokens, (4 + 1) % 13, 5, 6]
    assert answer(conversations, other, "c").cached_tokens == 0  # that conversation has gone on
    again = answer(conversations, longer, "b")
    assert (again.turn.tokens, again.cached_tokens) == (second.turn.tokens, len(longer) - 1)


def test_the_conversation_that_was_used_least_recently_is_forgotten(table):
    conversations, sampler = table
    for number in range(3):
        answer(conversations, prompt(number), number)
    answer(conversations, prompt(0), 0)
    answer(conversations, prompt(3), 3)
    assert len(sampler._episodes) == 3
    assert answer(conversations, prompt(0), 0).cached_tokens > 0
    assert answer(conversations, prompt(1), 1).cached_tokens == 0


def test_more_questions_than_are_remembered_are_all_answered_and_then_forgotten(table):
    conversations, sampler = table
    asked = [conversations.ask(Question(prompt(number), (number,))) for number in range(9)]
    assert all(future.result(WAIT_S).turn.tokens for future in asked)
    answer(conversations, prompt(20), 20)
    assert len(sampler._episodes) <= 3


def test_an_answer_ends_when_it_is_enough(table):
    conversations, _ = table
    whole = answer(conversations, prompt(4), "c").turn
    assert len(whole.tokens) > TWO_SLOTS.decode_steps
    short = answer(conversations, prompt(4), "c", is_enough=lambda written: len(written) >= 1).turn
    assert short.tokens == whole.tokens[: TWO_SLOTS.decode_steps] and not short.stopped


def test_an_answer_that_nobody_waits_for_is_not_written_to_the_end(table):
    conversations, sampler = table
    may_go_on, advanced = threading.Event(), threading.Event()
    advance = sampler.advance

    def slow_advance(params):
        advanced.set()
        assert may_go_on.wait(WAIT_S)
        return advance(params)

    sampler.advance = slow_advance
    unwanted = conversations.ask(Question(prompt(5), ("x",)))
    assert advanced.wait(WAIT_S) and unwanted.cancel()
    dropped = conversations.ask(Question(prompt(6), ("y",)))
    assert dropped.cancel()
    may_go_on.set()
    assert answer(conversations, prompt(7), "z").turn.tokens
    assert not sampler.busy


def test_a_sampler_that_breaks_tells_those_who_wait_and_those_who_come(caplog):
    sampler = Sampler(MODEL, END, TWO_SLOTS, 0)

    def broken(params):
        raise MemoryError("no memory")

    sampler.advance = broken
    with Conversations(sampler, PARAMS, most=3) as conversations:
        with pytest.raises(PolicyFault, match="the sampler broke: MemoryError"):
            answer(conversations, prompt(0), 0)
        with pytest.raises(PolicyFault, match="no memory"):
            answer(conversations, prompt(0), 0)
        assert isinstance(conversations.broken, MemoryError)
    assert "the sampler broke" in caplog.text


def test_closing_refuses_what_is_not_answered_and_ends_the_thread():
    sampler = Sampler(MODEL, END, TWO_SLOTS, 0)
    advanced, may_go_on = threading.Event(), threading.Event()
    sampler.advance = lambda params: advanced.set() or (may_go_on.wait(WAIT_S) and [])
    with Conversations(sampler, PARAMS, most=3) as conversations:
        waiting = conversations.ask(Question(prompt(0), ("x",)))
        assert advanced.wait(WAIT_S)
        threading.Timer(0.05, may_go_on.set).start()
    with pytest.raises(PolicyFault, match="the server went down"):
        waiting.result(WAIT_S)
    with pytest.raises(PolicyFault, match="going down"):
        conversations.ask(Question(prompt(0), ("x",)))
    assert not conversations._thread.is_alive()
