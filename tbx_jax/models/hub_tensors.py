"""The mapping from tensors of a published checkpoint to parts of our parameters: names, shapes, orientation.

A checkpoint has a tensor for each layer, projections as (outputs, inputs) with flat axes; our parameters stack the
layers and have an axis for heads. Each `Place` is used in both directions, so a tensor is written back as it was read.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tbx_jax.config import ModelConfig
from tbx_jax.models import Params

# Prefix of the language model's names in composite checkpoints, instead of `model.`.
COMPOSITE_PREFIX = "model.language_model."
PREFIX = "model."
TIED = "lm_head.weight"


class Stored(enum.Enum):
    """How a checkpoint stores a part of a parameter, for `Place.stored_shape` and the two conversions."""

    SAME = "as it is"
    FLAT = "all axes as one"
    TAPS = "an axis of length one before the last"
    ONE_INPUT = "(outputs, inputs), the first axis is inputs"
    TWO_INPUTS = "(outputs, inputs), the first two axes are inputs"


_BLOCK = {
    "attention_norm": ("input_layernorm.weight", Stored.SAME),
    "query": ("self_attn.q_proj.weight", Stored.ONE_INPUT),
    "key": ("self_attn.k_proj.weight", Stored.ONE_INPUT),
    "value": ("self_attn.v_proj.weight", Stored.ONE_INPUT),
    "query_bias": ("self_attn.q_proj.bias", Stored.FLAT),
    "key_bias": ("self_attn.k_proj.bias", Stored.FLAT),
    "value_bias": ("self_attn.v_proj.bias", Stored.FLAT),
    "out": ("self_attn.o_proj.weight", Stored.TWO_INPUTS),
    "query_norm": ("self_attn.q_norm.weight", Stored.SAME),
    "key_norm": ("self_attn.k_norm.weight", Stored.SAME),
    "mlp_norm": ("post_attention_layernorm.weight", Stored.SAME),
    "gate": ("mlp.gate_proj.weight", Stored.ONE_INPUT),
    "up": ("mlp.up_proj.weight", Stored.ONE_INPUT),
    "down": ("mlp.down_proj.weight", Stored.ONE_INPUT),
}
_DELTA = {
    "mixer_norm": ("input_layernorm.weight", Stored.SAME),
    "mixed": ("linear_attn.in_proj_qkv.weight", Stored.ONE_INPUT),
    "taps": ("linear_attn.conv1d.weight", Stored.TAPS),
    "read_gate": ("linear_attn.in_proj_z.weight", Stored.ONE_INPUT),
    "write": ("linear_attn.in_proj_b.weight", Stored.ONE_INPUT),
    "decay": ("linear_attn.in_proj_a.weight", Stored.ONE_INPUT),
    "decay_rate": ("linear_attn.A_log", Stored.SAME),
    "decay_bias": ("linear_attn.dt_bias", Stored.SAME),
    "read_norm": ("linear_attn.norm.weight", Stored.SAME),
    "out": ("linear_attn.out_proj.weight", Stored.TWO_INPUTS),
    **{name: _BLOCK[name] for name in ("mlp_norm", "gate", "up", "down")},
}
_TOP = {
    "embedding": ("embed_tokens.weight", Stored.SAME),
    "token_shift": ("token_shift.weight", Stored.SAME),
    "norm": ("norm.weight", Stored.SAME),
    "unembedding": (TIED, Stored.SAME),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """The part of the parameters that a tensor of a checkpoint holds.

    Attributes:
        path: path of the parameter.
        index: index along its layer axes; () without layer axes.
        natural: shape of that part in the parameter.
        stored: format of the part in the checkpoint.
    """

    path: tuple[str, ...]
    index: tuple[int, ...]
    natural: tuple[int, ...]
    stored: Stored

    @property
    def stored_shape(self) -> tuple[int, ...]:
        match self.stored:
            case Stored.FLAT:
                return (math.prod(self.natural),)
            case Stored.TAPS:
                return (*self.natural[:-1], 1, self.natural[-1])
            case Stored.ONE_INPUT | Stored.TWO_INPUTS:
                inputs = 1 if self.stored is Stored.ONE_INPUT else 2
                return (math.prod(self.natural[inputs:]), math.prod(self.natural[:inputs]))
        return self.natural

    def to_natural(self, tensor: np.ndarray) -> np.ndarray:
        """The part of the parameter, as a view of the checkpoint's tensor."""
        if self.stored in (Stored.ONE_INPUT, Stored.TWO_INPUTS):
            tensor = tensor.T
        return tensor.reshape(self.natural)

    def to_stored(self, part: np.ndarray) -> np.ndarray:
        """The checkpoint's tensor."""
        if self.stored in (Stored.ONE_INPUT, Stored.TWO_INPUTS):
            return part.reshape(self.stored_shape[::-1]).T
        return part.reshape(self.stored_shape)


def places_of(config: ModelConfig, shapes: Params, prefix: str = PREFIX) -> dict[str, Place]:
    """Name of the tensor -> place, for every tensor of parameters with these shapes."""
    places = {}
    for path, leaf in flat(shapes).items():
        name, stored = _described(path)
        num_axes = 0 if path[0] != "layers" else 2 if "delta" in path else 1
        shape = tuple(leaf.shape)
        for index in itertools.product(*(range(size) for size in shape[:num_axes])):
            full = name if name == TIED else prefix + name.format(_layer(config, path, index))
            places[full] = Place(path, index, shape[num_axes:], stored)
    return places


def _described(path: tuple[str, ...]) -> tuple[str, Stored]:
    if path[0] != "layers":
        return _TOP[path[0]]
    name, stored = (_DELTA if "delta" in path else _BLOCK)[path[-1]]
    return "layers.{}." + name, stored


def _layer(config: ModelConfig, path: tuple[str, ...], index: tuple[int, ...]) -> int | None:
    """The layer's number in the checkpoint."""
    if config.hybrid is None or not index:
        return index[0] if index else None
    period = config.hybrid.delta_layers + 1
    return index[0] * period + (index[1] if "delta" in path else period - 1)


def flat(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Nested dictionaries as one dictionary with paths as keys."""
    if not isinstance(tree, Mapping):
        return {path: tree}
    return {key: leaf for name, branch in tree.items() for key, leaf in flat(branch, (*path, name)).items()}


def nested(leaves: Mapping[tuple[str, ...], Any]) -> Params:
    """The inverse of `flat`."""
    tree: Params = {}
    for path, leaf in leaves.items():
        branch = tree
        for name in path[:-1]:
            branch = branch.setdefault(name, {})
        branch[path[-1]] = leaf
    return tree
