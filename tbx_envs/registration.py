"""Gymnasium ids of all known tasks.

`clinic/cancel_visit/007` is `ThinkingBox/clinic.cancel_visit.007-v0`. Registering builds no task and imports no domain:
the uids are read from each domain's `tasks.lock`. A dataset's task `shop.py:test_a` is `ThinkingBox/shop.py.test_a-v0`,
since Gymnasium reads a colon as the end of a module's name.
"""

from __future__ import annotations

import functools
import re
from importlib.resources import files

from gymnasium.envs.registration import EnvSpec, registry

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
    """The uid of a task, given its Gymnasium id or the uid itself.

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
    """Write one id per uid directly into the registry, since `gymnasium.register` would scan all ids for each.

    The environment itself checks the order of calls, and tests prove that it passes `check_env`, so Gymnasium's
    wrappers for both are left out: `gymnasium.make` returns the environment unwrapped.
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
    """Remove the ids of these uids from the registry."""
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
