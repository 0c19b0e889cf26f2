"""The demo: what it asks of its four parts, and what it makes of their answers. The parts have tests of their own."""

from __future__ import annotations

import json
import types

import pytest
from hydra import compose, initialize_config_module

from tbx_envs.evaluation.metrics import Tally, measures
from tbx_jax.commands import demo
from tbx_jax.config import DemoConfig, validated

FAMILIES = ("cancel_visit", "waive_fee")


def measured(passes):
    """The measures of an evaluation run of two tasks a family, each with 20 attempts and these passes."""
    tallies = {name: [Tally(f"{name}/{n}", name, c, 20) for n, c in enumerate(passes[name])] for name in FAMILIES}
    return {
        **measures([tally for family in tallies.values() for tally in family], 20),
        "unseen_families": measures(tallies["waive_fee"], 20),
        "families": {name: measures(family, 20) for name, family in tallies.items()},
    }


BEFORE = measured({"cancel_visit": (10, 20), "waive_fee": (0, 10)})
AFTER = measured({"cancel_visit": (20, 20), "waive_fee": (20, 15)})


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The configurations that the parts were given, in order, after a whole demo."""
    pytest.importorskip("matplotlib")
    asked = []

    def evaluate(config):
        asked.append(config)
        return BEFORE if config.policy == "nano" else AFTER

    def pool(config):
        asked.append(config)
        return types.SimpleNamespace(uids=("a", "b"), candidates=("a", "b", "c"))

    def train(config):
        asked.append(config)
        (tmp_path / "train").mkdir()
        rows = [{"step": step, "pass_rate": step / 4} for step in (1, 2, 3)]
        (tmp_path / "train" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(demo.evaluate, "run_evaluation", evaluate)
    monkeypatch.setattr(demo.evaluate, "run_pool", pool)
    monkeypatch.setattr(demo.train, "run", train)
    with initialize_config_module("tbx_conf", version_base=None):
        config = validated(DemoConfig, compose("demo", overrides=["seed=7", f"output_dir={tmp_path}"]))
    demo.run(config)
    return asked


def test_the_trained_policy_and_the_start_policy_are_evaluated_alike_on_held_out_tasks(asked, tmp_path):
    before, pool, train, after = asked
    assert before.model_copy(update={"policy": after.policy, "output_dir": after.output_dir}) == after
    assert (before.policy, after.policy) == ("nano", str(tmp_path / "train" / "policy"))
    assert (before.tasks, pool.tasks, train.tasks) == ("heldout", "train", "train")
    assert train.pool == str(tmp_path / "pool" / "pool.json")
    assert {part.seed for part in asked} == {7}
    assert len({part.output_dir for part in asked}) == 4


def test_the_summary_has_both_moments_overall_and_for_families_never_trained(asked, tmp_path):
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["seed"] == 7
    assert summary["minutes"] == pytest.approx(sum(summary["parts"].values()))
    assert summary["pool"] == {"kept": 2, "candidates": 3}
    # Before: 40 of 80 attempts pass, one task in all twenty, one in none.
    expected = {"tasks": 4, "voids": 0, "pass_at_1": 0.5, "pass_at_20": 0.75, "observed_20_of_20": 1}
    assert summary["before"] == expected
    assert summary["after"]["observed_20_of_20"] == 3
    assert summary["unseen_families"]["before"]["pass_at_1"] == 0.25
    assert summary["unseen_families"]["after"]["pass_at_1"] == 0.875


def test_the_table_says_what_the_summary_says_and_the_picture_is_drawn(asked, tmp_path):
    table = (tmp_path / "table.txt").read_text()
    for figure in ("seed 7", "50.0%", "75.0%", "93.8%", "25.0%", "87.5%"):
        assert figure in table
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
