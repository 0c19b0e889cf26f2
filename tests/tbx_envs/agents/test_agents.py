import dataclasses
import json

import pytest

from tbx_envs.agents import Attempt
from tbx_envs.agents.idle import IdleAgent
from tbx_envs.agents.oracle import OracleAgent
from tbx_envs.agents.scripted import ScriptedAgent
from tbx_envs.agents.turns import play_turns
from tbx_envs.domains import load_domain
from tbx_envs.episode import FinishReason
from tbx_envs.errors import ConfigError, DomainError, ToolFault
from tbx_envs.evaluation.task_lists import find_task
from tbx_envs.evaluation.transcripts import episode_from_record, episode_record, episode_text
from tbx_envs.messages import DONE_MARK, BadCall, Text, ToolCall, ToolResult, Turn

UID = "kiosk/order/000"


@pytest.fixture(autouse=True)
def _kiosk(kiosk):
    return kiosk


def said(episode, kind):
    return [message for message in episode.transcript if isinstance(message, kind)]


def test_the_oracle_makes_the_expected_calls_one_a_turn_and_passes():
    (episode,) = OracleAgent().run([Attempt(UID, 0, 5)])
    made = [call for turn in said(episode, Turn) for call in turn.calls]
    expected = find_task(UID).expected_calls
    assert [(call.name, dict(call.arguments)) for call in made] == [(c.tool, dict(c.arguments)) for c in expected]
    assert all(len(turn.calls) <= 1 for turn in said(episode, Turn))
    assert (episode.passed, episode.finish_reason, episode.seed) == (True, FinishReason.DONE, 5)


def test_the_idle_agent_says_nothing_but_the_end_and_does_not_pass():
    (episode,) = IdleAgent().run([Attempt(UID, 3, 0)])
    assert said(episode, Turn) == [Turn(text="<DONE>")]
    assert (episode.passed, episode.attempt) == (False, 3)


def test_the_scripted_agent_passes_when_it_breaks_no_rule():
    (episode,) = ScriptedAgent(error_rate=0.0).run([Attempt(UID, 0, 1)])
    assert episode.passed


def test_errors_are_a_function_of_the_attempts_seed_alone():
    attempts = [Attempt("clinic/cancel_visit/000", n, n) for n in range(12)]
    first = [episode.transcript for episode in ScriptedAgent(0.5).run(attempts)]
    again = [episode.transcript for episode in ScriptedAgent(0.5).run(reversed(attempts))]
    assert first == again[::-1]
    assert len(set(map(str, first))) > 1


def test_attempts_are_made_one_by_one_and_not_ahead():
    asked = []

    def attempts():
        for number in range(3):
            asked.append(number)
            yield Attempt(UID, number, 0)

    episodes = IdleAgent().run(attempts())
    assert next(episodes).attempt == 0
    assert asked == [0]


def test_an_agent_is_sent_what_answers_its_turn():
    heard = []

    def agent(attempt, opening):
        heard.append((yield Turn(text="What is your pickup code?")))
        heard.append((yield Turn(calls=(ToolCall("x", "list_items", {}), ToolCall("y", "no_such_tool", {})))))
        yield Turn(text="<DONE>")

    list(play_turns([Attempt(UID, 0, 0)], agent))
    assert [type(message) for message in heard[0]] == [Text]
    assert [(type(message), message.status) for message in heard[1]] == [(ToolResult, "ok"), (ToolResult, "invalid")]


def test_an_agent_that_raises_voids_its_episode_and_disturbs_no_other():
    def agent(attempt, opening):
        yield Turn(text="Hello")
        if attempt.index == 1:
            raise RuntimeError("the model server is gone")
        yield Turn(text="<DONE>")

    episodes = list(play_turns([Attempt(UID, number, 0) for number in range(3)], agent))
    assert [episode.passed for episode in episodes] == [False, None, False]
    void = episodes[1]
    assert (void.reward, void.report, void.finish_reason) == (None, None, None)
    assert void.fault.kind == "policy"
    assert "RuntimeError: the model server is gone" in void.fault.message
    assert said(void, Turn) == [Turn(text="Hello")]


def test_an_agent_that_cannot_be_made_voids_its_episode():
    def broken(attempt, opening):
        raise KeyError("no such family")

    (episode,) = play_turns([Attempt(UID, 0, 0)], broken)
    assert episode.fault.kind == "policy"


