"""ThinkingBox tasks as Gymnasium environments.

Importing the package registers one Gymnasium id per frozen task, and one per task of the datasets that `TBX_DATASETS`
names, and does nothing else: no task is built, and the database, the tool protocol and libraries of models are imported
when an environment is first made. The names in `__all__` are the public interface; each is imported when it is first
used.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

try:
    import fcntl  # noqa: F401  a lock on a run's folder
except ImportError as error:
    raise ImportError(
        "tbx runs on Linux and macOS: it locks folders and forks processes in ways that Windows does not have. Use its "
        "Subsystem for Linux there."
    ) from error

from tbx_envs import renamed
from tbx_envs.registration import register_built_in
from tbx_envs.version import __version__

if TYPE_CHECKING:
    from tbx_envs.agents import Agent, Attempt, Opening
    from tbx_envs.agents.endpoint import EndpointAgent
    from tbx_envs.agents.turns import play_turns
    from tbx_envs.chat.ledger import TokenLedger
    from tbx_envs.chat.template import ChatTemplate
    from tbx_envs.domains import Domain, Family, Topic, load_domain, register_domain
    from tbx_envs.endpoints.client import ChatEndpoint
    from tbx_envs.endpoints.config import EndpointConfig
    from tbx_envs.endpoints.costs import Prices
    from tbx_envs.env import ToolEnv, make
    from tbx_envs.episode import Episode
    from tbx_envs.errors import ConfigError, DomainError, EnvironmentFault, TbxError
    from tbx_envs.evaluation.run import run, summarize
    from tbx_envs.evaluation.task_lists import select_tasks
    from tbx_envs.messages import BadCall, Text, ToolCall, ToolResult, Turn
    from tbx_envs.registration import env_id
    from tbx_envs.runtime import EpisodeOptions
    from tbx_envs.sources import find_task
    from tbx_envs.task import ExpectedCall, Task, UserContext
    from tbx_envs.testing.domain_contract import check_domain
    from tbx_envs.thinkingbox.dataset import register_dataset
    from tbx_envs.tools.clock import WorldClock
    from tbx_envs.tools.tool import ToolContext, ToolRejection, tool
    from tbx_envs.vector import EpisodeSlots, ToolVectorEnv

__all__ = [
    "Agent",
    "Attempt",
    "BadCall",
    "ChatEndpoint",
    "ChatTemplate",
    "ConfigError",
    "Domain",
    "DomainError",
    "EndpointAgent",
    "EndpointConfig",
    "EnvironmentFault",
    "Episode",
    "EpisodeOptions",
    "EpisodeSlots",
    "ExpectedCall",
    "Family",
    "Opening",
    "Prices",
    "Task",
    "TbxError",
    "Text",
    "TokenLedger",
    "ToolCall",
    "ToolContext",
    "ToolEnv",
    "ToolRejection",
    "ToolResult",
    "ToolVectorEnv",
    "Topic",
    "Turn",
    "UserContext",
    "WorldClock",
    "__version__",
    "check_domain",
    "env_id",
    "find_task",
    "load_domain",
    "make",
    "play_turns",
    "register_dataset",
    "register_domain",
    "run",
    "select_tasks",
    "summarize",
    "tool",
]

_MODULES = {
    "tbx_envs.agents": ("Agent", "Attempt", "Opening"),
    "tbx_envs.agents.endpoint": ("EndpointAgent",),
    "tbx_envs.agents.turns": ("play_turns",),
    "tbx_envs.chat.ledger": ("TokenLedger",),
    "tbx_envs.chat.template": ("ChatTemplate",),
    "tbx_envs.domains": ("Domain", "Family", "Topic", "load_domain", "register_domain"),
    "tbx_envs.endpoints.client": ("ChatEndpoint",),
    "tbx_envs.endpoints.config": ("EndpointConfig",),
    "tbx_envs.endpoints.costs": ("Prices",),
    "tbx_envs.env": ("ToolEnv", "make"),
    "tbx_envs.episode": ("Episode",),
    "tbx_envs.errors": ("ConfigError", "DomainError", "EnvironmentFault", "TbxError"),
    "tbx_envs.evaluation.run": ("run", "summarize"),
    "tbx_envs.evaluation.task_lists": ("select_tasks",),
    "tbx_envs.messages": ("BadCall", "Text", "ToolCall", "ToolResult", "Turn"),
    "tbx_envs.registration": ("env_id",),
    "tbx_envs.runtime": ("EpisodeOptions",),
    "tbx_envs.sources": ("find_task",),
    "tbx_envs.task": ("ExpectedCall", "Task", "UserContext"),
    "tbx_envs.testing.domain_contract": ("check_domain",),
    "tbx_envs.thinkingbox.dataset": ("register_dataset",),
    "tbx_envs.tools.clock": ("WorldClock",),
    "tbx_envs.tools.tool": ("ToolContext", "ToolRejection", "tool"),
    "tbx_envs.vector": ("EpisodeSlots", "ToolVectorEnv"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

renamed.install()
register_built_in()
if os.environ.get("TBX_DATASETS") or os.environ.get("TBX_REGISTERED_DATASETS"):
    from tbx_envs.thinkingbox.dataset import register_from_environment

    register_from_environment()


if not TYPE_CHECKING:  # a type checker would take any name for an exported one

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
