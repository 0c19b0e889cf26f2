"""What is typed after a subcommand of Hydra's, and what a person is told who typed it wrongly."""

import pytest

from tbx_envs.commands import overrides
from tbx_envs.commands.config import EvaluateConfig, validated
from tbx_envs.commands.overrides import known_of, reworded, sorted_words
from tbx_envs.errors import ConfigError


@pytest.fixture(autouse=True, scope="module")
def composed_once():
    """Each configuration is composed once for all questions."""
    made = {}

    def known(command, given):
        key = (command, *(word for word in given if word.partition("=")[2] in ("endpoint", "none")))
        return made.setdefault(key, known_of(command, given))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overrides, "known_of", known)
        yield


@pytest.mark.parametrize(
    ("words", "options", "settings"),
    [
        (["seed=0,1", "-m", "policy=oracle"], ["-m"], ["seed=0,1", "policy=oracle"]),
        (["--cfg", "job", "+experiment=smoke", "~pool"], ["--cfg", "job"], ["+experiment=smoke", "~pool"]),
        (["--cfg=job", "-cd", "mine", "a=b=c"], ["--cfg=job", "-cd", "mine"], ["a=b=c"]),
        (["--info", "policy=oracle"], ["--info"], ["policy=oracle"]),
        (["--info", "all", "--help"], ["--info", "all", "--help"], []),
    ],
)
def test_options_and_settings_are_told_apart(words, options, settings):
    assert sorted_words("evaluate", words) == (options, settings)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--policy", "oracle"], "there is no option --policy. Settings are given as KEY=VALUE: write policy=oracle."),
        (["--policy=oracle"], "write policy=oracle."),
        (["--error-rate", "0.3"], "write error_rate=0.3."),
        (["-policy", "oracle"], "write policy=oracle."),
        (["policy", "oracle"], "'policy' is no setting. Settings are given as KEY=VALUE: write policy=oracle."),
        (["slots", "4"], "write sampling.slots=4."),
        (["policy"], "write policy=..."),
        (["+experiment"], "write +experiment=..."),
        (["policy", "=", "oracle"], "without spaces. Write policy=oracle."),
        (["=oracle"], "'=oracle' has no key. Write KEY=oracle."),
        (["--polcy", "oracle"], "there is no option --polcy. Did you mean 'policy'?"),
        (["--multirn"], "Did you mean '--multirun'?"),
        (["oracle"], "'oracle' is no setting. Settings are given as KEY=VALUE"),
    ],
)
def test_a_word_that_is_neither_is_told_what_to_type(words, told):
    with pytest.raises(ConfigError) as said:
        sorted_words("evaluate", [*words, "attempts=1"] if words != ["oracle"] else words)
    assert str(said.value).startswith("tbx evaluate: ") and told in str(said.value)


@pytest.mark.parametrize(
    ("command", "given", "told"),
    [
        ("evaluate", ["polcy=oracle"], "there is no key 'polcy'. Did you mean 'policy'?"),
        ("train", ["learning_rate=1"], "Did you mean 'optim.learning_rate'?"),
        ("train", ["learnig_rate=1"], "Did you mean 'optim.learning_rate'?"),
        ("train", ["optm.learning_rate=1"], "Did you mean 'optim.learning_rate'?"),
        ("train", ["optim.learning_rat=1"], "Did you mean 'optim.learning_rate'"),
        ("train", ["seed=1", "~polcy"], "there is no key 'polcy'"),
        ("train", ["sampling=trian"], "sampling has no 'trian'. Did you mean 'train'? There are: evaluate, "),
        ("train", ["optim=adamw,adamx"], "optim has no 'adamx'. Did you mean 'adamw'"),
        ("train", ["+experiment=smok"], "experiment has no 'smok'. Did you mean 'smoke'?"),
        ("train", ["experiment=smoke"], "Write +experiment=smoke."),
        ("train", ["+seed=1"], "the key 'seed' is there already. Write seed=1, without the plus."),
        ("train", ["+optim=adamw"], "Write optim=adamw, without the plus."),
        ("demo", ["sampling=train"], "Write sampling@evaluation=train or sampling@rollout=train."),
        ("evaluate", ["agent.endpoint.model=m"], "It belongs to agent=endpoint: give that, too."),
        ("evaluate", ["agent=endpoint", "agent.endpoint.modle=m"], "Did you mean 'agent.endpoint.model'"),
    ],
)
def test_a_setting_that_does_not_exist_is_told_the_near_one(command, given, told):
    message = reworded(command, given, ValueError("To append to your config use +polcy=oracle"))
    assert told in message and "To append" not in message


def test_what_only_hydra_knows_is_said_in_its_words_without_its_advice_to_developers():
    error = ValueError("Ambiguous value for argument 'seed=0,1'\nSet the environment variable HYDRA_FULL_ERROR=1 ...")
    assert reworded("train", ["seed=0,1"], error) == "tbx train seed=0,1: Ambiguous value for argument 'seed=0,1'"


def test_an_added_key_that_no_record_has_is_told_the_near_one():
    with pytest.raises(ConfigError, match=r"\n  polcy: there is no such key\. Did you mean 'policy'\?"):
        validated(EvaluateConfig, {"polcy": "oracle"})
    with pytest.raises(ConfigError, match=r"sampling\.slot: there is no such key\. Did you mean 'sampling\.slots'"):
        validated(EvaluateConfig, {"sampling": {"slot": 1}})


def test_a_missing_key_is_told_without_all_that_was_given():
    with pytest.raises(ConfigError, match=r"\n  tasks: is missing\..* give tasks=\.\.\.\n") as raised:
        validated(EvaluateConfig, {"policy": "oracle" * 1000, "attempts": "x" * 1000})
    assert len(str(raised.value)) < 2000 and "(given: 'xxx" in str(raised.value)