def test_an_agent_that_stops_before_the_end_voids_its_episode():
    def agent(attempt, opening):
        yield Turn(text="Hello")

    (episode,) = play_turns([Attempt(UID, 0, 0)], agent)
    assert episode.fault.kind == "policy"
    assert "the agent returned before the end of the episode" in episode.fault.message


def test_a_fault_of_the_environment_is_void_with_its_own_kind(monkeypatch):
    def broken(*arguments, **options):
        raise ToolFault("the tool server is gone")

    monkeypatch.setattr("tbx_envs.domains.in_process.InProcessSession.call", broken)
    (episode,) = OracleAgent().run([Attempt(UID, 0, 0)])
    assert (episode.reward, episode.fault.kind) == (None, "tool")


def test_an_unknown_task_stops_the_agent():
    with pytest.raises(DomainError):
        list(IdleAgent().run([Attempt("clinic/nothing/000", 0, 0)]))


def test_episodes_survive_their_record(kiosk):
    assert load_domain("kiosk") is kiosk
    for agent in (OracleAgent(), IdleAgent()):
        for episode in agent.run([Attempt(UID, 0, 0)]):
            odd = Turn(text="é", calls=(BadCall("call_9", "{", "broken"),), reasoning="hm", truncated=True)
            episode = dataclasses.replace(episode, transcript=(*episode.transcript, odd))
            assert episode_from_record(json.loads(json.dumps(episode_record(episode)))) == episode
            assert "ended by done" in episode_text(episode)
            assert "system:" not in episode_text(episode)
            assert "system:" in episode_text(episode, system=True)


def test_episodes_that_run_at_the_same_time_are_the_same_episodes():
    attempts = [Attempt(f"clinic/cancel_visit/{number:03d}", 0, number) for number in range(12)]

    def records(concurrency):
        episodes = ScriptedAgent(error_rate=0.5, concurrency=concurrency).run(attempts)
        return {episode.uid: dataclasses.replace(episode, seconds={}) for episode in episodes}

    assert records(4) == records(1)


def test_agents_refuse_tasks_on_which_they_cannot_act(kiosk_with):
    unsolved = f"{kiosk_with(expected_calls=()).name}/order/000"
    with pytest.raises(ConfigError, match=rf"there are none in 1 of 2 tasks: {unsolved}\. Leave these out"):
        OracleAgent.refuse_unsuited([UID, unsolved])
    with pytest.raises(ConfigError, match="policy oracle makes a task's expected calls"):
        list(OracleAgent().run([Attempt(unsolved, 0, 0)]))
    idle_is_right = f"{kiosk_with(expected_calls=(), idle_passes='there is nothing to do').name}/order/000"
    (episode,) = OracleAgent().run([Attempt(idle_is_right, 0, 0)])
    assert episode.fault is None
    ScriptedAgent.refuse_unsuited([UID])


@pytest.mark.parametrize("yielded", [None, 7, b"<DONE>", Turn(text=7), Turn(calls=(7,)), object()])
def test_an_agent_that_yields_no_turn_voids_its_own_episode_and_no_other(kiosk, yielded):
    def agent(attempt, opening):
        yield yielded if attempt.index == 0 else Turn(DONE_MARK)

    broken, sound = play_turns([Attempt(UID, 0, 0), Attempt(UID, 1, 0)], agent)
    assert (broken.fault.kind, broken.reward, sound.fault) == ("policy", None, None)
    assert "what the agent yielded is" in broken.fault.message


def test_running_at_the_same_time_reads_attempts_only_as_slots_become_free():
    taken = []

    def attempts():
        for number in range(20):
            taken.append(number)
            yield Attempt(UID, number, number)

    episodes = OracleAgent(concurrency=3).run(attempts())
    next(episodes)
    assert len(taken) == 3
    episodes.close()
    assert len(taken) == 3


def test_an_opening_has_the_first_messages_and_the_tools():
    openings = []

    def agent(attempt, opening):
        openings.append(opening)
        yield Turn(text="<DONE>")

    list(play_turns([Attempt(UID, 0, 0)], agent))
    (opening,) = openings
    assert [message.role for message in opening.messages] == ["system", "user"]
    assert opening.task.uid == UID and opening.messages[1].text == opening.task.query
    assert {tool["function"]["name"] for tool in opening.tools} == {tool.name for tool in load_domain("kiosk").tools}
