"""Merges a test's init into its scenario's world state.

Mappings are merged key by key, lists are appended, and any other value of the test replaces the scenario's, nulls
included. The merged value shares its parts with both, none of which is ever changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merged(base: Any, addition: Any) -> Any:
    """The addition on top of the base.

    >>> merged({"a": [1], "b": {"c": 1}}, {"a": [2], "b": {"d": None}})
    {'a': [1, 2], 'b': {'c': 1, 'd': None}}
    """
    if isinstance(base, Mapping) and isinstance(addition, Mapping):
        both = {key: merged(base[key], addition[key]) for key in base if key in addition}
        return {**base, **addition, **both}
    if isinstance(base, list) and isinstance(addition, list):
        return [*base, *addition]
    return addition


def merged_init(world_state: Mapping[str, Any], init: Mapping[str, Any]) -> dict[str, Any]:
    """server -> configuration: the scenario's servers in their order, then those that only the test has.

    When the scenario has no configuration for a server (null, or empty), the test's is taken as it is.
    """
    of_both = {server: merged(world_state[server], init[server]) for server in init if world_state.get(server)}
    return {**world_state, **init, **of_both}
