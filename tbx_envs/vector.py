"""Several episodes stepped together. A slot here is an environment's: the place of one episode at a time.

`EpisodeSlots` is what rollouts and evaluation are built on: slots start and end independently, and a fault ends one
slot's episode as void without disturbing the others. `ToolVectorEnv` is the same as a Gymnasium vector environment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Unpack

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from tbx_envs.doors import shown
from tbx_envs.env import ToolEnv
from tbx_envs.episode import Episode, Fault
from tbx_envs.errors import ActionError, DomainError, EnvironmentFault, TaskFault
from tbx_envs.messages import Message, Turn
from tbx_envs.rendering import transcript_text
from tbx_envs.runtime import EpisodeOptions, GivenOptions
from tbx_envs.spaces import AnyText
from tbx_envs.tools.given_turn import action_problem

# Slots whose environments wait for other processes are stepped in threads, at most this many at a time.
_MAX_THREADS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class SlotOutcome:
    """The result of starting an episode in a slot, or of one turn in it.

    Attributes:
        messages: messages the agent reads next: at the start the rules and the user's first message, later results
            of calls or the user's words; empty at an end that adds none.
        ended: True when the episode is over and `EpisodeSlots.episode` has its record.
        fault: infrastructure error that ended the episode, which is then void; None otherwise.
    """

    messages: tuple[Message, ...]
    ended: bool
    fault: Fault | None


def _refuse_others(actions: Mapping[int, str | Turn]) -> None:
    """Check that all slots get actions, before one of them is stepped.

    Raises:
        ActionError: one gets something else.
    """
    for slot, action in actions.items():
        if (problem := action_problem(action)) is not None:
            raise ActionError(f"the action of slot {slot} is {problem}. No slot was stepped.")


class EpisodeSlots:
    """A fixed number of slots, each with one episode at a time.

    Args:
        num_slots: number of slots.
        options: options of every episode; None is the defaults.
        given: single options by name, which replace those of `options`.
    """

    def __init__(self, num_slots: int, options: EpisodeOptions | None = None, **given: Unpack[GivenOptions]) -> None:
        self._envs: list[ToolEnv | None] = [None] * num_slots
        self._running = [False] * num_slots
        self._options = EpisodeOptions.of(options, given)

    @property
    def num_slots(self) -> int:
        return len(self._envs)

    def start(self, slot: int, uid: str, seed: int) -> SlotOutcome:
        """Start an episode of `uid` in `slot`; one in progress there is discarded.

        Raises:
            DomainError: no such task. One that is there and cannot be run is an outcome, with a fault of kind `task`.
        """
        env = self._envs[slot]
        if env is None or env.task.uid != uid:
            if env is not None:
                env.close()
            env = self._envs[slot] = ToolEnv(uid, options=self._options)
        try:
            env.reset(seed=seed)
        except DomainError as error:  # the task's own, and no reason for other tasks to end
            env.abandoned(0, fault := TaskFault(str(error)))
            self._running[slot] = False
            return SlotOutcome((), True, Fault(fault.kind, str(fault)))
        except EnvironmentFault as fault:
            self._running[slot] = False
            return SlotOutcome((), True, Fault(fault.kind, str(fault)))
        self._running[slot] = True
        return SlotOutcome(env.transcript, False, None)

    def advance(self, actions: Mapping[int, str | Turn]) -> dict[int, SlotOutcome]:
        """One turn in each slot given; the outcomes are in the same order.

        Raises:
            ActionError: a slot runs no episode, or something is no action; then no slot was stepped.
        """
        idle = [slot for slot in actions if not self._running[slot]]
        if idle:
            raise ActionError(f"advance() of slots {idle}: they run no episode; start() them first.")
        _refuse_others(actions)
        together = [slot for slot in actions if self.env(slot).waits]
        if len(together) < 2:
            return {slot: self._advance_one(slot, action) for slot, action in actions.items()}
        with ThreadPoolExecutor(min(len(together), _MAX_THREADS), "tbx-slots") as threads:
            stepped = {slot: threads.submit(self._advance_one, slot, actions[slot]) for slot in together}
            here = {slot: self._advance_one(slot, actions[slot]) for slot in actions if slot not in stepped}
            return {slot: here[slot] if slot in here else stepped[slot].result() for slot in actions}

    def _advance_one(self, slot: int, action: str | Turn) -> SlotOutcome:
        env = self.env(slot)
        num_before = len(env.transcript) + 1
        try:
            _, _, terminated, truncated, _ = env.step(action)
        except EnvironmentFault as fault:
            self._running[slot] = False
            return SlotOutcome((), True, Fault(fault.kind, str(fault)))
        self._running[slot] = not (terminated or truncated)
        return SlotOutcome(env.transcript[num_before:], terminated or truncated, None)

    def env(self, slot: int) -> ToolEnv:
        """The environment behind a slot.

        Raises:
            ActionError: nothing was started there.
        """
        env = self._envs[slot]
        if env is None:
            raise ActionError(f"slot {slot} is empty; start() an episode in it first.")
        return env

    def tools(self, slot: int) -> list[dict[str, Any]]:
        """The tools of the slot's task, in canonical order; new objects each time."""
        return self.env(slot).tools

    def episode(self, slot: int, attempt: int) -> Episode:
        """The record of the episode that has ended in `slot`.

        Raises:
            ActionError: it has not ended.
        """
        return self.env(slot).episode(attempt)

    def abandon(self, slot: int, attempt: int, fault: EnvironmentFault) -> Episode:
        """End the running episode of `slot` because its agent failed; returns its record, which is void."""
        self._running[slot] = False
        return self.env(slot).abandoned(attempt, fault)

    def close(self) -> None:
        """Close all environments; a second call does nothing."""
        for slot, env in enumerate(self._envs):
            if env is not None:
                env.close()
            self._envs[slot] = None
            self._running[slot] = False


