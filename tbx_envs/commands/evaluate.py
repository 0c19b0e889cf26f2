"""`tbx evaluate` and `tbx pool`: from a configuration to an agent, an evaluation run and its measures.

JAX is imported only when the policy is a model's weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tbx_envs.agents import Agent
from tbx_envs.commands.config import AttemptsConfig, EvaluateConfig, PoolConfig, SamplingConfig
from tbx_envs.commands.environments import (
    OUTCOME_SETTINGS,
    Endpoints,
    concurrency_for,
    environment_fingerprint,
    episode_options,
    opened_endpoints,
)
from tbx_envs.endpoints.costs import run_costs
from tbx_envs.errors import ConfigError, did_you_mean
from tbx_envs.evaluation.files import Row, load_rows, load_spending
from tbx_envs.evaluation.pool import Pool, refuse_heldout, save_pool, select_pool
from tbx_envs.evaluation.provenance import mark_provenance
from tbx_envs.evaluation.regrade import regrade
from tbx_envs.evaluation.report import RunProgress, print_pool, print_run
from tbx_envs.evaluation.run import refuse_many_voids, run, summarize, tallies_of
from tbx_envs.evaluation.task_lists import select_tasks
from tbx_envs.files import CHECKSUMS, sha256_of, write_json
from tbx_envs.runtime import EpisodeOptions
from tbx_envs.thinkingbox.dataset.guard import MARK, is_marked_policy
from tbx_envs.version import DISTRIBUTION

AGENTS = ("oracle", "idle", "scripted", "endpoint")


class PolicyModels(Protocol):
    """The policies that are a model's weights: an entry point of the group `tbx.policies` names an object like this.

    Attributes:
        names: names of the policies that have one; others are given by folder.
    """

    names: tuple[str, ...]

    def knows(self, policy: str) -> bool:
        """True when the policy is given by a name rather than by its folder."""
        ...

    def folder(self, policy: str) -> Path:
        """The folder (or the one file) of a policy that is known by name; one of a hub is downloaded.

        Raises:
            CheckpointError: no such policy, or it cannot be downloaded.
        """
        ...

    def files(self, policy: str) -> Sequence[Path]:
        """The files in that folder that decide what the policy does."""
        ...

    def agent(self, config: AttemptsConfig, options: EpisodeOptions) -> Agent:
        """An agent that runs attempts with the policy of the configuration."""
        ...


def policy_models() -> tuple[PolicyModels, ...]:
    """The policy models of all installed packages, found by entry point since this package does not know the trainer;
    those of our own distribution first.

    Raises:
        ConfigError: no installed package has policy models.
    """
    points = importlib.metadata.entry_points(group="tbx.policies")
    ours_first = sorted(points, key=lambda point: point.dist is None or point.dist.name != DISTRIBUTION)
    if not ours_first:
        raise ConfigError(f"no policy models are installed. Give policy= one of {', '.join(AGENTS)}.")
    return tuple(point.load() for point in ours_first)


def models_of(policy: str) -> PolicyModels:
    """The policy models that know a policy by name; of a folder, those of our own distribution."""
    everyone = policy_models()
    return next((models for models in everyone if models.knows(policy)), everyone[0])


def run_evaluation(config: EvaluateConfig) -> dict[str, Any]:
    """Make the attempts, write rows and summary into `output_dir`, print the table.

    Returns:
        The content of `summary.json`: the measures (`tbx_envs.evaluation.run.summarize`) with `policy`, `seed` and `k`,
        the number of attempts at each task.

    Raises:
        ConfigError: no such policy or tasks, or another evaluation run in `output_dir`.
        PolicyFault: too many attempts are void (`MAX_VOID_SHARE`); all files are written nevertheless.
    """
    rows = _evaluated(config, config.error_rate) if config.regrade is None else _regraded(config, config.regrade)
    fingerprint, _ = load_rows(config.output_dir)  # after regrading its policy, seed and attempts are the source's
    policy, seed, k = fingerprint["policy"]["name"], fingerprint["seed"], fingerprint["attempts"]
    summary = {"policy": policy, "seed": seed, "k": k, **summarize(rows, k, seed)}
    summary |= {MARK: True} if fingerprint["policy"].get(MARK) else {}
    summary |= _costs(config, rows, summary[f"observed_{k}_of_{k}"])
    write_json(Path(config.output_dir) / "summary.json", summary)
    print_run(summary, k, title=f"policy {policy}")
    refuse_many_voids(rows)
    return summary


def _costs(config: EvaluateConfig, rows: Sequence[Row], reliable_tasks: int) -> dict[str, Any]:
    """`costs` for the summary; empty where no served model took part."""
    agent = config.agent.endpoint if config.policy == "endpoint" else None
    served = {"policy": agent, "user": config.user.endpoint, "judge": config.judge.endpoint}
    prices = {role: settings.prices for role, settings in served.items() if settings is not None}
    if not prices:
        return {}
    spent = load_spending(config.output_dir)
    return {"costs": run_costs(rows, prices, reliable_tasks=reliable_tasks, spent=spent)}


def run_pool(config: PoolConfig) -> Pool:
    """Estimate the difficulty of each task for the policy and write `output_dir/pool.json`.

    Raises:
        ConfigError: no such policy or tasks, tasks held out for evaluation, no task in the bands, or another evaluation
            run or pool in `output_dir`.
        PolicyFault: too many attempts are void; no pool is written.
    """
    on_benchmark = config.train_on_benchmark_and_mark_results
    # `select_pool` refuses them too, but only after hours of attempts.
    refuse_heldout(select_tasks(config.tasks), purpose="a pool", train_on_benchmark=on_benchmark)
    rows = _evaluated(config, error_rate=0.0)
    refuse_many_voids(rows)
    policy = policy_of_run(config, error_rate=0.0)
    pool = select_pool(
        tallies_of(rows), bands=config.bands, policy=policy, seed=config.seed, train_on_benchmark=on_benchmark
    )
    save_pool(pool, Path(config.output_dir) / "pool.json")
    if pool.trained_on_benchmark:
        mark_provenance(config.output_dir, MARK)
    print_pool(pool)
    return pool


def _evaluated(config: AttemptsConfig, error_rate: float) -> list[Row]:
    uids = select_tasks(config.tasks)
    fingerprint = policy_of_run(config, error_rate)
    with opened_endpoints(
        judge=config.judge, user=config.user, agent=config.agent, run_folder=config.output_dir
    ) as endpoints:
        agent = build_agent(config, error_rate, uids, endpoints)
        with RunProgress(len(uids) * config.attempts) as progress:
            return run(
                agent,
                uids,
                attempts=config.attempts,
                seed=config.seed,
                rows_path=Path(config.output_dir) / "rows.jsonl",
                max_void_retries=config.max_void_retries,
                policy=fingerprint,
                progress=progress,
                kept=progress.keep,
            )


def _regraded(config: EvaluateConfig, folder: str) -> list[Row]:
    """The rows after grading the episodes of an evaluation run again."""
    _, rows = load_rows(folder)
    with opened_endpoints(judge=config.judge, user=config.user, run_folder=config.output_dir) as endpoints:
        options = episode_options(config, endpoints)
        with RunProgress(len(rows)) as progress:
            return regrade(
                folder,
                Path(config.output_dir) / "rows.jsonl",
                judge=options.judge,
                judge_fingerprint=environment_fingerprint(config.environment, config.judge, config.user).get("judge"),
                check_timeout_s=config.environment.check_timeout_s,
                progress=progress,
                kept=progress.keep,
            )


def build_agent(config: AttemptsConfig, error_rate: float, uids: Sequence[str], endpoints: Endpoints) -> Agent:
    """The agent of the configuration: one of ours, a served model, or one that runs a model's weights.

    Raises:
        ConfigError: no policy model with that name or folder, no endpoint for `policy=endpoint`, or tasks that the
            agent cannot attempt.
    """
    if config.agent.kind == "endpoint" and config.policy != "endpoint":
        raise ConfigError(
            f"agent=endpoint is the model of policy=endpoint, and policy={config.policy} would be measured. Add "
            f"policy=endpoint, or leave agent=endpoint out."
        )
    options = episode_options(config, endpoints)
    concurrency = concurrency_for(config.environment, uids, endpoints)
    match config.policy:
        case "oracle":
            from tbx_envs.agents.oracle import OracleAgent

            OracleAgent.refuse_unsuited(uids)
            return OracleAgent(concurrency=concurrency, options=options)
        case "idle":
            from tbx_envs.agents.idle import IdleAgent

            return IdleAgent(concurrency=concurrency, options=options)
        case "scripted":
            from tbx_envs.agents.scripted import ScriptedAgent

            ScriptedAgent.refuse_unsuited(uids)
            return ScriptedAgent(error_rate, concurrency=concurrency, options=options)
        case "endpoint":
            from tbx_envs.agents.endpoint import EndpointAgent

            if endpoints.agent is None:
                raise ConfigError(
                    "policy=endpoint needs to know which one. Add agent=endpoint agent.endpoint.base_url=... "
                    "agent.endpoint.model=..."
                )
            options = dataclasses.replace(options, chat_format=config.agent.chat_format)
            return EndpointAgent(endpoints.agent, concurrency=concurrency, options=options)
        case _:
            return models_of(config.policy).agent(config, options)


def policy_of_run(config: AttemptsConfig, error_rate: float) -> dict[str, Any]:
    """What an evaluation run measures, for its fingerprint: the policy, and its episodes' user, judge and clock."""
    made = policy_fingerprint(config.policy, config.sampling, error_rate)
    if config.compute_dtype is not None:
        made |= {"compute_dtype": config.compute_dtype}
    if config.policy == "endpoint" and config.agent.endpoint is not None:
        made |= {name: getattr(config.agent.endpoint, name) for name in OUTCOME_SETTINGS}
    return made | environment_fingerprint(config.environment, config.judge, config.user)


