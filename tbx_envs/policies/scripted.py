"""The scripted policy: the domain's own agent, which follows the rules except for a stated share of
lapses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tbx_envs.domains import ScriptedAgent, load_domain
from tbx_envs.episode import Episode
from tbx_envs.policies import Attempt
from tbx_envs.policies.turns import play_turns
from tbx_envs.seeding import rng
from tbx_envs.task import Task


class ScriptedPlayer:
    """Plays each task with its family's scripted agent.

    Args:
        lapse: how often the agent breaks a rule, times the task's pressure (`Family.scripted`); 0 is never.
    """

    def __init__(self, lapse: float = 0.0) -> None:
        self.lapse = lapse

    def play(self, attempts: Iterable[Attempt]) -> Iterator[Episode]:
        """One episode for each attempt, in order; the agent's lapses are a function of the attempt's seed."""
        return play_turns(attempts, self._agent)

    def _agent(self, task: Task, attempt: Attempt) -> ScriptedAgent:
        family = load_domain(task.domain).families[task.family]
        return family.scripted(task, rng(attempt.seed, "scripted"), self.lapse)
