"""Every key of a configuration that concerns episodes arrives in their options, and the options in the episodes."""

import dataclasses
import datetime

import pytest
from hydra import compose, initialize_config_module

from tbx_envs.agents import turns
from tbx_envs.commands.config import EnvironmentConfig, EvaluateConfig, validated
from tbx_envs.commands.environments import concurrency_for, episode_options, opened_endpoints
from tbx_envs.commands.evaluate import build_agent
from tbx_envs.errors import ConfigError
from tbx_envs.evaluation.files import load_spending
from tbx_envs.messages import Text, Turn
from tbx_envs.runtime import EpisodeOptions
from tbx_envs.sources import find_task
from tbx_envs.task import Limits
from tbx_envs.testing.loopback_endpoint import LoopbackEndpoint, Says
from tbx_envs.thinkingbox.dataset.records import DatasetTask
from tbx_envs.thinkingbox.grading.judge import EndpointJudge
from tbx_envs.users.model import user_context_of

UID = "clinic/cancel_visit/000"
MODEL = "endpoint.base_url=http://127.0.0.1:9/v1"

# Override -> the one option that it changes, and its value.
PLAIN = {
    "environment.tool_timeout_s=7": ("tool_timeout_s", 7.0),
    "environment.user_timeout_s=8": ("user_timeout_s", 8.0),
    "environment.check_timeout_s=11": ("check_timeout_s", 11.0),
    "environment.start=spawn": ("start", "spawn"),
    "environment.clock=2025-10-01T13:00:00": ("clock", datetime.datetime(2025, 10, 1, 13)),
    "environment.clock_runs=true": ("clock_runs", True),
    "judge=yes": ("judge", "yes"),
}
MADE = {"user", "chat_format"}  # proved by the tests below


def configured(*overrides):
    with initialize_config_module("tbx_conf", version_base=None):
        return validated(EvaluateConfig, compose("evaluate", overrides=["output_dir=x", *overrides]))


def options_of(*overrides):
    config = configured(*overrides)
    with opened_endpoints(judge=config.judge, user=config.user, agent=config.agent) as endpoints:
        return episode_options(config, endpoints)


def options_in_episodes(monkeypatch, *overrides):
    """What the episodes of the configuration's agent are given: a spy stands where they are made."""
    given = []

    class Spy:
        def __init__(self, num_slots, options=None):
            given.append(options)

        def close(self):
            pass

    monkeypatch.setattr(turns, "EpisodeSlots", Spy)
    config = configured(*overrides)
    with opened_endpoints(judge=config.judge, user=config.user, agent=config.agent) as endpoints:
        assert list(build_agent(config, 0.0, [UID], endpoints).run([])) == []
    assert given and all(options == given[0] for options in given)
    return given[0]


def test_a_served_agent_that_no_policy_names_is_refused():
    config = configured("agent=endpoint", "agent.endpoint.base_url=http://127.0.0.1:9/v1", "agent.endpoint.model=m")
    with (
        opened_endpoints(judge=config.judge, user=config.user, agent=config.agent) as endpoints,
        pytest.raises(ConfigError, match=rf"policy={config.policy} would be measured\. Add policy=endpoint"),
    ):
        build_agent(config, 0.0, [UID], endpoints)


def test_the_default_configuration_is_the_default_options():
    assert options_of() == EpisodeOptions()


def test_every_completion_is_in_the_account_of_the_run_when_it_arrives(tmp_path):
    question = [{"role": "user", "content": "Is it?"}]
    with LoopbackEndpoint(lambda asked: Says("Yes.")) as server:
        keys = (f"base_url={server.base_url}", "model=m")
        served = [f"{role}.endpoint.{key}" for role in ("user", "judge") for key in keys]
        config = configured("user=endpoint", "judge=endpoint", *served)
        with opened_endpoints(judge=config.judge, user=config.user, run_folder=tmp_path) as endpoints:
            assert load_spending(tmp_path) == {}
            for asked, role in enumerate(("user", "judge", "user")):
                used = endpoints.named[role].complete(question).usage
                of_one = dataclasses.replace(used, reasoning=None)  # counts leave it out
                assert load_spending(tmp_path)[role] == (of_one if asked < 2 else of_one + of_one)


