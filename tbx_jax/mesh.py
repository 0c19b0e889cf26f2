"""Where arrays live: a mesh of devices, and rules that map logical axes to mesh axes.

The rules are data (`conf/mesh/*.yaml`), the logical axes are `tbx_jax.shapes.LOGICAL_AXES`. Nothing here communicates:
arrays are placed, and the compiler derives the collectives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tbx_envs.errors import ConfigError, did_you_mean
from tbx_jax.config import MeshConfig
from tbx_jax.shapes import LOGICAL_AXES, parse_axes


def build_mesh(config: MeshConfig) -> Mesh:
    """The devices of this run as a mesh with the axes that `config` names.

    A mesh smaller than the machine takes the first devices, so that one configuration runs on any machine it fits.

    Raises:
        ConfigError: more devices than the machine has, or rules with unknown logical axes or mesh axes; one message
            lists all problems.
    """
    devices = jax.devices()
    wanted = math.prod(config.axes.values())
    problems = [
        f"rule {name}: unknown logical axis; known: {' '.join(LOGICAL_AXES)}"
        for name in config.rules
        if name not in LOGICAL_AXES
    ]
    problems += [
        f"rule {name}: {axis}: no such mesh axis.{did_you_mean(axis, config.axes)} There is: {', '.join(config.axes)}"
        for name, axis in config.rules.items()
        if axis not in config.axes
    ]
    if wanted > len(devices):
        axes = " x ".join(f"{name}={size}" for name, size in config.axes.items())
        problems.append(
            f"axes {axes} need {wanted} devices, there are {len(devices)} ({devices[0].platform}); "
            f"choose a smaller mesh (mesh=one), or give more devices"
        )
    if problems:
        raise ConfigError("mesh cannot be built: " + "; ".join(problems))
    grid = np.array(devices[:wanted]).reshape(tuple(config.axes.values()))
    return Mesh(grid, tuple(config.axes))


def partition_spec(axes: str, rules: Mapping[str, str]) -> PartitionSpec:
    """How an array is split: the mesh axis of each logical axis, None for an axis without a rule.

    >>> partition_spec("d n h", {"b": "data", "d": "fsdp", "n": "tensor"})
    P('fsdp', 'tensor', None)

    Raises:
        ValueError: an unknown logical axis, or two axes of one array on the same mesh axis.
    """
    names = parse_axes(axes)
    taken: dict[str, str] = {}
    for name in names:
        axis = rules.get(name)
        if axis is None:
            continue
        if axis in taken:
            raise ValueError(
                f"axes {axes!r} put {taken[axis]} and {name} on mesh axis {axis!r}; "
                f"an array can be split over a mesh axis once"
            )
        taken[axis] = name
    return PartitionSpec(*(rules.get(name) for name in names))


def sharding_for(axes: str, mesh: Mesh, rules: Mapping[str, str]) -> NamedSharding:
    """The placement on `mesh` of an array with these axes."""
    return NamedSharding(mesh, partition_spec(axes, rules))


def shard_tree(tree: Any, axes_tree: Any, mesh: Mesh, rules: Mapping[str, str]) -> Any:
    """`tree` (jax or numpy arrays) with every array placed on `mesh` by the rules; see `shardings_of`."""
    return jax.device_put(tree, shardings_of(tree, axes_tree, mesh, rules))


def shardings_of(tree: Any, axes_tree: Any, mesh: Mesh, rules: Mapping[str, str]) -> Any:
    """Where the rules place each array of `tree` on `mesh`.

    Args:
        tree: arrays, or their shapes.
        axes_tree: the same structure with the axis string (`"l d n h"`) of each array.
        mesh: mesh from `build_mesh`.
        rules: logical axis -> mesh axis.

    Raises:
        ConfigError: dimensions that the mesh axis does not divide, or an array that the rules split twice over one
            mesh axis; one message lists all problems.
    """
    problems: list[str] = []

    def placement(path: tuple[Any, ...], leaf: Any, axes: str) -> NamedSharding | None:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        try:
            sharding = sharding_for(axes, mesh, rules)
        except ValueError as error:
            problems.append(f"{name}: {error}")
            return None
        if len(sharding.spec) != np.ndim(leaf):
            problems.append(f"{name}: axes {axes!r} for an array of shape {np.shape(leaf)}")
            return None
        for logical, size, axis in zip(axes.split(), np.shape(leaf), sharding.spec, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                problems.append(f"{name}: {logical} is {size}, mesh axis {axis} has {mesh.shape[axis]} devices")
        return sharding

    shardings = jax.tree_util.tree_map_with_path(placement, tree, axes_tree)
    if problems:
        raise ConfigError(
            f"{len(problems)} array(s) cannot be split by the rules {dict(rules)}: {'; '.join(problems)}. "
            f"Change mesh.axes so that they divide the arrays, or remove the logical axis from mesh.rules."
        )
    return shardings
