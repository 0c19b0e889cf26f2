"""`tbx evaluate` and `tbx pool`: a configuration becomes a player, a campaign and its measures.

JAX is imported only when a policy model plays.
"""

from __future__ import annotations

import hashlib
import importlib.resources
from pathlib import Path
from typing import Any

from tbx_envs.campaign_files import Row, write_json
from tbx_envs.errors import ConfigError, did_you_mean
from tbx_envs.evaluate import refuse_many_voids, run_campaign, summarize, tallies_of
from tbx_envs.policies import Player
from tbx_envs.pool import Pool, refuse_heldout, save_pool, select_pool
from tbx_envs.report import CampaignProgress, print_campaign, print_pool
from tbx_envs.task_lists import select_tasks
from tbx_jax.config import EvaluateConfig, PoolConfig, SamplingConfig

AGENTS = ("oracle", "idle", "scripted")
SHIPPED = "nano"


def run_evaluation(config: EvaluateConfig) -> dict[str, Any]:
    """Repeats the tasks, writes rows and summary into `output_dir`, prints the table.

    Returns:
        What `summary.json` holds: the measures (`tbx_envs.evaluate.summarize`) with `policy`, `seed` and
        `k`, the number of attempts at each task.

    Raises:
        ConfigError: no such policy or tasks, or another campaign in `output_dir`.
        PolicyFault: too many attempts are void (`MAX_VOID_SHARE`); everything is written nevertheless.
    """
    rows = _campaign(config, config.lapse)
    measured = summarize(rows, config.attempts, config.seed)
    summary = {"policy": config.policy, "seed": config.seed, "k": config.attempts, **measured}
    write_json(Path(config.output_dir) / "summary.json", summary)
    print_campaign(summary, config.attempts, title=f"policy {config.policy}")
    refuse_many_voids(rows)
    return summary


def run_pool(config: PoolConfig) -> Pool:
    """Estimates how hard each task is for the policy and freezes `output_dir/pool.json`.

    Raises:
        ConfigError: no such policy or tasks, tasks held out for evaluation, no task in the bands, or another
            campaign or pool in `output_dir`.
        PolicyFault: too many attempts are void; then no pool is written.
    """
    refuse_heldout(select_tasks(config.tasks))  # before hours of attempts, not after
    rows = _campaign(config, lapse=0.0)
    refuse_many_voids(rows)
    policy = policy_fingerprint(config.policy, config.sampling, lapse=0.0)
    pool = select_pool(tallies_of(rows), bands=config.bands, policy=policy, seed=config.seed)
    save_pool(pool, Path(config.output_dir) / "pool.json")
    print_pool(pool)
    return pool


def _campaign(config: EvaluateConfig | PoolConfig, lapse: float) -> list[Row]:
    uids = select_tasks(config.tasks)
    fingerprint = policy_fingerprint(config.policy, config.sampling, lapse)
    player = build_player(config, lapse)
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


def build_player(config: EvaluateConfig | PoolConfig, lapse: float) -> Player:
    """Who plays: an agent of ours, or the policy model of a checkpoint.

    Raises:
        ConfigError: no such agent and no such folder.
    """
    match config.policy:
        case "oracle":
            from tbx_envs.policies.oracle import OraclePlayer

            return OraclePlayer()
        case "idle":
            from tbx_envs.policies.idle import IdlePlayer

            return IdlePlayer()
        case "scripted":
            from tbx_envs.policies.scripted import ScriptedPlayer

            return ScriptedPlayer(lapse)
        case _:
            from tbx_jax.player import CheckpointPlayer

            return CheckpointPlayer(config.policy, config.sampling, config.mesh, config.seed)


def policy_fingerprint(policy: str, sampling: SamplingConfig, lapse: float) -> dict[str, Any]:
    """What tells two policies apart: the name, and settings or weights that decide what it does.

    Neither slots nor decode steps nor the mesh are in it: they change how fast episodes are made, not which.

    Raises:
        ConfigError: no such agent and no such folder.
    """
    if policy == "scripted":
        return {"name": policy, "lapse": lapse}
    if policy in AGENTS:
        return {"name": policy}
    settings = sampling.model_dump(exclude={"slots", "decode_steps"})
    return {"name": policy, "sha256": _folder_hash(_policy_folder(policy)), "sampling": settings}


def _policy_folder(policy: str) -> Path:
    if policy == SHIPPED:
        return Path(str(importlib.resources.files("tbx_jax.nano")))
    if not Path(policy).is_dir():
        names = (*AGENTS, SHIPPED)
        raise ConfigError(
            f"policy '{policy}' is neither {', '.join(names)} nor a folder.{did_you_mean(policy, names)} "
            f"Give one of these, or the folder that `tbx train` wrote."
        )
    return Path(policy)


def _folder_hash(folder: Path) -> str:
    """SHA-256 (hex) over the names and contents of the files in a folder, code left out."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return total.hexdigest()
