"""What a sampler will need on each device, reckoned before anything is allocated.

Parameters and cache are exact: sizes of their arrays as the mesh splits them. What a program needs while it runs is
only estimated, by the largest it holds: the logits and the noise of one step, and on an accelerator the keys and values
that it takes out of the cache to read them, at most all of them.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from tbx_envs.errors import ConfigError
from tbx_jax.config import SamplingConfig
from tbx_jax.models import Model, Params, abstract, parameter_letters
from tbx_jax.models.cache import cache_letters, empty_cache

_MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one device.

    Attributes:
        parameters: of the policy, in the type in which they are sampled with.
        slots: rows of the cache, over all devices.
        capacity: tokens that a row has room for.
        cache: of all slots, this device's part.
        working: logits and noise of a step, and what is taken out of the cache.
        available: what the device has for all of it; None when it does not say.
    """

    parameters: int
    slots: int
    capacity: int
    cache: int
    working: int
    available: int | None

    @property
    def per_slot(self) -> float:
        return (self.cache + self.working) / self.slots

    @property
    def total(self) -> int:
        return self.parameters + self.cache + self.working

    @property
    def slots_that_fit(self) -> int | None:
        """None when the device does not say what it has."""
        if self.available is None:
            return None
        return max(0, math.floor((self.available - self.parameters) / self.per_slot))

    def __str__(self) -> str:
        known = "" if self.available is None else f" of {_mib(self.available)}"
        return (
            f"sampler memory on each device: parameters {_mib(self.parameters)}, cache {self.slots} slots x "
            f"{self.capacity} tokens {_mib(self.cache)} ({_mib(self.cache / self.slots)} a slot), a step "
            f"{_mib(self.working)}: {_mib(self.total)}{known}"
        )

    def refuse_too_much(self) -> None:
        """Raises ConfigError when the device has less, with the number of slots that would fit."""
        fits = self.slots_that_fit
        if fits is not None and fits < self.slots:
            advice = (
                f"{fits} slots would fit: set sampling.slots={fits}, lower sampling.max_episode_tokens, or choose "
                f"sampling.cache_dtype=bfloat16"
                if fits
                else "not even one slot would fit: choose a larger device, a mesh that splits the parameters, or a "
                "smaller model"
            )
            raise ConfigError(f"{self}. That is too much; {advice}.")


def plan_memory(
    model: Model,
    sampling: SamplingConfig,
    capacity: int,
    *,
    mesh: Mesh | None,
    rules: Mapping[str, str],
    params: Params | None = None,
) -> MemoryPlan:
    """The plan for these slots on this mesh (None: one device).

    Args:
        params: the parameters, or others of their types; None is float32.
    """
    parameters = abstract(model.config, model.vocabulary)[1] if params is None else params
    cache = jax.eval_shape(lambda: empty_cache(model.config, sampling.slots, capacity, sampling.cache_dtype))
    letters = cache_letters(model.config)
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    taken_out = 0 if device.platform == "cpu" else _bytes_on_device(cache[:2], letters[:2], mesh, rules)
    return MemoryPlan(
        parameters=_bytes_on_device(parameters, parameter_letters(model), mesh, rules),
        slots=sampling.slots,
        capacity=capacity,
        cache=_bytes_on_device(cache, letters, mesh, rules),
        working=2 * 4 * sampling.slots * model.vocabulary + taken_out,
        available=device_memory(device),
    )


def device_memory(device: Any) -> int | None:
    """Bytes that the device says it has for programs; for the CPU, the memory of the machine."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if device.platform != "cpu":
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _bytes_on_device(tree: Any, letters: Any, mesh: Mesh | None, rules: Mapping[str, str]) -> int:
    """The largest part that any device holds of these arrays."""

    def part(leaf: Any, axes: str) -> int:
        ways = [mesh.shape.get(rules.get(letter, ""), 1) if mesh else 1 for letter in axes.split()]
        return math.prod(-(-size // way) for size, way in zip(leaf.shape, ways, strict=True)) * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(part, tree, letters)))


def _mib(size: int | float) -> str:
    return f"{size / _MIB:.1f} MiB" if size < 1024 * _MIB else f"{size / (1024 * _MIB):.1f} GiB"
