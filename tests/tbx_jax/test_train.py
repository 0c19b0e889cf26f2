"""Whole runs on a toy: they learn, and they go on after anything as if nothing had happened."""

import itertools
import json
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny_policy
from tiny_policy import PARITY_TASKS, train_config

from tbx_envs.errors import CheckpointError, ConfigError, EnvironmentFault
from tbx_envs.testing.parity_slots import ParitySlots
from tbx_jax import train
from tbx_jax.config import MeshConfig
from tbx_jax.metrics_log import read_metrics
from tbx_jax.policies.weights import load_policy

VARYING = ("seconds", "sampled_tokens_per_s")  # wall time


def weights(output):
    return (output / "policy" / "model.safetensors").read_bytes()


def rows(output):
    """The metrics but for wall times."""
    return [
        {name: value for name, value in row.items() if name not in VARYING}
        for row in read_metrics(output / "metrics.jsonl")
    ]


def run_toy(policy, output, breaks=lambda uid, seed: False, **changes):
    return train.train(train_config(policy, output, **changes), PARITY_TASKS, ParitySlots(32, breaks))


@pytest.fixture(scope="module")
def unbroken(tiny_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("unbroken")
    run_toy(tiny_folder, output)
    return output


def test_training_makes_the_policy_pass_more_often(tiny_folder, tmp_path):
    summary = run_toy(tiny_folder, tmp_path, steps=40, checkpoint_every=40)
    assert summary["pass_rate_first"] < 0.5
    assert summary["pass_rate_last"] > summary["pass_rate_first"] + 0.3
    assert summary["logp_gap_max"] < 1e-5
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_the_first_updates_are_on_policy_and_move_all_tensors(tiny_folder, unbroken):
    first = rows(unbroken)[0]
    assert first["updated"] and first["clip_fraction"] == 0.0
    assert first["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    start = safetensors.numpy.load_file(pathlib.Path(tiny_folder) / "model.safetensors")
    end = safetensors.numpy.load_file(unbroken / "policy" / "model.safetensors")
    assert all(np.abs(start[name] - end[name]).max() > 0 for name in start)


def test_a_run_is_a_function_of_its_configuration(tiny_folder, tmp_path, unbroken):
    run_toy(tiny_folder, tmp_path)
    assert weights(tmp_path) == weights(unbroken)
    assert rows(tmp_path) == rows(unbroken)


def test_runs_killed_anywhere_end_with_the_parameters_tasks_and_metrics_of_an_unbroken_one(
    tiny_folder, tmp_path, unbroken
):
    killed = tmp_path / "killed"
    done = subprocess.run(
        [sys.executable, pathlib.Path(__file__).with_name("killed_runs.py"), tiny_folder, killed],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    statuses = [line.split(":")[0] for line in done.stdout.splitlines() if line[:2] in ("0:", "9:")]
    assert statuses == ["9"] * 5 + ["0"], done.stdout
    assert weights(killed) == weights(unbroken)
    assert rows(killed) == rows(unbroken)
    assert [row["step"] for row in rows(killed)] == [1, 2, 3, 4, 5, 6]
    assert rows(killed)[0]["tasks"]


def test_an_interrupt_leaves_a_checkpoint_of_the_last_update(tiny_folder, tmp_path, unbroken, monkeypatch):
    # Step 3 is no checkpoint of the plan. Ctrl-C is pressed while its line is printed.
    original = train.StepLines.step

    def interrupted(self, row):
        original(self, row)
        if row["step"] == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train.StepLines, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_toy(tiny_folder, tmp_path)
    assert (tmp_path / "checkpoints" / "3").is_dir()
    monkeypatch.undo()
    run_toy(tiny_folder, tmp_path)
    assert weights(tmp_path) == weights(unbroken)
    assert rows(tmp_path) == rows(unbroken)


def test_a_key_that_is_refused_from_now_on_leaves_a_checkpoint_of_the_last_update(
    tiny_folder, tmp_path, unbroken, monkeypatch
):
    original, rounds = train.collect_groups, itertools.count(1)

    def refused_in_the_fourth(*arguments, **options):
        if next(rounds) == 4:
            raise ConfigError("the endpoint does not take the key")
        return original(*arguments, **options)

    monkeypatch.setattr(train, "collect_groups", refused_in_the_fourth)
    with pytest.raises(ConfigError, match="does not take the key"):
        run_toy(tiny_folder, tmp_path)
    assert (tmp_path / "checkpoints" / "3").is_dir()
    run_toy(tiny_folder, tmp_path)
    assert weights(tmp_path) == weights(unbroken)


def test_a_configuration_that_fails_before_the_first_update_can_be_corrected_in_the_same_folder(tiny_folder, tmp_path):
    mesh = MeshConfig(axes={"fsdp": 2}, rules={"b": "fsdp"})
    odd = tiny_policy.ALGO.model_copy(update={"micro_batch": 15})
    with pytest.raises(ConfigError, match=r"multiple of 2"):
        run_toy(tiny_folder, tmp_path, steps=1, mesh=mesh, algo=odd)
    run_toy(tiny_folder, tmp_path, steps=1, mesh=mesh)


def test_a_run_in_bfloat16_samples_with_narrow_matrices_and_trains_wide_ones(tiny_folder, tmp_path, monkeypatch):
    original, seen = train.run_attempts, []

    def watched(sampler, params, *arguments, **options):
        seen.append({name: leaf.dtype.name for name, leaf in params["layers"].items()})
        return original(sampler, params, *arguments, **options)

    monkeypatch.setattr(train, "run_attempts", watched)
    run_toy(tiny_folder, tmp_path, steps=2, compute_dtype="bfloat16")
    assert seen and all(types["query"] == "bfloat16" and types["attention_norm"] == "float32" for types in seen)
    model, params, _ = load_policy(tmp_path / "policy", param_dtype=None)
    assert model.config.dtype == "bfloat16"
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    assert all(0 < row["logp_gap_max"] < 0.2 for row in rows(tmp_path))


def test_more_steps_continue_a_finished_run(tiny_folder, tmp_path, unbroken):
    run_toy(tiny_folder, tmp_path, steps=4)
    run_toy(tiny_folder, tmp_path, steps=6)
    assert weights(tmp_path) == weights(unbroken)


def test_a_changed_configuration_does_not_go_on(tiny_folder, tmp_path):
    run_toy(tiny_folder, tmp_path, steps=1)
    with pytest.raises(ConfigError, match="seed: was 0, now 1"):
        run_toy(tiny_folder, tmp_path, steps=1, seed=1)


def test_other_tasks_do_not_go_on(tiny_folder, tmp_path):
    run_toy(tiny_folder, tmp_path, steps=1)
    with pytest.raises(ConfigError, match="other tasks"):
        train.train(train_config(tiny_folder, tmp_path, steps=1), PARITY_TASKS[:-1], ParitySlots(32))


def test_a_task_that_always_breaks_is_reported_and_training_goes_on(tiny_folder, tmp_path):
    broken = {"parity/a/0", "parity/f/2"}
    run_toy(tiny_folder, tmp_path, breaks=lambda uid, seed: uid in broken, steps=8)
    made = rows(tmp_path)
    assert {uid for row in made for uid in row["set_aside"]} == broken
    assert sum(row["voids"] for row in made) >= 2 * 16  # eight members, each tried twice
    assert not broken & {uid for row in made for uid in row["tasks"]}
    assert all(row["updated"] for row in made)


def test_a_run_stops_when_everything_breaks_and_keeps_its_last_update(tiny_folder, tmp_path):
    run_toy(tiny_folder, tmp_path, steps=1)
    with pytest.raises(EnvironmentFault, match="32 of 32 attempts"):
        run_toy(tiny_folder, tmp_path, breaks=lambda uid, seed: True)
    assert (tmp_path / "checkpoints" / "1").is_dir()
    assert not (tmp_path / "checkpoints" / "2").exists()


def test_an_update_without_mixed_outcomes_is_skipped_and_says_so(tiny_folder, tmp_path, capsys):
    class Hopeless(ParitySlots):
        def episode(self, slot, attempt):
            import dataclasses

            episode = super().episode(slot, attempt)
            report = dataclasses.replace(episode.report, passed=False)
            return dataclasses.replace(episode, report=report, reward=0.0)

    summary = train.train(train_config(tiny_folder, tmp_path, steps=2), PARITY_TASKS, Hopeless(32))
    assert summary["updates"] == 0
    assert [row["loss"] for row in rows(tmp_path)] == [None, None]
    assert "the update was skipped" in capsys.readouterr().out
    start = safetensors.numpy.load_file(pathlib.Path(tiny_folder) / "model.safetensors")
    end = safetensors.numpy.load_file(tmp_path / "policy" / "model.safetensors")
    assert all((start[name] == end[name]).all() for name in start)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tasks": "clinic/*", "pool": "no/such/pool.json"}, "no pool at no/such/pool.json"),
        ({"tasks": "clinc/*"}, "no task matches"),
        ({"tasks": "heldout"}, "held out"),
    ],
)
def test_tasks_that_cannot_be_trained_on_are_refused(tiny_folder, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        train.run(train_config(tiny_folder, tmp_path, **changes))


def test_a_policy_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no/such/policy"):
        run_toy("no/such/policy", tmp_path)


def test_greedy_sampling_is_refused(tiny_folder, tmp_path):
    greedy = tiny_policy.SAMPLING.model_copy(update={"temperature": 0.0})
    with pytest.raises(ConfigError, match="temperature"):
        run_toy(tiny_folder, tmp_path, sampling=greedy)
