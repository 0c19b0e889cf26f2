"""The course of a conversation is the one of the contract: the environment against a loop written after its text."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbx_envs.env import ToolEnv
from tbx_envs.episode import CheckReport, FinishReason
from tbx_envs.messages import DONE_MARK, Text, ToolCall, ToolResult, Turn
from tbx_envs.task import Limits
from tbx_envs.tools.session import Answer


class FakeUser:
    def __init__(self, words):
        self.words = iter(words)

    def answer(self, transcript):
        return next(self.words)


@dataclasses.dataclass
class FakeRuntime:
    """Tools `look` (an answer), `tell` (an answer with a direct response) and `stop` (ends the conversation)."""

    user: FakeUser | None
    user_turns: int = 10
    user_may_end: bool = False
    opening: tuple = (Text("system", "Be good."), Text("user", "Hello"))
    tools: tuple = ()
    ends_turn: frozenset = frozenset({"stop"})
    usage: dict = dataclasses.field(default_factory=dict)
    executed: list = dataclasses.field(default_factory=list)

    def call(self, name, arguments):
        self.executed.append(name)
        return Answer(f"{name} was called", "ok", direct="You are told." if name == "tell" else None)

    def evidence(self, transcript):
        return {"length": len(transcript)}

    def check(self, transcript, evidence):
        return CheckReport(True, "fake")

    def close(self):
        pass

    def discard(self, kind):
        pass


def environment(monkeypatch, runtime, agent_turns=10**9):
    env = ToolEnv("kiosk/order/000")
    env.task = dataclasses.replace(env.task, limits=Limits(10, agent_turns))
    monkeypatch.setattr(env.source, "start", lambda task, options, seed: runtime)
    env.reset(seed=0)
    return env


def reference(replies, user_words, *, max_user, max_agent, can_end):
    """Section (g) of the contract, message by message: the finish reason and the calls that were executed."""
    executed, count, turn, replies = [], 0, 0, iter(replies)
    user = None if user_words is None else iter(user_words)
    while True:
        if count >= max_agent:
            return "agent_limit", executed
        if turn > 0:
            if user is None:
                return "no_user_llm", executed
            if turn > max_user + can_end:
                return "user_limit", executed
            if next(user).endswith(DONE_MARK) and can_end:
                return "user_done", executed
        last = None
        while True:
            reply = next(replies)
            parts = (["text"] if reply.text else []) + (["calls"] if reply.calls else [])
            if not parts:
                last = None
                break
            last, cut = parts[-1], False
            for number, part in enumerate(parts):
                if count >= max_agent:
                    last, cut = part, True  # kept, and nothing comes after it
                    assert number == len(parts) - 1
                    break
                count += 1
            if any(call.name == "stop" for call in reply.calls):
                return "end_turn_tool", executed
            if cut or last == "text":
                break
            names = [call.name for call in reply.calls]
            executed += names
            if count >= max_agent:
                break
            count += names.count("tell")
            if count >= max_agent:
                break
        if last == "text" and reply.text.endswith(DONE_MARK):
            return "done", executed
        turn += 1


calls = st.lists(st.sampled_from(["look", "look", "look", "tell", "stop"]), max_size=3)
words = st.sampled_from(["", "", "Let me see.", "Let me see.", f"Good bye. {DONE_MARK}"])
turns = st.builds(lambda text, names: Turn(text, tuple(ToolCall("", n, {}) for n in names)), words, calls)
users = st.none() | st.lists(st.sampled_from(["Yes.", "Yes.", "Yes.", f"Thanks. {DONE_MARK}"]), min_size=8, max_size=8)


@settings(max_examples=400)
@given(
    replies=st.lists(turns, min_size=1, max_size=12),
    user_words=users,
    max_user=st.integers(0, 4),
    max_agent=st.integers(0, 12),
    can_end=st.booleans(),
)
def test_an_episode_ends_when_and_as_the_contract_says(kiosk, replies, user_words, max_user, max_agent, can_end):
    replies = [*replies, *[Turn(f"That is all. {DONE_MARK}")] * 2]  # every conversation ends
    user = None if user_words is None else FakeUser(user_words)
    runtime = FakeRuntime(user, user_turns=max_user + can_end, user_may_end=can_end)
    with pytest.MonkeyPatch.context() as monkeypatch:
        env = environment(monkeypatch, runtime, max_agent)
        for reply in replies:
            _, reward, terminated, truncated, info = env.step(reply)
            if terminated or truncated:
                break
    assert (info["finish_reason"], runtime.executed) == reference(
        replies, user_words, max_user=max_user, max_agent=max_agent, can_end=can_end
    )
    assert reward == 1.0
    assert terminated == (info["finish_reason"] in ("done", "user_done", "end_turn_tool"))
    assert env.episode(0).evidence == {"length": len(env.transcript)}


def test_every_direct_response_of_parallel_calls_is_said_after_the_results(kiosk, monkeypatch):
    env = environment(monkeypatch, FakeRuntime(None))
    calls = tuple(ToolCall("", name, {}) for name in ("tell", "look", "tell"))
    observation, *_ = env.step(Turn(calls=calls))
    said = env.transcript[3:]
    assert [type(message) for message in said] == [ToolResult, ToolResult, ToolResult, Text, Text]
    assert said[3:] == (Text("assistant", "You are told."),) * 2
    assert observation.endswith("You are told.\nYou are told.")


def test_a_call_that_ends_the_conversation_has_an_empty_result_and_nothing_is_executed(kiosk, monkeypatch):
    runtime = FakeRuntime(None)
    env = environment(monkeypatch, runtime)
    env.step(Turn("Stop now.", (ToolCall("", "look", {}), ToolCall("", "stop", {"reason": "x"}))))
    episode = env.episode(0)
    assert episode.finish_reason is FinishReason.END_TURN_TOOL
    assert runtime.executed == []
    assert episode.transcript[3:] == (ToolResult("call_1", "stop", ""),)


def test_calls_count_on_after_those_of_a_history(kiosk, monkeypatch):
    history = (Turn(calls=(ToolCall("call_0", "look", {}),)), ToolResult("call_0", "look", "seen"))
    runtime = FakeRuntime(None, opening=(Text("system", "Be good."), *history, Text("user", "Hello again")))
    env = environment(monkeypatch, runtime)
    assert env.transcript[1:3] == history
    env.step(Turn(calls=(ToolCall("", "look", {}),)))
    assert env.transcript[-1].call_id == "call_1"
