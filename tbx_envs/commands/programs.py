"""The subcommands of `tbx` that need no JAX."""

from __future__ import annotations

from tbx_envs.commands.command import Command, HydraCommand

TASKS = Command("list tasks, show one, validate a domain", "tbx_envs.commands.tasks:tasks")
PLAY = Command("be the agent of one task, in the terminal", "tbx_envs.commands.tasks:play_task")
EVALUATE = HydraCommand(
    "attempt tasks repeatedly with a policy; one row of JSON per attempt",
    "evaluate",
    "tbx_envs.commands.config:EvaluateConfig",
    "tbx_envs.commands.evaluate:run_evaluation",
)
POOL = HydraCommand(
    "select the tasks worth training on, and freeze them",
    "pool",
    "tbx_envs.commands.config:PoolConfig",
    "tbx_envs.commands.evaluate:run_pool",
)
REPORT = Command("the measures of an evaluation run", "tbx_envs.commands.results:report_folder")
COMPARE = Command("two evaluation runs side by side", "tbx_envs.commands.results:compare")
SHOW = Command("transcripts of an evaluation run", "tbx_envs.commands.results:show")
COMPLETION = Command("what a shell completes after tbx", "tbx_envs.commands.completion:main")
SERVE = Command("answer the original's HTTP session API, on our server pool", "tbx_envs.thinkingbox.api.serve:main")
