"""An infrastructure error voids the episode. It is never a reward, and it never outlives the episode."""

import threading

import pytest
from sqlalchemy import text

from tbx_envs.domains import runtime as built_in
from tbx_envs.domains.state_check import check_state
from tbx_envs.env import ToolEnv
from tbx_envs.errors import ActionError, CheckFault, EnvironmentFault, ToolFault, UserFault
from tbx_envs.messages import ToolCall, Turn
from tbx_envs.tools.tool import ToolContext, tool

ORDER = Turn(calls=(ToolCall("", "place_order", {"item": "tea", "quantity": 1, "code": "1000"}),))


@tool(mutates=True)
def explode(context: ToolContext) -> str:
    """Write, then break."""
    context.db.execute(text("DELETE FROM orders"))
    context.db.commit()  # a tool must not commit, but even this is undone: the world is discarded
    raise ZeroDivisionError("boom")


EXPLODE = Turn(calls=(ToolCall("", "explode", {}),))


def assert_void(env, kind, words):
    episode = env.episode(2)
    assert episode.fault.kind == kind and words in episode.fault.message
    assert (episode.reward, episode.report, episode.passed) == (None, None, None)
    assert episode.finish_reason == ("done" if kind == "check" else None)
    assert (episode.uid, episode.attempt, episode.seed) == (env.task.uid, 2, 5)
    with pytest.raises(ActionError, match=r"is void.*call reset"):
        env.step("<DONE>")


def assert_a_new_episode_is_sound(env):
    env.reset(seed=5)
    env.step(ORDER)
    assert env.step("<DONE>")[1] == 1.0
    assert env.episode(0).fault is None


def test_a_tool_that_raises_an_undocumented_exception_voids_the_episode(kiosk_with):
    domain = kiosk_with(explode)
    env = ToolEnv(f"{domain.name}/order/000")
    env.reset(seed=5)
    env.step(ORDER)  # the world is already as expected, but there is still no reward
    with pytest.raises(ToolFault, match="ZeroDivisionError: boom"):
        env.step(EXPLODE)
    assert_void(env, "tool", "ZeroDivisionError")
    assert_a_new_episode_is_sound(env)


def test_calls_after_one_with_a_fault_are_not_executed(kiosk_with):
    ran = []

    @tool(mutates=False)
    def record(context: ToolContext) -> str:
        """Record that it ran."""
        ran.append(1)
        return "ok"

    domain = kiosk_with(explode, record)
    env = ToolEnv(f"{domain.name}/order/000")
    env.reset(seed=5)
    with pytest.raises(ToolFault):
        env.step(Turn(calls=tuple(ToolCall("", name, {}) for name in ("record", "explode", "record"))))
    assert ran == [1]


def test_a_tool_that_hangs_voids_the_episode(kiosk_with):
    release = threading.Event()

    @tool(mutates=True)
    def hang(context: ToolContext) -> str:
        """Hang, then write."""
        release.wait(60)
        context.db.execute(text("DELETE FROM orders"))
        return "late"

    domain = kiosk_with(hang)
    env = ToolEnv(f"{domain.name}/order/000", tool_timeout_s=0.1)
    env.reset(seed=5)
    with pytest.raises(ToolFault, match=r"did not answer within 0\.1 s"):
        env.step(Turn(calls=(ToolCall("", "hang", {}),)))
    assert_void(env, "tool", "did not answer")
    release.set()
    assert_a_new_episode_is_sound(env)


class FailingUser:
    def __init__(self, error, answers=0):
        self.error, self.answers = error, answers

    def answer(self, transcript):
        if self.answers == 0:
            raise self.error
        self.answers -= 1
        return "Go on."


@pytest.mark.parametrize("error", [UserFault("the model server is down"), ConnectionError("refused")])
def test_a_user_that_fails_voids_the_episode(kiosk, error):
    env = ToolEnv("kiosk/order/000", user=lambda task, domain, seed: FailingUser(error, answers=1))
    env.reset(seed=5)
    env.step(ORDER)
    env.step("Hello")
    with pytest.raises(UserFault, match=str(error)):
        env.step("Hello")
    assert_void(env, "user", str(error))


def test_a_user_that_says_no_text_voids_the_episode(kiosk):
    class Silent:
        def answer(self, transcript):
            return None

    env = ToolEnv("kiosk/order/000", user=lambda task, domain, seed: Silent())
    env.reset(seed=5)
    with pytest.raises(UserFault, match="answered with None"):
        env.step("Hello")
    assert_void(env, "user", "None")


def test_a_user_that_cannot_be_made_voids_the_episode_at_reset(kiosk):
    def no_user(task, domain, seed):
        raise ConnectionError("refused")

    env = ToolEnv("kiosk/order/000", user=no_user)
    with pytest.raises(UserFault, match="refused"):
        env.reset(seed=5)
    assert_void(env, "user", "refused")


def test_a_check_that_crashes_voids_the_episode(kiosk, monkeypatch):
    def crash(world, template):
        raise MemoryError("no more")

    env = ToolEnv("kiosk/order/000")
    env.reset(seed=5)
    env.step(ORDER)
    monkeypatch.setattr(built_in, "check_state", crash)
    with pytest.raises(CheckFault, match="MemoryError: no more"):
        env.step("<DONE>")
    assert_void(env, "check", "no more")
    monkeypatch.setattr(built_in, "check_state", check_state)
    assert_a_new_episode_is_sound(env)


def test_every_fault_is_an_environment_fault():
    assert all(issubclass(fault, EnvironmentFault) for fault in (ToolFault, UserFault, CheckFault))
    assert {fault.kind for fault in (ToolFault, UserFault, CheckFault)} == {"tool", "user", "check"}


def test_a_user_that_does_not_answer_in_time_voids_the_episode(kiosk):
    release = threading.Event()

    class Silent:
        def answer(self, transcript):
            release.wait(60)
            return "too late"

    env = ToolEnv("kiosk/order/000", user=lambda task, domain, seed: Silent(), user_timeout_s=0.05)
    env.reset(seed=5)
    try:
        with pytest.raises(UserFault, match=r"did not answer \(no result within 0.05 s\).*raise user_timeout_s"):
            env.step("What is your code?")
    finally:
        release.set()
    assert_void(env, "user", "did not answer")
    env._options = env._options.changed({"user": None})
    assert_a_new_episode_is_sound(env)


def test_a_users_own_limit_holds_unless_another_is_given(kiosk, monkeypatch):
    limits = []
    monkeypatch.setattr("tbx_envs.env.within", lambda seconds, call: limits.append(seconds) or "Yes.")

    class Patient:
        timeout_s = None
        answer = print

    for options in ({}, {"user": lambda *_: Patient()}, {"user_timeout_s": 3.0}):
        env = ToolEnv("kiosk/order/000", **options)
        env.reset(seed=5)
        env.step("What is your code?")
    assert limits == [10.0, None, 3.0]
