"""The memory that a sampler needs on each device, computed before anything is allocated.

Sizes of parameters and cache are exact: those of their arrays as the mesh splits them. The working memory of a program
is an estimate from its largest arrays: logits and noise of one step, and on an accelerator the keys and values copied
out of the cache, at most all of them.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from tbx_envs.errors import ConfigError
from tbx_jax.config import SamplingConfig
from tbx_jax.models import Model, Params, abstract, parameter_axes
from tbx_jax.models.cache import cache_axes, empty_cache

_MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one device.

    Attributes:
        parameters: parameters of the policy, in the type used for sampling.
        slots: number of cache rows, over all devices.
        capacity: number of tokens in a row.
        cache: this device's part of the cache.
        working: logits and noise of a step, and the copied part of the cache.
        available: memory of the device; None when it is unknown.
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
        """Number of cache rows for which the device has memory; None when its memory is unknown."""
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
        """Raises ConfigError when the device has less memory, with the number of slots that would fit."""
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
    """The plan for `sampling.slots` cache rows.

    Args:
        model: model of the policy.
        sampling: number of cache rows, and type of the cache.
        capacity: number of tokens in a row.
        mesh: mesh of devices; None is one device.
        rules: logical axis -> mesh axis.
        params: parameters, or any of the same types; None is float32.
    """
    parameters = abstract(model.config, model.vocabulary)[1] if params is None else params
    cache = jax.eval_shape(lambda: empty_cache(model.config, sampling.slots, capacity, sampling.cache_dtype))
    axes = cache_axes(model.config)
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    copied = 0 if device.platform == "cpu" else _bytes_on_device(cache[:2], axes[:2], mesh, rules)
    return MemoryPlan(
        parameters=_bytes_on_device(parameters, parameter_axes(model), mesh, rules),
        slots=sampling.slots,
        capacity=capacity,
        cache=_bytes_on_device(cache, axes, mesh, rules),
        working=2 * 4 * sampling.slots * model.vocabulary + copied,
        available=device_memory(device),
    )


@runtime_checkable
class Device(Protocol):
    """The part of `jax.Device` that reports its memory."""

    @property
    def platform(self) -> str: ...
    def memory_stats(self) -> Mapping[str, int] | None: ...


def device_memory(device: Device) -> int | None:
    """Bytes that the device reports for programs; for the CPU, the memory of the machine."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if device.platform != "cpu":
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _bytes_on_device(tree: PyTree, axes: PyTree[str], mesh: Mesh | None, rules: Mapping[str, str]) -> int:
    """The size of the largest part of these arrays on any device."""

    def part(leaf: jax.Array | jax.ShapeDtypeStruct, names: str) -> int:
        ways = [mesh.shape.get(rules.get(name, ""), 1) if mesh else 1 for name in names.split()]
        return math.prod(-(-size // way) for size, way in zip(leaf.shape, ways, strict=True)) * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(part, tree, axes)))


def _mib(size: int | float) -> str:
    return f"{size / _MIB:.1f} MiB" if size < 1024 * _MIB else f"{size / (1024 * _MIB):.1f} GiB"
