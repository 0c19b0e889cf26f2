"""The sampler: many episodes written together, each in a slot whose cache lives as long as the episode.

    sampler.begin(0, prompt, ("clinic/x/001", 0, 0))     # a fresh episode; asks for its first turn
    while sampler.busy:
        for turn in sampler.advance(params):             # turns that ended
            sampler.extend(turn.slot, answer, ("clinic/x/001", 0, 1))   # or sampler.free(turn.slot)

`advance` first takes in the given tokens of every waiting slot (chunked prefill, slots of like need together), then
runs up to `decode_steps` decode steps in one dispatch. Nothing is computed twice over an episode's turns.

The invariant: of an episode's n tokens, given and sampled, the cache holds the first n - 1 or fewer. The last one is
fed by the decode step that samples the next, so every sampled token comes out of the same code, and an end-of-turn
token enters the cache with the tokens of the next turn.

The host knows each slot's tokens; only keys and values live on the device. A token depends on (seed, turn key, its
index in the turn) and on the episode's tokens, not on its slot or its neighbours (other shapes may round otherwise in
the last bit). Nothing here looks at a clock. A slot's cache belongs to the parameters that filled it: change them
between episodes only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tbx_envs.errors import ActionError, ConfigError
from tbx_jax.config import SamplingConfig
from tbx_jax.models import Model, Params


@dataclasses.dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn that ended.

    Attributes:
        slot: where.
        tokens: ids as sampled, the end-of-turn token included when there is one.
        logps: log pi of each, in nats at the sampling temperature.
        stopped: True when the policy wrote an end-of-turn token; False when a token limit cut the turn off.
    """

    slot: int
    tokens: list[int]
    logps: list[float]
    stopped: bool


class Sampler:
    def __init__(
        self,
        model: Model,
        chat_end_ids: frozenset[int],
        sampling: SamplingConfig,
        seed: int,
        *,
        mesh: Mesh | None = None,
        rules: Mapping[str, str] | None = None,
    ): ...

    @property
    def busy(self) -> bool: ...

    def begin(self, slot: int, tokens: Sequence[int], turn_key: tuple[str | int, ...]) -> None: ...

    def extend(self, slot: int, tokens: Sequence[int], turn_key: tuple[str | int, ...]) -> None: ...

    def free(self, slot: int) -> None: ...

    def advance(self, params: Params) -> list[SampledTurn]: ...
