"""`tbx evaluate` and `tbx pool`: a configuration becomes a player, a campaign and its measures.

JAX is imported only when a policy model plays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tbx_envs.campaign_files import Row, load_rows, write_json
from tbx_envs.costs import campaign_costs
from tbx_envs.datasets.guard import MARK, is_marked_policy
from tbx_envs.errors import ConfigError, did_you_mean
from tbx_envs.evaluate import refuse_many_voids, run_campaign, summarize, tallies_of
from tbx_envs.policies import Player
from tbx_envs.pool import Pool, refuse_heldout, save_pool, select_pool
from tbx_envs.provenance import mark_provenance
from tbx_envs.regrade import regrade_campaign
from tbx_envs.report import CampaignProgress, print_campaign, print_pool
from tbx_envs.task_lists import select_tasks
from tbx_jax.config import EvaluateConfig, PoolConfig, SamplingConfig
from tbx_jax.environments import (
    Endpoints,
    concurrency_for,
    environment_fingerprint,
    environment_options,
    opened_endpoints,
    prices_of,
)
from tbx_jax.hub_policy import hub_files, hub_folder, is_hub_name

AGENTS = ("oracle", "idle", "scripted", "endpoint")
NAMED = ("nano", "smollm2")  # of `tbx_jax.weights`, which imports JAX


def run_evaluation(config: EvaluateConfig) -> dict[str, Any]:
    """Repeats the tasks, writes rows and summary into `output_dir`, prints the table.

    Returns:
        What `summary.json` holds: the measures (`tbx_envs.evaluate.summarize`) with `policy`, `seed` and
        `k`, the number of attempts at each task.

    Raises:
        ConfigError: no such policy or tasks, or another campaign in `output_dir`.
        PolicyFault: too many attempts are void (`MAX_VOID_SHARE`); everything is written nevertheless.
    """
    rows = _campaign(config, config.lapse) if config.regrade is None else _regraded(config, config.regrade)
    played, _ = load_rows(config.output_dir)
    policy, seed, k = played["policy"]["name"], played["seed"], played["attempts"]  # of a regraded one: the source's
    summary = {"policy": policy, "seed": seed, "k": k, **summarize(rows, k, seed)}
    summary |= {MARK: True} if played["policy"].get(MARK) else {}
    summary |= _costs(config, rows, summary[f"observed_{k}_of_{k}"])
    write_json(Path(config.output_dir) / "summary.json", summary)
    print_campaign(summary, k, title=f"policy {policy}")
    refuse_many_voids(rows)
    return summary


def _costs(config: EvaluateConfig, rows: Sequence[Row], reliable_tasks: int) -> dict[str, Any]:
    """`costs` for the summary, where served models took part."""
    agent = config.agent.endpoint if config.policy == "endpoint" else None
    served = {"policy": agent, "user": config.user.endpoint, "judge": config.judge.endpoint}
    prices = {role: prices_of(settings) for role, settings in served.items() if settings is not None}
    return {"costs": campaign_costs(rows, prices, reliable_tasks=reliable_tasks)} if prices else {}


def run_pool(config: PoolConfig) -> Pool:
    """Estimates how hard each task is for the policy and freezes `output_dir/pool.json`.

    Raises:
        ConfigError: no such policy or tasks, tasks held out for evaluation, no task in the bands, or another
            campaign or pool in `output_dir`.
        PolicyFault: too many attempts are void; then no pool is written.
    """
    on_benchmark = config.train_on_benchmark_and_mark_results
    # before hours of attempts, not after
    refuse_heldout(select_tasks(config.tasks), purpose="a pool", train_on_benchmark=on_benchmark)
    rows = _campaign(config, lapse=0.0)
    refuse_many_voids(rows)
    policy = campaign_policy(config, lapse=0.0)
    pool = select_pool(
        tallies_of(rows), bands=config.bands, policy=policy, seed=config.seed, train_on_benchmark=on_benchmark
    )
    save_pool(pool, Path(config.output_dir) / "pool.json")
    if pool.trained_on_benchmark:
        mark_provenance(config.output_dir, MARK)
    print_pool(pool)
    return pool


def _campaign(config: EvaluateConfig | PoolConfig, lapse: float) -> list[Row]:
    uids = select_tasks(config.tasks)
    fingerprint = campaign_policy(config, lapse)
    with opened_endpoints(judge=config.judge, user=config.user, agent=config.agent) as endpoints:
        player = build_player(config, lapse, uids, endpoints)
        with CampaignProgress(len(uids) * config.attempts) as progress:
            return run_campaign(
                player,
                uids,
                attempts=config.attempts,
                seed=config.seed,
                rows_path=Path(config.output_dir) / "rows.jsonl",
                max_void_retries=config.max_void_retries,
                policy=fingerprint,
                progress=progress,
            )


def _regraded(config: EvaluateConfig, folder: str) -> list[Row]:
    """The rows of a campaign whose episodes are graded again."""
    _, played = load_rows(folder)
    with opened_endpoints(judge=config.judge, user=config.user) as endpoints:
        options = environment_options(config.environment, config.judge, config.user, endpoints)
        with CampaignProgress(len(played)) as progress:
            return regrade_campaign(
                folder,
                Path(config.output_dir) / "rows.jsonl",
                judge=options["judge"],
                judge_fingerprint=environment_fingerprint(config.environment, config.judge, config.user).get("judge"),
                check_timeout_s=config.environment.check_timeout_s,
                progress=progress,
            )


def build_player(
    config: EvaluateConfig | PoolConfig, lapse: float, uids: Sequence[str], endpoints: Endpoints
) -> Player:
    """Who plays: an agent of ours, a served model, or the policy model of a checkpoint.

    Raises:
        ConfigError: no such agent and no such folder, or no endpoint for `policy=endpoint`.
    """
    options = environment_options(config.environment, config.judge, config.user, endpoints)
    options_of_ours = {"concurrency": concurrency_for(config.environment, uids, endpoints), **options}
    match config.policy:
        case "oracle":
            from tbx_envs.policies.oracle import OraclePlayer

            return OraclePlayer(**options_of_ours)
        case "idle":
            from tbx_envs.policies.idle import IdlePlayer

            return IdlePlayer(**options_of_ours)
        case "scripted":
            from tbx_envs.policies.scripted import ScriptedPlayer

            return ScriptedPlayer(lapse, **options_of_ours)
        case "endpoint":
            from tbx_envs.policies.endpoint import EndpointPlayer

            if endpoints.agent is None:
                raise ConfigError(
                    "policy=endpoint needs to know which one. Add agent=endpoint agent.endpoint.base_url=... "
                    "agent.endpoint.model=..."
                )
            return EndpointPlayer(endpoints.agent, chat_format=config.agent.chat_format, **options_of_ours)
        case _:
            from tbx_jax.player import CheckpointPlayer

            return CheckpointPlayer(
                config.policy,
                config.sampling,
                config.mesh,
                config.seed,
                compute_dtype=config.compute_dtype,
                **options,
            )


def campaign_policy(config: EvaluateConfig | PoolConfig, lapse: float) -> dict[str, Any]:
    """What a campaign measures, for its fingerprint: the policy, and what users, judges and clocks it meets."""
    made = policy_fingerprint(config.policy, config.sampling, lapse)
    if config.compute_dtype is not None:
        made |= {"compute_dtype": config.compute_dtype}
    if config.policy == "endpoint" and config.agent.endpoint is not None:
        made |= config.agent.endpoint.model_dump(
            include={"base_url", "model", "temperature", "max_tokens", "extra_body"}
        )
    return made | environment_fingerprint(config.environment, config.judge, config.user)


def policy_fingerprint(policy: str, sampling: SamplingConfig, lapse: float) -> dict[str, Any]:
    """What tells two policies apart: the name, and settings or weights that decide what it does.

    Neither slots, episodes in flight and decode steps nor the mesh are in it: they change how fast episodes are
    made, not which.

    Raises:
        ConfigError: no such agent and no such folder.
        CheckpointError: a policy of the Hub that cannot be downloaded.
    """
    if policy == "scripted":
        return {"name": policy, "lapse": lapse}
    if policy in AGENTS:
        return {"name": policy}
    settings = sampling.model_dump(exclude={"slots", "episodes", "decode_steps"})
    folder = _policy_folder(policy)
    files = hub_files(folder) if is_hub_name(policy) else _files_in(folder)
    marks = {MARK: True} if is_marked_policy(folder) else {}
    return {"name": policy, "sha256": _files_hash(folder, files), "sampling": settings, **marks}


def _policy_folder(policy: str) -> Path:
    """The folder (or the one file) that the policy is read from."""
    if policy in NAMED:
        from tbx_jax.weights import policy_folder

        return policy_folder(policy)
    if is_hub_name(policy):
        return hub_folder(policy)
    if not Path(policy).is_dir():
        names = (*AGENTS, *NAMED)
        raise ConfigError(
            f"policy '{policy}' is neither {', '.join(names)} nor a folder.{did_you_mean(policy, names)} "
            f"Give one of these, the folder that `tbx train` wrote, or org/name of the Hugging Face Hub."
        )
    return Path(policy)


def _files_in(folder: Path) -> list[Path]:
    """The files in a folder, code left out; of a policy that is one file, that file."""
    paths = sorted(folder.rglob("*")) if folder.is_dir() else [folder]
    return [path for path in paths if path.is_file() and path.suffix not in (".py", ".pyc")]


def _files_hash(folder: Path, files: Sequence[Path]) -> str:
    """SHA-256 (hex) over the names and contents of files in a folder."""
    total = hashlib.sha256()
    for path in files:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return total.hexdigest()