@pytest.mark.parametrize("override", PLAIN)
def test_each_key_changes_its_option_and_no_other(override):
    name, value = PLAIN[override]
    assert getattr(EpisodeOptions(), name) != value
    assert options_of(override) == dataclasses.replace(EpisodeOptions(), **{name: value})


def test_every_option_can_be_set_by_a_key_and_every_key_of_the_environment_is_proved():
    assert {name for name, _ in PLAIN.values()} | MADE == {field.name for field in dataclasses.fields(EpisodeOptions)}
    keys = {override.partition("=")[0].removeprefix("environment.") for override in PLAIN}
    assert EnvironmentConfig.model_fields.keys() - keys == {"concurrency"}


@pytest.mark.parametrize("style", ["plain", "motivation"])
def test_a_served_judge_is_asked_in_the_style_that_is_configured(style):
    judge = options_of("judge=endpoint", f"judge.{MODEL}", "judge.endpoint.model=j", f"judge.style={style}").judge
    assert isinstance(judge, EndpointJudge)
    assert (judge.kind, judge._endpoint.config.model) == (style, "j")


@pytest.mark.parametrize("can_end", [True, False])
def test_a_served_user_is_told_the_tasks_context_and_may_end_as_configured(can_end):
    task = find_task(UID)
    with LoopbackEndpoint(lambda asked: Says("I was born in May.")) as server:
        config = configured(
            *("user=endpoint", f"user.endpoint.base_url={server.base_url}", "user.endpoint.model=u"),
            f"user.can_end={can_end}",
        )
        with opened_endpoints(judge=config.judge, user=config.user) as endpoints:
            user = episode_options(config, endpoints).user(task, None, 5)
            assert user.can_end is can_end
            assert user.answer((Text("user", task.query), Turn("When were you born?"))) == "I was born in May."
    (asked,) = server.asked
    assert asked.body["model"] == "u"
    assert any(user_context_of(task) in message["content"] for message in asked.body["messages"])


def test_a_served_user_without_a_context_is_an_error_that_names_the_task():
    fields = {field.name: None for field in dataclasses.fields(DatasetTask)}
    task = DatasetTask(**{**fields, "uid": "shop.py:test_a", "limits": Limits(), "user_context": None})
    make = options_of("user=endpoint", f"user.{MODEL}", "user.endpoint.model=u").user
    with pytest.raises(ConfigError, match=r"task shop\.py:test_a: it gives its user no context"):
        make(task, None, 5)


@pytest.mark.parametrize("policy", ["oracle", "idle", "scripted"])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_the_options_reach_the_episodes_of_every_agent(policy, concurrency, monkeypatch):
    overrides = [*PLAIN, f"policy={policy}", f"environment.concurrency={concurrency}"]
    assert options_in_episodes(monkeypatch, *overrides) == dataclasses.replace(EpisodeOptions(), **dict(PLAIN.values()))


def test_the_chat_format_of_a_served_agent_reaches_its_episodes(monkeypatch):
    served = ("policy=endpoint", "agent=endpoint", f"agent.{MODEL}", "agent.endpoint.model=a")
    assert options_in_episodes(monkeypatch, *served) == EpisodeOptions()
    given = options_in_episodes(monkeypatch, *served, "agent.chat_format=llama3_json", *PLAIN)
    assert given == dataclasses.replace(EpisodeOptions(), chat_format="llama3_json", **dict(PLAIN.values()))


def test_episodes_run_at_the_same_time_only_where_something_is_waited_for():
    config = configured("environment.concurrency=5", "agent=endpoint", f"agent.{MODEL}", "agent.endpoint.model=a")
    with opened_endpoints(judge=config.judge, user=config.user) as none:
        assert concurrency_for(config.environment, [UID], none) == 1
    with opened_endpoints(judge=config.judge, user=config.user, agent=config.agent) as served:
        assert concurrency_for(config.environment, [UID], served) == 5