class ToolVectorEnv(VectorEnv[tuple[str, ...], Sequence[str | Turn | None], np.ndarray]):
    """Several episodes as one Gymnasium vector environment: one task for all slots, or one for each.

    Autoreset is disabled, since the attempts of a group must not continue with another episode by themselves. Reset the
    slots that have ended with `reset(options={"reset_mask": mask})`, or pass None as a slot's action to leave it as
    it is. `terminated` and `truncated` are true once, in the step that ends the slot's episode, since wrappers that
    count episodes count these; in a slot that is left as it is both are false.

    A fault in one slot does not disturb the others. That slot is truncated, `info["fault"]` has `kind` and
    `message`, and its reward is NaN, since an infrastructure error is never a reward: drop the episode, or reset the
    slot. One that could not even start is in the infos of `reset`, and in no later step.

    Args:
        num_envs: number of slots; with `uids` it may be left out.
        uid: task id of all slots.
        uids: one task id for each slot, instead of `uid`.
        render_mode: as in `ToolEnv`.
        options: options of every episode; None is the defaults.
        given: single options of `ToolEnv` by name, which replace those of `options`.

    Raises:
        ActionError: neither `uid` nor `uids` is given, or their number is not `num_envs`.
        DomainError: no such task.
    """

    metadata: dict[str, Any] = {**ToolEnv.metadata, "autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012 (as above)

    def __init__(
        self,
        num_envs: int = 1,
        *,
        uid: str | None = None,
        uids: Sequence[str] | None = None,
        render_mode: str | None = None,
        options: EpisodeOptions | None = None,
        **given: Unpack[GivenOptions],
    ) -> None:
        self.envs: list[ToolEnv] = []  # Gymnasium closes what it deletes, half-made ones too
        if uids is None:
            if uid is None:
                raise ActionError("ToolVectorEnv got neither uid nor uids; name one task, or one for each slot.")
            uids = [uid] * num_envs
        elif isinstance(uids, str):
            raise ActionError(f"ToolVectorEnv got uids={uids!r}; give a list of task ids, or uid for one task.")
        elif num_envs not in (1, len(uids)):
            raise ActionError(f"ToolVectorEnv got {len(uids)} uids for num_envs={num_envs}; give one for each slot.")
        if not uids:
            raise ActionError("ToolVectorEnv got no slot; give num_envs=1 or more.")
        self.uids = tuple(uids)
        self.num_envs = len(self.uids)
        self.single_observation_space = AnyText()
        self.single_action_space = AnyText()
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.render_mode = render_mode
        self.envs = [ToolEnv(uid, render_mode=render_mode, options=options, **given) for uid in self.uids]
        self._ready = np.zeros(self.num_envs, bool)  # True where a step is possible

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as what it was made of, like `ToolEnv`."""
        return _made_again, (type(self), tuple(self.envs)), {"spec": self.spec}

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Start new episodes in all slots, or in those of `options["reset_mask"]` (observation "" elsewhere).

        Args:
            seed: one seed for each slot, or an int to which slot i adds i, or None.
            options: `reset_mask`, booleans of shape (num_envs,).
        """
        mask = np.asarray((options or {}).get("reset_mask", np.ones(self.num_envs, bool)), bool)
        seeds = _seed_of_each(seed, self.num_envs)
        if mask.shape != (self.num_envs,) or len(seeds) != self.num_envs:
            raise ActionError(
                f"reset() of {self.num_envs} slots got {len(seeds)} seeds and a mask of shape {mask.shape}; "
                f"give one of each for every slot."
            )
        observations = [""] * self.num_envs
        infos: dict[str, Any] = {}
        for slot in np.flatnonzero(mask).tolist():
            try:
                observations[slot], info = self.envs[slot].reset(seed=seeds[slot])
                self._ready[slot] = True
            except EnvironmentFault as fault:
                info = self._fault(slot, fault)
            infos = self._add_info(infos, info, slot)
        return tuple(observations), infos

    def step(
        self, actions: Sequence[str | Turn | None]
    ) -> tuple[tuple[str, ...], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One turn in each slot; None leaves a slot as it is, with observation "" and reward 0.0, and ends nothing.

        Raises:
            ActionError: a slot with an action has no running episode, or something is no action; then no slot was
                stepped.
        """
        if isinstance(actions, str | Mapping) or not isinstance(actions, Iterable):
            raise ActionError(f"step() got {shown(actions)}; give a list with one action for each slot.")
        actions = list(actions)
        if len(actions) != self.num_envs:
            raise ActionError(f"step() of {self.num_envs} slots got {len(actions)} actions; give one for each slot.")
        ended = [slot for slot, action in enumerate(actions) if action is not None and not self._ready[slot]]
        if ended:
            raise ActionError(
                f"step(): slots {ended} run no episode. Reset them with options={{'reset_mask': ...}}, or "
                f"give None as their action."
            )
        _refuse_others({slot: action for slot, action in enumerate(actions) if action is not None})
        observations = [""] * self.num_envs
        rewards = np.zeros(self.num_envs, np.float64)
        terminated, truncated = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        infos: dict[str, Any] = {}
        for slot, action in enumerate(actions):
            if action is None:
                continue
            env = self.envs[slot]
            try:
                observations[slot], rewards[slot], terminated[slot], truncated[slot], info = env.step(action)
                self._ready[slot] = not (terminated[slot] or truncated[slot])
            except EnvironmentFault as fault:
                rewards[slot], truncated[slot] = np.nan, True
                info = self._fault(slot, fault)
            infos = self._add_info(infos, info, slot)
        return tuple(observations), rewards, terminated, truncated, infos

    def _fault(self, slot: int, fault: EnvironmentFault) -> dict[str, Any]:
        self._ready[slot] = False
        return {
            "uid": self.uids[slot],
            "messages": [],
            "finish_reason": None,
            "fault": {"kind": fault.kind, "message": str(fault)},
        }

    def episode(self, slot: int, attempt: int) -> Episode:
        """The record of the episode that has ended in `slot`."""
        return self.envs[slot].episode(attempt)

    def render(self) -> tuple[str, ...] | None:
        """The transcript of each slot for `ansi`; None otherwise: `human` prints each message when it is said."""
        return tuple(transcript_text(env.transcript) for env in self.envs) if self.render_mode == "ansi" else None

    def close_extras(self, **kwargs: Any) -> None:
        for env in self.envs:
            env.close()


def _made_again(kind: type[ToolVectorEnv], envs: tuple[ToolEnv, ...]) -> ToolVectorEnv:
    made = kind(uids=[env.task.uid for env in envs], render_mode=envs[0].render_mode)
    made.envs = list(envs)  # each has brought its options
    return made


def _seed_of_each(seed: int | Sequence[int | None] | None, num_envs: int) -> list[int | None]:
    if isinstance(seed, Sequence | np.ndarray):
        return list(seed)
    return [None if seed is None else seed + slot for slot in range(num_envs)]
