"""ToolEnv: a task as a Gymnasium environment, and the only `reset` and `step` there are.

    env = gymnasium.make("ThinkingBox/clinic.cancel_visit.000-v0")
    observation, info = env.reset(seed=0)          # the user's first message; policy and tools are in info
    while not (terminated or truncated):
        observation, reward, terminated, truncated, info = env.step(text)

A step takes what the policy wrote. Calls are run, and their results observed; a message goes to the user,
whose answer is observed; a message that ends with `<DONE>` ends the episode. At every end the check compares
the world with the expected one: reward 1.0 or 0.0, and 0.0 before.

When something of ours breaks, `reset` or `step` raises `EnvironmentFault` and the episode is void: it has no
reward.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import gymnasium

from tbx_envs.arguments import transport_problem
from tbx_envs.backends.in_process import InProcessSession
from tbx_envs.backends.listing import domain_function_dicts
from tbx_envs.chat.interpretation import interpret
from tbx_envs.checks.state import check_state
from tbx_envs.domains import Domain, load_domain
from tbx_envs.episode import TERMINATED, CheckReport, Episode, Fault, FinishReason
from tbx_envs.errors import ActionError, CheckFault, EnvironmentFault, UserFault
from tbx_envs.messages import (
    DONE_MARK,
    BadCall,
    Message,
    Text,
    ToolCall,
    ToolResult,
    Transcript,
    Turn,
    to_chat,
)
from tbx_envs.rendering import transcript_text
from tbx_envs.spaces import AnyText
from tbx_envs.task import Task
from tbx_envs.users import User
from tbx_envs.users.scripted import ScriptedUser
from tbx_envs.worlds import World, WorldTemplate, lend_world, return_world, template_for

Step = tuple[str, float, bool, bool, dict[str, Any]]


class ToolEnv(gymnasium.Env[str, str | Turn]):
    """One task.

    Args:
        uid: of the task.
        chat_format: how calls stand in the policy's text (`tbx_envs.chat.interpretation`).
        render_mode: None, `ansi` (`render()` returns the transcript) or `human` (messages are printed as they
            come).
        user: makes the simulated user of each episode from (task, domain, seed); the scripted one by default.
        tool_timeout_s: how long one call may take before the episode is void.

    Raises:
        DomainError: no such task.
        ConfigError: no such chat format.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "human"], "render_fps": 1}

    def __init__(
        self,
        uid: str,
        *,
        chat_format: str = "hermes",
        render_mode: str | None = None,
        user: Callable[[Task, Domain, int], User] | None = None,
        tool_timeout_s: float = 10.0,
    ) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ActionError(f"render_mode {render_mode!r} is not known; use None, 'ansi' or 'human'.")
        interpret("", chat_format)  # an unknown format fails here, not in the first step
        self.task: Task = load_domain(uid.partition("/")[0]).task(uid)
        self.domain: Domain = load_domain(self.task.domain)
        self.render_mode = render_mode
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self._chat_format = chat_format
        self._make_user = user or ScriptedUser
        self._tool_timeout_s = tool_timeout_s
        self._messages: list[Message] = []
        self._world: World | None = None
        self._clear()

    def _clear(self) -> None:
        """Forget the last episode; its world must have been given back."""
        self._messages = []
        self._seed = -1
        self._running = False
        self._finish_reason: FinishReason | None = None
        self._report: CheckReport | None = None
        self._fault: Fault | None = None
        self._seconds = 0.0
        self._num_calls = 0
        self._usage = {
            "agent_turns": 0,
            "user_turns": 0,
            "tool_calls": 0,
            "refused_calls": 0,
            "invalid_calls": 0,
        }

    # --- what can be seen of an episode ---------------------------------------------------------------------

    @property
    def transcript(self) -> Transcript:
        """Everything said so far, the policy of the domain first."""
        return tuple(self._messages)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools as OpenAI-function style dictionaries, in canonical order; new objects each time."""
        return domain_function_dicts(self.domain.tools)

    def episode(self, attempt: int) -> Episode:
        """The record of the episode that has ended, void when a fault ended it.

        Raises:
            ActionError: there is none yet, or it still runs.
        """
        if self._running or (self._finish_reason is None and self._fault is None):
            state = "still runs" if self._running else "has not begun"
            raise ActionError(f"episode() of {self.task.uid}: the episode {state}; step until it ends.")
        return Episode(
            uid=self.task.uid,
            attempt=attempt,
            seed=self._seed,
            transcript=self.transcript,
            finish_reason=self._finish_reason,
            report=self._report,
            reward=None if self._report is None else float(self._report.passed),
            fault=self._fault,
            seconds={"environment": self._seconds},
            usage=dict(self._usage),
        )

    # --- reset and step -------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin a new episode, whatever became of the last one.

        Args:
            seed: of everything random in the episode (the user's wording); drawn from `np_random` when None.
            options: none are known.

        Returns:
            The user's first message; `info` with `uid`, `messages` (the system's and the user's, as chat
            dictionaries), `tools` and `finish_reason` (None).

        Raises:
            EnvironmentFault: something of ours broke; the episode is void.
        """
        began = time.perf_counter()
        super().reset(seed=seed)
        self._give_world_back()
        self._clear()
        self._seed = int(self.np_random.integers(2**63 - 1)) if seed is None else int(seed)
        try:
            template = template_for(self.task, self.domain)
            self._template: WorldTemplate = template
            self._world = lend_world(template)
            self._session = InProcessSession.open(self.domain, self._world, self._tool_timeout_s)
            self._user = self._new_user()
        except EnvironmentFault as fault:
            self._void(fault, began)
            raise
        self._running = True
        self._say(Text("system", self.domain.policy), Text("user", self.task.query))
        info = {
            "uid": self.task.uid,
            "messages": to_chat(self._messages),
            "tools": self.tools,
            "finish_reason": None,
        }
        self._seconds += time.perf_counter() - began
        return self.task.query, info

    def step(self, action: str | Turn) -> Step:
        """Take what the policy wrote: raw text in the environment's chat format, or a turn read already.

        Returns:
            The text of the new messages; the reward (0.0 before the end); `terminated` (the task's own end)
            and `truncated` (a limit); `info` with `uid`, `messages` (the new ones, without the policy's own),
            `finish_reason` (None before the end) and, at the end, `check`.

        Raises:
            ActionError: no episode runs, or the action is neither text nor a turn.
            EnvironmentFault: something of ours broke; the episode is void.
        """
        began = time.perf_counter()
        turn = self._turn(action)
        num_before = len(self._messages) + 1
        self._usage["agent_turns"] += 1
        self._say(turn)
        try:
            reason = self._answer(turn)
            if reason is not None:
                self._end(reason)
        except EnvironmentFault as fault:
            self._void(fault, began)
            raise
        new = self._messages[num_before:]
        info: dict[str, Any] = {"uid": self.task.uid, "messages": to_chat(new), "finish_reason": None}
        reward = 0.0
        if reason is not None and self._report is not None:
            reward = float(self._report.passed)
            info["finish_reason"] = str(reason)
            info["check"] = _report_dict(self._report)
        self._seconds += time.perf_counter() - began
        observation = "\n".join(message.text for message in new)
        return (
            observation,
            reward,
            reason in TERMINATED,
            reason is not None and reason not in TERMINATED,
            info,
        )

    def _turn(self, action: str | Turn) -> Turn:
        """The action as a turn whose calls carry the environment's own ids."""
        if not self._running:
            if self._fault is not None:
                state = f"is void ({self._fault.message})"
            else:
                state = f"has ended ({self._finish_reason})" if self._finish_reason else "has not begun"
            raise ActionError(f"step() of {self.task.uid}: the episode {state}; call reset() first.")
        if isinstance(action, str):
            turn = interpret(str(action), self._chat_format, first_call=self._num_calls)
        elif isinstance(action, Turn):
            turn = _with_ids(action, self._num_calls)
        else:
            raise ActionError(
                f"step() of {self.task.uid}: the action is a {type(action).__name__}; give text or a Turn."
            )
        self._num_calls += len(turn.calls)
        return turn

    def _answer(self, turn: Turn) -> FinishReason | None:
        """Say what answers the turn; the reason when the episode ends with it."""
        reason = None
        if turn.truncated:
            return FinishReason.TRUNCATED
        if turn.is_done:
            return FinishReason.DONE
        if turn.calls:
            for call in turn.calls:
                self._say(self._call(call))
        else:
            reason = self._ask_user()
        if reason is None and self._usage["agent_turns"] >= self.task.limits.agent_turns:
            return FinishReason.AGENT_LIMIT
        return reason

    def _call(self, call: ToolCall | BadCall) -> ToolResult:
        self._usage["tool_calls"] += 1
        if isinstance(call, BadCall):
            self._usage["invalid_calls"] += 1
            return ToolResult(call.id, "", f"{call.problem}", "invalid")
        answer = self._session.call(call.name, call.arguments)
        if answer.status != "ok":
            self._usage[f"{answer.status}_calls"] += 1
        return ToolResult(call.id, call.name, answer.text, answer.status)

    def _ask_user(self) -> FinishReason | None:
        if self._usage["user_turns"] >= self.task.limits.user_turns:
            return FinishReason.USER_LIMIT
        self._usage["user_turns"] += 1
        try:
            text = self._user.answer(self.transcript)
        except UserFault:
            raise
        except Exception as error:  # the episode boundary: whatever a user raises voids the episode
            raise UserFault(_unexpected(self.task, "the simulated user", error)) from error
        if not isinstance(text, str):
            raise UserFault(f"task {self.task.uid}: the simulated user answered with {text!r}; it must be text.")
        self._say(Text("user", text))
        return FinishReason.USER_DONE if text.rstrip().endswith(DONE_MARK) else None

    def _new_user(self) -> User:
        try:
            return self._make_user(self.task, self.domain, self._seed)
        except UserFault:
            raise
        except Exception as error:  # the episode boundary, as above
            raise UserFault(_unexpected(self.task, "making the simulated user", error)) from error

    def _end(self, reason: FinishReason) -> None:
        """Run the check and end the episode."""
        assert self._world is not None
        try:
            self._report = check_state(self._world, self._template)
        except CheckFault:
            raise
        except Exception as error:  # the episode boundary: a check that crashes says neither yes nor no
            raise CheckFault(_unexpected(self.task, "the check", error)) from error
        self._finish_reason = reason
        self._running = False
        self._give_world_back()

    # --- around an episode ----------------------------------------------------------------------------------

    def _say(self, *messages: Message) -> None:
        self._messages += messages
        if self.render_mode == "human":
            print(transcript_text(messages))

    def _void(self, fault: EnvironmentFault, began: float) -> None:
        """The episode is void: no reward, and its world, in an unknown state, is never used again."""
        self._running = False
        self._report = None
        self._fault = Fault(fault.kind, str(fault))
        self._seconds += time.perf_counter() - began
        if self._world is not None and fault.kind != "tool":  # an abandoned tool may still hold the database
            self._world.close()
        self._world = None

    def _give_world_back(self) -> None:
        if self._world is not None:
            return_world(self._world)
            self._world = None

    def render(self) -> str | None:
        """The transcript for `ansi`; None otherwise, since `human` prints as it goes."""
        return transcript_text(self._messages) if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Give the world back; a second call does nothing. `reset` may still be called afterwards."""
        if self._running:
            self._clear()
        self._give_world_back()


def _with_ids(turn: Turn, first: int) -> Turn:
    """A turn that came already read, its calls numbered by the environment and sure to have a JSON form."""
    calls: list[ToolCall | BadCall] = []
    for number, call in enumerate(turn.calls, start=first):
        call_id = f"call_{number}"
        if isinstance(call, BadCall):
            calls.append(BadCall(call_id, call.raw, call.problem))
        elif _is_json(call.arguments):
            calls.append(ToolCall(call_id, call.name, call.arguments))
        else:
            problem = transport_problem(call.name, call.arguments) or f"{call.name} was not called."
            calls.append(BadCall(call_id, f"{call.name}({call.arguments!r})", problem))
    return Turn(turn.text, tuple(calls), turn.reasoning, turn.truncated)


def _is_json(arguments: Any) -> bool:
    try:
        return isinstance(arguments, Mapping) and bool(json.dumps(dict(arguments)))
    except (TypeError, ValueError, RecursionError):
        return False


def _report_dict(report: CheckReport) -> dict[str, Any]:
    return {"passed": report.passed, "check": report.check, "differences": list(report.differences)}


def _unexpected(task: Task, what: str, error: Exception) -> str:
    return f"task {task.uid}: {what} raised {type(error).__name__}: {error}. The episode is void; fix it."
