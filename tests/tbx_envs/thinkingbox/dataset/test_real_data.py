"""The public data, as far as it is there: TBX_DATASETS names its checkout, TBX_SERVERS_PYTHON an interpreter that has
the original framework."""

import collections
import json
import os
import pathlib
import subprocess

import pytest

from tbx_envs.thinkingbox.dataset.benchmark import RELEASE, lock_text
from tbx_envs.thinkingbox.dataset.dataset import Dataset

CHECKOUTS = [path for path in os.environ.get("TBX_DATASETS", "").split(os.pathsep) if path]
PYTHON = os.environ.get("TBX_SERVERS_PYTHON", "")
LOCK = pathlib.Path(__file__).parents[4] / "tbx_envs" / "thinkingbox" / "dataset" / "benchmark.lock"

pytestmark = pytest.mark.real_data

# Reads a dataset with the original's own code: hydrated cases, and what it merges when an episode begins.
ORIGINAL = """
import json, sys
from thinkingbox.common.config_types import merge_bot_instructions, merge_init_config
from thinkingbox.common.hydrator import iter_cases_from_folder
root = sys.argv[1]
for case in iter_cases_from_folder(root + "/test_case", root, "think"):
    record = case.model_dump(mode="json")
    record["merged_init"] = merge_init_config(case.scenario.world_state, case.init)
    record["merged_instructions"] = merge_bot_instructions(case.scenario.bot_instructions, case.bot_instructions)
    print(json.dumps(record))
"""


@pytest.fixture(scope="module")
def checkout():
    for path in CHECKOUTS:
        if (pathlib.Path(path) / "releases" / RELEASE).is_dir():
            return path
    pytest.skip(f"TBX_DATASETS names no checkout with releases/{RELEASE}: it is {os.environ.get('TBX_DATASETS')!r}")


@pytest.fixture(scope="module")
def dataset(checkout):
    """All of it, built once."""
    dataset = Dataset(checkout)
    dataset.validate()
    return dataset


@pytest.fixture(scope="module")
def original():
    """Runs a program in the interpreter that has the original; gives what it prints."""
    if not PYTHON:
        pytest.skip("TBX_SERVERS_PYTHON is not set")
    if subprocess.run([PYTHON, "-c", "import thinkingbox"], capture_output=True).returncode:
        pytest.skip(f"{PYTHON} (TBX_SERVERS_PYTHON) does not have the original framework")

    def run(root):
        ran = subprocess.run([PYTHON, "-c", ORIGINAL, str(root)], capture_output=True, text=True, check=True)
        return [json.loads(line) for line in ran.stdout.splitlines()]

    return run


def test_the_benchmark_loads(dataset):
    tasks = [dataset.task(uid) for uid in dataset.list_uids(RELEASE)]
    domains = collections.Counter(task.domain for task in tasks)
    assert domains == {
        "external_booking_v1": 104,
        "sandbox_auto_insurance": 100,
        "sandbox_consulting": 101,
        "sandbox_external_retail": 98,
        "sandbox_neobank_support_v1": 104,
    }
    assert all(task.servers == (task.domain,) and task.split == "heldout" for task in tasks)
    assert sum(len(task.expected_calls) for task in tasks) == 3102
    assert sum(bool(task.init[task.domain].get("rubrics_yesno")) for task in tasks) == 30


def test_the_shipped_lock_is_that_of_the_data(dataset):
    assert LOCK.read_text(encoding="utf-8") == lock_text(map(dataset.task, dataset.list_uids(RELEASE)))


def test_copies_without_their_rubrics_are_held_out_too(dataset):
    others = [uid for uid in dataset.uids("heldout") if uid not in set(dataset.list_uids(RELEASE))]
    assert len(others) == 30 and "sandbox_neobank_support_v1_group1.py:test_aa_001" in others


def test_every_test_is_hydrated_as_the_original_does_it(dataset, original, bikeshop):
    for each in (dataset, Dataset(bikeshop)):
        cases = {case["uid"]: case for case in original(each.root)}
        assert set(cases) == set(each.uids())
        for uid, case in cases.items():
            assert ours(each.task(uid)) == theirs(case), uid


def ours(task):
    return {
        "query": task.query,
        "user_context": task.user_context,
        "init": json.dumps(task.init),  # as text, so that the order of keys counts
        "test_code": task.test_code,
        "instructions": [task.system_instructions, task.bot_instructions, task.test_instructions],
        "limits": [task.limits.user_turns, task.limits.agent_turns],
        "tools": [
            [tool.name, tool.description, dict(tool.argument_descriptions), tool.direct_response, tool.ends_turn]
            for tool in task.tools
        ],
        "builtin_tools": [
            [tool.name, tool.description, tool.input_schema, tool.direct_response, tool.ends_turn]
            for tool in task.builtin_tools
        ],
        "fixtures": dict(task.fixtures),
        "history": bool(task.history),
        "tags": [tag for tag in task.tags if not tag.startswith("eval:")],  # which the original drops
        "names": [task.scenario, task.agent],
    }


def theirs(case):
    tools = {tool["name"]: tool for tool in case["scenario"]["tools"]}  # the last of a name wins
    tags = case["tags"]
    domain = [f"domain:{tags['domain']}"] if tags["domain"] else []
    agent = case["agent"]
    return {
        "query": case["query"],
        "user_context": case["user_context"],
        "init": json.dumps(case["merged_init"]),
        "test_code": case["test_code"],
        "instructions": [agent["system_instructions"], case["merged_instructions"] or "", case["bot_instructions"]],
        "limits": [case["max_user_sim_turns"], case["max_agent_sim_turns"]],
        "tools": [
            [
                name,
                tool["override_description"],
                tool["override_arg_description"] or {},
                tool["direct_response"],
                tool["is_end_turn"],
            ]
            for name, tool in tools.items()
        ],
        "builtin_tools": [
            [tool["name"], tool["description"], tool["input_schema"], tool["direct_response"], tool["is_end_turn"]]
            for tool in agent["builtin_tools"]
        ],
        "fixtures": case["fixtures"],
        "history": bool(case["history"]),
        "tags": [*domain, *(f"category:{value}" for value in tags["category"]), *tags["labels"]],
        "names": [case["metadata"]["scenario"], case["metadata"]["agent"]],
    }
