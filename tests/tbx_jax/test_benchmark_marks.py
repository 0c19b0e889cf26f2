"""Tasks of the benchmark are refused for training; the override lets them through and marks all results."""

import json

import pytest
import tiny_policy
from hydra import compose, initialize_config_module
from tiny_policy import PARITY_TASKS, train_config

from tbx_envs.agents.idle import IdleAgent
from tbx_envs.commands import evaluate
from tbx_envs.commands.cli import main
from tbx_envs.errors import ConfigError
from tbx_envs.evaluation.provenance import write_provenance
from tbx_envs.evaluation.report import run_summary
from tbx_envs.testing.parity_slots import ParitySlots
from tbx_envs.thinkingbox.dataset.guard import MARK, OVERRIDE, is_marked_policy
from tbx_jax import config as records
from tbx_jax import train
from tbx_jax.metrics_log import read_metrics
from tbx_jax.policies.weights import load_policy, save_policy

# Of the bike shop: a task that its fixture takes for one of the benchmark, and another.
BENCH, OTHER = "rentals_main.py:test_end_rental", "rentals_main.py:test_few_turns"


def composed(program, **overrides):
    with initialize_config_module("tbx_conf", version_base=None):
        made = compose(program, overrides=[f"{key}={value}" for key, value in overrides.items()])
    return records.validated(getattr(records, f"{program.capitalize()}Config"), made)


def trained(policy, output):
    write_provenance(output, {}, ["tbx", "train"])
    return train.train(train_config(policy, output), PARITY_TASKS, ParitySlots(32))


def marks_of(output):
    """What in a run's folder is marked."""
    return {
        "rows": {row.get(MARK, False) for row in read_metrics(output / "metrics.jsonl")},
        "summary": json.loads((output / "summary.json").read_text()).get(MARK, False),
        "run": json.loads((output / "run.json").read_text()).get(MARK, False),
        "policy": is_marked_policy(output / "policy"),
    }


@pytest.fixture(scope="module")
def marked_run(tiny_folder, tmp_path_factory):
    """A run whose tasks are taken for the benchmark's."""
    output = tmp_path_factory.mktemp("marked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "benchmark_uids", lambda uids: tuple(uids)[:1])
        trained(tiny_folder, output)
    return output


def test_a_run_on_the_benchmark_marks_every_output(marked_run):
    assert marks_of(marked_run) == {"rows": {True}, "summary": True, "run": True, "policy": True}


def test_a_run_from_a_marked_policy_is_marked(marked_run, tmp_path):
    trained(marked_run / "policy", tmp_path)
    assert marks_of(tmp_path) == {"rows": {True}, "summary": True, "run": True, "policy": True}


def test_another_run_is_not_marked(tiny_folder, tmp_path):
    trained(tiny_folder, tmp_path)
    assert marks_of(tmp_path) == {"rows": {False}, "summary": False, "run": False, "policy": False}


def test_saving_a_policy_over_a_marked_one_takes_the_mark_with_it(marked_run, tmp_path):
    model, params, tokenizer = load_policy(marked_run / "policy")
    save_policy(tmp_path / "policy", model, params, tokenizer, marked=True)
    assert is_marked_policy(tmp_path / "policy")
    save_policy(tmp_path / "policy", *tiny_policy.build_tiny())
    assert not is_marked_policy(tmp_path / "policy")


@pytest.mark.usefixtures("bikeshop")
def test_training_refuses_the_benchmark_unless_told_otherwise(tiny_folder, tmp_path):
    with pytest.raises(ConfigError, match=rf"1 of 14 tasks .* such as {BENCH}.*{OVERRIDE}=true"):
        train.tasks_to_train_on(train_config(tiny_folder, tmp_path, tasks="bikeshop"))
    allowed = train.tasks_to_train_on(train_config(tiny_folder, tmp_path, tasks="bikeshop", **{OVERRIDE: True}))
    assert BENCH in allowed and len(allowed) == 14
    assert train.tasks_to_train_on(train_config(tiny_folder, tmp_path, tasks=OTHER)) == (OTHER,)
    with pytest.raises(ConfigError, match=r"held out for evaluation"):
        train.tasks_to_train_on(train_config(tiny_folder, tmp_path, tasks="heldout", **{OVERRIDE: True}))


@pytest.mark.usefixtures("bikeshop")
@pytest.mark.parametrize(("tasks", "marked"), [("'rentals_main.py:*'", True), (f"'{OTHER}'", False)])
def test_a_pool_with_the_benchmark_is_refused_or_marked(tmp_path, monkeypatch, capsys, tasks, marked):
    def rows(config, error_rate):
        uids = evaluate.select_tasks(config.tasks)
        return [
            {"uid": uid, "family": "f", "attempt": n, "passed": n == 0, "fault": None} for uid in uids for n in range(2)
        ]

    monkeypatch.setattr(evaluate, "_evaluated", rows)
    write_provenance(tmp_path, {}, ["tbx", "pool"])
    wanted = {"policy": "idle", "tasks": tasks, "bands": "[hard,medium,easy]", "output_dir": tmp_path}
    if marked:
        with pytest.raises(ConfigError, match=r"a pool on them would spoil it"):
            evaluate.run_pool(composed("pool", **wanted))
    evaluate.run_pool(composed("pool", **wanted, **{OVERRIDE: "true"}))
    assert json.loads((tmp_path / "pool.json").read_text())[MARK] is marked
    assert json.loads((tmp_path / "run.json").read_text()).get(MARK, False) is marked
    assert (MARK in capsys.readouterr().out) is marked


def test_an_evaluation_of_a_marked_policy_says_so(marked_run, tiny_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "build_agent", lambda *_: IdleAgent())
    for policy, marked in ((marked_run / "policy", True), (tiny_folder, False)):
        output = tmp_path / str(marked)
        wanted = {"policy": policy, "tasks": "clinic/cancel_visit/000", "attempts": 1, "output_dir": output}
        summary = evaluate.run_evaluation(composed("evaluate", **wanted))
        assert summary.get(MARK, False) is marked
        assert json.loads((output / "summary.json").read_text()) == summary
        assert run_summary(output).get(MARK, False) is marked
        assert ("trained on tasks of the benchmark" in " ".join(capsys.readouterr().out.split())) is marked
        assert main(["report", str(output)]) == 0
        assert ("trained on tasks of the benchmark" in " ".join(capsys.readouterr().out.split())) is marked