def policy_fingerprint(policy: str, sampling: SamplingConfig, error_rate: float) -> dict[str, Any]:
    """What distinguishes two policies: the name, and the settings or weights that decide what it does.

    Cache slots, episodes in flight, decode steps and the mesh are not part of it: they change the speed, not the
    episodes.

    Raises:
        ConfigError: no agent has that name, and no such folder exists.
        CheckpointError: a policy of the Hub cannot be downloaded.
    """
    if policy == "scripted":
        return {"name": policy, "error_rate": error_rate}
    if policy in AGENTS:
        return {"name": policy}
    settings = sampling.model_dump(exclude={"slots", "episodes", "decode_steps"})
    folder, files = _policy_files(policy)
    marks = {MARK: True} if is_marked_policy(folder) else {}
    return {"name": policy, "sha256": _files_hash(folder, files), "sampling": settings, **marks}


def _policy_files(policy: str) -> tuple[Path, Sequence[Path]]:
    """The folder (or the one file) that a policy is read from, and the files in it that decide what it does."""
    models = models_of(policy)
    if models.knows(policy):
        folder = models.folder(policy)
        return folder, models.files(policy)
    if not Path(policy).is_dir():
        names = (*AGENTS, *(name for models in policy_models() for name in models.names))
        raise ConfigError(
            f"policy '{policy}' is neither {', '.join(names)} nor a folder.{did_you_mean(policy, names)} "
            f"Give one of these, the folder that `tbx train` wrote, or org/name of the Hugging Face Hub."
        )
    return Path(policy), files_in(Path(policy))


def files_in(folder: Path) -> list[Path]:
    """The files in a folder, code left out; of a policy that is one file, that file."""
    paths = sorted(folder.rglob("*")) if folder.is_dir() else [folder]
    return [path for path in paths if path.is_file() and path.suffix not in (".py", ".pyc")]


def _files_hash(folder: Path, files: Sequence[Path]) -> str:
    """SHA-256 (hex) over the names and contents of files in a folder, without the checksums, which say the same."""
    total = hashlib.sha256()
    for path in (path for path in files if path.name != CHECKSUMS):
        total.update(f"{path.relative_to(folder).as_posix()} {sha256_of(path)}\n".encode())
    return total.hexdigest()
