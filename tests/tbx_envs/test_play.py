import pytest

from tbx_envs.env import ToolEnv
from tbx_envs.evaluation.task_lists import find_task
from tbx_envs.messages import Turn
from tbx_envs.play import play


@pytest.fixture
def env(kiosk):
    env = ToolEnv("kiosk/order/000")
    yield env
    env.close()


def played(env, *lines):
    """What `play` returned and everything it showed, given these lines."""
    shown = []
    given = iter(lines)

    def read():
        try:
            return next(given)
        except StopIteration:
            raise EOFError from None

    return play(env, 0, read, shown.append), "\n".join(shown)


def test_a_person_can_pass_a_task(env):
    import json

    calls = [f"/{call.tool} {json.dumps(dict(call.arguments))}" for call in find_task("kiosk/order/000").expected_calls]
    passed, shown = played(env, "Hello!", *calls, "/done Here you are.")
    assert passed is True
    assert "ended: done" in shown
    assert find_task("kiosk/order/000").query in shown


def test_a_person_who_does_nothing_fails_and_is_told_why(env):
    passed, shown = played(env, "/done")
    assert passed is False
    assert "failed:" in shown


def test_a_person_can_leave_without_an_end(env):
    assert played(env)[0] is None
    assert played(env, "/quit")[0] is None


def test_what_cannot_be_done_is_explained_and_costs_no_turn(env):
    _, shown = played(env, "/tools", "/rules", "/fly", "/place_order [1]", "/place_order {", "", "/quit")
    assert "/list_items {" in shown
    assert "pickup code" in shown
    assert "'/fly' is neither a command nor a tool" in shown
    assert shown.count("Arguments are one JSON object") == 2
    assert len(env.transcript) == 2


@pytest.mark.parametrize("line", ["list_items", 'place_order {"item": "bun"}', "quit", "done"])
def test_a_call_without_its_slash_is_not_said_to_the_user(env, line):
    _, shown = played(env, line, "/quit")
    assert f"it is a call: /{line}\n" in shown and f"/say {line}" in shown
    assert len(env.transcript) == 2


@pytest.mark.parametrize("line", ['place_order item="bun"', 'place_order(item="bun")', "place_order item = bun"])
def test_a_call_in_another_spelling_is_not_said_to_the_user_either(env, line):
    _, shown = played(env, line, "/quit")
    assert 'it is a call: /place_order {"key": "value"}\n' in shown and f"/say {line}" in shown
    assert len(env.transcript) == 2


def test_words_that_look_like_a_call_can_be_said(env):
    played(env, "/say list_items", "list_items is a tool of mine.", "/quit")
    assert [message.text for message in env.transcript if isinstance(message, Turn)] == [
        "list_items",
        "list_items is a tool of mine.",
    ]


def test_a_misspelt_tool_is_told_the_near_one(env):
    assert "'/list_item' is neither a command nor a tool. Did you mean '/list_items'" in played(env, "/list_item")[1]
