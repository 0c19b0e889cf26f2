"""Arguments that do not fit, in words that say what to type."""

import pytest

from tbx_envs.command_line import SETTING, ArgumentParser, port, refuse_dashes
from tbx_envs.commands.cli import main
from tbx_envs.errors import ConfigError


@pytest.fixture
def parser():
    made = ArgumentParser("tbx some")
    made.add_argument("policy")
    made.add_argument("settings", nargs="*", metavar=SETTING)
    made.add_argument("--port", type=port, default=8001)
    made.add_argument("--seed", type=int)
    made.add_argument("--dtype", choices=("float32", "bfloat16"))
    return made


@pytest.mark.parametrize(
    "words",
    [
        ["nano", "slots=4", "--port", "80", "--seed", "1"],
        ["nano", "--port", "80", "slots=4", "--seed", "1"],
        ["--seed", "1", "--port=80", "nano", "slots=4"],
    ],
)
def test_settings_may_stand_anywhere_among_the_options(parser, words):
    given = parser.parse_args(words)
    assert (given.policy, given.settings, given.port, given.seed) == ("nano", ["slots=4"], 80, 1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "tbx some: missing: policy. tbx some --help shows its arguments."),
        (["policy=nano", "--seed", "1"], "tbx some: 'policy=nano': policy is told by its place. Write nano. tbx"),
        (["sampling.slots=4"], "tbx some: 'sampling.slots=4' is a setting, and before it policy is missing. tbx"),
        (["nano", "--prot", "1"], "tbx some: there is no option --prot. Did you mean '--port'? tbx some --help"),
        (["nano", "--zzz=1"], "there is no option --zzz. tbx"),
        (["nano", "--port", "99999"], "'99999' is no port. Give a whole number up to 65535; 0 takes a free one."),
        (["nano", "--port", "-1"], "--port"),
        (["nano", "--port", "8k"], "'8k' is no port"),
        (["nano", "--port"], "argument --port: expected one argument."),
        (["nano", "--seed", "one"], "--seed wants a number, and 'one' is none."),
        (["nano", "--dtype", "float23"], "'float23' is none of float32, bfloat16. Did you mean 'float32'"),
    ],
)
def test_arguments_that_do_not_fit_are_told_what_does(parser, words, told):
    with pytest.raises(ConfigError) as said:
        parser.parse_args(words)
    assert told in str(said.value)


@pytest.mark.parametrize(
    ("word", "meant"),
    [("–m", "-m"), ("—help", "--help"), ("−−port=1", "--port=1"), ("‐m", "-m"), ("–-help", "--help")],
)
def test_a_dash_that_is_no_hyphen_is_named(word, meant):
    with pytest.raises(ConfigError, match=rf"is not the hyphen of the keyboard\. Type {meant}\.$"):
        refuse_dashes("tbx evaluate", ["policy=a–b", word])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["evaluate", "–m", "policy=oracle"], "'–m' begins with '–' (U+2013)"),
        (["report"], "tbx report: missing: folder."),
        (["report", "a", "b"], "tbx report: 'b' is one argument too many."),
        (["tasks"], "tbx tasks: missing: action."),
        (["tasks", "lst"], "'lst' is none of list, show, validate. Did you mean 'list'?"),
        (["tasks", "list", "--lng"], "there is no option --lng."),
        (["tasks", "show"], "tbx tasks show: missing: uid."),
        (["show", "x", "--outcome", "pased"], "'pased' is none of passed, failed, void. Did you mean 'passed'?"),
        (["serve", "--port", "99999"], "'99999' is no port"),
        (["serve-policy", "nano", "--port", "99999"], "'99999' is no port"),
    ],
)
def test_every_command_of_its_own_arguments_speaks_so(words, told, capsys):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("ConfigError: ") and told in said and said.count("\n") == 1
