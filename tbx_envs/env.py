"""ToolEnv: a task as a Gymnasium environment. Episodes of all kinds of tasks go through its `reset` and `step`.

    env = gymnasium.make("ThinkingBox/clinic.cancel_visit.000-v0")
    observation, info = env.reset(seed=0)          # the user's first message; rules and tools are in info
    while not (terminated or truncated):
        observation, reward, terminated, truncated, info = env.step(text)

A step takes one turn of the agent. Calls are executed and their results are the observation; a message goes to the user
and the answer is the observation; a message that ends with `<DONE>` ends the episode. At every end the check compares
the final state with the expected one: reward 1.0 or 0.0, and 0.0 before the end.

After an infrastructure error `reset` or `step` raises `EnvironmentFault` and the episode is void: it has no reward.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Mapping
from typing import Any, Unpack

import gymnasium
from gymnasium.envs.registration import registry

from tbx_envs.chat.interpretation import bounded, interpret, schemas_of
from tbx_envs.doors import clean_text, shown, text_problem, words_of
from tbx_envs.episode import TERMINATED, CheckReport, Episode, Fault, FinishReason, entered_report
from tbx_envs.errors import (
    ActionError,
    CheckFault,
    ConfigError,
    DomainError,
    EnvironmentFault,
    TbxError,
    ToolFault,
    UserFault,
    did_you_mean,
)
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
from tbx_envs.registration import NAMESPACE, env_id, uid_of
from tbx_envs.rendering import transcript_text
from tbx_envs.runtime import EpisodeOptions, GivenOptions, Runtime
from tbx_envs.sources import source_of
from tbx_envs.spaces import AnyText
from tbx_envs.task import AnyTask
from tbx_envs.time_limit import within
from tbx_envs.tools.given_turn import action_problem, entered, next_call_number, numbered
from tbx_envs.tools.session import Answer
from tbx_envs.users import USER_TIMEOUT_S, User

Step = tuple[str, float, bool, bool, dict[str, Any]]

# Status of a call that is not `ok` -> its count in `Episode.usage`, a column of files that others read.
_COUNTED_AS = {"rejected": "refused_calls", "invalid": "invalid_calls"}


class ToolEnv(gymnasium.Env[str, str | Turn]):
    """One task.

    Args:
        uid: task id.
        render_mode: None, `ansi` (`render()` returns the transcript) or `human` (messages are printed as they
            arrive).
        options: options of every episode; None is the defaults.
        given: single options by name, which replace those of `options`: `chat_format`, `user`, `judge`, ...

    Raises:
        DomainError: no such task.
        ConfigError: no such chat format.
        ActionError: no such option.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "human"], "render_fps": 1}  # noqa: RUF012 (as in Gymnasium)

    def __init__(
        self,
        uid: str,
        *,
        render_mode: str | None = None,
        options: EpisodeOptions | None = None,
        **given: Unpack[GivenOptions],
    ) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ActionError(f"render_mode {render_mode!r} is not known; use None, 'ansi' or 'human'.")
        self._options = EpisodeOptions.of(options, given)
        interpret("", self._options.chat_format)  # an unknown format fails here, not at the first step
        self.source = source_of(uid)
        self.task = self.source.task(uid)
        self.render_mode = render_mode
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self._messages: list[Message] = []
        self._runtime: Runtime | None = None
        self._schemas: Mapping[str, Mapping[str, Any]] | None = None  # tool -> schema of its arguments, once needed
        self._tools: list[dict[str, Any]] | None = None  # of the last episode, where the source does not know them
        self._source_knows_tools = self.source.tools(self.task) is not None
        self._clear()

    def _clear(self) -> None:
        """Forget the last episode. Its runtime must have been closed or discarded before."""
        self._messages = []
        self._seed = -1
        self._running = False
        self._finish_reason: FinishReason | None = None
        self._report: CheckReport | None = None
        self._fault: Fault | None = None
        self._evidence: Mapping[str, Any] | None = None
        self._seconds = 0.0
        self._num_calls = 0
        self._num_actions = 0  # counted as `Limits.agent_turns` counts
        self._usage = {
            "agent_turns": 0,
            "user_turns": 0,
            "tool_calls": 0,
            "refused_calls": 0,
            "invalid_calls": 0,
            "unreadable_calls": 0,
            "lenient_calls": 0,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as what it was made of, for other processes; an episode in progress stays here."""
        return _made_again, (type(self), self.task.uid, self.render_mode, self._options), {"spec": self.spec}

    # --- the state of an episode, read only -----------------------------------------------------------------

    @property
    def transcript(self) -> Transcript:
        """All messages so far, the rules first."""
        return tuple(self._messages)

    @property
    def waits(self) -> bool:
        """True when a step mostly waits for other processes, so that several episodes are best stepped concurrently."""
        return self.source.waits

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools as OpenAI-function style dictionaries, in canonical order; new objects each time.

        Raises:
            ActionError: a dataset's task before its first `reset`: only its servers know their tools.
        """
        if self._source_knows_tools and (known := self.source.tools(self.task)) is not None:
            return known
        if self._tools is None:
            raise ActionError(f"tools of {self.task.uid}: its servers have not been started yet; call reset() first.")
        return copy.deepcopy(self._tools)

    def abandoned(self, attempt: int, fault: EnvironmentFault) -> Episode:
        """End a running episode because its agent failed; returns its record, which is void."""
        self._void(fault, time.perf_counter())
        return self.episode(attempt)

    def episode(self, attempt: int) -> Episode:
        """The record of the episode that has ended; void when a fault ended it.

        Raises:
            ActionError: no episode has been started, or it is still running.
        """
        if self._running or (self._finish_reason is None and self._fault is None):
            state = "is still running" if self._running else "has not started"
            raise ActionError(f"episode() of {self.task.uid}: the episode {state}; step until it ends.")
        return Episode(
            uid=self.task.uid,
            attempt=attempt,
            seed=self._seed,
            transcript=self.transcript,
            finish_reason=self._finish_reason,
            report=self._report,
            reward=None if self._report is None else self._report.reward,
            fault=self._fault,
            seconds={"environment": self._seconds},
            usage=dict(self._usage),
            evidence=self._evidence,
        )

    # --- reset and step -------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start a new episode; one in progress is discarded.

        Args:
            seed: seed of everything random in the episode (the user's wording); None draws one from `np_random`.
            options: ignored; Gymnasium's signature has it.

        Returns:
            The user's first message; `info` with `uid`, `messages` (the system's and the user's, as chat
            dictionaries), `tools` and `finish_reason` (None).

        Raises:
            EnvironmentFault: infrastructure error; the episode is void.
        """
        began = time.perf_counter()
        super().reset(seed=seed)
        self._close_runtime()
        self._clear()
        self._seed = int(self.np_random.integers(2**63 - 1)) if seed is None else int(seed)
        try:
            self._runtime = self.source.start(self.task, self._options, self._seed)
        except EnvironmentFault as fault:
            self._void(fault, began)
            raise
        self._running = True
        tools = self._runtime.tools
        if not self._source_knows_tools:
            self._tools, self._schemas = copy.deepcopy(tools), None
        self._say(*entered(self._runtime.opening))
        self._num_calls = next_call_number(self._messages)
        info = {
            "uid": self.task.uid,
            "messages": to_chat(self._messages),
            "tools": tools,
            "finish_reason": None,
        }
        self._seconds += time.perf_counter() - began
        return self._messages[-1].text, info

    def step(self, action: str | Turn) -> Step:
        """Take one turn of the agent.

        Args:
            action: raw text in the environment's chat format, or a parsed turn.

        Returns:
            The text of the new messages; the reward (0.0 before the end); `terminated` (the task's own end)
            and `truncated` (a limit); `info` with `uid`, `messages` (the new ones, without the agent's own),
            `finish_reason` (None before the end) and, at the end, `check`.

        Raises:
            ActionError: no episode is running, or the action is neither text nor a turn.
            EnvironmentFault: infrastructure error; the episode is void.
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
            reward = self._report.reward
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
        """The action as a turn in which the environment has numbered the calls."""
        if not self._running:
            if self._fault is not None:
                state = f"is void ({self._fault.message})"
            else:
                state = f"has ended ({self._finish_reason})" if self._finish_reason else "has not started"
            raise ActionError(f"step() of {self.task.uid}: the episode {state}; call reset() first.")
        if (problem := action_problem(action)) is not None:
            raise ActionError(f"step() of {self.task.uid}: the action is {problem}.")
        if isinstance(action, Turn):
            turn = numbered(bounded(action, self._num_calls), self._num_calls)
        else:
            if self._schemas is None:
                self._schemas = schemas_of(self.tools)
            text = clean_text(str(action))
            turn = interpret(text, self._options.chat_format, first_call=self._num_calls, schemas=self._schemas)
        self._num_calls += len(turn.calls)
        self._usage["lenient_calls"] += turn.num_lenient
        return turn

    def _answer(self, turn: Turn) -> FinishReason | None:
        """Append what answers the turn; returns the reason when the episode ends with it."""
        limit = self.task.limits.agent_turns
        if limit == 0:
            return FinishReason.AGENT_LIMIT
        if turn.truncated:
            return FinishReason.TRUNCATED
        if turn.is_done:
            return FinishReason.DONE
        self._num_actions += bool(turn.text)
        if self._calls_that_end(turn):
            return FinishReason.END_TURN_TOOL
        if turn.calls and self._num_actions < limit:  # otherwise the words were the last action allowed
            self._num_actions += 1
            self._answer_calls(turn)
        if self._num_actions >= limit:
            return FinishReason.AGENT_LIMIT
        return None if turn.calls else self._ask_user()

    def _calls_that_end(self, turn: Turn) -> bool:
        """True when a call of the turn ends the conversation: then none of its calls is executed."""
        assert self._runtime is not None
        ending = [call for call in turn.calls if isinstance(call, ToolCall) and call.name in self._runtime.ends_turn]
        for call in ending:
            self._usage["tool_calls"] += 1
            self._say(ToolResult(call.id, call.name, ""))
        return bool(ending)

    def _answer_calls(self, turn: Turn) -> None:
        """Execute the calls in order, then append the direct responses of their tools."""
        direct = []
        for call in turn.calls:
            result, words = self._call(call)
            self._say(result)
            direct += [] if words is None else [Text("assistant", words)]
        self._num_actions += len(direct)
        if direct:
            self._say(*direct)

    def _call(self, call: ToolCall | BadCall) -> tuple[ToolResult, str | None]:
        """The result of a call, and the tool's direct response to the user if it has one."""
        assert self._runtime is not None
        self._usage["tool_calls"] += 1
        if isinstance(call, BadCall):
            self._usage["invalid_calls"] += 1
            self._usage["unreadable_calls"] += 1
            return ToolResult(call.id, "", f"{call.problem}", "invalid"), None
        try:
            answer = self._runtime.call(call.name, call.arguments)
        except TbxError:
            raise
        except (Exception, SystemExit) as error:  # the episode boundary: any other error of a session voids the episode
            raise ToolFault(_unexpected(self.task, f"the call of {call.name}", error)) from error
        if (problem := _answer_problem(answer)) is not None:
            raise ToolFault(f"task {self.task.uid}: {call.name} answered with {problem}. The episode is void.")
        if answer.status != "ok":
            self._usage[_COUNTED_AS[answer.status]] += 1
        direct = None if answer.direct is None else clean_text(answer.direct)
        return ToolResult(call.id, call.name, clean_text(answer.text), answer.status), direct

    def _ask_user(self) -> FinishReason | None:
        assert self._runtime is not None
        user, may_end = self._runtime.user, self._runtime.user_may_end
        if user is None:
            return FinishReason.NO_USER
        if self._usage["user_turns"] >= self._runtime.user_turns:
            return FinishReason.USER_LIMIT
        self._usage["user_turns"] += 1
        try:
            text = within(self._user_timeout_s(user), functools.partial(user.answer, self.transcript))
        except TimeoutError as error:
            raise UserFault(
                f"task {self.task.uid}: the simulated user did not answer ({error}). The episode is void. Make the "
                f"user faster, or raise user_timeout_s."
            ) from error
        except (UserFault, ConfigError):  # a wrong key or address concerns the whole run, not one episode
            raise
        except (Exception, SystemExit) as error:  # the episode boundary: any other error of a user voids the episode
            raise UserFault(_unexpected(self.task, "the simulated user", error)) from error
        if (problem := text_problem(text)) is not None:
            raise UserFault(f"task {self.task.uid}: the simulated user answered with {problem}. The episode is void.")
        if not text.strip():
            raise UserFault(f"task {self.task.uid}: the simulated user said nothing. The episode is void.")
        text = clean_text(text)
        self._say(Text("user", text))
        return FinishReason.USER_DONE if may_end and text.rstrip().endswith(DONE_MARK) else None

    def _user_timeout_s(self, user: User) -> float | None:
        limit = self._options.user_timeout_s
        return getattr(user, "timeout_s", USER_TIMEOUT_S) if limit is None else limit

    def _end(self, reason: FinishReason) -> None:
        """Run the check and end the episode."""
        assert self._runtime is not None
        self._finish_reason = reason
        self._conclude_user()
        try:
            self._evidence = self._runtime.evidence(self.transcript)
            returned = self._runtime.check(self.transcript, self._evidence)
        except (EnvironmentFault, ConfigError):
            raise
        except (Exception, SystemExit) as error:  # the episode boundary: a check that crashes has no verdict
            raise CheckFault(_unexpected(self.task, "the check", error)) from error
        try:
            self._report = entered_report(returned)
        except ValueError as error:
            raise CheckFault(f"task {self.task.uid}: the check returned {error}. That is no verdict.") from None
        self._running = False
        self._close_runtime()

    def _conclude_user(self) -> None:
        """Let the user judge its own part, if it does that."""
        assert self._runtime is not None
        conclude = getattr(self._runtime.user, "conclude", None)
        if conclude is None:
            return
        try:
            conclude()
        except (UserFault, ConfigError):
            raise
        except (Exception, SystemExit) as error:  # the episode boundary, as above
            raise UserFault(_unexpected(self.task, "the simulated user", error)) from error

    # --- around an episode ----------------------------------------------------------------------------------

    def _say(self, *messages: Message) -> None:
        self._messages += messages
        if self.render_mode == "human":
            print(transcript_text(messages))

    def _void(self, fault: EnvironmentFault, began: float) -> None:
        """Void the episode: it has no reward, and its runtime, whose state is unknown, is discarded."""
        self._running = False
        self._report = None
        self._fault = Fault(fault.kind, str(fault))
        self._seconds += time.perf_counter() - began
        if self._runtime is not None:
            self._usage |= self._runtime.usage
            self._runtime.discard(fault.kind)
            self._runtime = None

    def _close_runtime(self) -> None:
        if self._runtime is not None:
            self._usage |= self._runtime.usage
            self._runtime.close()
            self._runtime = None

    def render(self) -> str | None:
        """The transcript for `ansi`; None otherwise: `human` prints each message when it is said."""
        return transcript_text(self._messages) if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Release everything; a second call does nothing. `reset` may still be called afterwards."""
        if self._running:
            self._clear()
        self._close_runtime()


def _made_again(kind: type[ToolEnv], uid: str, render_mode: str | None, options: EpisodeOptions) -> ToolEnv:
    return kind(uid, render_mode=render_mode, options=options)


def make(id_or_uid: str, **options: Any) -> ToolEnv:
    """`gymnasium.make` for a uid or an id; the error for an unknown one names the nearest.

    Args:
        id_or_uid: Gymnasium id or uid of a task.
        options: arguments of `ToolEnv`.

    Raises:
        DomainError: no such task is registered.
    """
    name = env_id(uid_of(id_or_uid))
    if name not in registry:
        known = [other for other in registry if other.startswith(f"{NAMESPACE}/")]
        raise DomainError(
            f"unknown task '{id_or_uid}'.{did_you_mean(name, known)} {len(known)} tasks are registered; "
            f"`tbx tasks` lists them."
        )
    env: Any = gymnasium.make(name, **options)
    return env


def _answer_problem(answer: Any) -> str | None:
    """Why something is no answer to a call, as the rest of a sentence, or None."""
    if not isinstance(answer, Answer) or answer.status not in ("ok", *_COUNTED_AS):
        return f"{shown(answer)}, which is no Answer"
    return text_problem(answer.text) or (None if answer.direct is None else text_problem(answer.direct))


def _report_dict(report: CheckReport) -> dict[str, Any]:
    return {"passed": report.passed, "check": report.check, "differences": list(report.differences)}


def _unexpected(task: AnyTask, what: str, error: BaseException) -> str:
    return f"task {task.uid}: {what} raised {words_of(error)}. The episode is void; fix the cause."
