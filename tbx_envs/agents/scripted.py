"""The scripted agent of a domain: it follows the rules, except for a given error rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tbx_envs.agents import Attempt, Opening
from tbx_envs.agents.suited import no_script, refuse_unsuited
from tbx_envs.agents.turns import play_turns
from tbx_envs.domains import AgentTurns, load_domain
from tbx_envs.episode import Episode
from tbx_envs.runtime import EpisodeOptions
from tbx_envs.seeding import rng
from tbx_envs.task import Task


class ScriptedAgent:
    """Runs the scripted agent of each task's family.

    Args:
        error_rate: probability that the agent breaks a rule at a decision, before it is multiplied by the pressure of
            the caller (`Family.scripted`); 0 is never.
        concurrency: number of episodes that run at the same time (`play_turns`).
        options: options of every episode; None is the defaults.
    """

    def __init__(self, error_rate: float = 0.0, *, concurrency: int = 1, options: EpisodeOptions | None = None) -> None:
        self.error_rate = error_rate
        self._concurrency = concurrency
        self._options = options

    @staticmethod
    def refuse_unsuited(uids: Iterable[str]) -> None:
        """Refuse tasks without a script.

        Raises:
            ConfigError: there are such tasks.
        """
        refuse_unsuited(uids, no_script, "policy scripted has scripts for our own domains, and none")

    def run(self, attempts: Iterable[Attempt]) -> Iterator[Episode]:
        """One episode for each attempt, in order; the agent's errors are a function of the attempt's seed.

        Raises:
            ConfigError: a task is a dataset's.
        """
        return play_turns(attempts, self._agent, concurrency=self._concurrency, options=self._options)

    def _agent(self, attempt: Attempt, opening: Opening) -> AgentTurns:
        self.refuse_unsuited([attempt.uid])
        task = opening.task
        assert isinstance(task, Task)  # others are refused
        family = load_domain(task.domain).families[task.family]
        return family.scripted(task, rng(attempt.seed, "scripted"), self.error_rate)
