"""The exceptions of tbx.

    TbxError
      ConfigError        a program cannot start as configured
      DomainError        a domain, its tasks or its expected calls are wrong
      ActionError        the caller misused an environment (a step after the end, a step before reset)
      EnvironmentFault   infrastructure error during an episode: the episode is void, never scored
        ToolFault          a tool raised an undocumented exception, or did not answer in time
        UserFault          the simulated user could not answer
        CheckFault         the check itself crashed
        PolicyFault        the agent could not act: its model's server or sampler failed
        TaskFault          the task itself cannot be run; another attempt would not help, other tasks go on
      EndpointError      a model server gave no usable answer; the caller turns it into a fault of its own
        EndpointRefused    it will answer no request until its settings are changed: key, address or model
        ContextExceeded    the conversation does not fit into the model's context
      CheckpointError    weights or state on disk do not fit the model, or are damaged
      StorageError       a file cannot be written: a full disk, a missing permission
      ShapeError         arrays whose shapes do not fit together

Three words, used in this sense throughout. A *fault* is an infrastructure error: it says nothing about the agent. An
episode that a fault ended is *void*: it has no reward, and no measure counts it. A *rejected call* is neither: a tool
that says no (`tbx_envs.tools.tool.ToolRejection`) answers the model, and the episode continues.

A message says what was asked, what is there, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TbxError(Exception):
    """Base of everything tbx raises on purpose."""


class ConfigError(TbxError):
    """A program cannot start as configured."""


class DomainError(TbxError):
    """A domain, one of its tasks or the expected calls of a task are wrong."""


class ActionError(TbxError):
    """The caller used an environment out of order."""


class EnvironmentFault(TbxError):
    """Infrastructure error during an episode; the episode is void and must never be scored."""

    kind = "environment"


class ToolFault(EnvironmentFault):
    """A tool raised an undocumented exception, or did not answer within its time limit."""

    kind = "tool"


class UserFault(EnvironmentFault):
    """The simulated user could not answer."""

    kind = "user"


class CheckFault(EnvironmentFault):
    """The check crashed before it reached a verdict."""

    kind = "check"


class PolicyFault(EnvironmentFault):
    """The agent could not produce an action (a dead model server, a broken sampler)."""

    kind = "policy"


class TaskFault(EnvironmentFault):
    """The task itself cannot be run: it asks for a tool or a server that is not there, its texts cannot be filled in.

    Where many tasks are run, a `DomainError` at the start of an episode becomes this, and the task is set aside.
    """

    kind = "task"


class EndpointError(TbxError):
    """A model server gave no usable answer. Agents, users and judges turn it into their own kind of fault."""


class EndpointRefused(EndpointError):
    """A model server will answer no request until its settings are changed: the key, the address, the model."""


class ContextExceeded(EndpointError):
    """The conversation does not fit into the context of the model that is served."""


class CheckpointError(TbxError):
    """Weights or state on disk do not fit the model, or are damaged."""


class StorageError(TbxError):
    """A file cannot be written. What was there before is unchanged."""


class ShapeError(TbxError):
    """Arrays whose shapes do not fit together."""


def did_you_mean(asked: str, known: Iterable[str], *, limit: int = 3) -> str:
    """`" Did you mean 'a', 'b'?"` for the names nearest to `asked`, or an empty string when none is near."""
    # Of very different lengths none is near, and comparing a text of megabytes would take long.
    alike = [name for name in known if len(asked) <= 3 * len(name)]
    near = difflib.get_close_matches(asked, alike, n=limit, cutoff=0.6) if alike else []
    return f" Did you mean {', '.join(repr(name) for name in near)}?" if near else ""
