"""What a configuration may hold, and how it is refused."""

import importlib.metadata

import pytest

from tbx_envs.commands import cli
from tbx_envs.commands.command import BrokenCommand, Command
from tbx_envs.commands.config import AgentConfig, EvaluateConfig, validated
from tbx_envs.commands.evaluate import models_of
from tbx_envs.commands.hydra_programs import quoted
from tbx_envs.endpoints.config import EndpointConfig
from tbx_envs.endpoints.costs import Prices
from tbx_envs.errors import ConfigError

ENDPOINT = {
    "base_url": "http://127.0.0.1:1/v1",
    "model": "m",
    "api_key_env": None,
    "temperature": 0.5,
    "max_tokens": 7,
    "timeout_s": 9.0,
    "concurrency": 3,
    "max_retries": 0,
    "extra_body": {"a": {"b": [1]}},
    "prices": {"input": 1, "cached": 0.5, "output": 2},
}


def agent(**changes):
    return {"kind": "endpoint", "chat_format": "hermes", "endpoint": {**ENDPOINT, **changes}}


def test_an_endpoint_of_a_configuration_is_the_record_that_clients_take():
    endpoint = validated(AgentConfig, agent()).endpoint
    assert endpoint == EndpointConfig(**{**ENDPOINT, "prices": Prices(1.0, 0.5, 2.0)})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("temperature", "warm"),
        ("max_tokens", 0),
        ("timeout_s", 0),
        ("concurrency", 0),
        ("max_retries", -1),
        ("prices.input", -1),
        ("prices.output", float("inf")),
        ("prices.cached", float("nan")),
        ("prices.euro", 1),
        ("modle", "m"),
    ],
)
def test_a_wrong_value_of_an_endpoint_is_refused_with_the_path_of_its_key(key, value):
    part, _, name = key.rpartition(".")
    changes = {part: {**ENDPOINT[part], name: value}} if part else {name: value}
    with pytest.raises(ConfigError, match=rf"(?s)1 problem.*endpoint\.{key}: "):
        validated(AgentConfig, agent(**changes))


def test_all_problems_of_an_endpoint_come_in_one_message():
    with pytest.raises(ConfigError, match=r"(?s)3 problem.*max_tokens.*concurrency.*prices\.input"):
        validated(AgentConfig, agent(max_tokens=0, concurrency=0, prices={"input": -1, "cached": 0, "output": 0}))


def test_a_key_that_is_missing_is_no_default():
    given = agent()
    del given["endpoint"]["timeout_s"], given["endpoint"]["prices"]
    with pytest.raises(ConfigError, match=r"endpoint: .*timeout_s, prices missing"):
        validated(AgentConfig, given)


def test_a_key_by_its_old_name_counts_in_a_persons_own_configuration_too():
    with (
        pytest.warns(DeprecationWarning, match="'lapse' is now called 'error_rate'"),
        pytest.raises(ConfigError) as refused,
    ):
        validated(EvaluateConfig, {"lapse": -1.0})
    assert "error_rate: Input should be greater than or equal to 0" in str(refused.value)
    assert "lapse" not in str(refused.value)


class Point:
    """An entry point of another package."""

    def __init__(self, name, load, package="other"):
        self.name, self.load, self.dist = name, load, type("Distribution", (), {"name": package})


def broken():
    raise RuntimeError("an old version")


@pytest.fixture
def points(monkeypatch):
    """Adds entry points of other packages, read before ours."""
    real = importlib.metadata.entry_points

    def add(*more):
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [*more, *real(group=group)])
        cli.commands.cache_clear()

    yield add
    cli.commands.cache_clear()


def test_a_subcommand_that_cannot_be_loaded_takes_no_other_away(points, capsys):
    points(Point("extra", broken), Point("tasks", lambda: Command("theirs", "nowhere:nothing")))
    assert isinstance(cli.commands()["extra"], BrokenCommand)
    assert cli.commands()["tasks"].summary != "theirs"
    assert cli.main(["--help"]) == 0
    assert "extra         cannot be loaded from other: RuntimeError: an old version" in capsys.readouterr().out
    assert cli.main(["extra"]) == 2
    assert "Update or remove that package" in capsys.readouterr().err


def test_a_policy_goes_to_the_package_that_knows_it(points):
    class Theirs:
        names = ("good",)

        def knows(self, policy):
            return policy == "good"

    points(Point("models", Theirs))
    assert isinstance(models_of("good"), Theirs)
    assert "nano" in models_of("nano").names and "nano" in models_of("some/folder").names


@pytest.mark.parametrize(
    "value",
    [
        *("clinic/refill/00[01]", "clinic/*/0[!1]?", "shop.py:a[1-3]", "runs/lr=3", "/home/josé/診察", "a&b;c!", "a#1"),
        "http://127.0.0.1:80/v1?key=1",
    ],
)
def test_a_pattern_and_a_path_reach_the_program_as_they_were_given(value):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (read,) = OverridesParser.create().parse_overrides([quoted(f"tasks={value}")])
    assert (read.key_or_group, read.value()) == ("tasks", value)


@pytest.mark.parametrize(
    "argument",
    [
        *("seeds=[0,1]", "tasks=a.txt", "+a=choice([1],[2])", "-m", "tasks='a[1]'", "~a", "a=1e-4", "a=é,b"),
        *("a=${b}é", "--cfg=é", "a=~/b"),
    ],
)
def test_every_other_argument_is_left_to_hydra(argument):
    assert quoted(argument) == argument
