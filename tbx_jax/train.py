"""`tbx train`: GRPO on a pool of tasks. Read this file first: it is the table of contents of the trainer.

    collect   groups of attempts with mixed outcomes      plan, rollout, groups
    batch     their tokens, each with its advantage       advantages, batching
    update    one optimizer step on the clipped loss      losses, learner
    report    a line of metrics                           metrics_log, console
    save      a checkpoint every few steps                checkpoint

Everything random is a function of (seed, step, names), so a run that is killed at any point and started again with the
same output_dir ends with the parameters, task order and metrics of an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tbx_envs.chat.template import ChatTemplate
from tbx_envs.commands.environments import episode_options, opened_endpoints
from tbx_envs.episode import FinishReason
from tbx_envs.errors import ConfigError, EnvironmentFault
from tbx_envs.evaluation.pool import load_pool, refuse_heldout
from tbx_envs.evaluation.provenance import mark_provenance
from tbx_envs.evaluation.task_lists import select_tasks
from tbx_envs.files import write_json
from tbx_envs.thinkingbox.dataset.guard import MARK, benchmark_uids, is_marked_policy
from tbx_envs.vector import EpisodeSlots
from tbx_jax.advantages import group_advantages
from tbx_jax.batching import Batch, build_batch, length_buckets
from tbx_jax.checkpoint import Checkpoints, Progress, refuse_changed_config
from tbx_jax.compilation import enable_compilation_cache
from tbx_jax.config import AlgoConfig, TrainConfig
from tbx_jax.console import StepLines
from tbx_jax.groups import Collected, Group, collect_groups
from tbx_jax.learner import LearnerState, build_learner
from tbx_jax.losses import PolicyMetrics
from tbx_jax.mesh import build_mesh
from tbx_jax.metrics_log import MetricsLog, read_metrics
from tbx_jax.models import compute_params
from tbx_jax.plan import TaskPlan
from tbx_jax.policies.weights import load_policy, policy_folder, save_policy
from tbx_jax.rollout import Stopwatch, run_attempts
from tbx_jax.sampler.sampler import Sampler


def run(config: TrainConfig) -> dict[str, Any]:
    """Trains as configured, or resumes the run in the same `output_dir`.

    `output_dir` gets `metrics.jsonl` (one line per step), `checkpoints/`, and at the end `policy/` (a folder for
    `tbx evaluate policy=`) and `summary.json`.

    Returns:
        The content of `summary.json`.

    Raises:
        ConfigError: the run cannot start or resume as configured.
        EnvironmentFault: too many attempts were void; a checkpoint is saved first.
    """
    enable_compilation_cache()
    with opened_endpoints(judge=config.judge, user=config.user) as endpoints:
        options = episode_options(config, endpoints)
        with contextlib.closing(EpisodeSlots(config.sampling.episodes_in_flight, options)) as slots:
            return train(config, tasks_to_train_on(config), slots)


def tasks_to_train_on(config: TrainConfig) -> tuple[str, ...]:
    """The tasks of the pool that are in `tasks`; without a pool all of `tasks`.

    Raises:
        ConfigError: no such tasks or pool, tasks held out for evaluation, or no task left.
    """
    chosen = select_tasks(config.tasks)
    if config.pool is None:
        uids = chosen
    else:
        pool = load_pool(config.pool)
        uids = tuple(uid for uid in pool.uids if uid in set(chosen))
        if not uids:
            raise ConfigError(
                f"none of the {len(pool.uids)} tasks in {config.pool} is in tasks={config.tasks} ({len(chosen)} "
                f"tasks). Choose tasks of the pool, or another pool."
            )
    refuse_heldout(uids, train_on_benchmark=config.train_on_benchmark_and_mark_results)
    return uids


def train(config: TrainConfig, uids: Sequence[str], slots: EpisodeSlots) -> dict[str, Any]:
    """`run` on given tasks and environments."""
    output = pathlib.Path(config.output_dir)
    marks = {MARK: True} if benchmark_uids(uids) or is_marked_policy(policy_folder(config.policy)) else {}
    algo, sampling, optim = config.algo, config.sampling, config.optim

    model, params, tokenizer = load_policy(
        config.policy, mesh=build_mesh(config.mesh), rules=config.mesh.rules, dtype=config.compute_dtype
    )
    chat = ChatTemplate(tokenizer)
    learner = build_learner(
        model,
        optim=optim,
        mesh=config.mesh,
        num_steps=config.steps,
        algo=algo,
        temperature=sampling.temperature,
    )
    sampler = Sampler(model, chat.end_of_turn_ids, sampling, config.seed, mesh=learner.mesh, rules=config.mesh.rules)
    plan = TaskPlan(tuple(uids), config.seed)
    buckets = length_buckets(sampling.max_episode_tokens)
    lines = StepLines(config.steps)

    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(contextlib.closing(Checkpoints(output / "checkpoints")))
        state, progress = _resumed(checkpoints, learner.init(params), config, plan)
        log = MetricsLog(output / "metrics.jsonl", last_step=progress.step)
        for remark in checkpoints.remarks:
            lines.say(remark)
        lines.say(f"{len(uids)} tasks, policy {config.policy}: {progress.step} of {config.steps} steps are done")
        for mark in marks:
            lines.say(f"every result is marked {mark}")
            mark_provenance(output, mark)
        try:
            for step in range(progress.step + 1, config.steps + 1):
                watch = Stopwatch()
                collected = collect_groups(
                    functools.partial(
                        run_attempts,
                        sampler,
                        compute_params(model, state.params),  # released before the update
                        slots,
                        chat,
                        max_episode_tokens=sampling.max_episode_tokens,
                        stopwatch=watch,
                    ),
                    plan,
                    progress.position,
                    algo=algo,
                    seed=config.seed,
                    step=step,
                )
                batch = batch_of(collected.groups, algo, buckets)
                with _interrupts_deferred():
                    with watch.running("update"):
                        state, figures = learner.update(state, batch) if collected.groups else (state, None)
                    progress = dataclasses.replace(progress, step=step, position=collected.position)
                    row = metrics_of(step, collected, batch, figures, watch.seconds) | marks
                    log.write(row)
                    lines.step(row)
                    if step % config.checkpoint_every == 0 or step == config.steps:
                        checkpoints.save(state, progress)
        except (KeyboardInterrupt, EnvironmentFault):
            checkpoints.save(state, progress)
            raise
        except ConfigError:  # an endpoint now rejects its key; before the first update, a configuration to correct
            if progress.step:
                checkpoints.save(state, progress)
            raise
    save_policy(output / "policy", model, state.params, tokenizer, like=config.policy, marked=bool(marks))
    summary = summary_of(read_metrics(output / "metrics.jsonl"), config) | marks
    write_json(output / "summary.json", summary)
    lines.say(f"policy written to {output / 'policy'}")
    return summary


def batch_of(groups: Sequence[Group], algo: AlgoConfig, buckets: Sequence[int]) -> Batch:
    """The trajectories of all groups, each with its advantage in its group."""
    advantages = [group_advantages(group.reward_g, normalize_by_std=algo.normalize_by_std) for group in groups]
    return build_batch(
        [member.trajectory for group in groups for member in group.members if member.trajectory is not None],
        np.concatenate(advantages) if advantages else np.zeros(0, np.float32),
        micro_batch=algo.micro_batch,
        buckets=buckets,
    )


def metrics_of(
    step: int,
    collected: Collected,
    batch: Batch,
    figures: dict[str, float] | None,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The row of one step in `metrics.jsonl`.

    Rates are over every clean attempt of complete groups, with those that were replaced: groups to train on are
    selected by outcome, so rates over them would be biased.
    """
    episodes = [member.episode for group in collected.rolled for member in group.members]
    num_sampled = sum(episode.usage["sampled_tokens"] for episode in episodes)
    seconds = {part: round(seconds.get(part, 0.0), 4) for part in ("policy", "environment", "update")}
    rollout_s = seconds["policy"] + seconds["environment"]
    return {
        "step": step,
        "updated": figures is not None,
        "reward": _mean([episode.reward for episode in episodes]),
        "pass_rate": _mean([episode.passed for episode in episodes]),
        "truncated": _mean([episode.finish_reason is FinishReason.TRUNCATED for episode in episodes]),
        "agent_turns": _mean([episode.usage["agent_turns"] for episode in episodes]),
        "episodes": len(episodes),
        "groups_used": len(collected.groups),
        "groups_rolled": len(collected.rolled),
        "groups_replaced": collected.num_replaced,
        "groups_dropped": collected.num_mixed - len(collected.groups),
        "rounds": collected.num_rounds,
        "voids": collected.num_voids,
        "set_aside": list(collected.set_aside),
        "tasks": [group.uid for group in collected.rolled],
        "sampled_tokens": num_sampled,
        "batch_tokens": batch.num_tokens,
        "trained_tokens": batch.num_trained,
        "sampled_tokens_per_s": num_sampled / rollout_s if rollout_s else 0.0,
        "seconds": {"rollout": rollout_s, **seconds},
        **(figures or dict.fromkeys((*PolicyMetrics._fields, "grad_norm", "learning_rate"))),
    }


