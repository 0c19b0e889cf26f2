"""The agent of a policy's weights, which `tbx evaluate` and `tbx pool` use for a policy's folder.

Evaluation runs the same code as rollouts, so a policy is measured as it was trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tbx_envs.agents import Attempt
from tbx_envs.chat.template import ChatTemplate
from tbx_envs.episode import Episode
from tbx_envs.runtime import EpisodeOptions
from tbx_envs.vector import EpisodeSlots
from tbx_jax.compilation import enable_compilation_cache
from tbx_jax.config import MeshConfig, SamplingConfig
from tbx_jax.mesh import build_mesh
from tbx_jax.policies.weights import Precision, load_policy
from tbx_jax.rollout import run_attempts
from tbx_jax.sampler.sampler import Sampler


class CheckpointAgent:
    """Runs attempts with the policy of a folder, many episodes together.

    Args:
        policy: folder that `tbx_jax.policies.weights.save_policy` wrote, or name of a shipped policy.
        sampling: temperature, limits and number of episodes in flight.
        mesh: devices and sharding rules.
        seed: seed of the sampler, used together with the seed of each attempt.
        compute_dtype: type of the computation; None is the policy's own.
        options: options of every episode; None is the defaults.

    Raises:
        CheckpointError: no such policy, or its files do not fit.
        ConfigError: the policy, its chat template, the sampling and the mesh do not fit together.
    """

    def __init__(
        self,
        policy: str,
        sampling: SamplingConfig,
        mesh: MeshConfig,
        seed: int,
        *,
        compute_dtype: Precision | None = None,
        options: EpisodeOptions | None = None,
    ) -> None:
        enable_compilation_cache()
        devices = build_mesh(mesh)
        model, self._params, tokenizer = load_policy(
            policy, mesh=devices, rules=mesh.rules, dtype=compute_dtype, param_dtype=None
        )
        self._chat = ChatTemplate(tokenizer)
        self._sampling = sampling
        self._options = options
        self._sampler = Sampler(
            model,
            self._chat.end_of_turn_ids,
            sampling,
            seed,
            mesh=devices,
            rules=mesh.rules,
            params=self._params,
        )

    def run(self, attempts: Iterable[Attempt]) -> Iterator[Episode]:
        """One episode for each attempt, as they end, including void ones."""
        slots = EpisodeSlots(self._sampling.episodes_in_flight, self._options)
        try:
            for rollout in run_attempts(
                self._sampler,
                self._params,
                slots,
                self._chat,
                attempts,
                max_episode_tokens=self._sampling.max_episode_tokens,
            ):
                yield rollout.episode
        finally:
            slots.close()
