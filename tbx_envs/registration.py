"""Ids of all known tasks in Gymnasium's registry.

`clinic/cancel_visit/007` is `ThinkingBox/clinic.cancel_visit.007-v0`. No task is built for it, no domain
imported: the uids stand in each domain's `tasks.lock`. A dataset's task `shop.py:test_a` is
`ThinkingBox/shop.py.test_a-v0`: Gymnasium reads a colon as the end of a module's name.
"""

from __future__ import annotations

import functools
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, registry

from tbx_envs.errors import DomainError, did_you_mean

if TYPE_CHECKING:
    from tbx_envs.env import ToolEnv

NAMESPACE = "ThinkingBox"
BUILT_IN = ("clinic",)


def env_id(uid: str) -> str:
    """The Gymnasium id of a task.

    >>> env_id("clinic/cancel_visit/007")
    'ThinkingBox/clinic.cancel_visit.007-v0'
    >>> env_id("shop.py:test_a")
    'ThinkingBox/shop.py.test_a-v0'
    """
    name = re.sub(r"[^\w.-]", "_", re.sub("[/:]", ".", uid))  # Gymnasium takes no other characters
    return f"{NAMESPACE}/{name}-v0"


def uid_of(id_or_uid: str) -> str:
    """The uid of a task, from its id or from the uid itself.

    >>> uid_of("ThinkingBox/clinic.cancel_visit.007-v0")
    'clinic/cancel_visit/007'
    >>> uid_of("ThinkingBox/shop.py.test_a-v0")
    'shop.py:test_a'
    """
    spec = registry.get(id_or_uid)
    if spec is not None and "uid" in spec.kwargs:
        return str(spec.kwargs["uid"])
    if ":" in id_or_uid:
        return id_or_uid
    name = id_or_uid.removeprefix(f"{NAMESPACE}/").removesuffix("-v0")
    of_dataset = re.fullmatch(r"(.+?\.(?:py|yaml))\.(.+)", name)
    return f"{of_dataset[1]}:{of_dataset[2]}" if of_dataset else name.replace(".", "/")


def register_uids(uids: tuple[str, ...]) -> None:
    """Write one id per uid straight into the registry; `gymnasium.register` would scan all ids for each.

    The environment checks the order of calls and passes `check_env` for every id (tests), so Gymnasium's
    wrappers for both are left out: `gymnasium.make` gives the environment itself.
    """
    for uid in uids:
        name = env_id(uid)
        registry[name] = EnvSpec(
            id=name,
            entry_point="tbx_envs.env:ToolEnv",
            vector_entry_point="tbx_envs.vector:ToolVectorEnv",
            reward_threshold=1.0,
            order_enforce=False,
            disable_env_checker=True,
            kwargs={"uid": uid},
        )


def unregister_uids(uids: tuple[str, ...]) -> None:
    """Take the ids of these uids out of the registry."""
    for uid in uids:
        registry.pop(env_id(uid), None)


@functools.cache
def frozen_uids(domain: str) -> tuple[str, ...]:
    """Uids of a built-in domain's frozen tasks, in the order of its `tasks.lock`."""
    lock = files("tbx_envs").joinpath("domains", domain, "tasks.lock")
    if not lock.is_file():
        return ()
    return tuple(dict.fromkeys(re.findall(rf"\b{domain}/[a-z_]+/[0-9]{{3,}}\b", lock.read_text(encoding="utf-8"))))


def register_built_in() -> None:
    """Register every frozen task of every built-in domain."""
    for domain in BUILT_IN:
        register_uids(frozen_uids(domain))


def make(id_or_uid: str, **options: Any) -> ToolEnv:
    """`gymnasium.make` for a uid or an id; an unknown one is answered with the nearest names.

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