def summary_of(rows: Sequence[dict[str, Any]], config: TrainConfig) -> dict[str, Any]:
    """The summary of a finished run; pass rates are means over a tenth of the steps."""
    tenth = max(1, len(rows) // 10)
    parts = {part: sum(row["seconds"][part] for row in rows) for part in ("policy", "environment", "update")}
    return {
        "seed": config.seed,
        "steps": len(rows),
        "updates": sum(row["updated"] for row in rows),
        "pass_rate_first": _mean([row["pass_rate"] for row in rows[:tenth]]),
        "pass_rate_last": _mean([row["pass_rate"] for row in rows[-tenth:]]),
        "voids": sum(row["voids"] for row in rows),
        "logp_gap_max": max((row["logp_gap_max"] or 0.0 for row in rows), default=0.0),
        "seconds": parts,
        "environment_share": parts["environment"] / max(sum(parts.values()), 1e-9),
    }


def _mean(values: Sequence[float | int | None]) -> float:
    return float(np.mean(np.array(values, np.float64))) if len(values) else 0.0


def _resumed(
    checkpoints: Checkpoints, state: LearnerState, config: TrainConfig, plan: TaskPlan
) -> tuple[LearnerState, Progress]:
    """State and progress of the newest checkpoint that is whole; without any the given state at step 0.

    Raises:
        ConfigError: the checkpoint is of another configuration or of other tasks.
        CheckpointError: there are checkpoints, and all are damaged.
    """
    tasks = hashlib.sha256("\n".join(sorted(plan.uids)).encode()).hexdigest()
    fresh = Progress(step=0, position=0, config=config.model_dump(mode="json"), tasks=tasks)
    saved = checkpoints.read_progress()
    if saved is None:
        return state, fresh
    refuse_changed_config(saved.config, fresh.config)
    if saved.tasks != tasks:
        raise ConfigError(
            f"output_dir holds a run on other tasks than the {len(plan.uids)} given now: the tasks of "
            f"{config.pool or config.tasks} have changed since. Give the tasks it was started with, or another "
            f"output_dir for a new run."
        )
    return checkpoints.restore(state), dataclasses.replace(fresh, step=saved.step, position=saved.position)


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Defers Ctrl-C to the end of the block: in the middle of an update there is no consistent state to save."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield
        return
    interrupted = False

    def remember(*_: object) -> None:
        nonlocal interrupted
        interrupted = True

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt
