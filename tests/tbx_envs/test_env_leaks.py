"""Resets in mid-episode, crashes and closes, many times over: descriptors, threads and memory stay flat."""

import gc
import os
import sys
import threading

import pytest

from tbx_envs.env import ToolEnv
from tbx_envs.errors import ToolFault
from tbx_envs.messages import ToolCall, Turn
from tbx_envs.tools.tool import ToolContext, tool

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

NUM_RESETS = 400
MORE_MEMORY_BYTES = 6 * 2**20  # a world is about 0.1 MB: a leak of one in five would show


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def resident_bytes():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@tool(mutates=True)
def explode(context: ToolContext) -> str:
    """Break."""
    raise ZeroDivisionError("boom")


def test_hundreds_of_resets_in_mid_episode_leak_nothing(kiosk_with):
    domain = kiosk_with(explode)
    uids = domain.uids()
    order = Turn(calls=(ToolCall("", "place_order", {"item": "tea", "quantity": 1, "code": "1"}),))
    kept = ToolEnv(uids[0])

    def abandon_one(number):
        env = ToolEnv(uids[number % len(uids)])
        for stepped in (kept, env):
            stepped.reset(seed=number)
            stepped.step("What is your code?")
            stepped.step(order)
        match number % 5:
            case 0:
                env.close()
            case 1:
                env.step("<DONE>")
            case 2:
                with pytest.raises(ToolFault):
                    env.step(Turn(calls=(ToolCall("", "explode", {}),)))

    for number in range(100):
        abandon_one(number)
    before = open_descriptors(), threading.active_count()
    memory = resident_bytes()
    for number in range(NUM_RESETS):
        abandon_one(number)
    assert (open_descriptors(), threading.active_count()) == before
    assert resident_bytes() - memory < MORE_MEMORY_BYTES
