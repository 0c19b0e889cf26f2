"""The subcommands of `tbx` that need JAX, and how `tbx evaluate` finds the agents of policy models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tbx_envs.commands.command import Command, HydraCommand

if TYPE_CHECKING:
    from tbx_envs.agents import Agent
    from tbx_envs.commands.config import AttemptsConfig
    from tbx_envs.runtime import EpisodeOptions

TRAIN = HydraCommand("GRPO on a pool of tasks", "train", "tbx_jax.config:TrainConfig", "tbx_jax.train:run")
SFT = HydraCommand(
    "make the shipped policy: demonstrations, tokenizer, SFT",
    "sft",
    "tbx_jax.config:SftConfig",
    "tbx_jax.commands.sft:run",
    resumes=False,
)
DEMO = HydraCommand(
    "evaluate, select a pool, train, evaluate again", "demo", "tbx_jax.config:DemoConfig", "tbx_jax.commands.demo:run"
)
EXPORT = Command("write a policy as a folder that other programs load", "tbx_jax.commands.export:main")
SERVE_POLICY = Command("a policy as an OpenAI-compatible chat endpoint", "tbx_jax.serving.policy_server:main")


class PolicyModels:
    """The policies of this package, by folder or name (`tbx_envs.commands.evaluate.PolicyModels`)."""

    names = ("nano", "smollm2")

    def knows(self, policy: str) -> bool:
        if policy in self.names or "/" not in policy:  # a misspelt name is one without JAX, too
            return policy in self.names
        from tbx_jax.policies.hub_policy import is_hub_name

        return is_hub_name(policy)

    def folder(self, policy: str) -> Path:
        from tbx_jax.policies.weights import policy_folder

        return policy_folder(policy)

    def files(self, policy: str) -> Sequence[Path]:
        from tbx_envs.commands.evaluate import files_in
        from tbx_jax.policies.hub_policy import hub_files, is_hub_name

        folder = self.folder(policy)
        return hub_files(folder) if is_hub_name(policy) else files_in(folder)

    def agent(self, config: AttemptsConfig, options: EpisodeOptions) -> Agent:
        from tbx_jax.commands.agents import CheckpointAgent

        return CheckpointAgent(
            config.policy,
            config.sampling,
            config.mesh,
            config.seed,
            compute_dtype=config.compute_dtype,
            options=options,
        )


POLICY_MODELS = PolicyModels()
