import dataclasses
import datetime

import pytest

from tbx_envs.env import ToolEnv
from tbx_envs.errors import ActionError
from tbx_envs.runtime import EpisodeOptions


def test_an_unknown_option_is_answered_with_a_near_one_and_all_there_are():
    with pytest.raises(ActionError, match=r"no option 'tool_timeout'\. Did you mean 'tool_timeout_s'") as raised:
        EpisodeOptions().changed({"tool_timeout": 3.0})
    for field in dataclasses.fields(EpisodeOptions):
        assert field.name in str(raised.value)
    with pytest.raises(ActionError, match="Did you mean 'chat_format'"):
        ToolEnv("clinic/cancel_visit/000", chat_fromat="hermes")


def test_changed_options_are_a_copy_and_the_others_stay():
    options = EpisodeOptions(start="spawn", check_timeout_s=5.0)
    changed = options.changed({"check_timeout_s": 7.0, "judge": "yes"})
    assert changed == EpisodeOptions(start="spawn", check_timeout_s=7.0, judge="yes")
    assert options == EpisodeOptions(start="spawn", check_timeout_s=5.0)
    assert options.changed({}) == options


@pytest.mark.parametrize(
    ("given", "told"), [({"start": "thread"}, "'fork' or by 'spawn'"), ({"clock": "2025-10-01"}, "give a datetime")]
)
def test_an_option_that_cannot_be_is_named_also_when_it_is_changed_later(given, told):
    with pytest.raises(ActionError, match=told):
        EpisodeOptions(**given)
    with pytest.raises(ActionError, match=told):
        EpisodeOptions(clock=datetime.datetime(2025, 10, 1)).changed(given)


def test_single_options_of_an_environment_go_before_its_record():
    env = ToolEnv("clinic/cancel_visit/000", options=EpisodeOptions(check_timeout_s=5.0, start="spawn"), start="fork")
    assert env._options == EpisodeOptions(check_timeout_s=5.0, start="fork")
