"""What tbx raises.

    TbxError
      ConfigError        a run cannot start as configured
      DomainError        a domain, its tasks or its expected calls are wrong: our fault
      ActionError        the caller misused an environment (a step after the end, a step before reset)
      EnvironmentFault   something of ours broke while an episode ran: the episode is void, never scored
        ToolFault          a tool raised what it does not document, or did not answer in time
        UserFault          the simulated user could not answer
        CheckFault         the check itself crashed
        PolicyFault        the policy model's server or sampler failed
      EndpointError      a model server did not answer; whoever asked says whose fault that is
        EndpointRefused    it will answer nothing until its settings are changed: key, address or model
        ContextExceeded    what was asked does not fit into the model's context
      CheckpointError    weights or state on disk do not fit the model
      ShapeError         arrays that cannot go together

A *refusal* is not in this tree on purpose: a tool that says no (`tbx_envs.tools.tool.ToolRejection`) answers the
model. A message says what was asked, what is there, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TbxError(Exception):
    """Base of everything tbx raises on purpose."""


class ConfigError(TbxError):
    """A run cannot start as configured."""


class DomainError(TbxError):
    """A domain, one of its tasks or the expected calls of a task are wrong."""


class ActionError(TbxError):
    """The caller used an environment out of order."""


class EnvironmentFault(TbxError):
    """Something of ours broke while an episode ran; the episode is void and must never be scored."""

    kind = "environment"


class ToolFault(EnvironmentFault):
    """A tool raised what it does not document, or did not answer within its time limit."""

    kind = "tool"


class UserFault(EnvironmentFault):
    """The simulated user could not answer."""

    kind = "user"


class CheckFault(EnvironmentFault):
    """The check crashed before it could say yes or no."""

    kind = "check"


class PolicyFault(EnvironmentFault):
    """The policy could not produce an action (a dead model server, a broken sampler)."""

    kind = "policy"


class EndpointError(TbxError):
    """A model server did not give a usable answer. Agents, users and judges turn it into the fault of theirs."""


class EndpointRefused(EndpointError):
    """A model server that will answer nothing until its settings are changed: the key, the address, the model."""


class ContextExceeded(EndpointError):
    """The conversation does not fit into the context of a model server's model."""


class CheckpointError(TbxError):
    """Weights or state on disk do not fit the model."""


class ShapeError(TbxError):
    """Arrays that cannot go together."""


def did_you_mean(asked: str, known: Iterable[str], *, limit: int = 3) -> str:
    """`" Did you mean 'a', 'b'?"` for the names nearest to `asked`, or an empty string when none is near."""
    near = difflib.get_close_matches(asked, list(known), n=limit, cutoff=0.6)
    return f" Did you mean {', '.join(repr(name) for name in near)}?" if near else ""
