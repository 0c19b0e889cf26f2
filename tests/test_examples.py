"""Each file of `examples/` runs as its docstring says, and what it claims to show is what it prints."""

import dataclasses
import functools
import pathlib
import re
import runpy
import sys

import gymnasium
import numpy as np
import pytest

import tbx_envs.domains
from tbx_envs.errors import ToolFault
from tbx_envs.testing.loopback_endpoint import LoopbackEndpoint, Says

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@functools.cache
def load(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run an example as `python examples/<name>.py` does; what it printed."""

    def run_example(name, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [f"examples/{name}.py", *arguments])
        monkeypatch.setattr(tbx_envs.domains, "_registered", dict(tbx_envs.domains._registered))
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def test_every_example_has_a_test_and_says_how_it_is_run():
    files = sorted(EXAMPLES.glob("*.py"))
    tests = pathlib.Path(__file__).read_text(encoding="utf-8")
    for file in files:
        assert f'run("{file.stem}"' in tests, file.name
        assert f"\n    python examples/{file.name}\n" in file.read_text(encoding="utf-8"), file.name
    assert len(files) == 4


def test_the_careful_agent_passes_every_attempt_and_the_hasty_one_none(run):
    careful, hasty, why = run("own_agent").splitlines()
    assert careful == "careful: pass@1 100%, 14 of 14 tasks 2/2"
    assert hasty == "hasty: pass@1 0%, 0 of 14 tasks 2/2"
    assert "birth_date is missing" in why


def test_the_domain_keeps_the_contract_and_its_episode_is_rewarded(run):
    told = run("own_domain")
    assert told.startswith("10 tasks keep the contract\n")
    assert told.endswith("\nreward 1.0\n")
    assert "refuse_renewal" in told


def test_the_contract_reports_a_near_miss_that_passes(monkeypatch):
    domain = load("own_domain")["DOMAIN"]
    family = domain.families["renew"]
    right = dataclasses.replace(family, near_misses=lambda task: {"right after all": task.expected_calls})
    broken = dataclasses.replace(domain, families={"renew": right})
    monkeypatch.setitem(tbx_envs.domains._registered, "library", broken)
    with pytest.raises(tbx_envs.DomainError, match="near miss 'right after all' passes the check"):
        tbx_envs.check_domain(broken, uids=["library/renew/000"])


def test_the_policy_of_the_vector_loop_learns_to_check_identity(run):
    passed = [float(rate) for rate in re.findall(r"passed ([\d.]+)", run("vector_loop"))]
    assert len(passed) == 12
    assert passed[0] < 0.3 and min(passed[-3:]) > 0.9


def test_advantages_leave_void_attempts_out_of_their_groups_mean():
    rewards = np.array([[1.0, 0.0, np.nan, 1.0], [np.nan] * 4])
    found = load("vector_loop")["advantages"](rewards)
    assert found == pytest.approx(np.array([[1 / 3, -2 / 3, 0.0, 1 / 3], [0.0] * 4]))


def test_a_fault_of_one_slot_makes_its_reward_nan_and_the_loop_goes_on(monkeypatch):
    """The tools of one slot break in the middle of its episode."""
    uid = "clinic/cancel_visit/000"
    envs = gymnasium.make_vec("ThinkingBox/clinic.cancel_visit.000-v0", num_envs=1, uids=[uid] * 3)

    def broken(action):
        raise ToolFault("the database is gone")

    monkeypatch.setattr(envs.envs[1], "step", broken)
    rewards = load("vector_loop")["roll_out"](envs, 0, [True, True, False])
    np.testing.assert_array_equal(rewards, [1.0, np.nan, 0.0])


def test_the_served_model_passes_what_its_rules_cover_and_its_tokens_are_paid_for(run):
    told = run("served_model")
    outcomes = dict(re.findall(r"^(\S+): (passed|failed)", told, re.MULTILINE))
    late = {uid for uid in outcomes if tbx_envs.find_task(uid).labels["case"] != "in time"}
    assert {uid for uid, outcome in outcomes.items() if outcome == "failed"} == late
    assert "pass@1 60% of 10 tasks, 0 void" in told
    # Six turns of 40 new, 60 cached and 10 written tokens each, at 0.50, 0.05 and 2.00 for a million.
    total = 10 * 6 * (40 * 0.50 + 60 * 0.05 + 10 * 2.00) / 1e6
    assert f"cost {total:.6f}, for each success {total / 6:.6f}" in told


def test_the_served_model_is_asked_at_the_address_given(run):
    with LoopbackEndpoint(lambda asked: Says("I cannot help. <DONE>")) as server:
        arguments = ("--base-url", server.base_url, "--model", "mine", "--tasks", "clinic/cancel_visit/000")
        told = run("served_model", *arguments)
    assert [asked.body["model"] for asked in server.asked] == ["mine"]
    assert "pass@1 0% of 1 tasks" in told
