"""Which tasks an agent can attempt: one that cannot act on a task would be scored as if it had done nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tbx_envs.errors import ConfigError
from tbx_envs.sources import find_task
from tbx_envs.task import AnyTask, Task

_NAMED = 5  # tasks that a message names


def no_solution(task: AnyTask) -> bool:
    """True where `oracle` has nothing to do and doing nothing is not right: the task names no expected calls."""
    return not task.expected_calls and task.idle_passes is None


def no_script(task: AnyTask) -> bool:
    """True where `scripted` has no script: the task is a dataset's."""
    return not isinstance(task, Task)


def refuse_unsuited(uids: Iterable[str], is_unsuited: Callable[[AnyTask], bool], what: str) -> None:
    """Refuse tasks that an agent cannot attempt.

    Args:
        uids: task ids: all of a run before it starts, so that it is refused with all of them.
        is_unsuited: True for a task that it cannot attempt.
        what: beginning of the message: which agent, and what it lacks.

    Raises:
        ConfigError: there are such tasks; the message counts them and names the first.
    """
    asked = list(dict.fromkeys(uids))
    unsuited = [uid for uid in asked if is_unsuited(find_task(uid))]
    if unsuited:
        named = ", ".join(unsuited[:_NAMED]) + (", ..." if len(unsuited) > _NAMED else "")
        raise ConfigError(
            f"{what} in {len(unsuited)} of {len(asked)} tasks: {named}. Leave these out (tasks=, a file of uids), or "
            f"choose another policy."
        )
