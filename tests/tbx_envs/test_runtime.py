import dataclasses
import datetime

import pytest

from tbx_envs.env import ToolEnv
from tbx_envs.errors import ActionError
from tbx_envs.runtime import EpisodeOptions, GivenOptions
from tbx_envs.vector import EpisodeSlots


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
    ("given", "told"),
    [
        ({"start": "thread"}, "start='thread': .*'fork' or by 'spawn'"),
        ({"clock": "2025-10-01"}, "give a datetime"),
        ({"clock_runs": "no"}, "clock_runs='no': give True or False"),
        ({"tool_timeout_s": -3}, "tool_timeout_s=-3: give a number of seconds above 0, or None"),
        ({"tool_timeout_s": "3"}, "tool_timeout_s='3'"),
        ({"user_timeout_s": 0}, "user_timeout_s=0"),
        ({"user_timeout_s": float("inf")}, "user_timeout_s=inf"),
        ({"check_timeout_s": float("nan")}, "check_timeout_s=nan"),
        ({"check_timeout_s": None}, r"check_timeout_s=None: give a number of seconds above 0\."),
        ({"user": "scripted"}, "user='scripted': give a function"),
        ({"chat_format": None}, "chat_format=None: give the name of a format"),
    ],
)
def test_an_option_that_cannot_be_is_named_also_when_it_is_changed_later(given, told):
    with pytest.raises(ActionError, match=told):
        EpisodeOptions(**given)
    with pytest.raises(ActionError, match=told):
        EpisodeOptions(clock=datetime.datetime(2025, 10, 1)).changed(given)


def test_single_options_of_an_environment_go_before_its_record():
    env = ToolEnv("clinic/cancel_visit/000", options=EpisodeOptions(check_timeout_s=5.0, start="spawn"), start="fork")
    assert env._options == EpisodeOptions(check_timeout_s=5.0, start="fork")


def test_options_of_another_kind_are_refused_with_what_is_wanted(kiosk):
    with pytest.raises(ActionError, match=r"wanted a tbx_envs\.EpisodeOptions.*judge='yes'"):
        ToolEnv("kiosk/order/000", options={"judge": "yes"})


def test_slots_take_single_options_by_name(kiosk):
    slots = EpisodeSlots(1, EpisodeOptions(chat_format="hermes"), tool_timeout_s=3.0)
    slots.start(0, "kiosk/order/000", seed=0)
    assert slots.env(0)._options == EpisodeOptions(chat_format="hermes", tool_timeout_s=3.0)
    slots.close()
    with pytest.raises(ActionError, match="no option 'tool_timeout'"):
        EpisodeSlots(1, tool_timeout=3.0)


def test_the_options_that_a_type_checker_knows_are_the_options():
    assert list(GivenOptions.__annotations__) == [field.name for field in dataclasses.fields(EpisodeOptions)]
