"""`tbx demo`: is the trained policy more reliable on tasks that it was not trained on? One command, a few minutes.

The shipped SFT policy is evaluated on the held-out tasks, a pool of training tasks is selected by how often it solves
them, GRPO trains on the pool, and the held-out tasks are evaluated again. A third of the held-out tasks belong to
families that are held out from GRPO (the SFT policy has seen demonstrations of all families).

Every part is resumable: the same command resumes an interrupted demo.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tbx_envs.commands import evaluate
from tbx_envs.evaluation.report import table
from tbx_envs.evaluation.task_lists import select_tasks
from tbx_envs.files import write_json, write_lines
from tbx_envs.sources import find_task, is_heldout_family
from tbx_jax import train
from tbx_jax.commands.chart import draw_demo
from tbx_jax.config import AgentConfig, DemoConfig, EvaluateConfig, PoolConfig, TrainConfig
from tbx_jax.metrics_log import read_metrics

_NO_AGENT = AgentConfig(kind="none", chat_format="hermes", endpoint=None)
T = TypeVar("T")


def run(config: DemoConfig) -> dict[str, Any]:
    """Run the four parts under `output_dir` and write `summary.json`, `table.txt` and `demo.png` there.

    Returns:
        The content of `summary.json`: `before` and `after`, and the same for held-out families under `unseen_families`,
        each with `tasks`, `pass_at_1`, `pass_at_<n>`, `observed_<n>_of_<n>`; `seed`; `minutes` of this command; `parts`
        in minutes.
    """
    import matplotlib  # noqa: F401  draws the picture at the end; its absence is better said at the start

    output = Path(config.output_dir)
    minutes: dict[str, float] = {}
    before = _timed(minutes, "evaluate before", lambda: evaluate.run_evaluation(_evaluate(config, "before")))
    pool = _timed(minutes, "select the pool", lambda: evaluate.run_pool(_pool(config)))
    _timed(minutes, "train", lambda: train.run(_train(config)))
    after = _timed(minutes, "evaluate after", lambda: evaluate.run_evaluation(_evaluate(config, "after")))
    summary = {
        "seed": config.seed,
        "minutes": sum(minutes.values()),
        "parts": minutes,
        "pool": {"kept": len(pool.uids), "candidates": len(pool.candidates)},
        "before": _columns(before, config.attempts),
        "after": _columns(after, config.attempts),
        "unseen_families": {
            "before": _columns(before["unseen_families"], config.attempts),
            "after": _columns(after["unseen_families"], config.attempts),
        },
    }
    write_json(output / "summary.json", summary)
    draw_demo(
        output / "demo.png",
        read_metrics(output / "train" / "metrics.jsonl"),
        before,
        after,
        unseen={task.family for task in map(find_task, select_tasks("heldout")) if is_heldout_family(task)},
        attempts=config.attempts,
    )
    _print_table(summary, config.attempts, output)
    return summary


def _timed(minutes: dict[str, float], part: str, run_part: Callable[[], T]) -> T:
    print(f"{f' {part} ':-^80}", flush=True)
    started = time.monotonic()
    result = run_part()
    minutes[part] = (time.monotonic() - started) / 60
    return result


def _shared(config: DemoConfig) -> dict[str, Any]:
    """The keys that all parts share."""
    return {name: getattr(config, name) for name in ("mesh", "judge", "user", "environment", "seed")}


def _evaluate(config: DemoConfig, moment: str) -> EvaluateConfig:
    trained = str(Path(config.output_dir) / "train" / "policy")
    return EvaluateConfig(
        **_shared(config),
        sampling=config.evaluation,
        agent=_NO_AGENT,
        policy=config.policy if moment == "before" else trained,
        compute_dtype=None,
        tasks="heldout",
        attempts=config.attempts,
        error_rate=0.0,
        max_void_retries=config.max_void_retries,
        regrade=None,
        output_dir=str(Path(config.output_dir) / moment),
    )


def _pool(config: DemoConfig) -> PoolConfig:
    return PoolConfig(
        **_shared(config),
        sampling=config.evaluation,
        agent=_NO_AGENT,
        policy=config.policy,
        compute_dtype=None,
        tasks="train",
        attempts=config.pool_attempts,
        bands=config.bands,
        train_on_benchmark_and_mark_results=False,
        max_void_retries=config.max_void_retries,
        output_dir=str(Path(config.output_dir) / "pool"),
    )


def _train(config: DemoConfig) -> TrainConfig:
    return TrainConfig(
        algo=config.algo,
        optim=config.optim,
        **_shared(config),
        sampling=config.rollout,
        steps=config.steps,
        policy=config.policy,
        compute_dtype=None,
        tasks="train",
        pool=str(Path(config.output_dir) / "pool" / "pool.json"),
        train_on_benchmark_and_mark_results=False,
        checkpoint_every=config.checkpoint_every,
        output_dir=str(Path(config.output_dir) / "train"),
    )


def _columns(measures: dict[str, Any], attempts: int) -> dict[str, Any]:
    keys = ("tasks", "voids", "pass_at_1", f"pass_at_{attempts}", f"observed_{attempts}_of_{attempts}")
    return {key: measures[key] for key in keys}


def _print_table(summary: dict[str, Any], attempts: int, output: Path) -> None:
    """Print the table, and write it into `table.txt`."""
    at_n, observed = f"pass_at_{attempts}", f"observed_{attempts}_of_{attempts}"
    rows = []
    for name, part in (("all held-out tasks", summary), ("held-out families", summary["unseen_families"])):
        for moment in ("before", "after"):
            row = part[moment]
            tasks = f"{name} ({row['tasks']})" if moment == "before" else ""
            rows.append((tasks, moment, f"{row['pass_at_1']:.1%}", f"{row[at_n]:.1%}", str(row[observed])))
    text = table(
        ("tasks", "", "pass@1", f"pass@{attempts}", f"observed {attempts}/{attempts}"),
        rows,
        left=("tasks", ""),
        title=f"Held-out tasks x {attempts} attempts, seed {summary['seed']}, {summary['minutes']:.1f} minutes",
    )
    print(text)
    print(f"summary.json, table.txt and demo.png are in {output}")
    write_lines(output / "table.txt", [text])
